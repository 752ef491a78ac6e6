"""The life of one case: a rule against a job, from the first YES to the proof or the end.

Pure: every function takes the case, the rule, what was observed and how much time has passed, and
returns the next case with the events to write down. Time is accumulated tick by tick from the
monotonic clock and travels with the case, so that neither a restart nor an outage nor a jump of the
wall clock ever advances a deadline.

::

    watching -> detected -> notified -> due -> authorised -> acting -> verified
                                                                    `-> incomplete | failed
                                               `-> refused (waits, then notified again)

A request to leave that is not heeded goes back to notified, and the case on to its next stage. A
request to save changes nothing of this: it only stands among the case's acts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from gpuwarden.ruleengine.acts import (
    LAST_STAGE,
    Act,
    ActState,
    Promise,
    with_act,
)
from gpuwarden.ruleengine.case_records import (
    DECIDED,
    OPEN_DECISION,
    Case,
    CaseState,
    CloseReason,
    Delivery,
    Event,
    StageMark,
    Step,
)
from gpuwarden.ruleengine.deadlines import (
    ahead,
    asking_stages,
    far_enough,
    lacking,
    leaving_for,
    next_stage,
    reached,
    ready,
    remaining,
    remaining_of,
    terms,
    upcoming,
)
from gpuwarden.ruleengine.grade_clocks import UNKNOWN_LIMIT_SECONDS
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.ruleengine.model import Rule, Stage
    from gpuwarden.ruleengine.verdicts import Grade

__all__ = [
    "DECIDED",
    "OPEN_DECISION",
    "Case",
    "CaseState",
    "CloseReason",
    "Delivery",
    "Event",
    "Promise",
    "StageMark",
    "Step",
    "ahead",
    "asking_stages",
    "far_enough",
    "lacking",
    "leaving_for",
    "next_stage",
    "remaining",
    "remaining_of",
    "terms",
    "upcoming",
]

_Said = TypeVar("_Said")

GONE_AFTER_SECONDS = 60.0
"""A job that is missing from a lit node for this long has ended; shorter gaps are label churn."""

RETRY_REFUSED_SECONDS = 600.0
"""How long a case that the agent refused waits before it may be tried again."""


def budgeted(trusted: _Said, untrusted: _Said, *, spent: float, trust_for: float) -> _Said:
    """The truth or verdict that counts, given how long its own word has already protected a job.

    Args:
        trusted: with what the job says of itself.
        untrusted: without it.
        spent: seconds for which its word alone made the difference, in this attempt and rule.
        trust_for: the rule's budget in seconds; never refilled.
    """
    if trusted is not untrusted and spent >= trust_for:
        return untrusted
    return trusted


def opened(rule: Rule, job_id: str, *, wall: float) -> Case:
    """A case at its first YES: the clock of `for` starts at 0."""
    return Case(rule_id=rule.id, job_id=job_id, opened_at=wall)


def advance(  # the order of the rows is the state machine
    case: Case,
    rule: Rule,
    *,
    truth: Truth | None,
    grades: Sequence[Grade],
    delta: float,
    wall: float,
    delivery: Delivery,
    worded: bool = False,
) -> Step:
    """Move a case by one tick.

    Args:
        case: as the last tick left it.
        rule: as it now reads.
        truth: the verdict, or None where the job is missing from a lit node.
        grades: the verdict's, of the stages that have a condition of their own; a stage that is
            missing here is not known.
        delta: seconds since the last completed tick, already capped by the caller.
        wall: Unix time, for the record only.
        delivery: what is known of the case's notices.
        worded: whether it would be YES but for what the job says of itself. Its word stops every
            clock, and neither turns one back nor closes the case: else each word would cost the
            whole time before it, and `trust_for` would bound nothing.
    """
    case = _graded(_observed(case, truth, delta, worded=worded), rule, grades, delta)
    closed = _closing(case, rule)
    if closed is not None:
        detail = {"reason": closed.value, "state": case.state.value, "elapsed": case.elapsed}
        silent = case.state is CaseState.WATCHING
        return Step(case, () if silent else (Event("closed", detail),), closed)
    events: list[Event] = []
    if case.state is CaseState.WATCHING:
        if truth is Truth.YES and case.yes_for >= rule.for_:
            case = replace(case, state=CaseState.DETECTED, detected_at=wall)
            events.append(Event("detected", {"for": rule.for_}))
        else:
            return Step(case)
    if truth is Truth.YES and not case.over:
        case, entered = _entered(case, rule, wall)
        events += entered
    case = _bound(case, rule)
    case, told = _notified(case, rule, delivery, delta=delta, wall=wall)
    events += told
    case, due = _due(case, rule, truth, delta)
    events += due
    return Step(case, tuple(events))


def _observed(case: Case, truth: Truth | None, delta: float, *, worded: bool) -> Case:
    """Run the clocks: time between two observations counts only if both were the same."""
    if worded and truth is not Truth.YES:
        return replace(case, last="word")
    now = "missing" if truth is None else truth.word
    same = delta if now == case.last else 0.0
    # Not knowing freezes both clocks, that of `for` and that of `clear_after`.
    yes, no, unknown, missing = case.yes_for, case.no_for, 0.0, 0.0
    if now == "yes":
        yes, no = yes + same, 0.0
    elif now == "no":
        # A NO breaks the clock of `for`; once `for` was met, only `clear_after` matters.
        yes, no = (0.0 if case.state is CaseState.WATCHING else yes), no + same
    elif now == "unknown":
        unknown = case.unknown_for + same
    else:
        missing = case.missing_for + same
    known = now in ("yes", "no") and case.last in ("yes", "no")
    runs = case.detected_at is not None and known
    return replace(
        case,
        last=now,
        yes_for=yes,
        no_for=no,
        unknown_for=unknown,
        missing_for=missing,
        elapsed=case.elapsed + (delta if runs else 0.0),
    )


def _graded(case: Case, rule: Rule, grades: Sequence[Grade], delta: float) -> Case:
    """Run the clocks of the stages' own conditions."""
    keys = [key for key, stage in rule.keyed_stages if stage.when is not None]
    if not keys and not case.grades:
        return case
    found = {grade.stage: grade.truth for grade in grades}
    worded = {grade.stage for grade in grades if grade.worded}
    clocks = tuple(
        case.clock(key).stopped()
        if key in worded
        else case.clock(key).after(
            found.get(key, Truth.UNKNOWN), delta, needed=rule.for_, clear_after=rule.clear_after
        )
        for key in keys
    )
    return replace(case, grades=clocks)


