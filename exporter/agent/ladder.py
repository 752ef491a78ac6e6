"""The ladder: how a job is ended so that it can save its work, nothing survives, and it is proven.

Leave request, stop everything, SIGTERM, continue, wait for the grace, stop and SIGKILL what is
left, proof by NVML. Each step is in the journal before it takes effect. Whatever happens in
between, nothing stays stopped: every way out of here continues what was stopped, and what a crash
left stopped is continued at the next start before anything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpuwarden.agent_api import ActionState, Outcome, Proof
from gpuwarden.errors import GpuwardenError, RefusedAction
from gpuwarden.exporter.agent import guards, members, proofs
from gpuwarden.exporter.agent.handles import Group, Identity, Wake
from gpuwarden.exporter.agent.journal import JournalError, Record
from gpuwarden.exporter.agent.targets import Resolver, Target
from gpuwarden.exporter.processes import PROC, boot_id, read_all, read_process
from gpuwarden.job_files import LeaveRequest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.agent.requests import LeaveRequests

RESCAN_SECONDS = 1.0
"""How often the job's tree is looked at during the grace: children of what leaves stay known."""
FREEZE_ROUNDS = 8
FREEZE_SECONDS = 0.5
"""How long to wait for a process to be seen stopped; one in a driver call stops after it."""
KILL_ROUNDS = 8
KILL_SECONDS = 3.0
"""How long one round waits for killed processes; one that the driver holds ends after its call."""


class Interrupted(Exception):
    """The agent is stopping: the action stays open in the journal, and is taken up at its start."""


class Save(Protocol):
    """Puts a record in the journal and in what the API answers."""

    def __call__(self, event: str, record: Record) -> None:
        """Save.

        Raises:
            JournalError: it is not on disk; the step must not be taken.
        """


@dataclass(frozen=True, slots=True)
class Ladder:
    """Carries out `terminate`.

    Attributes:
        resolver: finds members, and has the guards and NVML.
        requests: the folder of leave requests.
        clock: the node's.
        wake: set when the agent stops.
        proof_timeout: seconds that NVML has to forget the ended processes.
    """

    resolver: Resolver
    requests: LeaveRequests
    clock: Clock
    wake: Wake
    proof_timeout: float = 30.0

    def climb(self, record: Record, target: Target, save: Save) -> None:
        """End the processes of a target whose ladder is journalled as begun."""
        _Climb(self, record, target, save).begin()

    def resume(self, record: Record, save: Save) -> None:
        """Finish what an earlier agent process began; first of all continue what it stopped."""
        if record.boot_id != boot_id(self.resolver.proc):
            self._after_reboot(record, save)
            return
        group = take_hold(record, self.resolver.proc)
        living = group.alive()
        scope = members.Scope(
            uid=record.members[0].uid if record.members else -1,
            cgroup=record.cgroup,
            since_ticks=min((item.start_ticks for item in record.members), default=0),
            # Names of cgroups are reused: without a member in it, it may be another's by now.
            dedicated=record.dedicated and bool(living),
            launchers=self.resolver.launchers,
        )
        with Target(
            group, scope, root=record.root, holdings=record.holdings, device_used=record.device_used
        ) as target:
            _Climb(self, record, target, save).take_up(known=bool(living))

    def _after_reboot(self, record: Record, save: Save) -> None:
        """No process outlives its boot: it ended, whoever ended it."""
        if not record.terminating:
            save("finished", finish(record, Outcome.REFUSED, *_REBOOTED_BEFORE))
            return
        proof = Proof(
            gone=True,
            memory_freed=sum(item.bytes or 0 for item in record.holdings),
            device_used_before=record.device_used,
        )
        report = dataclasses.replace(
            finish(record, Outcome.RECLAIMED, *_REBOOTED_AFTER).report, proof=proof
        )
        save("finished", dataclasses.replace(record, report=report))


