"""The rule language: what a rule file may say, as frozen types.

Unknown keys are refused. No field that can lead to a kill has a default, and 0 never means
"unlimited": it means none. Durations are seconds, percentages ratios, sizes bytes once read.
Validation here is about one value or one mapping; what follows from several is in `linting.py`.
"""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpuwarden.ruleengine import quantities, signals
from gpuwarden.ruleengine.quantities import Deviation, Quantity, Unit, Window
from gpuwarden.ruleengine.verdicts import SignalKey


class Strict(BaseModel):
    """Base of everything that a person writes: frozen, refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _text_schema(pattern: str, *examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": list(examples)})


Seconds = Annotated[
    float,
    BeforeValidator(quantities.parse_duration),
    _text_schema(quantities.DURATION_PATTERN, "30s", "5m", "1h30m"),
]
"""A duration with its unit; seconds."""
Ratio = Annotated[
    float,
    BeforeValidator(quantities.parse_ratio),
    _text_schema(quantities.QUANTITY_PATTERN, "15%"),
]
"""A percentage; ratio, 1 is 100 %."""
Bytes = Annotated[
    float,
    BeforeValidator(quantities.parse_bytes),
    Field(gt=0),
    _text_schema(quantities.QUANTITY_PATTERN, "10.5GiB"),
]
"""A size with its unit; bytes."""
ImagesPerSecond = Annotated[
    float,
    BeforeValidator(quantities.parse_throughput),
    Field(gt=0),
    _text_schema(quantities.QUANTITY_PATTERN, "78 img/s"),
]
"""A throughput with its unit; images per second."""
Threshold = Annotated[
    Quantity,
    BeforeValidator(quantities.parse_quantity),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": quantities.QUANTITY_PATTERN},
                {"type": "number", "minimum": 0},
            ],
            "examples": ["5%", "10GiB", "78 img/s", "0.5 cores"],
        }
    ),
]
"""A number in the unit of the signal."""
WindowText = Annotated[
    Window,
    BeforeValidator(quantities.parse_window),
    _text_schema(quantities.WINDOW_PATTERN, "5m", "3 samples"),
]
"""A length of time, or the last N scrapes."""
DeviationText = Annotated[
    Deviation,
    BeforeValidator(quantities.parse_deviation),
    _text_schema(quantities.DEVIATION_PATTERN, "below 15%", "above 15%, at least 2GiB"),
]
"""How far a value may be from its expectation."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError(
            "GW107",
            "{pattern} is not a regular expression: {error}",
            {"pattern": repr(pattern), "error": str(error)},
        ) from error
    return pattern


def _known_zone(name: str) -> str:
    # ZoneInfo also reads abbreviations such as EST, which mean different things to different people
    if "/" not in name and name != "UTC":
        raise PydanticCustomError(
            "GW107",
            "{name} is not a time zone: write an IANA name such as Asia/Shanghai or UTC",
            {"name": repr(name)},
        )
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise PydanticCustomError(
            "GW107",
            "{name} is not a known time zone: write an IANA name such as Asia/Shanghai",
            {"name": repr(name)},
        ) from error
    return name


def _aware(value: object) -> object:
    """YAML keeps dates as text here; a date without an offset means different moments."""
    if not isinstance(value, str):
        return value
    try:
        moment = dt.datetime.fromisoformat(value)
    except ValueError as error:
        raise PydanticCustomError(
            "GW107",
            "{value} is not a moment: write it like 2027-06-30T00:00:00+08:00",
            {"value": repr(value)},
        ) from error
    if moment.tzinfo is None:
        raise PydanticCustomError(
            "GW107",
            "{value} lacks its offset from UTC: write it like 2027-06-30T00:00:00+08:00",
            {"value": repr(value)},
        )
    return moment


def _as_tuple(value: object) -> object:
    """YAML has lists; frozen types hold tuples."""
    return tuple(value) if isinstance(value, list) else value


