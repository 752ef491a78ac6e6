"""How a case and its audit are written: one statement each, in the caller's transaction."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

    from gpuwarden.ruleengine.records import Change


def store(db: sqlite3.Connection, change: Change, time: float) -> int:
    """Write a case as it now is, with its events; gives its number."""
    case, number = change.case, change.id
    if number is None:
        cursor = db.execute(
            "INSERT INTO cases (rule_id, job_id, state, body, opened_at) VALUES (?, ?, ?, ?, ?)",
            (case.rule_id, case.job_id, case.state.value, case.encode(), case.opened_at),
        )
        number = int(cursor.lastrowid or 0)
        if change.opening is not None:
            opening = (number, change.opening.rule_hash, change.opening.document)
            db.execute("INSERT INTO openings VALUES (?, ?, ?)", opening)
    elif change.closed is not None and not change.events and case.detected_at is None:
        # Never more than a suspicion: nothing refers to it, and nothing was written about it.
        db.execute("DELETE FROM cases WHERE id=?", (number,))
        return number
    else:
        db.execute(
            "UPDATE cases SET state=?, body=?, closed_at=?, closed_because=? WHERE id=?",
            (
                case.state.value,
                case.encode(),
                None if change.closed is None else time,
                change.closed,
                number,
            ),
        )
    db.executemany(
        "INSERT INTO events (time, case_id, rule_id, job_id, kind, mode, detail) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (
                time,
                number,
                case.rule_id,
                case.job_id,
                event.kind,
                change.mode,
                json.dumps(dict(event.detail), sort_keys=True),
            )
            for event in change.events
        ],
    )
    return number
