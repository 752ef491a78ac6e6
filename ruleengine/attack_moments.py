"""Tricks that wait for a rule's deadlines: shortly before each of them the job speaks up. Pure.

Whoever can turn a deadline back for a moment's effort escapes for ever, and cheaply. What a job
says in such a moment stops the rule's clock, within `trust_for`, and turns none back. What it
really does may: a rule sees it for as long as its windows remember it, and `clear_after` has to be
longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.quantities import Unit
from gpuwarden.ruleengine.attacks import Play, changed, every_leaf, merged, run_of
from gpuwarden.ruleengine.conditions import Signal, SilentFor
from gpuwarden.ruleengine.histories import LIKENESSES
from gpuwarden.ruleengine.rule_tests import ConductChange

if TYPE_CHECKING:
    from gpuwarden.ruleengine.attacks import Target
    from gpuwarden.ruleengine.model import Rule

LEAD_SCRAPES = 2
"""How long before a deadline it speaks up."""
MAX_MOMENTS = 500
BUSY_CORES = 1.0
"""CPU that a step takes."""


def deadlines(rule: Rule, found: float) -> list[float]:
    """Seconds since its begin at which more would be done to a job than to write it down."""
    times = {found + stage.after for stage in rule.stages if stage.do != "log"}
    return sorted(times) or [found]


def moments(target: Target, lasts: float) -> list[float]:
    """Seconds since its begin at which a job speaks up, as if the rule began anew each time.

    Args:
        target: whose rule has deadlines.
        lasts: for how long it speaks each time, in seconds.
    """
    step = target.interval
    lead, times = LEAD_SCRAPES * step, list[float]()
    at, due = 0.0, deadlines(target.rule, target.found)
    while at < target.length and len(times) < MAX_MOMENTS:
        for deadline in due:
            moment = round(max(at + deadline - lead, step) / step) * step
            if not times or moment >= times[-1] + lasts + step:
                times.append(moment)
        at = times[-1] + lasts
    return times


def last_words(target: Target) -> Play | None:
    """It says that it lives, and in which phase it is, for as long as would clear a case."""
    heard = bool(target.rule.ignore_phases) or any(
        isinstance(leaf, SilentFor) and set(leaf.signals) - {"cpu"}
        for leaf in every_leaf(target.rule)
    )
    if not heard:
        return None
    job, lasts = target.job, target.rule.clear_after + 3 * target.interval
    phase = next((name for name in ("validate", *target.rule.ignore_phases)), "validate")
    like = LIKENESSES[job.like or "healthy"]
    changes = []
    for at in moments(target, lasts):
        changes += [
            _change(at, log=True, heartbeat=True, phase=phase),
            _change(at + lasts, log=like.alive, heartbeat=like.alive, phase="train"),
        ]
    return Play((changed(job, run=run_of(job), then=merged(job.then, changes)),))


def last_step(target: Target) -> Play | None:
    """One scrape long it really works, on the card and the CPU, and counts a step."""
    low = [
        leaf.limit.value
        for leaf in every_leaf(target.rule)
        if isinstance(leaf, Signal) and not leaf.upward and leaf.limit.unit is Unit.RATIO
    ]
    silent = any(
        isinstance(leaf, SilentFor) and "cpu" in leaf.signals for leaf in every_leaf(target.rule)
    )
    if not low and not silent:
        return None
    job, like = target.job, LIKENESSES[target.job.like or "healthy"]
    before = {
        "utilization": like.utilization if job.utilization is None else job.utilization,
        "cpu": like.cpu if job.cpu is None else job.cpu,
        "throughput": like.throughput if job.throughput is None else job.throughput,
    }
    busy = {
        "utilization": min(1.0, max(0.1, before["utilization"], 2 * max(low, default=0.0))),
        "cpu": max(BUSY_CORES, before["cpu"]),
        "throughput": LIKENESSES["healthy"].throughput,
    }
    changes = []
    for at in moments(target, target.interval):
        changes += [_change(at, **busy), _change(at + target.interval, **before)]
    return Play((changed(job, then=merged(job.then, changes)),))


def _change(at: float, **given: Any) -> ConductChange:
    return ConductChange.model_construct(at=at, **given)
