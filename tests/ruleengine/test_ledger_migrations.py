"""A ledger of every earlier version becomes one of today, with all that it knew."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.test_cases import due

from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.ledger_schema import MIGRATIONS

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = range(1, len(MIGRATIONS) + 1)
FREED = 2**31
REPORT = f'{{"proof": {{"memory_freed": {FREED}}}}}'


def made(path: Path, version: int) -> None:
    """A ledger as an engine of that version left it: an open case, an ended one, and budgets."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        for number, script in enumerate(MIGRATIONS[:version], start=1):
            db.executescript(f"BEGIN;{script};PRAGMA user_version={number};COMMIT;")
        body = due().encode()
        db.execute("INSERT INTO meta VALUES ('epoch', '41')")
        db.execute(
            "INSERT INTO cases VALUES (1, 'idle', 'proc-1', 'due', ?, 10.0, NULL, NULL)", (body,)
        )
        db.execute(
            "INSERT INTO cases VALUES (2, 'idle', 'proc-0', 'verified', ?, 5.0, 9.0, 'gone')",
            (body,),
        )
        db.executemany(
            "INSERT INTO events (time, case_id, rule_id, job_id, kind, mode, detail) "
            "VALUES (?, ?, 'idle', ?, ?, 'enforce', '{}')",
            [
                (5.0, 2, "proc-0", "detected"),
                (5.0, 2, "proc-0", "log"),
                (10.0, 1, "proc-1", "detected"),
                (10.0, 1, "proc-1", "idle_detected"),
            ],
        )
        db.execute(
            "INSERT INTO notices (case_id, stage, channel, recipient, state, attempts, proof, "
            "time) VALUES (1, 'moderate-notify:enforce', 'email', 'a@example.org', 'proven', 1, "
            "'250 ok', 11.0)"
        )
        db.execute("INSERT INTO attempts VALUES ('email', 'delivered', 7)")
        db.execute(
            "INSERT INTO decisions (id, epoch, case_id, rule_id, job_id, user, action, state, "
            "host, body, signature, gpus, evidence, grace, expires, created_at) "
            "VALUES ('d1', 41, 2, 'idle', 'proc-0', 'alice', 'terminate', 'acting', "
            "'n1', x'7b7d', 's', '[\"GPU-1\"]', '[]', 60, 100, 8)"
        )
        db.execute("UPDATE decisions SET state='verified', finished_at=9, report=?", (REPORT,))
        db.execute(
            "INSERT INTO keeps (rule_id, job_id, run_id, role, by, reason, seconds, granted_at, "
            "until) VALUES ('idle', 'proc-1', 'run-a', 'owner', 'alice', 'why', 60, 1, 61)"
        )
        db.execute("INSERT INTO trust VALUES ('idle', 'proc-1', 30.0, 10.0)")
        db.commit()


def schema(path: Path) -> set[tuple[str, str]]:
    """(name, SQL) of everything in a file."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return {
            (row[0], " ".join((row[1] or "").split()))
            for row in db.execute("SELECT name, sql FROM sqlite_master")
        }


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_that_was_known_is_lost(tmp_path: Path, version: int) -> None:
    """Cases, audit, proofs, limits, keeps, budgets, counters and the epoch."""
    path = tmp_path / "l"
    made(path, version)
    with Ledger(path) as ledger:
        assert ledger.next_epoch() == 42
        (stored,) = ledger.open_cases()
        assert (stored.id, stored.case) == (1, due())
        assert [event["kind"] for event in ledger.events("proc-0")] == ["detected", "log"]
        assert ledger.delivery(1, ["moderate-notify:enforce"]).proven_at == 11.0
        assert [item.id for item in ledger.ends_since(0.0)] == ["d1"]
        assert [item.reason for item in ledger.keeps("idle", "proc-2", "run-a")] == ["why"]
        assert ledger.trust_spent() == {("idle", "proc-1"): 30.0}
        assert ledger.result_counts() == {("idle", "terminate", "verified"): 1}
        assert ledger.stage_counts() == {("idle", "log", "enforce", "done"): 1}
        assert (ledger.count_events("detected"), ledger.count_events("idle_detected")) == (2, 1)
        assert ledger.freed_bytes() == FREED
        assert ledger.notice_attempts() == {("email", "delivered"): 7}
        assert ledger.decision_waits() == {("idle", "terminate"): {60: (1, 0.0)}}
        assert ledger.keep_counts() == {("idle", "owner"): 1}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_grew_is_what_is_made_anew(tmp_path: Path, version: int) -> None:
    """No version's file lacks an index, a trigger or a column of a fresh one."""
    made(tmp_path / "grown", version)
    for name in ("grown", "fresh"):
        Ledger(tmp_path / name).close()
    assert schema(tmp_path / "grown") == schema(tmp_path / "fresh")
