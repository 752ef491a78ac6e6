"""What the queue remembers, in its own nouns: jobs, attempts, notices."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import secrets
import sqlite3
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import RefusedAction
from gpuwarden.schedule_api import Outcome
from gpuwarden.scheduling.local.processes import ProcessId
from gpuwarden.scheduling.local.queue_files import opened
from gpuwarden.scheduling.sqlite_files import transaction
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from gpuwarden.scheduling.local.launches import Claim
    from gpuwarden.scheduling.local.scenes import Notice

KEPT_SECONDS = 32 * 86400.0
"""How long what is over stays: a month's budget is counted from it."""
NOTE_PREFIX = "local-"
"""Of the ids of this engine's notices: no other's request begins so."""


@dataclass(frozen=True)
class Job:
    """A row of `jobs`; see the columns there.

    Attributes:
        then_what: what becomes of it when its attempt has left: `hold`, `cancel`, or nothing.
    """

    id: int
    task_text: str
    uid: int
    gid: int
    user: str
    run_id: str
    submitted: float
    state: str
    held: str
    code: str
    words: str
    ended: float | None
    requeues: int
    failures: int
    barren: int
    epoch: int
    step: int
    epoch_seconds: float | None
    then_what: str

    @cached_property
    def task(self) -> Task:
        """What it runs."""
        return _task_of(self.task_text)

    @property
    def entry(self) -> str:
        """Its id, as everybody else writes it."""
        return str(self.id)