def _some_tuple(value: object) -> object:
    """Like `_as_tuple`, and an empty list is refused: `all` of nothing would be a trap."""
    if isinstance(value, (list, tuple)) and not value:
        raise PydanticCustomError("GW111", "must not be empty", {})
    return _as_tuple(value)


Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
"""Lower-case letters, digits, `-` and `_`; used as a label value and as a key in the ledger."""
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
"""A regular expression that must match the whole value."""
Words = Annotated[str, Field(min_length=1, max_length=500)]
"""Text for people; not empty."""


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

    @property
    def rank(self) -> int:
        """0 for light to 2 for severe."""
        return list(Level).index(self)


class Action(StrEnum):
    """What a stage does."""

    LOG = "log"
    NOTIFY = "notify"
    TERMINATE = "terminate"


class Gpus(StrEnum):
    """Of how many of the job's cards a condition must be true."""

    ALL = "all"
    ANY = "any"


Aggregate = Literal["min", "max", "avg", "last"]
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
Channel = Literal["log", "heartbeat", "cpu"]


class Comparing(Strict):
    """What every condition that compares a value has: exactly one limit."""

    above: Threshold | None = None
    """True above it; exactly at it is not above."""
    at_least: Threshold | None = None
    """True at it and above."""
    below: Threshold | None = None
    """True below it; exactly at it is not below."""
    at_most: Threshold | None = None
    """True at it and below."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        given = self._given()
        if len(given) != 1:
            raise PydanticCustomError(
                "GW111",
                "needs exactly one of above, at_least, below and at_most, not {count}",
                {"count": len(given)},
            )
        return self

    def _given(self) -> list[str]:
        names = ("above", "at_least", "below", "at_most")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def comparison(self) -> str:
        """Which limit is given: above, at_least, below or at_most."""
        return self._given()[0]

    @property
    def limit(self) -> Quantity:
        """The limit that is given."""
        quantity: Quantity = getattr(self, self.comparison)
        return quantity

    @property
    def upward(self) -> bool:
        """Whether larger values make it true."""
        return self.comparison in ("above", "at_least")

    def holds(self, value: float) -> bool:
        """Compare a value with the limit."""
        limit = self.limit.value
        match self.comparison:
            case "above":
                return value > limit
            case "at_least":
                return value >= limit
            case "below":
                return value < limit
            case _:
                return value <= limit

    @property
    def comparison_text(self) -> str:
        """The comparison in words, such as `<= 5 %`."""
        sign = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}[self.comparison]
        return f"{sign} {self.limit}"


class Signal(Comparing):
    """A measured value against a limit, over a window."""

    signal: str
    """Name of the signal; `docs/rules.md` lists them."""
    agg: Aggregate | None = None
    """How the window becomes one number; not with `share`, not needed for rates."""
    window: WindowText | None = None
    """How far back it looks; not with `agg: last`."""
    share: Annotated[Ratio, Field(gt=0, le=1)] | None = None
    """Share of the window's samples for which the comparison holds."""
    gpus: Gpus | None = None
    """Of all or of any of the job's cards; mandatory for signals of a card in `target: job`."""

    @model_validator(mode="after")
    def _fits_the_signal(self) -> Self:
        spec = signals.SIGNALS.get(self.signal)
        if spec is None:
            raise PydanticCustomError(
                "GW112",
                "{signal} is not a signal",
                {
                    "signal": repr(self.signal),
                    "at": ("signal",),
                    "known": tuple(signals.SIGNALS),
                    "word": self.signal,
                },
            )
        if self.limit.unit is not spec.unit:
            raise PydanticCustomError(
                "GW107",
                "{signal} is in {unit}: write the limit like {example}",
                {
                    "signal": self.signal,
                    "unit": str(spec.unit),
                    "example": quantities.EXAMPLES[spec.unit],
                    "at": (self.comparison,),
                },
            )
        self._check_window(spec)
        return self

    def _check_window(self, spec: signals.SignalSpec) -> None:
        if spec.rate and (self.share is not None or self.agg not in (None, "avg")):
            raise PydanticCustomError(
                "GW113",
                "{signal} is a rate over the window: it takes neither share nor an agg but avg",
                {"signal": self.signal, "at": ("share" if self.share is not None else "agg",)},
            )
        if not spec.rate and (self.agg is None) == (self.share is None):
            raise PydanticCustomError("GW113", "needs either agg or share", {})
        if (self.window is None) != (self.agg == "last"):
            raise PydanticCustomError(
                "GW113", "needs a window, unless agg is last, which takes none", {}
            )

    @property
    def spec(self) -> signals.SignalSpec:
        """What is known of the signal."""
        return signals.SIGNALS[self.signal]

    @property
    def key(self) -> SignalKey:
        """The query that measures it for the whole fleet."""
        agg: str = self.agg or "avg"
        if self.share is not None:
            # At least 80 % of samples are above a limit if the 20th percentile is.
            quantile = 1 - self.share if self.upward else self.share
            agg = f"q{round(quantile, 6):g}"
        window = self.window or Window()
        return SignalKey(self.signal, agg, window.seconds, window.samples)


