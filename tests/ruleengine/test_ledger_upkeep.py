"""What the ledger forgets, and what it never does."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.leaves import a_leave
from tests.ruleengine.test_cases import due
from tests.ruleengine.test_ledger import KEY, add, authorise, decision

from gpuwarden.ruleengine.cases import CaseState, Event
from gpuwarden.ruleengine.leave_records import LeaveState, LeaveStore
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.ledger_upkeep import BATCH, TRUST_SECONDS, Pruned, prune
from gpuwarden.ruleengine.records import Change, Keep, StoredCase

if TYPE_CHECKING:
    from pathlib import Path

DAY = 86400.0
KEPT = 30 * DAY
NOW = 1_800_000_000.0
OLD = NOW - KEPT - 1
YOUNG = NOW - KEPT + 1


def closed(ledger: Ledger, job_id: str, at: float) -> StoredCase:
    """A case with two events that was closed at a time."""
    stored = add(ledger, job_id)
    change = Change(stored.id, stored.case, "enforce", (Event("closed"),), "cleared")
    ledger.save([change], time=at)
    return stored


def many_closed(ledger: Ledger, count: int, at: float) -> None:
    """So many closed cases, written in two transactions."""
    cases = [msgspec.structs.replace(due(), job_id=f"proc-old-{number}") for number in range(count)]
    opened = [Change(None, case, "enforce", (Event("detected"),)) for case in cases]
    stored = ledger.save(opened, time=1.0)
    ledger.save(
        [Change(s.id, s.case, "enforce", (Event("closed"),), "cleared") for s in stored], time=at
    )


def pruned(ledger: Ledger, **changes: Any) -> Pruned:
    """One portion at NOW."""
    options: dict[str, Any] = {"now": NOW, "keep": KEPT, "jobs": (), "runs": (), **changes}
    return prune(ledger, **options)


def known(ledger: Ledger) -> set[str]:
    """Jobs that closed cases are known of."""
    return {job for (job,) in ledger.rows("SELECT job_id FROM cases")}


def test_an_old_case_goes_whole_and_a_young_one_stays(tmp_path: Path) -> None:
    """Events, notices, proofs and decisions go with it; nothing refers to what is gone."""
    with Ledger(tmp_path / "l") as ledger:
        old = add(ledger, "proc-old")
        ledger.require(old.id, "s", [("email", "a")], channels=["email"], time=1.0)
        made = decision(old, 1, "proc-old")
        authorise(ledger, old, made)
        ledger.settle("d1", "verified", None, time=60.0)
        change = Change(old.id, old.case, "enforce", (Event("closed"),), "gone")
        ledger.save([change], time=OLD - 1)
        closed(ledger, "proc-young", YOUNG)
        found = pruned(ledger)
        assert (found.cases, found.more) == (1, False)
        assert known(ledger) == {"proc-young"}
        assert ledger.events("proc-old") == []
        assert ledger.notices(old.id) == []
        assert ledger.job_decisions("proc-old") == []
        assert len(ledger.events("proc-young")) == 2
        assert ledger.rows("PRAGMA foreign_key_check") == []


def test_counters_do_not_fall_when_cases_go(tmp_path: Path) -> None:
    """A counter that fell would look like a restart to Prometheus, and be counted again."""
    with Ledger(tmp_path / "l") as ledger:
        old = add(ledger, "proc-old")
        authorise(ledger, old, decision(old, 1, "proc-old"))
        ledger.settle("d1", "verified", None, time=60.0, report='{"proof": {"memory_freed": 5}}')
        events = (Event("log"), Event("idle_detected"), Event("closed"))
        ledger.save([Change(old.id, old.case, "enforce", events, "gone")], time=OLD)
        before = counters(ledger)
        assert pruned(ledger).cases == 1
        assert counters(ledger) == before
        assert before == ({("idle", "terminate", "verified"): 1}, 1, 1, 5)


def counters(ledger: Ledger) -> tuple[dict[tuple[str, str, str], int], int, int, int]:
    """What the metrics count."""
    stages = ledger.stage_counts()
    return (
        ledger.result_counts(),
        stages["idle", "log", "enforce", "done"],
        ledger.count_events("idle_detected"),
        ledger.freed_bytes(),
    )


@pytest.mark.parametrize("state", ["authorised", "acting", "incomplete"])
def test_what_is_open_or_not_proven_is_never_forgotten(tmp_path: Path, state: str) -> None:
    """Its card may still be held, and an answer may still come."""
    with Ledger(tmp_path / "l") as ledger:
        stored = add(ledger, "proc-1")
        authorise(ledger, stored, decision(stored))
        if state != "authorised":
            ledger.settle("d1", state, None, time=60.0)
        change = Change(stored.id, stored.case, "enforce", (Event("closed"),), "gone")
        ledger.save([change], time=OLD)
        add(ledger, "proc-open")
        assert pruned(ledger).cases == 0
        assert known(ledger) == {"proc-1", "proc-open"}


def test_what_a_running_job_did_is_not_forgotten(tmp_path: Path) -> None:
    """An attempt that was ended is known as such for as long as anything of it is seen."""
    with Ledger(tmp_path / "l") as ledger:
        closed(ledger, "proc-runs", OLD)
        keep = Keep("idle", "proc-0", "run-a", "owner", "alice", "why", 60.0, 1.0, OLD)
        ledger.add_keep(keep, None, time=1.0)
        assert pruned(ledger, jobs=["proc-runs"], runs=["run-a"]) == Pruned()
        found = pruned(ledger)
        assert (found.cases, found.keeps) == (1, 1)


def test_a_decision_that_counts_for_a_limit_stays(tmp_path: Path) -> None:
    """Also where clocks jumped and its case looks older than it is."""
    with Ledger(tmp_path / "l") as ledger:
        stored = add(ledger, "proc-1")
        late = dataclasses.replace(decision(stored), created_at=NOW - DAY / 2)
        authorise(ledger, stored, late)
        ledger.settle("d1", "verified", None, time=60.0)
        change = Change(stored.id, stored.case, "enforce", (Event("closed"),), "gone")
        ledger.save([change], time=OLD)
        assert pruned(ledger).cases == 0
        assert [made.id for made in ledger.ends_since(NOW - DAY)] == ["d1"]


def test_a_proof_stays_for_as_long_as_an_older_case_is_open(tmp_path: Path) -> None:
    """Its alert is repeated until then, and the recipient is not to get it twice."""
    with Ledger(tmp_path / "l") as ledger:
        stored = add(ledger, "proc-open")
        ledger.record_delivery(KEY, case_id=stored.id, stage="s", proof="ok", time=OLD)
        assert pruned(ledger).deliveries == 0
        change = Change(stored.id, stored.case, "enforce", (Event("closed"),), "cleared")
        ledger.save([change], time=NOW)
        assert pruned(ledger).deliveries == 1
        assert ledger.delivered(KEY) is None


def test_the_audit_lets_go_only_of_what_is_older_than_its_horizon(tmp_path: Path) -> None:
    """The horizon stands in the file; what is younger cannot be deleted by any statement."""
    with Ledger(tmp_path / "l") as ledger:
        closed(ledger, "proc-old", OLD)
        closed(ledger, "proc-young", YOUNG)
        pruned(ledger)
        with (
            pytest.raises(sqlite3.IntegrityError, match="append-only"),
            ledger.transaction() as db,
        ):
            db.execute("DELETE FROM events WHERE time >= ?", (NOW - KEPT,))
        assert ledger.rows("SELECT value FROM meta WHERE name='audit_kept_from'") == [
            (f"{NOW - KEPT:.3f}",)
        ]


def test_much_is_forgotten_in_portions(tmp_path: Path) -> None:
    """One transaction never holds up a tick; what is left is told."""
    with Ledger(tmp_path / "l") as ledger:
        for number in range(5):
            closed(ledger, f"proc-{number}", OLD - 10 + number)
        first = pruned(ledger, limit=2)
        assert (first.cases, first.more) == (2, True)
        assert known(ledger) == {"proc-2", "proc-3", "proc-4"}
        assert [pruned(ledger, limit=2).more for _ in range(2)] == [True, False]
        assert known(ledger) == set()


def test_a_running_jobs_budget_is_never_refilled(tmp_path: Path) -> None:
    """However long ago it was spent: only a job that is long gone loses its line."""
    with Ledger(tmp_path / "l") as ledger:
        ledger.save_trust({("idle", "proc-runs"): 7200.0, ("idle", "proc-gone"): 60.0}, time=1.0)
        ledger.save_trust({("idle", "proc-late"): 1.0}, time=NOW - TRUST_SECONDS + 1)
        found = pruned(ledger, jobs=["proc-runs"])
        assert found.trust == (("idle", "proc-gone"),)
        assert ledger.trust_spent() == {
            ("idle", "proc-runs"): 7200.0,
            ("idle", "proc-late"): 1.0,
        }


def test_an_engine_forgets_by_itself_and_goes_on(servers: World) -> None:
    """Cases of long ago are gone, counters are not, and the running job's budget stays spent."""

    async def story() -> None:
        async with running(servers) as world:
            ledger = world.engine.ledger
            ledger.save_trust({("idle-held", "proc-1"): 1799.0}, time=world.clock.wall())
            many_closed(ledger, BATCH + 1, world.clock.wall() - 100 * DAY)
            await world.until(CaseState.NOTIFIED)
            found = ledger.count_events("detected")
            assert len(known(ledger)) == BATCH + 2
            world.clock.pass_(300 * DAY)
            await world.tick(2)
            assert known(ledger) == {"proc-1"}
            assert ledger.count_events("detected") == found
            assert ledger.trust_spent() == {("idle-held", "proc-1"): 1799.0}

    asyncio.run(story())


def test_an_old_leave_goes_with_its_lines_of_the_audit_and_stays_counted(tmp_path: Path) -> None:
    """One without a result, one of a job that runs, and a young one stay."""
    with Ledger(tmp_path / "l") as ledger:
        store = LeaveStore(ledger)
        for name, at in (("old", 1.0), ("open", 1.0), ("runs", 1.0), ("young", YOUNG)):
            leave = a_leave(at, name, job_id=f"proc-{name}")
            store.add(leave, [], time=at)
            if name != "open":
                store.settle(leave, LeaveState.LEFT, "", steps={"left": at}, time=at)
        found = pruned(ledger, jobs=("proc-runs",))
        assert not found.more
        assert {leave.id for leave in store.newest(9)} == {"open", "runs", "young"}
        assert ledger.events("proc-old") == []
        assert len(ledger.events("proc-runs")) == 2
        counted = {what: number for what, number in store.counts().items() if number}
        assert counted == {("priority", "left"): 3}
        assert ledger.rows("PRAGMA foreign_key_check") == []
