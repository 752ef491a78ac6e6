"""What an API server answers to the calls that the engine makes: the fake, and a real one.

`exchanges` asks everything once and gives the answers under names, without what differs each time
(uids, versions, times). Those of a real kube-apiserver are kept in tests/kubernetes_answers.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from tests import kubernetes_manifests as manifests

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.kubernetes_clients import EVENTS, PODS, Kind
from gpuwarden.platforms.kubernetes import Reference, read_pod, value_at

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from tests.kubernetes_store import Json

    from gpuwarden.kubernetes_clients import KubernetesClient

SPACE = "default"
JOBS = Kind("batch/v1", "jobs")
DEPLOYMENTS = Kind("apps/v1", "deployments")
_UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_OTHER = "00000000-0000-4000-8000-000000000000"


async def answer(call: Awaitable[Any], *paths: str) -> Any:
    """What a call gives: some fields of its object, or why there is none."""
    try:
        found = await call
    except RefusedAction as error:
        return {"refused": error.reason, "message": _UID.sub("UID", str(error))}
    except ServiceUnavailable as error:
        return {"unavailable": _UID.sub("UID", str(error))}
    if isinstance(found, dict) and paths:
        return {path: value_at(found, path) for path in paths}
    if isinstance(found, list):
        return sorted(value_at(item, "metadata.name") for item in found)
    return found


async def exchanges(
    client: KubernetesClient, nobody: KubernetesClient, stranger: KubernetesClient
) -> dict[str, Any]:
    """Everything that the engine asks, and what can go wrong with it.

    Args:
        client: of somebody who may do everything.
        nobody: of somebody who may do nothing.
        stranger: of somebody whom the server does not know.
    """
    said: dict[str, Any] = {}
    await _reading(client, said)
    await _rights(client, nobody, stranger, said=said)
    await _locking(client, said)
    await _deleting(client, said)
    await _evicting(client, said)
    await _scaling(client, said)
    return said


async def pod(client: KubernetesClient, name: str, *, running: bool = True, **spec: Any) -> Json:
    """A pod on a node that nobody looks after."""
    await client.create(PODS, SPACE, manifests.pod(name, **spec))
    if running:
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await client.patch(Kind("v1", "pods/status"), SPACE, name, body={"status": status})
    found = await client.get(PODS, SPACE, name)
    assert found is not None
    return dict(found)


async def _reading(client: KubernetesClient, said: dict[str, Any]) -> None:
    made = client.create(PODS, SPACE, manifests.pod("one", grace=20))
    fields = ("status.phase", "spec.terminationGracePeriodSeconds", "kind", "apiVersion")
    said["create a pod"] = await answer(made, *fields)
    await pod(client, "two", node="node2")
    twice = client.create(PODS, SPACE, manifests.pod("one"))
    said["create it twice"] = await answer(twice)
    wrong = manifests.pod("three")
    wrong["spec"]["terminationGracePeriodSeconds"] = "soon"
    refused = await answer(client.create(PODS, SPACE, wrong))
    said["create nonsense"] = refused["refused"]
    said["get a pod"] = await answer(client.get(PODS, SPACE, "one"), *fields)
    said["get none"] = await answer(client.get(PODS, SPACE, "none"))
    said["list pods"] = await answer(client.list(PODS, SPACE))
    on = client.list(PODS, None, fields="spec.nodeName=node2")
    said["list a node's pods"] = await answer(on)
    said["list by a label"] = await answer(client.list(PODS, SPACE, labels="app in (one,x)"))
    items = await client.list(PODS, SPACE)
    said["an item of a list"] = sorted({"kind", "apiVersion"} & items[0].keys())
    read = read_pod(items[0])
    said["read a pod"] = [read.namespace, read.reference.name, read.node, read.devices, read.grace]
    event = {
        "metadata": {"generateName": "gpuwarden-"},
        "involvedObject": {"kind": "Pod", "namespace": SPACE, "name": "one"},
        "reason": "Test",
        "message": "x",
        "type": "Warning",
        "source": {"component": "gpuwarden"},
        "firstTimestamp": "2026-11-30T00:00:00Z",
        "lastTimestamp": "2026-11-30T00:00:00Z",
        "count": 1,
    }
    said["create an event"] = await answer(client.create(EVENTS, SPACE, event), "reason", "count")
    said["a group"] = await client.has_group("apps")
    said["no group"] = await client.has_group("example.net")
    revision = Reference("apps/v1", "ControllerRevision", "x", _OTHER)
    said["a kind"] = (await client.kind(revision)).plural
    old = Reference("apps/v1beta1", "Deployment", "x", _OTHER)
    said["a kind of a version that is gone"] = (await client.kind(old)).path(SPACE, "x")
    unknown = Reference("apps/v1", "Pipeline", "x", _OTHER)
    said["no kind"] = await answer(client.kind(unknown))
    elsewhere = Reference("example.net/v1", "Pipeline", "x", _OTHER)
    said["no version"] = await answer(client.kind(elsewhere))


async def _rights(
    client: KubernetesClient,
    nobody: KubernetesClient,
    stranger: KubernetesClient,
    *,
    said: dict[str, Any],
) -> None:
    one = Reference("v1", "Pod", "one", _OTHER)
    said["get without right"] = await answer(nobody.get(PODS, SPACE, "one"))
    said["list without right"] = await answer(nobody.list(PODS, None))
    said["patch without right"] = await answer(nobody.patch(JOBS, SPACE, "job", body={}))
    said["evict without right"] = await answer(nobody.evict(SPACE, one, grace=1))
    said["ask as a stranger"] = await answer(stranger.get(PODS, SPACE, "one"))
    said["still there"] = await answer(client.get(PODS, SPACE, "one"), "metadata.name")


async def _locking(client: KubernetesClient, said: dict[str, Any]) -> None:
    found = await client.get(PODS, SPACE, "one")
    assert found is not None
    version, uid = found["metadata"]["resourceVersion"], found["metadata"]["uid"]

    def patch(value: str, **locks: str) -> Awaitable[Any]:
        body = {"metadata": {"annotations": {"example.org/x": value}, **locks}}
        return client.patch(PODS, SPACE, "one", body=body)

    path = "metadata.annotations"
    said["patch the right one"] = await answer(patch("1", resourceVersion=version, uid=uid), path)
    said["patch an old version"] = await answer(patch("2", resourceVersion=version, uid=uid))
    said["patch another uid"] = await answer(patch("3", uid=_OTHER))
    # As when it was deleted and made again between a look and a change.
    said["patch another one"] = await answer(patch("4", resourceVersion=version, uid=_OTHER))
    said["patch none"] = await answer(client.patch(PODS, SPACE, "none", body={"metadata": {}}))
    said["it is as it was"] = await answer(client.get(PODS, SPACE, "one"), path)


async def _deleting(client: KubernetesClient, said: dict[str, Any]) -> None:
    async def left(name: str) -> Any:
        return await answer(client.get(PODS, SPACE, name), "metadata.deletionGracePeriodSeconds")

    made = await pod(client, "going")
    own = Reference("v1", "Pod", "going", made["metadata"]["uid"])
    other = Reference("v1", "Pod", "going", _OTHER)
    said["delete another uid"] = await answer(client.delete(SPACE, other, grace=5))
    await client.delete(SPACE, own, grace=600)
    said["delete"] = await left("going")
    await client.delete(SPACE, own, grace=30)
    said["delete with less grace"] = await left("going")
    await client.delete(SPACE, own, grace=300)
    said["delete with more grace"] = await left("going")
    none = Reference("v1", "Pod", "none", _OTHER)
    said["delete none"] = await answer(client.delete(SPACE, none, grace=5))
    unplaced = await pod(client, "unplaced", running=False, node=None)
    reference = Reference("v1", "Pod", "unplaced", unplaced["metadata"]["uid"])
    await client.delete(SPACE, reference, grace=600)
    said["delete one without a node"] = await left("unplaced")
    held = await pod(
        client,
        "held",
        running=False,
        node=None,
    )
    await client.patch(PODS, SPACE, "held", body={"metadata": {"finalizers": ["example.org/hold"]}})
    reference = Reference("v1", "Pod", "held", held["metadata"]["uid"])
    await client.delete(SPACE, reference, grace=5)
    kept = await client.get(PODS, SPACE, "held")
    said["delete one with a finalizer"] = kept and value_at(kept, "metadata.finalizers")
    await client.patch(PODS, SPACE, "held", body={"metadata": {"finalizers": None}})
    said["without its finalizer"] = await left("held")
    done = await pod(client, "done")
    await client.patch(
        Kind("v1", "pods/status"), SPACE, "done", body={"status": {"phase": "Succeeded"}}
    )
    reference = Reference("v1", "Pod", "done", done["metadata"]["uid"])
    await client.delete(SPACE, reference, grace=600)
    said["delete one that has ended"] = await left("done")


async def _evicting(client: KubernetesClient, said: dict[str, Any]) -> None:
    made = await pod(client, "guarded")
    own = Reference("v1", "Pod", "guarded", made["metadata"]["uid"])
    group = await client.has_group("policy")
    budgets = Kind(str(group), "poddisruptionbudgets")
    body = {**manifests.budget("keep", "guarded"), "apiVersion": budgets.api_version}
    await client.create(budgets, SPACE, body)
    status = Kind(budgets.api_version, "poddisruptionbudgets/status")

    async def allow(count: int) -> None:
        numbers = {"disruptionsAllowed": count, "currentHealthy": 1, "desiredHealthy": 1,
                   "expectedPods": 1, "observedGeneration": 1}  # fmt: skip
        await client.patch(status, SPACE, "keep", body={"status": numbers})

    await allow(0)
    said["evict against a budget"] = await answer(client.evict(SPACE, own, grace=45))
    path = "metadata.deletionGracePeriodSeconds"
    said["it stays"] = await answer(client.get(PODS, SPACE, "guarded"), path)
    await allow(1)
    other = Reference("v1", "Pod", "guarded", _OTHER)
    said["evict another uid"] = await answer(client.evict(SPACE, other, grace=45))
    await allow(1)
    await client.evict(SPACE, own, grace=45)
    said["evict"] = await answer(client.get(PODS, SPACE, "guarded"), path)
    used = client.get(budgets, SPACE, "keep")
    said["a budget that was used"] = await answer(used, "status.disruptionsAllowed")
    none = Reference("v1", "Pod", "none", _OTHER)
    said["evict none"] = await answer(client.evict(SPACE, none, grace=5))


async def _scaling(client: KubernetesClient, said: dict[str, Any]) -> None:
    deployment = manifests.service("Deployment", "serve", replicas=2)
    await client.create(DEPLOYMENTS, SPACE, deployment)
    scale = Kind("apps/v1", "deployments/scale")
    # A real one's controllers may be writing its status meanwhile.
    for _ in range(20):
        found = await client.get(scale, SPACE, "serve")
        assert found is not None
        metadata = found["metadata"]
        locks = {name: metadata[name] for name in ("uid", "resourceVersion")}
        body = {"metadata": locks, "spec": {"replicas": 0}}
        done = await answer(client.patch(scale, SPACE, "serve", body=body), "spec.replicas", "kind")
        if done.get("refused") != "conflict":
            break
        await asyncio.sleep(0.1)
    said["a scale"] = value_at(found, "spec.replicas")
    said["scale to nothing"] = done
    said["scale an old version"] = await answer(client.patch(scale, SPACE, "serve", body=body))
    whole = client.get(DEPLOYMENTS, SPACE, "serve")
    said["what was scaled"] = await answer(whole, "spec.replicas")
    body = {"metadata": {"uid": _OTHER}, "spec": {"replicas": 3}}
    said["scale another uid"] = await answer(client.patch(scale, SPACE, "serve", body=body))
