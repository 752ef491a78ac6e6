"""Tricks of what a job does: attempts, real work on card and CPU, and keeps. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gpuwarden.quantities import Unit
from gpuwarden.ruleengine.attacks import (
    HASTE,
    Play,
    beside,
    card_memory,
    changed,
    every_leaf,
    held_memory,
    merged,
    run_of,
)
from gpuwarden.ruleengine.conditions import Gpus, GpuShare, NoProgress, Signal, SilentFor
from gpuwarden.ruleengine.histories import LIKENESSES
from gpuwarden.ruleengine.rule_tests import CardConduct, ConductChange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.attacks import Target
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.rule_tests import DeclaredJob
    from gpuwarden.ruleengine.verdicts import SignalKey

PARTS = 4
"""Into how many jobs one is split."""
SPIN_CORES = 0.05
"""CPU time that an idle job burns to look alive; an exporter calls a job active from 1 % on."""
MAX_ATTEMPTS = 40
MAX_CHANGES = 2000
DECOY_LOAD = 0.1
"""Of the card that a job holds for show; a rule calls it idle up to a few per cent."""
_GIVEN_UP = 0.97
"""Share of a limit that a job stays under."""


# -- attempts


def _attempts(target: Target, lasts: float, **change: Any) -> Play | None:
    """One attempt after the other on the same cards, each for that long."""
    lasts = max(lasts, 4 * target.interval)
    count = min(int(target.length / lasts) + 1, MAX_ATTEMPTS)
    if count < 2:
        return None
    return Play(
        tuple(_attempt(target.job, number, lasts, change) for number in range(count)),
    )


def _attempt(job: DeclaredJob, number: int, lasts: float, change: Mapping[str, Any]) -> DeclaredJob:
    begin = number * lasts
    end = ConductChange.model_construct(at=begin + lasts, gone=True)
    then = merged((item.model_copy(update={"at": item.at + begin}) for item in job.then), (end,))
    kept = tuple(item for item in then if item.at <= end.at)
    # Only the first can have been there before the test.
    age = job.age if number == 0 else 0.0
    name = f"{job.job}-{number + 1}"
    return beside(job, name, begins=begin, then=kept, age=age, **change)


def restarts(target: Target) -> Play | None:
    """One attempt after the other, each gone before the rule finds it."""
    return _attempts(target, HASTE * target.found)


def believed(target: Target) -> Play | None:
    """Each attempt says that it is alive, and ends before its word counts no more."""
    rule = target.rule
    heard = bool(rule.ignore_phases) or any(
        isinstance(leaf, SilentFor) and set(leaf.signals) - {"cpu"} for leaf in every_leaf(rule)
    )
    if not heard:
        return None
    lasts = target.found - rule.for_ + HASTE * rule.trust_for
    return _attempts(target, lasts, log=True, heartbeat=True, run=run_of(target.job))


def split(target: Target) -> Play:
    """Several jobs that do together what one did."""
    job = target.job
    like = LIKENESSES[job.like or "healthy"]
    load = like.utilization if job.utilization is None else job.utilization
    pace = like.throughput if job.throughput is None else job.throughput
    parts = tuple(
        beside(
            job,
            f"{job.job}-part-{number + 1}",
            memory=held_memory(job) / PARTS,
            utilization=load / PARTS,
            throughput=pace / PARTS,
        )
        for number in range(PARTS)
    )
    return Play(parts, every=True)


def shared(target: Target) -> Play:
    """A helper holds the card too."""
    job = target.job
    helper = beside(
        job, f"{job.job}-helper", like="idle", memory=0.01 * card_memory(job), run=None, cards=()
    )
    return Play((beside(job, job.job),), (helper,))


# -- work


def _low(rule: Rule) -> list[Signal]:
    """Conditions that a card does little."""
    return [
        leaf
        for leaf in every_leaf(rule)
        if isinstance(leaf, Signal)
        and leaf.signal in ("gpu_utilization", "card_utilization")
        and not leaf.upward
    ]


def _length(key: SignalKey, interval: float) -> float:
    return key.samples * interval if key.samples is not None else key.window_seconds


def trickle(target: Target) -> Play | None:
    """Load in single scrapes, twice in every window, as high as its limit asks for."""
    low = _low(target.rule)
    if not low:
        return None
    job, step = target.job, target.interval
    window = min(_length(leaf.key, step) for leaf in low)
    every = max(window / 2, 2 * step)
    spike = min(1.0, max(0.1, 2 * max(leaf.limit.value for leaf in low)))
    base = (
        LIKENESSES[job.like or "healthy"].utilization
        if job.utilization is None
        else job.utilization
    )
    count = min(int(target.length / every), MAX_CHANGES // 2)
    changes = []
    for number in range(1, count + 1):
        at = job.begins + round(number * every / step) * step
        changes += [
            ConductChange.model_construct(at=at, utilization=spike),
            ConductChange.model_construct(at=at + step, utilization=base),
        ]
    return Play((changed(job, then=merged(job.then, changes)),))


def spin(target: Target) -> Play | None:
    """It looks alive by its CPU."""
    silent = any(
        isinstance(leaf, SilentFor) and "cpu" in leaf.signals for leaf in every_leaf(target.rule)
    )
    return Play((changed(target.job, cpu=SPIN_CORES),)) if silent else None


def under(target: Target) -> Play | None:
    """Just below the highest limit on memory."""
    limits = [_bytes(leaf, target.job) for leaf in _memory_limits(target.rule)]
    if not limits:
        return None
    return Play((changed(target.job, memory=_GIVEN_UP * max(limits)),))


def _memory_limits(rule: Rule) -> list[Signal]:
    """Conditions that a card's memory is held."""
    return [
        leaf
        for leaf in every_leaf(rule)
        if isinstance(leaf, Signal)
        and leaf.upward
        and "memory" in leaf.signal
        and leaf.limit.unit in (Unit.RATIO, Unit.BYTES)
        and leaf.spec.per_gpu
    ]


