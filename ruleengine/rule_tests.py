"""Inline tests of rules: what jobs do in a made-up fleet, and what the rules must say of it.

These are the words under `tests:` of a rule file; `histories.py` makes series of them and
`rehearsals.py` judges those.
"""

from __future__ import annotations

import datetime as dt
import itertools
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpuwarden import quantities
from gpuwarden.fields import (
    Identifier,
    Ratio,
    Seconds,
    Strict,
    Words,
    as_tuple,
    aware,
    some_tuple,
)
from gpuwarden.quantities import Unit
from gpuwarden.ruleengine.notations import parse_selector, parse_values

Likeness = Literal["healthy", "idle", "hog", "spinning", "starved"]
Phase = Literal["setup", "scan", "train", "validate", "checkpoint", "export", "done"]
DEFAULT_START = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
"""A Monday at noon, long ago, so that a test without `start` means the same on every day."""


def _reader(unit: Unit) -> BeforeValidator:
    """Reads a number of this unit that is written with it; gives it in the base unit."""

    def read(value: object) -> float:
        quantity = quantities.parse_quantity(value)
        if quantity.unit is unit:
            return quantity.value
        example = quantities.EXAMPLES[unit]
        raise quantities.MalformedQuantity(
            f"{value} is in {quantity.unit}, not in {unit}: write it like {example}"
            if quantity.unit is not Unit.COUNT
            else f"{value} lacks a unit: write it like {example}"
        )

    return BeforeValidator(read)


def _written(example: str) -> WithJsonSchema:
    pattern = quantities.QUANTITY_PATTERN
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


_Share = Annotated[Ratio, Field(ge=0, le=1)]
_Memory = Annotated[float, _reader(Unit.BYTES), _written("20GiB")]
_Celsius = Annotated[float, _reader(Unit.CELSIUS), _written("65C")]
_Watts = Annotated[float, _reader(Unit.WATTS), _written("280W")]
_Cores = Annotated[float, _reader(Unit.CORES), _written("0.5 cores")]
_Images = Annotated[float, _reader(Unit.IMAGES_PER_SECOND), _written("100 img/s")]


def _selector(text: str) -> str:
    parse_selector(text)
    return text


def _values(text: str) -> str:
    parse_values(text)
    return text


def _spelt(value: object) -> object:
    """Tools that still read YAML 1.1 make truth values of yes and no."""
    return ("yes" if value else "no") if isinstance(value, bool) else value


_Word = Annotated[
    Literal["yes", "no", "unknown", "none"],
    BeforeValidator(_spelt),
    WithJsonSchema(
        {"anyOf": [{"enum": ["yes", "no", "unknown", "none"]}, {"type": "boolean"}]},
    ),
]


class CardConduct(Strict):
    """What one card shows of a job."""

    utilization: _Share | None = None
    """Of the card, by the job."""
    memory: _Memory | None = None
    """Of the card, held by the job."""
    temperature: _Celsius | None = None
    """Of the card."""
    power: _Watts | None = None
    """Of the card, whose limit is 400W."""


class Conduct(CardConduct):
    """What a job does, from a moment on; what is not given follows from `like`."""

    like: Likeness | None = None
    """See below; healthy where nothing is given."""
    cards: Annotated[tuple[CardConduct, ...], BeforeValidator(as_tuple)] = ()
    """Of single cards, in their order, where they differ."""
    cpu: _Cores | None = None
    """CPU cores in use."""
    log: StrictBool | None = None
    """Whether it writes to its log."""
    heartbeat: StrictBool | None = None
    """Whether its trainer's heartbeat goes on."""
    phase: Phase | None = None
    """Of its training."""
    throughput: _Images | None = None
    """While training."""
    data_wait: _Share | None = None
    """Share of the training time in which it waits for data."""
    gone: StrictBool | None = None
    """Whether the job has ended."""


class ConductChange(Conduct):
    """A change of what a job does; with `like` everything begins anew, else the rest stays."""

    at: Seconds
    """Since the start of the test."""


