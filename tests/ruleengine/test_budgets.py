"""Budgets: how the file is read, whose calendar counts, and what will be used by a period's end."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ruleengine.fleets import a_rule

from gpuwarden.budget_terms import Budget, Limit
from gpuwarden.errors import InvalidInput
from gpuwarden.periods import Period, Span, period_of
from gpuwarden.ruleengine.budget_uses import Standing, forecast, standing_line, used_shares
from gpuwarden.ruleengine.budgets import check_budgets, load_budgets
from gpuwarden.ruleengine.directories import Directory
from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.model import RuleSet

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "budgets.yaml"
TEXT = """
version: 1
zone: Europe/Berlin
budgets:
- {team: vision, per: month, limit: 500 GPU-hours, kind: hard}
- {team: vision, per: month, limit: 900 EUR, kind: hard, warn_at: [90%]}
- {team: speech, per: day, limit: 24 GPU-hours, kind: soft, warn_at: []}
"""
DIRECTORY = Directory.model_validate(
    {
        "version": 1,
        "users": {"ana": {"team": "vision"}, "bob": {"team": "speech"}},
        "teams": {"vision": {"contact": {"email": "v@example.org"}}},
    }
)


def written(tmp_path: Path, text: str) -> Path:
    """A file of budgets."""
    path = tmp_path / "budgets.yaml"
    path.write_text(text)
    return path


def test_a_budget_has_a_limit_with_its_unit_and_a_kind(tmp_path: Path) -> None:
    """GPU-hours, or money; warnings at half, at four fifths and at all of it by default."""
    found = load_budgets(written(tmp_path, TEXT), DIRECTORY, currencies=frozenset({"EUR"}))
    first, second, third = found.budgets
    assert first.limit == Limit(500.0, "GPU-hours")
    assert first.warn_at == (0.5, 0.8, 1.0)
    assert (second.limit, second.warn_at) == (Limit(900.0, "EUR"), (0.9,))
    assert (third.kind, third.warn_at) == ("soft", ())


WRONG = (
    ("limit: 500 GPU-hours", "limit: 500", "is not a limit"),
    ("limit: 500 GPU-hours", "limit: 0 GPU-hours", "is not a limit"),
    ("limit: 900 EUR", "limit: 900 USD", "no price in engine.yaml is in USD"),
    ("limit: 900 EUR", "limit: 90 GPU-hours", "another budget of vision per month in GPU-hours"),
    ("kind: soft, ", "", "kind"),
    ("kind: soft", "kind: softly", "softly"),
    ("per: day", "per: year", "year"),
    ("zone: Europe/Berlin", "zone: CET", "time zone"),
    ("warn_at: [90%]", "warn_at: [90]", "lacks a unit"),
    ("warn_at: [90%]", "warns: [90%]", "warn_at"),
)


@pytest.mark.parametrize(("old", "new", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_a_mistake_makes_the_whole_file_unusable(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    """And is shown at its line."""
    path = written(tmp_path, TEXT.replace(old, new))
    with pytest.raises(InvalidInput, match=words) as caught:
        load_budgets(path, DIRECTORY, currencies=frozenset({"EUR"}))
    assert f"{path}:" in str(caught.value)


POLICY = """
version: 1
timezone: Europe/Berlin
engine: slurm
teams: [{name: vision}]
budgets:
- {team: vision, per: month, limit: 500 GPU-hours, kind: hard, running: leave}
"""


def test_the_schedulers_policy_serves_as_a_file_of_budgets(tmp_path: Path) -> None:
    """Of it the zone and the budgets count here, and a mistake elsewhere in it is not ours."""
    found = load_budgets(written(tmp_path, POLICY), DIRECTORY, currencies=frozenset())
    assert (found.zone, [each.key for each in found.budgets]) == (
        "Europe/Berlin",
        [("vision", "month", "GPU-hours")],
    )
    with pytest.raises(InvalidInput, match="running: finish"):
        load_budgets(
            written(tmp_path, POLICY.replace(", running: leave", "")),
            DIRECTORY,
            currencies=frozenset(),
        )


def test_a_team_that_nobody_is_in_is_warned_of(tmp_path: Path) -> None:
    """So is one whose contact nobody knows; both can be used."""
    path = written(
        tmp_path,
        TEXT.replace(
            "team: vision, per: month, limit: 900", "team: visoin, per: month, limit: 900"
        ).replace("warn_at: []", "warn_at: [50%]"),
    )
    checked = check_budgets(path, DIRECTORY, currencies=None)
    assert checked.content is not None
    assert [(item.code, item.span.line) for item in checked.diagnostics] == [
        ("GW420", 6),
        ("GW421", 7),
    ]
    assert "vision" in (checked.diagnostics[0].hint or "")


def at(text: str, zone: str) -> float:
    """Unix time of a local time."""
    return dt.datetime.fromisoformat(text).replace(tzinfo=zoneinfo.ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("per", "zone", "now", "begin", "end", "hours"),
    [
        ("month", "Europe/Berlin", "2026-03-31T23:59", "2026-03-01", "2026-04-01", 31 * 24 - 1),
        ("month", "Asia/Shanghai", "2028-02-01T00:00", "2028-02-01", "2028-03-01", 29 * 24),
        ("month", "UTC", "2026-12-31T12:00", "2026-12-01", "2027-01-01", 31 * 24),
        ("week", "Europe/Berlin", "2026-10-25T12:00", "2026-10-19", "2026-10-26", 7 * 24 + 1),
        ("day", "America/New_York", "2026-11-01T01:30", "2026-11-01", "2026-11-02", 25),
    ],
)
def test_a_period_is_the_calendars(
    per: Period, zone: str, now: str, *, begin: str, end: str, hours: float
) -> None:
    """By the clocks of its zone, also where they are changed."""
    span = period_of(per, zone, at(now, zone))
    assert span == Span(at(f"{begin}T00:00", zone), at(f"{end}T00:00", zone))
    assert span.seconds == hours * 3600


@given(
    now=st.integers(0, 4_000_000_000),
    per=st.sampled_from(["day", "week", "month"]),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kathmandu", "Pacific/Apia"]),
)
def test_every_moment_is_in_one_period(now: int, per: Period, zone: str) -> None:
    """The next one begins where it ends."""
    span = period_of(per, zone, float(now))
    assert span.begin <= now < span.end
    assert period_of(per, zone, span.end).begin == span.end
    assert period_of(per, zone, span.end - 1) == span


def test_the_pace_of_late_goes_on() -> None:
    """Ten a day for four days more; if every day is alike there is no band."""
    found = forecast(60.0, 4.0, [10.0] * 14)
    assert found is not None
    assert (found.low, found.expected, found.high) == (100.0, 100.0, 100.0)
    assert forecast(60.0, 4.0, [10.0, 10.0]) is None
    over = forecast(60.0, 0.0, [])
    assert over is not None
    assert over.high == 60.0


@given(
    used=st.floats(0, 1e6),
    remaining=st.floats(0.01, 31),
    buckets=st.lists(st.floats(0, 1e4), min_size=3, max_size=14),
)
def test_a_forecast_is_never_below_what_is_used(
    used: float, remaining: float, buckets: list[float]
) -> None:
    """Its band holds what is expected, and does not depend on the order of the days."""
    found, mixed = forecast(used, remaining, buckets), forecast(used, remaining, sorted(buckets))
    assert found is not None
    assert mixed is not None
    assert used * (1 - 1e-9) <= found.low <= found.expected * (1 + 1e-9) <= found.high * (1 + 2e-9)
    assert mixed.high == pytest.approx(found.high)


@given(days=st.lists(st.floats(0, 100), min_size=20, max_size=20), left=st.integers(1, 10))
def test_more_days_ahead_are_less_certain(days: list[float], left: int) -> None:
    """The band of a longer rest is not narrower."""
    near, far = forecast(0.0, left, days), forecast(0.0, left + 1, days)
    assert near is not None
    assert far is not None
    assert far.high - far.expected >= near.high - near.expected - 1e-9


def standing(used: float | None, limit: str = "100 GPU-hours", **fields: Any) -> Standing:
    """Of a budget of vision's for this month."""
    known = {"team": "vision", "per": "month", "limit": limit, "kind": "hard"} | fields
    return Standing(Budget.model_validate(known), Span(0.0, 1.0), used)


