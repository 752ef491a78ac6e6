"""The moving limits of accounts, as `caps` has them: set where the account is gpuwarden's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gpuwarden.platforms.slurm_limits import CARDS
from gpuwarden.scheduling.slurm import caps
from gpuwarden.scheduling.slurm.accounts import ACCOUNT, mark, marking
from gpuwarden.scheduling.slurm.names import account_of
from gpuwarden.scheduling.slurm.observations import read_marked_accounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.platforms.slurm_limits import AllLimits
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.clusters import Cluster

log = structlog.get_logger(__name__)


class CapDesk:
    """The limits of one cluster.

    Args:
        cluster: which.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def keep(
        self, limits: AllLimits, holdings: Sequence[Holding], policy: Policy, now: float
    ) -> str | None:
        """Set the limits that are off.

        Args:
            limits: what the controller counts.
            holdings: attempts since `caps.begin_of` up to now.
            policy: whose budgets these are.
            now: Unix time.

        Returns:
            One sentence where some budgets are not enforced, else None.

        Raises:
            ServiceUnavailable: slurmdbd does not answer.
        """
        teams = caps.capped(policy)
        if not teams:
            return None
        counters = {
            name: each.minutes[CARDS]
            for name, each in limits.accounts.items()
            if CARDS in each.minutes
        }
        missing = caps.unset(policy, counters)
        # Read each time: who gives an account back to others takes the mark away.
        ours = read_marked_accounts(self._cluster)
        foreign, refused = [], []
        for team in teams:
            if team in missing:
                continue
            account = account_of(policy, team)
            if account not in ours:
                foreign.append(team)
                continue
            counter = counters[account]
            cap = caps.cap_of(policy, team, holdings, counter, now=now)
            if caps.differs(cap, counter, policy) and (said := self._set(cap)):
                refused.append(f"{cap.account} ({said})")
        return _words(policy, missing, foreign, refused)

    def _set(self, cap: caps.Cap) -> str:
        """What sacctmgr says where it does not set a limit, else an empty text."""
        answer = self._cluster.run(
            "sacctmgr",
            "--immediate",
            "modify",
            "account",
            "where",
            f"name={cap.account}",
            f"cluster={self._cluster.config.name}",
            "set",
            f"GrpTRESMins={CARDS}={cap.minutes}",
        )
        if answer.status and "nothing modified" not in answer.output.lower():
            said = answer.complaint or answer.output
            return " ".join(said.split())[:200] or f"status {answer.status}"
        log.info("budget_cap_set", account=cap.account, minutes=cap.minutes, left=cap.left)
        return ""


def _words(
    policy: Policy, missing: Sequence[str], foreign: Sequence[str], refused: Sequence[str]
) -> str | None:
    said = []
    if missing:
        said.append(
            f"Slurm has no account for {', '.join(missing)}, so their budgets are not enforced: "
            "run `gpuwarden policy apply --engine slurm`"
        )
    if foreign:
        commands = (marking(ACCOUNT, account_of(policy, t), mark("team", t)) for t in foreign)
        said.append(
            f"the accounts of {', '.join(foreign)} do not carry gpuwarden's mark, so their limits "
            "are left alone and their budgets are not enforced: `gpuwarden policy diff` tells "
            f"more; to hand them over: {'; '.join(f'`{each}`' for each in commands)}"
        )
    if refused:
        said.append(
            f"the limits of accounts {', '.join(refused)} could not be set, and the former ones "
            "stay: the scheduler's user must be an operator of Slurm's"
        )
    return "; ".join(said) or None
