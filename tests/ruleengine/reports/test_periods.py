"""Periods: bins over Unix time, given the days and hours of a zone."""

from __future__ import annotations

import datetime as dt
import zoneinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.reports.periods import last_week, moment_in, period_of

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe")
NOW = 1_764_500_000.0


@pytest.mark.parametrize(
    ("date", "hours"), [("2025-03-30", 23.0), ("2025-10-26", 25.0), ("2025-06-01", 24.0)]
)
def test_a_day_has_the_hours_that_the_clocks_of_its_zone_give_it(date: str, hours: float) -> None:
    """23 where clocks are put forward, 25 where they are put back."""
    day = dt.date.fromisoformat(date)
    begin = moment_in(date, "Europe/Berlin", now=NOW)
    end = moment_in((day + dt.timedelta(days=1)).isoformat(), "Europe/Berlin", now=NOW)

    period = period_of(begin, end, "Europe/Berlin")

    assert [each.date for each in period.days()] == [day]
    assert period.seconds == hours * 3600
    assert (
        sum(hour == 2 for _, hour in period.hours()) * period.bin
        == {
            23.0: 0,
            24.0: 3600,
            25.0: 7200,
        }[hours]
    )


@settings(max_examples=30, deadline=None)
@given(
    st.floats(1_600_000_000, 1_760_000_000),
    st.floats(60, 120 * 86400),
    st.sampled_from(ZONES),
)
def test_days_hold_every_bin_once(begin: float, length: float, zone: str) -> None:
    """Whatever the zone and the time of the year, nothing is counted twice and nothing is lost."""
    period = period_of(begin, begin + length, zone)

    days = period.days()

    assert [day.start for day in days] == [0, *(day.stop for day in days[:-1])]
    assert days[-1].stop == period.count == len(period.hours())
    assert [day.date for day in days] == sorted({day.date for day in days})
    for day in days:
        for number in (day.start, day.stop - 1):
            at = period.begin + period.bin * number
            assert period.local(at).date() == period.local(at + period.bin - 0.001).date()


def test_the_time_before_has_as_many_days_of_the_calendar() -> None:
    """The week before the one in which clocks change is whole days as well."""
    zone = "Europe/Berlin"
    begin, end = (moment_in(day, zone, now=NOW) for day in ("2025-10-20", "2025-10-27"))

    before = period_of(begin, end, zone).before()

    assert [before.local(at).isoformat()[:16] for at in (before.begin, before.end)] == [
        "2025-10-13T00:00",
        "2025-10-20T00:00",
    ]
    assert before.seconds == 7 * 86400 == period_of(begin, end, zone).seconds - 3600


@settings(max_examples=50, deadline=None)
@given(st.floats(1_600_000_000, 1_760_000_000), st.integers(0, 6), st.sampled_from(ZONES))
def test_the_last_week_is_over_when_it_is_due(now: float, weekday: int, zone: str) -> None:
    """Seven whole days that end on the day on which the report is due, no more than a week ago."""
    begin, end, due = last_week(now, zone, weekday=weekday, minute=7 * 60)

    clock = zoneinfo.ZoneInfo(zone)
    first, last = (dt.datetime.fromtimestamp(at, clock) for at in (begin, end))
    assert (last.weekday(), last.time(), first.time()) == (weekday, dt.time(), dt.time())
    assert (last.date() - first.date()).days == 7
    assert end < due <= now < due + 7 * 86400 + 7200


@pytest.mark.parametrize(("begin", "end"), [(NOW, NOW), (NOW, NOW - 1), (0.0, NOW)])
def test_a_time_that_cannot_be_reported_on_is_refused(begin: float, end: float) -> None:
    """Nothing in between, or more than two years."""
    with pytest.raises(InvalidInput, match=r"--to|--from"):
        period_of(begin, end, "UTC")
