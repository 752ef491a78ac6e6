"""Applying a policy to an API server, again, changed, undone; and what is not ours."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.scheduling.kueue.clusters import Scene, bring_about, kueue_policy, scene

from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.scheduling.engines import Plan, carry_out, plan, undoing
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.adapters import KueueAdapter, connect, own_kubeconfig
from gpuwarden.scheduling.kueue.objects import canonical

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy


def planned(policy: Policy) -> Plan:
    """What differs between a policy and the server."""

    async def run() -> Plan:
        adapter = KueueAdapter(policy)
        try:
            wanted = adapter.render(policy, version=None)
            return plan(wanted, await adapter.read(wanted))
        finally:
            await adapter.aclose()

    return asyncio.run(run())


def undo(policy: Policy) -> None:
    """Take everything away again."""

    async def run() -> None:
        adapter = KueueAdapter(policy)
        try:
            wanted = adapter.render(policy, version=None)
            todo = undoing(await adapter.read(wanted))
            outcome = await carry_out(adapter, todo.steps, lambda _number, _step: None)
            assert outcome.failed is None, outcome.reason
        finally:
            await adapter.aclose()

    asyncio.run(run())


def ours(found: Scene) -> list[str]:
    """Everything on the server that carries our mark."""
    return [
        f"{kind} {item['metadata']['name']}"
        for kind in names.KINDS
        for item in found.cluster.store.all(kind)
        if item["metadata"].get("labels", {}).get(names.MANAGED_LABEL) == names.MANAGER
    ]


def with_kueue(policy: Policy, found: Scene, **more: Any) -> Policy:
    """A changed policy of the same cluster."""
    kueue = policy.kueue.model_copy(update={"kubeconfig": found.policy.kueue.kubeconfig, **more})
    return policy.model_copy(update={"kueue": kueue})


def test_apply_twice_is_apply_once(tmp_path: Path) -> None:
    """The second time nothing differs, and no object gets a new version."""
    with scene(tmp_path, kueue_policy()) as found:
        before = {
            key: item["metadata"]["resourceVersion"]
            for key, item in found.cluster.store.objects.items()
        }
        assert planned(found.policy).nothing
        assert bring_about(found.policy).done == ()
        after = {
            key: item["metadata"]["resourceVersion"]
            for key, item in found.cluster.store.objects.items()
        }
        assert before == after


def test_drift_is_seen_and_mended(tmp_path: Path) -> None:
    """A quota that somebody changed, a label's value, a field that was added."""
    with scene(tmp_path, kueue_policy()) as found:
        name = "gpuwarden-vision"
        queue = found.cluster.get("ClusterQueue", name, None)
        groups = queue["spec"]["resourceGroups"]
        groups[1]["flavors"][0]["resources"][0]["nominalQuota"] = "9"
        found.cluster.patch("ClusterQueue", name, {"spec": {"resourceGroups": groups}}, None)
        found.cluster.patch(
            "ResourceFlavor", "gpuwarden-a100-40", {"spec": {"nodeLabels": {"more": "x"}}}, None
        )
        steps = planned(found.policy).steps
        told = {step.name: [str(change) for change in step.changes] for step in steps}
        assert {*told} == {name, "gpuwarden-a100-40"}
        assert "9 -> 2" in " ".join(told[name])
        bring_about(found.policy)
        assert planned(found.policy).nothing
        assert found.cluster.get("ResourceFlavor", "gpuwarden-a100-40", None)["spec"] == {
            "nodeLabels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}
        }
        mended = found.cluster.get("ClusterQueue", name, None)["spec"]["resourceGroups"]
        assert mended[1]["flavors"][0]["resources"][0]["nominalQuota"] == "2"


def test_a_changed_policy_changes_and_deletes(tmp_path: Path) -> None:
    """A team that is gone goes with its queues; what others set in an object stays."""
    with scene(tmp_path, kueue_policy()) as found:
        found.cluster.patch(
            "ClusterQueue", "gpuwarden-vision", {"spec": {"stopPolicy": "Hold"}}, None
        )
        teams = [{"name": "vision", "users": ["ana"], "quota": {"a100-40": 4}}]
        policy = with_kueue(kueue_policy(teams=teams), found)
        outcome = bring_about(policy)
        assert outcome.failed is None, outcome.reason
        assert "ClusterQueue gpuwarden-speech" not in ours(found)
        spec = found.cluster.get("ClusterQueue", "gpuwarden-vision", None)["spec"]
        assert spec["stopPolicy"] == "Hold", "an operator's hold is not lifted by a policy"
        assert planned(policy).nothing


