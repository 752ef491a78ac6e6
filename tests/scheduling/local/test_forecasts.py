"""When a waiting job will start at the latest: the plan, played on."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.local.test_plans import A100, BOX, HOUR, NOW, wants, works

from gpuwarden.scheduling.local.forecasts import MAX_JOBS, expected_starts
from gpuwarden.scheduling.local.scenes import Scene, Waiting, Working


def latest(*jobs: Waiting | Working, total: int = 4) -> dict[str, float]:
    """Job -> seconds from now."""
    working = [job for job in jobs if isinstance(job, Working)]
    free = total - sum(job.gpus for job in working)
    waiting = [job for job in jobs if isinstance(job, Waiting)]
    scene = Scene({A100: total}, {A100: free}, waiting, working)
    found = expected_starts(scene, BOX, NOW)
    assert all(each.earliest == NOW and each.samples == 0 for each in found.values())
    return {name: each.latest - NOW for name, each in found.items()}


def test_jobs_start_when_those_before_them_end() -> None:
    """One after the other on the cards that come free, in their order."""
    jobs = (
        works("x", 4, ends=NOW + HOUR, team="nlp", priority="high"),
        wants("first", 3, seconds=2 * HOUR, submitted=NOW - 9),
        wants("second", 2, seconds=HOUR, submitted=NOW - 8),
        wants("third", 1, seconds=HOUR, submitted=NOW - 7),
    )
    assert latest(*jobs) == {"first": HOUR, "third": HOUR, "second": 3 * HOUR}


def test_where_somebody_has_no_end_nothing_is_said_of_those_behind() -> None:
    """No guess; what could start beside it is told all the same once every end is known."""
    assert latest(works("x", 4, team="nlp"), wants("a", 1)) == {}
    behind = (wants("a", 4, submitted=NOW - 9), wants("b", 4, seconds=9.0, submitted=NOW - 1))
    assert latest(works("x", 4, ends=NOW + 9, team="nlp", priority="high"), *behind) == {"a": 9.0}


def test_a_job_that_is_late_may_be_late_for_as_long_again() -> None:
    """Whoever waits for it is told no moment that has nothing to do with it."""
    late = works("x", 2, ends=NOW - HOUR, team="nlp", priority="high")
    other = works("y", 2, ends=NOW + 60, team="nlp", priority="high")
    assert latest(late, other, wants("first", 4)) == {"first": HOUR}


def test_of_a_long_queue_those_are_told_who_are_first_in_turn() -> None:
    """Not those who have waited longest."""
    running = works("x", 4, ends=NOW + HOUR, team="nlp", priority="high")
    many = [wants(f"w{number}", seconds=HOUR, submitted=NOW - 999) for number in range(MAX_JOBS)]
    late = wants("late", 4, seconds=HOUR, priority="high", submitted=NOW - 1)
    found = latest(running, *many, late)
    assert found["late"] == HOUR
    assert len(found) == MAX_JOBS


def test_a_job_that_is_asked_ends_after_its_epoch() -> None:
    """Or by its deadline, where nobody knows how long its epochs take."""
    high = wants("h", 4, priority="high")
    long = {"ends": NOW + 99 * HOUR, "team": "nlp"}
    assert latest(works("x", 4, epoch_seconds=300.0, **long), high) == {"h": 300.0}
    assert latest(works("x", 4, **long), high) == {"h": 1200.0}


_JOBS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([600.0, 3600.0, None]), st.integers(0, 99)),
    max_size=6,
)


@given(waiting=_JOBS, ends=st.integers(1, 7200))
def test_nobody_is_told_a_time_before_the_cards_can_be_there(
    waiting: list[tuple[int, float | None, int]], ends: int
) -> None:
    """The box is full until then, and never more than full afterwards."""
    running = works("x", 4, ends=NOW + ends, team="nlp", priority="high")
    jobs = [
        wants(f"w{number}", gpus, seconds=seconds, submitted=NOW - ago)
        for number, (gpus, seconds, ago) in enumerate(waiting)
    ]
    found = latest(running, *jobs)
    assert all(time >= ends for time in found.values())
    facts: dict[str, Any] = {job.id: job for job in jobs}
    for moment in found.values():
        held = sum(
            facts[name].gpus
            for name, begin in found.items()
            if begin <= moment < begin + (facts[name].seconds or float("inf"))
        )
        assert held <= 4
