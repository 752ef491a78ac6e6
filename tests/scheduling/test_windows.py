"""Windows: when they are open, on every night of the year."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.policy_files import TEXT, a_policy, findings

from gpuwarden.hours import DAYS, Day, Hours
from gpuwarden.periods import Span
from gpuwarden.scheduling.windows import (
    always_open,
    moment_of,
    next_opening,
    oddity,
    opening_at,
    openings,
)

if TYPE_CHECKING:
    from pathlib import Path

BERLIN = "Europe/Berlin"
ZONES = (BERLIN, "UTC", "America/New_York", "Asia/Shanghai", "Australia/Lord_Howe", "Pacific/Apia")


def at(text: str, zone: str = BERLIN, *, fold: int = 0) -> float:
    """Unix time of a local time."""
    moment = dt.datetime.fromisoformat(text).replace(tzinfo=zoneinfo.ZoneInfo(zone), fold=fold)
    return moment.timestamp()


def test_a_window_over_midnight_belongs_to_the_day_on_which_it_opens() -> None:
    """From Friday evening to Saturday morning, and not from Saturday evening on."""
    (window,) = a_policy().windows
    friday = at("2027-01-15T23:00")
    spans = window.openings(BERLIN, friday)
    assert opening_at(spans, friday) == Span(at("2027-01-15T20:00"), at("2027-01-16T07:00"))
    assert window.is_open(BERLIN, at("2027-01-16T06:59"))
    assert not window.is_open(BERLIN, at("2027-01-16T07:00"))
    assert not window.is_open(BERLIN, at("2027-01-16T21:00"))
    following = next_opening(spans, friday)
    assert following is not None
    assert following.begin == at("2027-01-18T20:00")


@pytest.mark.parametrize(
    ("day", "opens", "closes", "begin", "end", "hours"),
    [
        # The clocks go from 02:00 to 03:00, and from 03:00 back to 02:00.
        ("2027-03-27", "22:00", "06:00", "2027-03-27T22:00", "2027-03-28T06:00", 7),
        ("2027-10-30", "22:00", "06:00", "2027-10-30T22:00", "2027-10-31T06:00", 9),
        ("2027-03-28", "02:30", "05:00", "2027-03-28T03:00", "2027-03-28T05:00", 2),
        ("2027-03-28", "01:00", "02:30", "2027-03-28T01:00", "2027-03-28T03:00", 1),
        ("2027-10-31", "02:30", "05:00", "2027-10-31T02:30", "2027-10-31T05:00", 3.5),
    ],
)
def test_where_clocks_are_changed_a_window_has_no_gap(
    day: str, opens: str, closes: str, *, begin: str, end: str, hours: float
) -> None:
    """A skipped time is the moment of the change; of two moments the window holds both."""
    date = dt.date.fromisoformat(day)
    word = DAYS[date.weekday()]
    found = openings(
        [word], minutes(opens), minutes(closes), zone=BERLIN, around=at(f"{day}T12:00")
    )
    span = opening_at(found, at(begin))
    assert span == Span(at(begin), at(end))
    assert span.seconds == hours * 3600


def test_a_window_that_ends_at_a_time_that_is_shown_twice_ends_at_the_second() -> None:
    """It is an hour longer in that night."""
    found = openings(["sun"], 60, 150, zone=BERLIN, around=at("2027-10-31T12:00"))
    span = opening_at(found, at("2027-10-31T01:00"))
    assert span == Span(at("2027-10-31T01:00"), at("2027-10-31T02:30", fold=1))


def test_a_window_within_a_skipped_hour_does_not_open_that_day() -> None:
    """It has no length then."""
    found = openings(["sun"], 130, 170, zone=BERLIN, around=at("2027-03-28T12:00"))
    assert opening_at(found, at("2027-03-28T03:00")) is None
    assert oddity(dt.date(2027, 3, 28), 130, BERLIN) == "skipped"
    assert oddity(dt.date(2027, 10, 31), 130, BERLIN) == "repeated"
    assert oddity(dt.date(2027, 10, 31), 240, BERLIN) is None


def minutes(clock: str) -> int:
    """Since midnight."""
    hours, _, rest = clock.partition(":")
    return 60 * int(hours) + int(rest)


windows = st.tuples(
    st.lists(st.sampled_from(DAYS), min_size=1, unique=True),
    st.integers(0, 1439),
    st.integers(0, 1440),
).filter(lambda each: each[1] != each[2])


@given(windows, st.sampled_from(ZONES), st.integers(1_600_000_000, 1_900_000_000))
def test_openings_are_in_order_apart_and_do_not_depend_on_when_one_looks(
    window: tuple[list[Day], int, int], zone: str, now: int
) -> None:
    """Seen a day later, what lies ahead is the same."""
    days, opens, closes = window
    found = openings(days, opens, closes, zone=zone, around=now)
    assert all(span.seconds > 0 for span in found)
    assert all(one.end < other.begin for one, other in pairwise(found))
    later = openings(days, opens, closes, zone=zone, around=now + 86400)
    inner = [span for span in found if now - 5 * 86400 < span.begin and span.end < now + 6 * 86400]
    assert set(inner) <= set(later)


@given(
    windows, st.sampled_from(("UTC", "Asia/Shanghai")), st.integers(1_600_000_000, 1_900_000_000)
)
def test_where_no_clock_is_changed_a_window_is_the_hours_of_rules(
    window: tuple[list[Day], int, int], zone: str, now: int
) -> None:
    """One meaning of hours in all files."""
    days, opens, closes = window
    clock = [f"{each // 60:02d}:{each % 60:02d}" for each in (opens, closes)]
    hours = Hours.model_validate({"days": days, "from": clock[0], "to": clock[1], "zone": zone})
    found = openings(days, opens, closes, zone=zone, around=now)
    assert (opening_at(found, now) is not None) == hours.include(now)


@given(
    st.integers(0, 1440), st.sampled_from(ZONES), st.dates(dt.date(2020, 1, 1), dt.date(2035, 1, 1))
)
def test_a_moment_shows_the_time_that_was_asked_for(clock: int, zone: str, day: dt.date) -> None:
    """Or, where clocks skip it, is the first that they show after it."""
    wall = dt.datetime.combine(day, dt.time()) + dt.timedelta(minutes=clock)
    for later in (False, True):
        moment = moment_of(day, clock, zone, later=later)
        shown = dt.datetime.fromtimestamp(moment, zoneinfo.ZoneInfo(zone)).replace(tzinfo=None)
        if oddity(day, clock, zone) == "skipped":
            before = dt.datetime.fromtimestamp(moment - 1, zoneinfo.ZoneInfo(zone))
            assert before.replace(tzinfo=None) < wall <= shown
        else:
            assert shown == wall


def test_a_window_of_every_hour_never_closes() -> None:
    """And one of every night does."""
    now = at("2027-03-28T12:00")
    assert always_open(openings(DAYS, 0, 1440, zone=BERLIN, around=now), now)
    assert not always_open(openings(DAYS, 1200, 420, zone=BERLIN, around=now), now)


def test_check_says_that_a_window_within_a_skipped_hour_does_not_open(tmp_path: Path) -> None:
    """Also where the end of a day is what the clocks skip, as in Cairo."""
    text = TEXT.replace("[mon, tue, wed, thu, fri]", "[sun]")
    text = text.replace('from: "20:00"', 'from: "02:10"').replace('to: "07:00"', 'to: "02:50"')
    words = [item.message for item in findings(tmp_path, text)]
    assert words[0].endswith("skip 02:10: the window does not open on that day")
    assert len([each for each in words if "twice" in each]) == 2
    over = text.replace('to: "02:50"', 'to: "01:00"')
    assert "the window then opens" in findings(tmp_path, over)[0].message
    cairo = TEXT.replace("Europe/Berlin", "Africa/Cairo").replace(
        "[mon, tue, wed, thu, fri]", "[thu]"
    )
    (found,) = findings(tmp_path, cairo.replace('to: "07:00"', 'to: "24:00"'))
    assert "on Fri 2027-04-30 the clocks of Africa/Cairo skip 00:00: the window then closes" in (
        found.message
    )
    days = cairo.replace("[thu]", "[fri]").replace('to: "07:00"', 'to: "24:00"')
    (whole,) = findings(tmp_path, days.replace('from: "20:00"', 'from: "00:00"'))
    assert "skip 00:00: the window then opens at the moment" in whole.message


def test_check_names_the_days_on_which_a_window_is_not_what_it_says(tmp_path: Path) -> None:
    """Only those on which it opens, and each once."""
    text = TEXT.replace("days: [mon, tue, wed, thu, fri]", "days: [sat]").replace("07:00", "02:30")
    found = findings(tmp_path, text)
    assert [item.code for item in found] == ["GW652", "GW652"]
    assert "on Sun 2027-03-28 the clocks of Europe/Berlin skip 02:30" in found[0].message
    assert "closes at the second of the two" in found[1].message
    assert findings(tmp_path, text.replace("[sat]", "[sun]")) == ()
