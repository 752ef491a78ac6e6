"""Where a ledger is at home: a file that was put back, or copied elsewhere, is known as such.

What an engine promised or granted after a copy was made is not in the copy. So an engine that
begins on one does not go on with its open cases: it closes them, and judges and tells anew. A word
in the file and the same word in the lock beside it, with the newest epoch, tell the two apart: the
lock stays where it is, whatever becomes of the file.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import TYPE_CHECKING

import structlog

from gpuwarden.ruleengine.case_records import CloseReason

if TYPE_CHECKING:
    import sqlite3

NOWHERE = ""
"""Stands in a copy in the place of the word: it is at home in no place."""
_MAX_BYTES = 200

log = structlog.get_logger(__name__)


def settle(db: sqlite3.Connection, lock: int, *, before: int, now: float) -> str:
    """Begin a life on a file: close what is open where it is not at home here.

    Args:
        db: in the transaction in which the life begins.
        lock: descriptor of the lock beside the file.
        before: epoch of the last life that the file knows of; 0: of none.
        now: Unix time.

    Returns:
        The word of its home, for `remember` once the transaction is on disk.
    """
    row = db.execute("SELECT value FROM meta WHERE name='home'").fetchone()
    word = None if row is None else str(row[0])
    here, newest = _remembered(lock)
    # One without any word is new, or of a version that knew of none.
    at_home = (word or "") == here and newest <= before and word != NOWHERE
    if at_home and word:
        return word
    if not at_home:
        _close_open_cases(db, now)
    word = secrets.token_hex(16)
    db.execute("INSERT OR REPLACE INTO meta VALUES ('home', ?)", (word,))
    return word


def remember(lock: int, word: str, epoch: int) -> None:
    """Write down beside the file that it is at home here, and which life has begun.

    Raises:
        OSError: it cannot be written.
    """
    content = f"{word} {epoch}\n".encode()
    os.pwrite(lock, content, 0)
    os.ftruncate(lock, len(content))


def make_homeless(db: sqlite3.Connection) -> None:
    """Mark a copy as one, wherever it is put later."""
    with db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('home', ?)", (NOWHERE,))


def _remembered(lock: int) -> tuple[str, int]:
    """The word and the epoch in a lock; what cannot be read is no word that a file has."""
    content = os.pread(lock, _MAX_BYTES, 0)
    if not content:
        return "", 0
    word, _, epoch = content.decode("ascii", "replace").strip().partition(" ")
    return (word, int(epoch)) if epoch.isdecimal() and epoch.isascii() else ("unreadable", 0)


def _close_open_cases(db: sqlite3.Connection, now: float) -> None:
    rows = db.execute(
        "SELECT id, rule_id, job_id, state FROM cases WHERE closed_at IS NULL"
    ).fetchall()
    why = CloseReason.RESTORED.value
    db.execute("UPDATE cases SET closed_at=?, closed_because=? WHERE closed_at IS NULL", (now, why))
    db.executemany(
        "INSERT INTO events (time, case_id, rule_id, job_id, kind, mode, detail) "
        "VALUES (?, ?, ?, ?, 'closed', '', ?)",
        [
            (now, number, rule, job, json.dumps({"reason": why, "state": state}, sort_keys=True))
            for number, rule, job, state in rows
        ],
    )
    log.warning("the ledger is a copy; its open cases begin anew", cases=len(rows))
