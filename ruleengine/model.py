"""The rule language: what a rule file may say, as frozen types.

Unknown keys are refused. No field that can lead to a kill has a default, and 0 never means
"unlimited": it means none. Durations are seconds, percentages ratios, sizes bytes once read.
Validation here is about one value or one mapping; what follows from several is in `linting.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpuwarden.fields import (
    CgroupPath,
    ExecutablePath,
    Identifier,
    Pattern,
    Ratio,
    Seconds,
    Strict,
    Words,
    as_tuple,
    aware,
    known_zone,
    some_tuple,
)
from gpuwarden.hours import Hours
from gpuwarden.ruleengine.canary_terms import Canary
from gpuwarden.ruleengine.conditions import (
    All,
    Any_,
    Comparing,
    Condition,
    Gpus,
    NeedsMemory,
    NoProgress,
    Not,
    OverBudget,
    ProfileCondition,
    ProfileLimits,
    Promql,
    Signal,
    SilentFor,
    Waiting,
)
from gpuwarden.ruleengine.described import Sentences
from gpuwarden.ruleengine.rule_tests import RuleTest
from gpuwarden.training_profiles import Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Action",
    "All",
    "Any_",
    "Canary",
    "Comparing",
    "Condition",
    "Gpus",
    "Hours",
    "Level",
    "LimitGroup",
    "Limits",
    "Mode",
    "NeedsMemory",
    "NoProgress",
    "Not",
    "OverBudget",
    "OwnerMay",
    "Profile",
    "ProfileCondition",
    "ProfileLimits",
    "Promql",
    "Rule",
    "RuleSet",
    "Seconds",
    "Signal",
    "SilentFor",
    "Stage",
    "Strict",
    "Target",
    "TerminateLimits",
    "Waiting",
    "WhitelistEntry",
    "WhitelistMatch",
]


class Mode(StrEnum):
    """What a rule may do; a new rule starts in observe."""

    OBSERVE = "observe"
    WARN = "warn"
    ENFORCE = "enforce"


class Target(StrEnum):
    """What a rule judges; a card is never ended."""

    JOB = "job"
    GPU = "gpu"


class Level(StrEnum):
    """How serious a stage is."""

    LIGHT = "light"
    MODERATE = "moderate"
    SEVERE = "severe"

    rank: int
    """0 for light to 2 for severe."""

    def __init__(self, _value: str) -> None:
        self.rank = len(type(self).__members__)


class Action(StrEnum):
    """What a stage does, in order of strength."""

    LOG = "log"
    NOTIFY = "notify"
    CHECKPOINT = "checkpoint"
    YIELD = "yield"
    REQUEUE = "requeue"
    TERMINATE = "terminate"

    rank: int
    """0 for log to 5 for terminate."""
    acts: bool
    """Whether something is done to the job, and not only said."""
    takes: bool
    """Whether the job loses its cards: it must have been announced, and the limits hold."""
    ends: bool
    """Whether the attempt is ended whatever the job does; that happens at most once."""

    def __init__(self, value: str) -> None:
        # Asked many times for each case and tick: found once, and not by search.
        self.rank = len(type(self).__members__)
        self.ends = value in ("requeue", "terminate")
        self.takes = self.ends or value == "yield"
        self.acts = self.takes or value == "checkpoint"


MatchKey = Literal[
    "job_id",
    "user",
    "team",
    "framework",
    "source",
    "model",
    "project",
    "run_id",
    "interactive",
    "node",
    "gpu",
]
IgnorablePhase = Literal["setup", "scan", "validate", "checkpoint", "export", "done"]


_DEADLINE_FIELDS = ("notice_delivered_for", "grace", "max_work_lost")
_NEEDED: dict[Action, tuple[str, ...]] = {
    Action.YIELD: ("notice_delivered_for", "grace"),
    Action.REQUEUE: _DEADLINE_FIELDS,
    Action.TERMINATE: _DEADLINE_FIELDS,
}
"""What a stage must say, since it can cost somebody a card."""


class OwnerMay(Strict):
    """What the owner may do against a deadline."""

    keep: Annotated[Seconds, Field(gt=0)]
    """How long one keep moves the deadline."""
    times: Annotated[StrictInt, Field(ge=0)]
    """How often, per run and rule for life; 0 is never."""


class Stage(Strict):
    """One step of the escalation."""

    level: Level
    """light, moderate or severe; severe is the only level that may take a job's cards."""
    after: Seconds
    """Since the rule's `for` was met; of a stage with `when`, by both conditions together."""
    do: Action
    """log, notify, checkpoint (the trainer is asked to save now), yield (it is asked to finish its
    epoch, save, leave and be queued again), requeue (its platform ends it and starts it again
    later) or terminate (it is ended, and held)."""
    when: Condition | None = None
    """How far it must have come: holds beside the rule's `when`, for the rule's `for` and then
    `after`. Not known, the stage is not entered."""
    owner_may: OwnerMay | None = None
    """Only with notify: how the owner may move the deadline."""
    notice_delivered_for: Seconds | None = None
    """With yield, requeue and terminate, mandatory: since the last required recipient's notice was
    proven."""
    grace: Annotated[Seconds, Field(gt=0)] | None = None
    """Mandatory with yield: how long the job has for leaving; no signal follows. With requeue and
    terminate: between SIGTERM and SIGKILL. May be given with checkpoint: how long it has for
    saving."""
    max_work_lost: Seconds | None = None
    """With requeue and terminate, mandatory: a job whose last saved state is older is left."""

    @model_validator(mode="after")
    def _fits_the_action(self) -> Self:
        needed = _NEEDED.get(self.do, ())
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise PydanticCustomError(
                "GW201",
                "a stage that does {do} has no defaults: {missing} must be given",
                {"do": self.do.value, "missing": ", ".join(missing)},
            )
        allowed = (*needed, "grace") if self.do is Action.CHECKPOINT else needed
        extra = [n for n in _DEADLINE_FIELDS if getattr(self, n) is not None and n not in allowed]
        if extra:
            raise PydanticCustomError(
                "GW203",
                "{name} has no meaning in a stage that does {do}",
                {"name": extra[0], "do": self.do.value, "at": (extra[0],)},
            )
        if self.do.takes and self.level is not Level.SEVERE:
            raise PydanticCustomError(
                "GW202", "only a severe stage may {do}", {"do": self.do.value, "at": ("level",)}
            )
        if self.do is Action.CHECKPOINT and self.level is Level.LIGHT:
            raise PydanticCustomError(
                "GW202", "only a moderate or severe stage may checkpoint", {"at": ("level",)}
            )
        if self.owner_may is not None and self.do is not Action.NOTIFY:
            raise PydanticCustomError(
                "GW203", "owner_may belongs to a stage that notifies", {"at": ("owner_may",)}
            )
        return self


