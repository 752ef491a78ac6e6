"""Files of SQLite: for their owner alone, of today's version, changed in whole steps.

Migrations are only ever added: the number of those that were applied is the file's `user_version`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING

from gpuwarden.errors import PermanentError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class StoreUnusable(PermanentError):
    """A file cannot be used: another daemon has it, it is newer, or damaged."""

    exit_code = 3


class StateUnwritable(TemporaryError):
    """A file cannot be written now: its disk is full or read-only, or somebody else holds it."""


def opened(path: Path, migrations: Sequence[str], *, remedy: str) -> sqlite3.Connection:
    """A connection to the file, of today's version, made for its owner's eyes only.

    Args:
        path: of the file; it is made where there is none.
        migrations: scripts, each from one version to the next.
        remedy: what to do with a damaged file.

    Raises:
        StoreUnusable: it is of a newer gpuwarden, or no usable file.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, isolation_level=None, timeout=5, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StoreUnusable(f"{path} is not usable: {error}") from error
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        _migrate(db, path, migrations)
    except sqlite3.Error as error:
        db.close()
        raise StoreUnusable(f"{path} is damaged ({error}): {remedy}") from error
    except StoreUnusable:
        db.close()
        raise
    return db


def _migrate(db: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > len(migrations):
        raise StoreUnusable(
            f"{path} is of version {version}, and this gpuwarden knows {len(migrations)}: start "
            "the newer one again"
        )
    for number, script in enumerate(migrations[version:], version + 1):
        # One transaction each: an end in the middle leaves the version that was there.
        db.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of it or nothing, on disk at its end.

    Raises:
        StateUnwritable: nothing of it is.
    """
    try:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            # SQLite itself takes back what a full disk has cut off.
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    except sqlite3.OperationalError as error:
        raise StateUnwritable(f"{_path(db)} cannot be written ({error})") from error


def _path(db: sqlite3.Connection) -> str:
    return str(next(iter(db.execute("PRAGMA database_list")))[2])
