"""A rule counts within its hours, by the clocks of their zone, whatever is done to those clocks."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.ruleengine.fleets import NOW_FACTS, a_job, a_rule, fleet_of

from gpuwarden.hours import DAYS, Hours, within
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.verdicts import SignalKey, Truth

if TYPE_CHECKING:
    from pathlib import Path

NIGHT = {"from": "22:00", "to": "06:00", "zone": "Europe/Berlin"}
OFFICE = {
    "days": ["mon", "tue", "wed", "thu", "fri"],
    "from": "08:30",
    "to": "18:00",
    "zone": "Europe/Berlin",
}


def _at(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


def _include(hours: dict[str, object], moment: str) -> bool:
    return Hours.model_validate(hours).include(_at(moment))


@pytest.mark.parametrize(
    ("moment", "inside"),
    [
        ("2026-11-30T08:29:59+01:00", False),  # a Monday
        ("2026-11-30T08:30:00+01:00", True),
        ("2026-11-30T17:59:59+01:00", True),
        ("2026-11-30T18:00:00+01:00", False),
        ("2026-11-29T12:00:00+01:00", False),  # a Sunday
        ("2026-11-30T11:59:00-05:00", True),  # in New York it is noon, in Berlin nearly 18:00
        ("2026-11-30T12:00:00-05:00", False),
    ],
)
def test_hours_begin_at_from_and_end_just_before_to(moment: str, inside: bool) -> None:
    """In the zone that is written, wherever the engine runs."""
    assert _include(OFFICE, moment) is inside


@pytest.mark.parametrize(
    ("days", "moment", "inside"),
    [
        (["fri"], "2026-11-27T21:59:00+01:00", False),
        (["fri"], "2026-11-27T23:00:00+01:00", True),
        (["fri"], "2026-11-28T05:59:00+01:00", True),
        (["fri"], "2026-11-28T06:00:00+01:00", False),
        (["fri"], "2026-11-28T23:00:00+01:00", False),
        (["fri"], "2026-11-27T03:00:00+01:00", False),
        (["sun"], "2026-11-30T03:00:00+01:00", True),
        (["mon"], "2026-11-30T03:00:00+01:00", False),
    ],
)
def test_a_night_belongs_to_the_day_on_which_it_begins(
    days: list[str], moment: str, inside: bool
) -> None:
    """Friday's night ends on Saturday morning, and Sunday's on Monday's."""
    assert _include({**NIGHT, "days": days}, moment) is inside


@pytest.mark.parametrize(
    ("moment", "inside"),
    [
        # 25 October 2026: 02:30 comes twice, first with summer's offset.
        ("2026-10-25T01:59:00+02:00", False),
        ("2026-10-25T02:30:00+02:00", True),
        ("2026-10-25T02:30:00+01:00", True),
        ("2026-10-25T03:00:00+01:00", False),
        # 29 March 2026: 01:59 is followed by 03:00.
        ("2026-03-29T01:59:59+01:00", False),
        ("2026-03-29T03:00:00+02:00", False),
        ("2026-03-28T02:30:00+01:00", True),
    ],
)
def test_an_hour_that_comes_twice_counts_twice_and_one_that_is_skipped_never(
    moment: str, inside: bool
) -> None:
    """Clocks are asked what they show; nobody computes when they will show something."""
    hours = {"from": "02:00", "to": "03:00", "zone": "Europe/Berlin"}
    assert _include(hours, moment) is inside


@given(
    now=st.floats(min_value=0, max_value=4e9),
    edges=st.lists(st.integers(0, 23), min_size=2, max_size=2, unique=True),
)
def test_hours_and_the_rest_of_the_day_are_the_whole_week(now: float, edges: list[int]) -> None:
    """Every moment is in exactly one of the two, also on the days on which clocks change."""
    one, other = (f"{hour:02d}:00" for hour in edges)
    zone = "Australia/Lord_Howe"  # its clocks are put back by half an hour
    hours = Hours.model_validate({"from": one, "to": other, "zone": zone})
    rest = Hours.model_validate({"from": other, "to": one, "zone": zone})
    assert hours.include(now) is not rest.include(now)


def test_of_several_hours_one_suffices_and_without_any_it_is_always() -> None:
    """Lunch is one entry and the evening another."""
    lunch = Hours.model_validate({"from": "12:00", "to": "13:00", "zone": "UTC"})
    evening = Hours.model_validate({"from": "18:00", "to": "24:00", "zone": "UTC"})
    found = [
        within((lunch, evening), _at(f"2026-11-30T{hour:02d}:30:00+00:00")) for hour in range(24)
    ]
    assert [hour for hour, inside in enumerate(found) if inside] == [12, 18, 19, 20, 21, 22, 23]
    assert within((), 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"from": "8:30"},
        {"from": 1320},
        {"to": "25:00"},
        {"to": "24:01"},
        {"from": "24:00"},
        {"from": "06:00"},
        {"zone": "CET"},
        {"zone": "Europe/Atlantis"},
        {"days": []},
        {"days": ["Monday"]},
        {"until": "06:00"},
    ],
)
def test_hours_that_could_be_read_in_two_ways_are_refused(change: dict[str, object]) -> None:
    """Abbreviations of zones, numbers and hours without a length among them."""
    with pytest.raises(ValidationError):
        Hours.model_validate(NIGHT | change)


def test_hours_are_told_as_they_are_written() -> None:
    """For pages and explanations."""
    assert str(Hours.model_validate(NIGHT)) == "22:00 to 06:00 Europe/Berlin"
    weekend = {**NIGHT, "days": ["sat", "sun"]}
    assert str(Hours.model_validate(weekend)) == "sat, sun 22:00 to 06:00 Europe/Berlin"
    assert len(DAYS) == 7


def test_outside_of_its_hours_a_rule_says_no_and_what_time_it_is() -> None:
    """So that its cases clear, and who asks is told why nothing happens."""
    when = {"signal": "gpu_utilization", "agg": "max", "window": "5m", "at_most": "5%"}
    job = a_job({SignalKey("gpu_utilization", "max", 300): {"g0": 0.0}})
    # The facts are of Monday, 12 January 1970, 13:46 in UTC.
    found = {}
    for name, begin, end in (("day", "13:00", "14:00"), ("night", "22:00", "06:00")):
        hours = [{"from": begin, "to": end, "zone": "UTC"}]
        rule = a_rule({**when, "gpus": "all"}, only_during=hours)
        found[name] = evaluate(rule, job, fleet_of(job), profiles=[], whitelist=[], now=NOW_FACTS)
    assert found["day"].truth is Truth.YES
    assert found["night"].truth is Truth.NO
    (item,) = found["night"].evidence
    assert item.measured == "Mon 13:46 UTC"


def test_a_mistake_in_hours_is_shown_where_it_stands(tmp_path: Path) -> None:
    """With file, line and column, and what to write instead."""
    rule = {
        "id": "night",
        "target": "job",
        "only_during": [{"from": "22:00", "to": "6:00", "zone": "UTC"}],
        "cold_start": "1m",
        "for": "1m",
        "when": {"silent_for": "5m", "signals": ["cpu"]},
        "stages": [{"level": "light", "after": "0s", "do": "log"}],
    }
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"version": 1, "rules": [rule]}))
    checked = check_rule_files([file])
    (found,) = checked.diagnostics
    assert (found.code, found.span.line) == ("GW107", 1)
    assert "'6:00' is not a time of day" in found.message
    assert 'like "06:30"' in found.message
