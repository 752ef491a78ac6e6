"""The first sentence of a job's page: why it was ended, or why not."""

from __future__ import annotations

from typing import Any

from gpuwarden.ruleengine import explain


def broken(
    rule: str, *why_not: tuple[str, str], mode: str = "enforce", ends: bool = True
) -> dict[str, Any]:
    """What the document says of a rule that the job breaks."""
    not_before = "2027-01-15T08:00:00Z" if ends and mode == "enforce" else None
    return {
        "rule": rule,
        "mode": mode,
        "protected": "",
        "case": {"detected_at": "2027-01-15T07:00:00Z", "not_before": not_before},
        "why_not": [{"reason": reason, "sentence": text} for reason, text in why_not],
    }


def said(*rules: dict[str, Any], target: str = "job") -> str:
    """The first sentence about a running job."""
    return explain.answer(
        {
            "target": target,
            "running": True,
            "job": {"fresh": True, "not_fresh_reason": ""},
            "rules": list(rules),
            "decisions": [],
        }
    )


DARK = ("dark_node", "its node is dark")
YOUNG = ("notice_too_young", "the notice is young")


def test_of_several_rules_each_is_named_with_what_holds_it() -> None:
    """What they have in common is said once; how far a case has come is left out."""
    assert said(broken("idle", ("not_due", "the case is notified"), DARK, YOUNG)) == (
        "This job breaks the rule idle. It is not ended now: its node is dark; the notice is young."
    )
    assert said(broken("idle", DARK, YOUNG), broken("hog", DARK)) == (
        "This job breaks the rules idle and hog. It is not ended now: its node is dark; "
        "idle: the notice is young."
    )


def test_a_rule_that_ends_jobs_goes_before_one_that_watches() -> None:
    """That the other one's mode is observe is no reason why the job lives."""
    watched = broken("hog", ("mode", "the rule's mode is observe"), mode="observe")
    assert said(watched, broken("idle", YOUNG)) == (
        "This job breaks the rules hog and idle. It is not ended now: the notice is young."
    )
    assert said(watched) == (
        "This job breaks the rule hog. It is not ended now: the rule's mode is observe."
    )


def test_a_job_that_nothing_holds_back_any_more_is_told_so() -> None:
    """And not that no rule ends jobs, nor what holds another rule back."""
    assert said(broken("hog", DARK), broken("idle")) == (
        "This job breaks the rules hog and idle. Nothing holds its end by idle back: one of the "
        "next ticks ends it."
    )


def test_rules_that_only_tell_are_said_to() -> None:
    """Of a card all do."""
    assert said(broken("hog", ends=False)) == (
        "This job breaks the rule hog, and no rule that it breaks ends jobs."
    )
    assert said(broken("hot", ends=False), target="gpu") == (
        "This card breaks the rule hot, and rules on cards only tell."
    )
