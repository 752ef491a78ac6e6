"""Reading a cluster: few commands for everything, each bounded, and text where text will do."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm_accounting import accounting_words, decode_accounting
from gpuwarden.platforms.slurm_limits import ASKED, AllLimits, decode_limits
from gpuwarden.platforms.slurm_listings import decode_listing, listing_format
from gpuwarden.platforms.slurm_nodes import decode_nodes, decode_tiers
from gpuwarden.platforms.slurm_texts import EVERYTHING
from gpuwarden.scheduling.slurm.queues import Reading
from gpuwarden.scheduling.slurm.readings import ACCOUNT_QUESTION, decode_bookkeeping

if TYPE_CHECKING:
    from gpuwarden.platforms.slurm_accounting import Attempt
    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.platforms.slurm_nodes import SlurmNode
    from gpuwarden.scheduling.slurm.clusters import Cluster

SLOW_SECONDS: Final = 20.0
"""How old what is known of nodes, partitions and limits may be: a large cluster has much of it."""


class Reader:
    """Reads one cluster, time after time.

    Args:
        cluster: which.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._slow_at: float | None = None
        self._nodes: tuple[SlurmNode, ...] = ()
        self._tiers: dict[str, int] = {}
        self._limits = AllLimits()

    def read(self, now: float) -> Reading:
        """The queue as it is now, with what is around it.

        Args:
            now: Unix time.

        Raises:
            ServiceUnavailable: the controller does not answer.
        """
        jobs = read_jobs(self._cluster)
        if self._slow_at is None or not 0 <= now - self._slow_at < SLOW_SECONDS:
            self._read_slow()
            self._slow_at = now
        return Reading(
            cluster=self._cluster.config.name,
            taken=now,
            jobs=jobs,
            nodes=self._nodes,
            tiers=self._tiers,
            limits=self._limits,
            accounts_for_gpus=self._cluster.config.accounts_for_gpus,
            nodes_taken=self._slow_at,
        )

    def _read_slow(self) -> None:
        # What was set anew by `scontrol reconfigure` or a restart is seen here.
        self._cluster.forget()
        # Only with details a node says which of its cards are in use.
        show = ("--all", "--details", "--oneliner", "show")
        self._nodes = decode_nodes(self._cluster.output("scontrol", *show, "node"))
        self._tiers = decode_tiers(self._cluster.output("scontrol", *show, "partition"))
        answer = self._cluster.run("scontrol", *ASKED)
        # Without accounting there are no limits, and the controller says so by an error.
        self._limits = AllLimits() if answer.status else decode_limits(answer.output)


def read_jobs(cluster: Cluster) -> tuple[ListedJob, ...]:
    """Every job that the controller knows, those that ended within minutes too.

    Raises:
        ServiceUnavailable: it does not answer.
    """
    mark = f"|{secrets.token_hex(8)}"
    words = (*EVERYTHING, "--states=all", "-O", listing_format(mark))
    return decode_listing(cluster.output("squeue", *words), mark)


def read_accounts(cluster: Cluster, begin: float, end: float) -> tuple[Attempt, ...]:
    """Every attempt that may have held cards in a stretch of time.

    Args:
        cluster: which.
        begin: Unix time.
        end: Unix time.

    Raises:
        ServiceUnavailable: accounting does not answer, or there is none.
    """
    config = cluster.config
    if not config.accounts_for_gpus:
        raise ServiceUnavailable(
            "Slurm does not account for cards: AccountingStorageTRES of slurm.conf needs gres/gpu "
            "(and AccountingStorageType slurmdbd)"
        )
    mark = f"|{secrets.token_hex(8)}"
    words = accounting_words(int(begin), int(end) + 1, mark)
    return decode_accounting(cluster.output("sacct", *words), mark)


def read_marked_accounts(cluster: Cluster) -> frozenset[str]:
    """Accounts that are gpuwarden's by the mark in their description.

    Raises:
        ServiceUnavailable: slurmdbd does not answer.
    """
    text = cluster.output("sacctmgr", *ACCOUNT_QUESTION)
    there = decode_bookkeeping(cluster.config.name, qos="", account=text, assoc="", user="")
    return frozenset(name for name in there.descriptions if there.is_ours(name))


def is_operator(cluster: Cluster, user: str) -> bool:
    """Whether Slurm's accounting has a user as one of its operators or administrators.

    Raises:
        ServiceUnavailable: slurmdbd does not answer.
    """
    words = ("show", "user", f"name={user}", "--parsable2", "--noheader", "format=AdminLevel")
    return bool({"Operator", "Administrator"} & set(cluster.output("sacctmgr", *words).split()))
