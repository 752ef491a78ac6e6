"""Any rule that can be written, and any job: strategies built from the language's own tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from tests.ruleengine.fleets import A100, GIB, NOW_FACTS, a_job, a_run

from gpuwarden.quantities import Unit
from gpuwarden.ruleengine.model import Rule
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.signals import SIGNALS, SignalSpec
from gpuwarden.ruleengine.verdicts import GpuFacts, JobFacts, SignalKey

if TYPE_CHECKING:
    import random

    from gpuwarden.ruleengine.conditions import Condition

Written = dict[str, Any]

LIMITS: dict[Unit, list[str]] = {
    Unit.RATIO: ["0%", "5%", "50%", "95%"],
    Unit.BYTES: ["1GiB", "10.5GiB", "30GiB"],
    Unit.BYTES_PER_SECOND: ["20MiB/s", "1GiB/s"],
    Unit.IMAGES_PER_SECOND: ["5 img/s", "78 img/s"],
    Unit.STEPS_PER_SECOND: ["0.5 steps/s", "2 steps/s"],
    Unit.WATTS: ["100W", "250W"],
    Unit.CELSIUS: ["60C", "88C"],
    Unit.CORES: ["0.1 cores", "2 cores"],
    Unit.COUNT: ["1", "3"],
}
NUMBERS = (0.0, 0.03, 0.05, 0.5, 0.96, 1.0, 3.0, 60.0, 88.0, 120.0, 2.0 * GIB, 31.0 * GIB)
"""Values on either side of the limits, and at them."""
_SIDES = st.sampled_from(["above", "at_least", "below", "at_most"])
_WINDOWS = st.sampled_from(["4 samples", "30s", "5m", "15m"])
_GPUS = st.sampled_from(["all", "any", "50%", "100%"])
_SHARES = st.sampled_from(["25%", "80%", "100%"])
_DEVIATIONS = {
    "throughput": ["below 15%", "outside 30%, at least 5 img/s"],
    "gpu_memory": ["above 15%", "above 10%, at least 2GiB"],
    "gpu_utilization": ["below 20%", "outside 10%"],
}


def _limit(draw: st.DrawFn, spec: SignalSpec) -> Written:
    text = draw(st.sampled_from(LIMITS[spec.unit]))
    return {draw(_SIDES): float(text) if spec.unit is Unit.COUNT else text}


@st.composite
def signals(draw: st.DrawFn, *, device: bool = False) -> Written:
    """A comparison of any signal, over a window of any kind; for cards only what cards show."""
    names = [name for name, spec in SIGNALS.items() if spec.device or not device]
    spec = SIGNALS[draw(st.sampled_from(names))]
    written: Written = {"signal": spec.name, **_limit(draw, spec)}
    if spec.rate:
        written["window"] = draw(_WINDOWS)
    else:
        how = draw(st.sampled_from(["min", "max", "avg", "last", "share"]))
        written |= {"share": draw(_SHARES)} if how == "share" else {"agg": how}
        if how != "last":
            written["window"] = draw(_WINDOWS)
    if spec.per_gpu and not device:
        written["gpus"] = draw(_GPUS)
    return written


@st.composite
def _profiles(draw: st.DrawFn) -> Written:
    names = draw(st.lists(st.sampled_from(sorted(_DEVIATIONS)), min_size=1, unique=True))
    entries = {name: draw(st.sampled_from(_DEVIATIONS[name])) for name in names}
    return {"profile": entries, "window": draw(_WINDOWS), "gpus": draw(_GPUS)}


_CHANNELS = st.lists(st.sampled_from(["log", "heartbeat", "cpu"]), min_size=1, unique=True)
_LENGTHS = st.sampled_from(["30s", "5m", "1h"])
LEAVES: st.SearchStrategy[Written] = st.one_of(
    signals(),
    _profiles(),
    st.builds(lambda length, on: {"silent_for": length, "signals": on}, _LENGTHS, _CHANNELS),
    st.builds(lambda length: {"no_progress_for": length}, _LENGTHS),
    st.sampled_from([{"needs_memory": "50%"}, {"needs_memory": "80%"}]),
    st.builds(lambda side: {"over_budget": "month", side: "100%"}, _SIDES),
    st.builds(
        lambda side, name: {"promql": f"max by (job_id) ({name})", side: 1},
        _SIDES,
        st.sampled_from(["a", "b"]),
    ),
)
"""Every condition that measures."""


def trees(leaves: st.SearchStrategy[Written]) -> st.SearchStrategy[Written]:
    """Conditions of these under any nesting of all, any and not."""
    return st.recursive(
        leaves,
        lambda below: st.one_of(
            st.lists(below, min_size=1, max_size=3).map(lambda parts: {"all": parts}),
            st.lists(below, min_size=1, max_size=3).map(lambda parts: {"any": parts}),
            below.map(lambda part: {"not": part}),
        ),
        max_leaves=5,
    )


CONDITIONS = trees(LEAVES)
_NOTHING = st.none()
_WAITING = st.sampled_from(
    [None, None, {"promql": "sum(a)", "above": 0}, {"slurm": {"partition": "x"}, "at_least": 1}]
)


SAVE: Written = {"level": "moderate", "after": "2m", "do": "checkpoint"}
LEAVE: Written = {
    "level": "severe",
    "after": "4m",
    "do": "yield",
    "notice_delivered_for": "2m",
    "grace": "5m",
}


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """A rule about jobs in enforce, graded or not, that tells, maybe asks, and ends."""
    grade = st.one_of(_NOTHING, CONDITIONS)
    stages: list[Written] = [
        {"level": "light", "after": "0s", "do": "log", "when": draw(grade)},
        {"level": "moderate", "after": "1m", "do": "notify", "when": draw(grade)},
        *draw(st.sampled_from([[], [], [SAVE], [LEAVE | {"when": draw(grade)}], [SAVE, LEAVE]])),
        {
            "level": "severe",
            "after": "5m",
            "do": "terminate",
            "when": draw(grade),
            "notice_delivered_for": "2m",
            "grace": "60s",
            "max_work_lost": "40h",
        },
    ]
    written: Written = {
        "id": "any",
        "mode": "enforce",
        "target": "job",
        "team": draw(st.sampled_from(["", "", "vision"])),
        "match": draw(st.sampled_from([{}, {}, {"user": "ana|ben"}, {"model": "yolo.*"}])),
        "cold_start": draw(st.sampled_from(["0s", "60s", "1h"])),
        "ignore_phases": draw(st.sampled_from([{}, {"validate": "30m"}])),
        "when": draw(CONDITIONS),
        "for": draw(st.sampled_from(["0s", "1m"])),
        "clear_after": draw(st.sampled_from(["0s", "2m"])),
        "trust_for": draw(st.sampled_from(["0s", "10m"])),
        "only_if_waiting": draw(_WAITING),
        "stages": [{k: v for k, v in stage.items() if v is not None} for stage in stages],
    }
    hours = draw(st.sampled_from([None, None, {"from": "22:00", "to": "06:00", "zone": "UTC"}]))
    if hours is not None:
        written["only_during"] = [hours]
    return Rule.model_validate({k: v for k, v in written.items() if v is not None})


def keys_of(rule: Rule) -> tuple[SignalKey, ...]:
    """Every query that a rule's conditions need, in a fixed order."""
    conditions: tuple[Condition, ...] = rule.conditions
    return tuple(sorted({key for each in conditions for key in condition_keys(each)}))


