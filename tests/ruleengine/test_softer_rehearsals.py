"""What stages do beside ending: foretold, tried on made-up histories, replayed and compared."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.ruleengine.rehearsing import RULES, checked, failures, run
from tests.ruleengine.replaying import made, plan, replayed, switched_on
from tests.ruleengine.softer import (
    CHECKPOINT,
    REQUEUE,
    TERMINATE,
    YIELD,
    after,
    asked,
    fresh,
    soft_rule,
)
from tests.ruleengine.test_cases import PROVEN, TICK, YES
from tests.ruleengine.test_cases import run as ticks

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.acts import ActState
from gpuwarden.ruleengine.cases import CaseState, Delivery
from gpuwarden.ruleengine.forecasts import forecasts
from gpuwarden.ruleengine.histories import history
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.replay_reports import document
from gpuwarden.ruleengine.replay_texts import blocks, markdown
from gpuwarden.ruleengine.rule_differences import differences
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.ruleengine.cases import Case

NOW = 1_800_000_000.0
RULE = soft_rule()
LADDER = RULES.replace(
    "  - {level: severe, after: 20m, do: terminate,",
    "  - {level: moderate, after: 8m, do: checkpoint}\n"
    "  - {level: severe, after: 12m, do: yield, notice_delivered_for: 5m, grace: 5m}\n"
    "  - {level: severe, after: 20m, do: terminate,",
)


def foretold(case: Case, mode: str = "enforce") -> dict[str, float | None]:
    """Kind -> seconds from now."""
    found = forecasts(case, soft_rule(mode=mode), now=NOW)
    return {item.kind: item.seconds for item in found}


def test_every_act_is_foretold_at_its_own_time() -> None:
    """From the first YES on, each once."""
    found = foretold(fresh(RULE))
    minutes = {kind: seconds / 60 for kind, seconds in found.items() if seconds is not None}
    assert minutes == {
        "found": 1,
        "log": 1,
        "notify": 3,
        "checkpoint": 5,
        "yield": 9,
        "requeue": 21,
        "terminate": 31,
    }


@pytest.mark.parametrize("mode", ["observe", "warn"])
def test_what_is_only_written_down_is_foretold_as_such(mode: str) -> None:
    """Nobody is frightened by it."""
    found = set(foretold(fresh(RULE), mode))
    assert found >= {"would_checkpoint", "would_yield", "would_requeue", "would_terminate"}


def test_what_was_done_is_not_foretold_again_and_nothing_softer_either() -> None:
    """While the job is leaving, its answer and what follows if it stays."""
    case = asked(after(fresh(RULE), 6, RULE).case, RULE, CHECKPOINT, ActState.DONE)
    assert "checkpoint" not in foretold(case)
    leaving = asked(after(case, 6, RULE).case, RULE, YIELD)
    found = foretold(leaving)
    assert (list(found), found["answer"]) == (["answer", "requeue", "terminate"], None)
    ended = asked(after(leaving, 30, RULE).case, RULE, TERMINATE)
    assert list(foretold(ended)) == ["answer"]


def test_what_is_foretold_happens_and_not_before() -> None:
    """The case is led on by the real state machine, and asked as soon as it may be."""
    case = fresh(RULE)
    promised = {kind: at for kind, at in foretold(case).items() if kind in acts_of_rule()}
    happened: dict[str, float] = {}
    for number in range(1, 140):
        told = case.mark("moderate-notify") is not None
        case = ticks(case, YES, by=RULE, delivery=PROVEN if told else Delivery()).case
        for key, stage in cases.asking_stages(case, RULE):
            happened[stage.do.value] = number * TICK
            case = asked(case, RULE, key, ActState.DONE)
        following = cases.next_stage(case, RULE)
        if case.state is CaseState.DUE and following is not None:
            happened[following[1].do.value] = number * TICK
            state = None if following[0] == TERMINATE else ActState.UNHEEDED
            case = asked(case, RULE, following[0], state)
    assert promised.keys() == happened.keys()
    late = {kind: happened[kind] - (at or 0.0) for kind, at in promised.items()}
    assert all(0 <= seconds <= 2 * TICK for seconds in late.values()), late
    assert {act.key for act in case.acts} == {CHECKPOINT, YIELD, REQUEUE, TERMINATE}


def acts_of_rule() -> set[str]:
    """What the stages of the rule do to a job."""
    return {stage.do.value for _, stage in RULE.acting_stages}


TESTS = """
tests:
- name: asked before it is ended
  jobs:
  - {job: proc-stays, user: ana, like: idle}
  - {job: proc-wakes, user: ben, like: idle, then: [{at: 26m, like: healthy, log: true}]}
  kill_switch: [{from: 18m, until: 20m}]
  expect:
  - {at: 18m, rule: idle, job: proc-stays, act: none, stage: moderate-notify}
  - {at: 21m, rule: idle, job: proc-stays, act: checkpoint, stage: moderate-checkpoint}
  - {at: 21m, rule: idle, job: proc-wakes, act: checkpoint}
  - {at: 25m, rule: idle, job: proc-stays, act: yield, stage: severe-yield, terminate: false}
  - {at: 40m, rule: idle, job: proc-stays, act: terminate, terminate: true}
  - {at: 40m, rule: idle, job: proc-wakes, verdict: no, stage: none, terminate: false}
