"""What the Kubernetes API tells of pods and nodes, read without trust."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gpuwarden.platforms.kubernetes import (
    UnexpectedObject,
    checked_name,
    controller_of,
    patch_at,
    read_pod,
    value_at,
)
from gpuwarden.platforms.kubernetes_scheduling import quantity, read_claimant, read_offer

UNSCHEDULABLE = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


def pod(spec: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A pod as the API serves it."""
    metadata = {"name": "train", "namespace": "lab", "uid": "u-1", **more.pop("metadata", {})}
    return {"metadata": metadata, "spec": spec or {}, "status": {}, **more}


def waiting(spec: dict[str, Any], message: str = UNSCHEDULABLE, **more: Any) -> dict[str, Any]:
    """A pod for which the scheduler has found no node."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    status = {"phase": "Pending", "conditions": [condition], **more.pop("status", {})}
    return pod(spec, status=status, **more)


def cards(number: int, **resources: str) -> dict[str, Any]:
    """Containers that ask for cards."""
    limits = {"nvidia.com/gpu": str(number), **resources}
    return {"containers": [{"name": "c", "resources": {"limits": limits}}]}


def node(**more: Any) -> dict[str, Any]:
    """A node with eight cards, that is ready."""
    allocatable = {"nvidia.com/gpu": "8", "cpu": "63500m", "memory": "256Gi"}
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
    return {
        "metadata": {"name": "node1", "labels": more.pop("labels", {"gpu": "a100", "slots": "8"})},
        "spec": more.pop("spec", {}),
        "status": {**status, **more},
    }


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"metadata": []},
        pod(metadata={"name": "../secrets"}),
        pod(metadata={"name": "a..b"}),
        pod(metadata={"uid": "a/b"}),
        pod(metadata={"namespace": "Lab"}),
        pod(metadata={"deletionTimestamp": "soon"}),
        pod(metadata={"ownerReferences": [{"controller": True, "kind": "A/B", "name": "x"}]}),
        {**pod(), "spec": ["x"]},
        cast("Any", None),
        cast("Any", ["x"]),
    ],
)
def test_what_is_no_pod(found: dict[str, Any]) -> None:
    """It is refused, before any of it becomes part of an address."""
    with pytest.raises(UnexpectedObject):
        read_pod(found)


def test_owners() -> None:
    """Of several only the one that manages the object counts."""
    base = {"apiVersion": "batch/v1", "kind": "Job", "uid": "u"}
    owners = [{**base, "name": "other"}, {**base, "name": "boss", "controller": True}]
    found = controller_of({"metadata": {"ownerReferences": owners}})
    assert found is not None
    assert (found.name, found.group, found.title) == ("boss", "batch", "Job.batch/boss")
    assert controller_of({"metadata": {"ownerReferences": owners[:1]}}) is None


@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        ({"containers": [{"resources": {"limits": {"cpu": "1", "hugepages-2Mi": "2Mi"}}}]}, False),
        (cards(1), True),
        ({"containers": [{}], "initContainers": cards(1)["containers"]}, True),
        ({"containers": [{"resources": {"requests": {"volcano.sh/vgpu-number": "1"}}}]}, True),
        ({"containers": [{}], "resourceClaims": [{"name": "gpu"}]}, True),
        ({"containers": [{}], "runtimeClassName": "nvidia"}, True),
        ({"containers": [{"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]}, True),
        ({"containers": [{"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}]}, False),
        ({"containers": [{"securityContext": {"privileged": True}}]}, True),
        ({"containers": [{"envFrom": [{"configMapRef": {"name": "cuda"}}]}]}, True),
        ({"containers": [{}], "volumes": [{"name": "d", "hostPath": {"path": "/dev"}}]}, True),
        (
            {"containers": [{}], "volumes": [{"name": "d", "hostPath": {"path": "/dev/nvidia0"}}]},
            True,
        ),
        ({"containers": [{}], "volumes": [{"name": "d", "hostPath": {"path": "/data"}}]}, False),
    ],
)
def test_pods_that_may_have_a_card(spec: dict[str, Any], devices: bool) -> None:
    """However it came by it: such a pod is nobody's helper."""
    assert read_pod(pod(spec)).devices is devices


