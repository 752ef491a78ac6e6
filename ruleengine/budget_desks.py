"""The engine's part in budgets: asks Prometheus what is used, and remembers who was told what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from gpuwarden.budget_terms import GPU_HOURS
from gpuwarden.errors import GpuwardenError
from gpuwarden.periods import period_of
from gpuwarden.ruleengine.budget_uses import (
    BUCKET_SECONDS,
    BUCKETS,
    Standing,
    forecast,
    used_shares,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpuwarden.budget_terms import Budget
    from gpuwarden.clock import Clock
    from gpuwarden.periods import Period, Span
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.prometheus import Sample, Source
    from gpuwarden.ruleengine.rulebooks import RuleBook

REFRESH_SECONDS = 60.0
"""Between two questions for what is used; it is recorded each five minutes."""
PACE_SECONDS = 3600.0
"""Between two questions for the pace, which takes one for each day of it."""
KNOWN_SECONDS = 900.0
"""For how long an answer counts while there is no newer one."""
PACE_AGAIN_SECONDS = 600.0
"""Until it is asked for again after it was not told."""
TIMEOUT_SECONDS = 3.0
"""For all questions together: no tick waits longer for figures."""

LAG_SECONDS = 165.0
"""From the middle of the five minutes that a sample tells of until it is written: of a period are
those samples whose middle lies in it, as in a statement."""

_SERIES = {True: "team:gpu_hours:sum5m", False: "team:gpu_cost:sum5m"}

log = structlog.get_logger(__name__)

Used = dict[tuple[str, str], float]
"""(team, unit) -> amount."""


class BudgetDesk:
    """How the budgets in force stand.

    Args:
        rulebook: with the budgets.
        ledger: remembers warnings, so that each is given once in a period.
        clock: wall and monotonic time.
    """

    def __init__(self, rulebook: RuleBook, ledger: Ledger, clock: Clock) -> None:
        self._rulebook = rulebook
        self._ledger = ledger
        self._clock = clock
        self._asked_at: float | None = None
        self._known_at: float | None = None
        self._paced_at: dict[tuple[Period, frozenset[str]], float] = {}
        self._used: dict[Period, tuple[Span, frozenset[str], Used]] = {}
        self._paces: dict[Period, tuple[frozenset[str], list[Used]]] = {}
        self._why_not = "the engine has not asked yet"

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Those in force."""
        found = self._rulebook.budgets
        return () if found is None else found.budgets

    async def refresh(self, sources: Sequence[Source]) -> None:
        """Ask again if it is time; called in every tick.

        Args:
            sources: a server of each shard; the teams' use is what all of them recorded. An error
                is told in what stands, and ends nothing.
        """
        now = self._clock.monotonic()
        if not self.budgets:
            return
        if self._asked_at is not None and now - self._asked_at < REFRESH_SECONDS:
            return
        self._asked_at = now
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._ask(sources, now)
        except (GpuwardenError, TimeoutError) as error:
            self._why_not = f"Prometheus does not say: {str(error) or 'no answer in time'}"
            log.warning("what budgets are used is not known", error=self._why_not)

    async def _ask(self, sources: Sequence[Source], now: float) -> None:
        wall = self._clock.wall()
        for source in sources:
            if not await source.instant("count_over_time(fleet:gpus_seen:count5m[15m])", wall):
                self._why_not = (
                    "nothing was recorded for 15 minutes: load alerting/rules/money.yml into "
                    f"{'Prometheus' if len(sources) == 1 else 'every shard of Prometheus'}"
                )
                return
        units = self._units()
        for per in self._periods():
            span = self._span(per, wall)
            seconds = max(0.0, wall - span.begin - LAG_SECONDS)
            self._used[per] = (span, units, await self._total(sources, wall, seconds, units))
        self._known_at, self._why_not = now, ""
        for per in self._periods():
            if now - self._paced_at.get((per, units), -PACE_SECONDS) >= PACE_SECONDS:
                self._paced_at[per, units] = now - PACE_SECONDS + PACE_AGAIN_SECONDS
                length = BUCKET_SECONDS[per]
                paces = [
                    await self._total(sources, wall - number * length, length, units)
                    for number in range(BUCKETS[per])
                ]
                # What lies before the first record is no use of nothing.
                self._paces[per] = (units, _since_the_first(paces))
                self._paced_at[per, units] = now

    def _periods(self) -> list[Period]:
        return sorted({each.per for each in self.budgets})

    def _span(self, per: Period, wall: float) -> Span:
        found = self._rulebook.budgets
        return period_of(per, "UTC" if found is None else found.zone, wall)

    def _units(self) -> frozenset[str]:
        """What the budgets in force are in.

        A file that is read again may name others: of these nothing is known until they were asked
        for, which is not the same as no use.
        """
        return frozenset(each.unit for each in self.budgets)

    @staticmethod
    async def _total(
        sources: Sequence[Source], end: float, seconds: float, units: frozenset[str]
    ) -> Used:
        """What teams used in a time, in hours and in each currency that a budget is in."""
        found: Used = {}
        window = f"[{max(1, round(1000 * seconds) - 1)}ms]"
        for hours in sorted({unit == GPU_HOURS for unit in units}):
            query = f"sum by (team, currency) (sum_over_time({_SERIES[hours]}{window}))"
            for source in sources:
                for row in await source.instant(query, end):
                    key = _unit(row, hours=hours)
                    found[key] = found.get(key, 0.0) + row.value
        return found

    def standings(self) -> list[Standing]:
        """Every budget in force, as it stands now."""
        wall, now = self._clock.wall(), self._clock.monotonic()
        old = self._known_at is None or now - self._known_at > KNOWN_SECONDS
        return [self._standing(each, wall, old=old) for each in self.budgets]

    def _standing(self, budget: Budget, wall: float, *, old: bool) -> Standing:
        span = self._span(budget.per, wall)
        known = self._used.get(budget.per)
        if old or known is None or known[0] != span or budget.unit not in known[1]:
            why = self._why_not or "the period or the budget is new: it is asked for each minute"
            return Standing(budget, span, why_not=why)
        used = known[2].get((budget.team, budget.unit), 0.0)
        units, paced = self._paces.get(budget.per, (frozenset(), []))
        paces = [
            each.get((budget.team, budget.unit), 0.0) for each in paced if budget.unit in units
        ]
        remaining = (span.end - wall) / BUCKET_SECONDS[budget.per]
        return Standing(budget, span, used, forecast(used, remaining, paces))

    # -- who was told

    def warnings(self) -> list[tuple[Standing, float, float]]:
        """Warnings that were given in the running periods: standing, share, when (Unix time).

        Of shares that are reached at once only the highest is told; all count as given.
        """
        wall, found = self._clock.wall(), []
        for each in self.standings():
            given = self._given(each)
            fresh = [share for share in each.reached if share not in given]
            if fresh:
                self._give(each, fresh, wall)
                given |= {fresh[-1]: wall}
            told = [(share, at) for share, at in given.items() if at is not None]
            if told:
                found.append((each, *max(told)))
        return found

    def _key(self, standing: Standing) -> tuple[str, str, str, float]:
        budget = standing.budget
        return (budget.team, budget.per, budget.unit, standing.span.begin)

    def _given(self, standing: Standing) -> dict[float, float | None]:
        rows = self._ledger.rows(
            "SELECT share, told_at FROM budget_warnings "
            "WHERE team=? AND period=? AND unit=? AND begins=?",
            self._key(standing),
        )
        return {float(share): at for share, at in rows}

    def _give(self, standing: Standing, shares: Sequence[float], wall: float) -> None:
        with self._ledger.transaction() as db:
            db.executemany(
                "INSERT OR IGNORE INTO budget_warnings VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (*self._key(standing), share, wall if share == shares[-1] else None)
                    for share in shares
                ],
            )
        log.warning(
            "budget",
            team=standing.budget.team,
            period=standing.budget.per,
            share=shares[-1],
            used=standing.used,
        )

    # -- for Prometheus

    def rows(self) -> Iterator[tuple[str, Iterable[tuple[tuple[str, ...], float]]]]:
        """Families of the catalogue."""
        standings = self.standings()
        yield (
            "gpuwarden_budget_limit",
            [
                ((b.team, b.per, b.unit, b.kind), b.limit.amount)
                for b in (each.budget for each in standings)
            ],
        )
        yield (
            "gpuwarden_budget_used",
            [
                ((each.budget.team, each.budget.per, each.budget.unit), each.used)
                for each in standings
                if each.used is not None
            ],
        )
        yield (
            "gpuwarden_budget_forecast",
            [
                ((each.budget.team, each.budget.per, each.budget.unit, bound), value)
                for each in standings
                if each.forecast is not None
                for bound, value in each.forecast.document().items()
            ],
        )
        yield "gpuwarden_budget_used_ratio", list(used_shares(standings).items())


def _unit(row: Sample, *, hours: bool) -> tuple[str, str]:
    unit = GPU_HOURS if hours else row.labels.get("currency", "")
    return (row.labels.get("team", ""), unit)


def _since_the_first(paces: list[Used]) -> list[Used]:
    """Newest first, up to the oldest in which anything is recorded of anybody."""
    last = max((index for index, used in enumerate(paces) if used), default=-1)
    return paces[: last + 1]
