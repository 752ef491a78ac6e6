"""Takes actions on, once each, and remembers what became of them, also over its own restarts."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import structlog

from gpuwarden.agent_api import Action, ActionReport, ActionRequest, ActionState, Outcome
from gpuwarden.errors import RefusedAction
from gpuwarden.exporter.agent.authorisations import Rejected
from gpuwarden.exporter.agent.deliveries import Deliveries
from gpuwarden.exporter.agent.journal import Journal, JournalError, Record
from gpuwarden.exporter.agent.ladder import Interrupted, Ladder, finish
from gpuwarden.exporter.agent.restarts import Origins, began_after
from gpuwarden.exporter.agent.settings import (
    MAXIMUM_GRACE_SECONDS,
    MAXIMUM_WATCH_SECONDS,
    MINIMUM_GRACE_SECONDS,
)
from gpuwarden.exporter.agent.watches import Watcher
from gpuwarden.exporter.nvml import RELEASED
from gpuwarden.exporter.processes import parse_proc_job_id, read_process
from gpuwarden.job_files import LeaveRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.exporter.agent.targets import Target

MAX_AT_ONCE = 16
"""Actions that may be under way at the same time; further ones are refused, not queued."""
_HOUR = 3600.0

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Actions:
    """The actions of this node. Safe for threads."""

    def __init__(
        self,
        journal: Journal,
        ladder: Ladder,
        *,
        terminates_per_hour: int,
        restart_cooldown: float,
        released: Callable[[], bool] = lambda: False,
        admit: Callable[[ActionRequest], None] = lambda _request: None,
    ) -> None:
        """Begin with what the journal holds.

        Args:
            journal: open.
            ladder: carries out `terminate`.
            terminates_per_hour: ladders that may be begun within any hour.
            restart_cooldown: seconds for which a job that was ended and came back is left alone.
            released: whether an operator has the driver released, so that nothing can be proven.
            admit: raises `Rejected` for a request whose time is over; asked when one that is not
                known is taken on, however long it waited.
        """
        self._released = released
        self._admit = admit
        self._journal = journal
        self._ladder = ladder
        self._clock = ladder.clock
        self._watcher = Watcher(ladder.resolver, ladder.clock, ladder.wake, ladder.proof_timeout)
        self._requests = ladder.requests
        self._deliveries = Deliveries(
            ladder.requests.directory, ladder.resolver.launchers, proc=ladder.resolver.proc
        )
        self._per_hour = terminates_per_hour
        self._cooldown = restart_cooldown
        self._origins = Origins(ladder.resolver.proc)
        self._lock = threading.RLock()
        self._threads: dict[str, threading.Thread] = {}
        # Held processes of ladders under way: no process is in two of them.
        self._busy: dict[str, frozenset[tuple[int, int]]] = {}

    @property
    def released(self) -> bool:
        """Whether actions are refused because the driver is released."""
        return self._released()

    def check_journal(self) -> None:
        """Go on only while what is done can be written down.

        Raises:
            JournalError: it cannot; every action would be refused.
        """
        with self._lock:
            self._journal.check()

    # -----------------------------------------------------------------------------------------
    # The API's side

    def find(self, decision_id: str) -> ActionReport | None:
        """The report of a decision, or None where it was never taken on."""
        with self._lock:
            record = self._journal.find(decision_id)
        return None if record is None else record.report

    def submit(self, request: ActionRequest) -> ActionReport:
        """Take an authorised request on; answers at once.

        A decision that is known, and a `terminate` of an attempt that is being or has been ended,
        are answered by the report there is, and nothing is done a second time. A decision that is
        known is answered for ever, also when the request that repeats it has expired: whoever lost
        the answer learns what became of it.

        Raises:
            Rejected: its time is over, another engine has taken over, or the decision's name is
                taken.
        """
        with self._lock:
            known = self._decided(request)
            if known is not None:
                return known
            self._admit(request)
            spent = self._spent(request)
            if spent is not None:
                return spent
            if request.epoch < self._journal.epoch:
                raise Rejected(
                    403,
                    "stale_epoch",
                    f"an engine of epoch {self._journal.epoch} has spoken; {request.epoch} is over",
                )
            record = _record(request, self._clock.wall())
            if len(self._threads) >= MAX_AT_ONCE:
                return finish(
                    record, Outcome.REFUSED, "busy", f"{MAX_AT_ONCE} actions are under way"
                ).report
            try:
                self._journal.append("accepted", record, time=self._clock.wall())
            except JournalError as error:
                return finish(record, Outcome.REFUSED, "journal", str(error)).report
            self._start(record, lambda: self._carry_out(request, record))
            return record.report

    def note_reading(self, request: ActionRequest) -> None:
        """Put on disk that the engine is told a job's command lines, which it is once.

        Raises:
            Rejected: its time is over, it was answered before, or that cannot be written down.
        """
        with self._lock:
            if self._decided(request) is not None:
                raise Rejected(
                    409, "replayed", f"{request.decision_id} was answered: ask under another name"
                )
            self._admit(request)
            now = self._clock.wall()
            # An earlier engine may read, and a reader is no engine: epochs count for actions.
            record = dataclasses.replace(_record(request, now), epoch=0)
            try:
                self._journal.append("read", finish(record, Outcome.DONE), time=now)
            except JournalError as error:
                raise Rejected(503, "journal", str(error)) from error

    def _decided(self, request: ActionRequest) -> ActionReport | None:
        """What became of the very decision, if it is known."""
        known = self._journal.find(request.decision_id)
        if known is None:
            return None
        if (known.report.job_id, known.report.action) != (request.job_id, request.action):
            raise Rejected(
                409,
                "decision_reused",
                f"{request.decision_id} is {known.report.action} of {known.report.job_id}",
            )
        return known.report

    def _spent(self, request: ActionRequest) -> ActionReport | None:
        """What became of the attempt, if another decision has spent it."""
        if request.action is not Action.TERMINATE:
            return None
        first = self._journal.attempt(request.job_id) or self._under_way(request.job_id)
        if first is None:
            return None
        try:
            self._journal.alias(request.decision_id, first.decision_id, time=self._clock.wall())
        except JournalError as error:
            # Only the name is lost; the attempt itself is on disk.
            _log.error("journal", error=str(error), decision_id=request.decision_id)
        return first.report

    def _under_way(self, job_id: str) -> Record | None:
        """A `terminate` that has been taken on and not yet begun."""
        for name in self._threads:
            record = self._journal.records.get(name)
            if (
                record is not None
                and record.report.job_id == job_id
                and record.report.action is Action.TERMINATE
                and not record.finished
            ):
                return record
        return None

    # -----------------------------------------------------------------------------------------
    # Over restarts

    def recover(self) -> None:
        """Take up what an earlier agent process left; to be called once, before any `submit`."""
        with self._lock:
            for record in self._journal.unfinished():
                if record.begun is None:
                    self._save(
                        "finished",
                        finish(
                            record,
                            Outcome.FAILED,
                            "restarted",
                            "the agent was restarted before it came to this: ask again",
                        ),
                    )
                else:
                    _log.warning("taking up", decision_id=record.decision_id)
                    self._start(record, self._resumption(record))

    def _resumption(self, record: Record) -> Callable[[], None]:
        if record.report.action is Action.WATCH:
            return lambda: self._watcher.resume(record, self._save)
        return lambda: self._ladder.resume(record, self._save)

    def sweep(self) -> None:
        """Remove leave requests that are over; to be called now and then."""
        for run_id, request in self._requests.pending():
            with self._lock:
                record = self._journal.find(request.decision_id)
            if record is not None and not record.finished:
                continue
            if self._requests.is_over(request) or (
                record is not None and self._has_left(record.report.job_id)
            ):
                try:
                    self._requests.withdraw(run_id, request.decision_id)
                except RefusedAction as error:
                    _log.warning("leave request", error=str(error))

    def _has_left(self, job_id: str) -> bool:
        """Whether the root of a job of this node is known to be gone."""
        parsed = parse_proc_job_id(job_id)
        if parsed is None:
            return False
        try:
            process = read_process(parsed[1], self._ladder.resolver.proc)
        except OSError:
            return False
        return process is None or process.start_ticks != parsed[2] or process.ended

    def close(self, timeout: float = 2.0) -> None:
        """Stop within `timeout` seconds.

        Every ladder continues what it stopped, and stays open in the journal.
        """
        self._ladder.wake.set()
        with self._lock:
            threads = list(self._threads.values())
        deadline = self._clock.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))

    # -----------------------------------------------------------------------------------------
    # The threads' side

    def _start(self, record: Record, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Interrupted:
                _log.warning("left for the next start", decision_id=record.decision_id)
            except Exception as error:  # noqa: BLE001 (the thread's last resort: reported below)
                _log.exception("action failed", decision_id=record.decision_id)
                self._fail(record.decision_id, error)
            finally:
                with self._lock:
                    self._threads.pop(record.decision_id, None)
                    self._busy.pop(record.decision_id, None)

        # A daemon: a driver or disk that hangs must not keep the agent from ending.
        thread = threading.Thread(target=run, name=record.decision_id, daemon=True)
        self._threads[record.decision_id] = thread
        thread.start()

    def _fail(self, decision_id: str, error: Exception) -> None:
        with self._lock:
            record = self._journal.records[decision_id]
            if not record.finished:
                self._save("finished", finish(record, Outcome.FAILED, "internal", repr(error)))

    def _save(self, event: str, record: Record) -> None:
        """Journal a step. An outcome is the outcome even if it cannot be written."""
        with self._lock:
            try:
                self._journal.append(event, record, time=self._clock.wall())
            except JournalError as error:
                if not record.finished:
                    raise
                _log.error("journal", error=str(error), decision_id=record.decision_id)
                self._journal.remember(record)
        report = record.report
        _log.info(
            event,
            decision_id=report.decision_id,
            job_id=report.job_id,
            action=report.action.value,
            outcome=report.outcome and report.outcome.value,
            reason=report.reason,
        )

    def _carry_out(self, request: ActionRequest, record: Record) -> None:
        try:
            _check_grace(request)
            self._check_released(request.action)
            if request.action is Action.TERMINATE:
                self._terminate(request, record)
            elif request.action is Action.INSPECT:
                self._save("finished", self._inspect(request, record))
            elif request.action is Action.WATCH:
                self._watcher.watch(request, record, self._save)
            else:
                self._save("finished", self._ask(request, record))
        except RefusedAction as error:
            self._save("finished", finish(record, Outcome.REFUSED, error.reason, str(error)))
        except JournalError as error:
            self._save("finished", finish(record, Outcome.REFUSED, "journal", str(error)))

    def _check_released(self, action: Action) -> None:
        if self.released and action is not Action.CANCEL:
            raise RefusedAction("released", RELEASED)

    def _terminate(self, request: ActionRequest, record: Record) -> None:
        with self._ladder.resolver.resolve(request) as target:
            self._ladder.climb(self._begin(record, target), target, self._save)

    def _begin(self, record: Record, target: Target) -> Record:
        """Journal the ladder as begun: from here on nobody else ends this attempt."""
        now, origin = self._clock.wall(), self._origins.of(target.root)
        steps = {"verified": now, "journalled": now}
        begun = dataclasses.replace(
            record,
            report=dataclasses.replace(record.report, state=ActionState.ACTING, steps=steps),
            begun=now,
            begun_at=self._clock.monotonic(),
            origin=origin,
            cgroup=target.scope.cgroup,
            dedicated=target.scope.dedicated,
            root=target.root,
            members=target.group.identities,
            holdings=target.holdings,
            device_used=target.device_used,
        )
        with self._lock:
            self._check_limits(record, target, origin)
            self._ladder.resolver.guards.check_kill_switch()
            self._save("begun", begun)
            self._busy[record.decision_id] = _keys(target)
        return begun

    def _check_limits(self, record: Record, target: Target, origin: str) -> None:
        """Go on only with what this node may end now; to be called with the lock held.

        Raises:
            RefusedAction: `busy`, `rate_limit` or `cooldown`.
        """
        processes = _keys(target)
        if any(not processes.isdisjoint(others) for others in self._busy.values()):
            raise RefusedAction("busy", "a process of the job is being ended with another job")
        lately = self._journal.begun_within(_HOUR, boot_id=record.boot_id, clock=self._clock)
        if lately >= self._per_hour:
            raise RefusedAction(
                "rate_limit", f"{self._per_hour} jobs were ended within an hour on this node"
            )
        if not origin or target.root is None:
            return
        now = self._clock.monotonic()
        for earlier in self._journal.ended_of(origin, boot_id=record.boot_id):
            ago = now - (earlier.begun_at or 0.0)
            if ago < self._cooldown and began_after(target.root, earlier.begun_at or 0.0):
                raise RefusedAction(
                    "cooldown",
                    f"the same command was ended {ago:.0f} s ago as {earlier.report.job_id} and "
                    "was started again by the same process: end what starts it, or talk to its "
                    f"owner; it may be ended again in {self._cooldown - ago:.0f} s",
                )

    def _inspect(self, request: ActionRequest, record: Record) -> Record:
        with self._ladder.resolver.resolve(request) as target:
            origin = self._origins.of(target.root)
            with self._lock:
                self._check_limits(record, target, origin)
            report = dataclasses.replace(
                record.report,
                steps={"verified": self._clock.wall()},
                processes=target.touched(target.group.identities, {}),
            )
        return finish(dataclasses.replace(record, report=report), Outcome.DONE)

    def _ask(self, request: ActionRequest, record: Record) -> Record:
        """Write or withdraw a leave request."""
        run_id = request.run_id
        if run_id is None:
            return finish(
                record, Outcome.UNDELIVERABLE, "no_run", "the job has no run that could be asked"
            )
        if request.action is Action.CANCEL:
            if self._requests.cancel(run_id, request.decision_id):
                return finish(record, Outcome.DONE)
            text = f"{run_id} has no leave request of this decision"
            return finish(record, Outcome.UNDELIVERABLE, "no_request", text)
        self._ladder.resolver.guards.check_kill_switch()
        obstacle = self._deliveries.obstacle(request)
        if obstacle is not None:
            return finish(record, Outcome.UNDELIVERABLE, *obstacle)
        keep = request.action is Action.REQUEST_CHECKPOINT
        now = self._clock.wall()
        self._requests.write(
            run_id,
            LeaveRequest(
                decision_id=request.decision_id,
                leave_by=now + request.grace,
                at=request.at,
                then="continue" if keep else request.then,
                reason=request.reason,
            ),
        )
        report = dataclasses.replace(record.report, steps={"leave_requested": now})
        return finish(dataclasses.replace(record, report=report), Outcome.DONE)


def _keys(target: Target) -> frozenset[tuple[int, int]]:
    return frozenset(identity.key for identity in target.group.identities)


def _check_grace(request: ActionRequest) -> None:
    watches = request.action is Action.WATCH
    most = MAXIMUM_WATCH_SECONDS if watches else MAXIMUM_GRACE_SECONDS
    if not MINIMUM_GRACE_SECONDS <= request.grace <= most:
        raise RefusedAction(
            "grace",
            f"a grace of {request.grace:g} s is outside of {MINIMUM_GRACE_SECONDS:g} to {most:g} s",
        )


def _record(request: ActionRequest, now: float) -> Record:
    return Record(
        report=ActionReport(
            decision_id=request.decision_id,
            job_id=request.job_id,
            action=request.action,
            state=ActionState.ACCEPTED,
        ),
        epoch=request.epoch,
        boot_id=request.boot_id,
        run_id=request.run_id,
        grace=request.grace,
        at=request.at,
        then=request.then,
        reason=request.reason,
        accepted=now,
    )