class ProfileLimits(Strict):
    """Deviations from the profile; any of them suffices."""

    throughput: DeviationText | None = None
    """Images per second while training, as the trainer counts them."""
    gpu_memory: DeviationText | None = None
    """Memory per card, as NVML has it."""
    gpu_utilization: DeviationText | None = None
    """Utilization per card, as NVML has it."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.entries:
            raise PydanticCustomError(
                "GW111", "needs at least one of throughput, gpu_memory and gpu_utilization", {}
            )
        for name, deviation in self.entries.items():
            unit = signals.SIGNALS[name].unit
            if deviation.floor is not None and deviation.floor.unit is not unit:
                raise PydanticCustomError(
                    "GW107",
                    "{name} is in {unit}: write the floor like {example}",
                    {
                        "name": name,
                        "unit": str(unit),
                        "example": quantities.EXAMPLES[unit],
                        "at": (name,),
                    },
                )
        return self

    @property
    def entries(self) -> dict[str, Deviation]:
        """Signal -> deviation, in a fixed order."""
        given = {
            "throughput": self.throughput,
            "gpu_memory": self.gpu_memory,
            "gpu_utilization": self.gpu_utilization,
        }
        return {name: value for name, value in given.items() if value is not None}


class ProfileCondition(Strict):
    """The job is not what its profile expects."""

    profile: ProfileLimits
    """Which deviations count; any of them suffices."""
    window: WindowText
    """The mean over this window is compared."""
    gpus: Gpus = Gpus.ALL
    """For memory and utilization: of all or of any of the job's cards."""

    def key(self, name: str) -> SignalKey:
        """The query behind one entry."""
        return SignalKey(name, "avg", self.window.seconds, self.window.samples)

    @property
    def keys(self) -> tuple[SignalKey, ...]:
        """The queries behind all entries."""
        return tuple(self.key(name) for name in self.profile.entries)


class SilentFor(Strict):
    """No sign of life on any of the channels."""

    silent_for: Annotated[Seconds, Field(gt=0)]
    """How long."""
    signals: Annotated[tuple[Channel, ...], BeforeValidator(_some_tuple)]
    """Channels that must all be silent; only `cpu` is seen from outside the job."""


class Promql(Comparing):
    """The value of an expression, one number for each `job_id`, against a limit."""

    promql: Annotated[str, Field(min_length=1, max_length=4000)]
    """PromQL that gives a value, not a comparison; rows need the label job_id."""

    @model_validator(mode="after")
    def _plain_number(self) -> Self:
        if self.limit.unit is not Unit.COUNT:
            raise PydanticCustomError(
                "GW107",
                "the value of an expression has no unit: write the limit as a bare number",
                {"at": (self.comparison,)},
            )
        return self

    @property
    def key(self) -> SignalKey:
        """The query that measures it for the whole fleet."""
        return SignalKey("promql", "last", promql=self.promql)


class All(Strict):
    """Every condition holds."""

    all: Annotated[tuple[Condition, ...], BeforeValidator(_some_tuple)]


class Any_(Strict):  # noqa: N801 - typing.Any would be shadowed
    """At least one condition holds."""

    any: Annotated[tuple[Condition, ...], BeforeValidator(_some_tuple)]


class Not(Strict):
    """The condition does not hold; what is unknown stays unknown."""

    not_: Condition = Field(alias="not")


