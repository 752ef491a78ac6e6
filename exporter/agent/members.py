"""Which processes belong to a job, decided over one snapshot of /proc.

A process belongs to the job if it is below a member; or, once its parent is gone, if it is in a
process group or session that a member leads or led; or if it is in a cgroup that is the job's own;
or if the engine has seen it there. In every case it must have the job's uid and cgroup, or those to
which a member has changed since it became one, must not be older than the job, and must not be
below the root of another job. What a launcher starts or leads,
such as a notebook server or a terminal's shell below the job, is another job's, also once the
launcher is gone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.exporter.agent.guards import in_cgroup, is_dedicated
from gpuwarden.exporter.cgroups import PlatformKind, platform_of
from gpuwarden.exporter.processes import (
    Launchers,
    Process,
    children_by_parent,
    job_root,
    parse_proc_job_id,
    start_time,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gpuwarden.agent_api import ProcessRef

START_TOLERANCE_SECONDS = 1.0
"""Start times are compared so: the node's boot time moves with its wall clock."""

_REAPERS = frozenset({"systemd", "init", "containerd-shim", "conmon", "tini", "dumb-init"})
"""Who may have taken over a process whose parent is gone."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What the members of a job have in common.

    Attributes:
        uid: of all members.
        cgroup: of all members, or above theirs.
        since_ticks: no member is older.
        dedicated: whether everything in the cgroup belongs to the job.
        launchers: what starts jobs on this node.
    """

    uid: int
    cgroup: str
    since_ticks: int
    dedicated: bool
    launchers: Launchers

    @classmethod
    def of(cls, root: Process, *, dedicated: bool, launchers: Launchers) -> Scope:
        """The scope of a job by its root."""
        return cls(root.uid, root.cgroup, root.start_ticks, dedicated, launchers)

    def fits(self, process: Process) -> bool:
        """Whether a process may belong to the job at all."""
        if process.pid <= 2 or process.start_ticks < self.since_ticks:
            return False
        if self.dedicated:
            return in_cgroup(process, self.cgroup)
        return process.uid == self.uid and process.cgroup == self.cgroup


def find(
    processes: Mapping[int, Process],
    known: Collection[tuple[int, int]],
    scope: Scope,
    *,
    seen: Collection[ProcessRef] = (),
    booted: float | None = None,
) -> tuple[Process, ...]:
    """Find the living members of a job.

    Args:
        processes: all processes, by pid.
        known: (pid, start ticks) of members, dead ones included: what they led still counts. Dead
            launchers must be left out, for nobody can tell any more that they were some.
        scope: what members have in common.
        seen: processes that the engine saw in the job.
        booted: Unix time of boot, needed for entries of `seen` without start ticks.

    Returns:
        Members, the known ones first, parents before their children.
    """
    search = _Search(processes, scope, dict(known))
    seen_by_pid = {reference.pid: reference for reference in seen}
    for pid, ticks in known:
        process = processes.get(pid)
        if process is not None and process.start_ticks == ticks:
            search.take(process)
    # Each round can only add, and what it adds may lead further groups.
    while search.extend(seen_by_pid, booted):
        pass
    return tuple(process for process in search.found.values() if not process.ended)


class _Search:
    """Members found so far, and how to find more."""

    def __init__(
        self, processes: Mapping[int, Process], scope: Scope, leaders: dict[int, int]
    ) -> None:
        self.found: dict[int, Process] = {}
        # Owner and cgroup of each member as they are now: one that changed them has taken its job
        # along, and what it starts there is the job's.
        self._homes: set[tuple[int, str]] = set()
        self._processes = processes
        self._children = children_by_parent(processes)
        self._scope = scope
        self._leaders = leaders

    def take(self, process: Process) -> None:
        """Add a member and what is below it."""
        waiting = [process]
        while waiting:
            member = waiting.pop()
            if member.pid in self.found:
                continue
            self.found[member.pid] = member
            self._homes.add((member.uid, member.cgroup))
            if self._scope.launchers.includes(member):
                self._leaders.pop(member.pid, None)
                continue
            self._leaders[member.pid] = member.start_ticks
            for pid in reversed(self._children.get(member.pid, [])):
                child = self._processes[pid]
                # A child is never older than its parent: that one would have taken over the pid.
                if self._fits(child) and child.start_ticks >= member.start_ticks:
                    waiting.append(child)

    def _fits(self, process: Process) -> bool:
        return self._scope.fits(process) or (
            process.pid > 2
            and process.start_ticks >= self._scope.since_ticks
            and (process.uid, process.cgroup) in self._homes
        )

    def extend(self, seen: Mapping[int, ProcessRef], booted: float | None) -> bool:
        """Add what is not below a member; says whether there was any."""
        before = len(self.found)
        for process in self._processes.values():
            if process.pid in self.found or not self._fits(process):
                continue
            if (self._scope.dedicated and self._scope.fits(process)) or (
                self._is_claimed(process, seen, booted)
                and is_loose(self._processes, process, self._scope, self.found)
            ):
                self.take(process)
        return len(self.found) > before

    def _is_claimed(
        self, process: Process, seen: Mapping[int, ProcessRef], booted: float | None
    ) -> bool:
        if self._scope.launchers.includes(process):
            return False
        reference = seen.get(process.pid)
        return (
            self._is_led(process.pgid)
            or self._is_led(process.session)
            or (reference is not None and matches(reference, process, booted))
        )

    def _is_led(self, leader: int) -> bool:
        """Whether a group or session is led by a member, or was and has no other leader now."""
        if leader not in self._leaders:
            return False
        now = self._processes.get(leader)
        return now is None or now.start_ticks == self._leaders[leader]


