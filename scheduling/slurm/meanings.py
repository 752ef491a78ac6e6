"""What Slurm's names mean in a policy's words: the way back of `names`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpuwarden.scheduling.slurm.names import account_of, by_qos

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy

MARK: Final = "gpuwarden"
"""How the comment of a job begins that `gpuwarden submit` handed over."""
RESERVATION_MARK: Final = "gpuwarden-"
"""How a reservation's name begins that is a booking's slot."""


def team_of(policy: Policy, account: str, user: str) -> str:
    """The team of an account, else the only one of the user; empty where there is none."""
    accounts = {account_of(policy, team.name): team.name for team in policy.teams}
    return accounts.get(account.lower()) or policy.team_of(user)


def priority_of(policy: Policy, qos: str, partition: str) -> str:
    """The priority of a job by its QOS or partition; else Slurm's own word for it."""
    if by_qos(policy):
        return qos
    names = (each.name for each in policy.priorities)
    found = (name for name in names if partition == name or partition.endswith(f"-{name}"))
    return max(found, key=len, default=partition)


def card_of(policy: Policy, gres: str) -> str:
    """The policy's kind of cards by its type in gres.conf; empty where it is not known.

    A job that asked for any card has the only kind there is; of several it is not told which.
    """
    kinds = [card for card in policy.cards if card.slurm is not None]
    if not gres:
        return kinds[0].name if len(kinds) == 1 else ""
    return next((card.name for card in kinds if card.slurm and card.slurm.gres == gres), gres)
