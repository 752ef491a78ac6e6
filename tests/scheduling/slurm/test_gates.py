"""Jobs keep to their windows and teams to their budgets, and only who can be asked is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.slurm.tasks import box_policy
from tests.scheduling.slurm.test_bookings import a_slot
from tests.scheduling.slurm.test_queue import a_job

from gpuwarden.periods import period_of
from gpuwarden.platforms.slurm_limits import Counter
from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.slurm.caps import (
    begin_of,
    cap_of,
    capped,
    differs,
    gpu_seconds,
    spent_teams,
    unset,
)
from gpuwarden.scheduling.slurm.gates import gates
from gpuwarden.scheduling.slurm.notices import Why

if TYPE_CHECKING:
    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.scheduling.policies import Policy

MORNING = 1_800_000_000.0
"""Friday, 2027-01-15 09:00 in Berlin: the window is closed until 20:00."""
EVENING = MORNING + 11 * 3600
NIGHT = "gpuwarden:token123:run=exp-1:window=off-peak"
ZONE = "Europe/Berlin"


def waiting(**changes: object) -> ListedJob:
    """A job that waits and is to run at night."""
    return a_job(1, comment=NIGHT, eligible=MORNING - 60, **changes)


def running(**changes: object) -> ListedJob:
    """A job that runs and is to run at night."""
    return a_job(
        1, **({"state": "RUNNING", "comment": NIGHT, "start_time": MORNING - 600} | changes)
    )  # type: ignore[arg-type]


# -- windows


def test_who_came_back_by_day_waits_for_the_evening() -> None:
    """`--begin` had kept it once only."""
    policy = box_policy()
    assert gates((waiting(),), policy, spent=(), now=MORNING).begins == (("1", EVENING),)
    told = replace(waiting(), eligible=EVENING)
    assert gates((told,), policy, spent=(), now=MORNING).begins == ()
    assert gates((waiting(),), policy, spent=(), now=EVENING + 1).begins == ()


def test_who_made_way_for_a_slot_does_not_start_in_front_of_it_again() -> None:
    """Nor before its window, if that opens later; and it is told for what it waits."""
    slot = a_slot(team="speech", start=MORNING + 600, end=MORNING + 1200)
    plain = replace(waiting(), job=replace(waiting().job, comment=""))
    found = gates((plain,), box_policy(), spent=(), now=MORNING, slots={"1": slot})
    assert found.begins == (("1", slot.start),)
    assert found.words["1"].startswith("It made way for slot b1 of speech, and may start again ")
    told = replace(plain, eligible=slot.start)
    assert gates((told,), box_policy(), spent=(), now=MORNING, slots={"1": slot}).begins == ()
    found = gates((waiting(),), box_policy(), spent=(), now=MORNING, slots={"1": slot})
    assert found.begins == (("1", EVENING),)


def test_a_later_beginning_is_left_alone() -> None:
    """Its user wanted it to begin even later."""
    later = replace(waiting(), eligible=EVENING + 999)
    assert gates((later,), box_policy(), spent=(), now=MORNING).begins == ()


def test_who_runs_when_the_window_closes_leaves_where_the_policy_says_so() -> None:
    """`leave` asks, `finish` lets it go on."""
    ((job, why),) = gates((running(),), box_policy(), spent=(), now=MORNING).leaves
    assert (job.number, why) == ("1", Why(Cause.WINDOW, "off-peak"))
    window = {"name": "off-peak", "from": "20:00", "to": "07:00", "running": "finish"}
    assert gates((running(),), box_policy(windows=[window]), spent=(), now=MORNING).leaves == ()
    assert gates((running(),), box_policy(), spent=(), now=EVENING + 60).leaves == ()


@pytest.mark.parametrize("comment", ["", "gpuwarden:token123:window=none", "window=off-peak"])
def test_other_jobs_have_no_window(comment: str) -> None:
    """One that the policy does not have is none, and neither are a user's own words."""
    for job in (waiting(), running()):
        own = replace(job, job=replace(job.job, comment=comment))
        found = gates((own,), box_policy(), spent=(), now=MORNING)
        assert (found.begins, found.leaves) == ((), ())


def test_a_spent_budget_asks_its_teams_jobs() -> None:
    """Nobody else's, and none that is on its way out."""
    jobs = (
        a_job(1, state="RUNNING"),
        a_job(2, state="RUNNING", account="speech"),
        a_job(3, state="COMPLETED COMPLETING"),
        a_job(4),
    )
    found = gates(jobs, box_policy(), spent={"vision"}, now=MORNING).leaves
    assert [(job.number, why.cause) for job, why in found] == [("1", Cause.BUDGET)]


# -- budgets


