"""A sweep says of every job what `evaluation.evaluate` says: the fast way has no own meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.fleets import (
    A100,
    GIB,
    NOW_FACTS,
    UTILIZATION,
    a_job,
    a_profile,
    a_rule,
    a_run,
    an_entry,
    fleet_of,
)

from gpuwarden.ruleengine import evaluation
from gpuwarden.ruleengine.measures import Layout, Measures, per_card
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.profiles import Expectations
from gpuwarden.ruleengine.sweeps import Finding, Sweeper
from gpuwarden.ruleengine.verdicts import FleetFacts, GpuFacts, JobFacts, Truth

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from gpuwarden.ruleengine.model import Profile, Rule, WhitelistEntry
    from gpuwarden.ruleengine.verdicts import SignalKey

# -- any rule

_LEAVES: list[dict[str, Any]] = [
    {
        "signal": "gpu_utilization",
        "agg": "max",
        "window": "3 samples",
        "at_most": "5%",
        "gpus": "all",
    },
    {"signal": "gpu_memory_share", "share": "80%", "window": "5m", "above": "10%", "gpus": "any"},
    {"signal": "card_power", "agg": "avg", "window": "5m", "below": "100W", "gpus": "all"},
    {"signal": "card_power", "agg": "last", "at_least": "100W", "gpus": "any"},
    {"signal": "job_cpu_cores", "window": "5m", "below": "0.5 cores"},
    {"signal": "data_wait_share", "window": "5m", "at_least": "50%"},
    {"silent_for": "5m", "signals": ["log", "heartbeat", "cpu"]},
    {"silent_for": "5m", "signals": ["heartbeat"]},
    {"no_progress_for": "5m"},
    {"needs_memory": "80%"},
    {"promql": "max by (job_id) (a)", "above": 1},
    {"over_budget": "week", "above": "100%"},
    {"promql": "max by (job_id) (b)", "at_most": 1},
    {"profile": {"throughput": "below 15%", "gpu_memory": "above 15%"}, "window": "5m"},
    {"profile": {"gpu_utilization": "outside 10%"}, "window": "5m", "gpus": "any"},
]
_LOG = {"level": "light", "after": "0s", "do": "log"}
_GRADED = {
    "level": "moderate",
    "after": "1m",
    "do": "notify",
    "when": {"silent_for": "1m", "signals": ["log"]},
}
_conditions = st.recursive(
    st.sampled_from(_LEAVES),
    lambda below: st.one_of(
        st.lists(below, min_size=1, max_size=4).map(lambda parts: {"all": parts}),
        st.lists(below, min_size=1, max_size=4).map(lambda parts: {"any": parts}),
        below.map(lambda part: {"not": part}),
    ),
    max_leaves=6,
)
_rules = st.builds(
    lambda when, fields: a_rule(when, **fields),
    _conditions,
    st.fixed_dictionaries(
        {
            "cold_start": st.sampled_from(["0s", "60s", "60s", "3h"]),
            "ignore_phases": st.sampled_from([{}, {"validate": "30m", "scan": "1m"}]),
            "match": st.sampled_from(
                [{}, {"user": "ana|ben"}, {"gpu": ".*A100.*"}, {"model": "yolo.*", "user": ".+"}]
            ),
            "stages": st.sampled_from([[_LOG], [_LOG, _GRADED]]),
            "team": st.sampled_from(["", "", "vision"]),
            "only_during": st.sampled_from(
                [[], [], [], [{"days": ["mon"], "from": "00:00", "to": "24:00", "zone": "UTC"}]]
            ),
        }
    ),
)

_NEVER = {"from": "00:00", "to": "00:01", "zone": "UTC"}
"""Not when the facts are."""

# -- any job

_KEYS: tuple[SignalKey, ...] = tuple(
    dict.fromkeys(key for leaf in _LEAVES for key in condition_keys(a_rule(leaf).when))
)
_NUMBERS = (0.0, 0.03, 0.05, 0.1, 0.6, 1.0, 50.0, 100.0, 9.0 * GIB, 30 * GIB)
_MOMENTS = (-8000.0, -3600.0, -1800.0, -600.0, -301.0, -300.0, -20.0, 3.0, 60.0)


def _a_random_job(job_id: str, dice: random.Random) -> JobFacts:
    """A job, more often than not one of which enough is known to be judged."""

    def mostly(options: list[Any]) -> Any:
        """The first, or one of the others."""
        return options[0] if dice.random() < 0.75 else dice.choice(options[1:])

    def moment() -> float:
        return NOW_FACTS + dice.choice(_MOMENTS)

    gpus = tuple(
        GpuFacts(
            f"g{index}",
            str(index),
            mostly([A100, "unheard-of", ""]),
            mostly([40 * GIB, None]),
            mostly([1, 2]),
        )
        for index in range(mostly([1, 0, 2, 3]))
    )
    values: dict[SignalKey, dict[str, float]] = {}
    for key in _KEYS:
        names = [gpu.uuid for gpu in gpus] if per_card(key) else [""]
        known = {name: dice.choice(_NUMBERS) for name in names if dice.random() < 0.9}
        if known:
            values[key] = known
    run = a_run(
        phase=dice.choice([None, "train", "validate", "scan"]),
        phase_since=mostly([moment(), None]),
        batch=mostly([64, None, 512]),
        amp=mostly([True, None]),
        model=mostly(["yolov8m", "", "yolov8x", "mine"]),
        conflict=mostly([False, True]),
    )
    channels = dice.sample(["log", "heartbeat", "cpu"], dice.randint(0, 3))
    return a_job(
        values,
        job_id=job_id,
        user=mostly(["ana", "", "eve"]),
        team=mostly(["vision", ""]),
        gpus=gpus,
        start_time=mostly([NOW_FACTS - 7300, moment(), None]),
        first_gpu_use=mostly([NOW_FACTS - 7200, moment(), None]),
        run=mostly([run, None]),
        activity={name: moment() for name in channels},
        fresh=mostly([True, False]),
        not_fresh_reason=mostly(["", "clock_skew"]),
    )


_whitelists = st.one_of(
    st.just([]),
    st.none(),
    st.lists(
        st.sampled_from(
            [
                an_entry({"user": "ana"}),
                an_entry({"executable": "/usr/bin/python3"}),
                an_entry({"user": "eve"}, expires="1970-01-01T00:00:00+00:00"),
                an_entry({"user": "eve"}, rules=["another"]),
            ]
        ),
        max_size=2,
    ),
)


def _laid_out(job: JobFacts, layout: Layout) -> JobFacts:
    """The same job with its values as gathering leaves them."""
    uuids = tuple(gpu.uuid for gpu in job.gpus)
    values = Measures(layout, uuids, layout.packed(job.values, uuids))
    return replace(job, values=values)


def _without(job: JobFacts, failed: Collection[SignalKey]) -> JobFacts:
    """The same job, nothing of which is known that could not be asked."""
    return replace(job, values={key: v for key, v in job.values.items() if key not in failed})


def _spelled_out(
    rule: Rule,
    job: JobFacts,
    fleet: FleetFacts,
    profiles: Sequence[Profile],
    whitelist: Sequence[WhitelistEntry] | None,
) -> Finding | None:
    """What a sweep should say of a job, by `evaluation` alone; None for a plain NO."""
    if evaluation.applies(rule, job) is Truth.NO:
        return None
    verdict = evaluation.evaluate(
        rule, job, fleet, profiles=profiles, whitelist=whitelist, now=NOW_FACTS
    )
    if verdict.truth is Truth.NO and not verdict.protected and not verdict.self_report_only:
        return None
    return Finding(
        job,
        verdict.truth,
        verdict.unknown_reasons if verdict.truth is Truth.UNKNOWN else (),
        verdict.self_report_only and verdict.truth is not Truth.YES,
        bool(verdict.protected),
    )


@settings(deadline=None, max_examples=120)
@given(
    rules=st.lists(_rules, min_size=1, max_size=3),
    dice=st.randoms(use_true_random=True),
    whitelist=_whitelists,
    gathered=st.booleans(),
    failed=st.booleans(),
)
def test_a_sweep_says_what_evaluation_says(
    rules: list[Rule],
    dice: random.Random,
    whitelist: list[WhitelistEntry] | None,
    gathered: bool,
    failed: bool,
) -> None:
    """Truth, reasons, protection and self-report, for any rule, any jobs and any whitelist."""
    layout = Layout(_KEYS)
    broken = {key: "refused" for key in _KEYS if failed and dice.random() < 0.3}
    jobs = [_without(_a_random_job(f"j{number}", dice), broken) for number in range(40)]
    if gathered:
        jobs = [_laid_out(job, layout) for job in jobs]
    fleet = fleet_of(*jobs, failed=broken)
    own = a_profile(throughput="20 img/s", gpu_memory="2GiB").model_copy(update={"team": "vision"})
    profiles = [own, a_profile()]
    sweeper = Sweeper(
        fleet, rules, expectations=Expectations(profiles), whitelist=whitelist, now=NOW_FACTS
    )
    for rule in rules:
        wanted = [_spelled_out(rule, job, fleet, profiles, whitelist) for job in jobs]
        found = list(sweeper.findings(rule))
        assert found == [each for each in wanted if each is not None]


def test_each_rule_is_swept_by_the_profiles_of_its_team() -> None:
    """What is slow for everybody is as expected by the team's own profile, for its rules alone."""
    own = a_profile(throughput="20 img/s").model_copy(update={"team": "vision"})
    slow = {"profile": {"throughput": "below 15%"}, "window": "5m"}
    rules = [a_rule(slow, id="all"), a_rule(slow, id="own", team="vision")]
    (key,) = condition_keys(rules[0].when)
    job = a_job({key: {"": 20.0}}, team="vision", run=a_run())
    expectations = Expectations([own, a_profile()])
    sweeper = Sweeper(fleet_of(job), rules, expectations=expectations, whitelist=[], now=NOW_FACTS)
    found = [[item.truth for item in sweeper.findings(rule)] for rule in rules]
    assert found == [[Truth.YES], []]


