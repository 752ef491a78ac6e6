"""The ledger: on disk before anything takes effect, and its invariants in SQL."""

from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.ruleengine.test_cases import due, rule

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.acts import ActState
from gpuwarden.ruleengine.cases import CaseState, Event
from gpuwarden.ruleengine.ledger import Ledger, LedgerUnusable
from gpuwarden.ruleengine.records import Change, Decision, DeliveryKey, Keep, StoredCase

KEY = DeliveryKey("f1", "2026-01-01T00:00:00Z", "firing", "email", "a@example.org")


def add(ledger: Ledger, job_id: str = "proc-1") -> StoredCase:
    """Store a due case."""
    case = msgspec.structs.replace(due(), job_id=job_id)
    (stored,) = ledger.save([Change(None, case, "enforce", (Event("detected"),))], time=1.0)
    return stored


def decision(stored: StoredCase, number: int = 1, job_id: str = "proc-1") -> Decision:
    """A decision about a case."""
    return Decision(
        id=f"d{number}",
        epoch=1,
        case_id=stored.id,
        rule_id="idle",
        job_id=job_id,
        user="alice",
        action="terminate",
        state="authorised",
        host="n1",
        body=b"{}",
        signature="s",
        gpus=("GPU-1",),
        evidence="[]",
        grace=60.0,
        expires=100.0,
        created_at=50.0 + number,
    )


def authorise(ledger: Ledger, stored: StoredCase, made: Decision) -> None:
    """Write a decision down."""
    case = cases.authorised(stored.case, rule(), made.id, key="severe-terminate", wall=50.0)
    change = Change(stored.id, case, "enforce", (Event("authorised"),))
    ledger.authorise(made, change, time=50.0)


def test_an_attempt_has_one_decision_that_stands(tmp_path: Path) -> None:
    """SQLite itself refuses the second; one that was refused or lapsed does not stand."""
    with Ledger(tmp_path / "l") as ledger:
        stored = add(ledger)
        authorise(ledger, stored, decision(stored, 1))
        with pytest.raises(sqlite3.IntegrityError):
            authorise(ledger, stored, decision(stored, 2))
        assert [event["kind"] for event in ledger.events("proc-1")] == ["detected", "authorised"]
        ledger.settle("d1", "lapsed", None, time=60.0)
        authorise(ledger, stored, decision(stored, 3))
        assert [made.id for made in ledger.open_decisions()] == ["d3"]


def test_a_result_is_final(tmp_path: Path) -> None:
    """A counter of results can only grow, and a late report changes no history."""
    with Ledger(tmp_path / "l") as ledger:
        stored = add(ledger)
        authorise(ledger, stored, decision(stored))
        assert ledger.result_counts() == {}
        assert ledger.settle("d1", "acting", None, time=55.0)
        assert ledger.result_counts() == {}
        assert ledger.settle("d1", "verified", None, time=60.0)
        change = Change(stored.id, stored.case, "enforce", (Event("refused"),))
        assert not ledger.settle("d1", "refused", change, time=70.0)
        assert ledger.result_counts() == {("idle", "terminate", "verified"): 1}
        assert [event["kind"] for event in ledger.events("proc-1")] == ["detected", "authorised"]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    """It names people and their addresses."""
    with Ledger(tmp_path / "l") as ledger:
        add(ledger)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("l", "l-wal", "l-shm", "l.lock"), 0o600)


def test_a_file_that_takes_nothing_says_what_to_do(tmp_path: Path) -> None:
    """Not a traceback of the database's, and nothing is half written."""
    with Ledger(tmp_path / "l") as ledger:
        ledger._db.execute("PRAGMA query_only=ON")
        with pytest.raises(LedgerUnusable, match="mend its permissions"):
            add(ledger)
        ledger._db.execute("PRAGMA query_only=OFF")
        add(ledger)
        assert len(ledger.open_cases()) == 1


def test_a_folder_is_no_ledger(tmp_path: Path) -> None:
    """A slip in engine.yaml is told as one, and leaves no lock behind."""
    (tmp_path / "l").mkdir()
    for _ in range(2):
        with pytest.raises(LedgerUnusable, match="not a usable ledger"):
            Ledger(tmp_path / "l")


