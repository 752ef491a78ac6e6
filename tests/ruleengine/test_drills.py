"""Drills as pure functions: which job is one, how far it has come, what is slow, how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ruleengine.fleets import a_job, a_rule, cards
from tests.ruleengine.test_canaries import ENDING, IDLE, canary

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine import drills
from gpuwarden.ruleengine.drill_settings import DrillSettings, StepBudgets
from gpuwarden.ruleengine.drills import STEPS, Result
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.model import Mode, Rule, Target
from gpuwarden.ruleengine.verdicts import RunFacts
from gpuwarden.yaml_files import load_file

SETTINGS = DrillSettings(rule="drill", user="gpuwarden-drill", per_hour=2, per_day=9)
BUDGETS = StepBudgets()
BEGUN = 1000.0


def the_rule(**fields: object) -> Rule:
    """The drills' rule."""
    match = {"user": "gpuwarden-drill", "run_id": "drill-.*"}
    written = {"id": "drill", "stages": ENDING, "mode": "enforce", "match": match}
    return a_rule(IDLE, ignore_phases={}, **(written | fields))


@pytest.mark.parametrize(
    ("user", "run", "drill"),
    [
        ("gpuwarden-drill", RunFacts("drill-n7-1"), True),
        ("gpuwarden-drill", RunFacts("coco-7"), False),
        ("gpuwarden-drill", None, False),
        ("gpuwarden-drill", RunFacts("drill-n7-1", conflict=True), False),
        ("alice", RunFacts("drill-n7-1"), False),
        ("", RunFacts("drill-n7-1"), False),
    ],
    ids=["a drill", "another run", "no run", "claimed twice", "another user", "nobody known"],
)
def test_a_drill_is_of_its_user_and_says_so(
    user: str, run: RunFacts | None, *, drill: bool
) -> None:
    """The user is the node's word, which nobody chooses; the name alone makes no drill."""
    assert drills.is_drill(a_job(user=user, run=run, gpus=cards("GPU-1")), SETTINGS) is drill
    assert not drills.is_drill(a_job(user=user, run=run, gpus=()), SETTINGS)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (the_rule(), ""),
        (None, "no rule drill is in force"),
        (the_rule(match={"run_id": "drill-.*"}), "must match exactly the user"),
        (
            the_rule(match={"user": "gpuwarden-drill|alice", "run_id": "drill-.*"}),
            "exactly the user",
        ),
        (the_rule(match={"user": ".*", "run_id": "drill-.*"}), "exactly the user"),
        (the_rule(match={"user": "gpuwarden-drill"}), "must begin with drill-"),
        (the_rule(match={"user": "gpuwarden-drill", "run_id": "drill-.*|.*"}), "no alternative"),
        (the_rule(mode="warn"), "must enforce"),
        (the_rule().model_copy(update={"target": Target.GPU}), "judge jobs"),
        (the_rule().model_copy(update={"canary": canary()}), "no canary"),
    ],
)
def test_a_rule_that_could_end_anything_else_is_no_drills_rule(
    rule: Rule | None, problem: str
) -> None:
    """Its ends count for no limit of the others, so it must be pinned."""
    found = drills.rule_problem(rule, SETTINGS)
    assert (found == "") is (problem == "")
    assert problem in found


TIMES = st.lists(st.floats(0, 500), min_size=0, max_size=len(STEPS))


@given(TIMES, st.floats(0, 5000))
def test_steps_are_the_spans_between_what_was_written_and_the_last_one_lasts(
    spans: list[float], wait: float
) -> None:
    """Their times add up to the whole, none is negative, and only the last is open."""
    ended, at = {}, BEGUN
    for name, span in zip(STEPS, spans, strict=False):
        at += span
        ended[name] = at
    seen = ended.pop("seen", None)
    found = drills.steps(BEGUN, seen, ended, budgets=BUDGETS, now=at + wait)
    assert [step.name for step in found] == list(STEPS[: len(spans) + 1])
    assert all(step.ended is not None for step in found[:-1])
    whole = at + (wait if len(spans) < len(STEPS) else 0.0) - BEGUN
    assert sum(step.seconds for step in found) == pytest.approx(whole, abs=1e-6)


def audit(*kinds: str, rule: str = "drill") -> list[dict[str, object]]:
    """Events of the victim, ten seconds apart."""
    return [
        {"rule": rule, "kind": kind, "time": BEGUN + 10.0 * number}
        for number, kind in enumerate(kinds, 1)
    ]


