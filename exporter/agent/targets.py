"""From a job's name to the processes that may be ended: resolve, take hold, compare, refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from gpuwarden.agent_api import SignalledProcess
from gpuwarden.errors import GpuwardenError, RefusedAction
from gpuwarden.exporter.agent import guards, members, proofs
from gpuwarden.exporter.agent.handles import Group, Identity
from gpuwarden.exporter.processes import (
    PROC,
    Launchers,
    Process,
    boot_id,
    boot_time,
    job_root,
    parse_proc_job_id,
    read_all,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from gpuwarden.agent_api import ActionRequest, ProcessRef
    from gpuwarden.exporter.agent.proofs import Before, Devices, Holding

MAX_MEMBERS = 16_384
"""A job of more processes than this is not resolved: something else is wrong."""


@dataclass(slots=True)
class Target:
    """The processes of a job, held by pidfd until `close`.

    Attributes:
        group: those that are to end.
        scope: what further members have in common with them.
        seen: what the engine saw in the job.
        root: the job's root, or None where it is gone.
        holdings: what NVML listed of the members.
        device_used: bytes used on their cards, by UUID.
        kill_file: `cgroup.kill` of the job's own cgroup, or None.
        spared: pids below the root that must never be signalled.
        launchers: members by (pid, start ticks) that start jobs: what they led is not this job's.
    """

    group: Group
    scope: members.Scope
    seen: tuple[ProcessRef, ...] = ()
    root: Identity | None = None
    holdings: tuple[Holding, ...] = ()
    device_used: dict[str, int] = field(default_factory=dict)
    kill_file: Path | None = None
    spared: set[int] = field(default_factory=set)
    launchers: set[tuple[int, int]] = field(default_factory=set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()

    def touched(
        self, identities: Iterable[Identity], ended_by: Mapping[Identity, str | None]
    ) -> tuple[SignalledProcess, ...]:
        """Processes as the API reports them."""
        return tuple(
            SignalledProcess(
                pid=identity.pid,
                start_ticks=identity.start_ticks,
                ended_by=ended_by.get(identity),
                gpu_memory=proofs.memory_of(self.holdings, identity.pid),
            )
            for identity in identities
        )

    def before(self, identities: tuple[Identity, ...]) -> Before:
        """What the proof compares with."""
        return proofs.Before(identities, self.holdings, self.device_used)


@dataclass(frozen=True, slots=True)
class Resolver:
    """Finds and checks the processes of jobs on this node.

    Attributes:
        guards: what is never touched.
        launchers: what starts jobs; must equal the exporter's setting.
        devices: NVML.
        host_pids: whether the driver's pids are those of this PID namespace whatever it is (the
            simulated driver); otherwise the agent must be in the host's.
        proc: where procfs is mounted.
    """

    guards: guards.Guards
    launchers: Launchers
    devices: Devices
    host_pids: bool = False
    proc: Path = PROC

    def resolve(self, request: ActionRequest) -> Target:
        """Every step of a ladder up to the first signal.

        Raises:
            RefusedAction: the job may not or cannot be ended; nothing was touched.
        """
        self.guards.check_kill_switch()
        guards.check_platform(request.job_id, None)
        if not self.host_pids:
            self.guards.check_pid_namespace()
        try:
            processes = read_all(self.proc)
        except OSError as error:
            raise RefusedAction("processes", f"/proc cannot be read: {error}") from error
        target = self._scope(request, processes)
        try:
            self._admit(target, processes)
            self._check_holds(target, request)
        except OSError as error:
            target.group.close()
            raise RefusedAction(
                "processes", f"the job's processes cannot be opened: {error}"
            ) from error
        except BaseException:
            target.group.close()
            raise
        return target

    def _scope(self, request: ActionRequest, processes: Mapping[int, Process]) -> Target:
        """Find the root and what members have in common with it."""
        parsed = parse_proc_job_id(request.job_id)
        if parsed is None or parsed[0] != boot_id(self.proc)[: len(parsed[0])]:
            raise RefusedAction("gone", f"{request.job_id} is not a job of this boot of the node")
        _, pid, start_ticks = parsed
        root = processes.get(pid)
        if root is not None and root.start_ticks == start_ticks and root.pid > 2:
            above = job_root(processes, pid, launchers=self.launchers)
            if above.pid != pid:
                raise RefusedAction(
                    "not_root", f"pid {pid} is part of the job of pid {above.pid}, not a root"
                )
            if not root.ended:
                return self._below(root, processes, request)
        left = members.orphans(
            processes,
            request.seen,
            launchers=self.launchers,
            since_ticks=start_ticks,
            booted=boot_time(self.proc),
        )
        if left:
            return self._leftover(left, start_ticks, request)
        if root is not None and root.start_ticks != start_ticks:
            raise RefusedAction(
                "identity", f"pid {pid} is another process now (started at tick {root.start_ticks})"
            )
        raise RefusedAction("gone", f"the job's root, pid {pid}, is gone")

    def _below(
        self, root: Process, processes: Mapping[int, Process], request: ActionRequest
    ) -> Target:
        guards.check_platform(request.job_id, root.cgroup)
        self._check_untouchable(root, guards.own_family(processes))
        dedicated = guards.is_dedicated(processes, root, launchers=self.launchers)
        return Target(
            group=Group(self.proc),
            scope=members.Scope.of(root, dedicated=dedicated, launchers=self.launchers),
            seen=request.seen,
            root=Identity.of(root),
            kill_file=guards.kill_file(root) if dedicated else None,
        )

    def _leftover(
        self, left: tuple[Process, ...], since_ticks: int, request: ActionRequest
    ) -> Target:
        if len({(process.uid, process.cgroup) for process in left}) > 1:
            raise RefusedAction(
                "ambiguous",
                "the job's root is gone and its last known processes have several owners or "
                "cgroups",
            )
        guards.check_platform(request.job_id, left[0].cgroup)
        return Target(
            group=Group(self.proc),
            scope=members.Scope(
                uid=left[0].uid,
                cgroup=left[0].cgroup,
                since_ticks=since_ticks,
                dedicated=False,
                launchers=self.launchers,
            ),
            seen=request.seen,
        )

    def _check_untouchable(self, process: Process, family: Collection[int]) -> None:
        if process.pid in family:
            raise RefusedAction(
                "protected", f"pid {process.pid} is the agent, an ancestor or a child of it"
            )
        why = self.guards.forbids(process)
        if why is not None:
            raise RefusedAction("protected", why)

    def _admit(self, target: Target, processes: Mapping[int, Process]) -> None:
        known = () if target.root is None else (target.root.key,)
        self.adopt(target, processes, known)
        if target.root is not None and not target.group.knows(target.root.key):
            raise RefusedAction("gone", f"the job's root, pid {target.root.pid}, has just ended")
        if not target.group.identities:
            raise RefusedAction("gone", "the job's processes have just ended")
        self._check_alone(target, processes)
        for identity in target.group.identities:
            if not target.group.may_signal(identity):
                raise RefusedAction(
                    "permission",
                    f"the agent may not signal pid {identity.pid} of uid {identity.uid}: it needs "
                    "CAP_KILL",
                )

    def _check_alone(self, target: Target, processes: Mapping[int, Process]) -> None:
        """A job below which others run cannot be ended without them."""
        held = {
            identity.pid: processes[identity.pid]
            for identity in target.group.identities
            if identity.pid in processes
        }
        both = members.carried(processes, held, self.launchers)
        if both is not None:
            launcher, other = both
            raise RefusedAction(
                "carries_others",
                f"pid {launcher.pid} ({launcher.comm}) of the job started pid {other.pid} "
                f"({other.comm}), which is another job and would end with it. If a program above "
                "both starts jobs (an editor's server, say), name it by --attribution.launcher to "
                "exporter and agent",
            )

    def adopt(
        self,
        target: Target,
        processes: Mapping[int, Process],
        known: Collection[tuple[int, int]] = (),
    ) -> tuple[Identity, ...]:
        """Take hold of members that are not held yet; gives those.

        Raises:
            OSError: such as with too many open files; what was taken hold of before stays held.
            RefusedAction: `too_many`.
        """
        family = guards.own_family(processes)
        members_before = (*known, *(identity.key for identity in target.group.identities))
        found = members.find(
            processes,
            [key for key in members_before if key not in target.launchers],
            target.scope,
            seen=target.seen,
            booted=boot_time(self.proc) if target.seen else None,
        )
        if len(found) > MAX_MEMBERS:
            raise RefusedAction("too_many", f"the job has {len(found)} processes")
        added = []
        for process in found:
            if target.group.knows(process.identity):
                continue
            if process.pid in family or self.guards.forbids(process) is not None:
                target.spared.add(process.pid)
                continue
            identity = Identity.of(process)
            if target.group.add(identity):
                added.append(identity)
                if self.launchers.includes(process):
                    target.launchers.add(identity.key)
        return tuple(added)

    def _check_holds(self, target: Target, request: ActionRequest) -> None:
        """The job must hold a card now: otherwise there is nothing to give back."""
        try:
            listed, _ = proofs.holdings(self.devices)
        except GpuwardenError as error:
            raise RefusedAction(
                "nvml", f"the driver does not say who holds what: {error}"
            ) from error
        spared = sorted(target.spared.intersection(item.pid for item in listed))
        if spared:
            raise RefusedAction(
                "protected", f"pid {spared[0]} holds a card for the job but is never touched"
            )
        pids = {identity.pid for identity in target.group.identities}
        target.holdings = tuple(item for item in listed if item.pid in pids)
        cards = {item.uuid for item in target.holdings}
        if not cards:
            raise RefusedAction("no_gpu", "no process of the job holds a card now")
        if request.gpus and cards.isdisjoint(request.gpus):
            raise RefusedAction(
                "other_gpu",
                f"the job holds {', '.join(sorted(cards))}, none of the cards it is to give back",
            )
        target.device_used = proofs.device_used(self.devices, cards)
