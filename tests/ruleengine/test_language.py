"""Properties of the whole rule language, on any rule and any job that can be written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ruleengine.fleets import NOW_FACTS, a_profile, fleet_of
from tests.ruleengine.languages import a_whole_job, keys_of, rules, with_losses
from tests.ruleengine.replaying import default_rules
from tests.ruleengine.test_guards import LIMITS

from gpuwarden.ruleengine import cases, guards
from gpuwarden.ruleengine.cases import CaseState, Delivery
from gpuwarden.ruleengine.condition_differences import condition_changes, normal
from gpuwarden.ruleengine.evaluation import applies, evaluate
from gpuwarden.ruleengine.guards import Situation
from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.lints_of_grades import lint_grades
from gpuwarden.ruleengine.model import Rule, RuleSet, Stage
from gpuwarden.ruleengine.profiles import Expectations
from gpuwarden.ruleengine.rule_differences import differences
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines
from gpuwarden.ruleengine.sweeps import Sweeper
from gpuwarden.ruleengine.verdicts import JobFacts, Truth, Verdict

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from gpuwarden.ruleengine.guards import Blocked

PROFILES = [a_profile()]
PROVEN = Delivery(complete=True, proven_at=1.0)
_any = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
_dice = st.randoms(use_true_random=True)


def judged(rule: Rule, job: JobFacts, *others: JobFacts, trusted: bool = True) -> Verdict:
    """The verdict on a job among others."""
    fleet = fleet_of(job, *others)
    return evaluate(
        rule, job, fleet, profiles=PROFILES, whitelist=[], now=NOW_FACTS, trusted=trusted
    )


def truths(verdict: Verdict) -> tuple[Truth, ...]:
    """Of the rule, and of each stage that has a condition."""
    return (verdict.truth, *(grade.truth for grade in verdict.grades))


@_any
@given(rule=rules(), dice=_dice)
def test_what_is_lost_turns_no_answer_around(rule: Rule, dice: random.Random) -> None:
    """An answer on half the data is that on the whole data, or UNKNOWN; of each stage too."""
    job = a_whole_job(rule, dice)
    whole, less = judged(rule, job), judged(rule, with_losses(job, dice))
    for full, part in zip(truths(whole), truths(less), strict=True):
        assert part in (full, Truth.UNKNOWN)


def _acts(
    rule: Rule, history: Sequence[JobFacts]
) -> tuple[tuple[str, Stage] | None, list[Blocked], Verdict | None]:
    """The stage that would take the last job's cards, by the state machine and its guards."""
    case, verdict, before = None, None, None
    for job in history:
        if verdict is None or job is not before:
            verdict, before = judged(rule, job), job
        if case is None:
            if verdict.truth is not Truth.YES:
                continue
            case = cases.opened(rule, job.job_id, wall=0.0)
        step = cases.advance(
            case,
            rule,
            truth=verdict.truth,
            grades=verdict.grades,
            delta=30.0,
            wall=1.0,
            delivery=PROVEN,
        )
        case = None if step.closed else step.case
    following = None if case is None else cases.next_stage(case, rule)
    if case is None or verdict is None or following is None:
        return None, [], verdict
    job = history[-1]
    waiting = rule.only_if_waiting
    fleet = fleet_of(job, numbers={} if waiting is None else {waiting.key: 5.0})
    situation = Situation(
        now=NOW_FACTS,
        scrape_interval=5.0,
        limits=LIMITS,
        facts=fleet,
        ends=(),
        ended_this_tick=0,
        due_owners=(),
        killed=False,
        settled_for=60.0,
        settle_after=30.0,
        cool_down=600.0,
    )
    blocks = guards.case_blocks(
        situation,
        case,
        rule,
        key=following[0],
        stage=following[1],
        job=job,
        verdict=verdict,
        truth=verdict.truth,
        delivery=PROVEN,
        kept_until=None,
    )
    acts = case.state is CaseState.DUE and not blocks
    return following if acts else None, blocks, verdict


@settings(_any, max_examples=80)
@given(rule=rules(), dice=_dice)
def test_nothing_unknown_leads_to_an_end(rule: Rule, dice: random.Random) -> None:
    """Whoever is ended would be ended whatever the missing data were: they decide nothing.

    The job stays as it is for long enough for any deadline; then some of it is lost.
    """
    job = a_whole_job(rule, dice)
    job = dataclasses.replace(job, job_id="proc-1", instances=("n1:9835",))
    last = with_losses(job, dice)
    acts, _, verdict = _acts(rule, [job] * 60 + [last] * 2)
    if acts is None:
        return
    assert verdict is not None
    key, stage = acts
    grade = verdict.grade(key)
    assert verdict.truth is Truth.YES
    assert (stage.when is None) == (grade is None)
    assert grade is None or grade.truth is Truth.YES
    for _ in range(3):
        filled = _filled(rule, last, dice)
        assert set(truths(judged(rule, filled))[:1]) == {Truth.YES}
        again = judged(rule, filled).grade(key)
        assert again is None or again.truth is Truth.YES


