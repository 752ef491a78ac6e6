"""Asking before ending: checkpoint, yield, requeue and terminate in the life of one case."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from tests.ruleengine.test_cases import NO, PROVEN, UNKNOWN, YES, kinds, run

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.acts import ActState
from gpuwarden.ruleengine.cases import Case, CaseState, CloseReason, Delivery
from gpuwarden.ruleengine.model import Action, Rule

if TYPE_CHECKING:
    from gpuwarden.ruleengine.verdicts import Truth

RULE = soft_rule()


def following(case: Case, rule: Rule = RULE) -> str | None:
    """The key of the stage that takes the job's cards next."""
    found = cases.next_stage(case, rule)
    return None if found is None else found[0]


def saving(case: Case, rule: Rule = RULE) -> list[str]:
    """Keys of the stages that would ask for a saved state now."""
    return [key for key, _ in cases.asking_stages(case, rule)]


def due(rule: Rule = RULE, minutes: float = 10) -> Case:
    """A case of which the first stage that takes cards is due."""
    case = after(fresh(rule), minutes, rule).case
    assert case.state is CaseState.DUE
    return case


def test_a_saved_state_is_asked_for_once_and_without_a_notice() -> None:
    """It takes nothing, so it waits for no proof; and it changes no deadline."""
    case = run(fresh(RULE), *[YES] * 19, by=RULE, delivery=Delivery()).case
    assert saving(case) == []
    case = run(case, YES, YES, by=RULE, delivery=Delivery()).case
    assert (case.state, saving(case)) == (CaseState.DETECTED, [CHECKPOINT])
    before = cases.remaining(case, RULE)
    done = asked(case, RULE, CHECKPOINT, ActState.DONE)
    assert (done.state, done.decision_id, saving(done)) == (CaseState.DETECTED, None, [])
    assert cases.remaining(done, RULE) == before
    assert following(done) == YIELD


@pytest.mark.parametrize(
    "state",
    [ActState.DONE, ActState.UNHEEDED, ActState.UNDELIVERABLE, ActState.FAILED, ActState.SKIPPED],
)
def test_what_became_of_a_request_to_save_holds_nothing_back(state: ActState) -> None:
    """Saved or not, the next stage comes at its own time."""
    case = asked(after(fresh(RULE), 6, RULE).case, RULE, CHECKPOINT, state)
    assert saving(case) == []
    assert following(after(case, 4, RULE).case) == YIELD
    assert after(case, 4, RULE).case.state is CaseState.DUE


def test_a_request_to_save_that_never_arrived_is_made_twice_and_no_more() -> None:
    """A node that cannot ask is not asked for ever; one that was taken back counts for nothing."""
    case = after(fresh(RULE), 6, RULE).case
    for left in ([CHECKPOINT], [CHECKPOINT], [CHECKPOINT]):
        case = asked(case, RULE, CHECKPOINT, ActState.WITHDRAWN)
        assert saving(case) == left
    case = asked(case, RULE, CHECKPOINT, ActState.LAPSED)
    assert saving(case) == [CHECKPOINT]
    assert saving(asked(case, RULE, CHECKPOINT, ActState.LAPSED)) == []


def test_nothing_is_taken_while_a_job_may_still_save() -> None:
    """Where both are overdue, after a halt: first it saves, or its time for that is over."""
    case = asked(due(minutes=20), RULE, CHECKPOINT, ActState.ACTING)
    step = after(case, 2, RULE)
    assert (case.saving, step.case.state, kinds(step)) == (True, CaseState.NOTIFIED, ["postponed"])
    for state in (ActState.DONE, ActState.UNHEEDED, ActState.UNDELIVERABLE):
        answered = cases.settled(step.case, f"d-{CHECKPOINT}", state)
        assert after(answered, 1, RULE).case.state is CaseState.DUE


