"""What is known of a condition before anything is measured: that it always holds, or never. Pure.

Measured values are not negative, and a ratio is at most one. A limit that lies beyond says nothing
of a job: a condition with it is nothing to end one by.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from gpuwarden.quantities import Deviation, Direction, Unit
from gpuwarden.ruleengine.condition_differences import normal
from gpuwarden.ruleengine.conditions import All, Any_, Gpus, GpuShare, OverBudget, Signal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.ruleengine.conditions import Condition

_UNBOUNDED: Final = frozenset({"card_power_share"})
"""Ratios that may exceed one: a card draws more than its limit for moments."""
_ORDER: Final = ("min", "avg", "max")
"""How a window becomes one number, from what is never larger to what is never smaller."""
_ANY_CARD: Final = 1e-9


def certain(condition: Signal | OverBudget) -> bool | None:
    """Whether a comparison holds for every value, or for none; None where it depends.

    Args:
        condition: that compares a value which is not negative.
    """
    bounded = isinstance(condition, Signal) and condition.signal not in _UNBOUNDED
    most = 1.0 if bounded and condition.limit.unit is Unit.RATIO else float("inf")
    limit = condition.limit.value
    match condition.comparison:
        case "above" if limit >= most:
            return False
        case "at_least" if limit > most or limit <= 0:
            return limit <= 0
        case "below" if limit > most or limit <= 0:
            return limit > 0
        case "at_most" if limit >= most:
            return True
        case _:
            return None


def unreachable(deviation: Deviation) -> bool:
    """Whether nothing deviates so far: no value is more than 100 % below what is expected."""
    return deviation.direction is Direction.BELOW and deviation.tolerance >= 1


def contradictions(condition: Condition) -> Iterator[tuple[Signal, Signal]]:
    """Pairs of conditions that must both hold, and never do."""
    yield from _pairs(normal(condition))


def _pairs(condition: Condition) -> Iterator[tuple[Signal, Signal]]:
    match condition:
        case All():
            signals = [part for part in condition.all if isinstance(part, Signal)]
            for first, second in itertools.permutations(signals, 2):
                if first.upward and not second.upward and _disjoint(first, second):
                    yield first, second
            for part in condition.all:
                yield from _pairs(part)
        case Any_():
            for part in condition.any:
                yield from _pairs(part)
        case _:
            return


def _disjoint(least: Signal, most: Signal) -> bool:
    """Whether no values of a job are beyond the one limit and within the other."""
    same = (least.signal, least.window) == (most.signal, most.window)
    if not same or _cards(least) + _cards(most) <= 1 or not _below(least, most):
        return False
    if least.comparison == "at_least" and most.comparison == "at_most":
        return least.limit.value > most.limit.value
    return least.limit.value >= most.limit.value


def _below(first: Signal, second: Signal) -> bool:
    """Whether what the first makes of a window is never larger than what the second makes of it."""
    if first.share is not None or second.share is not None:
        return False
    aggs = [signal.agg or "avg" for signal in (first, second)]
    if not set(aggs) <= set(_ORDER):
        return aggs[0] == aggs[1]
    return _ORDER.index(aggs[0]) <= _ORDER.index(aggs[1])


def _cards(signal: Signal) -> float:
    """The least share of a job's cards of which it must be true."""
    if isinstance(signal.gpus, GpuShare):
        return signal.gpus.share
    return _ANY_CARD if signal.gpus is Gpus.ANY else 1.0
