"""Lints find contradictions, and rules that could end the wrong job."""

from __future__ import annotations

from typing import Any

import pytest
from tests.ruleengine.fleets import a_rule

from gpuwarden.diagnostics import Severity
from gpuwarden.ruleengine import expressions
from gpuwarden.ruleengine.linting import lint_rule

UTIL = {
    "signal": "gpu_utilization",
    "agg": "max",
    "window": "3 samples",
    "at_most": "5%",
    "gpus": "all",
}
HELD = {"signal": "gpu_memory_share", "agg": "min", "window": "5m", "above": "10%", "gpus": "any"}
SILENT = {"silent_for": "5m", "signals": ["log", "heartbeat", "cpu"]}
WORD = {"silent_for": "5m", "signals": ["log", "heartbeat"]}
SLOW = {"signal": "throughput", "window": "5m", "below": "5 img/s"}
OFF_RATE = {"profile": {"throughput": "below 15%"}, "window": "5m"}
OFF_MEMORY = {"profile": {"gpu_memory": "above 15%"}, "window": "5m"}
OFF_BOTH = {"profile": {"throughput": "below 15%", "gpu_memory": "above 15%"}, "window": "5m"}
CUSTOM = {"promql": "sum by (job_id) (gpu_job_memory_bytes)", "above": 3}
HOT = {"signal": "card_temperature", "agg": "min", "window": "1m", "above": "88C", "gpus": "any"}

LOG = {"level": "light", "after": "0s", "do": "log"}
NOTIFY = {"level": "moderate", "after": "5m", "do": "notify"}
CHECKPOINT = {"level": "moderate", "after": "8m", "do": "checkpoint"}
YIELD = {
    "level": "severe",
    "after": "15m",
    "do": "yield",
    "notice_delivered_for": "10m",
    "grace": "10m",
}
TERMINATE = {
    "level": "severe",
    "after": "15m",
    "do": "terminate",
    "notice_delivered_for": "10m",
    "grace": "60s",
    "max_work_lost": "1h",
}


def _codes(rule: Any, **options: float) -> list[str]:
    return [finding.code for finding in lint_rule(rule, **options)]


def _ending(when: object, **fields: object) -> Any:
    known: dict[str, object] = {
        "match": {},
        "ignore_phases": {},
        "stages": [LOG, NOTIFY, TERMINATE],
    }
    return a_rule(when, **(known | fields))


@pytest.mark.parametrize(
    ("when", "codes"),
    [
        (HELD, []),
        (SILENT, []),
        (OFF_MEMORY, []),
        ({"all": [UTIL, HELD]}, []),
        ({"all": [UTIL, SLOW]}, []),
        ({"all": [HELD, CUSTOM]}, []),
        ({"all": [SLOW, SILENT]}, []),
        ({"any": [HELD, {"all": [UTIL, SILENT]}]}, []),
        (UTIL, ["GW210"]),
        ({"all": [UTIL, UTIL]}, ["GW210"]),
        ({"any": [HELD, UTIL]}, ["GW210"]),
        (SLOW, ["GW209"]),
        (CUSTOM, ["GW209"]),
        (WORD, ["GW209", "GW309"]),
        (OFF_RATE, ["GW209"]),
        (OFF_BOTH, ["GW209"]),
        ({"all": [SLOW, CUSTOM, WORD]}, ["GW209", "GW309"]),
        ({"any": [HELD, SLOW]}, ["GW209"]),
        ({"any": [UTIL, SLOW]}, ["GW210", "GW209"]),
        ({"not": {"any": [HELD, UTIL]}}, []),
        ({"not": {"all": [HELD, UTIL]}}, ["GW210"]),
        ({"not": {"not": UTIL}}, ["GW210"]),
        ({"not": OFF_BOTH}, []),
        ({"all": [{"any": [UTIL, SLOW]}, {"any": [HELD, CUSTOM]}]}, ["GW210", "GW209"]),
        ({"all": [UTIL, CUSTOM]}, ["GW210"]),
        ({"all": [UTIL, WORD]}, ["GW210", "GW309"]),
        ({"all": [UTIL, HELD, WORD]}, ["GW309"]),
    ],
)
def test_a_job_is_ended_only_on_what_nvml_or_proc_show(when: object, codes: list[str]) -> None:
    """On every way in which the rule can become true, and never on utilization alone."""
    assert _codes(_ending(when)) == codes


