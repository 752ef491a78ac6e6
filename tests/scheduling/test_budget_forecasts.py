"""What a budget will have used: by the days of the week, and not from too little."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest

from gpuwarden.periods import Span, period_of
from gpuwarden.scheduling.budget_forecasts import outlook, whole_days

ZONE = "Europe/Berlin"
HOUR, DAY = 3600.0, 86400.0


def at(text: str) -> float:
    """Unix time of a time on Berlin's clocks."""
    return dt.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(ZONE)).timestamp()


def history(
    now: float, days: int, hours: float = 24.0, weekend: float = 24.0
) -> list[tuple[Span, float]]:
    """So many whole days, with what each used."""
    found = []
    for span in whole_days(ZONE, now, days=days):
        weekday = dt.datetime.fromtimestamp(span.begin, ZoneInfo(ZONE)).weekday()
        found.append((span, weekend if weekday > 4 else hours))
    return found


def test_days_are_the_calendars() -> None:
    """The last whole days before today; the one in which clocks are put back has 25 hours."""
    spans = whole_days(ZONE, at("2026-10-27 12:00"), days=3)
    assert [span.seconds / HOUR for span in spans] == [24, 25, 24]
    assert spans[-1].end == at("2026-10-27 00:00")


def test_below_a_week_nothing_is_foretold() -> None:
    """Six days are none."""
    now, end = at("2026-11-20 00:00"), at("2026-12-01 00:00")
    assert outlook(0.0, history(now, 6), zone=ZONE, now=now, end=end) is None
    assert outlook(0.0, history(now, 7), zone=ZONE, now=now, end=end) is not None


def test_an_even_use_goes_on() -> None:
    """Twenty days at 24 hours each are used, ten more will be."""
    now = at("2026-11-21 00:00")
    found = outlook(480.0, history(now, 20), zone=ZONE, now=now, end=at("2026-12-01 00:00"))
    assert found is not None
    assert found.amount == pytest.approx(720)
    assert (found.days, found.by_weekday) == (20, True)


def test_a_part_of_today_is_a_part_of_a_day() -> None:
    """At noon half of the day is still to come."""
    now = at("2026-11-30 12:00")
    found = outlook(0.0, history(now, 20), zone=ZONE, now=now, end=at("2026-12-01 00:00"))
    assert found is not None
    assert found.amount == pytest.approx(12)


def test_quiet_weekends_are_foretold_from_two_weeks_on() -> None:
    """On a Saturday morning the two days left use what weekends use, not what days do."""
    now, end = at("2026-11-28 00:00"), at("2026-11-30 00:00")
    known = outlook(0.0, history(now, 14, 100.0, 0.0), zone=ZONE, now=now, end=end)
    new = outlook(0.0, history(now, 13, 100.0, 0.0), zone=ZONE, now=now, end=end)
    assert known is not None
    assert new is not None
    assert known.amount == pytest.approx(0)
    assert new.amount == pytest.approx(2 * 100 * 10 / 13, rel=0.11)
    assert not new.by_weekday


def test_a_long_day_uses_more_and_a_short_one_less() -> None:
    """The day of 25 hours at one card is 25 GPU-hours."""
    now = at("2026-10-25 00:00")
    span = period_of("day", ZONE, now)
    found = outlook(0.0, history(now, 20), zone=ZONE, now=now, end=span.end)
    assert found is not None
    assert found.amount == pytest.approx(25)


def test_what_is_over_is_not_foretold_to_shrink() -> None:
    """At the end of the period it is what was used."""
    now = at("2026-12-01 00:00")
    found = outlook(700.0, history(now, 20), zone=ZONE, now=now, end=now)
    assert found is not None
    assert found.amount == 700
