"""Watching a job that somebody else ends: who of it was there, who has gone, and the proof by NVML.

A platform ends its jobs with its own tool; only the node knows whether their processes have let go
of the cards. A watch takes hold of the job's processes by pidfd, waits for the end of all of them,
and looks at NVML as the ladder does. It signals nobody, so that it needs no right to.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.agent_api import ActionState, Outcome, ProcessRef, Proof, SignalledProcess
from gpuwarden.errors import GpuwardenError, RefusedAction
from gpuwarden.exporter.agent import members, proofs
from gpuwarden.exporter.agent.handles import Group, Identity
from gpuwarden.exporter.agent.ladder import Interrupted, Save, finish
from gpuwarden.exporter.agent.targets import MAX_MEMBERS, Target
from gpuwarden.exporter.cgroups import PlatformKind, platform_of
from gpuwarden.exporter.processes import (
    Process,
    boot_id,
    boot_time,
    parse_proc_job_id,
    read_all,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.agent_api import ActionRequest
    from gpuwarden.clock import Clock
    from gpuwarden.exporter.agent.handles import Wake
    from gpuwarden.exporter.agent.journal import Record
    from gpuwarden.exporter.agent.targets import Resolver
    from gpuwarden.exporter.processes import Launchers

RESCAN_SECONDS = 1.0
"""How often new processes of the job are looked for while it is watched."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Carries out `watch`.

    Attributes:
        resolver: has procfs, the launchers and NVML.
        clock: the node's.
        wake: set when the agent stops.
        proof_timeout: seconds that NVML has to forget the processes that have gone.
    """

    resolver: Resolver
    clock: Clock
    wake: Wake
    proof_timeout: float

    def watch(self, request: ActionRequest, record: Record, save: Save) -> None:
        """Take hold of a job's processes and watch them to their end.

        Raises:
            RefusedAction: `gone`, `too_many`, `processes` or `nvml`: nothing could be proven later.
            JournalError: it cannot be written down.
        """
        if not self.resolver.host_pids:
            self.resolver.guards.check_pid_namespace()
        with Group(self.resolver.proc) as group:
            watch = _Watch(self, record, group, save)
            watch.begin(request.seen)
            watch.follow()

    def resume(self, record: Record, save: Save) -> None:
        """Go on with what an earlier agent process watched."""
        if record.boot_id != boot_id(self.resolver.proc):
            self._after_reboot(record, save)
            return
        with Group(self.resolver.proc) as group:
            for identity in record.members:
                try:
                    group.add(identity)
                except OSError as error:
                    reason = f"pid {identity.pid} cannot be opened: {error}"
                    save("finished", finish(record, Outcome.INCOMPLETE, "processes", reason))
                    return
            _Watch(self, record, group, save).follow()

    def _after_reboot(self, record: Record, save: Save) -> None:
        """No process outlives its boot."""
        proof = Proof(
            gone=True,
            memory_freed=sum(item.bytes or 0 for item in record.holdings),
            device_used_before=record.device_used,
        )
        report = dataclasses.replace(
            finish(
                record,
                Outcome.RECLAIMED,
                "rebooted",
                "the node was rebooted while it watched: the job's processes ended with it",
            ).report,
            proof=proof,
        )
        save("finished", dataclasses.replace(record, report=report))


class _Watch:
    """One watch on its way."""

    def __init__(self, watcher: Watcher, record: Record, group: Group, save: Save) -> None:
        self._watcher = watcher
        self._resolver = watcher.resolver
        self._clock = watcher.clock
        self._record = record
        self._group = group
        self._save = save
        # Of a process tree; a platform's job is known by its cgroup.
        self._tree = _tree(record, group, watcher.resolver.launchers)

    def begin(self, seen: Iterable[ProcessRef]) -> None:
        """Find and hold whom the job has now, note what they hold, and say so."""
        try:
            found = self._find(tuple(seen))
            self._hold(found)
        except OSError as error:
            raise RefusedAction(
                "processes", f"the job's processes cannot be opened: {error}"
            ) from error
        living = self._group.alive()
        if not living:
            raise RefusedAction(
                "gone", f"no process of {self._record.report.job_id} is known on this node"
            )
        try:
            self._note_holdings()
        except GpuwardenError as error:
            raise RefusedAction(
                "nvml", f"the driver does not say who holds what: {error}"
            ) from error
        now = self._clock.wall()
        first = next(item for item in found if item.identity == self._group.identities[0].key)
        record = dataclasses.replace(
            self._record,
            begun=now,
            begun_at=self._clock.monotonic(),
            cgroup=first.cgroup,
            members=self._group.identities,
        )
        self._tree = tree = _tree(record, self._group, self._resolver.launchers)
        if tree is not None:
            launchers = self._resolver.launchers
            tree.launchers.update(item.identity for item in found if launchers.includes(item))
        self._journal("begun", record, {"verified": now, "journalled": now})

    def follow(self) -> None:
        """Wait until everybody has gone or time is over, and look at NVML."""
        record = self._record
        deadline = (record.begun_at or 0.0) + record.grace
        unopened = ""
        while True:
            # Before the look at /proc: whoever ends after it may have a child that it did not show.
            living = self._group.alive()
            try:
                unopened, added = "", self._rescan()
            except (OSError, RefusedAction) as error:
                unopened, added = f"not every process of the job could be opened: {error}", False
            left = deadline - self._clock.monotonic()
            if left <= 0 or not (living or added or unopened):
                break
            if living or unopened:
                self._group.wait(min(left, RESCAN_SECONDS), self._watcher.wake)
            if self._watcher.wake.is_set:
                raise Interrupted
        self._prove(self._group.alive(), unopened)

    def _find(self, seen: tuple[ProcessRef, ...]) -> tuple[Process, ...]:
        """The job's living processes: by its name, by those known, and by their cgroups."""
        processes = read_all(self._resolver.proc)
        known = {
            reference.pid: reference
            for reference in (
                *seen,
                *(ProcessRef(item.pid, item.start_ticks) for item in self._group.identities),
            )
        }
        job_id = self._record.report.job_id
        found = members.of_job(
            processes,
            job_id,
            boot=boot_id(self._resolver.proc),
            booted=boot_time(self._resolver.proc),
            launchers=self._resolver.launchers,
            seen=tuple(known.values()),
        )
        beside = self._beside(processes, found)
        everybody = {process.pid: process for process in (*found, *beside)}
        if len(everybody) > MAX_MEMBERS:
            raise RefusedAction("too_many", f"the job has {len(everybody)} processes")
        return tuple(everybody.values())

    def _beside(
        self, processes: Mapping[int, Process], found: Iterable[Process]
    ) -> tuple[Process, ...]:
        """Whoever is in the same platform job: an array's task is known by its members only."""
        own = {platform_of(process.cgroup) for process in found}
        own.add(platform_of(self._record.cgroup))
        named = {(item.kind, item.id) for item in own if item.kind is not PlatformKind.NONE}
        if not named:
            return ()
        return tuple(
            process
            for process in processes.values()
            if not process.ended
            and (platform_of(process.cgroup).kind, platform_of(process.cgroup).id) in named
        )

    def _hold(self, processes: Iterable[Process]) -> None:
        for process in processes:
            self._group.add(Identity.of(process))

    def _rescan(self) -> bool:
        """Take hold of who has turned up; says whether anybody has."""
        before = len(self._group.identities)
        if self._tree is None:
            self._hold(self._find(()))
        else:
            known = [identity.key for identity in self._record.members]
            self._resolver.adopt(self._tree, read_all(self._resolver.proc), known)
        if len(self._group.identities) == before:
            return False
        record = dataclasses.replace(self._record, members=self._group.identities)
        self._record = record
        # Without it only the account of what was freed is short: the proof looks at everybody held.
        with contextlib.suppress(GpuwardenError):
            self._note_holdings()
        self._journal("joined", self._record, {})
        return True

    def _note_holdings(self) -> None:
        """What NVML lists of everybody held, beside what it listed of them before."""
        listed, _ = proofs.holdings(self._resolver.devices)
        pids = {identity.pid for identity in self._group.identities}
        known = {(item.uuid, item.pid): item for item in self._record.holdings}
        known |= {(item.uuid, item.pid): item for item in listed if item.pid in pids}
        cards = {uuid for uuid, _ in known}
        used = self._record.device_used
        if not cards <= used.keys():
            used = {**proofs.device_used(self._resolver.devices, cards), **used}
        self._record = dataclasses.replace(
            self._record, holdings=tuple(known.values()), device_used=used
        )

    def _journal(self, event: str, record: Record, steps: Mapping[str, float]) -> None:
        report = dataclasses.replace(
            record.report,
            state=ActionState.ACTING,
            steps={**record.report.steps, **steps},
            processes=self._touched(self._group.alive()),
        )
        self._record = dataclasses.replace(record, report=report)
        self._save(event, self._record)

    def _touched(self, living: Iterable[Identity]) -> tuple[SignalledProcess, ...]:
        """Everybody who was ever held; nobody here knows by what they ended."""
        still = set(living)
        return tuple(
            SignalledProcess(
                pid=identity.pid,
                start_ticks=identity.start_ticks,
                ended_by=None if identity in still else "gone",
                gpu_memory=proofs.memory_of(self._record.holdings, identity.pid),
            )
            for identity in self._group.identities
        )

    def _prove(self, living: tuple[Identity, ...], unopened: str) -> None:
        record = self._record
        steps = dict(record.report.steps)
        if not living:
            steps["exited"] = self._clock.wall()
        proof, doubt = proofs.prove(
            self._resolver.devices,
            proofs.Before(self._group.identities, record.holdings, record.device_used),
            timeout=0.0 if living else self._watcher.proof_timeout,
            clock=self._clock,
            wake=self._watcher.wake,
            proc=self._resolver.proc,
        )
        if not proof.gone and self._watcher.wake.is_set:
            raise Interrupted
        if proof.gone:
            steps["proven"] = self._clock.wall()
        report = dataclasses.replace(
            record.report, steps=steps, proof=proof, processes=self._touched(living)
        )
        record = dataclasses.replace(record, report=report)
        problem = _problem(living, unopened, doubt)
        outcome = Outcome.RECLAIMED if problem is None else Outcome.INCOMPLETE
        self._save("finished", finish(record, outcome, *(problem or ("", ""))))


def _tree(record: Record, group: Group, launchers: Launchers) -> Target | None:
    """What a job that is a process tree has in common, so that who turns up in it is known."""
    parsed = parse_proc_job_id(record.report.job_id)
    if parsed is None or not record.members:
        return None
    scope = members.Scope(
        uid=record.members[0].uid,
        cgroup=record.cgroup,
        since_ticks=parsed[2],
        dedicated=False,
        launchers=launchers,
    )
    return Target(group, scope)


def _problem(living: tuple[Identity, ...], unopened: str, doubt: str) -> tuple[str, str] | None:
    if living:
        pids = ", ".join(str(identity.pid) for identity in living[:20])
        return "survivors", f"pid {pids} did not end in the time given"
    if unopened:
        return "processes", unopened
    if doubt:
        return doubt, proofs.DOUBTS[doubt]
    return None