def take_hold(record: Record, proc: Path = PROC) -> Group:
    """Take hold of what an earlier agent process held, and continue what it left stopped.

    Nothing is held that is not the same process any more, or of another boot.
    """
    group = Group(proc)
    if record.boot_id == boot_id(proc):
        for identity in {*record.members, *record.stopped}:
            # One that cannot be opened is found again by looking.
            with contextlib.suppress(OSError):
                group.add(identity)
        group.send(signal.SIGCONT, reversed(record.stopped))
    return group


_REBOOTED_BEFORE = ("rebooted", "the node was rebooted before anything was signalled")
_REBOOTED_AFTER = ("rebooted", "the node was rebooted after SIGTERM: its processes ended with it")


def finish(record: Record, outcome: Outcome, reason: str = "", message: str = "") -> Record:
    """The record of an action that is over."""
    report = dataclasses.replace(
        record.report,
        state=ActionState.FINISHED,
        outcome=outcome,
        reason=reason,
        message=message[:4096],
    )
    return dataclasses.replace(record, report=report)


class _Climb:
    """One ladder on its way."""

    def __init__(self, ladder: Ladder, record: Record, target: Target, save: Save) -> None:
        self._ladder = ladder
        self._resolver = ladder.resolver
        self._clock = ladder.clock
        self._wake = ladder.wake
        self._record = record
        self._target = target
        self._group = target.group
        self._save = save
        self._terminated: set[Identity] = set()
        self._known = tuple(identity.key for identity in record.members)
        self._unopened: str | None = None

    # -----------------------------------------------------------------------------------------
    # Ways in

    def begin(self) -> None:
        """From the first step."""
        try:
            self._ask_to_leave()
            if not self._terminate():
                self._prove()
                return
        except (RefusedAction, JournalError) as error:
            if self._record.terminating:
                self._give_up(error)
            else:
                self._abandon(error)
            return
        self._wait_and_kill(self._record.grace)

    def take_up(self, *, known: bool) -> None:
        """From where the journal ends.

        Args:
            known: whether a member is still there; otherwise what members once led proves nothing.
        """
        record = self._record
        if not record.terminating:
            self._finish(
                Outcome.FAILED,
                "restarted",
                "the agent was restarted before anything was signalled: ask again",
            )
            return
        if not known:
            self._known = ()
        self._terminated = set(record.members)
        left = record.grace
        if record.sigterm_at is None:
            # The crash came between the journal and the signals: some may not have got theirs.
            try:
                self._resolver.guards.check_kill_switch()
            except RefusedAction as error:
                self._give_up(error)
                return
            self._group.send(signal.SIGTERM, record.members)
            self._group.send(signal.SIGCONT, reversed(record.members))
        else:
            left -= self._clock.monotonic() - record.sigterm_at
        self._wait_and_kill(min(record.grace, max(0.0, left)))

    # -----------------------------------------------------------------------------------------
    # Steps

    def _journal(self, event: str, record: Record, step: str | None = None) -> None:
        """Put a step on disk, before it takes effect."""
        if step is not None:
            record = _with_step(record, step, self._clock.wall())
        self._save(event, record)
        self._record = record

    def _ask_to_leave(self) -> None:
        """Tell the trainer before the signals that it must not come back by itself."""
        run_id = self._record.run_id
        if run_id is None:
            return
        self._journal("asking", self._record)
        request = LeaveRequest(
            decision_id=self._record.decision_id,
            leave_by=self._clock.wall() + self._record.grace,
            at=self._record.at,
            then="hold",
            reason=self._record.reason,
        )
        # Without the file the trainer still saves on SIGTERM; only "do not come back" is lost.
        with contextlib.suppress(RefusedAction):
            self._ladder.requests.write(run_id, request)
            self._record = _with_step(self._record, "leave_requested", self._clock.wall())

    def _terminate(self) -> bool:
        """Stop all, SIGTERM all, continue all: nobody can fork away from his signal.

        Returns:
            Whether anybody was there to be signalled; otherwise all have followed the request.
        """
        try:
            self._freeze()
            self._resolver.guards.check_kill_switch()
            if self._wake.is_set:
                raise Interrupted
            living = self._group.alive()
            if not living and "leave_requested" in self._record.report.steps:
                return False
            if not living:
                raise RefusedAction("gone", "the job's processes ended before they were signalled")
            record = dataclasses.replace(
                self._record, terminating=True, members=_union(self._record.members, living)
            )
            self._journal("terminating", record, "sigterm")
            self._terminated = self._group.send(signal.SIGTERM, living)
        finally:
            self._resume()
        record = dataclasses.replace(self._record, sigterm_at=self._clock.monotonic())
        self._journal("terminated", record, "sigterm")
        return True

    def _freeze(self) -> None:
        """Stop every member until no new one turns up."""
        frozen: set[Identity] = set()
        for _ in range(FREEZE_ROUNDS):
            self._rescan()
            fresh = tuple(item for item in self._group.alive() if item not in frozen)
            if not fresh:
                return
            stopped = _union(self._record.stopped, fresh)
            self._journal("stopping", dataclasses.replace(self._record, stopped=stopped), "stopped")
            self._group.send(signal.SIGSTOP, fresh)
            frozen.update(fresh)
            self._await_stopped(fresh)

    def _resume(self) -> None:
        """Continue all, children first.

        A parent that ended while its children are still stopped would leave an orphaned process
        group, to all of which, ours or not, the kernel sends SIGHUP.
        """
        self._group.send(signal.SIGCONT, reversed(self._record.stopped))

    def _await_stopped(self, identities: Iterable[Identity]) -> None:
        deadline = self._clock.monotonic() + FREEZE_SECONDS
        for identity in identities:
            while self._clock.monotonic() < deadline:
                process = read_process(identity.pid, self._resolver.proc)
                if process is None or process.state in "TtZXx" or self._wake.wait(0.005):
                    break

    def _rescan(self) -> tuple[Identity, ...]:
        """Take hold of members that turned up; as many as can be."""
        try:
            processes = read_all(self._resolver.proc)
            added = self._resolver.adopt(self._target, processes, self._known)
        except (OSError, RefusedAction) as error:
            self._unopened = f"not every process of the job could be opened: {error}"
            return ()
        self._unopened = None
        return added

    def _wait_and_kill(self, grace: float) -> None:
        try:
            self._wait(grace)
            self._kill()
        except (RefusedAction, JournalError) as error:
            self._give_up(error)
            return
        survivors = self._group.alive()
        if survivors:
            pids = ", ".join(str(item.pid) for item in survivors[:20])
            self._prove(("survivors", f"SIGKILL did not end pid {pids}"))
        elif self._unopened is not None:
            self._prove(("processes", self._unopened))
        else:
            self._prove()

    def _wait(self, grace: float) -> None:
        """Give the job its time; children that turn up meanwhile may finish what they do."""
        deadline = self._clock.monotonic() + grace
        while True:
            left = deadline - self._clock.monotonic()
            # Before the look at /proc: whoever ends after it may have a child that it did not show.
            living = self._group.alive()
            if not (self._rescan() or living) or left <= 0:
                return
            self._group.wait(min(left, RESCAN_SECONDS), self._wake)
            if self._wake.is_set:
                raise Interrupted

    def _kill(self) -> None:
        """Stop and SIGKILL what is left, until nothing is or the rounds are over."""
        for _ in range(KILL_ROUNDS):
            living = self._group.alive()
            if not (self._rescan() or living):
                return
            if not self._group.alive():
                continue
            self._resolver.guards.check_kill_switch()
            try:
                self._freeze()
                self._resolver.guards.check_kill_switch()
                left = self._group.alive()
                record = dataclasses.replace(
                    self._record,
                    members=_union(self._record.members, left),
                    killed=_union(self._record.killed, left),
                )
                self._journal("killing", record, "sigkill")
                self._group.send(signal.SIGKILL, reversed(left))
                self._kill_cgroup()
            finally:
                self._resume()
            deadline = self._clock.monotonic() + KILL_SECONDS
            while self._group.alive() and self._clock.monotonic() < deadline:
                self._group.wait(deadline - self._clock.monotonic(), self._wake)
                if self._wake.is_set:
                    raise Interrupted

    def _kill_cgroup(self) -> None:
        """Let the kernel end the job's own cgroup at once, if it still holds nothing else."""
        file = self._target.kill_file
        if file is None or self._target.spared:
            return
        scope = self._target.scope
        # Where not everybody can be seen, somebody else may be in it.
        with contextlib.suppress(OSError):
            inside = (
                process
                for process in read_all(self._resolver.proc).values()
                if guards.in_cgroup(process, scope.cgroup)
            )
            if all(scope.fits(process) for process in inside):
                file.write_text("1")

    # -----------------------------------------------------------------------------------------
    # Ways out

    def _prove(
        self, problem: tuple[str, str] | None = None, *, timeout: float | None = None
    ) -> None:
        """Look whether NVML has forgotten those that were signalled, and finish."""
        record = self._record = _with_step(self._record, "exited", self._clock.wall())
        proof, doubt = proofs.prove(
            self._resolver.devices,
            self._target.before(record.members),
            timeout=self._ladder.proof_timeout if timeout is None else timeout,
            clock=self._clock,
            wake=self._wake,
            proc=self._resolver.proc,
        )
        if not proof.gone and self._wake.is_set:
            raise Interrupted
        if proof.gone:
            record = _with_step(record, "proven", self._clock.wall())
        report = dataclasses.replace(record.report, proof=proof)
        self._record = dataclasses.replace(record, report=report)
        if problem is None and doubt:
            problem = (doubt, proofs.DOUBTS[doubt])
        if problem is None:
            self._finish(Outcome.RECLAIMED)
        else:
            self._finish(Outcome.INCOMPLETE, *problem)

    def _give_up(self, error: GpuwardenError) -> None:
        """Something forbids to go on after SIGTERM was sent: say what is left."""
        if self._group.alive():
            self._prove((_reason(error), str(error)), timeout=0.0)
        else:
            self._prove()

    def _abandon(self, error: GpuwardenError) -> None:
        """Something forbids to go on before any signal but SIGSTOP, which was taken back."""
        outcome = Outcome.REFUSED if isinstance(error, RefusedAction) else Outcome.FAILED
        self._finish(outcome, _reason(error), str(error))

    def _finish(self, outcome: Outcome, reason: str = "", message: str = "") -> None:
        record, living = self._record, set(self._group.alive())
        if record.run_id is not None and (not living or not record.terminating):
            # A run keeps its name: resumed by hand, it must not find its old request.
            with contextlib.suppress(RefusedAction):
                self._ladder.requests.withdraw(record.run_id, record.decision_id)
        if record.terminating or outcome is Outcome.RECLAIMED:
            ended = {item: self._ended_by(item, living) for item in record.members}
            touched = self._target.touched(record.members, ended)
            report = dataclasses.replace(record.report, processes=touched)
            record = dataclasses.replace(record, report=report)
        self._save("finished", finish(record, outcome, reason, message))

    def _ended_by(self, identity: Identity, living: set[Identity]) -> str | None:
        if identity in living:
            return None
        if identity in self._record.killed:
            return "SIGKILL"
        return "SIGTERM" if identity in self._terminated else "gone"


def _reason(error: GpuwardenError) -> str:
    return error.reason if isinstance(error, RefusedAction) else "journal"


def _union(known: tuple[Identity, ...], more: tuple[Identity, ...]) -> tuple[Identity, ...]:
    return tuple(dict.fromkeys((*known, *more)))


def _with_step(record: Record, step: str, time: float) -> Record:
    report = dataclasses.replace(record.report, steps={**record.report.steps, step: time})
    return dataclasses.replace(record, report=report)