def _filled(rule: Rule, job: JobFacts, dice: random.Random) -> JobFacts:
    """The job with any numbers in the place of those that are missing."""
    other = a_whole_job(rule, dice)
    values = {}
    for key in keys_of(rule):
        made = list(other.values[key].values())
        names = [gpu.uuid for gpu in job.gpus] if "" not in other.values[key] else [""]
        known = job.values.get(key, {})
        values[key] = {name: known.get(name, dice.choice(made)) for name in names}
    return dataclasses.replace(job, values=values)


@settings(_any, max_examples=5)
@given(dice=_dice)
def test_the_property_above_is_about_something(dice: random.Random) -> None:
    """A plain rule on a plain job does end it there."""
    rule = Rule.model_validate(
        {
            "id": "any",
            "mode": "enforce",
            "target": "job",
            "match": {},
            "cold_start": "0s",
            "ignore_phases": {},
            "when": {"silent_for": "5m", "signals": ["cpu"]},
            "for": "1m",
            "stages": [
                {"level": "moderate", "after": "1m", "do": "notify"},
                {
                    "level": "severe",
                    "after": "5m",
                    "do": "terminate",
                    "when": {"silent_for": "10m", "signals": ["cpu"]},
                    "notice_delivered_for": "2m",
                    "grace": "60s",
                    "max_work_lost": "40h",
                },
            ],
        }
    )
    job = a_whole_job(rule, dice)
    job = dataclasses.replace(
        job, job_id="proc-1", instances=("n1:9835",), activity={"cpu": NOW_FACTS - 4000}
    )
    assert _acts(rule, [job] * 60)[0]
    almost = dataclasses.replace(job, activity={"cpu": NOW_FACTS - 400})
    assert not _acts(rule, [almost] * 60)[0]


@_any
@given(rule=rules(), dice=_dice)
def test_neither_order_nor_others_change_a_verdict(rule: Rule, dice: random.Random) -> None:
    """Cards and jobs in any order, and a stranger beside them: the same answers, swept or not."""
    jobs = [with_losses(a_whole_job(rule, dice, f"j{n}"), dice) for n in range(4)]
    stranger = a_whole_job(rule, dice, "stranger")
    before = {job.job_id: truths(judged(rule, job, *jobs)) for job in jobs}
    mixed = [
        dataclasses.replace(job, gpus=tuple(dice.sample(job.gpus, len(job.gpus)))) for job in jobs
    ]
    dice.shuffle(mixed)
    after = {job.job_id: truths(judged(rule, job, stranger, *mixed)) for job in mixed}
    assert after == before
    swept = [_swept(rule, each) for each in (jobs, [stranger, *mixed])]
    assert {name: swept[1].get(name) for name in before} == {
        name: swept[0].get(name) for name in before
    }


def _swept(rule: Rule, jobs: Sequence[JobFacts]) -> dict[str, Truth]:
    sweeper = Sweeper(
        fleet_of(*jobs),
        [rule],
        expectations=Expectations(PROFILES),
        whitelist=[],
        now=NOW_FACTS,
    )
    return {found.job.job_id: found.truth for found in sweeper.findings(rule)}


@_any
@given(rule=rules(), dice=_dice)
def test_a_condition_and_its_one_form_say_the_same(rule: Rule, dice: random.Random) -> None:
    """What `rules diff` compares means what was written, for every job."""
    job = with_losses(a_whole_job(rule, dice), dice)
    plain = rule.model_copy(update={"when": normal(rule.when)})
    assert judged(plain, job).truth is judged(rule, job).truth
    assert list(condition_changes(rule.when, plain.when)) == []


@_any
@given(rule=rules())
def test_whatever_can_be_written_can_be_checked_explained_and_compared(rule: Rule) -> None:
    """No lint, explanation or difference fails on a rule that is well-formed."""
    codes = {item.code for item in (*lint_rule(rule), *lint_grades(rule))}
    assert all(code.startswith("GW") for code in codes)
    rule_set = RuleSet(version=1, rules=(rule,))
    explained = explain_rule(rule, rule_set, scrape_interval=5)
    times = [stage["earliest"] for stage in explained["stages"]]
    assert times == sorted(times) or any(stage.when is not None for stage in rule.stages)
    assert list(explanation_lines(explained))
    assert differences(rule_set, rule_set) == []


@_any
@given(rule=rules(), dice=_dice)
def test_who_is_not_meant_is_not_judged(rule: Rule, dice: random.Random) -> None:
    """Neither the rule nor a stage says YES of another team's or user's job."""
    job = a_whole_job(rule, dice)
    if applies(rule, job) is Truth.NO:
        assert truths(judged(rule, job)) == (Truth.NO,)


def test_a_copy_of_a_rule_finds_its_stages_anew() -> None:
    """What follows from the values is of these values, whatever the original was asked before."""
    found = [rule for rule in default_rules().rules if rule.taking_stages]
    for rule in found:
        said = rule.model_copy(update={"stages": rule.stages[:1]})
        assert said.keyed_stages == rule.keyed_stages[:1]
        assert said.conditions == (rule.when, *filter(None, (said.stages[0].when,)))
    assert found
