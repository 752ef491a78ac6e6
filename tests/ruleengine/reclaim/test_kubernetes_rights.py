"""The role that is shipped is just what the engine needs, and what is missing of it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from tests import kubernetes_manifests as manifests
from tests.kubernetes_store import Grant
from tests.ruleengine.reclaim.pods import Hands, hands

from gpuwarden.errors import RefusedAction
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.kubernetes_controllers import HOLDS, SCALED
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed, Order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kubernetes_store import Json

ROLE = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes" / "engine-rbac.yaml"
OPTIONAL = {("", "events", "create"), ("", "nodes", "get"), ("", "nodes", "list")}
"""Without them less is told; nothing else depends on them."""


def shipped() -> list[tuple[str, str, str]]:
    """(group, resource, verb) of every right that the manifest gives."""
    found = []
    for document in yaml.safe_load_all(ROLE.read_text()):
        for rule in document.get("rules", ()):
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
            found += [
                (group, resource, verb)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            ]
    return found


def grants(*, without: tuple[str, str, str] | None = None) -> tuple[Grant, ...]:
    """The manifest's rights, less one."""
    return tuple(
        Grant((group,), (resource,), (verb,))
        for group, resource, verb in shipped()
        if (group, resource, verb) != without
    )


def objects() -> Iterator[tuple[str, Json]]:
    """One object of each way to end a pod."""
    yield "Pod", manifests.pod("bare")
    yield "Job", manifests.job("job")
    yield "Deployment", manifests.service("Deployment", "deployment")
    yield "StatefulSet", manifests.service("StatefulSet", "stateful")
    yield "ReplicaSet", manifests.service("ReplicaSet", "replica")
    yield "PyTorchJob", manifests.pytorch_job("pytorch")
    yield "JobSet", manifests.job_set("jobset")
    yield "Notebook", manifests.notebook("notebook")


async def end_all(hands: Hands, group: str | None = None) -> list[str]:
    """End every pod, or those whose controllers are of a group; gives what was refused."""
    cluster, refused = hands.cluster, []
    for kind, body in objects():
        own = body["apiVersion"].rpartition("/")[0]
        if group in (None, own):
            cluster.create(kind, "lab", body)
    if group in (None, "kueue.x-k8s.io"):
        job = cluster.create("Job", "lab", manifests.job("queued"))
        cluster.create("Workload", "lab", manifests.workload("w", job["metadata"]["uid"]))
    cluster.run_pods()
    pods = cluster.pods()
    for pod in pods:
        found = await hands.find(pod, Deed.TERMINATE, offenders=pods)
        if isinstance(found, Blocked):
            if found.reason != "ending":
                refused.append(f"{found.reason}: {found.sentence}")
            continue
        assert isinstance(found, Claim)
        try:
            await hands.platform.end(Order("d", found, Deed.TERMINATE, grace=30.0))
        except RefusedAction as error:
            refused.append(f"{error.reason}: {error}")
    return refused


def test_all_of_it(tmp_path: Path) -> None:
    """With the role that is shipped every kind of pod ends, and is seen to."""

    async def run() -> None:
        async with hands(tmp_path, grants=grants()) as found:
            assert await end_all(found) == []
            assert all("deletionTimestamp" in p["metadata"] for p in found.cluster.pods())
            assert found.cluster.store.all("Event")

    asyncio.run(run())


USED = [
    right
    for right in shipped()
    if right not in OPTIONAL
    and (
        right[0] in ("", "batch", "apps", "jobset.x-k8s.io", "kueue.x-k8s.io")
        or right[1] in ("pytorchjobs", "notebooks")
    )
]


@pytest.mark.parametrize("right", USED, ids="-".join)
def test_each_part_of_it(tmp_path: Path, right: tuple[str, str, str]) -> None:
    """Without any one right something is refused, and the answer names just that right."""
    group, resource, verb = right

    async def run() -> None:
        async with hands(tmp_path, grants=grants(without=right)) as found:
            refused = await end_all(found, group)
            wanted = f'cannot {verb} resource "{resource}" in API group "{group}"'
            assert refused
            assert all(
                text.startswith("forbidden") and wanted in text and "engine-rbac.yaml" in text
                for text in refused
            ), refused

    asyncio.run(run())


@pytest.mark.parametrize("right", sorted(OPTIONAL), ids="-".join)
def test_parts_that_can_be_done_without(tmp_path: Path, right: tuple[str, str, str]) -> None:
    """Pods end all the same."""

    async def run() -> None:
        async with hands(tmp_path, grants=grants(without=right)) as found:
            assert await end_all(found, "") == []

    asyncio.run(run())


def test_every_known_controller() -> None:
    """The role holds the kinds that the engine knows how to end."""
    known = {(group, resource) for group, resource, verb in shipped() if verb == "patch"}
    for name in HOLDS:
        kind, _, group = name.partition(".")
        assert (group, f"{kind.lower()}s") in known, name
    for name in SCALED:
        kind, _, group = name.partition(".")
        assert (group, f"{kind.lower()}s/scale") in known, name


def test_nothing_more() -> None:
    """Nothing that would let the engine become somebody else, look into pods, or delete at will."""
    resources = {resource for _, resource, _ in shipped()}
    assert not resources & {"secrets", "pods/exec", "pods/attach", "pods/ephemeralcontainers"}
    assert {verb for _, _, verb in shipped()} == {"get", "list", "create", "patch"}
