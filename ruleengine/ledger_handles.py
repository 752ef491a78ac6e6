"""Opening the ledger's file: for its owner alone, and for one engine at a time."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from typing import TYPE_CHECKING

from gpuwarden.errors import PermanentError

if TYPE_CHECKING:
    from pathlib import Path


class LedgerUnusable(PermanentError):
    """The ledger cannot be opened: locked by another engine, of a newer version, or damaged."""

    exit_code = 3


class LedgerTaken(LedgerUnusable):
    """The file is not this engine's own any more: what it writes nobody might know later."""


def file_sizes(db: sqlite3.Connection) -> tuple[int, int]:
    """Bytes of a database's file that are used, and that are free."""
    pragmas = ("page_size", "page_count", "freelist_count")
    page, count, free = (int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in pragmas)
    return page * (count - free), page * free


def connected(path: Path) -> sqlite3.Connection:
    """A connection to the file, which is made for its owner's eyes only: it names people."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return sqlite3.connect(path, isolation_level=None, timeout=5)
    except (OSError, sqlite3.DatabaseError) as error:
        raise LedgerUnusable(f"{path} is not a usable ledger: {error}") from error


def exclusive(path: Path) -> int:
    """Keep every other engine from a ledger until this descriptor is closed.

    Raises:
        LedgerUnusable: one has it already, or the lock cannot be made.
    """
    lock = path.with_name(path.name + ".lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LedgerUnusable(
            f"{lock} cannot be opened ({error.strerror}): create {path.parent} and give it to the "
            "engine's user"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise LedgerUnusable(
            f"{path} is in use by another engine: one engine runs per cluster; stop the other one"
        ) from error
    return handle