ANY_LOW = UTIL | {"gpus": "any"}
BUSY = {"signal": "gpu_utilization", "agg": "min", "window": "5m", "above": "5%", "gpus": "all"}
COLD = {"signal": "card_power", "agg": "max", "window": "5m", "below": "80W", "gpus": "any"}
OFF_UTIL = {"profile": {"gpu_utilization": "below 50%"}, "window": "5m", "gpus": "any"}


@pytest.mark.parametrize(
    ("when", "codes"),
    [
        ({"all": [ANY_LOW, HELD, SILENT]}, ["GW224"]),
        ({"all": [COLD, HELD]}, ["GW224"]),
        ({"all": [OFF_UTIL, HELD]}, ["GW224"]),
        ({"all": [OFF_UTIL | {"gpus": "all"}, HELD]}, []),
        ({"all": [{"not": BUSY}, HELD]}, ["GW224"]),
        ({"all": [{"not": BUSY | {"gpus": "any", "agg": "max"}}, HELD]}, []),
        ({"all": [{"not": {"not": ANY_LOW}}, HELD]}, ["GW224"]),
        ({"not": {"any": [BUSY, {"not": HELD}]}}, ["GW224"]),
        ({"not": {"all": [ANY_LOW, {"not": HELD}]}}, ["GW210"]),
        ({"all": [BUSY, HELD]}, []),
    ],
)
def test_one_idle_card_of_several_never_ends_a_job(when: object, codes: list[str]) -> None:
    """However it is written; a rule may still tell the owner of it."""
    assert _codes(_ending(when)) == codes
    assert "GW224" not in _codes(a_rule(when, stages=[LOG, NOTIFY]))


@pytest.mark.parametrize(
    ("signal", "codes"),
    [
        (UTIL | {"agg": "min"}, ["GW308"]),
        (UTIL | {"agg": "avg"}, []),
        (HELD | {"agg": "max"}, ["GW308"]),
        (HELD | {"agg": "max", "below": "10%", "above": None}, []),
    ],
)
def test_a_rule_that_a_single_sample_can_fulfil_is_pointed_out(
    signal: dict[str, Any], codes: list[str]
) -> None:
    """A training that waits ten seconds for its validation is at 0 % in one sample of many."""
    assert _codes(_ending({"all": [signal, HELD]})) == codes


def test_a_rule_that_only_tells_may_rest_on_anything() -> None:
    """A throughput that the trainer reports is good enough for a notice."""
    assert _codes(a_rule(SLOW, stages=[LOG, NOTIFY])) == []


@pytest.mark.parametrize("name", ["match", "ignore_phases"])
def test_whom_a_terminating_rule_is_about_must_be_written(name: str) -> None:
    """Every job is a choice, not a default."""
    known: dict[str, object] = {"match": {}, "ignore_phases": {}}
    del known[name]
    rule = a_rule(HELD, stages=[LOG, NOTIFY, TERMINATE], **known)
    assert _codes(rule) == ["GW211"]


@pytest.mark.parametrize(
    ("stages", "codes"),
    [
        ([LOG, TERMINATE], ["GW207"]),
        ([TERMINATE], ["GW207"]),
        ([LOG, NOTIFY | {"after": "20m"}, TERMINATE], ["GW208", "GW306"]),
        ([NOTIFY, LOG | {"after": "6m"}, TERMINATE], ["GW208"]),
        ([LOG, NOTIFY, TERMINATE | {"notice_delivered_for": "11m"}], ["GW306"]),
        ([LOG, NOTIFY, TERMINATE | {"notice_delivered_for": "1m"}], ["GW305"]),
        ([LOG, NOTIFY, TERMINATE | {"grace": "5s"}], ["GW305"]),
    ],
)
def test_nobody_is_ended_untold_or_in_haste(stages: list[dict[str, Any]], codes: list[str]) -> None:
    """A severe stage follows a notice, stages are in order, and short times are pointed out."""
    assert _codes(_ending(HELD, stages=stages)) == codes