"""


def test_an_inline_test_sees_what_was_asked_before_the_end(tmp_path: Path) -> None:
    """Nothing is asked while the kill switch is on; who is at work again is asked no more."""
    assert failures(run(tmp_path, TESTS, LADDER)) == []


def test_an_inline_test_tells_what_was_done_instead(tmp_path: Path) -> None:
    """A wrong expectation is not met, in either direction."""
    wrong = TESTS.replace("act: none", "act: yield").replace("act: terminate,", "act: requeue,")
    assert failures(run(tmp_path, wrong, LADDER)) == [
        (0, "act", "none"),
        (4, "act", "terminate"),
    ]
    odd = checked(tmp_path, TESTS.replace("act: none", "act: leave"), LADDER)
    assert "GW104" in {item.code for item in odd.diagnostics}


KEPT = """
tests:
- name: nothing is asked of a job that is kept
  jobs: [{job: proc-stays, user: ana, like: idle}]
  keeps: [{at: 16m, rule: idle, job: proc-stays, for: 10m}]
  expect:
  - {at: 34m, rule: idle, job: proc-stays, act: none}
  - {at: 37m, rule: idle, job: proc-stays, act: yield, stage: severe-yield}
"""


def test_a_trainer_is_asked_nothing_while_its_job_is_kept(tmp_path: Path) -> None:
    """As live: the keep runs to the next end that was announced, and 10 minutes on."""
    ladder = LADDER.replace("do: notify}", "do: notify, owner_may: {keep: 15m, times: 2}}")
    assert failures(run(tmp_path, KEPT, ladder)) == []


def test_a_replay_counts_requests_beside_ends(tmp_path: Path) -> None:
    """Whoever is asked to leave is taken to have stayed; the ends are those without asking."""
    jobs = [
        {"job": "proc-1", "user": "ana", "like": "idle"},
        {"job": "proc-2", "user": "ben", "like": "idle", "begins": "5m"},
    ]
    test = made("50m", jobs)
    sets: list[RuleSet] = []
    for name, text in (("ladder.yaml", LADDER), ("plain.yaml", RULES)):
        (tmp_path / name).write_text(text)
        sets.append(switched_on(load_rule_files([tmp_path / name])))

    async def both() -> dict[str, Any]:
        async with temporary_prometheus(history(test)) as url:
            asking, plain = [document(await replayed(plan(url, test), rules)) for rules in sets]
        assert asking["totals"]["requests"] == {"checkpoint": 2, "yield": 2}
        assert plain["totals"]["requests"] == {"checkpoint": 0, "yield": 0}
        ends = [
            [(row["job"], row["at"], row["do"]) for row in report["terminations"]]
            for report in (asking, plain)
        ]
        assert ends[0] == ends[1]
        assert len(ends[0]) == 2
        return asking

    text = markdown(blocks(asyncio.run(both()), []))
    assert "trainers asked to save 2 times, to leave 2 times (taken as not heeded)" in text


def test_the_difference_of_rules_knows_what_a_softer_stage_is() -> None:
    """Asking first is neither stricter nor laxer; asking where nothing was done is stricter."""

    def effects(old: tuple[str, ...], new: tuple[str, ...]) -> dict[str, str]:
        sets = [RuleSet(version=1, rules=(soft_rule(*names),)) for names in (old, new)]
        found = differences(*sets)
        return {c.part: c.effect.value for rule in found for c in rule.changes}

    told, ended = ("log", "notify"), ("log", "notify", "terminate")
    soft = ("log", "notify", "checkpoint", "yield", "terminate")
    assert effects(ended, soft) == {
        f"stages.{CHECKPOINT}": "different",
        f"stages.{YIELD}": "different",
    }
    assert effects(told, (*told, "yield")) == {f"stages.{YIELD}": "stricter"}
    assert effects(soft, told)[f"stages.{TERMINATE}"] == "laxer"


def test_an_explanation_says_what_each_stage_does_and_when() -> None:
    """With the earliest moment of each, in order."""
    found = explain_rule(RULE, RuleSet(version=1, rules=(RULE,)), scrape_interval=5)
    times = [stage["earliest"] for stage in found["stages"]]
    assert times == sorted(times)
    text = "\n".join(explanation_lines(found))
    for words in (
        "severe-yield: the trainer is asked to leave after its epoch, and is queued again",
        "which may take 10m; no signal follows",
        "moderate-checkpoint: the trainer is asked to save now",
        "severe-requeue: the job's platform ends it, and starts it again later",
    ):
        assert words in text
