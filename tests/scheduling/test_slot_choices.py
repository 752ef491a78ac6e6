"""A task for a slot starts with it, on its cards, for its team."""

from __future__ import annotations

import dataclasses
from zoneinfo import ZoneInfo

import pytest

from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.schedule_api import BookingEntry, BookingState
from gpuwarden.scheduling.slot_choices import chosen, doubts, refuse_misfit

NOW = 1_800_000_000.0
HOUR = 3600.0
SLOT = BookingEntry("night.2", "vision", "ana", 2, "a100-40", NOW + HOUR, NOW + 3 * HOUR)
BEFORE = dataclasses.replace(SLOT, id="night.1", start=NOW - 2 * HOUR, end=NOW)
AFTER = dataclasses.replace(SLOT, id="night.3", start=NOW + 25 * HOUR, end=NOW + 27 * HOUR)
BOOKINGS = (AFTER, SLOT, BEFORE)


def test_a_booking_means_its_next_slot_and_a_slot_itself() -> None:
    """One whose time has come is next until it ends."""
    assert chosen(BOOKINGS, "night", now=NOW) is SLOT
    assert chosen(BOOKINGS, "night.3", now=NOW) is AFTER
    assert chosen(BOOKINGS, "night", now=NOW + 2 * HOUR) is SLOT
    given_back = dataclasses.replace(SLOT, state=BookingState.RELEASED)
    assert chosen((given_back, AFTER), "night", now=NOW) is AFTER


@pytest.mark.parametrize(
    ("name", "words"), [("night.1", "it is over, or was given back"), ("nigh", "gpuwarden book")]
)
def test_what_is_over_or_unknown_is_refused(name: str, words: str) -> None:
    """With what to look at."""
    with pytest.raises(RefusedAction, match=words):
        chosen(BOOKINGS, name, now=NOW)


def test_what_does_not_fit_a_slot_is_told_at_once() -> None:
    """And what says the same as the slot is right."""
    refuse_misfit(SLOT, team="vision", card="a100-40", gpus=2, window=None)
    refuse_misfit(SLOT, team=None, card=None, gpus=1, window=None)
    with pytest.raises(InvalidInput) as refused:
        refuse_misfit(SLOT, team="speech", card="h100", gpus=3, window="off-peak")
    said = str(refused.value).splitlines()
    assert [line.split()[0] for line in said] == ["--team", "--card", "--gpus", "--window"]


def test_whoever_goes_first_in_it_and_its_end_are_told() -> None:
    """What is longer than what is left of the slot is not protected behind it."""
    facts = {"now": NOW, "zone": ZoneInfo("UTC")}
    assert list(doubts(SLOT, user="ana", seconds=2 * HOUR, **facts)) == []
    assert list(doubts(SLOT, user="ana", seconds=None, **facts)) == []
    first, second = doubts(SLOT, user="bo", seconds=2 * HOUR + 1, **facts)
    assert "booked by ana, whose jobs go first" in first
    assert "ends Fri 01-15 11:00" in second
    late = {**facts, "now": NOW + 2 * HOUR}
    assert len(list(doubts(SLOT, user="ana", seconds=2 * HOUR, **late))) == 1
