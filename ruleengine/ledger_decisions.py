"""The decisions of a ledger: each is on disk before anything is done for it.

A decision for one node's agent is one signed request. One that a platform carries out, or that
several nodes take part in, has beside it a part for each question to an agent, and one row that
tells how far it has come; a restarted engine goes on from there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, fields
from typing import TYPE_CHECKING, Any, Protocol

from gpuwarden.ruleengine.ledger_cases import store
from gpuwarden.ruleengine.records import Decision, Part, PlatformAct

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from gpuwarden.ruleengine.records import Change

OPEN_STATES = ("authorised", "acting")


class _Ledger(Protocol):
    """What these tables need of the file."""

    _db: sqlite3.Connection

    def _transaction(self) -> AbstractContextManager[sqlite3.Connection]: ...


class Decisions(_Ledger, Protocol):
    """Decisions, their parts, and how far they have come."""

    def authorise(
        self,
        decision: Decision,
        change: Change,
        *,
        time: float,
        parts: Iterable[Part] = (),
        act: PlatformAct | None = None,
        works: Iterable[str] = (),
    ) -> None:
        """Write a decision and its case down together, before anything is sent.

        Args:
            decision: what is to be done.
            change: of its case.
            time: Unix time.
            parts: what the agents of its nodes are to be asked.
            act: how far its platform has come, where one carries it out.
            works: what names the work that the job does; see `returns.works_of`.

        Raises:
            sqlite3.IntegrityError: the attempt already has a decision that stands.
        """
        with self._transaction() as db:
            values = asdict(decision) | {"gpus": json.dumps(decision.gpus), "state": "authorised"}
            db.execute(
                "INSERT INTO decisions VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                tuple(values.values()),
            )
            for part in parts:
                _store_part(db, part)
            if act is not None:
                _store_act(db, act)
            db.executemany(
                "INSERT INTO works VALUES (?, ?)", [(decision.id, work) for work in sorted(works)]
            )
            store(db, change, time)

    def settle(
        self,
        decision_id: str,
        state: str,
        change: Change | None,
        *,
        time: float,
        reason: str = "",
        report: str | None = None,
    ) -> bool:
        """Write down how far a decision has come, with its case if that is still open.

        Returns:
            False where the decision already had its result: that never changes again.
        """
        finished = None if state in OPEN_STATES else time
        with self._transaction() as db:
            cursor = db.execute(
                "UPDATE decisions SET state=?, reason=?, report=coalesce(?, report), finished_at=? "
                "WHERE id=? AND finished_at IS NULL",
                (state, reason, report, finished, decision_id),
            )
            if cursor.rowcount and change is not None:
                store(db, change, time)
        return bool(cursor.rowcount)

    def decision(self, decision_id: str) -> Decision | None:
        """One decision, or None."""
        found = self._decisions(
            "SELECT * FROM decisions WHERE id=? ORDER BY created_at, id", (decision_id,)
        )
        return found[0] if found else None

    def open_decisions(self) -> list[Decision]:
        """Decisions whose result is not known yet, oldest first."""
        return self._decisions(
            "SELECT * FROM decisions WHERE state IN ('authorised', 'acting') "
            "ORDER BY created_at, id"
        )

    def job_decisions(self, job_id: str) -> list[Decision]:
        """Decisions about a job, oldest first."""
        return self._decisions(
            "SELECT * FROM decisions WHERE job_id=? ORDER BY created_at, id", (job_id,)
        )

    def incomplete_decisions(self) -> list[Decision]:
        """Reclaims that could not be proven, oldest first."""
        return self._decisions(
            "SELECT * FROM decisions WHERE state='incomplete' ORDER BY created_at, id"
        )

    def finished_since(self, since: float) -> list[Decision]:
        """Decisions whose result came after `since` (Unix time), oldest first."""
        return self._decisions(
            "SELECT * FROM decisions WHERE finished_at >= ? ORDER BY created_at, id", (since,)
        )

    def recent_decisions(self, since: float) -> list[Decision]:
        """Decisions made after `since` (Unix time), oldest first."""
        return self._decisions(
            "SELECT * FROM decisions WHERE created_at >= ? ORDER BY created_at, id", (since,)
        )

    def ends_since(self, since: float) -> list[Decision]:
        """Decisions that took a card, or still may, and are younger than `since`.

        An end counts unless it was refused or has lapsed; a yield only while it is open, or once
        the job has followed it.
        """
        return self._decisions(
            "SELECT * FROM decisions WHERE created_at >= ? AND ("
            "(action IN ('terminate', 'requeue') AND state NOT IN ('refused', 'lapsed')) OR "
            "(action = 'yield' AND state IN ('authorised', 'acting', 'verified'))"
            ") ORDER BY created_at, id",
            (since,),
        )

    def _decisions(self, query: str, values: tuple[object, ...] = ()) -> list[Decision]:
        return [_decision(row) for row in self._db.execute(query, values)]

    # -- what nodes and platforms do for a decision

    def parts(self, decision_id: str) -> list[Part]:
        """What the agents of a decision's nodes were asked, in the order of that."""
        rows = self._db.execute(
            "SELECT * FROM decision_parts WHERE decision_id=? ORDER BY rowid", (decision_id,)
        )
        return [Part(*row) for row in rows]

    def save_part(self, part: Part) -> None:
        """Write one part down as it now is."""
        with self._transaction() as db:
            _store_part(db, part)

    def platform_act(self, decision_id: str) -> PlatformAct | None:
        """How far a decision that is carried out step by step has come, or None."""
        row = self._db.execute(
            "SELECT * FROM platform_acts WHERE decision_id=?", (decision_id,)
        ).fetchone()
        return None if row is None else PlatformAct(*row)

    def save_act(self, act: PlatformAct, change: Change | None = None, *, time: float) -> None:
        """Write down how far a decision has come, with a line in the audit of its case."""
        with self._transaction() as db:
            _store_act(db, act)
            if change is not None:
                store(db, change, time)


def _decision(row: tuple[Any, ...]) -> Decision:
    # The record's fields are the table's columns, in their order.
    values = dict(zip((item.name for item in fields(Decision)), row, strict=True))
    return Decision(**{**values, "gpus": tuple(json.loads(values["gpus"]))})


def _store_part(db: sqlite3.Connection, part: Part) -> None:
    db.execute(
        "INSERT INTO decision_parts VALUES (?,?,?,?,?,?,?,?,?,?,?,?) "
        "ON CONFLICT (decision_id, host, action) DO UPDATE SET node=excluded.node, "
        "boot_id=excluded.boot_id, agent_id=excluded.agent_id, "
        "body=excluded.body, signature=excluded.signature, expires=excluded.expires, "
        "state=excluded.state, reason=excluded.reason, report=excluded.report",
        astuple(part),
    )


def _store_act(db: sqlite3.Connection, act: PlatformAct) -> None:
    db.execute(
        "INSERT OR REPLACE INTO platform_acts VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", astuple(act)
    )