class DeclaredRun(Strict):
    """What a job's trainer says of itself."""

    id: Words | None = None
    """The run_id; `run-of-` and the job's name where it is not given."""
    model: Words = "yolov8m"
    """Model name."""
    batch: Annotated[StrictInt, Field(ge=1)] = 64
    """Images per step."""
    imgsz: Annotated[StrictInt, Field(ge=1)] = 640
    """Image size in pixels."""
    amp: StrictBool = True
    """Automatic mixed precision."""
    project: str = ""
    """Project."""
    saves_every: Annotated[Seconds, Field(gt=0)] | None = None
    """How often its state is saved, whatever it does; not given is never."""


class DeclaredJob(Conduct):
    """A job whose series are made from few words."""

    job: Words
    """The job_id; the agent ends those that begin with `proc-`."""
    user: str = "ana"
    """Its owner."""
    team: str = ""
    """The owner's team, as the directory would say."""
    framework: str = "torch"
    """As the exporter would say."""
    source: str = "process"
    """What tells of the job: process, slurm, ..."""
    interactive: StrictBool = False
    """A tty or a Jupyter kernel."""
    executable: Words = "/usr/bin/python3.11"
    """Of its process."""
    cgroup: Words = "/user.slice"
    """Of its process."""
    node: Words = "n1:9835"
    """Prometheus target of its node."""
    gpus: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """How many cards it holds; they are called GPU-<job>-0 and so on."""
    uuids: Annotated[tuple[Words, ...], BeforeValidator(as_tuple)] = ()
    """Names of its cards instead; two jobs that name the same one share it."""
    hardware: Words = "NVIDIA A100-SXM4-40GB"
    """Product name of its cards."""
    mig: Words | None = None
    """Its cards are MIG instances of this profile, such as 3g.20gb, each of a card of its own.
    Their utilization is known only of hardware named after Hopper or Blackwell (H..., B...)."""
    card_memory: _Memory | None = None
    """Of each card; 40GiB where it is not given."""
    age: Seconds = 0.0
    """Before it begins in the test, it has held its cards for so long."""
    begins: Seconds = 0.0
    """Since the start of the test; it is not there before."""
    run: DeclaredRun | None = None
    """Not given is a job without a trainer that speaks."""
    then: Annotated[tuple[ConductChange, ...], BeforeValidator(as_tuple)] = ()
    """What it does later, in order of `at`."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        times = [change.at for change in self.then]
        if any(b <= a for a, b in itertools.pairwise(times)):
            raise PydanticCustomError("GW230", "must be in order of `at`", {"at": ("then",)})
        return self

    @property
    def card_names(self) -> tuple[str, ...]:
        """UUIDs of its cards, in their order."""
        kind = "GPU" if self.mig is None else "MIG"
        return self.uuids or tuple(f"{kind}-{self.job}-{index}" for index in range(self.gpus))

    @property
    def whole_cards(self) -> tuple[str, ...]:
        """UUIDs of the cards that its MIG instances are of, in their order."""
        return () if self.mig is None else tuple(f"GPU-of-{uuid}" for uuid in self.card_names)


class InputSeries(Strict):
    """One series as promtool writes them; it replaces one of the same labels that a job makes."""

    series: Annotated[str, AfterValidator(_selector)]
    """Name and labels, such as `up{instance="n1:9835",job="gpuwarden"}`."""
    values: Annotated[str, AfterValidator(_values)]
    """`a+bxn`, `axn`, numbers, `_` or `_xn` for lost scrapes, `stale`; in quotes, as '0x9'."""


class DeclaredKeep(Strict):
    """An owner keeps a job. What the rule does not let owners do changes nothing, as in life."""

    at: Seconds
    """Since the start of the test; it holds from the next evaluation on."""
    rule: Identifier
    """Against which deadline."""
    job: Words
    """Which job."""
    for_: Annotated[Seconds, Field(gt=0)] = Field(alias="for")
    """By how long it is put off."""


class Halt(Strict):
    """A time in which the kill switch is on."""

    begin: Seconds = Field(alias="from")
    """Since the start of the test."""
    until: Seconds
    """Since the start of the test."""


class Outage(Strict):
    """A time in which a node is not scraped."""

    node: Words
    """Prometheus target."""
    begin: Seconds = Field(alias="from")
    """Since the start of the test."""
    until: Seconds
    """Since the start of the test."""


class Expectation(Strict):
    """What the rules must have come to at a moment; what is not given is not compared."""

    at: Seconds
    """Since the start of the test; the last tick up to then counts."""
    rule: Identifier
    """Whose verdict."""
    job: Words | None = None
    """Of which job; or `gpu`."""
    gpu: Words | None = None
    """Of which card, by its UUID, for a rule with `target: gpu`."""
    verdict: _Word | None = None
    """none: the job is not there, or the rule is not about it."""
    reason: Words | None = None
    """Why UNKNOWN: cold_start, phase, no_data, dark_node, shared_card, no_profile, ...; or none."""
    stage: Words | None = None
    """The last stage entered, such as moderate-notify, or none."""
    terminate: StrictBool | None = None
    """Whether the job would have been ended (terminate, requeue) by then, were the mode enforce."""
    act: Literal["none", "checkpoint", "yield", "requeue", "terminate"] | None = None
    """The hardest that would have been done to it by then, were the mode enforce. In a test nobody
    who is asked to leave does."""
    held_by: Words | None = None
    """What then keeps a job that is due: work_lost, limit_per_hour, kill_switch, ...; or none."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.job is None) == (self.gpu is None):
            raise PydanticCustomError("GW111", "needs exactly one of job and gpu", {})
        compared = (
            *(self.verdict, self.reason, self.stage),
            *(self.terminate, self.act, self.held_by),
        )
        if all(value is None for value in compared):
            raise PydanticCustomError(
                "GW111",
                "compares nothing: give verdict, reason, stage, terminate, act or held_by",
                {},
            )
        return self

    @property
    def subject(self) -> str:
        """The job or the card."""
        return self.job or self.gpu or ""


