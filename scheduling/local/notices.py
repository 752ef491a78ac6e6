"""Notices to leave: given by the engine or by job files, followed, and taken back.

A notice is written down before it is given. It is told once: an engine that was asked is asked
again with the same key, and a file that is gone is written again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from gpuwarden.job_files import LeaveRequest, RequestState
from gpuwarden.schedule_api import Outcome
from gpuwarden.scheduling.leaves import MAX_REASON, LeaveOrder, LeaveState
from gpuwarden.scheduling.local.engine_requests import Protected

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.job_files import RunStatus
    from gpuwarden.scheduling.leaves import Leave
    from gpuwarden.scheduling.local.engine_requests import EngineRequests
    from gpuwarden.scheduling.local.progress import RunFiles
    from gpuwarden.scheduling.local.queues import Attempt, Job, Note, Queue

PROTECTED_SECONDS = 900.0
"""How long nobody asks a job again that the engine protects."""
UNDELIVERED_SECONDS = 60.0
"""After it the job files are used for a leave that the engine took on and did not deliver."""
BY_FILE = "file"
"""In the place of an engine's leave: it was asked by the job files, for good."""
_ENGINES = "leave-"
"""How ids of requests begin by which the engine carries out leaves."""
_MAX_DEADLINE = 3600.0
"""Seconds that the engine takes at most."""
_TO_FILES = frozenset({LeaveState.UNDELIVERABLE, LeaveState.LAPSED})
_TAKEN_BACK = frozenset({LeaveState.WITHDRAWN, LeaveState.REFUSED})

log = structlog.get_logger("gpuwarden.scheduling.local")


