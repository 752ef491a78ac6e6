"""How truths combine: Kleene's three-valued logic, and the share of a job's cards.

NO is 0, UNKNOWN 1/2, YES 1; `all` is the minimum, `any` the maximum, `not` is 1 - x, and of an
empty set nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.ruleengine.conditions import Gpus, GpuShare
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable


def all_of(truths: Iterable[Truth]) -> Truth:
    """Kleene's conjunction: the minimum; UNKNOWN of nothing."""
    return min(truths, key=lambda truth: truth.value, default=Truth.UNKNOWN)


def any_of(truths: Iterable[Truth]) -> Truth:
    """Kleene's disjunction: the maximum; UNKNOWN of nothing."""
    return max(truths, key=lambda truth: truth.value, default=Truth.UNKNOWN)


def share_of(truths: Iterable[Truth], share: float) -> Truth:
    """Whether at least a share of them is YES: known as soon as what is unknown cannot matter."""
    found = list(truths)
    if not found:
        return Truth.UNKNOWN
    # A third of three is one, whatever binary fractions make of it.
    needed = share * len(found) - 1e-9
    yes, unknown = found.count(Truth.YES), found.count(Truth.UNKNOWN)
    if yes >= needed:
        return Truth.YES
    return Truth.NO if yes + unknown < needed else Truth.UNKNOWN


def of_cards(truths: Iterable[Truth], gpus: Gpus | GpuShare) -> Truth:
    """The truth for a job, of those of its cards."""
    if isinstance(gpus, GpuShare):
        return share_of(truths, gpus.share)
    return all_of(truths) if gpus is Gpus.ALL else any_of(truths)


def negate(truth: Truth) -> Truth:
    """Kleene's negation; what is unknown stays unknown."""
    return Truth(1.0 - truth.value)
