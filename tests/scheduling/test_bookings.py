"""Bookings: capacity holds at every instant; who is in the way is named, other times proposed."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import replace
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.scheduling.bookings import (
    Answer,
    BudgetTerms,
    Terms,
    Wish,
    consider,
    lengthened,
    peak,
)
from gpuwarden.scheduling.recurrences import Repeat
from gpuwarden.scheduling.slots import Slot

if TYPE_CHECKING:
    import random

BERLIN = ZoneInfo("Europe/Berlin")
HOUR, DAY = 3600.0, 86400.0
NOW = dt.datetime(2026, 11, 30, 12, tzinfo=BERLIN).timestamp()
TERMS = Terms(
    zone=BERLIN,
    lead_seconds=900.0,
    longest_seconds=7 * DAY,
    ahead_seconds=90 * DAY,
    share=0.5,
    cards={"a100": 16, "h100": 4},
    quotas={"vision": {"a100": 8, "h100": 2}, "speech": {"a100": 6}},
    budgets={},
)
WISH = Wish("vision", "ana", 4, "a100", NOW + 8 * HOUR, 4 * HOUR)


def slot(
    start: float, hours: float, gpus: int, *, team: str = "speech", card: str = "a100"
) -> Slot:
    """A slot that somebody has; times in hours from now."""
    begin = NOW + start * HOUR
    return Slot(f"b{start:g}", team, "bo", gpus, card, begin, begin + hours * HOUR, 900.0)


def codes(answer: Answer) -> list[str]:
    """What is objected."""
    return [each.code for each in answer.objections]


def test_an_empty_calendar_has_room() -> None:
    """What is booked, and what it costs."""
    answer = consider(WISH, (), TERMS, now=NOW)
    assert codes(answer) == []
    (found,) = answer.slots
    assert (found.start, found.end, found.gpus) == (NOW + 8 * HOUR, NOW + 12 * HOUR, 4)
    assert answer.gpu_hours == 16


def test_who_is_in_the_way_is_named_and_the_nearest_times_are_proposed() -> None:
    """Of the eight that can be booked, six are taken in a part of the time: by whom, and when."""
    taken = (slot(10, 4, 6), slot(100, 4, 6))
    answer = consider(WISH, taken, TERMS, now=NOW)
    (objection,) = answer.objections
    assert objection.code == "conflict"
    assert "of 8 a100 that can be booked, 2 are free throughout: speech (bo) has 6 from Mon" in (
        objection.words
    )
    assert "2026-11-30 22:00 to Tue 2026-12-01 02:00 [b10]" in objection.words
    assert [(at - NOW) / HOUR for at in answer.proposals] == [6, 14, 0.25]
    for at in answer.proposals:
        assert codes(consider(replace(WISH, start=at), taken, TERMS, now=NOW)) == []


def test_other_times_are_proposed_by_whole_minutes() -> None:
    """What is shown can be typed: a slot that ends at 02:00:57 is proposed to follow at 02:01."""
    odd = replace(slot(10, 4, 6), start=NOW + 10 * HOUR + 3, end=NOW + 14 * HOUR + 57)
    answer = consider(WISH, (odd,), TERMS, now=NOW)
    assert [at - NOW for at in answer.proposals] == [6 * HOUR, 14 * HOUR + 60, 900]


def test_slots_that_only_touch_are_no_conflict() -> None:
    """A slot ends just before its end: the next begins there."""
    assert codes(consider(WISH, (slot(4, 4, 6), slot(12, 4, 6)), TERMS, now=NOW)) == []


def test_two_that_are_not_there_at_once_take_no_more_than_the_larger() -> None:
    """What counts is the most at any instant, and not the sum over the slot."""
    taken = (slot(8, 2, 4), slot(10, 2, 4))
    assert codes(consider(WISH, taken, TERMS, now=NOW)) == []
    assert codes(consider(replace(WISH, gpus=5), taken, TERMS, now=NOW)) == ["conflict"]


def test_other_cards_are_in_nobodys_way() -> None:
    """Each kind is counted by itself."""
    assert codes(consider(WISH, (slot(8, 4, 8, card="h100"),), TERMS, now=NOW)) == []


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"card": "v100"}, "card", "no cards called v100: there are a100, h100"),
        ({"team": "ghosts"}, "team", "no team ghosts"),
        ({"gpus": 0}, "gpus", "at least one"),
        ({"seconds": 0.0}, "empty", "end before it begins"),
        ({"seconds": -1.0}, "empty", "end before it begins"),
        ({"seconds": 8 * DAY}, "longest", "at most 7d"),
        ({"seconds": 899.0}, "shortest", "at least 15m long"),
        ({"start": NOW + 899}, "lead_time", "earliest start is Mon 2026-11-30 12:15"),
        ({"start": NOW - HOUR}, "lead_time", "told 15m before"),
        ({"start": NOW + 90 * DAY}, "ahead", "within 90d"),
        ({"gpus": 9}, "share", "at most 8 of 16 a100"),
        ({"card": "h100", "gpus": 3}, "share", "at most 2 of 4"),
        ({"team": "speech", "gpus": 7}, "quota", "speech may have 6 a100"),
        ({"team": "speech", "card": "h100", "gpus": 1}, "quota", "speech may have 0 h100"),
    ],
)
def test_what_the_policy_forbids_says_which_line(
    change: dict[str, object], code: str, says: str
) -> None:
    """Each limit has its code and its sentence."""
    answer = consider(replace(WISH, **change), (), TERMS, now=NOW)  # type: ignore[arg-type]
    assert code in codes(answer)
    assert any(re.search(says, each.words) for each in answer.objections)
    assert answer.proposals == ()


def test_a_team_cannot_book_beyond_its_quota_piece_by_piece() -> None:
    """Its own slots at the same time count together."""
    taken = (slot(9, 1, 3, team="vision"),)
    answer = consider(replace(WISH, gpus=6), taken, replace(TERMS, share=1.0), now=NOW)
    assert codes(answer) == ["quota"]
    assert "more than its 8 a100" in answer.objections[0].words


def test_everything_wrong_is_told_at_once() -> None:
    """Who mends one mistake is not shown the next."""
    wish = replace(WISH, start=NOW, seconds=6 * DAY, gpus=9, until=None)
    assert codes(consider(wish, (), TERMS, now=NOW)) == ["lead_time", "share"]


# -- repeats


def test_a_weekly_booking_is_checked_in_every_week() -> None:
    """A conflict in its third week is one, and the proposal moves the whole series."""
    wish = replace(WISH, repeat=Repeat.WEEKLY, until=NOW + 30 * DAY)
    third = slot(8 + 14 * 24, 4, 6)
    answer = consider(wish, (third,), TERMS, now=NOW)
    assert len(answer.slots) == 5
    assert codes(answer) == ["conflict"]
    assert "Mon 2026-12-14 20:00" in answer.objections[0].words
    assert sorted((at - NOW) / HOUR for at in answer.proposals)[:2] == [0.25, 4]
    for at in answer.proposals:
        assert codes(consider(replace(wish, start=at), (third,), TERMS, now=NOW)) == []


def test_a_repeat_without_an_end_lasts_as_far_ahead_as_may_be_booked() -> None:
    """90 days ahead are thirteen Mondays."""
    answer = consider(replace(WISH, repeat=Repeat.WEEKLY), (), TERMS, now=NOW)
    assert codes(answer) == []
    assert len(answer.slots) == 13


def test_a_daily_slot_longer_than_a_day_overlaps_itself() -> None:
    """It is refused by name; it would be its own conflict."""
    wish = replace(WISH, repeat=Repeat.DAILY, seconds=25 * HOUR, gpus=1)
    assert codes(consider(wish, (), TERMS, now=NOW)) == ["overlap"]


def test_many_conflicts_are_counted_and_not_listed() -> None:
    """A series that is in the way every day is told five times."""
    taken = [slot(8 + 24 * day, 1, 6) for day in range(30)]
    answer = consider(replace(WISH, repeat=Repeat.DAILY), taken, TERMS, now=NOW)
    assert codes(answer) == ["conflict"] * 6
    assert answer.objections[-1].words == "and 25 more of its slots"


# -- budgets


def budgeted(*budgets: BudgetTerms) -> Terms:
    """The terms with budgets of vision."""
    return replace(TERMS, budgets={"vision": budgets})


def test_a_hard_budget_counts_what_is_used_what_is_booked_and_what_is_wanted() -> None:
    """16 GPU-hours are wanted, and 8 are booked in November already."""
    booked = (slot(9, 2, 4, team="vision"),)
    wish = replace(WISH, seconds=4 * HOUR)  # 20:00 to 24:00, all of it in November
    for used, refused in ((76.0, False), (76.1, True)):
        terms = budgeted(BudgetTerms("month", 100.0, hard=True, used=used))
        assert codes(consider(wish, booked, terms, now=NOW)) == (["budget"] if refused else [])


def test_the_next_month_begins_with_nothing_used() -> None:
    """What is used up in November does not forbid December."""
    terms = budgeted(BudgetTerms("month", 20.0, hard=True, used=20.0))
    assert codes(consider(WISH, (), terms, now=NOW)) == ["budget"]
    assert codes(consider(replace(WISH, start=NOW + 13 * HOUR), (), terms, now=NOW)) == []


def test_a_slot_over_midnight_is_counted_in_both_days() -> None:
    """Three hours of it on the one, one on the other."""
    wish = replace(WISH, start=NOW + 9 * HOUR)
    terms = budgeted(BudgetTerms("day", 12.0, hard=True, used=0.0))
    assert codes(consider(wish, (), terms, now=NOW)) == []
    terms = budgeted(BudgetTerms("day", 11.9, hard=True, used=0.0))
    (objection,) = consider(wish, (), terms, now=NOW).objections
    assert "Mon 2026-11-30 00:00" in objection.words


def test_a_soft_budget_is_told_and_forbids_nothing() -> None:
    """The team decides."""
    answer = consider(WISH, (), budgeted(BudgetTerms("month", 10.0, hard=False, used=0)), now=NOW)
    assert codes(answer) == []
    assert "a soft budget" in answer.warnings[0]


def test_a_budget_whose_use_is_not_known_is_told_to_be_so() -> None:
    """Not known is not 0: it is booked, and said."""
    terms = budgeted(BudgetTerms("month", 100.0, hard=True))
    answer = consider(WISH, (), terms, now=NOW)
    assert codes(answer) == []
    assert "not known" in answer.warnings[0]


def test_a_budget_of_money_counts_by_the_price_of_the_cards() -> None:
    """16 card-hours at 2 EUR are 32 EUR; a kind without a price in this currency costs none."""
    for limit, refused in ((32.0, False), (31.9, True)):
        terms = budgeted(
            BudgetTerms("month", limit, hard=True, used=0.0, unit="EUR", rates={"a100": 2.0})
        )
        assert codes(consider(WISH, (), terms, now=NOW)) == (["budget"] if refused else [])


# -- lengthening


def test_a_slot_is_lengthened_into_free_time_only() -> None:
    """It is not in its own way; another is."""
    own = replace(slot(8, 4, 4, team="vision"), id="b1")
    other = slot(14, 2, 6)
    assert codes(lengthened(own, NOW + 14 * HOUR, (own, other), TERMS, now=NOW)) == []
    answer = lengthened(own, NOW + 14.5 * HOUR, (own, other), TERMS, now=NOW)
    assert codes(answer) == ["conflict"]
    assert codes(lengthened(own, NOW + 8 * HOUR, (own,), TERMS, now=NOW)) == ["empty"]
    assert codes(lengthened(own, NOW + 9 * DAY, (own,), TERMS, now=NOW)) == ["longest"]


def test_a_slot_of_thousands_of_years_is_refused_before_its_days_are_counted() -> None:
    """A budget of a day has three million of them, in which nobody else would be answered."""
    own = replace(slot(8, 4, 4, team="vision"), id="b1")
    terms = budgeted(BudgetTerms("day", 100.0, hard=True, used=0.0))
    assert codes(lengthened(own, 1e200, (own,), terms, now=NOW)) == ["longest", "ahead"]


def test_an_active_slot_can_be_lengthened() -> None:
    """It began in the past, which is no objection; given back early it may be short, too."""
    own = replace(slot(-1, 2, 4, team="vision"), id="b1")
    assert codes(lengthened(own, NOW + 4 * HOUR, (own,), TERMS, now=NOW)) == []
    begun = replace(own, start=NOW - 60)
    assert codes(lengthened(begun, NOW + 60, (begun,), TERMS, now=NOW)) == []


def test_a_slot_that_is_ahead_is_not_made_shorter_than_cards_are_kept_for_it() -> None:
    """A quarter of an hour of cards that are kept would cost a minute."""
    own = replace(slot(8, 4, 4, team="vision"), id="b1")
    assert codes(lengthened(own, own.start + 60, (own,), TERMS, now=NOW)) == ["shortest"]
    assert codes(lengthened(own, own.start + 900, (own,), TERMS, now=NOW)) == []


# -- properties

WISHES = st.builds(
    Wish,
    team=st.sampled_from(["vision", "speech"]),
    who=st.just("x"),
    gpus=st.integers(1, 8),
    card=st.just("a100"),
    start=st.integers(1, 200).map(lambda n: NOW + n * HOUR),
    seconds=st.integers(1, 60).map(lambda n: n * HOUR),
    repeat=st.sampled_from(list(Repeat)),
    until=st.integers(1, 300).map(lambda n: NOW + n * HOUR),
)


def booked(wishes: list[Wish]) -> list[Slot]:
    """What a calendar holds after wishes that were granted or refused."""
    taken: list[Slot] = []
    for number, wish in enumerate(wishes):
        answer = consider(wish, taken, TERMS, now=NOW, advise=False)
        if not answer.objections:
            taken += [
                replace(each, id=f"{number}.{index}") for index, each in enumerate(answer.slots)
            ]
    return taken


@settings(max_examples=60, deadline=None)
@given(st.lists(WISHES, max_size=12))
def test_capacity_and_quotas_are_never_exceeded_at_any_instant(wishes: list[Wish]) -> None:
    """At every edge of a slot the cards that are booked are there, for all and for each team."""
    taken = booked(wishes)
    for at in {edge for each in taken for edge in (each.start, each.end)}:
        held = [each for each in taken if each.start <= at < each.end]
        assert sum(each.gpus for each in held) <= 8
        for team, quota in (("vision", 8), ("speech", 6)):
            assert sum(each.gpus for each in held if each.team == team) <= quota


@settings(max_examples=60, deadline=None)
@given(st.lists(WISHES, max_size=10), WISHES, st.randoms())
def test_the_order_of_what_is_booked_changes_no_answer(
    wishes: list[Wish], wish: Wish, rng: random.Random
) -> None:
    """A calendar is a set."""
    taken = booked(wishes)
    mixed = list(taken)
    rng.shuffle(mixed)
    assert consider(wish, mixed, TERMS, now=NOW) == consider(wish, taken, TERMS, now=NOW)


@settings(max_examples=60, deadline=None)
@given(st.lists(WISHES, min_size=1, max_size=10), st.data())
def test_what_is_cancelled_is_free_exactly(wishes: list[Wish], data: st.DataObject) -> None:
    """The same cards for the same time can be booked again, and not one more where it was full."""
    taken = booked(wishes)
    if not taken:
        return
    gone = data.draw(st.sampled_from(taken))
    rest = [each for each in taken if each is not gone]
    again = Wish(gone.team, "y", gone.gpus, gone.card, gone.start, gone.end - gone.start)
    assert codes(consider(again, rest, TERMS, now=NOW)) == []
    most = peak(rest, gone.start, gone.end)
    full = 8 - most
    if 0 < full < 8:
        more = replace(again, gpus=full + 1, team="vision")
        assert codes(consider(more, rest, TERMS, now=NOW, advise=False)) == ["conflict"]


@settings(max_examples=60, deadline=None)
@given(st.lists(WISHES, max_size=10), WISHES)
def test_a_proposal_can_be_booked(wishes: list[Wish], wish: Wish) -> None:
    """Whoever takes the advice is not refused."""
    taken = booked(wishes)
    for at in consider(wish, taken, TERMS, now=NOW).proposals:
        assert codes(consider(replace(wish, start=at), taken, TERMS, now=NOW)) == []


def test_a_share_is_meant_and_not_its_representation() -> None:
    """29 % of 100 cards are 29, though 0.29 * 100 is less in floating point."""
    assert replace(TERMS, share=0.29, cards={"a100": 100}).bookable("a100") == 29
