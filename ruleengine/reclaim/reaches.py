"""Who would have to act on a job, and whether they can be asked to now: agents and platforms.

Asked right before the last look at the facts, so that nothing has to be waited for between that
look and the decision.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.platforms.slurm import UNRESOLVED
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.node import host_of
from gpuwarden.ruleengine.reclaim.ports import Deed

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gpuwarden.agent_api import NodeInfo
    from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
    from gpuwarden.ruleengine.reclaim.ports import Claim, Platform
    from gpuwarden.ruleengine.verdicts import JobFacts

REACH_SECONDS = 15.0
"""For the answers of everybody that one act needs; a tick waits for them, of all jobs at once."""
NODE_JOB_PREFIX = "proc-"
"""Jobs that no platform owns, so that the node's agent may end them."""
_OWNERS = {"slurm-": "Slurm", "pod-": "Kubernetes"}


@dataclass(frozen=True, slots=True)
class NodeReach:
    """A node whose agent has answered.

    Attributes:
        host: by which the agent is reached.
        info: what it said of itself.
    """

    host: str
    info: NodeInfo


@dataclass(frozen=True, slots=True)
class Reach:
    """Everybody that one act on one job needs; they have answered.

    Attributes:
        nodes: all nodes of the job.
        claim: how its platform recognises the attempt, where the platform is to act.
    """

    nodes: tuple[NodeReach, ...]
    claim: Claim | None = None


class Reacher:
    """Finds who is to act on a job.

    Args:
        agents: client of the nodes' agents, or None: nothing can be ended.
        signer: the engine's key, or None.
        platforms: what owns jobs and can be told to end them.
    """

    def __init__(
        self, agents: AgentClient | None, signer: Signer | None, platforms: Sequence[Platform]
    ) -> None:
        self._agents = agents
        self._signer = signer
        self._platforms = platforms

    async def reach(
        self,
        job: JobFacts,
        do: str,
        *,
        offenders: Collection[str] = (),
        seconds: float = REACH_SECONDS,
    ) -> Reach | Blocked:
        """Everybody that an act on a job needs, or why it cannot be done.

        Args:
            job: by the tick's facts.
            do: the stage's: checkpoint, yield, requeue or terminate.
            offenders: ids of all jobs that are due by the same rule now.
            seconds: for all answers together.
        """
        if do not in ("checkpoint", "yield", "requeue", "terminate"):
            raise ValueError(f"nothing does {do}")
        blocked = _unfit(job, do)
        if blocked is not None:
            return blocked
        try:
            async with asyncio.timeout(seconds):
                return await self._answers(job, do, offenders)
        except TimeoutError:
            text = f"not everybody who would act on it has answered within {seconds:g} s"
            return Blocked("agent_unreachable", text)

    async def _answers(self, job: JobFacts, do: str, offenders: Collection[str]) -> Reach | Blocked:
        """What agents and platform say."""
        if do in ("checkpoint", "yield") or job.job_id.startswith(NODE_JOB_PREFIX):
            return await self._nodes(job)
        platform = next((p for p in self._platforms if job.job_id.startswith(p.prefix)), None)
        if platform is None:
            owner = _owner(job)
            return Blocked(
                "platform",
                f"the job belongs to {owner or 'a platform that is not known'}; only its own tool "
                "may end it, and engine.yaml does not say how that is reached"
                + (f": give `{owner.lower()}`" if owner else ""),
            )
        nodes, claim = await asyncio.gather(
            self._nodes(job), _found(platform, job, Deed(do), offenders)
        )
        if isinstance(claim, Blocked):
            return claim
        return nodes if isinstance(nodes, Blocked) else Reach(nodes.nodes, claim)

    async def _nodes(self, job: JobFacts) -> Reach | Blocked:
        """All nodes of a job, asked at once; one that does not answer is enough to do nothing."""
        if self._agents is None or self._signer is None:
            return Blocked("no_agents", "engine.yaml has no agents")
        instances = job.instances or (job.instance,)
        answers = await asyncio.gather(
            *(self._node(instance, self._agents, self._signer) for instance in instances)
        )
        blocked = next((answer for answer in answers if isinstance(answer, Blocked)), None)
        if blocked is not None:
            return blocked
        found = {answer.host: answer for answer in answers if isinstance(answer, NodeReach)}
        return Reach(tuple(found.values()))

    async def _node(
        self, instance: str, agents: AgentClient, signer: Signer
    ) -> NodeReach | Blocked:
        try:
            host = host_of(instance)
            info = await agents.node(host)
        except (RefusedAction, ServiceUnavailable) as error:
            return Blocked("agent_unreachable", str(error))
        if signer.key_id not in info.key_ids:
            return Blocked(
                "agent_key", f"the agent of {host} does not know the key {signer.key_id}"
            )
        return NodeReach(host, info)


def _unfit(job: JobFacts, do: str) -> Blocked | None:
    """Why an act cannot be done to this kind of job at all."""
    if job.job_id.startswith(UNRESOLVED):
        return Blocked(
            "platform_unknown",
            "Slurm has not yet told which of its jobs this is: nothing is done to it until then",
        )
    if do in ("checkpoint", "yield"):
        return _unasked(job)
    if not job.job_id.startswith(NODE_JOB_PREFIX):
        return None
    if do == "requeue":
        return Blocked(
            "no_platform", "no platform owns the job, so that nothing would bring it back"
        )
    if len(job.instances) > 1:
        return Blocked(
            "several_nodes", f"the job spans {len(job.instances)} nodes; none ends it whole"
        )
    return None


def _unasked(job: JobFacts) -> Blocked | None:
    """Why the job's trainer cannot be asked for anything."""
    if job.run is None:
        return Blocked("no_run", "no trainer that could be asked is known in the job")
    if job.run.conflict:
        return Blocked("no_run", f"two jobs claim the run {job.run.run_id}: nobody is asked")
    return None


def _owner(job: JobFacts) -> str:
    """The platform's name, by the job's."""
    return next((n for p, n in _OWNERS.items() if job.job_id.startswith(p)), "")


async def _found(
    platform: Platform, job: JobFacts, deed: Deed, offenders: Collection[str]
) -> Claim | Blocked:
    try:
        return await platform.find(job, deed, offenders=offenders)
    except (RefusedAction, ServiceUnavailable) as error:
        return Blocked("platform_unreachable", f"{platform.name}: {error}")