class RuleTest(Strict):
    """One test: a history and what must follow from it."""

    name: Words
    """What is claimed; unique in its file."""
    start: Annotated[AwareDatetime, BeforeValidator(aware)] = DEFAULT_START
    """When the history begins; matters to rules that look at the time of day."""
    interval: Annotated[Seconds, Field(ge=1)] = 5.0
    """Between two scrapes, and between the values of `series`."""
    tick: Annotated[Seconds, Field(ge=1)] = 60.0
    """Between two evaluations; shorter is more exact and takes longer."""
    notices: Literal["delivered", "lost"] = "delivered"
    """Whether what owners are told reaches them."""
    jobs: Annotated[tuple[DeclaredJob, ...], BeforeValidator(as_tuple)] = ()
    """Jobs in few words."""
    series: Annotated[tuple[InputSeries, ...], BeforeValidator(as_tuple)] = ()
    """Series in full."""
    outages: Annotated[tuple[Outage, ...], BeforeValidator(as_tuple)] = ()
    """When nodes are dark."""
    keeps: Annotated[tuple[DeclaredKeep, ...], BeforeValidator(as_tuple)] = ()
    """What owners keep, in order of `at`."""
    kill_switch: Annotated[tuple[Halt, ...], BeforeValidator(as_tuple)] = ()
    """When nothing at all is ended."""
    expect: Annotated[tuple[Expectation, ...], BeforeValidator(some_tuple)]
    """What must follow."""

    @property
    def length(self) -> float:
        """Seconds from the start to the last expectation."""
        return max(item.at for item in self.expect)

    @property
    def rules(self) -> frozenset[str]:
        """Ids of the rules that it is about."""
        return frozenset(item.rule for item in self.expect)
