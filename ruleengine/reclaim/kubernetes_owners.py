"""Who owns a pod, and which pods an owner has: walks through the API along `ownerReferences`.

References hold uids, and an owner counts only with the uid that its pod names: an object of the
same name that was made later is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction
from gpuwarden.kubernetes_clients import PODS, Kind
from gpuwarden.platforms import kubernetes
from gpuwarden.platforms.kubernetes import KUEUE_JOB_LABEL, read_pod, reference_of
from gpuwarden.ruleengine.reclaim.kubernetes_controllers import KUEUE_GROUP, SCALED, name_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from gpuwarden.kubernetes_clients import KubernetesClient
    from gpuwarden.platforms.kubernetes import Json, Pod, Reference

MAX_DEPTH = 8
MAX_OWNERS = 300
"""Owners that are read for one question; a namespace with more is not looked through."""
_FINISHED = "Finished"


@dataclass(frozen=True, slots=True)
class Owner:
    """An object above a pod; `found` is None where it is of a kind that nothing is known about."""

    reference: Reference
    found: Json | None = None


class Owners:
    """The owners of one namespace's pods, each read once.

    Args:
        client: of the API server.
        namespace: of the pods.
        kinds: kinds that are known; what others do with their pods need not be read.
    """

    def __init__(self, client: KubernetesClient, namespace: str, kinds: Collection[str]) -> None:
        self._client = client
        self._namespace = namespace
        self._kinds = {*kinds, *SCALED}
        self._read: dict[str, Json | None] = {}

    async def chain(self, first: Reference | None) -> list[Owner]:
        """From a pod's controller upwards, to the first of a kind that is not known.

        Raises:
            RefusedAction: `target_changed`: an owner is gone, or is another one by now.
            ServiceUnavailable: not known.
        """
        found: list[Owner] = []
        here = first
        while here is not None:
            if name_of(here) not in self._kinds:
                found.append(Owner(here))
                break
            content = await self._one(here)
            if content is None:
                raise RefusedAction("target_changed", f"{here.title} is not there any more")
            found.append(Owner(here, content))
            if len(found) > MAX_DEPTH:
                raise RefusedAction("unknown_controller", f"{here.title} has too many owners")
            here = kubernetes.controller_of(content)
        return found

    async def pods(self) -> list[Pod]:
        """All pods of the namespace."""
        return [read_pod(item) for item in await self._client.list(PODS, self._namespace)]

    async def members(self, root_uid: str, pods: Iterable[Pod]) -> list[Pod]:
        """Those of some pods that an owner has, over however many steps.

        Args:
            root_uid: the owner's.
            pods: of the namespace.
        """
        return [pod for pod in pods if await self._leads(pod, root_uid)]

    async def workload(self, uids: Collection[str]) -> tuple[Reference, str] | None:
        """Kueue's Workload of an object, and that object's uid; None where Kueue does not queue it.

        Args:
            uids: of the pod and its owners.

        Raises:
            RefusedAction: `forbidden`.
            ServiceUnavailable: not known.
        """
        version = await self._client.has_group(KUEUE_GROUP)
        if version is None:
            return None
        kind = Kind(version, "workloads")
        selector = f"{KUEUE_JOB_LABEL} in ({','.join(sorted(uids))})"
        for item in await self._client.list(kind, self._namespace, labels=selector):
            if kubernetes.condition(item, _FINISHED) == "True":
                continue
            uid = kubernetes.value_at(item, "metadata.labels")[KUEUE_JOB_LABEL]
            return reference_of(item, api_version=version, kind="Workload"), str(uid)
        return None

    async def _leads(self, pod: Pod, root_uid: str) -> bool:
        here = pod.owner
        for _ in range(MAX_DEPTH):
            if here is None:
                return False
            if here.uid == root_uid:
                return True
            if name_of(here) not in self._kinds:
                return False
            content = await self._one(here)
            here = kubernetes.controller_of(content) if content is not None else None
        return False

    async def _one(self, owner: Reference) -> Json | None:
        if owner.uid not in self._read:
            if len(self._read) >= MAX_OWNERS:
                raise RefusedAction(
                    "too_many_owners",
                    f"{self._namespace} has more than {MAX_OWNERS} controllers; what would end is "
                    "not certain",
                )
            kind = await self._client.kind(owner)
            found = await self._client.get(kind, self._namespace, owner.name)
            same = found is not None and kubernetes.value_at(found, "metadata.uid") == owner.uid
            self._read[owner.uid] = found if same else None
        return self._read[owner.uid]