def _bytes(leaf: Signal, job: DeclaredJob) -> float:
    """A limit on a card's memory."""
    return leaf.limit.value * (card_memory(job) if leaf.limit.unit is Unit.RATIO else 1.0)


def dips(target: Target) -> Play | None:
    """Memory just below the lowest limit, for as short as makes the window's condition false."""
    job, step = target.job, target.interval
    held = held_memory(job)
    limits = [
        (_bytes(leaf, job), leaf)
        for leaf in _memory_limits(target.rule)
        if leaf.share is not None or leaf.agg == "min"
    ]
    lower = [(limit, leaf) for limit, leaf in limits if limit < held]
    if not lower:
        return None
    limit, leaf = min(lower, key=lambda pair: pair[0])
    window = _length(leaf.key, step)
    lasts = (1 - (leaf.share or 1.0)) * window // step * step + step
    every = max(window / 2 if leaf.share is None else window // step * step, lasts + step)
    count = min(int(target.length / every), MAX_CHANGES // 2)
    changes = []
    for number in range(1, count + 1):
        at = job.begins + round(number * every / step) * step
        changes += [
            ConductChange.model_construct(at=at, memory=_GIVEN_UP * limit),
            ConductChange.model_construct(at=at + lasts, memory=held),
        ]
    return Play((changed(job, then=merged(job.then, changes)),))


def decoy(target: Target) -> Play | None:
    """Cards besides, on which it works a little: so many that too few of its cards are idle."""
    idle = [leaf for leaf in _low(target.rule) if leaf.gpus not in (None, Gpus.ANY)]
    if not idle:
        return None
    job, count = target.job, len(target.job.card_names)
    share = max(leaf.gpus.share if isinstance(leaf.gpus, GpuShare) else 1.0 for leaf in idle)
    more = math.floor(count * (1 - share) / share) + 1
    load = min(1.0, max(DECOY_LOAD, 2 * max(leaf.limit.value for leaf in idle)))
    cards = [*job.cards, *[CardConduct()] * (count - len(job.cards))]
    return Play(
        (
            changed(
                job,
                uuids=(*job.card_names, *(f"GPU-{job.job}-decoy-{n + 1}" for n in range(more))),
                cards=(*cards, *[CardConduct.model_construct(utilization=load)] * more),
            ),
        )
    )


def crawl(target: Target) -> Play | None:
    """A step now and then, so that it is never without progress for long enough."""
    waits = [
        leaf.no_progress_for for leaf in every_leaf(target.rule) if isinstance(leaf, NoProgress)
    ]
    if not waits:
        return None
    job, step = target.job, target.interval
    every = max(HASTE * min(waits) // step * step, 2 * step)
    pace = run_of(job).batch / step
    count = min(int(target.length / every), MAX_CHANGES // 2)
    changes = []
    for number in range(1, count + 1):
        at = job.begins + number * every
        changes += [
            ConductChange.model_construct(at=at, throughput=pace),
            ConductChange.model_construct(at=at + step, throughput=0.0),
        ]
    return Play((changed(job, then=merged(job.then, changes)),))


# -- grants


def keeps(target: Target) -> Play | None:
    """Its owner keeps it as often as the rule allows."""
    granted = any(stage.owner_may is not None for stage in target.rule.stages)
    if not granted or not target.rule.ends:
        return None
    return Play((target.job,), keeps=True)
