"""Finding the pod of a uid, which no API does: its node's pods are looked through, then all."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction
from gpuwarden.kubernetes_clients import NODES, PODS
from gpuwarden.platforms import kubernetes
from gpuwarden.platforms.kubernetes import UnexpectedObject, read_pod
from gpuwarden.platforms.kubernetes_scheduling import read_offer
from gpuwarden.ruleengine.reclaim.node import host_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gpuwarden.kubernetes_clients import KubernetesClient
    from gpuwarden.platforms.kubernetes import Pod

_KNOWN_NAMES = 20_000


class PodLookup:
    """Pods by their uid.

    Args:
        client: of the API server.
        namespaces: that are looked through; all if there are none.
    """

    def __init__(self, client: KubernetesClient, namespaces: tuple[str, ...]) -> None:
        self._client = client
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._names: OrderedDict[str, tuple[str, str]] = OrderedDict()

    async def pod(self, uid: str, instance: str) -> Pod | None:
        """The pod of a uid, or None where there is none.

        Args:
            uid: of the pod.
            instance: Prometheus target of its node: where it is looked for first.

        Raises:
            RefusedAction: the engine may not look.
            ServiceUnavailable: not known.
            UnexpectedObject: an answer is of another shape.
        """
        if uid in self._names:
            namespace, name = self._names[uid]
            known = await self._client.get(PODS, namespace, name)
            if known is not None and kubernetes.value_at(known, "metadata.uid") == uid:
                return read_pod(known)
        async for fields in self._places(instance):
            for place in self._namespaces:
                for item in await self._client.list(PODS, place, fields=fields):
                    if kubernetes.value_at(item, "metadata.uid") == uid:
                        pod = read_pod(item)
                        self._remember(pod)
                        return pod
        return None

    async def _places(self, instance: str) -> AsyncIterator[str]:
        """Selectors of where it may be, the likeliest and smallest first."""
        with suppress(RefusedAction, UnexpectedObject):
            host = host_of(instance)
            if not _is_address(host):
                yield f"spec.nodeName={kubernetes.checked_name(host)}"
            node = await self._node(host.strip("[]"))
            if node and node != host:
                yield f"spec.nodeName={kubernetes.checked_name(node)}"
        yield ""

    async def _node(self, host: str) -> str:
        """The node of an address or host name, or an empty string."""
        for item in await self._client.list(NODES, None):
            offer = read_offer(item)
            if host in offer.hosts:
                return offer.name
        return ""

    def _remember(self, pod: Pod) -> None:
        self._names[pod.uid] = (pod.namespace, pod.reference.name)
        while len(self._names) > _KNOWN_NAMES:
            self._names.popitem(last=False)


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return True
    return False
