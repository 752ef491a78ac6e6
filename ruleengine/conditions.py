"""Conditions of rules, and how they combine."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpuwarden import quantities
from gpuwarden.fields import (
    DeviationText,
    Ratio,
    Seconds,
    Strict,
    Threshold,
    WindowText,
    some_tuple,
)
from gpuwarden.quantities import Deviation, Quantity, Unit, Window
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.budget_queries import used_share
from gpuwarden.ruleengine.described import Sentences
from gpuwarden.ruleengine.verdicts import SignalKey


class Gpus(StrEnum):
    """Of how many of the job's cards a condition must be true."""

    ALL = "all"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Of at least this share of the job's cards: more than 0, at most 1."""

    share: float

    @property
    def value(self) -> str:
        """As it is written, such as 75%."""
        return f"{round(100 * self.share, 4):g}%"

    def __str__(self) -> str:
        return self.value


def _of_cards(value: object) -> Gpus | GpuShare:
    if isinstance(value, (Gpus, GpuShare)):
        return value
    words = tuple(word.value for word in Gpus)
    if value in words:
        return Gpus(value)
    share = None
    if isinstance(value, str) and value.endswith("%"):
        share = quantities.parse_ratio(value)
    if share is None or not 0 < share <= 1:
        raise PydanticCustomError(
            "GW104",
            "{value} is neither all, any nor a share of the cards such as 75%",
            {"value": repr(value), "known": words, "word": str(value)},
        )
    return GpuShare(share)


OfCards = Annotated[
    Gpus | GpuShare,
    PlainValidator(_of_cards),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": [word.value for word in Gpus]},
                {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?%$"},
            ],
            "examples": ["all", "any", "75%"],
        }
    ),
    PlainSerializer(str, when_used="json"),
]
"""`all`, `any`, or at least a share of the job's cards."""
Aggregate = Literal["min", "max", "avg", "last"]
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

    def _check_plain(self) -> None:
        if self.limit.unit is not Unit.COUNT:
            raise PydanticCustomError(
                "GW107",
                "the value of an expression has no unit: write the limit as a bare number",
                {"at": (self.comparison,)},
            )

    def _given(self) -> list[str]:
        names = ("above", "at_least", "below", "at_most")
        return [name for name in names if getattr(self, name) is not None]

    @functools.cached_property
    def comparison(self) -> str:
        """Which limit is given: above, at_least, below or at_most."""
        return self._given()[0]

    @functools.cached_property
    def limit(self) -> Quantity:
        """The limit that is given."""
        quantity: Quantity = getattr(self, self.comparison)
        return quantity

    @functools.cached_property
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

    @functools.cached_property
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
    gpus: OfCards | None = None
    """Of all, of any, or of at least a share of the job's cards; mandatory for signals of a card in
    `target: job`."""

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

    @functools.cached_property
    def spec(self) -> signals.SignalSpec:
        """What is known of the signal."""
        return signals.SIGNALS[self.signal]

    @functools.cached_property
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

    @functools.cached_property
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
    gpus: OfCards = Gpus.ALL
    """For memory and utilization: of all, of any, or of at least a share of the job's cards."""

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
    signals: Annotated[tuple[Channel, ...], BeforeValidator(some_tuple)]
    """Channels that must all be silent; only `cpu` is seen from outside the job."""


class NoProgress(Strict):
    """The trainer counts no step, although it says that it trains."""

    no_progress_for: Annotated[Seconds, Field(gt=0)]
    """How long; unknown without a trainer, and while part of it was no training."""

    @functools.cached_property
    def key(self) -> SignalKey:
        """The query that measures it for the whole fleet: the steps in that time."""
        return SignalKey(signals.PROGRESS, "avg", self.no_progress_for)


class NeedsMemory(Strict):
    """The training that the job declares needs more of its cards' memory than this."""

    needs_memory: Annotated[Ratio, Field(gt=0)]
    """Share of the smallest of its cards; the lower end of the estimate must be above it."""