def test_the_audit_cannot_be_changed(tmp_path: Path) -> None:
    """Not even by a statement of somebody who has the file."""
    with Ledger(tmp_path / "l") as ledger:
        add(ledger)
    other = sqlite3.connect(tmp_path / "l")
    try:
        for statement in ("DELETE FROM events", "UPDATE events SET kind='x'"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                other.execute(statement)
    finally:
        other.close()


def test_a_rule_and_a_job_have_one_open_case(tmp_path: Path) -> None:
    """A second one is a fault of the engine, and is refused whole."""
    with Ledger(tmp_path / "l") as ledger:
        add(ledger)
        with pytest.raises(sqlite3.IntegrityError):
            add(ledger)
        assert len(ledger.open_cases()) == 1
        assert ledger.count_events("detected") == 1


def test_a_suspicion_that_came_to_nothing_leaves_no_trace(tmp_path: Path) -> None:
    """Only what was detected is kept after its end."""
    with Ledger(tmp_path / "l") as ledger:
        watching = cases.opened(rule(), "proc-1", wall=0.0)
        (stored,) = ledger.save([Change(None, watching, "enforce")], time=1.0)
        ledger.save([Change(stored.id, watching, "enforce", (), "cleared")], time=2.0)
        assert ledger.past_cases("proc-1") == []
        found = add(ledger)
        ledger.save(
            [Change(found.id, found.case, "enforce", (Event("closed"),), "cleared")], time=3.0
        )
        (past,) = ledger.past_cases("proc-1")
        assert past["closed_because"] == "cleared"


def test_a_second_engine_is_kept_out(tmp_path: Path) -> None:
    """One engine per ledger; the message says what to do."""
    with Ledger(tmp_path / "l"), pytest.raises(LedgerUnusable, match="stop the other one"):
        Ledger(tmp_path / "l")
    Ledger(tmp_path / "l").close()


def test_a_newer_ledger_is_refused(tmp_path: Path) -> None:
    """An old engine does not guess what a new one wrote."""
    Ledger(tmp_path / "l").close()
    other = sqlite3.connect(tmp_path / "l")
    other.execute("PRAGMA user_version=999")
    other.close()
    with pytest.raises(LedgerUnusable, match="newer"):
        Ledger(tmp_path / "l")


def test_something_else_than_a_ledger_is_refused(tmp_path: Path) -> None:
    """A wrong path does not destroy what is there."""
    (tmp_path / "l").write_text("these are not the bytes of a database" * 100)
    with pytest.raises(LedgerUnusable, match="not a usable ledger"):
        Ledger(tmp_path / "l")


def test_epochs_grow_with_each_life(tmp_path: Path) -> None:
    """Agents refuse what an earlier life still sends."""
    for expected in (1, 2, 3):
        with Ledger(tmp_path / "l") as ledger:
            assert ledger.next_epoch() == expected


def test_delivery_is_complete_with_the_last_required_proof(tmp_path: Path) -> None:
    """None required is not complete; the time is that of the last proof."""
    with Ledger(tmp_path / "l") as ledger:
        number = add(ledger).id
        stage = "moderate-notify:enforce"
        assert not ledger.delivery(number, [stage]).complete
        both = [("email", "a@example.org"), ("slack", "U0ALICE01")]
        ledger.require(number, stage, both, channels=["email", "slack"], time=5.0)
        ledger.record_delivery(KEY, case_id=number, stage=stage, proof="250 ok", time=6.0)
        assert not ledger.delivery(number, [stage]).complete
        slack = dataclasses.replace(KEY, channel="slack", recipient="U0ALICE01")
        ledger.record_failure(slack, case_id=number, stage=stage, error="no", time=7.0)
        assert not ledger.delivery(number, [stage]).complete
        ledger.record_delivery(slack, case_id=number, stage=stage, proof="ts=1", time=8.0)
        delivery = ledger.delivery(number, [stage])
        assert delivery.complete
        assert delivery.proven_at == 8.0
        assert ledger.notice_attempts() == {
            ("email", "delivered"): 1,
            ("slack", "delivered"): 1,
            ("slack", "failed"): 1,
        }


def test_a_mended_address_replaces_the_one_that_failed(tmp_path: Path) -> None:
    """What is proven stays; what is not gives way to the directory's new word."""
    with Ledger(tmp_path / "l") as ledger:
        number = add(ledger).id
        for address in ("old@example.org", "new@example.org"):
            ledger.require(number, "s", [("email", address)], channels=["email"], time=5.0)
        assert [notice.recipient for notice in ledger.notices(number)] == ["new@example.org"]


def test_counters_come_from_what_is_written(tmp_path: Path) -> None:
    """They survive a restart because they are not kept anywhere else."""
    report = '{"proof": {"memory_freed": 1024}}'
    with Ledger(tmp_path / "l") as ledger:
        stored = add(ledger)
        authorise(ledger, stored, decision(stored))
        change = Change(stored.id, cases.settled(stored.case, "d1", ActState.VERIFIED), "enforce")
        ledger.settle("d1", "verified", change, time=60.0, report=report)
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.freed_bytes() == 1024
        assert ledger.result_counts() == {("idle", "terminate", "verified"): 1}
        assert [made.id for made in ledger.ends_since(0.0)] == ["d1"]


def test_keeps_follow_the_run_over_its_attempts(tmp_path: Path) -> None:
    """The next attempt of a run finds what was granted to the one before."""
    with Ledger(tmp_path / "l") as ledger:
        keep = Keep("idle", "proc-1", "run-a", "owner", "alice", "why", 60.0, 1.0, 61.0)
        ledger.add_keep(keep, None, time=1.0)
        assert ledger.keeps("idle", "proc-2", "run-a") == [keep]
        assert ledger.keeps("idle", "proc-2", None) == []
        assert ledger.keeps("other", "proc-1", "run-a") == []


_WRITER = """
import sys
from pathlib import Path
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.records import Change
from tests.ruleengine.test_ledger import add, authorise, decision
ledger = Ledger(Path(sys.argv[1]))
stored = add(ledger)
print("case", flush=True)
authorise(ledger, stored, decision(stored))
print("authorised", flush=True)
sys.stdin.readline()
ledger._db.execute("BEGIN IMMEDIATE")
ledger._db.execute("UPDATE decisions SET state='verified'")
print("half", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("step", ["authorised", "half"])
def test_a_crash_leaves_whole_steps(tmp_path: Path, step: str) -> None:
    """Kill -9 of the writer: what returned is there, what had not is not, and the lock is free."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path / "l")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.strip() == step:
                break
            if line.strip() == "authorised":
                process.stdin.write("\n")
                process.stdin.flush()
        process.send_signal(signal.SIGKILL)
    with Ledger(tmp_path / "l") as ledger:
        (made,) = ledger.open_decisions()
        assert made.state == "authorised"
        assert made.body == b"{}"
        (stored,) = ledger.open_cases()
        assert stored.case.state is CaseState.AUTHORISED
        assert [event["kind"] for event in ledger.events("proc-1")] == ["detected", "authorised"]