_KINDS = ("signal", "profile", "silent_for", "promql", "all", "any", "not")
_CLASSES: dict[str, str] = {
    "Signal": "signal",
    "ProfileCondition": "profile",
    "SilentFor": "silent_for",
    "Promql": "promql",
    "All": "all",
    "Any_": "any",
    "Not": "not",
}


def _kind(value: Any) -> str | None:
    """Which condition a mapping is, by the key that only that condition has."""
    if isinstance(value, Strict):
        return f"if:{_CLASSES[type(value).__name__]}"
    if not isinstance(value, Mapping):
        return None
    found = [kind for kind in _KINDS if kind in value]
    return f"if:{found[0]}" if len(found) == 1 else None


Condition = Annotated[
    Annotated[Signal, Tag("if:signal")]
    | Annotated[ProfileCondition, Tag("if:profile")]
    | Annotated[SilentFor, Tag("if:silent_for")]
    | Annotated[Promql, Tag("if:promql")]
    | Annotated[All, Tag("if:all")]
    | Annotated[Any_, Tag("if:any")]
    | Annotated[Not, Tag("if:not")],
    Discriminator(
        _kind,
        custom_error_type="GW110",
        custom_error_message=(
            "is not a condition: exactly one of signal, profile, silent_for, promql, all, any "
            "and not must be given"
        ),
    ),
]
"""One condition of a rule. Tags begin with `if:`, so that a place in a file is not mistaken."""


class OwnerMay(Strict):
    """What the owner may do against a deadline."""

    keep: Annotated[Seconds, Field(gt=0)]
    """How long one keep moves the deadline."""
    times: Annotated[StrictInt, Field(ge=0)]
    """How often, per run and rule for life; 0 is never."""


