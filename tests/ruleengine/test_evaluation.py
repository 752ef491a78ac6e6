"""Judging is three-valued, exact at its boundaries, and never acts on what is not known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.fleets import (
    GIB,
    NOW_FACTS,
    SHARE,
    UTILIZATION,
    a_job,
    a_profile,
    a_rule,
    a_run,
    an_entry,
    cards,
    fleet_of,
)

from gpuwarden.ruleengine.evaluation import evaluate, subjects
from gpuwarden.ruleengine.truths import all_of, any_of, negate
from gpuwarden.ruleengine.verdicts import JobFacts, SignalKey, Truth, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.model import Rule

NO, UNKNOWN, YES = Truth.NO, Truth.UNKNOWN, Truth.YES

IDLE = {
    "signal": "gpu_utilization",
    "agg": "max",
    "window": "3 samples",
    "at_most": "5%",
    "gpus": "all",
}
HELD = {"signal": "gpu_memory_share", "agg": "min", "window": "5m", "above": "10%", "gpus": "any"}
SILENT = {"silent_for": "5m", "signals": ["log", "heartbeat", "cpu"]}
POWER = {"signal": "card_power", "agg": "avg", "window": "5m", "below": "100W", "gpus": "all"}


def judge(rule: Rule, job: JobFacts, **options: object) -> Verdict:
    """Evaluate with a profile and no whitelist."""
    known: dict[str, object] = {"profiles": [a_profile()], "whitelist": []}
    return evaluate(rule, job, fleet_of(job), now=NOW_FACTS, **(known | options))  # type: ignore[arg-type]


def _truth(when: object, job: JobFacts, **fields: object) -> Truth:
    return judge(a_rule(when, **fields), job).truth


# -- Kleene


@pytest.mark.parametrize(("left", "right"), list(itertools.product(Truth, Truth)))
def test_all_is_the_minimum_and_any_the_maximum(left: Truth, right: Truth) -> None:
    """Kleene's tables."""
    assert all_of([left, right]).value == min(left.value, right.value)
    assert any_of([left, right]).value == max(left.value, right.value)
    assert negate(left).value == 1 - left.value


def test_of_nothing_nothing_is_known() -> None:
    """`all([])` is True in Python; a job without cards would be idle."""
    assert all_of([]) is UNKNOWN
    assert any_of([]) is UNKNOWN


# -- signals


@pytest.mark.parametrize(
    ("comparison", "limit", "value", "truth"),
    [
        ("at_most", "5%", 0.05, YES),
        ("at_most", "5%", 0.051, NO),
        ("below", "5%", 0.05, NO),
        ("below", "5%", 0.049, YES),
        ("above", "5%", 0.05, NO),
        ("above", "5%", 0.051, YES),
        ("at_least", "5%", 0.05, YES),
        ("at_least", "5%", 0.049, NO),
    ],
)
def test_a_limit_is_exact(comparison: str, limit: str, value: float, truth: Truth) -> None:
    """At the limit, `at_most` and `at_least` hold, `below` and `above` do not."""
    when = {
        "signal": "gpu_utilization",
        "agg": "max",
        "window": "3 samples",
        comparison: limit,
        "gpus": "all",
    }
    assert _truth(when, a_job({UTILIZATION: {"g0": value}})) is truth


@pytest.mark.parametrize(
    ("gpus", "values", "truth"),
    [
        ("all", {"g0": 0.0, "g1": 0.0}, YES),
        ("all", {"g0": 0.0, "g1": 0.9}, NO),
        ("all", {"g0": 0.0}, UNKNOWN),
        ("all", {"g1": 0.9}, NO),
        ("all", {}, UNKNOWN),
        ("any", {"g0": 0.0, "g1": 0.9}, YES),
        ("any", {"g0": 0.9, "g1": 0.9}, NO),
        ("any", {"g0": 0.0}, YES),
        ("any", {"g0": 0.9}, UNKNOWN),
    ],
)
def test_cards_combine_and_a_missing_one_is_unknown(
    gpus: str, values: Mapping[str, float], truth: Truth
) -> None:
    """One idle card of two is not an idle job, and a silent card is not an idle one."""
    job = a_job({UTILIZATION: values}, gpus=cards("g0", "g1"))
    assert _truth(IDLE | {"gpus": gpus}, job) is truth


def test_a_job_without_cards_is_not_idle() -> None:
    """There is nothing to judge."""
    verdict = judge(a_rule(IDLE), a_job({UTILIZATION: {}}, gpus=()))
    assert verdict.truth is UNKNOWN
    assert verdict.unknown_reasons == ("no_gpus",)


