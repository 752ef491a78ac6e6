"""How Slurm calls what a policy names: accounts, qualities of service, partitions, types."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy


def by_qos(policy: Policy) -> bool:
    """Whether qualities of service tell priorities apart; else partitions do."""
    return policy.slurm.preempt == "qos"


def account_of(policy: Policy, team: str) -> str:
    """The account that a team's jobs are charged to.

    Raises:
        KeyError: there is no such team.
    """
    found = policy.team(team)
    if found is None:
        raise KeyError(team)
    return found.account.lower()  # as sacctmgr writes it down


def top_account_of(policy: Policy) -> str:
    """The account below which those of the teams are."""
    return policy.slurm.account.lower()


def qos_of(policy: Policy, priority: str) -> str | None:
    """The QOS of a priority; None where partitions tell priorities apart."""
    return priority if by_qos(policy) else None


def partition_of(policy: Policy, card: str, priority: str) -> str | None:
    """Where a task is submitted; None for the cluster's default partition.

    Args:
        policy: which.
        card: kind of cards that it asks for.
        priority: of the task.
    """
    known = policy.card(card)
    partition = None if known is None or known.slurm is None else known.slurm.partition
    if by_qos(policy):
        return partition
    return priority if partition is None else f"{partition}-{priority}"


def gres_of(policy: Policy, card: str) -> str | None:
    """The type of a kind of cards in gres.conf, or None where the policy names none."""
    known = policy.card(card)
    return None if known is None or known.slurm is None else known.slurm.gres


def tres_of(policy: Policy, card: str) -> str:
    """What a kind of cards is called in limits: `gres/gpu:a100`, or `gres/gpu` without a type."""
    gres = gres_of(policy, card)
    return "gres/gpu" if gres is None else f"gres/gpu:{gres}"
