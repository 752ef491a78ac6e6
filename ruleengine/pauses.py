"""The global pause: a person says that no job is to be ended for now, and why.

It is in the ledger, so that it outlives every restart; the kill-switch file remains, for when
nobody can sign in. Verdicts, notices and deadlines go on meanwhile.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import structlog

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.records import Pause

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.ledger import Ledger

log = structlog.get_logger(__name__)


def switched_on(path: Path) -> bool | None:
    """Whether the kill switch is on, or None if that cannot be read.

    Args:
        path: the file whose existence is the switch.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return True


class Pauses:
    """The pause in force, if there is one.

    Args:
        ledger: where it is written before it counts.
        clock: wall time.
    """

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    def current(self) -> Pause | None:
        """The pause that holds now, or None."""
        rows = self._ledger.rows(
            "SELECT id, by, reason, begun_at, until FROM pauses WHERE ended_at IS NULL "
            "AND (until IS NULL OR until > ?) ORDER BY id DESC LIMIT 1",
            (self._clock.wall(),),
        )
        return Pause(*rows[0]) if rows else None

    @property
    def sentence(self) -> str:
        """Who paused, until when and why, for people; empty while nobody did."""
        pause = self.current()
        return "" if pause is None else pause_sentence(pause)

    def begin(self, *, by: str, role: str, reason: str, seconds: float | None) -> Pause:
        """Pause, in the place of any earlier pause.

        Args:
            by: who says so.
            role: what lets them.
            reason: why, for the audit and for every page.
            seconds: after which it ends by itself, or None.

        Raises:
            LedgerUnusable: it cannot be written, and so does not hold.
        """
        now = self._clock.wall()
        until = None if seconds is None else now + seconds
        with self._ledger.transaction() as db:
            db.execute("UPDATE pauses SET ended_at=? WHERE ended_at IS NULL", (now,))
            cursor = db.execute(
                "INSERT INTO pauses (by, reason, begun_at, until) VALUES (?, ?, ?, ?)",
                (by, reason, now, until),
            )
            _note(
                db,
                "paused",
                time=now,
                by=by,
                role=role,
                reason=reason,
                until=None if until is None else rfc3339(until),
            )
        log.warning("enforcement paused", by=by, role=role, reason=reason, seconds=seconds)
        return Pause(int(cursor.lastrowid or 0), by, reason, now, until)

    def end(self, *, by: str, role: str, reason: str) -> bool:
        """End the pause.

        Returns:
            False where there was none.

        Raises:
            LedgerUnusable: it cannot be written, and so goes on.
        """
        if self.current() is None:
            return False
        now = self._clock.wall()
        with self._ledger.transaction() as db:
            db.execute("UPDATE pauses SET ended_at=? WHERE ended_at IS NULL", (now,))
            _note(db, "resumed", time=now, by=by, role=role, reason=reason)
        log.warning("enforcement resumed", by=by, role=role, reason=reason)
        return True


def pause_sentence(pause: Pause) -> str:
    """A pause in words."""
    until = "until somebody resumes" if pause.until is None else f"until {rfc3339(pause.until)}"
    return f"enforcement is paused by {pause.by} {until}: {pause.reason}"


def _note(db: sqlite3.Connection, kind: str, *, time: float, **detail: object) -> None:
    """Write a line of the audit that concerns no single job."""
    db.execute(
        "INSERT INTO events (time, rule_id, job_id, kind, mode, detail) "
        "VALUES (?, '', '', ?, '', ?)",
        (time, kind, json.dumps(detail, sort_keys=True)),
    )
