"""Budgets of a day or a week in Slurm, which has one counter for each account. Pure.

Slurm counts the minutes of an account's cards and starts no job that would pass GrpTRESMins. For a
team with a hard budget of a day or a week that limit moves: it is what the counter shows now and
what is left of the tightest budget. It is set when a period begins, and whenever it is found to be
another one. What was used in a period is taken from accounting, not remembered: so nothing is
granted twice, a daemon that was away catches up at once, and while it is away the old limit stays.
When Slurm's own counter is reset does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.budget_terms import GPU_HOURS
from gpuwarden.periods import period_of
from gpuwarden.scheduling.slurm.names import account_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.budget_terms import ScheduledBudget
    from gpuwarden.periods import Period, Span
    from gpuwarden.platforms.slurm_limits import Counter
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy

SLACK: Final = 0.01
"""Of the budget's limit: how far Slurm's limit may be off before it is set again. Running jobs
are added to its counter every few minutes only."""
LEAST_SLACK_MINUTES: Final = 1


@dataclass(frozen=True, slots=True)
class Cap:
    """The limit of one account.

    Attributes:
        account: Slurm's.
        team: the policy's.
        minutes: of cards, as GrpTRESMins has to be.
        left: GPU-seconds that are left of the tightest budget.
        per: of that budget.
    """

    account: str
    team: str
    minutes: int
    left: float
    per: Period


def hard_of(policy: Policy, team: str) -> tuple[ScheduledBudget, ...]:
    """A team's budgets that keep its jobs from starting."""
    return tuple(
        budget
        for budget in policy.budgets_of(team)
        if budget.kind == "hard" and budget.unit == GPU_HOURS
    )


def capped(policy: Policy) -> dict[str, tuple[ScheduledBudget, ...]]:
    """Team -> its hard budgets, of teams with one that Slurm's own monthly counter is not."""
    hard = {team.name: hard_of(policy, team.name) for team in policy.teams}
    return {
        team: budgets
        for team, budgets in hard.items()
        if any(budget.per != "month" for budget in budgets)
    }


def gpu_seconds(holdings: Iterable[Holding], team: str, span: Span, now: float) -> float:
    """What a team's jobs held in a stretch of time up to now."""
    total = 0.0
    for each in holdings:
        if each.team == team:
            end = min(now if each.end is None else each.end, span.end, now)
            total += each.gpus * max(0.0, end - max(each.start, span.begin))
    return total


def cap_of(
    policy: Policy,
    team: str,
    holdings: Iterable[Holding],
    counter: Counter,
    *,
    now: float,
) -> Cap:
    """The limit that a team's account must have now.

    Args:
        policy: which.
        team: one of `capped`.
        holdings: attempts of the longest of its budgets' periods up to now.
        counter: Slurm's of the account.
        now: Unix time.
    """
    known = tuple(holdings)
    left: list[tuple[float, Period]] = []
    for budget in capped(policy)[team]:
        span = period_of(budget.per, policy.timezone, now)
        spent = gpu_seconds(known, team, span, now)
        left.append((max(0.0, budget.limit.amount * 3600.0 - spent), budget.per))
    least, per = min(left)
    account = account_of(policy, team)
    return Cap(account, team, counter.used + int(least // 60), least, per)


def spent_teams(policy: Policy, holdings: Iterable[Holding], now: float) -> frozenset[str]:
    """Teams whose running jobs have to leave: a budget that says so is spent."""
    known = tuple(holdings)
    return frozenset(
        team.name
        for team in policy.teams
        for budget in hard_of(policy, team.name)
        if budget.running == "leave"
        and gpu_seconds(known, team.name, period_of(budget.per, policy.timezone, now), now)
        >= budget.limit.amount * 3600.0
    )


def differs(cap: Cap, counter: Counter, policy: Policy) -> bool:
    """Whether Slurm's limit has to be set."""
    if counter.limit is None:
        return True
    limits = [budget.limit.amount * 60.0 for budget in capped(policy)[cap.team]]
    slack = max(LEAST_SLACK_MINUTES, SLACK * min(limits))
    return abs(counter.limit - cap.minutes) > slack


def begin_of(policy: Policy, now: float) -> float | None:
    """Since when use has to be known for all this; None where it has not."""
    limits = capped(policy)
    begins = [
        period_of(budget.per, policy.timezone, now).begin
        for team in policy.teams
        for budget in hard_of(policy, team.name)
        if team.name in limits or budget.running == "leave"
    ]
    return min(begins, default=None)


def unset(policy: Policy, counters: Mapping[str, Counter]) -> tuple[str, ...]:
    """Teams with such a budget whose account Slurm does not know: apply the policy first."""
    return tuple(team for team in capped(policy) if account_of(policy, team) not in counters)