def test_in_warn_a_terminating_stage_is_only_recorded() -> None:
    """Who writes it should know."""
    assert _codes(_ending(HELD, mode="warn")) == ["GW307"]


def test_cards_of_a_job_are_quantified() -> None:
    """`gpus` is mandatory for what is measured on each card, and only there."""
    bare = {key: value for key, value in UTIL.items() if key != "gpus"}
    assert _codes(a_rule(bare)) == ["GW204"]
    assert _codes(a_rule(SLOW | {"gpus": "all"})) == ["GW205"]


def test_a_window_holds_at_least_four_scrapes() -> None:
    """Whatever the scrape interval."""
    short = HELD | {"window": "19s"}
    assert _codes(a_rule(short)) == ["GW212"]
    assert _codes(a_rule(HELD | {"window": "20s"})) == []
    assert _codes(a_rule(HELD | {"window": "20s"}), scrape_interval=15) == ["GW212"]
    assert _codes(a_rule(OFF_RATE | {"window": "3 samples"})) == ["GW212"]
    assert _codes(a_rule(SLOW | {"window": "4 samples"})) == []


def test_a_window_of_more_than_a_day_is_pointed_out() -> None:
    """Every tick reads all of its samples, of the whole fleet."""
    assert _codes(a_rule(HELD | {"window": "1d"})) == []
    assert _codes(a_rule(HELD | {"window": "1d1s"})) == ["GW310"]


@pytest.mark.parametrize(
    ("when", "fields", "codes"),
    [
        ({key: value for key, value in HOT.items() if key != "gpus"}, {}, []),
        (HOT, {}, ["GW205"]),
        (HELD, {}, ["GW205", "GW206"]),
        (SILENT, {}, ["GW206"]),
        ({**HOT, "gpus": None}, {"match": {"user": "ana", "node": "n1"}}, ["GW206"]),
        ({**HOT, "gpus": None}, {"ignore_phases": {"scan": "1m"}, "team": "x"}, ["GW206", "GW206"]),
        (
            {**HOT, "gpus": None},
            {"stages": [LOG, NOTIFY | {"owner_may": {"keep": "1h", "times": 1}}]},
            ["GW206"],
        ),
    ],
)
def test_a_card_has_no_job_no_owner_and_no_phase(
    when: dict[str, Any], fields: dict[str, Any], codes: list[str]
) -> None:
    """Only what is measured on the card itself can be judged there."""
    assert _codes(a_rule(when, target="gpu", **fields)) == codes


def test_a_card_is_never_ended() -> None:
    """Whatever else is right with the rule."""
    when = {**HOT, "gpus": None}
    assert _codes(_ending(when, target="gpu")) == ["GW206"]


