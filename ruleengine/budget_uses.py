"""What is used of a budget, and what will be by its period's end. Pure.

The forecast goes on at the pace of late: the mean of the last days (of a day's budget, hours) for
each one that is left. Its band comes of how much they differ, and of how few they are.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.budget_terms import quantity
from gpuwarden.ruleengine.alertmanager import rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.budget_terms import Budget
    from gpuwarden.periods import Period, Span

BUCKET_SECONDS: Mapping[Period, float] = {"day": 3600.0, "week": 86400.0, "month": 86400.0}
"""What the pace is counted in."""
BUCKETS: Mapping[Period, int] = {"day": 24, "week": 14, "month": 14}
"""How many of them: whole days and whole weeks, whose nights and weekends are those to come."""
LEAST_BUCKETS = 3
"""With fewer nobody knows how much they differ."""
_EIGHTY = 1.2816
"""Standard deviations of a normal distribution that four fifths lie within, to either side."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The use by the period's end; it lies within the band four times in five, if things stay."""

    low: float
    expected: float
    high: float

    def document(self) -> dict[str, float]:
        """For the API."""
        return {name: round(getattr(self, name), 3) for name in ("low", "expected", "high")}


def forecast(used: float, remaining: float, buckets: Sequence[float]) -> Forecast | None:
    """The use by the end of the period.

    Args:
        used: until now.
        remaining: how many buckets are left; a fraction of one counts as such.
        buckets: what was used in each of the last ones, of whatever period.

    Returns:
        The band, never below what is used already; None where too few are known.
    """
    count = len(buckets)
    if remaining <= 0:
        return Forecast(used, used, used)
    if count < LEAST_BUCKETS:
        return None
    mean, spread = statistics.fmean(buckets), statistics.stdev(buckets)
    # That of the sum of those to come, and of the mean that is itself only estimated.
    deviation = spread * math.sqrt(remaining * (1 + remaining / count))
    expected = used + mean * remaining
    return Forecast(
        max(used, expected - _EIGHTY * deviation), expected, expected + _EIGHTY * deviation
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """How a budget stands.

    Attributes:
        budget: it.
        span: the period, Unix times.
        used: in the budget's unit, or None: not known.
        forecast: by the period's end, or None: not known.
        why_not: why `used` is not known, in words, or an empty string.
    """

    budget: Budget
    span: Span
    used: float | None = None
    forecast: Forecast | None = None
    why_not: str = ""

    @property
    def share(self) -> float | None:
        """Used of the limit; 1 is all of it."""
        return None if self.used is None else self.used / self.budget.limit.amount

    @property
    def reached(self) -> tuple[float, ...]:
        """Shares of `warn_at` that are reached, the highest last."""
        share = self.share
        return tuple(sorted(at for at in self.budget.warn_at if share is not None and share >= at))

    def document(self) -> dict[str, Any]:
        """For the API."""
        return {
            "team": self.budget.team,
            "period": self.budget.per,
            "kind": self.budget.kind,
            "unit": self.budget.unit,
            "limit": self.budget.limit.amount,
            "begins": rfc3339(self.span.begin),
            "ends": rfc3339(self.span.end),
            "used": None if self.used is None else round(self.used, 3),
            "share": None if self.share is None else round(self.share, 4),
            "forecast": None if self.forecast is None else self.forecast.document(),
            "why_not": self.why_not,
        }


def used_shares(standings: Sequence[Standing]) -> dict[tuple[str, str, str], float]:
    """(team, period, kind) -> used share of the fullest of its budgets; where that is known.

    A budget of which nothing is known could be the fullest: unless another one is used up already,
    nothing is said.
    """
    groups: dict[tuple[str, str, str], list[float | None]] = {}
    for each in standings:
        budget = each.budget
        groups.setdefault((budget.team, budget.per, budget.kind), []).append(each.share)
    found: dict[tuple[str, str, str], float] = {}
    for key, shares in groups.items():
        known = [share for share in shares if share is not None]
        if len(known) == len(shares) or max(known, default=0.0) > 1:
            found[key] = max(known)
    return found


def standing_line(standing: Mapping[str, Any]) -> str:
    """One budget in one line, of its document."""
    unit, limit = standing["unit"], quantity(standing["limit"], standing["unit"])
    if standing["used"] is None:
        return f"not known of {limit}: {standing['why_not']}"
    text = f"{quantity(standing['used'], unit)} of {limit} ({100 * standing['share']:.0f} %)"
    band = standing["forecast"]
    if band is not None:
        text += f", {quantity(band['expected'], unit)} by its end "
        text += f"({quantity(band['low'], unit)} to {quantity(band['high'], unit)})"
    return text
