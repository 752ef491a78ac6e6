"""The types of rule files refuse what could lead to a kill by accident."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from pydantic import ValidationError
from tests.ruleengine.fleets import a_rule

from gpuwarden.ruleengine.model import (
    Action,
    Level,
    Mode,
    Profile,
    Rule,
    RuleSet,
    Signal,
    Stage,
    TerminateLimits,
    WhitelistEntry,
    WhitelistMatch,
)
from gpuwarden.ruleengine.verdicts import SignalKey

TERMINATE: dict[str, Any] = {
    "level": "severe",
    "after": "15m",
    "do": "terminate",
    "notice_delivered_for": "10m",
    "grace": "60s",
    "max_work_lost": "1h",
}


def _codes(model: Any, data: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(data)
    return [item["type"] for item in caught.value.errors()]


@pytest.mark.parametrize("name", ["notice_delivered_for", "grace", "max_work_lost", "after"])
def test_nothing_that_leads_to_a_kill_has_a_default(name: str) -> None:
    """A forgotten deadline is an error, not zero."""
    stage = {key: value for key, value in TERMINATE.items() if key != name}
    assert _codes(Stage, stage) == ["missing" if name == "after" else "GW201"]


@pytest.mark.parametrize(
    "name", ["per_tick", "per_hour", "per_user_per_day", "halt_above_share_of_running"]
)
def test_every_limit_must_be_written(name: str) -> None:
    """And 0 is none."""
    limits = {
        "per_tick": 0,
        "per_hour": 0,
        "per_user_per_day": 0,
        "halt_above_share_of_running": "0%",
    }
    assert TerminateLimits.model_validate(limits).per_tick == 0
    del limits[name]
    assert _codes(TerminateLimits, limits) == ["missing"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"level": "moderate"}, "GW202"),
        ({"owner_may": {"keep": "1h", "times": 1}}, "GW203"),
        ({"grace": "0s"}, "greater_than"),
        ({"after": "15"}, "value_error"),
        ({"after": 15}, "value_error"),
    ],
)
def test_a_terminating_stage_is_severe_and_whole(change: dict[str, Any], code: str) -> None:
    """Only severe may end a job, and what belongs to a notice does not belong here."""
    assert _codes(Stage, TERMINATE | change) == [code]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, "GW203"),  # max_work_lost: it saves before it leaves
        ({"max_work_lost": None, "grace": None}, "GW201"),
        ({"max_work_lost": None, "notice_delivered_for": None}, "GW201"),
        ({"max_work_lost": None, "level": "moderate"}, "GW202"),
    ],
)
def test_a_stage_that_asks_to_leave_is_severe_and_whole(change: dict[str, Any], code: str) -> None:
    """It has a notice and a time to leave; what would be lost is no matter."""
    data = {k: v for k, v in (TERMINATE | {"do": "yield"} | change).items() if v is not None}
    assert _codes(Stage, data) == [code]


@pytest.mark.parametrize("name", ["notice_delivered_for", "grace", "max_work_lost"])
def test_a_requeue_says_as_much_as_an_end(name: str) -> None:
    """For the attempt it is one."""
    stage = {key: value for key, value in (TERMINATE | {"do": "requeue"}).items() if key != name}
    assert _codes(Stage, stage) == ["GW201"]


def test_a_request_to_save_needs_nothing_and_is_never_light() -> None:
    """How long it may take can be given; a notice or a loss has no meaning."""
    data = {"level": "moderate", "after": "5m", "do": "checkpoint"}
    assert Stage.model_validate(data | {"grace": "2m"}).grace == 120
    assert Stage.model_validate(data).grace is None
    assert _codes(Stage, data | {"level": "light"}) == ["GW202"]
    assert _codes(Stage, data | {"notice_delivered_for": "5m"}) == ["GW203"]
    assert _codes(Stage, data | {"max_work_lost": "5m"}) == ["GW203"]


def test_fields_of_terminate_belong_to_terminate() -> None:
    """A grace beside notify would promise something that never happens."""
    data = {"level": "light", "after": "0s", "do": "log", "grace": "5s"}
    assert _codes(Stage, data) == ["GW203"]


def test_a_stage_reads_as_it_is_written() -> None:
    """Seconds inside, units outside."""
    stage = Stage.model_validate(TERMINATE)
    assert (stage.level, stage.do) == (Level.SEVERE, Action.TERMINATE)
    assert (stage.after, stage.grace, stage.max_work_lost) == (900, 60, 3600)


def test_a_new_rule_observes() -> None:
    """Nothing is told or ended until somebody says so."""
    rule = a_rule({"silent_for": "5m", "signals": ["cpu"]})
    assert rule.mode is Mode.OBSERVE
    assert not rule.takes
    assert rule.trust_for == 7200


@pytest.mark.parametrize(
    ("signal", "key"),
    [
        (
            {"signal": "gpu_memory_share", "above": "90%", "share": "80%", "window": "5m"},
            SignalKey("gpu_memory_share", "q0.2", 300),
        ),
        (
            {"signal": "gpu_memory_share", "below": "10%", "share": "80%", "window": "5m"},
            SignalKey("gpu_memory_share", "q0.8", 300),
        ),
        (
            {"signal": "gpu_memory_share", "above": "90%", "share": "100%", "window": "5m"},
            SignalKey("gpu_memory_share", "q0", 300),
        ),
        (
            {"signal": "gpu_utilization", "agg": "max", "window": "3 samples", "at_most": "5%"},
            SignalKey("gpu_utilization", "max", 0.0, 3),
        ),
        (
            {"signal": "job_loader_workers", "agg": "last", "at_most": 0},
            SignalKey("job_loader_workers", "last"),
        ),
        (
            {"signal": "throughput", "window": "5m", "below": "5 img/s"},
            SignalKey("throughput", "avg", 300),
        ),
    ],
)
def test_a_signal_names_its_query(signal: dict[str, Any], key: SignalKey) -> None:
    """A share of the samples above a limit is a percentile of the window."""
    assert Signal.model_validate(signal).key == key


@pytest.mark.parametrize(
    ("signal", "code"),
    [
        ({"signal": "gpu_utilization", "agg": "max", "window": "1m"}, "GW111"),
        (
            {
                "signal": "gpu_utilization",
                "agg": "max",
                "window": "1m",
                "above": "1%",
                "below": "2%",
            },
            "GW111",
        ),
        ({"signal": "gpu_util", "agg": "max", "window": "1m", "above": "1%"}, "GW112"),
        ({"signal": "gpu_utilization", "agg": "max", "window": "1m", "above": "1GiB"}, "GW107"),
        ({"signal": "gpu_utilization", "agg": "max", "window": "1m", "above": 5}, "GW107"),
        ({"signal": "gpu_utilization", "window": "1m", "above": "1%"}, "GW113"),
        ({"signal": "gpu_utilization", "agg": "max", "above": "1%"}, "GW113"),
        ({"signal": "gpu_utilization", "agg": "last", "window": "1m", "above": "1%"}, "GW113"),
        ({"signal": "throughput", "agg": "max", "window": "1m", "above": "1 img/s"}, "GW113"),
        (
            {
                "signal": "gpu_utilization",
                "agg": "max",
                "share": "80%",
                "window": "1m",
                "above": "1%",
            },
            "GW113",
        ),
    ],
)
def test_a_signal_that_means_nothing_is_refused(signal: dict[str, Any], code: str) -> None:
    """Exactly one limit in the signal's unit, and a window that fits."""
    assert _codes(Signal, signal) == [code]