@dataclass(slots=True)
class Notices:
    """Gives the notices that are written down.

    Attributes:
        queue: where they are.
        files: of a job.
        engine: which has jobs asked, or None.
        job_id: the exporter's name of a job, where that is sure.
        failed: why no job file can be written, or an empty string; to be looked at and cleared.
        silent: attempt -> until when it is not asked, and why.
    """

    queue: Queue
    files: Callable[[Job], RunFiles]
    engine: EngineRequests | None
    job_id: Callable[[Job, Attempt], str | None]
    failed: str = ""
    silent: dict[int, tuple[float, str]] = field(default_factory=dict)

    def open_one(self, attempt: Attempt) -> Note | None:
        """The notice that stands for an attempt."""
        notes = self.queue.notes(closed_since=float("inf"))
        return next((note for note in notes if note.attempt == attempt.id), None)

    def give(self, now: float) -> None:
        """Deliver what is written down, and see what has become of what was delivered."""
        self.silent = {key: value for key, value in self.silent.items() if value[0] > now}
        running = {each.id: each for each in self.queue.attempts("running")}
        for note in self.queue.notes(closed_since=float("inf")):
            job = self.queue.job(str(note.job))
            attempt = running.get(note.attempt)
            if attempt is None or job is None or self.files(job).others():
                continue
            if note.leave not in ("", BY_FILE):
                self._follow_engine(note, attempt, now)
            elif not self._stands(note, job, now) and not self._by_engine(note, job, attempt, now):
                self._by_file(note, job, now)

    def _stands(self, note: Note, job: Job, now: float) -> bool:
        standing = self.files(job).request()
        if standing is None:
            return False
        if self.engine is not None and standing.decision_id.startswith(_ENGINES):
            return False  # a daemon that was killed may have had it made, and not written it down
        # Somebody else's request is left alone: it may be a rule's, which holds the job.
        if standing.decision_id == note.id and note.notified is None:
            self.queue.change_note(note.id, notified=now)
        return True

    def _by_engine(self, note: Note, job: Job, attempt: Attempt, now: float) -> bool:
        """Have the engine ask a job; returns whether no file is to be written."""
        if self.engine is None or note.leave == BY_FILE or note.notified is not None:
            return False
        order = LeaveOrder(
            key=note.id,
            cause=note.cause,
            reason=note.words[:MAX_REASON] or note.cause,
            deadline_seconds=min(_MAX_DEADLINE, max(1.0, note.deadline - now)),
            at=note.at,
            job_id=self.job_id(job, attempt) or "",
            run_id=job.run_id,
            successor=note.successor.replace(" ", "-")[:256],
        )
        answer = self.engine.ask(order)
        if answer is None:
            return False
        if isinstance(answer, Protected):
            self._protect(note, attempt, answer.words, now)
            return True
        log.info("asked to leave by the engine", entry=job.entry, leave=answer.id)
        self.queue.change_note(note.id, leave=answer.id)
        self._see(note, attempt, answer, now)
        return True

    def _by_file(self, note: Note, job: Job, now: float) -> None:
        # A notice that was late in coming gives as much time as it was to give.
        late = note.notified is None
        deadline = _deadline(note, now) if late else note.deadline
        try:
            self.files(job).ask(LeaveRequest(note.id, deadline, note.at, "requeue", note.words))
        except OSError as error:
            self.failed = str(error)
            return
        if late:
            self.queue.change_note(note.id, notified=now, deadline=deadline, leave=BY_FILE)
            log.info("asked to leave", entry=job.entry, words=note.words)

    def _follow_engine(self, note: Note, attempt: Attempt, now: float) -> None:
        found = None if self.engine is None else self.engine.look(note.leave)
        if found is not None:
            self._see(note, attempt, found, now)
        elif note.notified is None and now - note.made >= UNDELIVERED_SECONDS:
            self.queue.change_note(note.id, leave=BY_FILE)

    def _see(self, note: Note, attempt: Attempt, leave: Leave, now: float) -> None:
        """Write down how far a leave has come."""
        told = leave.steps.get("notified")
        if told is not None and note.notified is None:
            told = min(max(told, note.made), now)
            self.queue.change_note(note.id, notified=told, deadline=_deadline(note, told))
        elif leave.state in _TO_FILES:
            log.warning("the engine could not ask", entry=note.job, why=leave.why)
            self.queue.change_note(note.id, leave=BY_FILE)
        if leave.state in _TAKEN_BACK:
            self._protect(note, attempt, leave.why or f"the leave was {leave.state}", now)

    def _protect(self, note: Note, attempt: Attempt, words: str, now: float) -> None:
        """Nobody asks this job for a while; others may be asked in its place."""
        log.warning("not asked to leave", entry=note.job, why=words)
        self.silent[attempt.id] = (now + PROTECTED_SECONDS, words)
        self._close(note, f"The engine did not have it asked: {words}"[:1000], now)

    def withdraw(self, attempt: Attempt, now: float) -> None:
        """Take a notice back that has become useless."""
        note, job = self.open_one(attempt), self.queue.job(str(attempt.job))
        if note is None or job is None:
            return
        if self.engine is not None and note.leave not in ("", BY_FILE):
            self.engine.withdraw(note.leave)
        self.files(job).withdraw(note.id)
        self._close(note, "Nobody needs its cards any more.", now)

    def _close(self, note: Note, words: str, now: float) -> None:
        outcome = Outcome.WITHDRAWN.value
        self.queue.change_note(note.id, closed=now, outcome=outcome, last=words)

    def follow(self, note: Note, status: RunStatus, now: float) -> None:
        """Write down the steps that a job tells of its notice."""
        answer = status.request
        if answer is None or note.notified is None or not _answers(answer.decision_id, note):
            return
        changes: dict[str, float] = {}
        saved = None if status.checkpoint is None else status.checkpoint.durable
        leaving = answer.state is RequestState.LEAVING
        if note.saved is None and leaving and saved is not None and saved >= note.notified:
            changes["saved"] = min(saved, now)
        if note.acknowledged is None:
            # A trainer that tells no times had it at the latest when it had saved.
            told = answer.times.get(RequestState.RECEIVED.value, changes.get("saved", now))
            changes["acknowledged"] = min(max(told, note.notified), now)
        if changes:
            self.queue.change_note(note.id, **changes)

    def problems(self) -> list[tuple[str, str]]:
        """What an operator should know."""
        found = []
        if self.engine is not None and (words := self.engine.problem()):
            found.append(("engine_unreachable", words))
        for number, (_until, why) in sorted(self.silent.items()):
            found.append(("not_asked", f"Attempt {number} was to leave and was not asked: {why}."))
        return found


def _deadline(note: Note, delivered: float) -> float:
    return max(note.deadline, delivered + note.deadline - note.made)


def _answers(decision: str, note: Note) -> bool:
    """Whether a trainer's answer is to this notice; the engine's decisions begin with its leave."""
    if note.leave not in ("", BY_FILE) and decision.startswith(note.leave):
        return True
    return decision == note.id
