"""Moments as people type them: one moment, or a sentence that says what to write."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.scheduling.moments import (
    MomentUnclear,
    read_last,
    read_moment,
    readings,
    show_moment,
)

BERLIN = ZoneInfo("Europe/Berlin")
NOW = dt.datetime(2026, 11, 30, 11, 30, 17, tzinfo=BERLIN).timestamp()  # a Monday


def shown(text: str, now: float = NOW, zone: ZoneInfo = BERLIN) -> str:
    """What was read, with its offset."""
    return dt.datetime.fromtimestamp(read_moment(text, now=now, zone=zone), zone).isoformat()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", "2026-11-30T11:30:17+01:00"),
        ("+2h", "2026-11-30T13:30:17+01:00"),
        ("now+1h30m", "2026-11-30T13:00:17+01:00"),
        ("now - 7d", "2026-11-23T11:30:17+01:00"),
        ("20:00", "2026-11-30T20:00:00+01:00"),
        ("8:05", "2026-11-30T08:05:00+01:00"),
        ("today 20:00", "2026-11-30T20:00:00+01:00"),
        ("  Tomorrow   20:00 ", "2026-12-01T20:00:00+01:00"),
        ("mon 20:00", "2026-11-30T20:00:00+01:00"),
        ("mon 10:00", "2026-12-07T10:00:00+01:00"),
        ("next fri 18:30", "2026-12-04T18:30:00+01:00"),
        ("Sunday 00:00", "2026-12-06T00:00:00+01:00"),
        ("2026-12-01 20:00", "2026-12-01T20:00:00+01:00"),
        ("2026-12-01T20:00:05", "2026-12-01T20:00:05+01:00"),
        ("2026-12-01", "2026-12-01T00:00:00+01:00"),
        ("2026-12-01T20:00Z", "2026-12-01T21:00:00+01:00"),
        ("2026-12-01 20:00+09:00", "2026-12-01T12:00:00+01:00"),
        ("2027-07-01 20:00", "2027-07-01T20:00:00+02:00"),
        ("2026-12-01 9:00", "2026-12-01T09:00:00+01:00"),
        ("2026-12-01T9:00:30", "2026-12-01T09:00:30+01:00"),
        ("2028-02-29 9:00+00:00", "2028-02-29T10:00:00+01:00"),
    ],
)
def test_what_people_type(text: str, moment: str) -> None:
    """By the clocks of the policy's zone, unless an offset is written."""
    assert shown(text) == moment


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2026-10-25 02:30", r"twice in Europe/Berlin.*02:30:00\+02:00 or .*02:30:00\+01:00"),
        ("2027-03-28 02:30", r"not in Europe/Berlin.*2027-03-28 03:30"),
        ("2027-03-28 02:00", r"not in Europe/Berlin.*2027-03-28 03:00"),
        ("", "no moment"),
        ("noon", "no moment"),
        ("24:00", "no moment"),
        ("tomorrow", "no moment"),
        ("mo 20:00", "no moment"),
        ("2026-02-30 20:00", "no moment, for 2026-02-30 is no day"),
        ("2027-02-29", "2027-02-29 is no day"),
        ("20:00 tomorrow", "no moment"),
        ("+2", "lacks a unit"),
        ("+2 hours", "no moment"),
        ("+200y", "too long"),
        ("9999-12-31 20:00", "beyond"),
        ("0001-01-01 00:00", "beyond"),
        ("now-99y", "beyond"),
    ],
)
def test_what_is_no_single_moment_says_what_to_write(text: str, says: str) -> None:
    """An hour that is there twice, or not at all, is never guessed."""
    with pytest.raises(MomentUnclear, match=says):
        shown(text)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-12-24", "2026-12-24T23:59:59+01:00"),
        ("2026-10-25", "2026-10-25T23:59:59+01:00"),
        ("2026-12-24 18:00", "2026-12-24T18:00:00+01:00"),
        ("+2h", "2026-11-30T13:30:17+01:00"),
    ],
)
def test_a_day_up_to_which_something_goes_belongs_to_it(text: str, moment: str) -> None:
    """Whoever writes a date means all of it; whoever writes a time means that."""
    found = read_last(text, now=NOW, zone=BERLIN)
    assert dt.datetime.fromtimestamp(found, BERLIN).isoformat() == moment


def test_a_day_whose_midnight_is_skipped_begins_later() -> None:
    """In Havana clocks go from 0:00 to 1:00: the day is one all the same."""
    found = shown("2027-03-14", zone=ZoneInfo("America/Havana"))
    assert found == "2027-03-14T01:00:00-04:00"


def test_both_hours_that_are_called_the_same_can_be_written() -> None:
    """With its offset each is one moment, and they are an hour apart."""
    first = read_moment("2026-10-25T02:30+02:00", now=NOW, zone=BERLIN)
    second = read_moment("2026-10-25T02:30+01:00", now=NOW, zone=BERLIN)
    assert second - first == 3600
    assert show_moment(first, BERLIN) == "Sun 2026-10-25 02:30+02:00"
    assert show_moment(second, BERLIN) == "Sun 2026-10-25 02:30+01:00"
    assert show_moment(second + 3600, BERLIN) == "Sun 2026-10-25 03:30"


@pytest.mark.parametrize("name", ["UTC", "Asia/Kathmandu", "Australia/Lord_Howe", "Asia/Shanghai"])
def test_zones_of_all_kinds(name: str) -> None:
    """Offsets of quarters of an hour, and clocks that are put back by half of one."""
    zone = ZoneInfo(name)
    at = read_moment("2026-12-01 20:00", now=NOW, zone=zone)
    assert f"{dt.datetime.fromtimestamp(at, zone):%Y-%m-%d %H:%M}" == "2026-12-01 20:00"


@given(st.text(max_size=30))
def test_whatever_is_typed_is_read_or_refused(text: str) -> None:
    """No text ends in another error."""
    try:
        assert read_moment(text, now=NOW, zone=BERLIN) >= 0
    except MomentUnclear as error:
        assert str(error)  # noqa: PT017 (either is right; what is not is another error)


@given(st.datetimes(dt.datetime(1971, 1, 1), dt.datetime(2037, 1, 1)))  # noqa: DTZ001 (clocks)
def test_a_clock_shows_what_is_read_from_it(naive: dt.datetime) -> None:
    """Every reading of a clock is a moment at which it shows just that."""
    for at in readings(naive.replace(microsecond=0), BERLIN):
        local = dt.datetime.fromtimestamp(at, BERLIN)
        assert local.replace(tzinfo=None, fold=0) == naive.replace(microsecond=0)
