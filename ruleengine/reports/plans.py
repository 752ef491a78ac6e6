"""What is asked, from where, and in which portions, before anything dear is asked. Pure.

Prometheus holds every point of every selector of a range query at once, and refuses more than
50 million (`--query.max-samples`): portions are cut so that one stays far below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.ruleengine.replay_columns import MAX_POINTS
from gpuwarden.ruleengine.reports.expressions import jobs_per_card
from gpuwarden.ruleengine.reports.periods import DAY_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.reports.expressions import Measure
    from gpuwarden.ruleengine.reports.gatherings import Outlook
    from gpuwarden.ruleengine.reports.periods import Day, Period

BUDGET_POINTS: Final = 8_000_000
"""Points that one query may make the server hold: a sixth of what it allows by default."""
RECORDED_SHARE: Final = 0.9
"""A day counts as recorded if the rule wrote so much of the time in which nodes were seen."""
_SAMPLING: Final = {15.0: 15.0, 60.0: 60.0, 300.0: 60.0, 900.0: 300.0}
"""Seconds of a bin -> between two moments of what is not recorded."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One query.

    Attributes:
        measure: what is asked.
        recorded: whether the recorded series is asked.
        start, stop: numbers of the bins, the second exclusive.
        points: that the server is expected to go through.
    """

    measure: Measure
    recorded: bool
    start: int
    stop: int
    points: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the fleet is.

    Attributes:
        holdings: pairs of job and card at a busy moment.
        scrapes: seconds between two samples of a node; mostly one number.
        rules: seconds between two samples of a recording rule of the fleet; none where there is
            no such rule.
    """

    holdings: int
    scrapes: tuple[float, ...]
    rules: tuple[float, ...]

    def rules_of(self, measure: Measure) -> tuple[float, ...]:
        """Seconds between two samples of a measure's recorded series."""
        return (measure.width,) if measure.width else self.rules


def sampling(bin_seconds: float) -> float:
    """Seconds between two moments at which what is not recorded is looked at."""
    return _SAMPLING.get(bin_seconds, bin_seconds)


def recorded_days(
    days: Iterable[Day], shares: Sequence[float], seen: Sequence[bool]
) -> tuple[bool, ...]:
    """Of which days a rule has written nearly all.

    Args:
        days: of the period.
        shares: which part of each bin the recorded series covers.
        seen: whether any node answered, by bin.
    """
    found: list[bool] = []
    for day in days:
        lit = [number for number in range(day.start, day.stop) if seen[number]]
        written = sum(shares[number] for number in lit)
        found.append(bool(lit) and written >= RECORDED_SHARE * len(lit))
    return tuple(found)


def chunks(
    period: Period,
    measure: Measure,
    recorded: Sequence[bool],
    *,
    sizes: Sizes,
    longest: float | None = None,
) -> tuple[Chunk, ...]:
    """The queries of one measure: runs of days of one source, cut where a query would be too dear.

    Args:
        period: of the report.
        measure: what is asked.
        recorded: of each day whether the recorded series is asked.
        sizes: of the fleet.
        longest: seconds that one query may cover, or None.
    """
    found: list[Chunk] = []
    runs: list[tuple[bool, int, int]] = []
    for day, own in zip(period.days(), recorded, strict=True):
        if runs and runs[-1][0] == own:
            runs[-1] = (own, runs[-1][1], day.stop)
        else:
            runs.append((own, day.start, day.stop))
    for own, start, stop in runs:
        if not own and not measure.sampled:
            continue
        each = bin_points(period, measure, recorded=own, sizes=sizes)
        per_bin = 1 if own else round(period.bin / sampling(period.bin))
        most = max(1, min(MAX_POINTS // per_bin, BUDGET_POINTS // max(each, 1)))
        most_seconds = min(longest or math.inf, DAY_SECONDS if measure.whole else math.inf)
        if most_seconds < math.inf:
            most = max(1, min(most, int(most_seconds // period.bin)))
        for first in range(start, stop, most):
            last = min(first + most, stop)
            found.append(Chunk(measure, own, first, last, each * (last - first)))
    return tuple(found)


def bin_points(period: Period, measure: Measure, *, recorded: bool, sizes: Sizes) -> int:
    """Points that the server goes through for one bin of a measure."""
    if recorded:
        rows = 1 if not measure.by else sizes.holdings
        interval = min(sizes.rules_of(measure) or sizes.scrapes)
        return max(1, round(rows * period.bin / interval))
    moments = round(period.bin / sampling(period.bin))
    return max(1, measure.selectors * sizes.holdings * moments)


def card_row(outlook: Outlook) -> dict[str, object]:
    """The same for the one question that is asked of each day as a whole."""
    period, sizes = outlook.period, outlook.sizes
    return {
        "measure": "jobs_per_card",
        "source": "sampled",
        "queries": len(period.days()),
        "step_seconds": DAY_SECONDS,
        "hours": round(period.seconds / 3600, 2),
        "points": round(sizes.holdings * period.seconds / min(sizes.scrapes)),
        "query": jobs_per_card(DAY_SECONDS),
    }


def rows(plan: Mapping[str, Sequence[Chunk]], period: Period) -> list[dict[str, object]]:
    """A plan for people and programs: one row for each measure and source."""
    found = []
    for name, own in plan.items():
        for recorded in (True, False):
            some = [chunk for chunk in own if chunk.recorded is recorded]
            if some:
                bins = sum(chunk.stop - chunk.start for chunk in some)
                found.append(
                    {
                        "measure": name,
                        "source": some[0].measure.recorded if recorded else "sampled",
                        "queries": len(some),
                        "step_seconds": period.bin if recorded else sampling(period.bin),
                        "hours": round(bins * period.bin / 3600, 2),
                        "points": sum(chunk.points for chunk in some),
                        "query": some[0].measure.binned(period.bin)
                        if recorded
                        else some[0].measure.sampled,
                    }
                )
    return found
