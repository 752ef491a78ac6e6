"""The queue's file: jobs, their attempts, who holds which card, and notices.

SQLite, write-ahead log, synchronous: what was answered is on disk. `held` is the reservation: its
primary key is the card, so no card can be given twice, whatever the code above believes.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from gpuwarden.scheduling import sqlite_files

if TYPE_CHECKING:
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
    """
    -- By which way it was given: the engine's leave, `file`, or nothing yet.
    ALTER TABLE notices ADD COLUMN leave TEXT NOT NULL DEFAULT '';
    """,
)


def opened(path: Path) -> sqlite3.Connection:
    """A connection to the queue's file; its rows are read by the names of their columns.

    Raises:
        StoreUnusable: it is of a newer gpuwarden, or damaged.
    """
    db = sqlite_files.opened(
        path,
        MIGRATIONS,
        remedy="move it away, and submit again what waited; jobs that run go on, and their cards "
        "are off limits until they end",
    )
    db.row_factory = sqlite3.Row
    return db
