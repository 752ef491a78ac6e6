"""Whether what was foretold came true: how often the end lay inside of its interval. Pure.

A prediction counts once it was settled: the moment came, or the interval passed without it. One
that became void (the job was cancelled, or asked to leave) says nothing about the prediction, and
is counted apart. A share without its sample size says nothing either: it is told with the interval
in which the true share lies (Wilson, 95 %).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["start", "finish"]
SIZES = ((0, 0), (1, 4), (5, 9), (10, 19), (20, 49), (50, None))
"""Numbers of past cases by which predictions are told apart; 0 are the engine's own plans."""
_Z = 1.959963984540054
"""Of 95 %."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A prediction whose time has come.

    Attributes:
        kind: of which moment.
        made: Unix time.
        earliest: Unix time.
        latest: Unix time.
        samples: past cases it rested on.
        actual: Unix time of the moment.
    """

    kind: Kind
    made: float
    earliest: float
    latest: float
    samples: int
    actual: float

    @property
    def inside(self) -> bool:
        """Whether the moment lay in the interval; its ends belong to it, to the second."""
        return self.earliest - 1 <= self.actual <= self.latest + 1


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions that rested on about as many cases.

    Attributes:
        kind: of which moment.
        least: cases.
        most: cases, or None: any number.
        count: settled predictions.
        inside: of these, those whose moment lay in the interval.
        low: the true share is at least this, with 95 %.
        high: likewise at most.
        early: moments before the interval.
        late: moments after it.
    """

    kind: Kind
    least: int
    most: int | None
    count: int
    inside: int
    low: float
    high: float
    early: int
    late: int

    @property
    def share(self) -> float:
        """Of the moments that lay in their intervals."""
        return self.inside / self.count


def calibrate(settled: Iterable[Settled]) -> tuple[Bin, ...]:
    """Add up how often predictions came true, by kind and by the number of cases they rested on.

    Returns:
        Bins that are not empty, in order.
    """
    rows = list(settled)
    found = []
    for kind in ("start", "finish"):
        for least, most in SIZES:
            group = [
                row
                for row in rows
                if row.kind == kind
                and row.samples >= least
                and (most is None or row.samples <= most)
            ]
            if group:
                inside = sum(row.inside for row in group)
                early = sum(row.actual < row.earliest - 1 for row in group)
                low, high = wilson(inside, len(group))
                late = len(group) - inside - early
                found.append(Bin(kind, least, most, len(group), inside, low, high, early, late))
    return tuple(found)


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The interval in which a share lies with 95 %, from so many hits of so many."""
    if count == 0:
        return 0.0, 1.0
    share, square = hits / count, _Z * _Z
    middle = share + square / (2 * count)
    spread = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    scale = 1 + square / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