def test_cards_of_a_pod() -> None:
    """Containers add up; one of the first may ask for more; MIG counts, other devices do not."""
    first = {"name": "i", "resources": {"limits": {"nvidia.com/gpu": 4}}}

    def found(spec: dict[str, Any]) -> dict[str, int]:
        return dict(read_claimant(pod(spec)).requests.cards)

    assert found({**cards(1), "initContainers": [first]}) == {"nvidia.com/gpu": 4}
    both = [*cards(1)["containers"], *cards(2)["containers"]]
    assert found({"containers": both}) == {"nvidia.com/gpu": 3}
    mig = {"limits": {"nvidia.com/mig-1g.5gb": "2", "amd.com/gpu": "1", "nvidia.com/nic": "1"}}
    assert found({"containers": [{"resources": mig}]}) == {"nvidia.com/mig-1g.5gb": 2}


def test_paths() -> None:
    """A path is read and written alike."""
    patch = patch_at("spec.runPolicy.suspend", value=True)
    assert patch == {"spec": {"runPolicy": {"suspend": True}}}
    assert value_at(patch, "spec.runPolicy.suspend") is True
    assert value_at(patch, "spec.runPolicy.suspend.more") is None
    with pytest.raises(UnexpectedObject):
        checked_name("-x")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2.0),
        (2, 2.0),
        ("500m", 0.5),
        ("16Gi", 16 * 1024.0**3),
        ("1.5G", 1.5e9),
        ("1e3", 1000.0),
        ("2E", 2e18),
        (".5", 0.5),
        ("100k", 100_000.0),
        ("1Ei", 1024.0**6),
    ],
)
def test_quantities(text: object, value: float) -> None:
    """As the API writes them."""
    assert quantity(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "x", "-1", "1 Gi", "1gi", "nan", "1e", "9" * 40, None])
def test_what_is_no_quantity(text: object) -> None:
    """It is refused."""
    with pytest.raises(UnexpectedObject):
        quantity(text)


def test_a_pod_that_waits_for_a_card() -> None:
    """Unschedulable, because no node has a card for it."""
    found = read_claimant(waiting({**cards(2, cpu="8", memory="64Gi"), "priority": 7}))
    assert found.waits
    assert (dict(found.requests.cards), found.requests.cpus) == ({"nvidia.com/gpu": 2}, 8.0)
    assert (found.priority, found.unknown) == (7, "")


@pytest.mark.parametrize(
    "found",
    [
        waiting(cards(1), "0/2 nodes are available: 2 Insufficient cpu."),
        waiting({"containers": []}),
        waiting({**cards(1), "nodeName": "node1"}),
        waiting(cards(1), metadata={"deletionTimestamp": "2026-11-30T00:00:00Z"}),
        pod(cards(1), status={"phase": "Pending"}),
        waiting(
            cards(1),
            status={"conditions": [{"type": "PodScheduled", "status": "False",
                                    "reason": "SchedulingGated"}]},
        ),
    ],
)  # fmt: skip
def test_a_pod_that_waits_for_else(found: dict[str, Any]) -> None:
    """It waits for no card: nobody is ended for it."""
    assert not read_claimant(found).waits


