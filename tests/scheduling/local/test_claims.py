"""What a job that cannot start keeps from others and lends them, and whose turn it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.local.policy_texts import box
from tests.scheduling.local.test_plans import (
    A100,
    BOX,
    HOUR,
    NOW,
    planned,
    started,
    told,
    wants,
    works,
)

from gpuwarden.scheduling.local.plans import DRAIN_SECONDS, plan
from gpuwarden.scheduling.local.scenes import Scene
from gpuwarden.scheduling.preemption_terms import Told

LEFT = 540.0
"""Seconds in which nobody may be asked: a job that began a minute ago runs for ten undisturbed."""
HIGH = wants("high", 4, priority="high", submitted=NOW - 99)


def test_what_is_done_before_anybody_may_be_asked_passes() -> None:
    """The high job cannot have its cards before: one of them trains somebody's trial meanwhile."""
    running = works("low", 3, ran=60.0, team="nlp")
    found = planned(running, HIGH, wants("short", seconds=LEFT))
    assert started(found) == ["short"]
    assert found.waits["high"].code == "not_yet"
    for seconds in (LEFT + 1, None):
        assert started(planned(running, HIGH, wants("long", seconds=seconds))) == []


def test_what_ends_by_itself_earlier_counts_too() -> None:
    """The high job may have its cards in five minutes: nobody keeps it from them."""
    running = works("low", 3, ran=60.0, team="nlp", ends=NOW + 300)
    assert started(planned(running, HIGH, wants("a", seconds=300.0))) == ["a"]
    assert started(planned(running, HIGH, wants("a", seconds=301.0))) == []


def test_once_somebody_was_asked_nobody_passes() -> None:
    """Whoever leaves may leave at any moment, and did so for the high job."""
    found = planned(works("low", 3, team="nlp"), HIGH, wants("short", seconds=9.0))
    assert told(found) == ["low"]
    assert started(found) == []


def test_a_card_is_lent_once_and_nobody_is_asked_for_whoever_it_was_lent_to() -> None:
    """Of two short jobs one starts; the other waits, and counts on no card that is promised."""
    running = (works("new", 2, ran=60.0, team="nlp"), works("old", 1, team="nlp"))
    first, second = (
        wants(name, seconds=60.0, submitted=NOW - ago) for name, ago in (("a", 9), ("b", 8))
    )
    found = planned(*running, HIGH, first, second)
    assert started(found) == ["a"]
    wide = wants("wide", 2, priority="high", seconds=60.0, submitted=NOW - 9)
    assert told(planned(*running, HIGH, wide)) == []


def test_what_is_not_lent_between_teams_is_not_lent_by_a_claim() -> None:
    """Nlp keeps a card for itself, and vision has its own two: the free one stays free."""
    teams = [
        {"name": "vision", "users": [], "quota": {"a100": 2}, "borrow": {"a100": 2}},
        {
            "name": "nlp",
            "users": [],
            "quota": {"a100": 2},
            "lend": {"a100": 1},
            "borrow": {"a100": 2},
        },
    ]
    running = (works("v", 2, ran=60.0), works("n", 1, ran=60.0, team="nlp"))
    high = wants("high", 4, priority="high", team="nlp", submitted=NOW - 99)
    short = wants("short", seconds=60.0)
    assert started(planned(*running, high, short, policy=box(teams=teams))) == ["short"]
    teams[1] = {**teams[1], "lend": {"a100": 0}}
    assert started(planned(*running, high, short, policy=box(teams=teams))) == []


@given(
    others=st.lists(st.tuples(st.integers(1, 4), st.none() | st.floats(1.0, 3 * LEFT)), max_size=6),
    held=st.integers(1, 3),
    ends=st.none() | st.floats(NOW + 1, NOW + HOUR),
)
def test_nobody_who_passes_is_there_when_the_first_may_have_its_cards(
    others: list[tuple[int, float | None]], held: int, ends: float | None
) -> None:
    """By what is foretold, whoever passes costs the high job no second."""
    queue = [
        wants(f"w{number}", gpus, seconds=seconds, submitted=NOW - 9)
        for number, (gpus, seconds) in enumerate(others)
    ]
    found = planned(works("low", held, ran=60.0, team="nlp", ends=ends), HIGH, *queue)
    first = min(NOW + LEFT, ends or NOW + LEFT)
    facts = {job.id: job for job in queue}
    passed = [facts[name] for name in started(found)]
    assert all(job.seconds is not None and NOW + job.seconds <= first for job in passed)
    assert sum(job.gpus for job in passed) <= 4 - held


@pytest.mark.parametrize("seconds", [60.0, None])
def test_where_nothing_is_free_nothing_is_lent(seconds: float | None) -> None:
    """A claim of no card."""
    running = works("low", 4, ran=60.0, team="nlp")
    assert started(planned(running, HIGH, wants("a", seconds=seconds))) == []


def test_nothing_is_kept_where_time_would_not_help() -> None:
    """Two cards are of a job that nobody may ask: the one that just began is no help."""
    running = [works("firm", 2, team="nlp", priority="high"), works("low", 1, ran=60.0, team="nlp")]
    found = planned(*running, HIGH, wants("small"))
    assert started(found) == ["small"]
    assert found.waits["high"].code == "no_victim"


# -- turns


def test_whoever_others_have_left_for_goes_first_in_its_class() -> None:
    """Vision's job gave back what it had borrowed: it came first, and would take it again."""
    back, mine = wants("back", 4, submitted=NOW - 999), wants("mine", 2, team="nlp")
    assert started(planned(back, mine)) == ["back"]
    assert started(planned(back, mine, promised=frozenset({"mine"}))) == ["mine"]
    higher = wants("higher", 4, priority="high")
    assert started(planned(back, mine, higher, promised=frozenset({"mine"}))) == ["higher"]


def test_nobody_waits_behind_a_colleagues_thousand_jobs() -> None:
    """In a team whoever holds least goes first, then whoever came first."""
    many = [wants(f"a{number}", user="ana", submitted=NOW - 99) for number in range(9)]
    found = planned(*many, wants("b", user="bo", submitted=NOW - 1))
    assert started(found)[:2] == ["a0", "b"]
    held = works("x", 1, user="bo", priority="normal")
    assert started(planned(held, *many, wants("b", user="bo", submitted=NOW - 999)))[0] == "a0"


# -- cards that are off limits


def test_a_job_that_needs_a_card_which_is_off_limits_stops_nobody() -> None:
    """A stranger's process has one of four cards, and nobody knows for how long."""
    large = wants("large", 4, submitted=NOW - 2 * DRAIN_SECONDS)
    scene = Scene({A100: 4}, {A100: 3}, [large, wants("small")], [])
    found = plan(scene, BOX, NOW)
    assert started(found) == ["small"]
    assert found.waits["large"].code == "off_limits"
    assert (
        "It needs 4 cards of one host, and 3 of those that there are" in found.waits["large"].words
    )
    back = works("leaves", 1, told=Told("large", NOW + 60))
    found = plan(Scene({A100: 4}, {A100: 2}, [large], [back]), BOX, NOW)
    assert found.withdrawn == ("leaves",)
