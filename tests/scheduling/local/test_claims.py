"""Cards that are kept for a job which nobody may make room for yet: lent, and back in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.local.policy_texts import box
from tests.scheduling.local.test_plans import HOUR, NOW, planned, started, told, wants, works

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
