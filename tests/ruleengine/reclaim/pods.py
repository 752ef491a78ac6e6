"""A platform over the fake cluster, and what its tests ask of it again and again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.kubernetes_servers import Cluster, kubernetes

from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.kubernetes import Kubernetes
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed, Order, State
from gpuwarden.ruleengine.verdicts import JobFacts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection
    from pathlib import Path

    from tests.kubernetes_store import Grant, Json


@dataclass
class Hands:
    """The platform, and the cluster that it acts on."""

    platform: Kubernetes
    cluster: Cluster

    async def find(
        self, pod: Json, deed: Deed = Deed.TERMINATE, *, offenders: Collection[Json] = ()
    ) -> Claim | Blocked:
        """Recognise a pod as the job that the exporter makes of it."""
        return await self.platform.find(
            facts(pod), deed, offenders=[facts(item).job_id for item in offenders]
        )

    async def claim(
        self, pod: Json, deed: Deed = Deed.TERMINATE, *, offenders: Collection[Json] = ()
    ) -> Order:
        """An order for a pod that can be ended."""
        found = await self.find(pod, deed, offenders=offenders)
        assert isinstance(found, Claim), found
        return Order("d-1", found, deed, grace=45.0, reason="idle for 1 h")

    async def blocked(self, pod: Json, deed: Deed = Deed.TERMINATE, **more: Any) -> str:
        """Why a pod cannot be ended."""
        found = await self.find(pod, deed, **more)
        assert isinstance(found, Blocked), found
        return found.reason

    async def state(self, order: Order) -> State:
        """What has become of it."""
        return await self.platform.state(order)


def facts(pod: Json) -> JobFacts:
    """A job of the exporter's, for a pod."""
    return JobFacts(f"pod-{pod['metadata']['uid']}", "node1:9835")


@contextlib.asynccontextmanager
async def hands(
    folder: Path, *, grants: tuple[Grant, ...] | None = None, **settings: Any
) -> AsyncIterator[Hands]:
    """A platform on a fake cluster of one node."""
    with kubernetes(folder, grants=grants) as cluster:
        cluster.node("node1")
        platform = Kubernetes.from_settings(cluster.settings(**settings), folder)
        try:
            yield Hands(platform, cluster)
        finally:
            await platform.aclose()
