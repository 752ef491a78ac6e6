"""Asking Slurm who waits for a GPU and what is idle, for rules that end jobs only then.

Whatever goes wrong leaves the answer unknown, so that nothing is ended.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from gpuwarden.platforms.slurm import HOLDING
from gpuwarden.platforms.slurm_nodes import decode_nodes, decode_tiers
from gpuwarden.platforms.slurm_queue import decode_queue, queue_format
from gpuwarden.platforms.slurm_texts import EVERYTHING, decode_config, decode_list, list_format
from gpuwarden.ruleengine.slurm_demands import demand_of, waiting_only

if TYPE_CHECKING:
    from gpuwarden.platforms.slurm import SlurmJob
    from gpuwarden.platforms.slurm_nodes import SlurmNode
    from gpuwarden.platforms.slurm_queue import PendingJob
    from gpuwarden.ruleengine.demands import Demand
    from gpuwarden.slurm_commands import SlurmCommands

_HOLDING = f"--states={','.join(sorted(HOLDING & {'RUNNING', 'SUSPENDED', 'COMPLETING'}))}"


class SlurmQueue:
    """Slurm's queue, by its own commands.

    Args:
        commands: of the cluster; `squeue`, and `scontrol` for what is idle.
    """

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._cluster = ""

    async def demand(self, *, fits: bool) -> Demand:
        """Who waits now, and with `fits` also what is idle and what running jobs hold.

        Raises:
            ServiceUnavailable: Slurm does not answer, or not in time, or says something else.
        """
        if not fits:
            return waiting_only(await self.pending())
        cluster = await self._name()
        # Of those that are asked at once none may go on where one fails.
        asked = (
            asyncio.create_task(self.pending()),
            asyncio.create_task(self._nodes()),
            asyncio.create_task(self._running()),
            asyncio.create_task(self._tiers()),
        )
        try:
            pending, nodes, running, tiers = await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return demand_of(pending, nodes, running, tiers=tiers, cluster=cluster)

    async def pending(self) -> tuple[PendingJob, ...]:
        """All jobs that pend now.

        Raises:
            ServiceUnavailable: as `demand`.
        """
        mark = _mark()
        words = (*EVERYTHING, "--states=PENDING", "-O", queue_format(mark))
        return decode_queue(await self._commands.output("squeue", *words), mark)

    async def _running(self) -> tuple[SlurmJob, ...]:
        mark = _mark()
        words = (*EVERYTHING, _HOLDING, "-O", list_format(mark))
        return decode_list(await self._commands.output("squeue", *words), mark)

    async def _nodes(self) -> tuple[SlurmNode, ...]:
        words = ("show", "node", "--all", "--details", "--oneliner")
        return decode_nodes(await self._commands.output("scontrol", *words))

    async def _tiers(self) -> dict[str, int]:
        words = ("show", "partition", "--all", "--oneliner")
        return decode_tiers(await self._commands.output("scontrol", *words))

    async def _name(self) -> str:
        if not self._cluster:
            text = await self._commands.output("scontrol", "show", "config")
            self._cluster = decode_config(text).name
        return self._cluster


def _mark() -> str:
    return f"|{secrets.token_hex(8)}"
