"""The state machine of one case, tick by tick, as a pure function."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.acts import ActState
from gpuwarden.ruleengine.cases import Case, CaseState, CloseReason, Delivery, Step
from gpuwarden.ruleengine.model import Rule
from gpuwarden.ruleengine.verdicts import Truth

TICK = 15.0
PROVEN = Delivery(complete=True, proven_at=5.0)
YES, NO, UNKNOWN = Truth.YES, Truth.NO, Truth.UNKNOWN


def rule(mode: str = "enforce", **changes: object) -> Rule:
    """A rule whose `for` is 1m, notice 2m, end 8m after; the notice must be 5m old."""
    final = {
        "level": "severe",
        "after": "8m",
        "do": "terminate",
        "notice_delivered_for": "5m",
        "grace": "60s",
        "max_work_lost": "1h",
        **changes,
    }
    return Rule.model_validate(
        {
            "id": "idle",
            "mode": mode,
            "target": "job",
            "cold_start": "60s",
            "when": {
                "signal": "gpu_utilization",
                "agg": "max",
                "window": "1m",
                "at_most": "5%",
                "gpus": "all",
            },
            "for": "1m",
            "clear_after": "1m",
            "stages": [
                {"level": "light", "after": "0s", "do": "log"},
                {
                    "level": "moderate",
                    "after": "2m",
                    "do": "notify",
                    "owner_may": {"keep": "1h", "times": 1},
                },
                final,
            ],
        }
    )


def run(
    case: Case,
    *truths: Truth | None,
    by: Rule | None = None,
    delivery: Delivery = PROVEN,
    delta: float = TICK,
) -> Step:
    """Advance by one tick for each truth; returns the last step with all events."""
    events: list[cases.Event] = []
    step = Step(case)
    for truth in truths:
        step = cases.advance(
            step.case,
            by or rule(),
            truth=truth,
            grades=(),
            delta=delta,
            wall=10.0,
            delivery=delivery,
        )
        events += step.events
        if step.closed is not None:
            break
    return Step(step.case, tuple(events), step.closed)


def fresh() -> Case:
    """A case at its first YES."""
    return cases.opened(rule(), "proc-1", wall=0.0)


def due() -> Case:
    """A case whose deadlines are over."""
    step = run(fresh(), *[YES] * 60)
    assert step.case.state is CaseState.DUE
    return step.case


def decided() -> Case:
    """A case whose end is on disk."""
    return cases.authorised(due(), rule(), "d", key="severe-terminate", wall=1.0)


def kinds(step: Step) -> list[str]:
    """The events of a step."""
    return [event.kind for event in step.events]


def test_for_needs_unbroken_time() -> None:
    """One minute of YES at 15 s ticks: detected at the fourth tick after the first."""
    assert run(fresh(), *[YES] * 3).case.state is CaseState.WATCHING
    assert run(fresh(), *[YES] * 4).case.state is CaseState.DETECTED


def test_a_no_ends_a_suspicion_without_a_word() -> None:
    """Before `for` is met a NO closes at once, and nothing is written."""
    step = run(fresh(), YES, YES, NO)
    assert step.closed is CloseReason.CLEARED
    assert step.events == ()


def test_unknown_freezes_the_clock_of_for() -> None:
    """Unknown time is neither good nor bad; the tick after it does not count either."""
    step = run(fresh(), YES, YES, *[UNKNOWN] * 20, YES)
    assert step.case.yes_for == 2 * TICK
    assert step.closed is None


def test_more_than_ten_minutes_of_unknown_close() -> None:
    """Nothing hangs on old knowledge."""
    assert run(due(), *[UNKNOWN] * 41).closed is None
    assert run(due(), *[UNKNOWN] * 42).closed is CloseReason.UNKNOWN


def test_a_detected_case_clears_only_after_clear_after() -> None:
    """A short NO does not clear, and time goes on; a long one does."""
    found = run(fresh(), *[YES] * 4).case
    assert run(found, NO, NO, NO, YES).case.state is CaseState.DETECTED
    assert run(found, *[NO] * 5).closed is CloseReason.CLEARED


def test_unknown_freezes_the_clock_of_clear_after_too() -> None:
    """Gaps in the data do not keep a case open that says NO whenever anything is known."""
    found = run(fresh(), *[YES] * 4).case
    step = run(found, *[NO, NO, UNKNOWN, None] * 3)
    assert step.closed is None
    assert run(step.case, NO, NO).closed is CloseReason.CLEARED
    assert run(step.case, YES, NO, NO).closed is None


def test_a_missing_job_closes_after_a_minute() -> None:
    """Two missed scrapes are label churn, a minute is an end."""
    found = run(fresh(), *[YES] * 4).case
    assert run(found, None, None, YES).closed is None
    assert run(found, *[None] * 5).closed is CloseReason.GONE


def test_the_whole_way_to_due() -> None:
    """Each step once, in order."""
    assert kinds(run(fresh(), *[YES] * 60)) == ["detected", "log", "notify", "notified", "due"]


def test_no_proof_no_due() -> None:
    """The deadline starts with the proof: without it the case stays detected for ever."""
    step = run(fresh(), *[YES] * 400, delivery=Delivery())
    assert step.case.state is CaseState.DETECTED
    assert cases.remaining(step.case, rule()) == 5 * 60


def test_both_deadlines_must_be_over() -> None:
    """A notice that was proven late moves the end."""
    late = run(fresh(), *[YES] * 60, delivery=Delivery()).case
    proven = run(late, YES).case
    assert proven.state is CaseState.NOTIFIED
    assert run(proven, *[YES] * 19).case.state is CaseState.NOTIFIED
    assert run(proven, *[YES] * 20).case.state is CaseState.DUE


def test_the_age_of_a_notice_is_that_of_the_last_required_proof() -> None:
    """A recipient who comes up later starts it anew, and so does a proof that came later."""
    told = run(fresh(), *[YES] * 30).case
    assert told.notice_age > 0
    open_ = run(told, YES, delivery=Delivery())
    assert kinds(open_) == ["notice_open"]
    assert open_.case.state is CaseState.DETECTED
    assert run(open_.case, *[YES] * 40, delivery=Delivery()).case.state is CaseState.DETECTED
    again = run(open_.case, YES)
    assert (again.case.state, again.case.notice_age) == (CaseState.NOTIFIED, 0.0)
    later = run(told, YES, delivery=Delivery(complete=True, proven_at=6.0))
    assert kinds(later) == ["notice_open", "notified"]
    assert (later.case.notified_at, later.case.notice_age) == (6.0, 0.0)


def test_a_due_case_that_is_no_longer_true_goes_back() -> None:
    """Only an unbroken YES stays due."""
    step = run(due(), UNKNOWN)
    assert step.case.state is CaseState.NOTIFIED
    assert kinds(step) == ["postponed"]


def test_observe_and_warn_write_down_what_they_would_do() -> None:
    """Observe tells nobody; warn tells; neither ends."""
    observed = run(fresh(), *[YES] * 60, by=rule("observe"))
    warned = run(fresh(), *[YES] * 60, by=rule("warn"))
    assert kinds(observed) == ["detected", "log", "would_notify", "would_terminate"]
    assert kinds(warned) == ["detected", "log", "notify", "notified", "would_terminate"]
    assert cases.remaining(warned.case, rule("warn")) is None


def test_a_notice_of_a_warning_carries_no_deadline() -> None:
    """When the mode becomes enforce, the owner is told anew, and the full notice time runs."""
    warned = run(fresh(), *[YES] * 60, by=rule("warn")).case
    told = run(warned, YES, by=rule("enforce"), delivery=Delivery())
    assert kinds(told) == ["notify"]
    assert told.case.notified_at is None
    waits = run(told.case, *[YES] * 20).case
    assert waits.state is CaseState.NOTIFIED
    assert run(waits, YES, YES).case.state is CaseState.DUE


@pytest.mark.parametrize(
    "changes", [{"after": "3m"}, {"notice_delivered_for": "1m"}, {"grace": "1s"}]
)
def test_a_stricter_rule_shortens_no_promise(changes: dict[str, str]) -> None:
    """What was told is a floor for each of the terms."""
    told = run(fresh(), *[YES] * 14).case
    stricter = rule(**changes)
    assert cases.terms(told, "severe-terminate", stricter.stages[-1]) == cases.Promise(
        8 * 60, 5 * 60, 60
    )


def test_what_an_undelivered_notice_said_meanwhile_binds_as_well() -> None:
    """Each tick renders it by the rule in force; which of them was read cannot be known."""
    told = run(fresh(), *[YES] * 14, delivery=Delivery()).case
    milder = run(told, YES, by=rule(after="2h"), delivery=Delivery()).case
    assert milder.promises == (cases.Promise(7200, 5 * 60, 60),)
    proven = run(milder, YES).case
    assert run(proven, YES, by=rule(after="4h")).case.promises == milder.promises


def test_a_promise_outlives_a_time_of_warning() -> None:
    """Enforce, warn, and enforce again with an earlier end: the first word stands."""
    told = run(fresh(), *[YES] * 14).case
    warned = run(told, YES, by=rule("warn")).case
    again = run(warned, YES, by=rule(after="3m"), delivery=Delivery()).case
    assert again.promises == told.promises
    assert again.notified_at is None


def test_a_milder_rule_counts_at_once() -> None:
    """A later deadline helps the owner, so it holds."""
    told = run(fresh(), *[YES] * 14).case
    later = rule(after="1h").stages[-1]
    assert cases.terms(told, "severe-terminate", later).after == 3600


def test_a_keep_moves_the_deadline_also_when_it_is_over() -> None:
    """An overdue case gets the whole time that was granted, from now on."""
    before = msgspec.structs.replace(due(), elapsed=1000.0)
    case, events = cases.kept(before, rule(), 3600.0)
    assert case.state is CaseState.NOTIFIED
    assert [event.kind for event in events] == ["postponed", "kept"]
    assert cases.remaining(case, rule()) == 3600.0


def test_a_decision_in_flight_is_not_closed_under_the_agent() -> None:
    """Whatever the job does meanwhile, the agent's answer comes first."""
    acting = cases.settled(decided(), "d", ActState.ACTING)
    assert run(acting, *[None] * 50).closed is None
    assert run(acting, *[NO] * 50).closed is None
    assert (
        run(cases.settled(acting, "d", ActState.VERIFIED), *[None] * 5).closed is CloseReason.GONE
    )