def _closing(case: Case, rule: Rule) -> CloseReason | None:
    if case.state in OPEN_DECISION:
        return None  # the agent's answer ends it
    if case.last == "missing" and case.missing_for >= GONE_AFTER_SECONDS:
        return CloseReason.GONE
    if case.last == "unknown" and case.unknown_for > UNKNOWN_LIMIT_SECONDS:
        return CloseReason.UNKNOWN
    if case.last == "no" and (case.state is CaseState.WATCHING or case.no_for >= rule.clear_after):
        return CloseReason.CLEARED
    return None


def _entered(case: Case, rule: Rule, wall: float) -> tuple[Case, list[Event]]:
    """Enter every stage whose time has come, except those that act."""
    events = []
    for key, stage in rule.keyed_stages:
        if stage.do.acts and rule.mode == "enforce":
            continue  # see _due and asking_stages
        mark = case.mark(key)
        if mark is not None and (stage.do != "notify" or mark.mode == rule.mode):
            continue
        if mark is None and not reached(case, rule, key, stage):
            continue
        # A notice given under another mode said something else: it is given anew.
        would = (stage.do == "notify" and rule.mode == "observe") or stage.do.acts
        case = _marked(case, rule, key, stage, wall=wall, would=would)
        if stage.do == "notify" and not would:
            case = _promised(case, rule)
        verb = f"would_{stage.do}" if would else stage.do.value
        events.append(Event(verb, {"stage": key, "level": stage.level, "elapsed": case.elapsed}))
    return case, events


def _marked(
    case: Case, rule: Rule, key: str, stage: Stage, *, wall: float, would: bool = False
) -> Case:
    rest = tuple(item for item in case.marks if item.key != key)
    fresh = StageMark(
        key=key,
        level=stage.level,
        do=stage.do,
        mode=rule.mode,
        at=wall,
        elapsed=case.elapsed,
        would=would,
    )
    return replace(case, marks=(*rest, fresh))


def _promised(case: Case, rule: Rule) -> Case:
    """Bind the engine to what the notice says, and wait for the proof that it arrived."""
    if rule.mode == "enforce":
        case = _bound_to(case, rule)
    return _untold(case)


