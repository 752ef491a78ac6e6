"""The life of one case: a rule against a job, from the first YES to the proof or the end.

Pure: every function takes the case, the rule, what was observed and how much time has passed, and
returns the next case with the events to write down. Time is accumulated tick by tick from the
monotonic clock and travels with the case, so that neither a restart nor an outage nor a jump of the
wall clock ever advances a deadline.

::

    watching -> detected -> notified -> due -> authorised -> acting -> verified
                                                                    `-> incomplete | failed
                                               `-> refused (waits, then notified again)
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from gpuwarden.ruleengine.grade_clocks import UNKNOWN_LIMIT_SECONDS, GradeClock
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.ruleengine.model import Rule, Stage
    from gpuwarden.ruleengine.verdicts import Grade

_Said = TypeVar("_Said")

GONE_AFTER_SECONDS = 60.0
"""A job that is missing from a lit node for this long has ended; shorter gaps are label churn."""

RETRY_REFUSED_SECONDS = 600.0
"""How long a case that the agent refused waits before it may be tried again."""


class CaseState(StrEnum):
    """How far a case has come."""

    WATCHING = "watching"
    """`when` holds, `for` is not met yet."""
    DETECTED = "detected"
    """`for` is met."""
    NOTIFIED = "notified"
    """Every required recipient has the notice, with proof."""
    DUE = "due"
    """Both deadlines are over; the guards decide."""
    AUTHORISED = "authorised"
    """The decision is on disk, and may or may not have reached the agent."""
    ACTING = "acting"
    """The agent has taken it on."""
    VERIFIED = "verified"
    """The ended processes are gone from NVML."""
    INCOMPLETE = "incomplete"
    """Something survived, or NVML still lists it."""
    REFUSED = "refused"
    """The agent would not; the case waits before another try."""
    FAILED = "failed"
    """The agent met an error of its own."""


class CloseReason(StrEnum):
    """Why a case is over."""

    CLEARED = "cleared"
    """The rule said NO for `clear_after`."""
    UNKNOWN = "unknown"
    """Nothing was known for too long."""
    GONE = "gone"
    """The job has ended, or is no longer what the rule is about."""
    RULE_GONE = "rule_gone"
    """The rule was removed."""


OPEN_DECISION = frozenset({CaseState.AUTHORISED, CaseState.ACTING})
DECIDED = OPEN_DECISION | {CaseState.VERIFIED, CaseState.INCOMPLETE, CaseState.FAILED}


@dataclass(frozen=True, slots=True)
class StageMark:
    """A stage that a case has entered.

    Attributes:
        key: name of the stage within its rule, see `stage_keys`.
        level: light, moderate or severe.
        do: log, notify or terminate.
        mode: the rule's mode when the stage was entered; what the owner was told depends on it.
        at: Unix time.
        elapsed: seconds since `for` was met.
        would: the mode forbade the stage's action; it is only written down.
    """

    key: str
    level: str
    do: str
    mode: str
    at: float
    elapsed: float
    would: bool = False


@dataclass(frozen=True, slots=True)
class Promise:
    """What the owner was told: no rule that is changed later falls short of it. Seconds."""

    after: float
    notice_delivered_for: float
    grace: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the ledger knows of a case's notices for the notify stages it has entered.

    Attributes:
        complete: at least one recipient was required, and every required one has the notice.
        proven_at: Unix time of the last required recipient's proof, or None.
    """

    complete: bool = False
    proven_at: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One rule against one job. Durations are seconds, points in time Unix seconds.

    Attributes:
        rule_id, job_id: what the case is about.
        state: how far it has come.
        opened_at: the first YES.
        user, run_id, instance: of the job, kept for the time after its death.
        last: the last observation: yes, no, unknown, missing, or word: only what the job says of
            itself stands against a yes.
        yes_for, no_for, unknown_for, missing_for: time of each; only yes breaks no, only no breaks
            yes, and anything else breaks unknown and missing.
        detected_at: when `for` was met.
        elapsed: since `for` was met, as far as the verdict was known.
        marks: stages entered, in order.
        grades: clocks of the stages that have a condition of their own.
        promise: what the owner was told, from the first notice on.
        kept: by how much keeps have moved the deadline.
        notified_at: when the last required recipient had the notice.
        notice_age: since then.
        due_for: since both deadlines were over; who has waited longest goes first.
        retry_in: until another try may be made after a refusal.
        decision_id: the decision in flight or done; None again once it was refused or lapsed.
        cause, because, remedy: the probable cause as last diagnosed.
    """

    rule_id: str
    job_id: str
    opened_at: float
    state: CaseState = CaseState.WATCHING
    user: str = ""
    run_id: str | None = None
    instance: str = ""
    last: str = "yes"
    yes_for: float = 0.0
    no_for: float = 0.0
    unknown_for: float = 0.0
    missing_for: float = 0.0
    detected_at: float | None = None
    elapsed: float = 0.0
    marks: tuple[StageMark, ...] = ()
    promise: Promise | None = None
    kept: float = 0.0
    notified_at: float | None = None
    notice_age: float = 0.0
    due_for: float = 0.0
    retry_in: float = 0.0
    decision_id: str | None = None
    cause: str = ""
    because: str = ""
    remedy: str = ""
    grades: tuple[GradeClock, ...] = ()

    @property
    def level(self) -> str:
        """The highest level entered, or an empty string."""
        order = ("light", "moderate", "severe")
        return max((mark.level for mark in self.marks), key=order.index, default="")

    def mark(self, key: str) -> StageMark | None:
        """The mark of a stage, or None while it has not been entered."""
        return next((mark for mark in self.marks if mark.key == key), None)

    def clock(self, key: str) -> GradeClock:
        """The clock of a stage that has a condition of its own; a new one while it has none."""
        return next((c for c in self.grades if c.key == key), GradeClock(key, "unknown"))

    def encode(self) -> str:
        """The case as JSON, for the ledger."""
        return msgspec.json.encode(self, order="sorted").decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what `encode` wrote; fields of another version are ignored or take defaults."""
        data: dict[str, Any] = json.loads(text)
        known = {item.name for item in dataclasses.fields(cls)}
        data = {name: value for name, value in data.items() if name in known}
        data["state"] = CaseState(data["state"])
        data["marks"] = tuple(StageMark(**mark) for mark in data.get("marks", ()))
        data["grades"] = tuple(GradeClock(**clock) for clock in data.get("grades", ()))
        if data.get("promise") is not None:
            data["promise"] = Promise(**data["promise"])
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the audit."""

    kind: str
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """What one tick made of a case.

    Attributes:
        case: the next state; also for a case that is closed.
        events: to be written before anything takes effect.
        closed: why the case is over, or None.
    """

    case: Case
    events: tuple[Event, ...] = ()
    closed: CloseReason | None = None


def stage_keys(rule: Rule) -> tuple[tuple[str, Stage], ...]:
    """Names of a rule's stages, stable when other stages come and go: `moderate-notify`.

    A second stage of the same level and action is `moderate-notify-2`.
    """
    counts: dict[str, int] = {}
    named = []
    for stage in rule.stages:
        name = f"{stage.level}-{stage.do}"
        counts[name] = counts.get(name, 0) + 1
        named.append((name if counts[name] == 1 else f"{name}-{counts[name]}", stage))
    return tuple(named)


def final_stage(rule: Rule) -> tuple[str, Stage] | None:
    """The stage that ends a job, or None."""
    return next(((key, stage) for key, stage in stage_keys(rule) if stage.do == "terminate"), None)


def lacking(case: Case, rule: Rule, key: str, stage: Stage) -> float:
    """Seconds for which a stage's own condition must still hold; 0 for a stage without one."""
    if stage.when is None:
        return 0.0
    return max(0.0, rule.for_ + stage.after - case.clock(key).held)


