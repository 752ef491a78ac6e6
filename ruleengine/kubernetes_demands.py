"""Which pods wait for cards in Kubernetes, what is idle there, and what running pods hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.kubernetes_clients import NODES, PODS
from gpuwarden.platforms.kubernetes import UnexpectedObject
from gpuwarden.platforms.kubernetes_scheduling import Requests, read_claimant, read_offer
from gpuwarden.ruleengine.demands import Demand, Needs, Room, Share, WaitingJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.kubernetes_clients import KubernetesClient
    from gpuwarden.platforms.kubernetes_scheduling import Claimant, Offer

NAME: Final = "Kubernetes"
PREFIX: Final = "pod-"
DEMAND_SECONDS: Final = 30.0
"""For all lists of one tick."""
_PENDING: Final = "spec.nodeName=,status.phase=Pending"
_PLACED: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"


class KubernetesQueue:
    """Who waits, by the scheduler's word on each pod.

    Args:
        client: of the API server.
    """

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client

    async def demand(self, *, fits: bool) -> Demand:
        """Who waits now, and with `fits` also what is idle and what running pods hold.

        Nodes and running pods are asked for only while somebody waits.

        Raises:
            ServiceUnavailable: the API server does not answer, or may not.
        """
        try:
            async with asyncio.timeout(DEMAND_SECONDS):
                return await self._demand(fits=fits)
        except TimeoutError as error:
            text = f"the API server needed more than {DEMAND_SECONDS:g} s to list its pods"
            raise ServiceUnavailable(text) from error
        except RefusedAction as error:
            raise ServiceUnavailable(str(error)) from error
        except UnexpectedObject as error:
            raise ServiceUnavailable(f"the API server's answer: {error}") from error

    async def _demand(self, *, fits: bool) -> Demand:
        pending = await self._pods(_PENDING)
        if not fits or not any(pod.waits for pod in pending):
            return demand_of(pending, (), ())
        nodes = [read_offer(item) for item in await self._client.list(NODES, None)]
        return demand_of(pending, nodes, await self._pods(_PLACED))

    async def _pods(self, fields: str) -> list[Claimant]:
        return [read_claimant(item) for item in await self._client.list(PODS, None, fields=fields)]


def demand_of(
    pending: Iterable[Claimant], nodes: Sequence[Offer], placed: Sequence[Claimant]
) -> Demand:
    """The same in the words of `demands`. Pure.

    Args:
        pending: pods without a node.
        nodes: all.
        placed: pods with one, that have not ended.
    """
    pending = tuple(pending)
    taken: dict[str, list[Requests]] = {}
    for pod in placed:
        taken.setdefault(pod.pod.node, []).append(pod.requests)
    for pod in pending:
        # What is being freed for somebody already is nobody else's.
        if pod.nominated:
            taken.setdefault(pod.nominated, []).append(pod.requests)
    usable = [node for node in nodes if node.usable and node.cards]
    waiting = [pod for pod in pending if pod.waits and not pod.nominated]
    waiting.sort(key=lambda pod: (-pod.priority, pod.pod.created, pod.pod.title))
    names = {node.name for node in nodes}
    hosts: dict[str, set[str]] = {}
    for node in nodes:
        for host in node.hosts:
            for word in (host, host if host[:1].isdigit() else host.partition(".")[0]):
                hosts.setdefault(word, set()).add(node.name)
    return Demand(
        NAME,
        PREFIX,
        waiting=tuple(_waiting(pod, usable) for pod in waiting),
        rooms={node.name: _room(node, taken.get(node.name, ())) for node in usable},
        holdings={f"{PREFIX}{pod.pod.uid}": (_share(pod),) for pod in placed if pod.requests.cards},
        hosts={
            host: next(iter(found))
            for host, found in hosts.items()
            if len(found) == 1 and host not in names
        },
    )


def _waiting(pod: Claimant, nodes: Iterable[Offer]) -> WaitingJob:
    requests = pod.requests
    kind, count = next(iter(requests.cards.items()))
    return WaitingJob(
        pod.pod.title,
        Needs(
            count,
            per_node=count,
            max_nodes=1,
            model=kind,
            cpus=requests.cpus,
            memory=requests.memory,
        ),
        candidates=frozenset(node.name for node in nodes if pod.accepts(node)),
        places=frozenset({pod.pod.namespace}),
        unknown=pod.unknown,
    )


def _room(node: Offer, taken: Iterable[Requests]) -> Room:
    cards, cpus, memory = dict(node.cards), node.cpus, node.memory
    for requests in taken:
        for kind, count in requests.cards.items():
            if kind in cards:
                cards[kind] -= count
        cpus -= requests.cpus
        memory -= requests.memory
    idle = {kind: max(0, count) for kind, count in cards.items()}
    return Room(idle, max(0.0, cpus), max(0.0, memory))


def _share(pod: Claimant) -> Share:
    requests = pod.requests
    return Share(
        pod.pod.node,
        cards=sum(requests.cards.values()),
        cpus=requests.cpus,
        memory=requests.memory,
    )
