"""A fake cluster with a scripted Kueue and a policy in force, for the tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.kubernetes_servers import Cluster, kubernetes
from tests.kubernetes_store import BUILT_IN, KUEUE, Store, copied
from tests.kueue_controllers import Kueue
from tests.scheduling.policy_files import a_policy

from gpuwarden.scheduling.engines import Outcome, carry_out, plan
from gpuwarden.scheduling.kueue.adapters import KueueAdapter, connect
from gpuwarden.scheduling.policies import policy_hash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kubernetes_store import Grant, Json

    from gpuwarden.kubernetes_clients import KubernetesClient
    from gpuwarden.scheduling.policies import Policy

PREEMPTION: Json = {
    "minimum_run": "0s",
    "notice": "epoch",
    "deadline": "10m",
    "back_off": "0s",
    "at_most": {"times": 3, "per": "24h"},
}


class Time:
    """A clock that a test owns."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Unix time."""
        return self.now

    def wall(self) -> float:
        """Unix time."""
        return self.now

    def monotonic(self) -> float:
        """Seconds, of the real clock: whether a watch lives is no matter of a test's time."""
        return time.monotonic()

    def pass_(self, seconds: float) -> None:
        """Let time go by."""
        self.now += seconds


@dataclass
class Scene:
    """The cluster, its Kueue, and the policy that is in force."""

    cluster: Cluster
    kueue: Kueue
    time: Time
    policy: Policy

    def client(self) -> KubernetesClient:
        """A client of the cluster, of somebody who may do everything."""
        return connect(self.policy, "test")

    def kick(self) -> None:
        """Let the controllers look once more, as when time alone has changed something."""
        self.cluster.store.changed()


def kueue_policy(**parts: Any) -> Policy:
    """The policy of the tests for Kueue: small, and leaving is quick."""
    card = {
        "name": "a100-40",
        "model": "NVIDIA A100-SXM4-40GB",
        "memory": "40GiB",
        "count": 4,
        "kueue": {"node_labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}},
    }
    base = {
        "engine": "kueue",
        "cards": [card],
        "teams": [
            {"name": "vision", "users": ["ana", "bo"], "quota": {"a100-40": 2}},
            {"name": "speech", "users": ["cy"], "quota": {"a100-40": 2}},
        ],
        "budgets": [],
        "windows": None,
        "bookings": None,
        "preemption": PREEMPTION,
    }
    return a_policy(**(base | parts))


def with_server(policy: Policy, cluster: Cluster) -> Policy:
    """A policy whose cluster is the fake one."""
    settings = cluster.settings()
    kueue = policy.kueue.model_copy(update={"kubeconfig": settings.kubeconfig, "timeout": 20.0})
    return policy.model_copy(update={"kueue": kueue})


def bring_about(policy: Policy, client: KubernetesClient | None = None) -> Outcome:
    """Apply a policy, as `gpuwarden policy apply` does."""

    async def run() -> Outcome:
        adapter = KueueAdapter(policy, client)
        try:
            wanted = adapter.render(policy, version=None)
            todo = plan(wanted, await adapter.read(wanted))
            return await carry_out(adapter, todo.steps, lambda _number, _step: None)
        finally:
            await adapter.aclose()

    return asyncio.run(run())


_APPLIED: dict[str, Store] = {}
"""A policy's hash -> a store in which it was applied: applying it takes longer than most tests."""


def _apply_once(policy: Policy, own: Policy, cluster: Cluster) -> None:
    """Have a policy in force, as `bring_about` leaves it."""
    store, key = cluster.store, policy_hash(policy)
    known = _APPLIED.get(key)
    if known is None:
        cluster.controllers = False
        outcome = bring_about(own)
        assert outcome.failed is None, outcome.error
        cluster.controllers = True
        known = _APPLIED[key] = Store(store.resources)
        _copy(store, known)
    else:
        _copy(known, store)


def _copy(source: Store, target: Store) -> None:
    target.objects |= {key: copied(found) for key, found in source.objects.items()}
    target.owners |= {
        key: {manager: {*paths} for manager, paths in owners.items()}
        for key, owners in source.owners.items()
    }
    target.version = target.oldest = max(source.version, target.version) + 1


@contextlib.contextmanager
def scene(
    folder: Path, policy: Policy, *, applied: bool = True, grants: tuple[Grant, ...] | None = None
) -> Iterator[Scene]:
    """A cluster of one node of four cards.

    Args:
        folder: for its kubeconfig.
        policy: that is in force.
        applied: whether it is applied already.
        grants: what our user may do; everything if None.
    """
    clock, kueue = Time(), Kueue()
    store = Store(BUILT_IN + KUEUE, now=clock)
    with kubernetes(folder, store=store, step=kueue, grants=grants) as cluster:
        cluster.node("node1", gpus=4)
        own = with_server(policy, cluster)
        if applied:
            _apply_once(policy, own, cluster)
        yield Scene(cluster, kueue, clock, own)
