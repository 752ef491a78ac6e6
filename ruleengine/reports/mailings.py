"""Which weekly report went to whom, in a file of its own beside the engine's ledger.

It is written before a mail is handed over and after the server took it. A mail of which the second
is missing may have arrived or not: who is unsure does not send it again, and says so.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from gpuwarden.ruleengine.ledger_handles import LedgerUnusable, connected, exclusive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_VERSION: Final = 1
_TABLES: Final = """
    CREATE TABLE mailings (
        team TEXT NOT NULL,
        begin REAL NOT NULL,
        recipient TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('sending', 'proven', 'failed', 'refused')),
        proof TEXT NOT NULL DEFAULT '',
        error TEXT NOT NULL DEFAULT '',
        attempts INTEGER NOT NULL DEFAULT 0,
        time REAL NOT NULL,
        PRIMARY KEY (team, begin, recipient),
        CHECK (state != 'proven' OR proof != '')
    ) STRICT;
    CREATE INDEX mailings_time ON mailings (time);
"""
KEPT_SECONDS: Final = 400 * 86400.0
"""For how long it is known who had which report."""


@dataclass(frozen=True, slots=True)
class Mailing:
    """One report to one address.

    Attributes:
        team: whose report, or an empty string: the operators'.
        begin: Unix time of the first moment that it is about.
        recipient: the address.
    """

    team: str
    begin: float
    recipient: str


class Mailings:
    """The record. Use it as a context manager; only one process has it at a time.

    Args:
        path: the file; it is made if it is missing.

    Raises:
        LedgerUnusable: another process sends reports now, or the file is none of ours.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(_locked(path))
            self._db = self._stack.enter_context(contextlib.closing(connected(path)))
            self._db.execute("PRAGMA synchronous=FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version < _VERSION:
                self._db.executescript(f"BEGIN;{_TABLES};PRAGMA user_version={_VERSION};COMMIT;")
        except sqlite3.Error as error:
            self._stack.close()
            raise LedgerUnusable(f"{path} is not a usable record of reports: {error}") from error
        except LedgerUnusable:
            self._stack.close()
            raise

        if version > _VERSION:
            self._stack.close()
            raise LedgerUnusable(f"{path} was written by a newer gpuwarden: upgrade")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def state(self, mailing: Mailing) -> str:
        """How far a mailing has come: a state of the table, or an empty string: not begun."""
        row = self._db.execute(
            "SELECT state FROM mailings WHERE team=? AND begin=? AND recipient=?",
            (mailing.team, mailing.begin, mailing.recipient),
        ).fetchone()
        return "" if row is None else str(row[0])

    def note(
        self, mailing: Mailing, state: str, *, time: float, proof: str = "", error: str = ""
    ) -> None:
        """Write down how far a mailing has come; it is on disk when this returns.

        Raises:
            LedgerUnusable: it cannot be written: nothing may be sent then.
        """
        try:
            self._db.execute(
                "INSERT INTO mailings VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (team, begin, recipient) DO UPDATE SET state=excluded.state, "
                "proof=excluded.proof, error=excluded.error, time=excluded.time, "
                "attempts=attempts + (excluded.state = 'sending')",
                (
                    mailing.team,
                    mailing.begin,
                    mailing.recipient,
                    state,
                    proof[:500],
                    error[:500],
                    int(state == "sending"),
                    time,
                ),
            )
            self._db.execute("DELETE FROM mailings WHERE time < ?", (time - KEPT_SECONDS,))
        except sqlite3.Error as error_:
            raise LedgerUnusable(f"{self._path} cannot be written: {error_}") from error_

    def proof(self, mailing: Mailing) -> str:
        """The mail server's words that prove a mailing, or an empty string."""
        row = self._db.execute(
            "SELECT proof FROM mailings WHERE team=? AND begin=? AND recipient=?",
            (mailing.team, mailing.begin, mailing.recipient),
        ).fetchone()
        return "" if row is None else str(row[0])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        handle = exclusive(path)
    except LedgerUnusable as error:
        raise LedgerUnusable(
            f"{path} cannot be had: another `gpuwarden report --send` runs, or {path.parent} does "
            "not belong to this user"
        ) from error
    with open(handle, closefd=True):  # noqa: PTH123 - a descriptor, not a path
        yield
