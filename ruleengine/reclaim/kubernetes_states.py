"""What has become of a pod that was told to go: read from pods and nodes, not from controllers.

A controller's own status may lag behind or be wrong, and the API may forget a pod whose node does
not answer while its processes run on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction
from gpuwarden.kubernetes_clients import NODES, PODS
from gpuwarden.platforms import kubernetes
from gpuwarden.platforms.kubernetes import read_pod
from gpuwarden.ruleengine.reclaim.kubernetes_owners import Owners
from gpuwarden.ruleengine.reclaim.ports import Standing, State

if TYPE_CHECKING:
    from gpuwarden.clock import Clock
    from gpuwarden.kubernetes_clients import KubernetesClient
    from gpuwarden.platforms.kubernetes import Pod
    from gpuwarden.ruleengine.reclaim.kubernetes_claims import PodClaim
    from gpuwarden.ruleengine.reclaim.kubernetes_targets import Targets
    from gpuwarden.ruleengine.reclaim.ports import Order

OVERDUE_SECONDS = 30.0
"""So long after its grace a pod that is still there is late."""


class PodStates:
    """Looks after pods.

    Args:
        client: of the API server.
        targets: their controllers.
        clock: for what is late.
    """

    def __init__(self, client: KubernetesClient, targets: Targets, clock: Clock) -> None:
        self._client = client
        self._targets = targets
        self._clock = clock

    async def state(self, claim: PodClaim, order: Order) -> State:
        """What has become of a pod.

        Raises:
            RefusedAction: the engine may not look.
            ServiceUnavailable: not known.
            UnexpectedObject: the answer is of another shape.
        """
        found = await self._client.get(PODS, claim.namespace, claim.pod.name)
        pod = read_pod(found) if found is not None else None
        same = pod if pod is not None and pod.uid == claim.pod.uid else None
        node = (same.node if same is not None else "") or next(iter(order.claim.nodes), "")
        if await self._is_lost(node) or (same is not None and same.reason == "NodeLost"):
            return State(
                Standing.ENDING if same is None or same.deletion else Standing.RUNNING,
                word=same.phase if same is not None else "removed",
                obstacle="node_lost",
                detail={"node": node},
            )
        if same is None or not same.living:
            return await self._over(claim, same)
        if same.deletion is None:
            told = await self._targets.is_told(claim)
            return State(Standing.ENDING if told else Standing.RUNNING, word=same.phase)
        late = self._clock.wall() - same.deletion
        obstacle = ""
        if late > OVERDUE_SECONDS:
            obstacle = "blocked_by_finalizer" if same.finalizers else "overdue"
        return State(
            Standing.ENDING,
            word="Terminating",
            obstacle=obstacle,
            detail={
                "finalizers": ", ".join(same.finalizers),
                "late_seconds": max(0.0, round(late, 1)),
                "node": node,
            },
        )

    async def _over(self, claim: PodClaim, pod: Pod | None) -> State:
        """The pod's containers have ended: whether another one has come, or will."""
        word = pod.phase if pod is not None else "deleted"
        owners = Owners(self._client, claim.namespace, self._targets.holds)
        root = claim.root_uid or (claim.target.uid if claim.target is not None else "")
        new: list[Pod] = []
        if root:
            members = await owners.members(root, await owners.pods())
            new = [item for item in members if item.living and not claim.known(item.uid)]
        staying = next((item for item in new if item.deletion is None), None)
        successor = "" if staying is None else f"{staying.title} ({staying.uid})"
        if not successor and claim.target is not None and await self._targets.brings_back(claim):
            successor = claim.target.title
        if not successor and new:
            # It had a successor, which its controller was told to end as well.
            return State(Standing.ENDING, word="Terminating", detail={"pod": new[0].title})
        if successor:
            return State(Standing.RETURNED, word=word, successor=successor)
        return State(Standing.ENDED, word=word)

    async def _is_lost(self, name: str) -> bool:
        """Whether a pod's node is there and is silent; one that was taken away is not lost."""
        if not name:
            return False
        with suppress(RefusedAction):
            node = await self._client.get(NODES, None, name)
            return node is not None and not kubernetes.is_ready(node)
        # Without the right to read nodes, only what a pod itself says of its node is known.
        return False