def test_what_is_measured_on_a_shared_card_is_no_jobs_own() -> None:
    """Per-process values decide; the card's power belongs to both."""
    key = SignalKey("card_power", "avg", 300)
    job = a_job({key: {"g0": 50}, UTILIZATION: {"g0": 0.0}}, gpus=cards("g0", tenants=2))
    verdict = judge(a_rule(POWER), job)
    assert verdict.truth is UNKNOWN
    assert verdict.unknown_reasons == ("shared_card",)
    assert _truth(IDLE, job) is YES


def test_evidence_says_what_was_measured_against_what() -> None:
    """People read this in notices."""
    (item,) = judge(a_rule(IDLE), a_job({UTILIZATION: {"g0": 0.021}})).evidence
    assert item.condition == "gpu_utilization max over 3 samples <= 5 %, all GPUs"
    assert item.measured == "GPU 0: 2.1 %"
    assert item.values == {"g0": 0.021}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"share": "80%", "window": "45s"}, "gpu_memory_share > 90 % in 80 % of 45s, any GPU"),
        (
            {"share": "80%", "window": "8 samples", "gpus": "all"},
            "gpu_memory_share > 90 % in 80 % of 8 samples, all GPUs",
        ),
        ({"agg": "last"}, "gpu_memory_share last > 90 %, any GPU"),
        ({"agg": "min", "window": "5m"}, "gpu_memory_share min over 5m > 90 %, any GPU"),
    ],
)
def test_a_condition_reads_as_a_sentence(change: dict[str, str], text: str) -> None:
    """Owners read it in notices."""
    when = {"signal": "gpu_memory_share", "above": "90%", "gpus": "any"} | change
    (item,) = judge(a_rule(when), a_job()).evidence
    assert item.condition == text


def test_a_condition_on_the_job_needs_its_one_value() -> None:
    """CPU cores are the whole job's."""
    when = {"signal": "job_cpu_cores", "window": "5m", "below": "0.1 cores"}
    key = SignalKey("job_cpu_cores", "avg", 300)
    assert _truth(when, a_job({key: {"": 0.05}})) is YES
    assert _truth(when, a_job({key: {"": 0.1}})) is NO
    assert _truth(when, a_job()) is UNKNOWN


def test_an_expression_is_compared_and_its_failure_is_unknown() -> None:
    """Its author's mistake ends nobody."""
    rule = a_rule({"promql": "sum by (job_id) (gpu_job_memory_bytes)", "above": 3})
    key: SignalKey = rule.when.key  # type: ignore[union-attr]
    assert judge(rule, a_job({key: {"": 4.0}})).truth is YES
    assert judge(rule, a_job({key: {"": 3.0}})).truth is NO
    job = a_job()
    fleet = fleet_of(job, failed={key: "many-to-many"})
    verdict = evaluate(rule, job, fleet, profiles=[], whitelist=[], now=NOW_FACTS)
    assert verdict.truth is UNKNOWN
    assert verdict.unknown_reasons == ("query_failed",)


# -- cold start and phases


@pytest.mark.parametrize(("age", "truth"), [(59, UNKNOWN), (60, UNKNOWN), (78, YES)])
def test_windows_begin_after_the_cold_start(age: float, truth: Truth) -> None:
    """Three samples are 17.5 s: idle while the model was loaded does not count."""
    job = a_job({UTILIZATION: {"g0": 0.0}}, first_gpu_use=NOW_FACTS - age)
    verdict = judge(a_rule(IDLE), job)
    assert verdict.truth is truth
    assert set(verdict.unknown_reasons) <= {"cold_start"}


def test_without_gpu_use_the_cold_start_counts_from_the_start() -> None:
    """A job that never used its GPU is the one to find."""
    values = {UTILIZATION: {"g0": 0.0}}
    assert _truth(IDLE, a_job(values, first_gpu_use=None)) is YES
    assert _truth(IDLE, a_job(values, first_gpu_use=None, start_time=NOW_FACTS - 30)) is UNKNOWN
    assert _truth(IDLE, a_job(values, first_gpu_use=None, start_time=None)) is UNKNOWN


def test_a_start_in_the_future_is_a_wrong_clock() -> None:
    """It is not a job that has just begun."""
    job = a_job({UTILIZATION: {"g0": 0.0}}, first_gpu_use=NOW_FACTS + 6)
    assert judge(a_rule(IDLE), job).unknown_reasons[0] == "clock_skew"


