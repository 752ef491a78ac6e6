"""What the things of a policy are called in Slurm. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy, Team

MARK: Final = "gpuwarden"
"""How the comment of a job begins that `gpuwarden submit` handed over."""
RESERVATION_MARK: Final = "gpuwarden-"
"""How a reservation's name begins that belongs to a booking of gpuwarden's."""


def account_of(policy: Policy, team: str) -> str:
    """A team's account; that of a team which the policy does not have is called as it is."""
    found = policy.team(team)
    return team if found is None else found.account


def team_of(policy: Policy, account: str, user: str) -> str:
    """The team of an account, else the only one of the user; empty where there is none."""
    teams = {each.account: each.name for each in policy.teams}
    return teams.get(account) or policy.team_of(user)


def teams_by_account(policy: Policy) -> dict[str, Team]:
    """Account -> its team."""
    return {each.account: each for each in policy.teams}


def qos_of(policy: Policy, priority: str) -> str | None:
    """The QOS of a priority; None where partitions tell priorities apart."""
    return priority if policy.slurm.preempt == "qos" else None


def partition_of(policy: Policy, card: str | None, priority: str) -> str | None:
    """Where a job of a priority asks for a kind of cards; None for the cluster's default."""
    found = policy.card(card) if card is not None else None
    base = found.slurm.partition if found is not None and found.slurm is not None else None
    if policy.slurm.preempt == "qos":
        return base
    return priority if base is None else f"{base}-{priority}"


def priority_of(policy: Policy, qos: str, partition: str) -> str:
    """The priority of a job by its QOS or partition; else Slurm's own word for it."""
    if policy.slurm.preempt == "qos":
        return qos
    for each in policy.priorities:
        if partition == each.name or partition.endswith(f"-{each.name}"):
            return each.name
    return partition


def card_of(policy: Policy, gres: str) -> str:
    """The policy's kind of cards by its type in gres.conf.

    A job that asked for any card is of the only kind there is; with several it is not told which.
    """
    kinds = [card for card in policy.cards if card.slurm is not None]
    if not gres:
        return kinds[0].name if len(kinds) == 1 else ""
    return next((card.name for card in kinds if card.slurm and card.slurm.gres == gres), gres)
