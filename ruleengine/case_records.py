"""What is kept of one case: a rule against a job. The state machine over it is in `cases.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

import msgspec

from gpuwarden.ruleengine.acts import Act, ActState, Promise
from gpuwarden.ruleengine.grade_clocks import GradeClock
from gpuwarden.ruleengine.model import Action

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    RESTORED = "restored"
    """The ledger is an older copy: what was promised or granted since is not known."""


OPEN_DECISION = frozenset({CaseState.AUTHORISED, CaseState.ACTING})
DECIDED = OPEN_DECISION | {CaseState.VERIFIED, CaseState.INCOMPLETE, CaseState.FAILED}


@dataclass(frozen=True, slots=True)
class StageMark:
    """A stage that a case has entered.

    Attributes:
        key: name of the stage within its rule, see `Rule.keyed_stages`.
        level: light, moderate or severe.
        do: what it does, as in `Action`.
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
class Delivery:
    """What the ledger knows of a case's notices for the notify stages it has entered.

    Attributes:
        complete: at least one recipient was required, and every required one has the notice.
        proven_at: Unix time of the last required recipient's proof, or None.
    """

    complete: bool = False
    proven_at: float | None = None


class Case(msgspec.Struct, frozen=True):
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
        promises: what the owner was told of each stage that acts, from the first notice on.
        kept: by how much keeps have moved the deadlines.
        notified_at: when the last required recipient had the notice.
        notice_age: since then.
        due_for: since both deadlines were over; who has waited longest goes first.
        retry_in: until another try may be made after a refusal.
        decision_id: the decision on its cards in flight or done; None again once it was refused,
            lapsed, withdrawn or not heeded.
        acts: what was done to the job, one entry for each stage, the latest last.
        cause, because, remedy, figures: the probable cause as last diagnosed.
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
    promises: tuple[Promise, ...] = ()
    kept: float = 0.0
    notified_at: float | None = None
    notice_age: float = 0.0
    due_for: float = 0.0
    retry_in: float = 0.0
    decision_id: str | None = None
    cause: str = ""
    because: str = ""
    remedy: str = ""
    figures: tuple[tuple[str, float | str], ...] = ()
    grades: tuple[GradeClock, ...] = ()
    acts: tuple[Act, ...] = ()

    @property
    def leaving(self) -> bool:
        """Whether the job was asked to leave, and still may; nothing has been taken from it."""
        open_ = self.state in OPEN_DECISION
        return open_ and any(
            act.decision_id == self.decision_id and act.do == Action.YIELD for act in self.acts
        )

    @property
    def saving(self) -> bool:
        """Whether the job was asked to save, and still may: nothing is taken from it meanwhile."""
        return any(act.open and act.do == Action.CHECKPOINT for act in self.acts)

    @property
    def over(self) -> bool:
        """Whether nothing more is decided: the job is being ended, was ended, or has left."""
        return self.state in DECIDED and not self.leaving

    def act(self, key: str) -> Act | None:
        """What a stage has done, or None."""
        return next((act for act in self.acts if act.key == key), None)

    def promise_of(self, key: str) -> Promise | None:
        """What the owner was told of a stage, or None."""
        return next((promise for promise in self.promises if promise.key == key), None)

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
        promises = data.get("promises", [])
        if data.get("promise") is not None:
            promises = [data["promise"]]  # of a time in which only the last stage acted
        known = set(cls.__struct_fields__)
        data = {name: value for name, value in data.items() if name in known}
        data["state"] = CaseState(data["state"])
        data["marks"] = tuple(StageMark(**mark) for mark in data.get("marks", ()))
        data["figures"] = tuple((name, value) for name, value in data.get("figures", ()))
        data["grades"] = tuple(GradeClock(**clock) for clock in data.get("grades", ()))
        data["promises"] = tuple(Promise(**promise) for promise in promises)
        data["acts"] = tuple(
            Act(**{**act, "state": ActState(act["state"])}) for act in data.get("acts", ())
        )
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