@functools.lru_cache(maxsize=4096)
def _task_of(text: str) -> Task:
    # Remembered: every tick and every look at the queue reads all that wait.
    return Task.from_document(json.loads(text))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A row of `attempts`; see the columns there."""

    id: int
    job: int
    created: float
    kind: str
    gpus: int
    state: str
    boot: str | None
    stub: ProcessId | None
    process: ProcessId | None
    began: float | None
    epoch: int | None
    epoch_at: float | None
    step: int | None
    saved: float | None
    saved_step: int | None
    ended: float | None
    exit: int | None
    why: str
    freed: float | None
    term_at: float | None
    kill_at: float | None


@dataclass(frozen=True, slots=True)
class Note:
    """A row of `notices`; see the columns there."""

    id: str
    attempt: int
    job: int
    cause: str
    successor: str
    at: str
    made: float
    deadline: float
    words: str
    outcome: str
    notified: float | None
    acknowledged: float | None
    saved: float | None
    left: float | None
    freed: float | None
    started: float | None
    lost: float | None
    last: str
    closed: float | None
    leave: str

    @classmethod
    def of(cls, notice: Notice, attempt: Attempt, now: float) -> Note:
        """A notice that is to be given, under an id that no other has."""
        return cls(
            id=f"{NOTE_PREFIX}{secrets.token_hex(8)}",
            attempt=attempt.id,
            job=attempt.job,
            cause=notice.cause.value,
            successor=notice.successor,
            at=notice.at,
            made=now,
            deadline=notice.deadline,
            words=notice.words,
            outcome=Outcome.OPEN.value,
            notified=None,
            acknowledged=None,
            saved=None,
            left=None,
            freed=None,
            started=None,
            lost=None,
            last="",
            closed=None,
            leave="",
        )

    STEPS = ("notified", "acknowledged", "saved", "left", "freed", "started")


_JOB_COLUMNS = "id, task AS task_text, " + ", ".join(
    each.name for each in dataclasses.fields(Job) if each.name not in {"id", "task_text"}
)


class Queue:
    """The queue's file, by what is asked of it and what is written to it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._db = opened(path)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    # -- reading

    def jobs(self, *, ended_since: float) -> list[Job]:
        """Jobs that wait or run, and those that ended since then."""
        rows = self._db.execute(
            f"SELECT {_JOB_COLUMNS} FROM jobs WHERE state IN ('waiting', 'active') OR ended >= ? "  # noqa: S608 (fixed names)
            "ORDER BY id",
            (ended_since,),
        )
        return [Job(**row) for row in rows]

    def job(self, entry: str) -> Job | None:
        """One job by its id."""
        if not entry.isdecimal() or len(entry) > 15:
            return None
        row = self._db.execute(
            f"SELECT {_JOB_COLUMNS} FROM jobs WHERE id = ?",  # noqa: S608 (fixed names)
            (int(entry),),
        ).fetchone()
        return None if row is None else Job(**row)

    def by_token(self, token: str) -> str | None:
        """The id of the job that was submitted with a token."""
        row = self._db.execute("SELECT id FROM jobs WHERE token = ?", (token,)).fetchone()
        return None if row is None else str(row["id"])

    def attempts(self, *states: str) -> list[Attempt]:
        """Attempts in some states, the oldest first."""
        marks = ", ".join("?" for _ in states)
        rows = self._db.execute(
            f"SELECT * FROM attempts WHERE state IN ({marks}) ORDER BY id",  # noqa: S608 (marks)
            states,
        )
        return [_attempt(row) for row in rows]

    def attempts_between(self, begin: float, end: float) -> list[Attempt]:
        """Attempts that held cards at some time from `begin` to `end`."""
        rows = self._db.execute(
            "SELECT * FROM attempts WHERE created < ? AND "
            "(state IN ('reserved', 'running', 'ended') OR coalesce(freed, ended) > ?) ORDER BY id",
            (end, begin),
        )
        return [_attempt(row) for row in rows]

    def held(self) -> dict[str, int]:
        """UUID -> attempt."""
        return {row["uuid"]: row["attempt"] for row in self._db.execute("SELECT * FROM held")}

    def notes(self, *, closed_since: float) -> list[Note]:
        """Notices that are open, and those that were closed since then."""
        rows = self._db.execute(
            "SELECT * FROM notices WHERE closed IS NULL OR closed >= ? ORDER BY made, id",
            (closed_since,),
        )
        return [Note(**row) for row in rows]

    def left_for_others(self, since: float) -> dict[str, tuple[float, ...]]:
        """Job id -> when it left for others, since then."""
        found: dict[str, list[float]] = {}
        rows = self._db.execute(
            'SELECT job, "left" FROM notices WHERE "left" >= ? AND cause IN '
            "('priority', 'booking') ORDER BY \"left\"",
            (since,),
        )
        for row in rows:
            found.setdefault(str(row["job"]), []).append(row["left"])
        return {job: tuple(times) for job, times in found.items()}

    def promised(self, since: float) -> frozenset[str]:
        """Ids of jobs for which others have left since then, and which have not started for it."""
        rows = self._db.execute(
            'SELECT DISTINCT successor FROM notices WHERE "left" >= ? AND started IS NULL '
            "AND cause = 'priority'",
            (since,),
        )
        return frozenset(row["successor"] for row in rows)

    def states_of(self, entries: Iterable[str]) -> dict[str, str]:
        """Job id -> state, of those that are known."""
        found = {}
        for entry in entries:
            job = self.job(entry)
            if job is not None:
                found[entry] = job.state
        return found

    # -- writing

    def add(self, task: Task, *, user: str, uid: int, gid: int, token: str, now: float) -> str:
        """Take a job on.

        Raises:
            RefusedAction: a job of this run is in the queue already.
        """
        try:
            with transaction(self._db) as db:
                row = db.execute(
                    "INSERT INTO jobs (token, task, uid, gid, user, run_id, submitted, state) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, 'waiting') RETURNING id",
                    (
                        token or None,
                        json.dumps(task.as_document()),
                        uid,
                        gid,
                        user,
                        task.run_id,
                        now,
                    ),
                ).fetchone()
        except sqlite3.IntegrityError as error:
            raise RefusedAction(
                "run_taken",
                f"a job of the run {task.run_id} is in the queue already: give this one another "
                "--name, or cancel that one",
            ) from error
        return str(row["id"])

    def change_job(self, job: int, **values: Any) -> None:
        """Set columns of a job."""
        with transaction(self._db) as db:
            _set(db, "jobs", job, values)

    def change_attempt(self, attempt: int, **values: Any) -> None:
        """Set columns of an attempt."""
        with transaction(self._db) as db:
            _set(db, "attempts", attempt, values)

    def change_note(self, note: str, **values: Any) -> None:
        """Set columns of a notice."""
        with transaction(self._db) as db:
            _set(db, "notices", note, values)

    def move(self, seconds: float) -> None:
        """Move what is open in time: the clock by which it was written was set by so much."""
        names = ("made", "deadline", *Note.STEPS)
        moved = ", ".join(f'"{name}" = "{name}" + ?1' for name in names)
        with transaction(self._db) as db:
            db.execute(
                f"UPDATE notices SET {moved} WHERE closed IS NULL",  # noqa: S608 (fixed names)
                (seconds,),
            )
            db.execute(
                "UPDATE attempts SET kill_at = kill_at + ? WHERE state = 'running'", (seconds,)
            )

    def reserve(self, job: int, *, kind: str, cards: Sequence[str], now: float) -> int:
        """Give a job its cards, before anything is started; returns the attempt's number.

        Raises:
            RefusedAction: a card is somebody's, or the job runs: nothing was changed.
        """
        try:
            with transaction(self._db) as db:
                attempt = int(
                    db.execute(
                        "INSERT INTO attempts (job, created, kind, gpus, state) "
                        "VALUES (?, ?, ?, ?, 'reserved') RETURNING id",
                        (job, now, kind, len(cards)),
                    ).fetchone()["id"]
                )
                db.executemany(
                    "INSERT INTO held (uuid, attempt) VALUES (?, ?)",
                    [(uuid, attempt) for uuid in cards],
                )
                _set(db, "jobs", job, {"state": "active", "code": "", "words": ""})
        except sqlite3.IntegrityError as error:
            raise RefusedAction(
                "reserved", f"job {job} or one of its cards is in use: {error}"
            ) from error
        return attempt

    def begin(self, attempt: int, claim: Claim) -> None:
        """Remember what was started."""
        self.change_attempt(
            attempt,
            state="running",
            boot=claim.boot,
            stub_pid=claim.stub.pid,
            stub_ticks=claim.stub.ticks,
            pid=claim.job.pid,
            ticks=claim.job.ticks,
        )

    def end(
        self,
        attempt: Attempt,
        *,
        ended: Mapping[str, Any],
        job: Mapping[str, Any],
        note: tuple[str, Mapping[str, Any]] | None,
    ) -> None:
        """Write down that an attempt has ended, with what that means for its job and its notice."""
        with transaction(self._db) as db:
            _set(db, "attempts", attempt.id, {"state": "ended", **ended})
            _set(db, "jobs", attempt.job, job)
            if note is not None:
                _set(db, "notices", note[0], note[1])

    def free(self, attempt: int, *, notes: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """Take back the cards of an attempt that has ended."""
        with transaction(self._db) as db:
            db.execute("DELETE FROM held WHERE attempt = ?", (attempt,))
            _set(db, "attempts", attempt, {"state": "freed", "freed": now})
            for note, values in notes.items():
                _set(db, "notices", note, values)

    def tell(self, note: Note) -> None:
        """Write a notice down, before it is given.

        Raises:
            RefusedAction: the attempt has one already.
        """
        values = dataclasses.asdict(note)
        names = ", ".join(f'"{name}"' for name in values)
        marks = ", ".join("?" for _ in values)
        try:
            with transaction(self._db) as db:
                db.execute(
                    f"INSERT INTO notices ({names}) VALUES ({marks})",  # noqa: S608 (fixed names)
                    tuple(values.values()),
                )
        except sqlite3.IntegrityError as error:
            raise RefusedAction("told", f"attempt {note.attempt} was told already") from error

    def forget(self, before: float) -> list[int]:
        """Forget what was over before then; returns the attempts that were forgotten.

        A job that another still waits for stays: how it ended decides about that one.
        """
        waiting = (job for job in self.jobs(ended_since=math.inf) if job.state == "waiting")
        named = {entry for job in waiting for entry in job.task.after if entry.isdecimal()}
        needed = json.dumps([int(entry) for entry in named])
        with transaction(self._db) as db:
            db.execute("DELETE FROM notices WHERE closed < ?", (before,))
            old = [
                int(row["id"])
                for row in db.execute(
                    "DELETE FROM attempts WHERE state = 'freed' AND freed < ? AND NOT EXISTS "
                    "(SELECT 1 FROM notices WHERE attempt = attempts.id) RETURNING id",
                    (before,),
                )
            ]
            db.execute(
                "DELETE FROM jobs WHERE state IN ('done', 'failed') AND ended < ? AND NOT EXISTS "
                "(SELECT 1 FROM attempts WHERE job = jobs.id) AND NOT EXISTS "
                "(SELECT 1 FROM notices WHERE job = jobs.id) AND id NOT IN "
                "(SELECT value FROM json_each(?))",
                (before, needed),
            )
        return old


def _attempt(row: sqlite3.Row) -> Attempt:
    values = dict(row)
    stub = (values.pop("stub_pid"), values.pop("stub_ticks"))
    process = (values.pop("pid"), values.pop("ticks"))
    return Attempt(
        **values,
        stub=None if stub[0] is None else ProcessId(*stub),
        process=None if process[0] is None else ProcessId(*process),
    )


def _set(db: sqlite3.Connection, table: str, key: int | str, values: Mapping[str, Any]) -> None:
    if not values:
        return
    names = ", ".join(f'"{name}" = ?' for name in values)
    db.execute(
        f"UPDATE {table} SET {names} WHERE id = ?",  # noqa: S608 (fixed names)
        (*values.values(), key),
    )