@pytest.mark.parametrize("mode", ["observe", "warn"])
def test_a_rule_that_does_not_enforce_writes_down_every_act_that_it_would_do(mode: str) -> None:
    """And asks nobody for anything."""
    rule = soft_rule(mode=mode)
    step = after(fresh(rule), 40, rule)
    acts = [kind for kind in kinds(step) if kind.startswith("would_") and kind != "would_notify"]
    assert acts == ["would_checkpoint", "would_yield", "would_requeue", "would_terminate"]
    assert (saving(step.case, rule), cases.remaining(step.case, rule)) == ([], None)


def test_every_stage_is_due_at_its_own_time_once_the_one_before_was_not_heeded() -> None:
    """The whole ladder: asked to leave, requeued without success, ended."""
    case = due()
    assert following(case) == YIELD
    leaving = asked(case, RULE, YIELD)
    assert (leaving.state, leaving.leaving, leaving.over) == (CaseState.AUTHORISED, True, False)
    case = cases.settled(leaving, f"d-{YIELD}", ActState.UNHEEDED)
    assert (case.state, case.decision_id, following(case)) == (CaseState.NOTIFIED, None, REQUEUE)
    assert after(case, 10, RULE).case.state is CaseState.NOTIFIED
    case = after(case, 12, RULE).case
    assert (case.state, following(case)) == (CaseState.DUE, REQUEUE)
    case, event = cases.skipped(case, REQUEUE, Action.REQUEUE, wall=2.0, why="no platform")
    assert (case.state, event.kind, following(case)) == (CaseState.NOTIFIED, "skipped", TERMINATE)
    assert after(case, 6, RULE).case.state is CaseState.NOTIFIED
    case = after(case, 12, RULE).case
    assert (case.state, following(case)) == (CaseState.DUE, TERMINATE)
    ended = asked(case, RULE, TERMINATE, ActState.VERIFIED)
    assert (ended.state, ended.over, following(ended)) == (CaseState.VERIFIED, True, None)


def test_a_job_that_left_when_it_was_asked_is_proven_and_done_with() -> None:
    """Nothing follows; the case closes when the job is gone."""
    left = asked(due(), RULE, YIELD, ActState.VERIFIED)
    assert (left.state, left.over) == (CaseState.VERIFIED, True)
    assert after(left, 60, RULE).case.state is CaseState.VERIFIED
    assert run(left, *[None] * 5, by=RULE).closed is CloseReason.GONE


def test_without_a_further_stage_a_job_that_stayed_stays_notified() -> None:
    """A refusal to leave is evidence, and no reason to do what no stage says."""
    rule = soft_rule("notify", "yield")
    case = asked(due(rule), rule, YIELD, ActState.UNHEEDED)
    assert (case.state, following(case, rule), cases.remaining(case, rule)) == (
        CaseState.NOTIFIED,
        None,
        None,
    )
    later = after(case, 600, rule)
    assert (later.case.state, later.events) == (CaseState.NOTIFIED, ())
    act = later.case.act(YIELD)
    assert act is not None
    assert act.state is ActState.UNHEEDED


def test_a_refused_request_to_leave_is_tried_again_once_and_then_the_case_goes_on() -> None:
    """The kinder way first; but a node that always refuses it protects nobody."""
    case = asked(due(), RULE, YIELD, ActState.REFUSED)
    assert (case.state, following(case), cases.remaining(case, RULE)) == (
        CaseState.REFUSED,
        YIELD,
        600.0,
    )
    case = after(case, 11, RULE).case
    assert (case.state, following(case)) == (CaseState.DUE, YIELD)
    case = asked(case, RULE, YIELD, ActState.REFUSED)
    assert following(case) == REQUEUE