class Rule(Strict):
    """One rule."""

    id: Identifier
    """Immutable; cases are kept by (id, job)."""
    description: Sentences = ""
    """One sentence for owners, or one for each language: `{en: ..., zh: ...}`."""
    mode: Mode = Mode.OBSERVE
    """observe: record what would be done; warn: also tell owners; enforce: also act."""
    target: Target
    """What it judges."""
    team: str = ""
    """The team whose jobs it judges, by the operator's directory; not given is every team."""
    match: dict[MatchKey, Pattern] = Field(default_factory=dict)
    """Label -> anchored regular expression; a job that lacks the label does not match."""
    only_during: Annotated[tuple[Hours, ...], BeforeValidator(as_tuple)] = ()
    """Hours of the week in which it counts; outside of them it is NO. Not given is always."""
    only_if_waiting: Waiting | None = None
    """Cards are taken from jobs only while this holds; all else goes on without it."""
    canary: Canary | None = None
    """Enforcement on trial: on a share of the owners, and back to warn by itself. Without it, all
    owners' jobs are ended."""
    cold_start: Seconds
    """From the attempt's first use of a GPU; until then nothing is judged, and windows begin."""
    ignore_phases: dict[IgnorablePhase, Annotated[Seconds, Field(gt=0)]] = Field(
        default_factory=dict
    )
    """Phase -> how old it may grow before the job is judged in it."""
    when: Condition
    """The violation."""
    for_: Seconds = Field(alias="for")
    """How long `when` must hold without a break."""
    clear_after: Seconds = 0.0
    """How long `when` must not hold until a case is closed."""
    trust_for: Seconds = 7200.0
    """How long, in all, what a job says of itself may delay this rule."""
    stages: Annotated[tuple[Stage, ...], BeforeValidator(some_tuple)]
    """The escalation, in order of `after`."""

    @functools.cached_property
    def keyed_stages(self) -> tuple[tuple[str, Stage], ...]:
        """Its stages with their names, stable when other stages come and go: `moderate-notify`.

        A second stage of the same level and action is `moderate-notify-2`.
        """
        counts: dict[str, int] = {}
        named: list[tuple[str, Stage]] = []
        for stage in self.stages:
            name = f"{stage.level}-{stage.do}"
            counts[name] = counts.get(name, 0) + 1
            named.append((name if counts[name] == 1 else f"{name}-{counts[name]}", stage))
        return tuple(named)

    @functools.cached_property
    def acting_stages(self) -> tuple[tuple[str, Stage], ...]:
        """The stages that do something to a job, with their names, in order."""
        return tuple(item for item in self.keyed_stages if item[1].do.acts)

    @functools.cached_property
    def taking_stages(self) -> tuple[tuple[str, Stage], ...]:
        """The stages that take its cards, with their names, in order."""
        return tuple(item for item in self.keyed_stages if item[1].do.takes)

    @functools.cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """The rule's `when`, and that of each stage that has one."""
        return (self.when, *(stage.when for stage in self.stages if stage.when is not None))

    @property
    def takes(self) -> bool:
        """Whether a stage would take a job's cards (yield, requeue, terminate), in any mode."""
        return any(stage.do.takes for stage in self.stages)

    @property
    def ends(self) -> bool:
        """Whether a stage would end a job whatever it does (requeue, terminate), in any mode."""
        return any(stage.do.ends for stage in self.stages)

    @property
    def enforces(self) -> bool:
        """Whether it may really do so."""
        return self.takes and self.mode is Mode.ENFORCE