@pytest.mark.parametrize("zone_hours", [[], [{"days": ["sun"], **_NEVER}]])
def test_a_plain_no_is_told_of_jobs_that_are_watched(zone_hours: list[dict[str, Any]]) -> None:
    """The engine watches those with an open case; of all others a NO is only counted."""
    rule = a_rule(_LEAVES[0], only_during=zone_hours)
    jobs = [a_job({UTILIZATION: {"g0": 0.9}}, job_id=name) for name in ("a", "b", "c")]
    sweeper = Sweeper(
        fleet_of(*jobs), [rule], expectations=Expectations([]), whitelist=[], now=NOW_FACTS
    )
    assert list(sweeper.findings(rule, watched={"b"})) == [Finding(jobs[1], Truth.NO)]
    assert sweeper.quiet(rule) == 2


def test_cards_are_swept_for_rules_about_cards() -> None:
    """Also those that nobody uses."""
    rule = a_rule(
        {"signal": "card_temperature", "agg": "min", "window": "1m", "above": "88C"}, target="gpu"
    )
    (key,) = condition_keys(rule.when)
    hot = JobFacts("g1", "n1:9835", gpus=(GpuFacts("g1", "0", A100),), values={key: {"g1": 91.0}})
    cool = JobFacts("g2", "n1:9835", gpus=(GpuFacts("g2", "1", A100),), values={key: {"g2": 40.0}})
    fleet = fleet_of(cards={"g1": hot, "g2": cool})
    sweeper = Sweeper(fleet, [rule], expectations=Expectations([]), whitelist=[], now=NOW_FACTS)
    assert list(sweeper.findings(rule)) == [Finding(hot, Truth.YES)]