def test_an_end_that_was_refused_is_tried_for_ever_and_never_made_softer() -> None:
    """Also where the softer stage's own condition comes to hold only then."""
    near = {"silent_for": "30m", "signals": ["cpu"]}
    rule = soft_rule("notify", "yield", "terminate", **{"yield": {"when": near}})
    case = after(fresh(rule), 40, rule).case
    assert (case.state, following(case, rule)) == (CaseState.DUE, TERMINATE)
    for _ in range(4):
        case = asked(case, rule, TERMINATE, ActState.REFUSED)
        assert following(case, rule) == TERMINATE
        case = after(case, 11, rule).case
        assert case.state is CaseState.DUE
    far = msgspec.structs.replace(
        case, grades=(dataclasses.replace(case.clock(YIELD), last="yes", held=9e9),)
    )
    assert following(far, rule) == TERMINATE


@pytest.mark.parametrize(
    ("state", "final"),
    [
        (ActState.VERIFIED, CaseState.VERIFIED),
        (ActState.INCOMPLETE, CaseState.INCOMPLETE),
        (ActState.FAILED, CaseState.FAILED),
    ],
)
def test_a_requeue_is_an_end_and_nothing_follows_it(state: ActState, final: CaseState) -> None:
    """An attempt is ended at most once, whatever came of it."""
    rule = soft_rule("notify", "requeue", "terminate")
    case = asked(due(rule, 24), rule, REQUEUE, state)
    assert (case.state, case.over) == (final, True)
    assert after(case, 60, rule).case.state is final


def test_a_notice_goes_on_counting_while_a_job_is_leaving() -> None:
    """The next stage's notice is as old as it is; a new recipient makes it young again."""
    leaving = asked(due(), RULE, YIELD)
    later = after(leaving, 5, RULE).case
    assert later.state is CaseState.AUTHORISED
    assert later.notice_age == leaving.notice_age + 300
    untold = run(later, YES, by=RULE, delivery=Delivery())
    assert (kinds(untold), untold.case.notified_at) == (["notice_open"], None)
    stayed = cases.settled(untold.case, f"d-{YIELD}", ActState.UNHEEDED)
    assert stayed.state is CaseState.DETECTED
    again = run(untold.case, YES, by=RULE).case
    assert (again.state, again.notice_age) == (CaseState.AUTHORISED, 0.0)


def test_what_lies_ahead_is_told_in_order_and_nothing_of_what_was_done() -> None:
    """While a job may still leave, nothing harder is announced for before that."""

    def ahead(case: Case, now: float, rule: Rule = RULE) -> list[tuple[str, float]]:
        return [(key, seconds) for key, _, seconds in cases.upcoming(case, rule, now=now)]

    told = after(fresh(RULE), 3, RULE).case
    elapsed = told.elapsed
    assert ahead(told, 0.0) == [
        (CHECKPOINT, 240 - elapsed),
        (YIELD, 480 - elapsed),
        (REQUEUE, 1200 - elapsed),
        (TERMINATE, 1800 - elapsed),
    ]
    assert ahead(told, 0.0, soft_rule(mode="warn")) == []
    leaving = asked(after(fresh(RULE), 24, RULE).case, RULE, YIELD)
    # Asked at 1 s, it has ten minutes; both later stages are due by their own time, or nearly so.
    assert ahead(leaving, 31.0) == [(REQUEUE, 570.0), (TERMINATE, 570.0)]
    assert ahead(asked(leaving, RULE, TERMINATE), 31.0) == []


def test_what_was_told_binds_for_each_stage() -> None:
    """A stricter rule brings none of the announced acts forward, and shortens no time to leave."""
    told = after(fresh(RULE), 6, RULE).case
    strict = soft_rule(
        **{
            "checkpoint": {"after": "2m"},
            "yield": {"after": "3m", "grace": "5m", "notice_delivered_for": "1m"},
            "requeue": {"after": "4m"},
            "terminate": {"after": "5m"},
        }
    )
    found = {key: cases.terms(told, key, stage) for key, stage in strict.acting_stages}
    assert {key: item.after / 60 for key, item in found.items()} == {
        CHECKPOINT: 4,
        YIELD: 8,
        REQUEUE: 20,
        TERMINATE: 30,
    }
    assert (found[YIELD].grace, found[YIELD].notice_delivered_for) == (600, 300)
    assert found[CHECKPOINT].grace == 300


