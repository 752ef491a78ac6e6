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
    # Counters outlive what they count, so that old cases can be forgotten; the audit can only lose
    # what is older than the horizon that was written down first.
    """
    CREATE TABLE event_counts (
        rule_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        mode TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (rule_id, kind, mode)
    ) STRICT;
    INSERT INTO event_counts SELECT rule_id, kind, mode, count(*) FROM events GROUP BY 1, 2, 3;
    CREATE TRIGGER events_are_counted AFTER INSERT ON events BEGIN
        INSERT INTO event_counts VALUES (NEW.rule_id, NEW.kind, NEW.mode, 1)
            ON CONFLICT (rule_id, kind, mode) DO UPDATE SET count = count + 1;
    END;
    CREATE TABLE result_counts (
        rule_id TEXT NOT NULL,
        action TEXT NOT NULL,
        state TEXT NOT NULL,
        count INTEGER NOT NULL,
        freed INTEGER NOT NULL,
        PRIMARY KEY (rule_id, action, state)
    ) STRICT;
    INSERT INTO result_counts
        SELECT rule_id, action, state, count(*),
            CAST(coalesce(sum(json_extract(report, '$.proof.memory_freed')), 0) AS INTEGER)
        FROM decisions WHERE finished_at IS NOT NULL GROUP BY 1, 2, 3;
    CREATE TRIGGER results_are_counted AFTER UPDATE OF finished_at ON decisions
        WHEN OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL BEGIN
        INSERT INTO result_counts VALUES (NEW.rule_id, NEW.action, NEW.state, 1,
            CAST(coalesce(json_extract(NEW.report, '$.proof.memory_freed'), 0) AS INTEGER))
            ON CONFLICT (rule_id, action, state)
            DO UPDATE SET count = count + 1, freed = freed + excluded.freed;
    END;
    DROP TRIGGER events_are_kept;
    CREATE TRIGGER events_are_kept BEFORE DELETE ON events
        WHEN OLD.time >= coalesce(
            (SELECT CAST(value AS REAL) FROM meta WHERE name = 'audit_kept_from'), 0)
        BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END;
    CREATE INDEX events_case ON events (case_id);
    CREATE INDEX cases_closed ON cases (closed_at) WHERE closed_at IS NOT NULL;
    CREATE INDEX decisions_case ON decisions (case_id);
    CREATE INDEX decisions_job ON decisions (job_id);
    CREATE INDEX decisions_state ON decisions (state);
    CREATE INDEX decisions_finished ON decisions (finished_at);
    CREATE INDEX deliveries_time ON deliveries (time);
    """,
    # For the audit of one reclaim. The number of a look says which decision came of it: the next.
    """
    CREATE TABLE rule_texts (
        hash TEXT PRIMARY KEY,
        rule_id TEXT NOT NULL,
        document TEXT NOT NULL
    ) STRICT;
    CREATE TABLE openings (
        case_id INTEGER PRIMARY KEY REFERENCES cases (id) ON DELETE CASCADE,
        rule_hash TEXT NOT NULL,
        document TEXT NOT NULL
    ) STRICT;
    CREATE TABLE looks (
        id INTEGER PRIMARY KEY,
        case_id INTEGER NOT NULL REFERENCES cases (id) ON DELETE CASCADE,
        time REAL NOT NULL,
        rule_hash TEXT NOT NULL,
        document TEXT NOT NULL
    ) STRICT;
    CREATE INDEX looks_case ON looks (case_id);
    CREATE TABLE holds (
        id INTEGER PRIMARY KEY,
        case_id INTEGER NOT NULL REFERENCES cases (id) ON DELETE CASCADE,
        reason TEXT NOT NULL,
        sentence TEXT NOT NULL,
        begun_at REAL NOT NULL,
        ended_at REAL
    ) STRICT;
    CREATE INDEX holds_case ON holds (case_id);
    CREATE INDEX holds_open ON holds (case_id) WHERE ended_at IS NULL;
    ALTER TABLE notices ADD COLUMN required_at REAL;
    ALTER TABLE notices ADD COLUMN refusals TEXT NOT NULL DEFAULT '[]';
    """,
    # What speaks against rules on trial (`canary`), and which of them have fallen back to warn.
    """
    CREATE TABLE objections (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        rule_id TEXT NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('appeal', 'regret')),
        job_id TEXT NOT NULL,
        subject TEXT NOT NULL,
        source TEXT NOT NULL,
        by TEXT NOT NULL,
        role TEXT NOT NULL,
        reason TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT;
    CREATE UNIQUE INDEX one_objection ON objections (kind, rule_id, job_id, subject);
    CREATE INDEX objections_rule ON objections (rule_id, at);
    CREATE TABLE canary_holds (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        rule_id TEXT NOT NULL,
        reason TEXT NOT NULL,
        why TEXT NOT NULL,
        begun_at REAL NOT NULL,
        lifted_at REAL,
        lifted_by TEXT NOT NULL DEFAULT '',
        lifted_reason TEXT NOT NULL DEFAULT ''
    ) STRICT;
    CREATE UNIQUE INDEX one_hold ON canary_holds (rule_id) WHERE lifted_at IS NULL;
    """,
    # Softer acts have results of their own, and what several hands do has a row for each.
    """
    CREATE TABLE decisions_made (
        id TEXT PRIMARY KEY,
        epoch INTEGER NOT NULL,
        case_id INTEGER NOT NULL REFERENCES cases (id),
        rule_id TEXT NOT NULL,
        job_id TEXT NOT NULL,
        user TEXT NOT NULL,
        action TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN (
            'authorised', 'acting', 'verified', 'incomplete', 'refused', 'failed', 'lapsed',
            'done', 'unheeded', 'undeliverable', 'withdrawn')),
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
        report TEXT,
        stage TEXT NOT NULL DEFAULT ''
    ) STRICT;
    INSERT INTO decisions_made SELECT *, '' FROM decisions;
    DROP TABLE decisions;
    ALTER TABLE decisions_made RENAME TO decisions;
    CREATE UNIQUE INDEX one_end_per_attempt ON decisions (job_id)
        WHERE action IN ('terminate', 'requeue') AND state NOT IN ('refused', 'lapsed');
    CREATE INDEX decisions_time ON decisions (created_at);
    CREATE INDEX decisions_case ON decisions (case_id);
    CREATE INDEX decisions_job ON decisions (job_id);
    CREATE INDEX decisions_state ON decisions (state);
    CREATE INDEX decisions_finished ON decisions (finished_at);
    CREATE TRIGGER results_are_counted AFTER UPDATE OF finished_at ON decisions
        WHEN OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL BEGIN
        INSERT INTO result_counts VALUES (NEW.rule_id, NEW.action, NEW.state, 1,
            CAST(coalesce(json_extract(NEW.report, '$.proof.memory_freed'), 0) AS INTEGER))
            ON CONFLICT (rule_id, action, state)
            DO UPDATE SET count = count + 1, freed = freed + excluded.freed;
    END;
    CREATE TABLE decision_parts (
        decision_id TEXT NOT NULL REFERENCES decisions (id) ON DELETE CASCADE,
        host TEXT NOT NULL,
        node TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        action TEXT NOT NULL,
        agent_id TEXT NOT NULL,
        body BLOB NOT NULL,
        signature TEXT NOT NULL,
        expires REAL NOT NULL,
        state TEXT NOT NULL,
        reason TEXT NOT NULL,
        report TEXT,
        PRIMARY KEY (decision_id, host, action)
    ) STRICT;
    CREATE TABLE platform_acts (
        decision_id TEXT PRIMARY KEY REFERENCES decisions (id) ON DELETE CASCADE,
        platform TEXT NOT NULL,
        claim TEXT NOT NULL,
        step TEXT NOT NULL,
        changed_at REAL NOT NULL,
        waited REAL NOT NULL,
        asked_at REAL,
        notice TEXT NOT NULL,
        ended_at REAL,
        tries INTEGER NOT NULL,
        word TEXT NOT NULL,
        obstacle TEXT NOT NULL,
        successor TEXT NOT NULL,
        detail TEXT NOT NULL,
        why TEXT NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE losses (
        decision_id TEXT PRIMARY KEY,
        instances TEXT NOT NULL,
        seconds REAL,
        cards INTEGER NOT NULL,
        saved INTEGER NOT NULL,
        hourly REAL,
        currency TEXT NOT NULL,
        gpu_seconds REAL,
        counted_at REAL,
        why_not TEXT NOT NULL DEFAULT ''
    ) STRICT;
    CREATE INDEX losses_open ON losses (decision_id) WHERE counted_at IS NULL AND why_not = '';
    """,
    # Drills: real ends of processes that exist only for them, step by step.
    """
    CREATE TABLE drills (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        node TEXT NOT NULL,
        job_id TEXT NOT NULL DEFAULT '',
        run_id TEXT NOT NULL DEFAULT '',
        by TEXT NOT NULL DEFAULT '',
        reason TEXT NOT NULL DEFAULT '',
        begun_at REAL NOT NULL,
        seen_at REAL,
        finished_at REAL,
        result TEXT,
        steps TEXT NOT NULL DEFAULT '[]'
    ) STRICT;
    CREATE INDEX drills_node ON drills (node, id);
    CREATE INDEX drills_job ON drills (job_id);
    CREATE INDEX drills_open ON drills (id) WHERE finished_at IS NULL;
    CREATE TABLE drill_nodes (node TEXT PRIMARY KEY, since REAL NOT NULL) STRICT;
    """,
    # What names the work of a job that was ended, so that it is known when it comes back.
    """
    CREATE TABLE works (
        decision_id TEXT NOT NULL REFERENCES decisions (id) ON DELETE CASCADE,
        work TEXT NOT NULL,
        PRIMARY KEY (decision_id, work)
    ) STRICT;
    CREATE INDEX works_work ON works (work);
    """,
    # For the boards: how long a job had before it was acted on, and what spoke against rules.
    """
    CREATE TABLE decision_waits (
        rule_id TEXT NOT NULL,
        action TEXT NOT NULL,
        upto INTEGER NOT NULL,
        count INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (rule_id, action, upto)
    ) STRICT;
    CREATE VIEW waited AS
        SELECT decisions.id, decisions.rule_id, action,
            max(0.0, created_at - json_extract(cases.body, '$.detected_at')) AS seconds
        FROM decisions JOIN cases ON cases.id = case_id
        WHERE finished_at IS NOT NULL
            AND decisions.state NOT IN ('lapsed', 'refused', 'withdrawn')
            AND json_extract(cases.body, '$.detected_at') IS NOT NULL;
    CREATE VIEW waited_upto AS
        SELECT *, coalesce((SELECT min(column1) FROM (VALUES (60), (120), (300), (600), (900),
            (1800), (3600), (7200), (14400), (28800), (86400)) WHERE column1 >= seconds), 0) AS upto
        FROM waited;
    INSERT INTO decision_waits
        SELECT rule_id, action, upto, count(*), sum(seconds) FROM waited_upto GROUP BY 1, 2, 3;
    CREATE TRIGGER waits_are_counted AFTER UPDATE OF finished_at ON decisions
        WHEN OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL BEGIN
        INSERT INTO decision_waits
            SELECT rule_id, action, upto, 1, seconds FROM waited_upto WHERE id = NEW.id
            ON CONFLICT (rule_id, action, upto)
            DO UPDATE SET count = count + 1, seconds = seconds + excluded.seconds;
    END;
    CREATE TABLE keep_counts (
        rule_id TEXT NOT NULL,
        role TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (rule_id, role)
    ) STRICT;
    INSERT INTO keep_counts SELECT rule_id, role, count(*) FROM keeps GROUP BY 1, 2;
    CREATE TRIGGER keeps_are_counted AFTER INSERT ON keeps BEGIN
        INSERT INTO keep_counts VALUES (NEW.rule_id, NEW.role, 1)
            ON CONFLICT (rule_id, role) DO UPDATE SET count = count + 1;
    END;
    CREATE TABLE objection_counts (
        rule_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (rule_id, kind)
    ) STRICT;
    INSERT INTO objection_counts SELECT rule_id, kind, count(*) FROM objections GROUP BY 1, 2;
    CREATE TRIGGER objections_are_counted AFTER INSERT ON objections BEGIN
        INSERT INTO objection_counts VALUES (NEW.rule_id, NEW.kind, 1)
            ON CONFLICT (rule_id, kind) DO UPDATE SET count = count + 1;
    END;
    """,
    # Which warnings of budgets were given, once each in a period; told_at is NULL of those that a
    # higher one stood for.
    """
    CREATE TABLE budget_warnings (
        team TEXT NOT NULL,
        period TEXT NOT NULL,
        unit TEXT NOT NULL,
        begins REAL NOT NULL,
        share REAL NOT NULL,
        told_at REAL,
        PRIMARY KEY (team, period, unit, begins, share)
    ) STRICT;
    """,
    # Leave requests of a scheduler: whom it asked, what became of it, and by which step when.
    """
    CREATE TABLE leaves (
        id TEXT PRIMARY KEY,
        key TEXT NOT NULL,
        by TEXT NOT NULL,
        job_id TEXT NOT NULL,
        run_id TEXT NOT NULL,
        user TEXT NOT NULL,
        at TEXT NOT NULL,
        after TEXT NOT NULL,
        deadline REAL NOT NULL CHECK (deadline > 0),
        cause TEXT NOT NULL,
        reason TEXT NOT NULL,
        successor TEXT NOT NULL,
        hosts TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        expires REAL NOT NULL,
        created_at REAL NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('asked', 'waiting', 'left', 'unheeded',
            'undeliverable', 'refused', 'lapsed', 'withdrawn', 'overtaken')),
        why TEXT NOT NULL,
        finished_at REAL,
        act TEXT NOT NULL,
        receipts TEXT NOT NULL,
        changed_at REAL NOT NULL
    ) STRICT;
    CREATE UNIQUE INDEX leaves_key ON leaves (by, key);
    CREATE UNIQUE INDEX one_leave_per_attempt ON leaves (job_id)
        WHERE state NOT IN ('refused', 'undeliverable', 'lapsed', 'withdrawn');
    CREATE INDEX leaves_time ON leaves (created_at);
    CREATE INDEX leaves_finished ON leaves (finished_at);
    CREATE TABLE leave_parts (
        leave_id TEXT NOT NULL REFERENCES leaves (id) ON DELETE CASCADE,
        host TEXT NOT NULL,
        node TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        action TEXT NOT NULL,
        agent_id TEXT NOT NULL,
        body BLOB NOT NULL,
        signature TEXT NOT NULL,
        expires REAL NOT NULL,
        state TEXT NOT NULL,
        reason TEXT NOT NULL,
        report TEXT,
        PRIMARY KEY (leave_id, host, action)
    ) STRICT;
    CREATE TABLE leave_counts (
        cause TEXT NOT NULL,
        state TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (cause, state)
    ) STRICT;
    CREATE TRIGGER leaves_are_counted AFTER UPDATE OF finished_at ON leaves
        WHEN OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL BEGIN
        INSERT INTO leave_counts VALUES (NEW.cause, NEW.state, 1)
            ON CONFLICT (cause, state) DO UPDATE SET count = count + 1;
    END;
    """,
    # Whose job it was when a notice was required: another owner's proof is none of theirs.
    """
    ALTER TABLE notices ADD COLUMN owner TEXT NOT NULL DEFAULT '';
    UPDATE notices SET owner = coalesce(
        (SELECT json_extract(body, '$.user') FROM cases WHERE id = case_id), '');
    """,
    # What jobs over several nodes hold: Prometheus forgets a dark node after an hour.
    """
    CREATE TABLE held_sets (
        job_id TEXT NOT NULL,
        node TEXT NOT NULL,
        uuid TEXT NOT NULL,
        gpu TEXT NOT NULL,
        PRIMARY KEY (job_id, node, uuid)
    ) STRICT;
    """,
)
"""SQL scripts, in order; each runs in one transaction."""