def _bound_to(case: Case, rule: Rule) -> Case:
    fresh = tuple(_promise(case, rule, *item) for item in rule.acting_stages)
    named = {promise.key for promise in fresh}
    rest = tuple(promise for promise in case.promises if promise.key not in named)
    return replace(case, promises=(*rest, *fresh))


def _promise(case: Case, rule: Rule, key: str, stage: Stage) -> Promise:
    """What a notice says now: keeps not included, the stage's own condition as if it held now."""
    held = terms(replace(case, kept=0.0), key, stage)
    earliest = case.elapsed + lacking(case, rule, key, stage)
    return (
        held if stage.when is None else dataclasses.replace(held, after=max(held.after, earliest))
    )


def _untold(case: Case) -> Case:
    """The case without the proof that its owner has every notice."""
    state = CaseState.DETECTED if case.state in (CaseState.NOTIFIED, CaseState.DUE) else case.state
    return replace(case, state=state, notified_at=None, notice_age=0.0, due_for=0.0)


def _bound(case: Case, rule: Rule) -> Case:
    """Until the notice is proven, what it says follows the rule: a later deadline binds as well."""
    if rule.mode != "enforce" or not case.promises or case.notified_at is not None or case.over:
        return case
    return _bound_to(case, rule)


def _notified(
    case: Case, rule: Rule, delivery: Delivery, *, delta: float, wall: float
) -> tuple[Case, list[Event]]:
    if case.over:
        return case, []
    events: list[Event] = []
    if case.notified_at is not None:
        newer = delivery.proven_at is not None and delivery.proven_at > case.notified_at
        if delivery.complete and not newer:
            return replace(case, notice_age=case.notice_age + delta), []
        # Another recipient is required, or has only now been reached: the last proof counts.
        case, events = _untold(case), [Event("notice_open", {"age": case.notice_age})]
    told = any(m.do == "notify" and not m.would and m.mode == rule.mode for m in case.marks)
    waits = case.state is CaseState.DETECTED or case.leaving
    if not waits or not told or not delivery.complete:
        return case, events
    # The age counts from the tick that learns of the proof: later than the proof, never earlier.
    case = replace(
        case,
        state=case.state if case.leaving else CaseState.NOTIFIED,
        notified_at=delivery.proven_at or wall,
        notice_age=0.0,
    )
    return case, [*events, Event("notified", {"proven_at": case.notified_at})]


def _due(case: Case, rule: Rule, truth: Truth | None, delta: float) -> tuple[Case, list[Event]]:
    if case.state is CaseState.REFUSED:
        left = case.retry_in - delta
        if left > 0:
            return replace(case, retry_in=left), []
        return replace(case, state=_told(case), retry_in=0.0), [Event("retry", {})]
    if case.state not in (CaseState.NOTIFIED, CaseState.DUE):
        return case, []
    following = next_stage(case, rule) if truth is Truth.YES else None
    if following is None or not ready(case, rule, *following):
        why = "it was asked to save" if case.saving else "the rule no longer says so"
        return postponed(case, why)
    if case.state is CaseState.DUE:
        return replace(case, due_for=case.due_for + delta), []
    detail = {
        "elapsed": case.elapsed,
        "notice_age": case.notice_age,
        "stage": following[0],
        "do": following[1].do.value,
    }
    return replace(case, state=CaseState.DUE, due_for=0.0), [Event("due", detail)]


def _told(case: Case) -> CaseState:
    """The state of a case for which nothing is decided, by whether its owner has the notice."""
    return CaseState.DETECTED if case.notified_at is None else CaseState.NOTIFIED


def postponed(case: Case, why: str) -> tuple[Case, list[Event]]:
    """A due case goes back to notified: after an outage, or where fresh facts do not confirm it."""
    if case.state is not CaseState.DUE:
        return case, []
    case = replace(case, state=CaseState.NOTIFIED, due_for=0.0)
    return case, [Event("postponed", {"why": why})]


def kept(case: Case, rule: Rule, seconds: float) -> tuple[Case, list[Event]]:
    """Move the deadlines of a case by a keep; one that is over moves from now on."""
    following = next_stage(_unasked(case), rule)
    if following is None:
        return case, []
    overdue = max(0.0, case.elapsed - terms(case, *following).after)
    case = replace(case, kept=case.kept + overdue + seconds)
    back, events = postponed(case, "kept")
    return back, [*events, Event("kept", {"seconds": seconds})]