def test_a_stage_that_the_notice_did_not_name_is_never_due() -> None:
    """A rule that learns to end jobs tells their owners first."""
    soft = soft_rule("notify", "yield")
    told = after(fresh(soft), 6, soft).case
    assert following(after(told, 60, RULE).case) == YIELD
    stayed = asked(after(told, 6, RULE).case, RULE, YIELD, ActState.UNHEEDED)
    assert after(stayed, 120, RULE).case.state is CaseState.NOTIFIED


def test_a_keep_moves_every_stage_and_takes_back_the_request_to_leave() -> None:
    """The owner gets the whole time, and what was asked meanwhile is asked again after it."""
    leaving = after(asked(due(), RULE, YIELD), 2, RULE).case
    kept, _ = cases.kept(leaving, RULE, 3600.0)
    assert cases.withdrawal(kept, RULE, kept=True) == "the job is kept"
    back = cases.settled(kept, f"d-{YIELD}", ActState.WITHDRAWN)
    assert (back.state, following(back)) == (CaseState.NOTIFIED, YIELD)
    assert cases.remaining(back, RULE) == 3600.0
    assert cases.terms(back, TERMINATE, RULE.stages[-1]).after == 1800 + back.kept
    assert cases.terms(back, CHECKPOINT, RULE.stages[2]).after == 240 + back.kept


@pytest.mark.parametrize(
    ("mode", "truths", "why"),
    [
        ("enforce", [YES], ""),
        ("enforce", [NO] * 3, ""),
        ("enforce", [UNKNOWN] * 30, ""),
        ("enforce", [NO] * 5, "the rule is kept again"),
        ("warn", [YES], "the rule's mode is warn"),
        ("observe", [YES], "the rule's mode is observe"),
    ],
)
def test_a_request_is_taken_back_when_its_reason_is_gone(
    mode: str, truths: list[Truth], why: str
) -> None:
    """A case that clears, a rule that only observes; but not a short NO, nor what is not known."""
    leaving = asked(due(), RULE, YIELD)
    rule = soft_rule(mode=mode)
    case = run(leaving, *truths, by=rule).case
    assert cases.withdrawal(case, rule, kept=False) == why


def test_a_request_of_a_closed_case_or_a_lost_rule_is_taken_back() -> None:
    """Nobody answers for it any more."""
    assert cases.withdrawal(None, RULE, kept=False) == "the case is closed"
    assert cases.withdrawal(due(), None, kept=False) == "the rule is no longer in force"


def test_a_case_that_clears_while_its_job_is_leaving_closes_once_it_was_taken_back() -> None:
    """Not before: the answer of whoever was asked comes first."""
    leaving = asked(due(), RULE, YIELD)
    assert run(leaving, *[NO] * 50, by=RULE).closed is None
    back = cases.settled(run(leaving, *[NO] * 5, by=RULE).case, f"d-{YIELD}", ActState.WITHDRAWN)
    assert run(back, NO, by=RULE).closed is CloseReason.CLEARED


def test_a_case_with_acts_survives_its_own_encoding() -> None:
    """What the ledger gives back is what it got."""
    saved = asked(after(fresh(RULE), 6, RULE).case, RULE, CHECKPOINT, ActState.DONE)
    case = asked(after(saved, 4, RULE).case, RULE, YIELD)
    assert Case.decode(case.encode()) == case


