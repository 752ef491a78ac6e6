"""The scheduler's file: one daemon at a time, its tables, and copies of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from typing import TYPE_CHECKING

from gpuwarden.scheduling import sqlite_files
from gpuwarden.scheduling.sqlite_files import StoreUnusable

if TYPE_CHECKING:
    from pathlib import Path

MIGRATIONS = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value REAL NOT NULL) STRICT;
    CREATE TABLE bookings (
        id TEXT PRIMARY KEY,
        key TEXT UNIQUE,
        wish TEXT NOT NULL,
        team TEXT NOT NULL,
        who TEXT NOT NULL,
        repeat TEXT NOT NULL,
        words TEXT NOT NULL,
        made REAL NOT NULL
    ) STRICT;
    CREATE TABLE slots (
        id TEXT PRIMARY KEY,
        booking TEXT NOT NULL REFERENCES bookings (id),
        gpus INTEGER NOT NULL CHECK (gpus > 0),
        card TEXT NOT NULL,
        start REAL NOT NULL,
        end REAL NOT NULL CHECK (end > start),
        lead REAL NOT NULL,
        entered REAL,
        released REAL,
        released_by TEXT NOT NULL DEFAULT '',
        idle_since REAL,
        first_used REAL,
        used_gpu_seconds REAL,
        revision INTEGER NOT NULL DEFAULT 0,
        changed REAL
    ) STRICT;
    CREATE INDEX slots_end ON slots (end);
    CREATE INDEX slots_booking ON slots (booking);
    CREATE TABLE preemptions (
        id TEXT PRIMARY KEY,
        body TEXT NOT NULL,
        cause TEXT NOT NULL,
        outcome TEXT NOT NULL,
        lost REAL,
        begun REAL NOT NULL,
        seen REAL NOT NULL
    ) STRICT;
    CREATE INDEX preemptions_seen ON preemptions (seen);
    CREATE TABLE holdings (
        entry TEXT NOT NULL,
        start REAL NOT NULL,
        end REAL,
        user TEXT NOT NULL,
        team TEXT NOT NULL,
        gpus INTEGER NOT NULL,
        card TEXT NOT NULL,
        run_id TEXT,
        project TEXT NOT NULL,
        suspended REAL NOT NULL,
        seen REAL NOT NULL,
        PRIMARY KEY (entry, start)
    ) STRICT;
    CREATE INDEX holdings_end ON holdings (end);
    CREATE TABLE waits (
        entry TEXT NOT NULL,
        started REAL NOT NULL,
        team TEXT NOT NULL,
        priority TEXT NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (entry, started)
    ) STRICT;
    CREATE TABLE wait_counts (
        team TEXT NOT NULL,
        priority TEXT NOT NULL,
        bound REAL NOT NULL,
        count INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (team, priority, bound)
    ) STRICT;
    CREATE INDEX waits_started ON waits (started);
    CREATE TABLE requeues (
        entry TEXT PRIMARY KEY,
        team TEXT NOT NULL,
        count INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE predictions (
        entry TEXT NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('start', 'finish')),
        attempt REAL NOT NULL,
        made REAL NOT NULL,
        earliest REAL NOT NULL,
        latest REAL NOT NULL,
        samples INTEGER NOT NULL,
        actual REAL,
        void TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (entry, kind, attempt)
    ) STRICT;
    CREATE INDEX predictions_open ON predictions (kind) WHERE actual IS NULL AND void = '';
    CREATE TABLE runs (
        entry TEXT PRIMARY KEY,
        features TEXT NOT NULL,
        epochs REAL,
        seconds REAL NOT NULL,
        ended REAL NOT NULL
    ) STRICT;
    CREATE INDEX runs_features ON runs (features);
    """,
    """
    CREATE TABLE attempt_names (
        job_id TEXT PRIMARY KEY,
        entry TEXT NOT NULL,
        seen REAL NOT NULL
    ) STRICT;
    ALTER TABLE holdings RENAME TO whole_holdings;
    DROP INDEX holdings_end;
    CREATE TABLE holdings (
        entry TEXT NOT NULL,
        part TEXT NOT NULL DEFAULT '',
        start REAL NOT NULL,
        end REAL,
        user TEXT NOT NULL,
        team TEXT NOT NULL,
        gpus INTEGER NOT NULL,
        card TEXT NOT NULL,
        run_id TEXT,
        project TEXT NOT NULL,
        suspended REAL NOT NULL,
        seen REAL NOT NULL,
        PRIMARY KEY (entry, part, start)
    ) STRICT;
    CREATE INDEX holdings_end ON holdings (end);
    INSERT INTO holdings
        SELECT entry, '', start, end, user, team, gpus, card, run_id, project, suspended, seen
        FROM whole_holdings;
    DROP TABLE whole_holdings;
    """,
    # How long steps of preemptions took is counted when they are seen: what was before, once.
    """
    CREATE TABLE step_counts (
        step TEXT NOT NULL,
        bound REAL NOT NULL,
        count INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (step, bound)
    ) STRICT;
    INSERT INTO step_counts
    WITH seen AS (
        SELECT preemptions.id AS id, each.key AS step, each.value AS at,
            instr(' notified acknowledged saved left freed started', ' ' || each.key) AS place
        FROM preemptions, json_each(preemptions.body, '$.steps') AS each
    ), gaps AS (
        SELECT step, at - lag(at) OVER (PARTITION BY id ORDER BY place) AS gap FROM seen
    ), times AS (
        SELECT step, max(0.0, gap) AS seconds FROM gaps WHERE gap IS NOT NULL
    )
    SELECT step,
        CASE
            WHEN seconds <= 1 THEN 1.0 WHEN seconds <= 5 THEN 5.0 WHEN seconds <= 15 THEN 15.0
            WHEN seconds <= 60 THEN 60.0 WHEN seconds <= 300 THEN 300.0
            WHEN seconds <= 900 THEN 900.0 WHEN seconds <= 1800 THEN 1800.0
            WHEN seconds <= 3600 THEN 3600.0 WHEN seconds <= 14400 THEN 14400.0 ELSE 9e999
        END AS bound, count(*), sum(seconds)
    FROM times GROUP BY step, bound;
    """,
)


def exclusive(folder: Path) -> int:
    """Keep every other scheduler from a folder until this descriptor is closed.

    Raises:
        StoreUnusable: one has it already, or the lock cannot be made.
    """
    lock = folder / "scheduler.lock"
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnusable(
            f"{lock} cannot be opened ({error.strerror}): create {folder} and give it to the "
            "scheduler's user"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StoreUnusable(
            f"{folder} is in use by another scheduler: one runs per cluster; stop the other one"
        ) from error
    return handle


def opened(path: Path) -> sqlite3.Connection:
    """A connection to the scheduler's file.

    Raises:
        StoreUnusable: it is of a newer gpuwarden, or no usable file.
    """
    return sqlite_files.opened(
        path,
        MIGRATIONS,
        remedy="put the newest copy of it back, or move it away; bookings and receipts are in it, "
        "jobs are not",
    )


def copy_to(db: sqlite3.Connection, target: Path) -> None:
    """Write a whole copy while the daemon runs; the target is replaced only by a whole one.

    Raises:
        StoreUnusable: it cannot be written.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(sqlite3.connect(part)) as copy:
            db.backup(copy, pages=1000)
        part.replace(target)
    except (OSError, sqlite3.Error) as error:
        raise StoreUnusable(f"{target} cannot be written: {error}") from error