class TerminateLimits(Strict):
    """How many jobs may lose their cards: yield, requeue, terminate. Sliding; 0 is none."""

    per_tick: Annotated[StrictInt, Field(ge=0)]
    """Jobs per tick of the engine; more are deferred."""
    per_hour: Annotated[StrictInt, Field(ge=0)]
    """Jobs in any 60 minutes; more are deferred."""
    per_user_per_day: Annotated[StrictInt, Field(ge=0)]
    """Jobs of one user in any 24 hours; more are deferred."""
    halt_above_share_of_running: Annotated[Ratio, Field(le=1)]
    """Share of the running jobs due at once above which nothing is ended and a person is paged."""


class Limits(Strict):
    """How much may be done."""

    terminate: TerminateLimits


class WhitelistMatch(Strict):
    """Who is protected; everything that is given must match exactly. Never free argv."""

    cgroup: CgroupPath | None = None
    """Path in the cgroup hierarchy; what lies below it is included."""
    user: Words | None = None
    """User name on the node."""
    executable: ExecutablePath | None = None
    """Absolute path of the executable, which for a script is its interpreter; it must be that of
    every process that holds a GPU."""
    run: Words | None = None
    """The trainer's run_id. Anybody may call his run so: name its user beside it."""
    job: Words | None = None
    """The node's job_id."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        # An entry without any criterion would be fulfilled by everybody.
        if not any(getattr(self, name) is not None for name in type(self).model_fields):
            raise PydanticCustomError(
                "GW111", "needs at least one of cgroup, user, executable, run and job", {}
            )
        return self


class WhitelistEntry(Strict):
    """A protection with its reason and its end."""

    match: WhitelistMatch
    """Who."""
    rules: Annotated[tuple[Identifier, ...], BeforeValidator(some_tuple)]
    """From which rules."""
    reason: Words
    """Why; shown to operators."""
    approved_by: Words
    """Who allowed it."""
    expires: Annotated[AwareDatetime, BeforeValidator(aware)]
    """With its offset from UTC; from then on it protects no more."""


@dataclass(frozen=True, slots=True)
class LimitGroup:
    """Rules of one file, and how much they may end together.

    Attributes:
        name: the file's.
        rules: ids of its rules.
        limits: stricter in something than what holds over all files.
    """

    name: str
    rules: frozenset[str]
    limits: TerminateLimits


class RuleSet(Strict):
    """One rule file, or several merged."""

    version: Literal[1]
    """Of the rule language."""
    timezone: Annotated[str, AfterValidator(known_zone)] = "UTC"
    """IANA name; in which times are told to owners whose own zone is not known."""
    team: str = ""
    """If given, the rules of this file judge only this team's jobs."""
    limits: Limits | None = None
    """How much the rules of this file may do together. A file must give some where a rule enforces
    terminate."""
    overall_limits: Limits | None = None
    """How much all rules of all files may do together; not in a team's file. Of several the
    strictest count; where no file gives them, the strictest `limits` of any file hold over all."""
    rules: Annotated[tuple[Rule, ...], BeforeValidator(as_tuple)] = ()
    """The rules."""
    profiles: Annotated[tuple[Profile, ...], BeforeValidator(as_tuple)] = ()
    """Expectations."""
    whitelist: Annotated[tuple[WhitelistEntry, ...], BeforeValidator(as_tuple)] = ()
    """Protections."""
    tests: Annotated[tuple[RuleTest, ...], BeforeValidator(as_tuple)] = ()
    """Histories and what must follow from them; `gpuwarden rules test` runs them."""
    _groups: tuple[LimitGroup, ...] = PrivateAttr(default=())

    @property
    def groups(self) -> tuple[LimitGroup, ...]:
        """Of a merged set: rules that are limited beyond `limits`, which then hold over all."""
        return self._groups

    def limited(self, groups: Sequence[LimitGroup]) -> Self:
        """The same set with these limits of single files beside those over all."""
        found = self.model_copy()
        found._groups = tuple(groups)  # noqa: SLF001 - of a copy of this very class
        return found

    def limits_of(self, rule_id: str) -> LimitGroup | None:
        """What limits a rule beyond `limits`, or None."""
        return next((group for group in self._groups if rule_id in group.rules), None)