def test_a_case_of_a_ledger_without_softer_stages_goes_on_as_it_was() -> None:
    """Its promise is that of the stage that ends the job, and so is its decision."""
    rule = soft_rule("log", "notify", "terminate")
    now = due(rule, 40)
    old = json.loads(now.encode())
    (promise,) = old.pop("promises")
    del old["acts"], promise["key"]
    body = json.dumps(old | {"promise": promise | {"after": 2400.0}})
    case = Case.decode(body)
    told = case.promise_of(TERMINATE)
    assert told is not None
    assert (told.after, told.grace) == (2400.0, 60.0)
    assert case.state is CaseState.DUE
    acting = json.dumps(
        old | {"promise": promise, "state": "acting", "decision_id": "d-1", "acts": []}
    )
    case = Case.decode(acting)
    assert (case.over, case.leaving) == (True, False)
    for state in (ActState.VERIFIED, ActState.FAILED, ActState.INCOMPLETE):
        assert cases.settled(case, "d-1", state).state.value == state.value
    refused = cases.settled(case, "d-1", ActState.REFUSED)
    assert (refused.state, refused.decision_id) == (CaseState.REFUSED, None)
    assert following(refused, rule) == TERMINATE


_TRUTHS = st.sampled_from([YES] * 9 + [NO, UNKNOWN, None])
_PROVEN = st.sampled_from([True] * 5 + [False])
_ANSWERS = st.sampled_from(
    [
        None,
        ActState.ACTING,
        ActState.VERIFIED,
        ActState.UNHEEDED,
        ActState.REFUSED,
        ActState.LAPSED,
        ActState.FAILED,
        ActState.INCOMPLETE,
        ActState.UNDELIVERABLE,
        ActState.WITHDRAWN,
    ]
)
_RULES = st.sets(st.sampled_from(["checkpoint", "yield", "requeue", "terminate"]), min_size=1).map(
    lambda names: soft_rule(
        *(
            n
            for n in ("log", "notify", "checkpoint", "yield", "requeue", "terminate")
            if n in names or n in ("log", "notify")
        )
    )
)


@settings(max_examples=150, deadline=None)
@given(
    rule=_RULES,
    history=st.lists(
        st.tuples(_TRUTHS, st.integers(1, 80), _PROVEN, _ANSWERS), min_size=5, max_size=40
    ),
)
def test_whatever_happens_acts_keep_their_order_their_times_and_their_notices(
    rule: Rule, history: list[tuple[Truth | None, int, bool, ActState | None]]
) -> None:
    """None without a YES now, before its time or notice, or after a harder one; one end at most."""
    case: Case | None = None
    decided: list[Action] = []
    names = dict(rule.keyed_stages)
    for truth, ticks, proven, answer in history:
        if case is None:
            case, decided = fresh(rule), []
        delivery = PROVEN if proven else Delivery()
        step = run(case, *[truth] * ticks, by=rule, delivery=delivery)
        if step.closed:
            case = None
            continue
        case = step.case
        for key, stage in cases.asking_stages(case, rule):
            assert truth is YES
            assert case.elapsed >= stage.after
            assert all(not done.takes for done in decided)
            case = asked(case, rule, key, answer)
        saves = [act for act in case.acts if act.open and act.do == "checkpoint"]
        for act in saves if answer is not None else ():
            case = cases.settled(case, act.decision_id, answer or ActState.DONE)
        if case.state is CaseState.DUE and not case.saving:
            found = cases.next_stage(case, rule)
            assert found is not None
            key, stage = found
            assert (truth, stage.do.takes) == (YES, True)
            assert case.notified_at is not None
            assert case.notice_age >= (stage.notice_delivered_for or 0)
            assert case.elapsed >= names[key].after
            assert all(stage.do.rank >= done.rank for done in decided)
            earlier = case.act(key)
            assert earlier is None or not earlier.spent
            assert earlier is None or not earlier.open
            if answer is not None:  # else a limit defers it
                case = asked(case, rule, key)
                decided.append(stage.do)
        elif case.state in cases.OPEN_DECISION and answer is not None:
            case = cases.settled(case, case.decision_id or "", answer)
        if case.over and case.state not in cases.OPEN_DECISION:
            finals = [act for act in case.acts if act.decision_id == case.decision_id]
            assert [act.do for act in finals] == [decided[-1]]
            assert cases.asking_stages(case, rule) == ()