@pytest.mark.parametrize(
    ("found", "doubt"),
    [
        (waiting(cards(1, **{"nvidia.com/mig-1g.5gb": "1"})), "several kinds"),
        (waiting(cards(1, **{"rdma/hca": "1"})), "rdma/hca"),
        (waiting({**cards(1), "resourceClaims": [{"name": "x"}]}), "resourceClaims"),
        (waiting(cards(1), metadata={"labels": {"kueue.x-k8s.io/pod-group-name": "x"}}),
         "start together"),
        (waiting(cards(1), metadata={"annotations": {"scheduling.k8s.io/group-name": "x"}}),
         "start together"),
        (waiting({**cards(1), "affinity": {"podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "x"}]}}}), "apart"),
        (waiting({**cards(1), "topologySpreadConstraints": [
            {"whenUnsatisfiable": "DoNotSchedule"}]}), "spread"),
        (waiting(cards(1), UNSCHEDULABLE + " 1 node(s) had volume node affinity conflict"),
         "volumes"),
    ],
)  # fmt: skip
def test_wishes_that_are_not_told_apart(found: dict[str, Any], doubt: str) -> None:
    """They are said, and not guessed at."""
    claimant = read_claimant(found)
    assert claimant.waits
    assert doubt in claimant.unknown


@pytest.mark.parametrize(
    ("spec", "offered", "accepted"),
    [
        ({}, node(), True),
        ({"nodeSelector": {"gpu": "a100"}}, node(), True),
        ({"nodeSelector": {"gpu": "h100"}}, node(), False),
        ({}, node(spec={"taints": [{"key": "x", "value": "y", "effect": "NoSchedule"}]}), False),
        ({}, node(spec={"taints": [{"key": "x", "effect": "PreferNoSchedule"}]}), True),
        (
            {"tolerations": [{"key": "x", "value": "y"}]},
            node(spec={"taints": [{"key": "x", "value": "y", "effect": "NoSchedule"}]}),
            True,
        ),
        (
            {"tolerations": [{"key": "x", "value": "y", "effect": "NoSchedule"}]},
            node(spec={"taints": [{"key": "x", "value": "y", "effect": "NoExecute"}]}),
            False,
        ),
        (
            {"tolerations": [{"operator": "Exists"}]},
            node(spec={"taints": [{"key": "x", "value": "y", "effect": "NoExecute"}]}),
            True,
        ),
    ],
)
def test_nodes_that_a_pod_accepts(
    spec: dict[str, Any], offered: dict[str, Any], accepted: bool
) -> None:
    """By its selector and its tolerations."""
    assert read_claimant(waiting({**cards(1), **spec})).accepts(read_offer(offered)) is accepted


@pytest.mark.parametrize(
    ("expression", "accepted"),
    [
        ({"key": "gpu", "operator": "In", "values": ["a100", "h100"]}, True),
        ({"key": "gpu", "operator": "NotIn", "values": ["a100"]}, False),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"key": "tpu", "operator": "DoesNotExist"}, True),
        ({"key": "slots", "operator": "Gt", "values": ["7"]}, True),
        ({"key": "slots", "operator": "Lt", "values": ["8"]}, False),
        ({"key": "gpu", "operator": "Gt", "values": ["1"]}, False),
        ({"key": "gpu", "operator": "Near"}, False),
    ],
)
def test_required_affinity(expression: dict[str, Any], accepted: bool) -> None:
    """Each operator, and one that there is not."""
    terms = [{"matchExpressions": [expression]}]
    required = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms},
    }
    spec = {**cards(1), "affinity": {"nodeAffinity": required}}
    assert read_claimant(waiting(spec)).accepts(read_offer(node())) is accepted
    # One of several terms is enough, and an empty one is none.
    terms.append({})
    assert read_claimant(waiting(spec)).accepts(read_offer(node())) is accepted


@pytest.mark.parametrize(
    ("more", "usable"),
    [
        ({}, True),
        ({"spec": {"unschedulable": True}}, False),
        ({"conditions": [{"type": "Ready", "status": "Unknown"}]}, False),
        ({"conditions": []}, False),
    ],
)
def test_nodes_that_start_nothing(more: dict[str, Any], usable: bool) -> None:
    """Cordoned, or silent."""
    assert read_offer(node(**more)).usable is usable


def test_requests_of_all_containers() -> None:
    """As the scheduler adds them up: first containers, sidecars and overhead."""

    def container(cpu: str, **more: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {
        "containers": [container("1"), container("2")],
        "initContainers": [container("1", restartPolicy="Always"), container("5")],
        "overhead": {"cpu": "250m"},
    }
    assert read_claimant(pod(spec)).requests.cpus == pytest.approx(6.25)