def test_the_fullest_budget_counts_and_what_is_not_known_could_be_it() -> None:
    """Unless another one is used up already: that is enough."""
    key = ("vision", "month", "hard")
    assert used_shares([standing(50.0), standing(80.0, "100 EUR")]) == {key: 0.8}
    assert used_shares([standing(50.0), standing(None, "100 EUR")]) == {}
    assert used_shares([standing(120.0), standing(None, "100 EUR")]) == {key: 1.2}
    soft = used_shares([standing(50.0), standing(90.0, "100 EUR", kind="soft")])
    assert soft == {key: 0.5, ("vision", "month", "soft"): 0.9}


def test_a_standing_is_told_in_one_line() -> None:
    """With its band, or why it is not known."""
    line = standing_line(standing(50.0).document())
    assert line == "50.0 GPU-hours of 100.0 GPU-hours (50 %)"
    assert standing_line(standing(None).document()).startswith("not known of 100.0 GPU-hours")
    assert standing(85.0).reached == (0.5, 0.8)
    assert standing(None).reached == ()


TAKES = [
    {"level": "moderate", "after": "0s", "do": "notify"},
    {
        "level": "severe",
        "after": "10m",
        "do": "terminate",
        "notice_delivered_for": "10m",
        "grace": "60s",
        "max_work_lost": "1h",
    },
]
BUDGET = {"over_budget": "month", "above": "100%"}
IDLE = {"signal": "gpu_memory", "agg": "max", "window": "5m", "above": "10GiB", "gpus": "all"}


@pytest.mark.parametrize(
    ("when", "codes"),
    [
        (BUDGET, {"GW209"}),
        ({"any": [BUDGET, IDLE]}, {"GW209"}),
        ({"not": BUDGET}, {"GW209"}),
        ({"all": [BUDGET, IDLE]}, set()),
    ],
)
def test_to_be_over_budget_alone_ends_no_job(when: dict[str, Any], codes: set[str]) -> None:
    """The file is refused: something must be measured beside it."""
    rule = a_rule(when, stages=TAKES, match={}, ignore_phases={}, mode="enforce")
    rules = RuleSet.model_validate({"version": 1, "rules": [rule]})
    found = {finding.code for finding in lint_rule(rule, scrape_interval=5.0)}
    assert found & {"GW209"} == codes
    assert rules.rules[0].when == rule.when


@pytest.mark.parametrize(
    "wrong",
    [
        {"over_budget": "year", "above": "100%"},
        {"over_budget": "month", "above": 1},
        {"over_budget": "month"},
    ],
)
def test_a_budgets_condition_needs_its_period_and_a_share(wrong: dict[str, Any]) -> None:
    """No default can lead to an end."""
    with pytest.raises(ValueError, match=r"over_budget|limit|needs exactly one|day"):
        a_rule(wrong)


def test_the_example_can_be_used() -> None:
    """deploy/examples/budgets.yaml, whose comments explain it."""
    checked = check_budgets(EXAMPLE, None, currencies=None)
    assert checked.diagnostics == ()
    assert checked.content is not None