def budget(limit: float, per: str = "day", **changes: str) -> dict[str, str]:
    """A hard budget of vision."""
    usual = {"team": "vision", "per": per, "limit": f"{limit} GPU-hours", "kind": "hard"}
    return usual | {"running": "finish"} | changes


def held(hours: float, gpus: int, *, ago: float = 0.0) -> Holding:
    """What vision held, up to some hours ago."""
    end = MORNING - ago * 3600
    return Holding("slurm", "1", "ana", "vision", gpus, end - hours * 3600, end)


def a_cap(policy: Policy, *holdings: Holding, used: int = 0, now: float = MORNING) -> int:
    """The limit in minutes."""
    return cap_of(policy, "vision", holdings, Counter(None, used), now=now).minutes


def test_the_limit_is_the_counter_and_what_is_left() -> None:
    """Eight cards for an hour are eight GPU-hours of the day's ten."""
    policy = box_policy(budgets=[budget(10)])
    assert a_cap(policy, used=5000) == 5600
    assert a_cap(policy, held(1, 8), used=5000) == 5120
    assert a_cap(policy, held(2, 8), used=5000) == 5000


def test_a_new_day_begins_at_the_policys_midnight() -> None:
    """What ended before costs nothing, and what ran over midnight its part after it."""
    policy = box_policy(budgets=[budget(10)])
    assert a_cap(policy, held(1, 8, ago=9.5), used=0) == 600
    # Two hours of four cards, the last half an hour after midnight.
    assert a_cap(policy, held(2, 4, ago=8.5), used=0) == 600 - 4 * 30


def test_the_tightest_budget_counts() -> None:
    """A month that is nearly spent leaves less than the day."""
    policy = box_policy(budgets=[budget(10), budget(20, "month")])
    assert a_cap(policy, held(18 / 8, 8, ago=20), used=0) == 120


def test_a_reset_counter_changes_nothing() -> None:
    """The limit follows what is used by accounting, not what the counter forgot."""
    policy = box_policy(budgets=[budget(10)])
    assert a_cap(policy, held(1, 4), used=9999) - 9999 == a_cap(policy, held(1, 4), used=0)


def test_only_budgets_that_slurm_cannot_count_are_capped() -> None:
    """A month alone is Slurm's own; a soft one is nobody's limit."""
    assert capped(box_policy(budgets=[budget(10, "month")])) == {}
    soft = {"team": "vision", "per": "day", "limit": "9 GPU-hours", "kind": "soft"}
    assert capped(box_policy(budgets=[soft])) == {}
    both = box_policy(budgets=[budget(10), budget(99, "month")])
    assert list(capped(both)) == ["vision"]
    assert begin_of(both, MORNING) == period_of("month", ZONE, MORNING).begin
    assert begin_of(box_policy(), MORNING) is None


def test_a_limit_is_set_only_when_it_is_off() -> None:
    """Running jobs reach Slurm's counter minutes later: that is no reason to set it again."""
    policy = box_policy(budgets=[budget(100)])
    cap = cap_of(policy, "vision", (), Counter(None, 0), now=MORNING)
    assert differs(cap, Counter(None, 0), policy)
    assert differs(cap, Counter(9000, 0), policy)
    assert not differs(cap, Counter(cap.minutes + 50, 0), policy)
    assert unset(policy, {}) == ("vision",)
    assert unset(policy, {"vision": Counter(None, 0)}) == ()


def test_a_budget_that_says_leave_is_spent_at_its_limit() -> None:
    """Of a month too; one that says finish lets its jobs run."""
    leave = box_policy(budgets=[budget(8, "month", running="leave")])
    assert spent_teams(leave, [held(1, 8)], MORNING) == {"vision"}
    assert spent_teams(leave, [held(1, 7)], MORNING) == frozenset()
    assert spent_teams(box_policy(budgets=[budget(8)]), [held(2, 8)], MORNING) == frozenset()


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 4 * 86_400), st.integers(0, 90_000), st.integers(1, 8)),
        max_size=8,
    )
)
def test_the_days_add_up_to_the_time_held(spans: list[tuple[int, int, int]]) -> None:
    """Whatever runs over however many midnights: nothing is lost, and nothing counts twice."""
    begin = period_of("day", ZONE, MORNING).begin
    holdings = [
        Holding("slurm", str(n), "ana", "vision", gpus, begin + at, begin + at + seconds)
        for n, (at, seconds, gpus) in enumerate(spans)
    ]
    now = begin + 9 * 86_400
    days = [period_of("day", ZONE, begin + n * 86_400) for n in range(9)]
    total = sum(gpus * seconds for _, seconds, gpus in spans)
    assert sum(gpu_seconds(holdings, "vision", day, now) for day in days) == total
