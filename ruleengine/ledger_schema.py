"""The tables of the ledger, and how one version becomes the next.

Migrations are only ever added: the number of those that were applied is the file's `user_version`.
"""

from __future__ import annotations

MIGRATIONS = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE cases (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        rule_id TEXT NOT NULL,
        job_id TEXT NOT NULL,
        state TEXT NOT NULL,
        body TEXT NOT NULL,
        opened_at REAL NOT NULL,
        closed_at REAL,
        closed_because TEXT
    ) STRICT;
    CREATE UNIQUE INDEX cases_open ON cases (rule_id, job_id) WHERE closed_at IS NULL;
    CREATE INDEX cases_job ON cases (job_id);
    CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        time REAL NOT NULL,
        case_id INTEGER REFERENCES cases (id),
        rule_id TEXT NOT NULL,
        job_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        mode TEXT NOT NULL,
        detail TEXT NOT NULL
    ) STRICT;
    CREATE INDEX events_job ON events (job_id, id);
    CREATE INDEX events_kind ON events (kind, time);
    CREATE TRIGGER events_are_kept BEFORE DELETE ON events
        BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END;
    CREATE TRIGGER events_are_fixed BEFORE UPDATE ON events
        BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END;
    CREATE TABLE notices (
        case_id INTEGER NOT NULL REFERENCES cases (id),
        stage TEXT NOT NULL,
        channel TEXT NOT NULL,
        recipient TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('pending', 'proven', 'failed')),
        attempts INTEGER NOT NULL DEFAULT 0,
        proof TEXT NOT NULL DEFAULT '',
        error TEXT NOT NULL DEFAULT '',
        time REAL NOT NULL,
        PRIMARY KEY (case_id, stage, channel, recipient),
        CHECK (state != 'proven' OR proof != '')
    ) STRICT;
    CREATE TABLE deliveries (
        fingerprint TEXT NOT NULL,
        starts_at TEXT NOT NULL,
        status TEXT NOT NULL,
        channel TEXT NOT NULL,
        recipient TEXT NOT NULL,
        proof TEXT NOT NULL,
        time REAL NOT NULL,
        PRIMARY KEY (fingerprint, starts_at, status, channel, recipient)
    ) STRICT;
    CREATE TABLE attempts (
        channel TEXT NOT NULL,
        outcome TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (channel, outcome)
    ) STRICT;
    CREATE TABLE decisions (
        id TEXT PRIMARY KEY,
        epoch INTEGER NOT NULL,
        case_id INTEGER NOT NULL REFERENCES cases (id),
        rule_id TEXT NOT NULL,
        job_id TEXT NOT NULL,
        user TEXT NOT NULL,
        action TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN (
            'authorised', 'acting', 'verified', 'incomplete', 'refused', 'failed', 'lapsed')),
        host TEXT NOT NULL,
        body BLOB NOT NULL,
        signature TEXT NOT NULL,
        gpus TEXT NOT NULL,
        evidence TEXT NOT NULL,
        grace REAL NOT NULL,
        expires REAL NOT NULL,
        created_at REAL NOT NULL,
        finished_at REAL,
        reason TEXT NOT NULL DEFAULT '',
        report TEXT
    ) STRICT;
    CREATE UNIQUE INDEX one_end_per_attempt ON decisions (job_id)
        WHERE action = 'terminate' AND state NOT IN ('refused', 'lapsed');
    CREATE INDEX decisions_time ON decisions (created_at);
    CREATE TABLE keeps (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        rule_id TEXT NOT NULL,
        job_id TEXT NOT NULL,
        run_id TEXT,
        role TEXT NOT NULL CHECK (role IN ('owner', 'operator')),
        by TEXT NOT NULL,
        reason TEXT NOT NULL,
        seconds REAL NOT NULL CHECK (seconds > 0),
        granted_at REAL NOT NULL,
        until REAL NOT NULL
    ) STRICT;
    CREATE INDEX keeps_rule ON keeps (rule_id);
    CREATE TABLE trust (
        rule_id TEXT NOT NULL,
        job_id TEXT NOT NULL,
        spent REAL NOT NULL,
        time REAL NOT NULL,
        PRIMARY KEY (rule_id, job_id)
    ) STRICT;
    """,
    """
    CREATE TABLE nodes (
        address TEXT PRIMARY KEY,
        key TEXT NOT NULL,
        scheme TEXT NOT NULL CHECK (scheme IN ('http', 'https')),
        boot_id TEXT NOT NULL,
        exporter TEXT NOT NULL,
        registered_at REAL NOT NULL,
        seen_at REAL NOT NULL,
        left_at REAL
    ) STRICT;
    """,
    """
    CREATE TABLE pauses (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        by TEXT NOT NULL,
        reason TEXT NOT NULL CHECK (reason != ''),
        begun_at REAL NOT NULL,
        until REAL,
        ended_at REAL
    ) STRICT;
    """,
)
"""SQL scripts, in order; each runs in one transaction."""