def terms(case: Case, stage: Stage) -> Promise:
    """The deadline, the notice's age and the grace that hold for a case.

    Each is the later of the rule and of what its owner was told; keeps are included.
    """
    after, notice, grace = stage.after, stage.notice_delivered_for or 0.0, stage.grace or 0.0
    if case.promise is not None:
        after = max(after, case.promise.after)
        notice = max(notice, case.promise.notice_delivered_for)
        grace = max(grace, case.promise.grace)
    return Promise(after + case.kept, notice, grace)


def remaining(case: Case, rule: Rule) -> float | None:
    """Seconds until the job may be ended at the earliest, or None where the rule ends no job.

    Before the notice is proven it is counted as if that happened now.
    """
    final = final_stage(rule)
    if final is None or rule.mode != "enforce":
        return None
    held = terms(case, final[1])
    age = case.notice_age if case.notified_at is not None else 0.0
    wait = 0.0 if case.detected_at is not None else max(0.0, rule.for_ - case.yes_for)
    return max(
        wait + held.after - case.elapsed,
        lacking(case, rule, *final),
        held.notice_delivered_for - age,
        case.retry_in,
        0.0,
    )


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
            case = dataclasses.replace(case, state=CaseState.DETECTED, detected_at=wall)
            events.append(Event("detected", {"for": rule.for_}))
        else:
            return Step(case)
    if truth is Truth.YES and case.state not in DECIDED:
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
        return dataclasses.replace(case, last="word")
    now = {Truth.YES: "yes", Truth.NO: "no", Truth.UNKNOWN: "unknown", None: "missing"}[truth]
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
    return dataclasses.replace(
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
    keys = [key for key, stage in stage_keys(rule) if stage.when is not None]
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
    return dataclasses.replace(case, grades=clocks)


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
    """Enter every stage whose time has come, except the one that ends the job."""
    events = []
    for key, stage in stage_keys(rule):
        if stage.do == "terminate" and rule.mode == "enforce":
            continue  # see _due
        mark = case.mark(key)
        if mark is not None and (stage.do != "notify" or mark.mode == rule.mode):
            continue
        if mark is None and not _reached(case, rule, key, stage):
            continue
        # A notice given under another mode said something else: it is given anew.
        rest = tuple(item for item in case.marks if item.key != key)
        would = (stage.do == "notify" and rule.mode == "observe") or stage.do == "terminate"
        fresh = StageMark(
            key=key,
            level=stage.level,
            do=stage.do,
            mode=rule.mode,
            at=wall,
            elapsed=case.elapsed,
            would=would,
        )
        case = dataclasses.replace(case, marks=(*rest, fresh))
        if stage.do == "notify" and not would:
            case = _promised(case, rule)
        verb = f"would_{stage.do}" if would else stage.do
        events.append(Event(verb, {"stage": key, "level": stage.level, "elapsed": case.elapsed}))
    return case, events


def _reached(case: Case, rule: Rule, key: str, stage: Stage) -> bool:
    """Whether a stage's time has come, and it has come far enough for it."""
    after = terms(case, stage).after if stage.do == "terminate" else stage.after
    return case.elapsed >= after and far_enough(case, rule, key, stage)


def far_enough(case: Case, rule: Rule, key: str, stage: Stage) -> bool:
    """Whether a stage's own condition holds, and has held for long enough; YES without one."""
    if stage.when is None:
        return True
    return case.clock(key).last == "yes" and lacking(case, rule, key, stage) == 0


def _promised(case: Case, rule: Rule) -> Case:
    """Bind the engine to what the notice says, and wait for the proof that it arrived."""
    final = final_stage(rule)
    held = case.promise
    if final is not None and rule.mode == "enforce":
        held = _promise(case, rule, *final)
    return _untold(dataclasses.replace(case, promise=held))


def _promise(case: Case, rule: Rule, key: str, stage: Stage) -> Promise:
    """What a notice says now: keeps not included, the stage's own condition as if it held now."""
    held = terms(dataclasses.replace(case, kept=0.0), stage)
    earliest = case.elapsed + lacking(case, rule, key, stage)
    return (
        held if stage.when is None else dataclasses.replace(held, after=max(held.after, earliest))
    )


def _untold(case: Case) -> Case:
    """The case without the proof that its owner has every notice."""
    state = CaseState.DETECTED if case.state in (CaseState.NOTIFIED, CaseState.DUE) else case.state
    return dataclasses.replace(case, state=state, notified_at=None, notice_age=0.0, due_for=0.0)


def _bound(case: Case, rule: Rule) -> Case:
    """Until the notice is proven, what it says follows the rule: a later deadline binds as well."""
    final = final_stage(rule)
    open_ = case.promise is not None and case.notified_at is None and case.state not in DECIDED
    if final is None or rule.mode != "enforce" or not open_:
        return case
    return dataclasses.replace(case, promise=_promise(case, rule, *final))


def _notified(
    case: Case, rule: Rule, delivery: Delivery, *, delta: float, wall: float
) -> tuple[Case, list[Event]]:
    if case.state in DECIDED:
        return case, []
    events: list[Event] = []
    if case.notified_at is not None:
        newer = delivery.proven_at is not None and delivery.proven_at > case.notified_at
        if delivery.complete and not newer:
            return dataclasses.replace(case, notice_age=case.notice_age + delta), []
        # Another recipient is required, or has only now been reached: the last proof counts.
        case, events = _untold(case), [Event("notice_open", {"age": case.notice_age})]
    told = any(m.do == "notify" and not m.would and m.mode == rule.mode for m in case.marks)
    if case.state is not CaseState.DETECTED or not told or not delivery.complete:
        return case, events
    # The age counts from the tick that learns of the proof: later than the proof, never earlier.
    case = dataclasses.replace(
        case, state=CaseState.NOTIFIED, notified_at=delivery.proven_at or wall, notice_age=0.0
    )
    return case, [*events, Event("notified", {"proven_at": case.notified_at})]


def _due(case: Case, rule: Rule, truth: Truth | None, delta: float) -> tuple[Case, list[Event]]:
    if case.state is CaseState.REFUSED:
        left = case.retry_in - delta
        if left > 0:
            return dataclasses.replace(case, retry_in=left), []
        told = CaseState.DETECTED if case.notified_at is None else CaseState.NOTIFIED
        return dataclasses.replace(case, state=told, retry_in=0.0), [Event("retry", {})]
    final = final_stage(rule)
    ready = (
        final is not None
        and rule.mode == "enforce"
        and truth is Truth.YES
        and case.promise is not None
        and case.notified_at is not None
        and _reached(case, rule, *final)
        and case.notice_age >= terms(case, final[1]).notice_delivered_for
    )
    if case.state is CaseState.NOTIFIED and ready:
        case = dataclasses.replace(case, state=CaseState.DUE, due_for=0.0)
        return case, [Event("due", {"elapsed": case.elapsed, "notice_age": case.notice_age})]
    if case.state is CaseState.DUE:
        if ready:
            return dataclasses.replace(case, due_for=case.due_for + delta), []
        return postponed(case, "the rule no longer says so")
    return case, []


def postponed(case: Case, why: str) -> tuple[Case, list[Event]]:
    """A due case goes back to notified: after an outage, or where fresh facts do not confirm it."""
    if case.state is not CaseState.DUE:
        return case, []
    case = dataclasses.replace(case, state=CaseState.NOTIFIED, due_for=0.0)
    return case, [Event("postponed", {"why": why})]


def kept(case: Case, rule: Rule, seconds: float) -> tuple[Case, list[Event]]:
    """Move the deadline of a case by a keep; one that is over moves from now on."""
    final = final_stage(rule)
    if final is None:
        return case, []
    overdue = max(0.0, case.elapsed - terms(case, final[1]).after)
    case = dataclasses.replace(case, kept=case.kept + overdue + seconds)
    back, events = postponed(case, "kept")
    return back, [*events, Event("kept", {"seconds": seconds})]


def authorised(case: Case, rule: Rule, decision_id: str, *, wall: float) -> Case:
    """The case once its decision is on disk, with the mark of the final stage."""
    final = final_stage(rule)
    if final is None:
        raise ValueError(f"rule {rule.id} ends no job")
    mark = StageMark(
        key=final[0],
        level=final[1].level,
        do="terminate",
        mode=rule.mode,
        at=wall,
        elapsed=case.elapsed,
    )
    rest = tuple(item for item in case.marks if item.key != final[0])
    return dataclasses.replace(
        case, state=CaseState.AUTHORISED, decision_id=decision_id, marks=(*rest, mark)
    )


def settled(case: Case, state: CaseState) -> Case:
    """The case once its decision has a result; a refusal waits, a lapse is as if never asked."""
    if state not in (CaseState.REFUSED, CaseState.NOTIFIED):
        return dataclasses.replace(case, state=state)
    wait = RETRY_REFUSED_SECONDS if state is CaseState.REFUSED else 0.0
    return dataclasses.replace(case, state=state, decision_id=None, retry_in=wait, due_for=0.0)
