"""Slurm behind the port to engines: reads by sacctmgr and scontrol, changes by sacctmgr.

What a person decides, slurm.conf, is compared and told; this writes none of it.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.platforms.slurm_texts import decode_settings
from gpuwarden.scheduling.engines import FoundObject
from gpuwarden.scheduling.slurm.accounts import ACCOUNT, KINDS, QOS, USER
from gpuwarden.scheduling.slurm.applies import account_in, commands_of, merged
from gpuwarden.scheduling.slurm.configs import config_terms, satisfied_values
from gpuwarden.scheduling.slurm.inits import render_init
from gpuwarden.scheduling.slurm.names import by_qos
from gpuwarden.scheduling.slurm.readings import (
    ACCOUNT_QUESTION,
    ASSOC_QUESTION,
    QOS_QUESTION,
    USER_QUESTION,
    decode_bookkeeping,
    decode_partitions,
)
from gpuwarden.scheduling.slurm.renderings import CONFIG, FRAGMENT, PARTITION, render
from gpuwarden.scheduling.slurm.versions import version_of, written
from gpuwarden.slurm_commands import SlurmCommands

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from gpuwarden.scheduling.engines import Rendering, Step
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.readings import Bookkeeping

_PROGRAMS: Final = ("sacctmgr", "scontrol")
_UNANSWERED = re.compile(r"unable to contact|connection refused|timed out|persistent connection")


class SlurmAdapter:
    """One cluster.

    Args:
        policy: whose.
        commands: of the cluster.
    """

    def __init__(self, policy: Policy, commands: SlurmCommands) -> None:
        self._policy = policy
        self._commands = commands
        self._cluster: str | None = None

    def render(self, policy: Policy, *, version: str | None, init: bool = False) -> Rendering:
        """Say what a policy comes to.

        Args:
            policy: that checks without errors for Slurm.
            version: of the cluster; None is the newest that is known.
            init: everything for a Slurm of one node that is not there yet.

        Raises:
            InvalidInput: Slurm cannot do it in the way that the policy wants.
        """
        if init:
            return render_init(policy, version=version)
        return render(policy, version=version)

    async def version(self) -> str:
        """The cluster's version, such as 24.11.

        Raises:
            ServiceUnavailable: there is no Slurm.
        """
        return written(version_of(await self._commands.output("scontrol", "--version")))

    async def read(self, wanted: Rendering) -> tuple[FoundObject, ...]:
        """Say what the cluster has: what is marked, and what has a wanted name.

        Raises:
            ServiceUnavailable: the controller or its database does not answer.
        """
        settings = await self._settings()
        found = list[FoundObject]()
        if by_qos(self._policy):
            keys = {each.key for each in wanted.objects}
            people = [each.name for each in wanted.objects if each.kind == USER]
            there = (await self._bookkeeping(KINDS)).found(people)
            found += [each for each in there if each.marked or each.key in keys]
        terms = config_terms(self._policy, version_of(wanted.version))
        found.append(FoundObject(CONFIG, FRAGMENT, satisfied_values(terms, settings), marked=False))
        found += [each async for each in self._partitions(wanted)]
        return tuple(found)

    async def carry_out(self, step: Step) -> None:
        """Do one step; done before, it changes nothing.

        Raises:
            ServiceUnavailable: the database does not answer; it may or may not have been done.
            RefusedAction: it refuses, or what is there is not gpuwarden's.
        """
        await self.carry_out_all((step,))

    def together(self, first: Step, other: Step) -> bool:
        """Whether two steps are about people of one account, who come or go."""
        return (
            (first.act, first.kind) == (other.act, other.kind)
            and first.kind == USER
            and account_in(first.name) == account_in(other.name)
        )

    async def carry_out_all(self, steps: Sequence[Step]) -> None:
        """Do steps of one kind, those that can be by one command.

        A person costs sacctmgr a second where each is added alone: it asks five questions.

        Raises:
            ServiceUnavailable: the database does not answer; any of them may have been done.
            RefusedAction: it refuses one, or what is there is not gpuwarden's.
        """
        cluster = await self._name()
        there = await self._bookkeeping({step.kind for step in steps})
        commands = [each for step in steps for each in commands_of(step, there, cluster)]
        what = f"{steps[0]}{f' and {len(steps) - 1} more' if len(steps) > 1 else ''}"
        for command in merged(commands):
            answer = await self._commands.run("sacctmgr", "--immediate", *command.words)
            said = f"{answer.output} {answer.complaint}".strip()
            if not answer.status or (command.again and "nothing" in said.lower()):
                continue
            if _UNANSWERED.search(said.lower()):
                raise ServiceUnavailable(f"slurmdbd does not answer: {_line(said)}")
            raise RefusedAction("refused", f"sacctmgr refuses {what}: {_line(said)}{_advice(said)}")

    async def aclose(self) -> None:
        """Nothing is held open."""

    async def _settings(self) -> dict[str, str]:
        settings = decode_settings(await self._commands.output("scontrol", "show", "config"))
        self._cluster = settings.get("ClusterName") or None
        return settings

    async def _name(self) -> str:
        if self._cluster is None:
            await self._settings()
        if self._cluster is None:
            raise ServiceUnavailable("`scontrol show config` names no cluster")
        return self._cluster

    async def _bookkeeping(self, kinds: Collection[str]) -> Bookkeeping:
        """What sacctmgr keeps, as far as these kinds need it: a question costs a connection."""
        people = USER in kinds
        accounts = people or ACCOUNT in kinds
        questions = (
            QOS_QUESTION if QOS in kinds else None,
            ACCOUNT_QUESTION if accounts else None,
            ASSOC_QUESTION if accounts else None,
            USER_QUESTION if people else None,
        )
        cluster = await self._name()
        qos, account, assoc, user = await asyncio.gather(*map(self._answered, questions))
        return decode_bookkeeping(cluster, qos=qos, account=account, assoc=assoc, user=user)

    async def _answered(self, words: tuple[str, ...] | None) -> str:
        return "" if words is None else await self._commands.output("sacctmgr", *words)

    async def _partitions(self, wanted: Rendering) -> AsyncIterator[FoundObject]:
        names = [each for each in wanted.objects if each.kind == PARTITION]
        if not names:
            return
        text = await self._commands.output("scontrol", "--all", "--oneliner", "show", "partition")
        there = decode_partitions(text)
        for each in names:
            if each.name in there:
                values = {key: there[each.name].get(key, "") for key in each.values}
                yield FoundObject(PARTITION, each.name, values, marked=False)


def adapter(policy: Policy) -> SlurmAdapter:
    """The adapter of the cluster that a policy's `slurm` names; nothing is asked of it yet."""
    terms = policy.slurm
    programs = {name: Path(terms.programs) / name for name in _PROGRAMS}
    config = None if terms.config is None else Path(terms.config)
    return SlurmAdapter(
        policy,
        SlurmCommands(programs, config, terms.timeout),
    )


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def _advice(said: str) -> str:
    """What to do about a refusal."""
    for pattern, advice in _ADVICE:
        if re.search(pattern, said, re.IGNORECASE):
            return f"; {advice}"
    return ""


_ADVICE: Final = (
    (r"no tres known", f"put {FRAGMENT} in place, restart slurmctld, and apply again"),
    (r"job\(s\) active", "wait for these jobs, or cancel them, and apply again"),
    (r"as their default qos", "other associations rest on it: change their DefaultQOS first"),
    (r"permission|not in the accounting|access", "only an administrator of Slurm's accounting may"),
)