@pytest.mark.parametrize(
    ("phase", "age", "truth", "delayed"),
    [
        ("validate", 1799, UNKNOWN, True),
        ("validate", 1800, YES, False),
        ("train", 10, YES, False),
        (None, 10, YES, False),
        ("validate", -3, UNKNOWN, True),
        ("validate", -6, UNKNOWN, True),
    ],
)
def test_a_phase_is_ignored_until_its_limit(
    phase: str | None, age: float, truth: Truth, delayed: bool
) -> None:
    """It delays, and the time so spent is marked as resting on the job's word."""
    rule = a_rule(IDLE, ignore_phases={"validate": "30m"})
    run = a_run(phase=phase, phase_since=NOW_FACTS - age)
    verdict = judge(rule, a_job({UTILIZATION: {"g0": 0.0}}, run=run))
    assert verdict.truth is truth
    assert verdict.self_report_only is delayed
    assert judge(rule, a_job({UTILIZATION: {"g0": 0.0}}, run=run), trusted=False).truth is YES


def test_a_busy_job_in_an_ignored_phase_spends_no_trust() -> None:
    """Only time that would have been a violation counts against the budget."""
    rule = a_rule(IDLE, ignore_phases={"validate": "30m"})
    run = a_run(phase="validate", phase_since=NOW_FACTS - 5)
    verdict = judge(rule, a_job({UTILIZATION: {"g0": 0.9}}, run=run))
    assert verdict.truth is UNKNOWN
    assert not verdict.self_report_only


def test_of_a_run_that_is_claimed_twice_no_phase_is_known() -> None:
    """It may be validating, so nothing is concluded while it is trusted."""
    rule = a_rule(IDLE, ignore_phases={"validate": "30m"})
    job = a_job({UTILIZATION: {"g0": 0.0}}, run=a_run(conflict=True))
    assert judge(rule, job).unknown_reasons == ("run_conflict",)
    assert judge(rule, job, trusted=False).truth is YES


# -- silence


@pytest.mark.parametrize(
    ("ages", "truth"),
    [
        ({"log": 300, "heartbeat": 300, "cpu": 300}, YES),
        ({"log": 299, "heartbeat": 300, "cpu": 300}, NO),
        ({"log": 400, "heartbeat": 2, "cpu": 400}, NO),
        ({"cpu": 400}, YES),
        ({"cpu": 10}, NO),
        ({"log": 400, "heartbeat": 400}, UNKNOWN),
        ({"log": 10}, NO),
        ({}, UNKNOWN),
        ({"log": -6, "cpu": 400}, UNKNOWN),
        ({"log": -4, "cpu": 400}, NO),
    ],
)
def test_silence_needs_every_channel(ages: Mapping[str, float], truth: Truth) -> None:
    """A channel that the job never had is silent, as long as its CPU use is known."""
    activity = {name: NOW_FACTS - age for name, age in ages.items()}
    assert _truth(SILENT, a_job(activity=activity)) is truth


def test_silence_in_the_cold_start_does_not_count() -> None:
    """The model was being loaded."""
    job = a_job(activity={"cpu": NOW_FACTS - 350}, first_gpu_use=NOW_FACTS - 359)
    verdict = judge(a_rule(SILENT), job)
    assert verdict.truth is UNKNOWN
    assert verdict.unknown_reasons == ("cold_start",)
    assert _truth(SILENT, replace(job, first_gpu_use=NOW_FACTS - 360)) is YES


def test_a_heartbeat_delays_and_is_marked_as_the_jobs_word() -> None:
    """Past its budget only what /proc shows counts."""
    job = a_job(activity={"heartbeat": NOW_FACTS - 1, "log": NOW_FACTS - 1, "cpu": NOW_FACTS - 400})
    verdict = judge(a_rule(SILENT), job)
    assert verdict.truth is NO
    assert verdict.self_report_only
    assert judge(a_rule(SILENT), job, trusted=False).truth is YES


def test_channels_of_the_job_alone_decide_nothing_once_they_are_not_trusted() -> None:
    """Of no channel at all nothing is known."""
    rule = a_rule({"silent_for": "5m", "signals": ["log"]})
    job = a_job(activity={"log": NOW_FACTS - 1, "cpu": NOW_FACTS - 400})
    assert judge(rule, job, trusted=False).truth is UNKNOWN
    assert not judge(rule, job).self_report_only


# -- profiles

MEAN_MEMORY = SignalKey("gpu_memory", "avg", 300)
MEAN_RATE = SignalKey("throughput", "avg", 300)


def _profile_job(memory: float = 10 * GIB, rate: float | None = 100, **fields: object) -> JobFacts:
    values = {MEAN_MEMORY: {"g0": memory}}
    if rate is not None:
        values[MEAN_RATE] = {"": rate}
    return a_job(values, **({"run": a_run()} | fields))