def _unasked(case: Case) -> Case:
    """The case as if nothing had been decided, for as long as that could be taken back."""
    if case.state not in OPEN_DECISION:
        return case
    return settled(case, case.decision_id or "", ActState.WITHDRAWN)


def authorised(case: Case, rule: Rule, decision_id: str, *, key: str, wall: float) -> Case:
    """The case once a decision is on disk, with the mark of its stage.

    Args:
        case: due, or any that is not over where the trainer is only asked to save.
        rule: as it now reads.
        decision_id: of the decision.
        key: name of the stage.
        wall: Unix time.
    """
    stage = dict(rule.keyed_stages).get(key)
    if stage is None or not stage.do.acts:
        raise ValueError(f"rule {rule.id} has no stage {key} that acts")
    earlier = case.act(key)
    act = Act(key, stage.do.value, decision_id, wall, tries=0 if earlier is None else earlier.tries)
    case = _marked(case, rule, key, stage, wall=wall)
    case = replace(case, acts=with_act(case.acts, act))
    if not stage.do.takes:
        return case
    return replace(case, state=CaseState.AUTHORISED, decision_id=decision_id)


def settled(case: Case, decision_id: str, state: ActState) -> Case:
    """The case once something became of a decision.

    An end that is proven, incomplete or failed is final, and so is a job that has left; a refusal
    waits; a request that was not heeded, and whatever never arrived, is as if not asked, except
    that its stage is spent.
    """
    act = next((act for act in case.acts if act.decision_id == decision_id), None)
    if act is None and decision_id == case.decision_id:
        act = Act(LAST_STAGE, Action.TERMINATE.value, decision_id, case.opened_at)
    if act is None:
        return case
    case = replace(case, acts=with_act(case.acts, act.became(state)))
    if decision_id != case.decision_id:
        return case
    following = _following(Action(act.do), state)
    if following is not None and following is not CaseState.REFUSED:
        return replace(case, state=following)
    wait = RETRY_REFUSED_SECONDS if following is CaseState.REFUSED else 0.0
    return replace(
        case, state=following or _told(case), decision_id=None, retry_in=wait, due_for=0.0
    )


_FOLLOWING = {
    ActState.ACTING: CaseState.ACTING,
    ActState.VERIFIED: CaseState.VERIFIED,
    ActState.DONE: CaseState.VERIFIED,
    ActState.REFUSED: CaseState.REFUSED,
}
_AFTER_AN_END = {
    ActState.INCOMPLETE: CaseState.INCOMPLETE,
    ActState.FAILED: CaseState.FAILED,
    ActState.UNDELIVERABLE: CaseState.REFUSED,
}


def _following(do: Action, state: ActState) -> CaseState | None:
    """What a case becomes with its decision, or None where it is as before the decision."""
    return _FOLLOWING.get(state, _AFTER_AN_END.get(state) if do.ends else None)


def skipped(case: Case, key: str, do: Action, *, wall: float, why: str) -> tuple[Case, Event]:
    """The case without a stage that cannot be carried out on its job; it goes on to the next."""
    act = Act(key, do.value, "", wall, ActState.SKIPPED)
    case, _ = postponed(replace(case, acts=with_act(case.acts, act)), why)
    return case, Event("skipped", {"stage": key, "do": do.value, "why": why})


def overruled(case: Case | None, rule: Rule | None, *, kept: bool) -> str:
    """What somebody has said against a decision since it was made, or an empty string.

    Args:
        case: the open case that it was made for, or None where that is closed.
        rule: as it now reads, or None where it is gone.
        kept: whether a keep protects the job.
    """
    if case is None:
        return "the case is closed"
    if rule is None:
        return "the rule is no longer in force"
    if rule.mode != "enforce":
        return f"the rule's mode is {rule.mode}"
    return "the job is kept" if kept else ""


def withdrawal(case: Case | None, rule: Rule | None, *, kept: bool) -> str:
    """Why a request to save or leave that still stands is taken back, or an empty string.

    The arguments are those of `overruled`.
    """
    why = overruled(case, rule, kept=kept)
    if why or case is None or rule is None:
        return why
    again = case.last == "no" and case.no_for >= rule.clear_after
    return "the rule is kept again" if again else ""