class Stage(Strict):
    """One step of the escalation."""

    level: Level
    """light, moderate or severe; severe is the only level that may end a job."""
    after: Seconds
    """Since the rule's `for` was met."""
    do: Action
    """log, notify or terminate."""
    owner_may: OwnerMay | None = None
    """Only with notify: how the owner may move the deadline."""
    notice_delivered_for: Seconds | None = None
    """Only with terminate, mandatory: since the last required recipient's notice was proven."""
    grace: Annotated[Seconds, Field(gt=0)] | None = None
    """Only with terminate, mandatory: between SIGTERM and SIGKILL."""
    max_work_lost: Seconds | None = None
    """Only with terminate, mandatory: a job whose last saved state is older is not ended."""

    @model_validator(mode="after")
    def _fits_the_action(self) -> Self:
        mandatory = ("notice_delivered_for", "grace", "max_work_lost")
        if self.do is Action.TERMINATE:
            missing = [name for name in mandatory if getattr(self, name) is None]
            if missing:
                raise PydanticCustomError(
                    "GW201",
                    "a stage that terminates has no defaults: {missing} must be given",
                    {"missing": ", ".join(missing)},
                )
            if self.level is not Level.SEVERE:
                raise PydanticCustomError(
                    "GW202", "only a severe stage may terminate", {"at": ("level",)}
                )
        else:
            extra = [name for name in mandatory if getattr(self, name) is not None]
            if extra:
                raise PydanticCustomError(
                    "GW203",
                    "{name} belongs to a stage that terminates",
                    {"name": extra[0], "at": (extra[0],)},
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
    description: str = ""
    """One sentence for owners."""
    mode: Mode = Mode.OBSERVE
    """observe: record what would be done; warn: also tell owners; enforce: also terminate."""
    target: Target
    """What it judges."""
    team: str = ""
    """The team whose jobs it judges, by the operator's directory; empty is every team."""
    match: Mapping[MatchKey, Pattern] = Field(default_factory=lambda: MappingProxyType({}))
    """Label -> anchored regular expression; a job that lacks the label does not match."""
    cold_start: Seconds
    """From the attempt's first use of a GPU; until then nothing is judged, and windows begin."""
    ignore_phases: Mapping[IgnorablePhase, Annotated[Seconds, Field(gt=0)]] = Field(
        default_factory=lambda: MappingProxyType({})
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
    stages: Annotated[tuple[Stage, ...], BeforeValidator(_some_tuple)]
    """The escalation, in order of `after`."""

    @property
    def terminates(self) -> bool:
        """Whether a stage would end a job, whatever the mode."""
        return any(stage.do is Action.TERMINATE for stage in self.stages)

    @property
    def enforces_terminate(self) -> bool:
        """Whether it may really end a job."""
        return self.terminates and self.mode is Mode.ENFORCE


class TerminateLimits(Strict):
    """How much may be ended; sliding, over restarts. 0 is none."""

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


class Profile(Strict):
    """What a model with these parameters should need on this hardware."""

    model: Words
    """Model name without directory and suffix, such as yolov8m."""
    batch: Annotated[StrictInt, Field(ge=1)]
    """Images per step over all ranks."""
    imgsz: Annotated[StrictInt, Field(ge=1)]
    """Image size in pixels."""
    hardware: Words
    """Product name of the cards, as NVML gives it."""
    gpus: Annotated[StrictInt, Field(ge=1)] = 1
    """Cards that the batch is spread over."""
    amp: StrictBool | None = None
    """Automatic mixed precision; not given is either."""
    gpu_memory: Bytes | None = None
    """Per card."""
    gpu_utilization: Annotated[Ratio, Field(gt=0, le=1)] | None = None
    """Per card, mean while training."""
    throughput: ImagesPerSecond | None = None
    """Over all cards, while training."""
    tolerance: Annotated[Ratio, Field(gt=0)] | None = None
    """Known spread of this profile; widens a rule's tolerance, never narrows it."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.gpu_memory is None and self.gpu_utilization is None and self.throughput is None:
            raise PydanticCustomError(
                "GW111", "needs at least one of gpu_memory, gpu_utilization and throughput", {}
            )
        return self

    @property
    def expected(self) -> dict[str, float]:
        """Signal -> expected value in base units."""
        given = {
            "throughput": self.throughput,
            "gpu_memory": self.gpu_memory,
            "gpu_utilization": self.gpu_utilization,
        }
        return {name: value for name, value in given.items() if value is not None}


class WhitelistMatch(Strict):
    """Who is protected; everything that is given must match exactly. Never free argv."""

    cgroup: Words | None = None
    """Path in the cgroup hierarchy; what lies below it is included."""
    user: Words | None = None
    """User name on the node."""
    executable: Annotated[str, Field(pattern=r"^/.*[^/]$")] | None = None
    """Absolute path of the executable; it must be that of every process that holds a GPU."""
    run: Words | None = None
    """The trainer's run_id."""
    job: Words | None = None
    """The node's job_id."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError(
                "GW111", "needs at least one of cgroup, user, executable, run and job", {}
            )
        return self


class WhitelistEntry(Strict):
    """A protection with its reason and its end."""

    match: WhitelistMatch
    """Who."""
    rules: Annotated[tuple[Identifier, ...], BeforeValidator(_some_tuple)]
    """From which rules."""
    reason: Words
    """Why; shown to operators."""
    approved_by: Words
    """Who allowed it."""
    expires: Annotated[AwareDatetime, BeforeValidator(_aware)]
    """With its offset from UTC; from then on it protects no more."""


class RuleSet(Strict):
    """One rule file, or several merged."""

    version: Literal[1]
    """Of the rule language."""
    timezone: Annotated[str, AfterValidator(_known_zone)] = "UTC"
    """IANA name; in which times are told to owners whose own zone is not known."""
    team: str = ""
    """If given, the rules of this file judge only this team's jobs."""
    limits: Limits | None = None
    """Mandatory where a rule enforces terminate; of several files the strictest count."""
    rules: Annotated[tuple[Rule, ...], BeforeValidator(_as_tuple)] = ()
    """The rules."""
    profiles: Annotated[tuple[Profile, ...], BeforeValidator(_as_tuple)] = ()
    """Expectations."""
    whitelist: Annotated[tuple[WhitelistEntry, ...], BeforeValidator(_as_tuple)] = ()
    """Protections."""


for _model in (All, Any_, Not, Rule, RuleSet):
    _model.model_rebuild()
