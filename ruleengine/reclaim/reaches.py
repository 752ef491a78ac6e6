"""Who would have to act on a job, and whether they can be asked to now: agents and platforms.

Asked right before the last look at the facts, so that nothing has to be waited for between that
look and the decision.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.node import host_of

if TYPE_CHECKING:
    from gpuwarden.agent_api import NodeInfo
    from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
    from gpuwarden.ruleengine.verdicts import JobFacts

NODE_JOB_PREFIX = "proc-"
"""Jobs that no platform owns, so that the node's agent may end them."""


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
    """

    nodes: tuple[NodeReach, ...]


class Reacher:
    """Finds who is to act on a job.

    Args:
        agents: client of the nodes' agents, or None: nothing can be ended.
        signer: the engine's key, or None.
    """

    def __init__(self, agents: AgentClient | None, signer: Signer | None) -> None:
        self._agents = agents
        self._signer = signer

    async def reach(self, job: JobFacts, do: str) -> Reach | Blocked:
        """Everybody that an act on a job needs, or why it cannot be done.

        Args:
            job: by the tick's facts.
            do: the stage's.
        """
        if do != "terminate":
            return Blocked("not_offered", f"nothing here does {do}")
        if not job.job_id.startswith(NODE_JOB_PREFIX):
            return Blocked(
                "platform", "the job belongs to a platform; only its own tool may end it"
            )
        if len(job.instances) > 1:
            return Blocked(
                "several_nodes", f"the job spans {len(job.instances)} nodes; none ends it whole"
            )
        return await self._nodes(job)

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
        return Reach(tuple(answer for answer in answers if isinstance(answer, NodeReach)))

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
