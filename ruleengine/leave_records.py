"""Leave requests of a scheduler, as the ledger keeps them: on disk before anything is sent."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.records import Decision, Part, PlatformAct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.ledger import Ledger

LATE_SECONDS = 30.0
"""After its deadline a job that just then begins to leave is still watched for this long."""
CAUSES = ("priority", "booking", "window", "budget")
"""Why a scheduler may ask."""
STEPS = ("notified", "acknowledged", "saved", "left", "freed")
"""What is seen of a leave, in this order; the successor's start is the scheduler's to see."""


class LeaveState(StrEnum):
    """How far a leave request has come."""

    ASKED = "asked"
    """It is on disk, and on its way to the job's nodes."""
    WAITING = "waiting"
    """The trainer can read it; its time runs."""
    LEFT = "left"
    """Every process of the job has gone."""
    UNHEEDED = "unheeded"
    """Its time is over, and the job is still there; the request was taken back."""
    UNDELIVERABLE = "undeliverable"
    """Nobody in the job can read it."""
    REFUSED = "refused"
    """An agent would not, or enforcement was stopped before it arrived."""
    LAPSED = "lapsed"
    """No agent took it on in time."""
    WITHDRAWN = "withdrawn"
    """It was taken back."""
    OVERTAKEN = "overtaken"
    """A rule has decided about the job meanwhile; what becomes of it is that decision's."""

    @property
    def over(self) -> bool:
        """Whether nothing more becomes of it."""
        return self not in (LeaveState.ASKED, LeaveState.WAITING)

    @property
    def stands(self) -> bool:
        """Whether the attempt counts as asked: also once it has left, or did not."""
        return self not in (
            LeaveState.REFUSED,
            LeaveState.UNDELIVERABLE,
            LeaveState.LAPSED,
            LeaveState.WITHDRAWN,
        )


@dataclass(frozen=True, slots=True)
class LeaveOrder:
    """What a scheduler asks for.

    Attributes:
        job_id: the attempt, or empty where only its run is known.
        run_id: the trainer's run, or empty.
        at: step or epoch: where the trainer is to stop.
        then: requeue or hold: what its exit status is to tell its platform.
        deadline: seconds that it has.
        cause: priority, booking, window or budget.
        reason: one line for the owner.
        successor: what is to start in its place, in the scheduler's words, or empty.
        key: names this very request: repeated, it is answered and not made again.
    """

    job_id: str
    run_id: str
    at: str
    then: str
    deadline: float
    cause: str
    reason: str
    successor: str
    key: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A leave request and what became of it. Times are Unix seconds.

    Attributes:
        id: the engine's name of it.
        key, at, cause, reason, successor: as in `LeaveOrder`; `after` is its `then`.
        by: who asked.
        job_id, run_id, user: whom.
        deadline: seconds that the job has.
        hosts: of its nodes.
        epoch: life of the engine that decided.
        expires: after which an unanswered question to an agent cannot be taken on any more.
        created_at: when it was written down.
        state: how far it has come.
        why: the reason of a result.
        finished_at: of the result, or None.
        act: how far its steps have come.
        receipts: of the trainer, step -> time; once there is a result, every step.
        changed_at: when anything of this was last written.
    """

    id: str
    key: str
    by: str
    job_id: str
    run_id: str
    user: str
    at: str
    after: str
    deadline: float
    cause: str
    reason: str
    successor: str
    hosts: tuple[str, ...]
    epoch: int
    expires: float
    created_at: float
    state: LeaveState
    why: str
    finished_at: float | None
    act: PlatformAct
    receipts: Mapping[str, float]
    changed_at: float

    def asks_the_same(self, order: LeaveOrder) -> bool:
        """Whether an order with the same key is this one; of job and run one may be left out."""
        return (
            order.job_id in ("", self.job_id)
            and order.run_id in ("", self.run_id)
            and (order.at, order.then, order.deadline, order.cause)
            == (self.at, self.after, self.deadline, self.cause)
            and (order.reason, order.successor) == (self.reason, self.successor)
        )

    @property
    def decision(self) -> Decision:
        """The same as what a ladder carries out: a yield that no rule's case stands behind."""
        return Decision(
            id=self.id,
            epoch=self.epoch,
            case_id=0,
            rule_id="",
            job_id=self.job_id,
            user=self.user,
            action="yield",
            state="acting" if self.state is LeaveState.WAITING else "authorised",
            host=self.hosts[0],
            body=b"",
            signature="",
            gpus=(),
            evidence="[]",
            grace=self.deadline + LATE_SECONDS,
            expires=self.expires,
            created_at=self.created_at,
        )