def test_a_refusal_waits_ten_minutes() -> None:
    """The agent is not asked again and again."""
    refused = cases.settled(decided(), "d", ActState.REFUSED)
    assert run(refused, *[YES] * 39).case.state is CaseState.REFUSED
    assert refused.decision_id is None
    assert cases.remaining(refused, rule()) == 600
    assert run(refused, *[YES] * 41).case.state is CaseState.DUE


def test_after_a_refusal_a_notice_without_proof_is_waited_for() -> None:
    """The wait is over, the proof is not there: detected, not notified for ever."""
    refused = cases.settled(decided(), "d", ActState.REFUSED)
    untold = run(refused, *[YES] * 41, delivery=Delivery()).case
    assert untold.state is CaseState.DETECTED
    assert run(untold, *[YES] * 21).case.state is CaseState.DUE


def test_the_budget_of_trust_is_spent_once() -> None:
    """Within it the job's word counts; past it, it is as if it had said nothing."""
    assert cases.budgeted(NO, YES, spent=10.0, trust_for=60.0) is NO
    assert cases.budgeted(UNKNOWN, YES, spent=60.0, trust_for=60.0) is YES
    assert cases.budgeted(YES, YES, spent=0.0, trust_for=60.0) is YES


def test_a_case_survives_its_own_encoding() -> None:
    """What the ledger gives back is what it got."""
    case = cases.authorised(due(), rule(), "d-1", key="severe-terminate", wall=7.0)
    assert Case.decode(case.encode()) == case


def test_a_field_of_another_version_is_ignored() -> None:
    """A ledger may outlive a version of the engine, in either direction."""
    text = fresh().encode().replace('"kept":0.0,', '"colour":"blue",')
    assert Case.decode(text) == fresh()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([YES, NO, UNKNOWN, None]), st.booleans(), st.floats(0, 45)),
        max_size=150,
    )
)
def test_due_is_never_reached_early_nor_without_proof(
    history: list[tuple[Truth | None, bool, float]],
) -> None:
    """Whatever the history: due means proven, both deadlines over, and YES right now."""
    case: Case | None = None
    passed = 0.0
    for truth, proven, delta in history:
        if case is None:
            if truth is YES:
                case, passed = fresh(), 0.0
            continue
        passed += delta
        step = cases.advance(
            case,
            rule(),
            truth=truth,
            grades=(),
            delta=delta,
            wall=passed,
            delivery=PROVEN if proven else Delivery(),
        )
        case = None if step.closed else step.case
        if case is not None and case.state is CaseState.DUE:
            assert truth is YES
            assert case.notified_at is not None
            assert passed >= case.elapsed >= 8 * 60
            assert case.notice_age >= 5 * 60