def test_a_step_that_was_taken_back_is_open_again() -> None:
    """A postponed end is due once more; another rule's events are none of the drill's."""
    events = audit("detected", "notified", "due", "postponed", "due", "authorised")
    assert drills.marks(events, "drill") == {
        "detected": 1010.0,
        "notified": 1020.0,
        "due": 1050.0,
        "authorised": 1060.0,
    }
    assert drills.marks(audit("detected", "notified", "notice_open"), "drill") == {
        "detected": 1010.0
    }
    assert drills.marks(audit("detected", rule="idle"), "drill") == {}
    done = drills.marks(audit("authorised", "verified"), "drill")
    assert done == {"authorised": 1010.0, "acting": 1020.0, "proven": 1020.0}


def result(
    names: int,
    *,
    span: float = 10.0,
    now: float | None = None,
    decision: str | None = None,
    there: bool = True,
    asked: bool = False,
) -> Result | None:
    """How a drill ended whose first steps took so long each."""
    ended = {name: BEGUN + span * number for number, name in enumerate(STEPS[:names], 1)}
    seen = ended.pop("seen", None)
    moment = BEGUN + span * names + 5.0 if now is None else now
    found = drills.steps(BEGUN, seen, ended, budgets=BUDGETS, now=moment)
    return drills.outcome(
        found,
        decision=decision,
        there=there,
        asked=asked,
        begun=BEGUN,
        now=moment,
        budgets=BUDGETS,
    )


def test_each_end_of_a_drill_has_its_name() -> None:
    """Proven in time, proven late, not proven, left, never seen, hanging; and still going on."""
    assert result(7) is Result.PASSED
    assert result(7, span=61.0) is Result.SLOW
    assert result(5) is None
    assert result(6, decision="incomplete") is Result.FAILED
    assert result(5, decision="failed") is Result.FAILED
    assert result(3, there=False) is Result.GONE
    # Its processes are gone, and the agent has yet to say so.
    assert result(6, decision="acting", there=False) is None
    assert result(0, asked=True, now=BEGUN + 119.0) is None
    assert result(0, asked=True, now=BEGUN + 121.0) is Result.SILENT
    assert result(3, now=BEGUN + drills.longest(BUDGETS) - 1) is None
    assert result(3, now=BEGUN + drills.longest(BUDGETS) + 1) is Result.STUCK


def test_only_a_proven_drill_is_a_success() -> None:
    """A slow one is, and its step pages by itself."""
    assert {item for item in Result if item.proven} == {Result.PASSED, Result.SLOW}


def test_the_sentence_names_the_slow_step_with_both_times() -> None:
    """So that the page says where to look."""
    found = drills.steps(
        BEGUN, BEGUN + 5, {"detected": BEGUN + 605}, budgets=BUDGETS, now=BEGUN + 606
    )
    text = drills.sentence("n7", Result.SLOW, found)
    assert text == "the drill on n7 was proven, but slow: detected took 10m of 4m"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{rule: drill, user: d, per_hour: 1, per_day: 1}", None),
        ("{rule: drill, user: d, per_hour: 1, per_day: 1, nodes: [n7], every: 1d}", None),
        ("{rule: drill, user: d, per_hour: 1}", "GW105"),
        ("{rule: drill, user: d, per_hour: -1, per_day: 1}", "GW109"),
        ("{rule: drill, user: '.*', per_hour: 1, per_day: 1}", "GW107"),
        ("{rule: drill, user: d, per_hour: 1, per_day: 1, nodes: [n7]}", "GW111"),
        ("{rule: drill, user: d, per_hour: 1, per_day: 1, every: 1d}", "GW111"),
    ],
)
def test_what_lets_a_drill_happen_has_no_default(
    text: str, code: str | None, tmp_path: Path
) -> None:
    """Limits are named, the user is one name, and a schedule is whole."""
    path = tmp_path / "drill.yaml"
    path.write_text(text)
    if code is None:
        load_file(DrillSettings, path)
        return
    with pytest.raises(InvalidInput, match=code):
        load_file(DrillSettings, path)


def test_the_shipped_rule_is_a_drills_rule() -> None:
    """deploy/examples/drill.yaml, beside the default rules, has no mistake."""
    root = Path(__file__).parents[2]
    paths = [root / "deploy/examples/drill.yaml", *sorted((root / "ruleengine/rules").glob("*"))]
    checked = check_rule_files(paths)
    assert checked.errors == ()
    assert checked.rules is not None
    rule = next(rule for rule in checked.rules.rules if rule.id == "drill")
    assert rule.mode is Mode.ENFORCE
    assert drills.rule_problem(rule, SETTINGS) == ""
    assert checked.rules.limits_of("drill") is None