class Promql(Comparing):
    """The value of an expression, one number for each `job_id`, against a limit."""

    promql: Annotated[str, Field(min_length=1, max_length=4000)]
    """PromQL that gives a value, not a comparison; rows need the label job_id."""
    means: Sentences = ""
    """What the value is, in a few words for owners: notices have it before the figure."""
    unit: Literal["ratio", "seconds", "bytes"] | None = None
    """What notices tell the value in: per cent, a duration or a size; else it is a number."""

    @model_validator(mode="after")
    def _plain_number(self) -> Self:
        self._check_plain()
        return self

    @property
    def title(self) -> str:
        """What is compared: the expression, cut where it is long."""
        flat = " ".join(self.promql.split())
        return flat if len(flat) <= 60 else f"{flat[:57]}..."

    @functools.cached_property
    def key(self) -> SignalKey:
        """The query that measures it for the whole fleet."""
        return SignalKey("promql", "last", promql=self.promql)


class OverBudget(Comparing):
    """How much of its team's budget is used: of the hard ones of a period, the fullest."""

    over_budget: Literal["day", "week", "month"]
    """The period, by the calendar. NO for a job whose team has no hard budget of it; not known
    while its use is not known."""

    @model_validator(mode="after")
    def _share(self) -> Self:
        if self.limit.unit is not Unit.RATIO:
            raise PydanticCustomError(
                "GW107",
                "a budget is used by a share: write the limit like 100%",
                {"at": (self.comparison,)},
            )
        return self

    @property
    def promql(self) -> str:
        """The share for each job, by what the engine itself exported."""
        return used_share(self.over_budget)

    @property
    def title(self) -> str:
        """What is compared, in words."""
        return f"the used share of the team's budget of this {self.over_budget} is"

    @functools.cached_property
    def key(self) -> SignalKey:
        """The query that measures it for the whole fleet."""
        return SignalKey("promql", "last", promql=self.promql)


class SlurmWaiting(Strict):
    """Jobs that wait for a GPU in Slurm's queue, by the engine's own `squeue`."""

    partition: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    """Only those that may start in this partition; not given, in any."""


class KubernetesWaiting(Strict):
    """Pods that wait for a GPU in Kubernetes, by the word of its scheduler."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] | None = None
    """Only those in this namespace; not given, in any."""


class Waiting(Comparing):
    """Somebody waits for a GPU: one number for the whole cluster against a limit."""

    promql: Annotated[str, Field(min_length=1, max_length=4000)] | None = None
    """PromQL that gives exactly one row; no row, or several, is not known."""
    slurm: SlurmWaiting | None = None
    """Instead: how many jobs ask for a GPU in Slurm and wait for nothing but room or their turn."""
    kubernetes: KubernetesWaiting | None = None
    """Instead: how many pods have no node because none has a GPU for them."""
    fits: Annotated[bool, Field(strict=True)] | None = None
    """Whether also the job's end must let the first in line start, with what is idle already; not
    given, it must where that can be judged: not with `promql`, a number that has no shape."""

    @model_validator(mode="after")
    def _one_plain_number(self) -> Self:
        given = (self.promql, self.slurm, self.kubernetes)
        if sum(item is not None for item in given) != 1:
            raise PydanticCustomError(
                "GW111", "needs exactly one of promql, slurm and kubernetes", {}
            )
        if self.fits and not self.platform:
            raise PydanticCustomError(
                "GW106",
                "fits needs the queue itself: give slurm or kubernetes instead of promql",
                {},
            )
        self._check_plain()
        return self

    @property
    def platform(self) -> str:
        """Whose queue is asked, as in engine.yaml; empty for an expression."""
        if self.slurm is not None:
            return "slurm"
        return "" if self.kubernetes is None else "kubernetes"

    @property
    def place(self) -> str:
        """The queue that is meant among those of the platform, or empty for all."""
        if self.slurm is not None:
            return self.slurm.partition or ""
        return "" if self.kubernetes is None else self.kubernetes.namespace or ""

    @property
    def fit(self) -> bool:
        """Whether the job's end must serve who waits."""
        return bool(self.platform) and self.fits is not False

    @functools.cached_property
    def key(self) -> SignalKey:
        """What measures it."""
        if self.slurm is not None:
            return SignalKey(f"slurm_waiting:{self.place}", "last")
        if self.kubernetes is not None:
            return SignalKey(f"kubernetes_waiting:{self.place}", "last")
        return SignalKey("waiting", "last", promql=self.promql or "")

    def __str__(self) -> str:
        """What is compared with what, in words."""
        what = self.promql
        if self.slurm is not None:
            place = f" in its partition {self.slurm.partition}" if self.slurm.partition else ""
            what = f"the number of jobs that wait for a GPU in Slurm{place} is"
        if self.kubernetes is not None:
            place = f" in its namespace {self.place}" if self.place else ""
            what = f"the number of pods that wait for a GPU in Kubernetes{place} is"
        served = ", and the first in line could start on its cards" if self.fit else ""
        return f"{what} {self.comparison_text}{served}"


