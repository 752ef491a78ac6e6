"""`gpus: 75%`: a condition that must be true of at least a share of a job's cards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.ruleengine.fleets import NOW_FACTS, UTILIZATION, a_job, a_rule, cards, fleet_of
from tests.ruleengine.test_evaluation import HELD, IDLE, judge
from tests.ruleengine.test_grades import END, LOG, NOTIFY

from gpuwarden.ruleengine.conditions import Gpus, GpuShare, Signal
from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.loading import rule_set_hash
from gpuwarden.ruleengine.model import Rule, RuleSet
from gpuwarden.ruleengine.profiles import Expectations
from gpuwarden.ruleengine.rule_differences import differences
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines
from gpuwarden.ruleengine.sweeps import Sweeper
from gpuwarden.ruleengine.truths import all_of, any_of, negate, share_of
from gpuwarden.ruleengine.verdicts import Truth

NO, UNKNOWN, YES = Truth.NO, Truth.UNKNOWN, Truth.YES


def idle(gpus: str) -> dict[str, Any]:
    """At most 5 % on so many of the cards."""
    return IDLE | {"gpus": gpus}


@pytest.mark.parametrize(
    ("share", "truths", "truth"),
    [
        (0.5, [YES, NO], YES),
        (0.51, [YES, NO], NO),
        (0.75, [YES, YES, YES, NO], YES),
        (0.75, [YES, YES, NO, NO], NO),
        (0.75, [YES, YES, UNKNOWN, NO], UNKNOWN),
        (0.75, [YES, YES, YES, UNKNOWN], YES),
        (0.75, [NO, NO, UNKNOWN, UNKNOWN], NO),
        (1 / 3, [YES, NO, NO], YES),
        (0.1, [NO] * 10, NO),
        (0.1, [YES] + [NO] * 9, YES),
        (0.5, [], UNKNOWN),
    ],
)
def test_a_share_is_known_as_soon_as_the_unknown_cannot_matter(
    share: float, truths: list[Truth], truth: Truth
) -> None:
    """YES if enough hold already, NO if too few could; exactly the share is enough."""
    assert share_of(truths, share) is truth


@given(
    st.lists(st.sampled_from(Truth), max_size=6),
    st.integers(1, 100).map(lambda per_cent: per_cent / 100),
)
def test_a_share_is_what_every_completion_of_the_unknown_agrees_on(
    truths: list[Truth], share: float
) -> None:
    """And all and any are its ends."""
    found = share_of(truths, share)
    holes = truths.count(UNKNOWN)
    completions = set()
    for filling in itertools.product([NO, YES], repeat=holes):
        left = iter(filling)
        whole = [next(left) if truth is UNKNOWN else truth for truth in truths]
        completions.add(share_of(whole, share))
    assert found is (completions.pop() if len(completions) == 1 else UNKNOWN)
    assert share_of(truths, 1.0) is all_of(truths)
    assert share_of(truths, 0.001) is any_of(truths)


@pytest.mark.parametrize(
    ("gpus", "values", "truth"),
    [
        ("50%", {"g0": 0.0, "g1": 0.9}, YES),
        ("75%", {"g0": 0.0, "g1": 0.9}, NO),
        ("50%", {"g0": 0.9}, UNKNOWN),
        ("50%", {"g0": 0.0}, YES),
        ("100%", {"g0": 0.0}, UNKNOWN),
    ],
)
def test_a_verdict_and_a_sweep_count_the_cards(
    gpus: str, values: dict[str, float], truth: Truth
) -> None:
    """Both ways of judging are the same; the evidence says what share is meant."""
    rule, job = a_rule(idle(gpus)), a_job({UTILIZATION: values}, gpus=cards("g0", "g1"))
    verdict = judge(rule, job)
    assert verdict.truth is truth
    wanted = gpus.replace("%", " %")
    assert verdict.evidence[0].condition.endswith(f"at least {wanted} of the GPUs")
    sweeper = Sweeper(
        fleet_of(job), [rule], expectations=Expectations([]), whitelist=[], now=NOW_FACTS
    )
    swept = [finding.truth for finding in sweeper.findings(rule)]
    assert swept == ([] if truth is NO else [truth])
    turned = judge(a_rule({"not": idle(gpus)}), job).truth
    assert turned is negate(truth)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("all", Gpus.ALL),
        ("any", Gpus.ANY),
        ("75%", GpuShare(0.75)),
        ("100%", GpuShare(1.0)),
        ("12.5%", GpuShare(0.125)),
    ],
)
def test_a_share_is_written_as_a_percentage(text: str, read: Gpus | GpuShare) -> None:
    """And told as it is written."""
    condition = Signal.model_validate(idle(text))
    assert condition.gpus == read
    assert str(condition.gpus) == text
    assert condition.model_dump(mode="json")["gpus"] == text


@pytest.mark.parametrize("text", ["0%", "101%", "0.5", 0.5, 2, "most", "", "%", "75", None, "-5%"])
def test_anything_else_is_an_error(text: object) -> None:
    """A bare number could be a count or a share."""
    if text is None:
        assert Signal.model_validate(IDLE | {"gpus": None}).gpus is None
        return
    with pytest.raises(ValidationError):
        Signal.model_validate(IDLE | {"gpus": text})


def _set(gpus: str) -> RuleSet:
    return RuleSet(version=1, rules=(a_rule(idle(gpus)),))


@pytest.mark.parametrize(
    ("old", "new", "effect"),
    [
        ("all", "75%", "stricter"),
        ("75%", "50%", "stricter"),
        ("50%", "any", "stricter"),
        ("any", "50%", "laxer"),
        ("50%", "all", "laxer"),
        ("all", "100%", None),
    ],
)
def test_the_fewer_cards_the_stricter(old: str, new: str, effect: str | None) -> None:
    """All of them is the same in either word, though the text and its hash differ."""
    found = differences(_set(old), _set(new))
    effects = [change.effect for item in found for change in item.changes]
    assert effects == ([] if effect is None else [effect])
    assert rule_set_hash(_set(old)) != rule_set_hash(_set(new))


def _ending(when: dict[str, Any]) -> Rule:
    return a_rule(when, match={}, ignore_phases={}, stages=[LOG, NOTIFY, END])


@pytest.mark.parametrize(
    ("condition", "codes"),
    [
        (idle("75%"), ["GW224"]),
        (idle("any"), ["GW224"]),
        (idle("all"), []),
        (idle("100%"), []),
        (idle("99%"), ["GW224"]),
        ({"not": {"signal": "gpu_utilization", "agg": "min", "window": "3 samples", "above": "5%",
                  "gpus": "100%"}}, ["GW224"]),
        ({"not": {**IDLE, "gpus": "any"}}, []),
        ({"not": {"signal": "gpu_utilization", "agg": "min", "window": "3 samples", "above": "5%",
                  "gpus": "50%"}}, ["GW224"]),
        (HELD | {"gpus": "75%"}, []),
    ],
)  # fmt: skip
def test_some_idle_cards_are_no_idle_job(condition: dict[str, Any], codes: list[str]) -> None:
    """A rule that ends jobs needs all of them idle; of memory that is held, some may suffice."""
    found = lint_rule(_ending({"all": [condition, HELD]}))
    assert [item.code for item in found if item.code == "GW224"] == codes


def test_it_is_explained() -> None:
    """In words."""
    rules = _set("75%")
    lines = explanation_lines(explain_rule(rules.rules[0], rules, scrape_interval=5))
    assert any(
        line.endswith("is at most 5 % on at least 75 % of the job's cards") for line in lines
    )
