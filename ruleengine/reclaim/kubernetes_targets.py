"""The controllers that claims name: how each is reached, told, and seen to have been told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpuwarden.errors import RefusedAction
from gpuwarden.kubernetes_clients import Kind
from gpuwarden.platforms import kubernetes
from gpuwarden.ruleengine.reclaim import kubernetes_controllers as controllers
from gpuwarden.ruleengine.reclaim.kubernetes_controllers import Act

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.kubernetes_clients import KubernetesClient
    from gpuwarden.platforms.kubernetes import Json, Reference
    from gpuwarden.ruleengine.reclaim.kubernetes_claims import PodClaim
    from gpuwarden.ruleengine.reclaim.kubernetes_controllers import Hold
    from gpuwarden.ruleengine.reclaim.ports import Order

DECISION_ANNOTATION: Final = "gpuwarden.io/decision"
REASON_ANNOTATION: Final = "gpuwarden.io/reason"
MAX_REASON = 900
_FINAL = ("Complete", "Failed", "Succeeded", "Completed", "Finished")
"""Conditions of what is over: of Jobs, JobSets, kubeflow's jobs and Kueue's Workloads."""


class Targets:
    """Controllers, by what claims say of them.

    Args:
        client: of the API server.
        holds: the known ones, and those of engine.yaml.
    """

    def __init__(self, client: KubernetesClient, holds: Mapping[str, Hold]) -> None:
        self._client = client
        self.holds = holds

    def hold_of(self, target: Reference) -> Hold | None:
        """How a controller is told to end its pods, or None where that is not known."""
        if target.group == controllers.KUEUE_GROUP:
            return controllers.WORKLOAD
        return self.holds.get(controllers.name_of(target))

    async def kind(self, target: Reference) -> Kind:
        """Where a controller is found.

        Raises:
            RefusedAction: the server has no such kind.
            ServiceUnavailable: not known.
        """
        if target.group == controllers.KUEUE_GROUP:
            return Kind(target.api_version, "workloads")
        return await self._client.kind(target)

    async def told_at(self, claim: PodClaim, target: Reference) -> Kind:
        """Where it is told: a service's scale is apart from the rest of it."""
        kind = await self.kind(target)
        return Kind(kind.api_version, f"{kind.plural}/scale") if claim.act is Act.SCALE else kind

    async def read(self, claim: PodClaim) -> Json | None:
        """The claim's controller, or None where it is gone or another one by now."""
        if claim.target is None:
            return None
        kind = await self.kind(claim.target)
        found = await self._client.get(kind, claim.namespace, claim.target.name)
        same = found is not None and kubernetes.value_at(found, "metadata.uid") == claim.target.uid
        return found if same else None

    async def is_told(self, claim: PodClaim) -> bool:
        """Whether the claim's controller was told to end the pod."""
        if claim.act is Act.EVICT or claim.target is None:
            return False
        found = await self.read(claim)
        return found is not None and self.is_held(claim, claim.target, found)

    async def brings_back(self, claim: PodClaim) -> bool:
        """Whether the controller is there, is not done, and was not told to start no more."""
        found = await self.read(claim)
        if found is None or claim.target is None or is_final(found):
            return False
        return claim.act is Act.EVICT or not self.is_held(claim, claim.target, found)

    def is_held(self, claim: PodClaim, target: Reference, found: Json) -> bool:
        """Whether a controller, as it was read, has been told.

        Raises:
            RefusedAction: `unknown_controller`: engine.yaml names its kind no more.
        """
        if claim.act is Act.SCALE:
            # A count of zero is left out where a server omits empty fields.
            return kubernetes.value_at(found, "spec.replicas") in (0, None)
        return self._known(target).holds(found)

    def patch(
        self, claim: PodClaim, target: Reference, order: Order, *, now: str
    ) -> dict[str, Any]:
        """What tells it.

        Raises:
            RefusedAction: `unknown_controller`.
        """
        if claim.act is Act.SCALE:
            return {"spec": {"replicas": 0}}
        patch = self._known(target).patch(now)
        notes = patch.setdefault("metadata", {}).setdefault("annotations", {})
        notes[DECISION_ANNOTATION] = order.decision_id
        notes[REASON_ANNOTATION] = order.reason[:MAX_REASON]
        return patch

    def _known(self, target: Reference) -> Hold:
        hold = self.hold_of(target)
        if hold is None:
            raise RefusedAction("unknown_controller", f"how to end {target.title} is not known")
        return hold


def is_final(found: Json) -> bool:
    """Whether a controller is done, and starts nothing any more."""
    return any(kubernetes.condition(found, word) == "True" for word in _FINAL)