class All(Strict):
    """Every condition holds."""

    all: Annotated[tuple[Condition, ...], BeforeValidator(some_tuple)]
    """Conditions; the least of their truths is the truth. Their order changes no verdict. In a
    large fleet the first that measures is asked of everybody, all others of the jobs that it
    leaves: let it be one that is NO of most jobs."""


class Any_(Strict):  # noqa: N801 - typing.Any would be shadowed
    """At least one condition holds."""

    any: Annotated[tuple[Condition, ...], BeforeValidator(some_tuple)]
    """Conditions; the greatest of their truths is the truth."""


class Not(Strict):
    """The condition does not hold; what is unknown stays unknown."""

    not_: Condition = Field(alias="not")
    """A condition; its truth is turned around."""


Single = Signal | SilentFor | NoProgress | NeedsMemory | Promql | OverBudget
"""A condition that gives one piece of evidence."""
Leaf = Single | ProfileCondition
"""A condition that measures something."""

_KINDS = (
    "signal",
    "profile",
    "silent_for",
    "no_progress_for",
    "needs_memory",
    "promql",
    "over_budget",
    "all",
    "any",
    "not",
)
_CLASSES: dict[str, str] = {
    "Signal": "signal",
    "ProfileCondition": "profile",
    "SilentFor": "silent_for",
    "NoProgress": "no_progress_for",
    "NeedsMemory": "needs_memory",
    "Promql": "promql",
    "OverBudget": "over_budget",
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
    | Annotated[NoProgress, Tag("if:no_progress_for")]
    | Annotated[NeedsMemory, Tag("if:needs_memory")]
    | Annotated[Promql, Tag("if:promql")]
    | Annotated[OverBudget, Tag("if:over_budget")]
    | Annotated[All, Tag("if:all")]
    | Annotated[Any_, Tag("if:any")]
    | Annotated[Not, Tag("if:not")],
    Discriminator(
        _kind,
        custom_error_type="GW110",
        custom_error_message=(
            "is not a condition: exactly one of signal, profile, silent_for, no_progress_for, "
            "needs_memory, promql, over_budget, all, any and not must be given"
        ),
    ),
]
"""One condition of a rule. Tags begin with `if:`, so that a place in a file is not mistaken."""


def leaves(condition: Condition) -> Iterator[Leaf]:
    """The conditions that measure something, in their order."""
    match condition:
        case All():
            for part in condition.all:
                yield from leaves(part)
        case Any_():
            for part in condition.any:
                yield from leaves(part)
        case Not():
            yield from leaves(condition.not_)
        case _:
            yield condition


for _model in (All, Any_, Not):
    _model.model_rebuild()