def of_job(
    processes: Mapping[int, Process],
    job_id: str,
    *,
    boot: str,
    booted: float,
    launchers: Launchers,
    seen: Collection[ProcessRef] = (),
) -> tuple[Process, ...]:
    """The living processes of any job, to look at: who may be ended is decided elsewhere.

    Args:
        processes: all processes, by pid.
        job_id: of a process tree, of a pod, or of Slurm.
        boot: this boot's id.
        booted: Unix time of boot.
        launchers: what starts jobs on this node.
        seen: processes that the engine saw in the job; all that is known of a task of an array.

    Returns:
        Parents before their children as far as they are known; empty where there is none.
    """
    parsed = parse_proc_job_id(job_id)
    if parsed is not None:
        name, pid, start_ticks = parsed
        if boot[: len(name)] != name:
            return ()
        root = processes.get(pid)
        # One that has ended and was not waited for is in no cgroup of its job any more.
        if root is None or root.start_ticks != start_ticks or root.ended:
            left = orphans(
                processes, seen, launchers=launchers, since_ticks=start_ticks, booted=booted
            )
            return tuple(
                process for process in left if platform_of(process.cgroup).kind is PlatformKind.NONE
            )
        dedicated = is_dedicated(processes, root, launchers=launchers)
        scope = Scope.of(root, dedicated=dedicated, launchers=launchers)
        return find(processes, [root.identity], scope, seen=seen, booted=booted)
    references = {reference.pid: reference for reference in seen}
    found = []
    for process in processes.values():
        platform, reference = platform_of(process.cgroup), references.get(process.pid)
        known = reference is not None and matches(reference, process, booted)
        if process.ended or platform.kind is PlatformKind.NONE:
            continue
        # The id of an array's task is not the one in its name: only the engine knows it.
        named = {f"pod-{platform.id}", f"slurm {platform.id}"}
        if _short(job_id) in named or (known and job_id.startswith(f"{platform.kind}-")):
            found.append(process)
    return tuple(sorted(found, key=lambda process: process.start_ticks))


_SLURM_JOB = re.compile(r"slurm-.+-(?P<id>[0-9]+)-[0-9]+")


def _short(job_id: str) -> str:
    """A job's name without what no cgroup tells: Slurm's cluster and restart."""
    match = _SLURM_JOB.fullmatch(job_id)
    return job_id if match is None else f"slurm {match['id']}"


def carried(
    processes: Mapping[int, Process], found: Mapping[int, Process], launchers: Launchers
) -> tuple[Process, Process] | None:
    """A launcher among the members and a process that it started for another job, or None.

    Args:
        processes: all processes, by pid.
        found: the members, by pid.
        launchers: what starts jobs on this node.
    """
    for process in processes.values():
        parent = found.get(process.ppid)
        if parent is None or process.pid in found or process.ended:
            continue
        if process.start_ticks >= parent.start_ticks and launchers.includes(parent):
            return parent, process
    return None


def is_loose(
    processes: Mapping[int, Process],
    process: Process,
    scope: Scope,
    found: Mapping[int, Process],
) -> bool:
    """Whether a process is below a member, or below nobody since its parent is gone."""
    root = job_root(processes, process.pid, launchers=scope.launchers)
    if root.pid in found:
        return True
    parent = processes.get(root.ppid)
    return parent is None or parent.pid == 1 or parent.comm in _REAPERS


def matches(reference: ProcessRef, process: Process, booted: float | None) -> bool:
    """Whether a process with the pid that the engine saw is the one it saw: by its start."""
    if reference.start_ticks is not None:
        return reference.start_ticks == process.start_ticks
    if reference.start_time is None or booted is None:
        return False
    began = start_time(process, booted=booted)
    return abs(began - reference.start_time) <= START_TOLERANCE_SECONDS


def orphans(
    processes: Mapping[int, Process],
    seen: Iterable[ProcessRef],
    *,
    launchers: Launchers,
    since_ticks: int,
    booted: float,
) -> tuple[Process, ...]:
    """Processes that the engine saw in a job whose root is gone, and that belong to nobody else.

    Args:
        processes: all processes, by pid.
        seen: processes that the engine saw in the job.
        launchers: what starts jobs on this node.
        since_ticks: start of the root that is gone; none of its children is older.
        booted: Unix time of boot.
    """
    found: dict[int, Process] = {}
    for reference in seen:
        process = processes.get(reference.pid)
        if process is None or process.ended or not matches(reference, process, booted):
            continue
        scope = Scope(
            uid=process.uid,
            cgroup=process.cgroup,
            since_ticks=since_ticks,
            dedicated=False,
            launchers=launchers,
        )
        if scope.fits(process) and is_loose(processes, process, scope, found):
            found[process.pid] = process
    return tuple(found.values())