_COLUMNS = tuple(item.name for item in fields(Leave))
"""Of the table, in the same order."""


class LeaveStore:
    """The leaves of a ledger, and what the nodes' agents were asked for them.

    It offers a ladder what that needs of a ledger.

    Args:
        ledger: the file.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    # -- writing

    def add(self, leave: Leave, parts: Iterable[Part], *, time: float) -> None:
        """Write a new leave down, with all that is to be asked for it and a line of the audit.

        Raises:
            sqlite3.IntegrityError: the attempt was asked already, or the key is taken.
            LedgerUnusable: it cannot be written, and so does not hold.
        """
        values = _row(leave)
        with self._ledger.transaction() as db:
            db.execute(
                "INSERT INTO leaves VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", values
            )
            for part in parts:
                self._store(db, part)
            _note(db, leave, "leave_authorised", time, {"by": leave.by, **_terms(leave)})

    def save_part(self, part: Part) -> None:
        """Write one question down as it now is."""
        with self._ledger.transaction() as db:
            self._store(db, part)

    @staticmethod
    def _store(db: Any, part: Part) -> None:
        values = dataclasses.astuple(part)
        db.execute("INSERT OR REPLACE INTO leave_parts VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", values)

    def save_act(self, act: PlatformAct, *, time: float) -> None:
        """Write down how far a leave has come."""
        with self._ledger.transaction() as db:
            db.execute(
                "UPDATE leaves SET act=?, changed_at=? WHERE id=?",
                (_encoded(act), time, act.decision_id),
            )

    def note(self, leave: Leave, act: PlatformAct, kind: str, *, time: float) -> None:
        """Write a step down, with its line of the audit."""
        waits = act.step in ("waiting", "withdrawing")
        state = LeaveState.WAITING if waits else leave.state
        with self._ledger.transaction() as db:
            db.execute(
                "UPDATE leaves SET act=?, state=?, changed_at=? WHERE id=? AND finished_at IS NULL",
                (_encoded(act), state.value, time, leave.id),
            )
            _note(db, leave, f"leave_{kind}", time, {"why": act.why} if act.why else {})

    def settle(
        self,
        leave: Leave,
        state: LeaveState,
        why: str,
        *,
        steps: Mapping[str, float],
        time: float,
    ) -> bool:
        """Write a result down; whether it is one, since a result never changes again.

        Args:
            leave: whose it is.
            state: the result.
            why: the reason.
            steps: everything that was seen, so that nobody has to ask the parts for it again.
            time: Unix time.
        """
        with self._ledger.transaction() as db:
            cursor = db.execute(
                "UPDATE leaves SET state=?1, why=?2, finished_at=?3, changed_at=?3, receipts=?5 "
                "WHERE id=?4 AND finished_at IS NULL",
                (state.value, why, time, leave.id, json.dumps(dict(steps), sort_keys=True)),
            )
            if cursor.rowcount:
                _note(db, leave, f"leave_{state.value}", time, {"why": why} if why else {})
        return bool(cursor.rowcount)

    def save_receipts(self, leave: Leave, receipts: Mapping[str, float], *, time: float) -> None:
        """Write down what its trainer has told."""
        with self._ledger.transaction() as db:
            text = json.dumps(dict(receipts), sort_keys=True)
            db.execute(
                "UPDATE leaves SET receipts=?, changed_at=? WHERE id=?", (text, time, leave.id)
            )

    # -- reading

    def parts(self, leave_id: str) -> list[Part]:
        """What the agents of its nodes were asked, in the order of that."""
        rows = self._ledger.rows(
            "SELECT * FROM leave_parts WHERE leave_id=? ORDER BY rowid", (leave_id,)
        )
        return [Part(*row) for row in rows]

    def taken(self, epoch: int) -> str:
        """Why this file is not that of this life of the engine any more, or an empty string."""
        return self._ledger.taken(epoch)

    def get(self, leave_id: str) -> Leave | None:
        """One leave, or None."""
        found = self._leaves("SELECT * FROM leaves WHERE id=?", (leave_id,))
        return found[0] if found else None

    def by_key(self, by: str, key: str) -> Leave | None:
        """The leave that somebody asked for under a key, or None."""
        found = self._leaves("SELECT * FROM leaves WHERE by=? AND key=?", (by, key))
        return found[0] if found else None

    def open(self) -> list[Leave]:
        """Leaves without a result, oldest first."""
        return self._leaves(
            "SELECT * FROM leaves WHERE finished_at IS NULL ORDER BY created_at, id"
        )

    def lately_open(self, time: float) -> list[Leave]:
        """Leaves without a result, or with one that came after a time, oldest first."""
        return self._leaves(
            "SELECT * FROM leaves WHERE finished_at IS NULL OR finished_at >= ? "
            "ORDER BY created_at, id",
            (time,),
        )

    def of_job(self, job_id: str) -> list[Leave]:
        """The leaves of an attempt, oldest first."""
        return self._leaves(
            "SELECT * FROM leaves WHERE job_id=? ORDER BY created_at, id", (job_id,)
        )

    def since(self, time: float) -> list[Leave]:
        """Leaves that were asked for after a time, oldest first."""
        return self._leaves(
            "SELECT * FROM leaves WHERE created_at >= ? ORDER BY created_at, id", (time,)
        )

    def newest(self, limit: int) -> list[Leave]:
        """The newest leaves, newest first."""
        return self._leaves(
            "SELECT * FROM leaves ORDER BY created_at DESC, id DESC LIMIT ?", (limit,)
        )

    def counts(self) -> dict[tuple[str, str], int]:
        """(cause, result) -> how many, none of them too; never falls."""
        rows = self._ledger.rows("SELECT cause, state, count FROM leave_counts")
        results = [state.value for state in LeaveState if state.over]
        none = {(cause, result): 0 for cause in CAUSES for result in results}
        return none | {(cause, state): count for cause, state, count in rows}

    def _leaves(self, query: str, values: Sequence[object] = ()) -> list[Leave]:
        return [_leave(row) for row in self._ledger.rows(query, values)]


def _row(leave: Leave) -> tuple[object, ...]:
    values: dict[str, object] = {name: getattr(leave, name) for name in _COLUMNS}
    return tuple(
        {
            **values,
            "hosts": json.dumps(leave.hosts),
            "state": leave.state.value,
            "act": _encoded(leave.act),
            "receipts": json.dumps(dict(leave.receipts), sort_keys=True),
        }.values()
    )


def _leave(row: tuple[Any, ...]) -> Leave:
    values = dict(zip(_COLUMNS, row, strict=True))
    return Leave(
        **{
            **values,
            "hosts": tuple(json.loads(values["hosts"])),
            "state": LeaveState(values["state"]),
            "act": PlatformAct(**json.loads(values["act"])),
            "receipts": MappingProxyType(json.loads(values["receipts"])),
        }
    )


def _encoded(act: PlatformAct) -> str:
    return json.dumps(dataclasses.asdict(act), sort_keys=True)


def _terms(leave: Leave) -> dict[str, object]:
    return {
        "cause": leave.cause,
        "reason": leave.reason,
        "at": leave.at,
        "then": leave.after,
        "deadline": leave.deadline,
        "successor": leave.successor,
    }


def _note(db: Any, leave: Leave, kind: str, time: float, detail: Mapping[str, object]) -> None:
    about = {"leave": leave.id, "run_id": leave.run_id, **detail}
    db.execute(
        "INSERT INTO events (time, rule_id, job_id, kind, mode, detail) "
        "VALUES (?, '', ?, ?, '', ?)",
        (time, leave.job_id, kind, json.dumps(about, sort_keys=True)),
    )