OFF = {"profile": {"throughput": "below 15%", "gpu_memory": "above 15%"}, "window": "5m"}


@pytest.mark.parametrize(
    ("memory", "rate", "truth"),
    [
        (10 * GIB, 100, NO),
        (11.5 * GIB, 85, NO),
        (11.51 * GIB, 100, YES),
        (10 * GIB, 84.9, YES),
        (5 * GIB, 200, NO),
        (10 * GIB, None, UNKNOWN),
        (12 * GIB, None, YES),
    ],
)
def test_a_deviation_is_outside_only_past_its_limit(
    memory: float, rate: float | None, truth: Truth
) -> None:
    """15 % exactly is inside; any entry suffices; more throughput is no violation."""
    assert _truth(OFF, _profile_job(memory, rate)) is truth


def test_an_unknown_profile_is_unknown() -> None:
    """Expectations are never extrapolated."""
    assert judge(a_rule(OFF), _profile_job(run=a_run(batch=32))).unknown_reasons == ("no_profile",)
    assert judge(a_rule(OFF), _profile_job(run=None)).unknown_reasons == ("no_run",)
    torn = _profile_job(run=a_run(conflict=True))
    assert judge(a_rule(OFF), torn).unknown_reasons == ("run_conflict",)


def test_a_floor_and_a_profiles_own_tolerance_only_widen() -> None:
    """Small figures deviate by much in percent and by little in fact."""
    floor = {"profile": {"gpu_memory": "above 15%, at least 4GiB"}, "window": "5m"}
    assert _truth(floor, _profile_job(13 * GIB)) is NO
    assert _truth(floor, _profile_job(14.1 * GIB)) is YES
    wide = [a_profile(tolerance="50%")]
    assert judge(a_rule(OFF), _profile_job(14 * GIB, 60), profiles=wide).truth is NO
    assert judge(a_rule(OFF), _profile_job(16 * GIB, 60), profiles=wide).truth is YES


def test_on_a_shared_card_only_the_jobs_own_memory_can_deviate() -> None:
    """A neighbour slows a training down."""
    job = _profile_job(10 * GIB, 10, gpus=cards("g0", tenants=2))
    verdict = judge(a_rule(OFF), job)
    assert verdict.truth is UNKNOWN
    assert verdict.unknown_reasons == ("shared_card",)
    assert _truth(OFF, _profile_job(20 * GIB, 10, gpus=cards("g0", tenants=2))) is YES


def test_the_evidence_of_a_profile_names_the_expectation() -> None:
    """The owner sees which profile was meant."""
    rate = judge(a_rule(OFF), _profile_job(rate=7.9)).evidence[0]
    assert rate.measured == "7.9 img/s"
    assert rate.expected.startswith("100 img/s (yolov8m, batch 64, 640 px on NVIDIA A100")


# -- match, whitelist, nodes


@pytest.mark.parametrize(
    ("match", "truth"),
    [
        ({}, YES),
        ({"framework": "torch|jupyter"}, YES),
        ({"framework": "tor"}, NO),
        ({"user": "an.*", "node": "n1"}, YES),
        ({"node": "n1:9835"}, NO),
        ({"gpu": "NVIDIA A100.*"}, YES),
        ({"interactive": "true"}, NO),
        ({"interactive": "false"}, YES),
        ({"model": ".*"}, NO),
        ({"team": ".*"}, NO),
    ],
)
def test_patterns_are_anchored_and_an_absent_label_does_not_match(
    match: Mapping[str, str], truth: Truth
) -> None:
    """`tor` is not `torch`, and a job that declares no model has none."""
    assert _truth(IDLE, a_job({UTILIZATION: {"g0": 0.0}}), match=match) is truth


def test_a_teams_rule_judges_its_own_jobs_only() -> None:
    """The team comes from the operator's directory."""
    values = {UTILIZATION: {"g0": 0.0}}
    rule = a_rule(IDLE, team="vision")
    assert judge(rule, a_job(values, team="vision")).truth is YES
    assert judge(rule, a_job(values, team="speech")).truth is NO
    assert judge(rule, a_job(values)).truth is NO


def test_on_a_dark_node_nothing_is_known_but_what_never_matched() -> None:
    """UNKNOWN keeps a case; NO would close it."""
    dark = {"fresh": False, "not_fresh_reason": "dark_node"}
    job = a_job({UTILIZATION: {"g0": 0.0}}, **dark)
    assert judge(a_rule(IDLE), job).unknown_reasons == ("dark_node",)
    assert _truth(IDLE, job, match={"framework": "jax"}) is NO
    lost = a_job(framework="", **dark)
    assert _truth(IDLE, lost, match={"framework": "jax"}) is UNKNOWN


