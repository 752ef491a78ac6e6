"""The schedule's document, from what the engine and the store know. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.budget_terms import GPU_HOURS
from gpuwarden.periods import Span, period_of
from gpuwarden.schedule_api import BookingEntry, BookingState, BudgetEntry
from gpuwarden.scheduling.booking_terms import rates_of
from gpuwarden.scheduling.budget_forecasts import outlook, whole_days
from gpuwarden.scheduling.usages import each_once, held_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.budget_terms import ScheduledBudget
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import SlotUse
    from gpuwarden.scheduling.stores import Booked

HORIZON_SECONDS = 14 * 86400.0
"""How far ahead an engine is told of slots; those beyond are in the calendar alone."""
MANY_DAYS = 56 * 86400.0
"""How far back accounts are read for forecasts."""


def booking_state(item: Booked, use: SlotUse | None, now: float) -> BookingState:
    """Where a slot stands.

    Args:
        item: as the store has it.
        use: what is seen of it now, or None where the engine was not seen.
        now: Unix time.
    """
    if item.released is not None:
        return BookingState.RELEASED
    if now >= item.slot.end:
        return BookingState.OVER
    if now < item.slot.start:
        # One that is far ahead is in the calendar alone: the engine is told when it comes near.
        near = item.slot.start - item.slot.lead_seconds <= now + HORIZON_SECONDS
        return BookingState.PROPOSED if near and item.entered is None else BookingState.BOOKED
    if use is not None and use.gpus == 0:
        return BookingState.IDLE
    return BookingState.ACTIVE


def booking_entry(
    item: Booked, use: SlotUse | None, now: float, *, remark: str | None = None
) -> BookingEntry:
    """A slot for the document.

    Args:
        item: as the store has it.
        use: what is seen of it now, or None.
        now: Unix time.
        remark: of the engine on how it keeps it, or None.
    """
    slot = item.slot
    words = "; ".join(text for text in (item.words, remark) if text)
    return BookingEntry(
        id=slot.id,
        team=slot.team,
        who=slot.who,
        gpus=slot.gpus,
        gpu_type=slot.card,
        start=slot.start,
        end=slot.end,
        repeat=item.repeat,
        state=booking_state(item, use, now),
        cost=slot.gpu_hours,
        used_gpu_seconds=item.used_gpu_seconds,
        words=words,
    )


def idle_hours(booked: Sequence[Booked], span: Span, *, now: float) -> dict[str, float]:
    """GPU-hours that teams booked in a stretch of time and did not use; as far as use is known.

    A slot that was given back counts up to then: nobody else had its cards. What of a slot was
    used is spread over it evenly, so that the parts of a stretch add up.

    Args:
        booked: slots of the stretch.
        span: the stretch.
        now: Unix time; what is ahead is not idle.
    """
    found: dict[str, float] = {}
    for item in booked:
        slot = item.slot
        end = min(slot.end, now if item.released is None else min(item.released, now))
        whole, inside = end - slot.start, min(end, span.end) - max(slot.start, span.begin)
        used = item.used_gpu_seconds
        if used is None and item.first_used is None and item.released_by == "no-show":
            used = 0.0
        if whole <= 0 or inside <= 0 or used is None:
            continue
        idle = max(0.0, slot.gpus * whole - used) * inside / whole
        found[slot.team] = found.get(slot.team, 0.0) + idle / 3600.0
    return found


def no_shows(
    booked: Sequence[Booked], uses: Mapping[str, SlotUse], *, after: float, now: float
) -> tuple[str, ...]:
    """Slots that are to be given back since nobody came.

    Only what was seen without use for the whole time counts: while the engine was not seen, or this
    daemon was not there, nobody knows whether somebody came.

    Args:
        booked: slots of today.
        uses: what is seen of the active ones now.
        after: seconds without use from the slot's start, or from when it was first seen without.
        now: Unix time.
    """
    return tuple(
        item.slot.id
        for item in booked
        if item.released is None
        and item.slot.start <= now < item.slot.end
        and item.first_used is None
        and item.idle_since is not None
        and now - item.idle_since >= after
        and (use := uses.get(item.slot.id)) is not None
        and use.gpus == 0
        and use.first_used is None
    )


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """A budget of the policy, and what is used of it.

    Attributes:
        budget: of the policy.
        period: that runs.
        used: of its unit, or None where the account was not read.
        forecast: at the period's end, or None where there is too little to go by.
    """

    budget: ScheduledBudget
    period: Span
    used: float | None
    forecast: float | None

    def entry(self) -> BudgetEntry | None:
        """For the document, which counts GPU-hours only."""
        if self.budget.unit != GPU_HOURS:
            return None
        return BudgetEntry(
            team=self.budget.team,
            per=self.budget.per,
            limit_gpu_hours=self.budget.limit.amount,
            kind=self.budget.kind,
            period_start=self.period.begin,
            period_end=self.period.end,
            used=self.used,
            forecast=self.forecast,
        )


def budget_uses(
    policy: Policy, holdings: Sequence[Holding] | None, *, now: float
) -> tuple[BudgetUse, ...]:
    """What is used of every budget, and what will be.

    Args:
        policy: names the budgets.
        holdings: attempts of the last weeks, or None: the account was not read yet.
        now: Unix time.
    """
    once = None if holdings is None else each_once(holdings)
    found = []
    for budget in policy.budgets:
        span = period_of(budget.per, policy.timezone, now)
        used = forecast = None
        if once is not None:
            rates = rates_of(policy, budget.unit)
            own = [item for item in once if item.team == budget.team]
            used = _amount(own, rates, span, now)
            ahead = outlook(
                used, _history(own, rates, policy, now), zone=policy.timezone, now=now, end=span.end
            )
            forecast = None if ahead is None else ahead.amount
        found.append(BudgetUse(budget, span, used, forecast))
    return tuple(found)


def _history(
    own: Sequence[Holding], rates: Mapping[str, float] | None, policy: Policy, now: float
) -> list[tuple[Span, float]]:
    """Whole days since the team's first use: days before it say nothing of its habits."""
    if not own:
        return []
    first = min(item.start for item in own)
    days = [span for span in whole_days(policy.timezone, now) if span.end > first]
    begins, sums = [span.begin for span in days], [0.0] * len(days)
    for item in own:
        end = now if item.end is None else item.end
        number = max(0, bisect.bisect_right(begins, item.start) - 1)
        # Only the days on which it ran: a year of short jobs is no year of work for each.
        while number < len(days) and begins[number] < end:
            sums[number] += _amount((item,), rates, days[number], now)
            number += 1
    return list(zip(days, sums, strict=True))


def _amount(
    own: Sequence[Holding], rates: Mapping[str, float] | None, span: Span, now: float
) -> float:
    return sum(
        held_seconds(item, span, now=now)
        * item.gpus
        * (1.0 if rates is None else rates.get(item.card, 0.0))
        / 3600.0
        for item in own
    )