@pytest.mark.parametrize(
    "when",
    [
        {},
        {"signal": "throughput", "promql": "up"},
        {"all": []},
        {"any": []},
        {"profile": {}, "window": "5m"},
        {"silent_for": "5m", "signals": []},
        {"silent_for": "0s", "signals": ["cpu"]},
        {"silent_for": "5m", "signals": ["mouse"]},
        {"promql": "up", "above": "5%"},
        "gpu_utilization < 5",
    ],
)
def test_what_is_no_condition_is_refused(when: object) -> None:
    """Empty sets above all: `all` of nothing would be a trap."""
    with pytest.raises(ValidationError):
        a_rule(when)


def test_a_protection_has_a_reason_an_approver_and_an_end_with_its_offset() -> None:
    """Like Alertmanager's silences."""
    entry = {
        "match": {"user": "ana"},
        "rules": ["r"],
        "reason": "demo",
        "approved_by": "ops",
        "expires": "2027-06-30T00:00:00+08:00",
    }
    expires = WhitelistEntry.model_validate(entry).expires
    assert expires.astimezone(dt.UTC) == dt.datetime(2027, 6, 29, 16, tzinfo=dt.UTC)
    for name in entry:
        assert "missing" in _codes(
            WhitelistEntry, {key: value for key, value in entry.items() if key != name}
        )
    assert _codes(WhitelistEntry, entry | {"expires": "2027-06-30T00:00:00"}) == ["GW107"]
    for never in ("9999-12-31T23:59:59-08:00", "0001-01-01T00:00:00+14:00"):
        assert _codes(WhitelistEntry, entry | {"expires": never}) == ["GW107"]
    assert _codes(WhitelistEntry, entry | {"match": {}}) == ["GW111"]
    assert _codes(WhitelistEntry, entry | {"match": {"argv": "jupyter"}}) == ["extra_forbidden"]


@pytest.mark.parametrize(
    ("match", "code"),
    [
        ({"user": None}, "GW111"),
        ({"user": None, "cgroup": None}, "GW111"),
        ({"user": ""}, "string_too_short"),
        ({"cgroup": "/"}, "GW107"),
        ({"cgroup": "//"}, "GW107"),
        ({"cgroup": "system.slice/board.service"}, "GW107"),
        ({"executable": "tensorboard"}, "GW107"),
        ({"executable": "/usr/bin/"}, "GW107"),
    ],
)
def test_a_protection_of_everybody_or_of_nobody_is_refused(
    match: dict[str, str | None], code: str
) -> None:
    """An empty criterion would be fulfilled by all, a relative path by none."""
    assert _codes(WhitelistMatch, match) == [code]


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "UTC", "Europe/Berlin"])
def test_zones_have_iana_names(zone: str) -> None:
    """Whose rules about summer time are known."""
    assert RuleSet.model_validate({"version": 1, "timezone": zone}).timezone == zone


@pytest.mark.parametrize("zone", ["CST", "+08:00", "Asia/Shangai", "../etc/passwd", "UTC+8"])
def test_abbreviations_of_zones_are_refused(zone: str) -> None:
    """CST is in America, in China and in Cuba."""
    assert _codes(RuleSet, {"version": 1, "timezone": zone}) == ["GW107"]


def test_a_profile_expects_at_least_something() -> None:
    """And nothing of it can be zero."""
    base = {"model": "m", "batch": 1, "imgsz": 1, "hardware": "h"}
    assert _codes(Profile, base) == ["GW111"]
    assert _codes(Profile, base | {"throughput": "0 img/s"}) == ["greater_than"]
    assert Profile.model_validate(base | {"throughput": "9 img/s"}).expected == {"throughput": 9}


def test_rules_cannot_be_changed_in_place() -> None:
    """What was judged by is what was read."""
    rule = a_rule({"silent_for": "5m", "signals": ["cpu"]})
    with pytest.raises(ValidationError):
        rule.mode = Mode.ENFORCE
    assert isinstance(rule, Rule)