def test_the_whitelist_makes_it_no_and_says_why() -> None:
    """What would have been a violation is shown as protected."""
    job = a_job({UTILIZATION: {"g0": 0.0}})
    verdict = judge(a_rule(IDLE), job, whitelist=[an_entry({"user": "ana"})])
    assert verdict.truth is NO
    assert verdict.protected.startswith("whitelist: shared service (approved by ops, until 2027-")
    assert judge(a_rule(IDLE), job, whitelist=None).protected == "whitelist: it could not be read"


def test_a_whitelist_that_cannot_be_decided_leaves_the_verdict_unknown() -> None:
    """The executables are not known, so the job may be the protected service."""
    job = a_job({UTILIZATION: {"g0": 0.0}})
    entry = an_entry({"executable": "/usr/bin/tensorboard"})
    assert judge(a_rule(IDLE), job, whitelist=[entry]).unknown_reasons == ("whitelist",)


def test_a_rule_about_cards_judges_cards() -> None:
    """Also those that nobody uses; a card has no cold start."""
    rule = a_rule(
        {"signal": "card_temperature", "agg": "min", "window": "1m", "above": "88C"}, target="gpu"
    )
    key = SignalKey("card_temperature", "min", 60)
    card = JobFacts("g9", "n1:9835", gpus=cards("g9"), values={key: {"g9": 91}})
    fleet = fleet_of(cards={"g9": card})
    assert list(subjects(rule, fleet)) == ["g9"]
    verdict = evaluate(rule, card, fleet, profiles=[], whitelist=[], now=NOW_FACTS)
    assert verdict.truth is YES
    assert list(subjects(a_rule(IDLE), fleet)) == []


# -- what holds for every rule

_LEAVES = ("idle", "held", "silent", "power")
_WRITTEN = {"idle": IDLE, "held": HELD, "silent": SILENT, "power": POWER}
_POWER_KEY = SignalKey("card_power", "avg", 300)

_conditions = st.recursive(
    st.sampled_from(_LEAVES).map(_WRITTEN.__getitem__),
    lambda below: st.one_of(
        st.lists(below, min_size=1, max_size=3).map(lambda parts: {"all": parts}),
        st.lists(below, min_size=1, max_size=3).map(lambda parts: {"any": parts}),
        below.map(lambda part: {"not": part}),
    ),
    max_leaves=6,
)
_readings = st.fixed_dictionaries(
    {
        "idle": st.sampled_from([0.0, 0.9]),
        "held": st.sampled_from([0.05, 0.7]),
        "power": st.sampled_from([50.0, 300.0]),
        "cpu": st.sampled_from([1.0, 900.0]),
    }
)


def _job_of(readings: Mapping[str, float], lost: frozenset[str]) -> JobFacts:
    keys = {"idle": UTILIZATION, "held": SHARE, "power": _POWER_KEY}
    values = {key: {"g0": readings[name]} for name, key in keys.items() if name not in lost}
    activity = {} if "cpu" in lost else {"cpu": NOW_FACTS - readings["cpu"]}
    return a_job(values, activity=activity)


@settings(deadline=None)
@given(
    when=_conditions,
    readings=_readings,
    lost=st.frozensets(st.sampled_from(["idle", "held", "power", "cpu"])),
)
def test_losing_data_never_turns_an_answer_around(
    when: object, readings: Mapping[str, float], lost: frozenset[str]
) -> None:
    """With values missing, a verdict is what it was, or UNKNOWN: never the opposite."""
    rule = a_rule(when)
    full = judge(rule, _job_of(readings, frozenset())).truth
    less = judge(rule, _job_of(readings, lost)).truth
    assert full is not UNKNOWN
    assert less in (full, UNKNOWN)


@settings(deadline=None)
@given(when=_conditions)
def test_of_a_job_of_which_nothing_is_known_nothing_is_concluded(when: object) -> None:
    """Neither a violation nor its absence."""
    assert judge(a_rule(when), a_job()).truth is UNKNOWN


@settings(deadline=None)
@given(when=_conditions, readings=_readings)
def test_ignoring_the_jobs_word_changes_nothing_where_it_says_nothing(
    when: object, readings: Mapping[str, float]
) -> None:
    """Without heartbeat, log and phases both evaluations are the same."""
    job = _job_of(readings, frozenset())
    rule = a_rule(when)
    assert judge(rule, job).truth is judge(rule, job, trusted=False).truth