def a_whole_job(rule: Rule, dice: random.Random, job_id: str = "j") -> JobFacts:
    """A job on one to three cards of which everything that the rule asks for is known."""
    gpus = tuple(
        GpuFacts(f"{job_id}-g{index}", str(index), A100, 40 * GIB)
        for index in range(dice.randint(1, 3))
    )
    values = {}
    for key in keys_of(rule):
        spec = SIGNALS.get(key.signal)
        names = [gpu.uuid for gpu in gpus] if spec is not None and spec.per_gpu else [""]
        values[key] = {name: dice.choice(NUMBERS) for name in names}
    moments = {name: NOW_FACTS - dice.choice((1, 40, 400, 4000)) for name in ("log", "heartbeat")}
    run = a_run(
        phase=dice.choice(["train", "validate"]),
        phase_since=NOW_FACTS - dice.choice((60, 3600)),
        batch=dice.choice([16, 64, 512]),
        amp=True,
    )
    return a_job(
        values,
        job_id=job_id,
        user=dice.choice(["ana", "eve"]),
        team=dice.choice(["vision", "speech"]),
        gpus=gpus,
        start_time=NOW_FACTS - 90_000,
        first_gpu_use=NOW_FACTS - 86_400,
        run=run,
        activity={**moments, "cpu": NOW_FACTS - dice.choice((1, 40, 400, 4000))},
    )


def with_losses(job: JobFacts, dice: random.Random) -> JobFacts:
    """The same job with some of it unknown: values, its CPU's last use, a card's size or tenants.

    What is lost is never what says that a job never had a channel, or no trainer: that is known.
    """
    values = {}
    for key, known in job.values.items():
        left = {name: value for name, value in known.items() if dice.random() < 0.7}
        if left:
            values[key] = left
    activity = dict(job.activity)
    if dice.random() < 0.2:
        activity = {}
    gpus = tuple(
        replace(
            gpu,
            memory_total_bytes=dice.choice([gpu.memory_total_bytes, None]),
            tenants=dice.choice([1, 1, 2]),
        )
        for gpu in job.gpus
    )
    lost = replace(job, values=values, activity=activity, gpus=gpus)
    return dice.choice([lost, lost, lost, replace(job, first_gpu_use=None, start_time=None)])