def test_a_check_that_is_no_longer_wanted_goes_from_the_queue(tmp_path: Path) -> None:
    """Else nothing of the team would ever start again."""
    budget = {
        "team": "vision",
        "per": "month",
        "limit": "10 GPU-hours",
        "kind": "hard",
        "running": "finish",
    }
    with scene(tmp_path, kueue_policy(budgets=[budget])) as found:
        assert (
            "admissionChecksStrategy"
            in found.cluster.get("ClusterQueue", "gpuwarden-vision", None)["spec"]
        )
        policy = with_kueue(kueue_policy(), found)
        bring_about(policy)
        spec = found.cluster.get("ClusterQueue", "gpuwarden-vision", None)["spec"]
        assert "admissionChecks" not in spec.get("admissionChecksStrategy", {})
        assert planned(policy).nothing


def test_undo(tmp_path: Path) -> None:
    """Everything of ours goes, nothing else; undone twice it is undone."""
    with scene(tmp_path, kueue_policy()) as found:
        found.cluster.create("ResourceFlavor", None, {"metadata": {"name": "other"}, "spec": {}})
        undo(found.policy)
        assert ours(found) == []
        assert found.cluster.get("ResourceFlavor", "other", None)
        undo(found.policy)


def test_what_is_not_ours_is_in_the_way(tmp_path: Path) -> None:
    """It is told, and neither changed nor deleted, not even between the look and the step."""
    with scene(tmp_path, kueue_policy(), applied=False) as found:
        body = {"metadata": {"name": "gpuwarden-vision"}, "spec": {"stopPolicy": "Hold"}}
        found.cluster.create("ClusterQueue", None, body)
        todo = planned(found.policy)
        assert [each.name for each in todo.in_the_way] == ["gpuwarden-vision"]
        assert "gpuwarden-vision" not in [
            step.name for step in todo.steps if step.kind == "ClusterQueue"
        ]

    with scene(tmp_path, kueue_policy(), applied=False) as found:
        todo = planned(found.policy)
        found.cluster.create("ClusterQueue", None, body)

        async def late() -> None:
            adapter = KueueAdapter(found.policy)
            step = next(step for step in todo.steps if step.name == "gpuwarden-vision")
            try:
                with pytest.raises(RefusedAction, match="does not carry gpuwarden's mark"):
                    await adapter.carry_out(step)
            finally:
                await adapter.aclose()

        asyncio.run(late())
        assert (
            found.cluster.get("ClusterQueue", "gpuwarden-vision", None)["spec"]["stopPolicy"]
            == "Hold"
        )


def test_another_policys_objects_are_not_ours(tmp_path: Path) -> None:
    """Two policies share a cluster by their cohorts."""
    with scene(tmp_path, kueue_policy()) as found:
        second = with_kueue(kueue_policy(), found, cohort="lab2")
        team = [
            each.model_copy(update={"kueue": None, "name": f"{each.name}2"})
            for each in second.teams
        ]
        second = second.model_copy(update={"teams": tuple(team)})
        bring_about(second)
        undo(second)
        assert planned(found.policy).nothing


def test_a_change_that_somebody_else_was_faster_with(tmp_path: Path) -> None:
    """The step fails by the version that it names; the next try goes by the new one."""
    with scene(tmp_path, kueue_policy()) as found:
        found.cluster.patch("WorkloadPriorityClass", "gpuwarden-low", {"value": 11}, None)
        found.cluster.fail("PATCH", "workloadpriorityclasses/gpuwarden-low", 409)
        outcome = bring_about(found.policy)
        assert outcome.failed is not None
        assert outcome.failed.name == "gpuwarden-low"
        assert bring_about(found.policy).failed is None
        assert found.cluster.get("WorkloadPriorityClass", "gpuwarden-low", None)["value"] == 10


