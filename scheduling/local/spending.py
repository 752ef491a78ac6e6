"""How much of their budgets teams have used on this host, and whose jobs that stops. Pure."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.budget_terms import GPU_HOURS, quantity
from gpuwarden.periods import period_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.periods import Span
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy


@dataclass(frozen=True, slots=True)
class Spending:
    """What budgets say now.

    Attributes:
        spent: team -> why it starts nothing.
        leaving: teams whose running jobs are asked to leave.
        again: Unix time at which the first budget begins anew, or None where there is none.
    """

    spent: dict[str, str]
    leaving: frozenset[str]
    again: float | None


def spending(policy: Policy, holdings: Sequence[Holding], now: float) -> Spending:
    """Say which teams have used up a hard budget.

    Args:
        policy: with the budgets; those in money are not this engine's to count.
        holdings: everything that was held since the longest of their periods began.
        now: Unix time.
    """
    spent: dict[str, str] = {}
    leaving: set[str] = set()
    ends: list[float] = []
    for budget in policy.budgets:
        if budget.kind != "hard" or budget.unit != GPU_HOURS:
            continue
        span = period_of(budget.per, policy.timezone, now)
        ends.append(span.end)
        used = used_gpu_hours(holdings, budget.team, span, now)
        if used < budget.limit.amount:
            continue
        begin = dt.datetime.fromtimestamp(span.end, policy.zone)
        spent.setdefault(
            budget.team,
            f"Team {budget.team} has used {quantity(used, GPU_HOURS)} of {budget.limit} for this "
            f"{budget.per}; it goes on at {begin:%a %Y-%m-%d %H:%M %Z}.",
        )
        if budget.running == "leave":
            leaving.add(budget.team)
    return Spending(spent, frozenset(leaving), min(ends, default=None))


def used_gpu_hours(holdings: Sequence[Holding], team: str, span: Span, now: float) -> float:
    """GPU-hours that a team has used in a span until now."""
    end = min(span.end, now)
    seconds = 0.0
    for each in holdings:
        if each.team == team:
            last = end if each.end is None else min(end, each.end)
            seconds += each.gpus * max(0.0, last - max(span.begin, each.start))
    return seconds / 3600.0


def longest_period_begin(policy: Policy, now: float) -> float:
    """From when on holdings count for any budget of a policy."""
    return min(
        (period_of(budget.per, policy.timezone, now).begin for budget in policy.budgets),
        default=now,
    )
