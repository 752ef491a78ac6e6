"""What the policy says of bookings, in the words of the calendar. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.budget_terms import GPU_HOURS
from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.bookings import BudgetTerms, Terms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.budget_terms import ScheduledBudget
    from gpuwarden.scheduling.policies import Policy


def prices_of(policy: Policy) -> dict[str, tuple[float, str]]:
    """Kind of cards -> price of a card-hour and its currency."""
    return {
        card.name: (card.price.amount, card.price.unit)
        for card in policy.cards
        if card.price is not None
    }


def rates_of(policy: Policy, unit: str) -> dict[str, float] | None:
    """Kind of cards -> what a card-hour takes of a budget of this unit; None: 1 of every kind."""
    if unit == GPU_HOURS:
        return None
    return {
        name: amount for name, (amount, currency) in prices_of(policy).items() if currency == unit
    }


def terms_of(policy: Policy, used: Mapping[tuple[str, str, str], float | None]) -> Terms:
    """What bookings are bound by.

    Args:
        policy: with its part `bookings`.
        used: key of a budget -> what of it is used in the period that runs.

    Raises:
        RefusedAction: the policy lets nothing be booked.
    """
    chosen = policy.bookings
    if chosen is None:
        raise RefusedAction(
            "no_bookings", "the policy lets nothing be booked: it has no `bookings:`"
        )
    return Terms(
        zone=policy.zone,
        lead_seconds=chosen.lead_time,
        longest_seconds=chosen.longest,
        ahead_seconds=chosen.ahead,
        share=chosen.at_most_share,
        cards={card.name: card.count for card in policy.cards},
        quotas={
            team.name: {card.name: team.most(card.name) for card in policy.cards}
            for team in policy.teams
        },
        budgets={
            team.name: tuple(_budget(policy, each, used) for each in policy.budgets_of(team.name))
            for team in policy.teams
        },
    )


def _budget(
    policy: Policy,
    budget: ScheduledBudget,
    used: Mapping[tuple[str, str, str], float | None],
) -> BudgetTerms:
    return BudgetTerms(
        per=budget.per,
        limit=budget.limit.amount,
        hard=budget.kind == "hard",
        used=used.get(budget.key),
        unit=budget.unit,
        rates=rates_of(policy, budget.unit),
    )