def test_a_step_with_a_lost_answer_is_done_again(tmp_path: Path) -> None:
    """What was made without an answer is ours, and is found as it should be."""
    with scene(tmp_path, kueue_policy(), applied=False) as found:
        found.cluster.fail("PATCH", "clusterqueues/gpuwarden-vision", 1)
        outcome = bring_about(found.policy)
        assert outcome.failed is not None
        assert outcome.left != ()
        assert bring_about(found.policy).failed is None
        assert planned(found.policy).nothing


def test_versions(tmp_path: Path) -> None:
    """By the controller's image where it may be read; no Kueue is said with the remedy."""

    async def version(policy: Policy) -> str:
        adapter = KueueAdapter(policy)
        try:
            return await adapter.version()
        finally:
            await adapter.aclose()

    with scene(tmp_path, kueue_policy(), applied=False) as found:
        assert asyncio.run(version(found.policy)) == "0.19"
        labels = {"app.kubernetes.io/name": "kueue", "control-plane": "controller-manager"}
        spec = {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "containers": [{"name": "m", "image": "registry.k8s.io/kueue/kueue:v0.17.1"}]
                },
            },
        }
        body = {
            "metadata": {"name": "kueue-controller-manager", "labels": labels},
            "spec": {**spec, "replicas": 1},
        }
        found.cluster.controllers = False
        found.cluster.create("Deployment", "kueue-system", body)
        assert asyncio.run(version(found.policy)) == "0.17.1"
        found.cluster.store.resources = found.cluster.store.resources[:3]
        with pytest.raises(ServiceUnavailable, match="install Kueue"):
            asyncio.run(version(found.policy))


def test_a_namespace_that_is_not_there(tmp_path: Path) -> None:
    """It is a person's to make, and said so with the command; the rest waits for it."""
    with scene(tmp_path, kueue_policy(), applied=False) as found:
        missing = {"message": 'namespaces "speech" not found', "code": 404}
        found.cluster.fail("PATCH", "/namespaces/speech/localqueues/", 404, body=missing)
        outcome = bring_about(found.policy)
        assert "kubectl create namespace speech" in str(outcome.error)
        assert bring_about(found.policy).failed is None


def test_a_cluster_is_not_made(tmp_path: Path) -> None:
    """`--init` is for Slurm, and says so."""
    with scene(tmp_path, kueue_policy(), applied=False) as found:
        adapter = KueueAdapter(found.policy)
        with pytest.raises(RefusedAction, match=r"kueue\.sigs\.k8s\.io"):
            adapter.render(found.policy, version=None, init=True)


def test_quantities_are_compared_by_what_they_mean() -> None:
    """As a server may give them back."""
    assert canonical("2k") == canonical("2000") == canonical("2000000m") == "2000"
    assert canonical("1Ki") == "1024"
    assert canonical("1Gi") == str(1024**3)
    assert canonical("0") == "0"
    assert canonical("many") == "many"


def test_dataclasses_of_the_port_are_what_the_adapter_makes(tmp_path: Path) -> None:
    """A live object of ours has every value that the rendering compares."""
    with scene(tmp_path, kueue_policy()) as found:
        adapter = KueueAdapter(found.policy)
        wanted = {each.key: each for each in adapter.render(found.policy, version=None).objects}
        everything = dataclasses.replace(adapter.render(found.policy, version=None), objects=())

        async def read() -> dict[tuple[str, str], Any]:
            try:
                return {each.key: each for each in await adapter.read(everything)}
            finally:
                await adapter.aclose()

        there = asyncio.run(read())
        assert there.keys() == wanted.keys(), "all are found by their marks alone"
        assert all(each.marked for each in there.values())


def test_a_policy_without_a_kubeconfig_goes_by_that_of_who_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KUBECONFIG before the pod, the pod before the home: one file for people and for the pod."""
    policy = kueue_policy()
    (tmp_path / ".kube").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidInput, match="set KUBECONFIG"):
        connect(policy, "test")
    with scene(tmp_path, policy, applied=False) as found:
        written = found.policy.kueue.kubeconfig
        assert written is not None
        home = tmp_path / ".kube" / "config"
        home.write_text(Path(written).read_text())
        bring_about(policy)
        assert planned(policy).steps == ()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        assert own_kubeconfig() is None, "in a pod its account is meant"
        monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'gone'}:{written}")
        assert own_kubeconfig() == Path(written)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "gone"))
        with pytest.raises(InvalidInput, match="gone"):
            connect(policy, "test")