def test_a_findings_path_leads_to_the_words_that_are_wrong() -> None:
    """Through every kind of nesting."""
    rule = a_rule({"all": [HELD, {"not": {"any": [SLOW, UTIL | {"window": "1s"}]}}]})
    (finding,) = lint_rule(rule)
    assert finding.path == ("when", "all", 1, "not", "any", 1, "window")


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("sum by (job_id) (gpu_job_memory_bytes)", []),
        ("gpu_job_start_time_seconds", []),
        ("time() - gpu_job_start_time_seconds", []),
        ("max by (job_id) (x) > bool 3 and up", ["GW301", "GW301"]),
        ("sum by (job_id) (gpu_job_memory_bytes) > 3", ["GW215"]),
        ("(sum by (job_id) (gpu_job_memory_bytes) > 3)", ["GW215"]),
        ("gpu_job_threads and gpu_job_threads > 3", []),
        ("gpu_job_threads > 3 or gpu_job_threads", ["GW215"]),
        ("gpu_job_threads / (gpu_job_loader_workers > 0)", []),
        ("sum(gpu_job_memory_bytes)", ["GW217"]),
        ("sum by (user) (gpu_job_memory_bytes)", ["GW217"]),
        ("sum without (job_id) (gpu_job_memory_bytes)", ["GW217"]),
        ("sum without (gpu, uuid) (gpu_job_memory_bytes)", []),
        ("topk(3, gpu_job_threads)", []),
        ("3", ["GW217"]),
        ("gpu_job_threads[5m]", ["GW217"]),
        ("absent(gpu_job_threads)", ["GW217"]),
        ("vector(scalar(gpu_job_threads))", ["GW217"]),
        ("time()", ["GW217"]),
        ("1 + 2", ["GW217"]),
        ("sum(gpu_job_memory_bytes) / sum(gpu_job_threads)", ["GW217"]),
        ("gpu_job_memory_bytes / on () group_left () sum(gpu_job_threads)", []),
        ("clamp_max(sum(gpu_job_threads), 5)", ["GW217"]),
        ("clamp_max(gpu_job_threads, scalar(sum(gpu_job_threads)))", []),
        ("clamp_max(gpu_job_threads > 3, 5)", ["GW215"]),
        ("count by (job_id) (gpu_job_utilization_ratio < 0.05)", ["GW215"]),
        ("sum by (job_id) (gpu_job_utilization_ratio < bool 0.05)", []),
        ("gpu_utilization_ratio", ["GW217"]),
        ("avg_over_time(gpu_utilization_ratio[5m])", ["GW217"]),
        ("max_over_time(sum by (job_id) (gpu_job_threads)[5m:1m])", []),
        ("rate(gpu_job_cpu_seconds_total[5m])", []),
        ("quantile by (job_id) (0.9, gpu_job_threads)", []),
        ('label_replace(gpu_utilization_ratio, "job_id", "$1", "uuid", "(.*)")', []),
        (
            "gpu_power_watts * on (instance, uuid) group_right () gpu_job_holds_gpu",
            [],
        ),
        ("gpu_job_thread", ["GW216"]),
        ("gpuwarden_violation_active", ["GW216"]),
        ("node_load1", ["GW301"]),
        ("sum by (job_id) (gpu_job_threads", ["GW213"]),
        ("info(gpu_job_threads)", ["GW214"]),
        ("limitk by (job_id) (2, gpu_job_threads)", ["GW214"]),
    ],
)
def test_an_expression_gives_one_number_for_each_job_on_prometheus_2_42(
    text: str, codes: list[str]
) -> None:
    """What it would refuse at night is refused here, and what would mean nothing as well."""
    assert [finding.code for finding in expressions.check(text)] == codes


@pytest.mark.parametrize(
    ("matcher", "hint"),
    [
        ('usr="ana"', 'did you mean "user"?'),
        ('interactiv!="true"', 'did you mean "interactive"?'),
        # Of the scrape, or of its configuration.
        ('instance="n1:9835",job="gpuwarden",cluster="a",rack="7"', None),
        ('user="ana",source=~"slurm|pod"', None),
    ],
)
def test_a_label_that_the_metric_lacks_is_pointed_out(matcher: str, hint: str | None) -> None:
    """It is matched as if it were empty: all series are found, or none, and nobody is told."""
    found = expressions.check(f"max by (job_id) (gpu_job_info{{{matcher}}})")
    assert [item.code for item in found] == ["GW302"] * (hint is not None)
    assert [item.hint for item in found] == [hint] * (hint is not None)


def test_a_misspelt_metric_is_suggested() -> None:
    """An absent metric makes a rule UNKNOWN for ever, which nobody notices."""
    (finding,) = expressions.check("gpu_job_thread")
    assert finding.hint == 'did you mean "gpu_job_threads"?'
    assert finding.severity is Severity.ERROR


def test_a_panic_of_the_parser_is_a_mistake_like_others() -> None:
    """The parser is written in Rust, and its panic no Exception: the engine would end by it."""
    (found,) = expressions.check(f"max by (job_id) (gpu_job_threads[{'9' * 60}d:1s])")
    assert (found.code, found.severity) == ("GW213", Severity.ERROR)
