"""Slots that come again keep their time on the wall, and their length in seconds."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.scheduling.recurrences import MAX_SLOTS, Repeat, starts

BERLIN = ZoneInfo("Europe/Berlin")
DAY = 86400.0


def at(text: str) -> float:
    """Unix time of a time on Berlin's clocks."""
    return dt.datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def walls(found: tuple[float, ...]) -> list[str]:
    """What Berlin's clocks show."""
    return [f"{dt.datetime.fromtimestamp(each, BERLIN):%m-%d %H:%M}" for each in found]


def test_a_weekly_slot_stays_at_eight_in_summer_and_winter() -> None:
    """Over the night in which clocks are put back it is 169 hours later, and still 20:00."""
    found = starts(at("2026-10-18 20:00"), Repeat.WEEKLY, until=at("2026-11-08 20:00"), zone=BERLIN)
    assert walls(found) == ["10-18 20:00", "10-25 20:00", "11-01 20:00", "11-08 20:00"]
    assert (found[1] - found[0]) / 3600 == 169


def test_a_time_that_a_clock_skips_is_an_hour_later_that_day() -> None:
    """02:30 is 03:30 on the one day on which it is not, and 02:30 again on the next."""
    found = starts(at("2027-03-27 02:30"), Repeat.DAILY, until=at("2027-03-29 12:00"), zone=BERLIN)
    assert walls(found) == ["03-27 02:30", "03-28 03:30", "03-29 02:30"]


def test_a_time_that_a_clock_shows_twice_is_taken_once() -> None:
    """The first of the two, as calendars do."""
    found = starts(at("2026-10-24 02:30"), Repeat.DAILY, until=at("2026-10-26 12:00"), zone=BERLIN)
    assert walls(found) == ["10-24 02:30", "10-25 02:30", "10-26 02:30"]
    assert found[1] - found[0] == DAY
    assert found[2] - found[1] == DAY + 3600


def test_weekdays_leave_the_weekend_out() -> None:
    """From a Thursday on: Thursday, Friday, Monday."""
    found = starts(
        at("2026-12-03 09:00"), Repeat.WEEKDAYS, until=at("2026-12-07 09:00"), zone=BERLIN
    )
    assert walls(found) == ["12-03 09:00", "12-04 09:00", "12-07 09:00"]


def test_a_booking_that_never_ends_ends() -> None:
    """However far away the end is, the slots are bounded."""
    assert len(starts(0.0, Repeat.DAILY, until=1e12, zone=BERLIN)) == MAX_SLOTS
    last = dt.datetime(9999, 12, 30, tzinfo=dt.UTC).timestamp()
    assert len(starts(last, Repeat.DAILY, until=1e15, zone=ZoneInfo("UTC"))) < 4


def test_an_end_before_the_start_leaves_nothing() -> None:
    """A single slot does not ask for an end."""
    assert starts(DAY, Repeat.WEEKLY, until=0.0, zone=BERLIN) == ()
    assert starts(DAY, Repeat.NONE, until=0.0, zone=BERLIN) == (DAY,)


@given(
    first=st.integers(0, 4_000_000_000).map(float),
    repeat=st.sampled_from([Repeat.DAILY, Repeat.WEEKDAYS, Repeat.WEEKLY]),
    days=st.integers(0, 400),
)
def test_slots_are_in_order_and_never_twice(first: float, repeat: Repeat, days: int) -> None:
    """A later end only adds slots, and none begins after it."""
    found = starts(first, repeat, until=first + days * DAY, zone=BERLIN)
    more = starts(first, repeat, until=first + (days + 3) * DAY, zone=BERLIN)
    assert list(found) == sorted(set(found))
    assert all(each <= first + days * DAY for each in found)
    assert more[: len(found)] == found
