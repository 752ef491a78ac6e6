"""Every reason against an end, one by one, and each alone enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from tests.ruleengine.test_cases import due, rule

from gpuwarden.ruleengine import guards
from gpuwarden.ruleengine.acts import Act
from gpuwarden.ruleengine.cases import Case, CaseState, Delivery
from gpuwarden.ruleengine.guards import PastEnd, Situation
from gpuwarden.ruleengine.model import TerminateLimits
from gpuwarden.ruleengine.verdicts import FleetFacts, GpuFacts, JobFacts, RunFacts, Truth, Verdict

NOW = 10_000.0
JOB = JobFacts(
    job_id="proc-1",
    instance="n1:9835",
    instances=("n1:9835",),
    user="alice",
    gpus=(GpuFacts("GPU-1", "0", "A100"),),
    start_time=NOW - 3000,
)
SAVING = Act("moderate-checkpoint", "checkpoint", "d", NOW)
LIMITS = TerminateLimits(
    per_tick=1, per_hour=3, per_user_per_day=2, halt_above_share_of_running="10%"
)


def facts(jobs: int = 1, **changes: Any) -> FleetFacts:
    """A fleet that is well."""
    found = {f"proc-{n}": dataclasses.replace(JOB, job_id=f"proc-{n}") for n in range(1, jobs + 1)}
    return dataclasses.replace(
        FleetFacts(time=NOW - 1, jobs=found, expected_nodes=10, lit_nodes=10), **changes
    )


def situation(**changes: Any) -> Situation:
    """A situation in which nothing speaks against an end."""
    base = Situation(
        now=NOW,
        scrape_interval=5.0,
        limits=LIMITS,
        facts=facts(),
        ends=(),
        ended_this_tick=0,
        due_owners={"user:alice"},
        killed=False,
        settled_for=60.0,
        settle_after=30.0,
        cool_down=600.0,
    )
    return dataclasses.replace(base, **changes)


def fleet(**changes: Any) -> list[str]:
    """Objections for every job."""
    return [block.reason for block in guards.fleet_blocks(situation(**changes))]


def own(
    *,
    case: Case | None = None,
    job: JobFacts | None = JOB,
    truth: Truth = Truth.YES,
    delivery: Delivery | None = None,
    kept_until: float | None = None,
    protected: str = "",
    mode: str = "enforce",
    **changes: Any,
) -> list[str]:
    """Objections for the case."""
    judged = rule(mode)
    blocks = guards.case_blocks(
        situation(**changes),
        case or due(),
        judged,
        key="severe-terminate",
        stage=judged.stages[-1],
        job=job,
        verdict=Verdict("idle", "proc-1", truth, protected=protected),
        truth=truth,
        delivery=delivery or Delivery(complete=True, proven_at=1.0),
        kept_until=kept_until,
    )
    return [block.reason for block in blocks]


def test_nothing_speaks_against_an_end_when_all_is_well() -> None:
    """The base of every case below: no guard objects."""
    assert fleet() == []
    assert guards.limit_blocks(situation(), "alice", "idle") == []
    assert own() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"facts": facts(time=NOW - 10.1)}, "stale_facts"),
        ({"facts": facts(time=NOW + 1)}, "stale_facts"),
        ({"facts": facts(problems=("partial",))}, "facts_incomplete"),
        ({"facts": facts(lit_nodes=8)}, "dark_nodes"),
        ({"facts": facts(expected_nodes=0, lit_nodes=0)}, "dark_nodes"),
        ({"facts": facts(clock_skew_seconds=5.1)}, "clock_skew"),
        ({"killed": True}, "kill_switch"),
        ({"killed": None}, "kill_switch"),
        ({"settled_for": 29.0}, "settling"),
        ({"bad_files": "rules.yaml is wrong"}, "bad_files"),
        ({"limits": None}, "no_limits"),
    ],
)
def test_each_doubt_about_the_fleet_stops_every_end(changes: dict[str, Any], reason: str) -> None:
    """One reason is enough, and it is the one that is named."""
    assert fleet(**changes) == [reason]


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": facts(time=NOW - 10)},
        {"facts": facts(lit_nodes=9)},
        {"facts": facts(clock_skew_seconds=5.0)},
    ],
)
def test_exactly_at_a_limit_is_inside(changes: dict[str, Any]) -> None:
    """Two scrapes, a tenth of the nodes and five seconds are still allowed."""
    assert fleet(**changes) == []


def test_the_share_counts_owners_and_only_from_twenty_jobs() -> None:
    """Three owners of twenty jobs are 15 %; nineteen jobs say nothing; one owner is one."""
    three = {"user:a", "user:b", "user:c"}
    assert fleet(facts=facts(20), due_owners=three) == ["share_of_running"]
    assert fleet(facts=facts(19), due_owners=three) == []
    assert fleet(facts=facts(20), due_owners={"user:a", "user:b"}) == []


def test_the_share_counts_only_jobs_that_are_seen_now() -> None:
    """Jobs of a node that went dark within the hour make no crowd of the others small."""
    seen = facts(20).jobs
    ghosts = {
        f"ghost-{n}": dataclasses.replace(JOB, job_id=f"ghost-{n}", fresh=False) for n in range(20)
    }
    three = {"user:a", "user:b", "user:c"}
    many = dataclasses.replace(facts(), jobs=seen | ghosts)
    assert fleet(facts=many, due_owners=three) == ["share_of_running"]
    few = dataclasses.replace(facts(), jobs=facts(19).jobs | ghosts)
    assert fleet(facts=few, due_owners=three) == []


@pytest.mark.parametrize(
    ("ends", "tick", "reasons"),
    [
        ([], 1, ["limit_per_tick"]),
        ([("bob", 10), ("eve", 3000), ("kim", 3599)], 0, ["limit_per_hour"]),
        ([("bob", 10), ("eve", 3000), ("kim", 3600)], 0, []),
        ([("alice", 80_000), ("alice", 86_399)], 0, ["limit_per_user_per_day"]),
        ([("alice", 80_000), ("alice", 86_400)], 0, []),
        ([("alice", 599)], 0, ["cool_down"]),
        ([("alice", 600)], 0, []),
    ],
)
def test_limits_slide(ends: list[tuple[str, float]], tick: int, reasons: list[str]) -> None:
    """They look back from now, and know whose jobs were ended."""
    past = [PastEnd(NOW - ago, user) for user, ago in ends]
    blocks = guards.limit_blocks(situation(ends=past, ended_this_tick=tick), "alice", "idle")
    assert [block.reason for block in blocks] == reasons


def test_zero_is_none_allowed() -> None:
    """0 is never unlimited."""
    none = TerminateLimits(
        per_tick=0, per_hour=0, per_user_per_day=0, halt_above_share_of_running="0%"
    )
    found = {block.reason for block in guards.limit_blocks(situation(limits=none), "alice", "idle")}
    assert found == {"limit_per_tick", "limit_per_hour", "limit_per_user_per_day"}
    assert fleet(limits=none, facts=facts(20)) == ["share_of_running"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "warn"}, "mode"),
        ({"case": msgspec.structs.replace(due(), state=CaseState.NOTIFIED)}, "not_due"),
        (
            {"case": msgspec.structs.replace(due(), state=CaseState.REFUSED, retry_in=9.0)},
            "refused",
        ),
        ({"job": None}, "job_gone"),
        ({"job": dataclasses.replace(JOB, fresh=False)}, "dark_node"),
        ({"protected": "whitelist: demo"}, "protected"),
        ({"truth": Truth.UNKNOWN}, "not_confirmed"),
        ({"truth": Truth.NO}, "not_confirmed"),
        ({"kept_until": NOW + 1}, "kept"),
        ({"case": msgspec.structs.replace(due(), acts=(SAVING,))}, "saving"),
        ({"delivery": Delivery()}, "notice_not_delivered"),
        ({"case": msgspec.structs.replace(due(), notice_age=299.0)}, "notice_too_young"),
        ({"case": msgspec.structs.replace(due(), elapsed=479.0)}, "deadline"),
        ({"job": dataclasses.replace(JOB, start_time=NOW - 3601)}, "work_lost"),
        ({"job": dataclasses.replace(JOB, start_time=None)}, "work_unknown"),
        ({"incomplete_cards": {"GPU-1"}}, "incomplete_reclaim"),
    ],
)
def test_each_objection_of_a_case_is_enough(changes: dict[str, Any], reason: str) -> None:
    """One reason is enough, and it is the one that is named."""
    assert own(**changes) == [reason]


def test_a_saved_state_bounds_the_work_that_is_lost() -> None:
    """The newest of the saved state and the attempt's start counts; no state is everything."""
    old = dataclasses.replace(JOB, start_time=NOW - 7200)
    assert guards.work_lost(old, NOW) == 7200
    saved = dataclasses.replace(old, run=RunFacts("r", checkpoint_time=NOW - 60))
    assert guards.work_lost(saved, NOW) == 60
    earlier = dataclasses.replace(old, run=RunFacts("r", checkpoint_time=NOW - 90_000))
    assert guards.work_lost(earlier, NOW) == 7200
    ahead = dataclasses.replace(old, run=RunFacts("r", checkpoint_time=NOW + 6))
    assert guards.work_lost(ahead, NOW) == 7200
