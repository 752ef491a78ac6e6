"""The queue's file: jobs, their attempts, who holds which card, and notices.

SQLite, write-ahead log, synchronous: what was answered is on disk. `held` is the reservation: its
primary key is the card, so no card can be given twice, whatever the code above believes.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpuwarden.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIGRATIONS = (
    """
    CREATE TABLE jobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        token TEXT UNIQUE,
        task TEXT NOT NULL,
        uid INTEGER NOT NULL,
        gid INTEGER NOT NULL,
        user TEXT NOT NULL,
        run_id TEXT NOT NULL,
        submitted REAL NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('waiting', 'active', 'done', 'failed')),
        held TEXT NOT NULL DEFAULT '',
        code TEXT NOT NULL DEFAULT '',
        words TEXT NOT NULL DEFAULT '',
        ended REAL,
        requeues INTEGER NOT NULL DEFAULT 0,
        failures INTEGER NOT NULL DEFAULT 0,
        barren INTEGER NOT NULL DEFAULT 0,
        epoch INTEGER NOT NULL DEFAULT -1,
        step INTEGER NOT NULL DEFAULT -1,
        epoch_seconds REAL,
        then_what TEXT NOT NULL DEFAULT '' CHECK (then_what IN ('', 'hold', 'cancel'))
    ) STRICT;
    -- Job files are named for the run: two jobs of one run would overwrite each other's.
    CREATE UNIQUE INDEX jobs_run ON jobs (run_id) WHERE state IN ('waiting', 'active');
    CREATE INDEX jobs_state ON jobs (state, ended);
    CREATE TABLE attempts (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        job INTEGER NOT NULL REFERENCES jobs (id),
        created REAL NOT NULL,
        kind TEXT NOT NULL,
        gpus INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('reserved', 'running', 'ended', 'freed')),
        boot TEXT,
        stub_pid INTEGER,
        stub_ticks INTEGER,
        pid INTEGER,
        ticks INTEGER,
        began REAL,
        epoch INTEGER,
        epoch_at REAL,
        step INTEGER,
        saved REAL,
        saved_step INTEGER,
        ended REAL,
        exit INTEGER,
        why TEXT NOT NULL DEFAULT '',
        freed REAL,
        term_at REAL,
        kill_at REAL
    ) STRICT;
    -- A job runs once at a time.
    CREATE UNIQUE INDEX attempts_live ON attempts (job) WHERE state IN ('reserved', 'running');
    CREATE INDEX attempts_state ON attempts (state);
    CREATE INDEX attempts_job ON attempts (job);
    CREATE TABLE held (
        uuid TEXT PRIMARY KEY,
        attempt INTEGER NOT NULL REFERENCES attempts (id)
    ) STRICT;
    CREATE TABLE notices (
        id TEXT PRIMARY KEY,
        attempt INTEGER NOT NULL REFERENCES attempts (id),
        job INTEGER NOT NULL REFERENCES jobs (id),
        cause TEXT NOT NULL,
        successor TEXT NOT NULL,
        at TEXT NOT NULL,
        made REAL NOT NULL,
        deadline REAL NOT NULL,
        words TEXT NOT NULL,
        outcome TEXT NOT NULL DEFAULT 'open',
        notified REAL,
        acknowledged REAL,
        saved REAL,
        "left" REAL,
        freed REAL,
        started REAL,
        lost REAL,
        last TEXT NOT NULL DEFAULT '',
        closed REAL
    ) STRICT;
    -- Nobody is told twice.
    CREATE UNIQUE INDEX notices_open ON notices (attempt) WHERE closed IS NULL;
    CREATE INDEX notices_job ON notices (job);
    CREATE INDEX notices_closed ON notices (closed);
    """,
)


class QueueUnusable(PermanentError):
    """The queue's file cannot be used."""

    exit_code = 3


def opened(path: Path) -> sqlite3.Connection:
    """A connection to the file, of today's version, made for its owner's eyes only.

    Raises:
        QueueUnusable: it is of a newer gpuwarden, or damaged.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, isolation_level=None, timeout=5, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise QueueUnusable(f"{path} is not usable: {error}") from error
    db.row_factory = sqlite3.Row
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        _migrate(db, path)
    except sqlite3.Error as error:
        db.close()
        raise QueueUnusable(
            f"{path} is damaged ({error}): move it away, and submit again what waited; jobs that "
            "run go on, and their cards are off limits until they end"
        ) from error
    except QueueUnusable:
        db.close()
        raise
    return db


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise QueueUnusable(
            f"{path} is of version {version}, and this gpuwarden knows {len(MIGRATIONS)}: start "
            "the newer one again"
        )
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        # One transaction each: an end in the middle leaves the version that was there.
        db.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of it or nothing, on disk at its end."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
