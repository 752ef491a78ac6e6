"""Who writes a Job by hand is held to the policy, in words; nobody else is disturbed."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.kubernetes_admissions import denials
from tests.scheduling.kueue.clusters import bring_about, kueue_policy, scene
from tests.scheduling.kueue.lives import life
from tests.scheduling.kueue.test_adapters import planned, undo, with_kueue
from tests.scheduling.kueue.test_renderings import of
from tests.scheduling.policy_files import DIGEST

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.renderings import render
from gpuwarden.scheduling.kueue.submitters import KueueSubmitter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kubernetes_store import Json
    from tests.scheduling.kueue.clusters import Scene

    from gpuwarden.scheduling.policies import Policy

IMAGE = f"registry.example.com/yolo@{DIGEST}"
TEAMS = [
    {"name": "vision", "users": ["ana"], "quota": {"a100-40": 2}, "priorities": ["low"]},
    {"name": "speech", "users": ["cy"], "quota": {"a100-40": 2}},
]
POLICY = kueue_policy(teams=TEAMS)


def a_job(priority: str | None = "gpuwarden-low", queue: str | None = names.QUEUE) -> Json:
    """A Job as somebody writes it."""
    labels = {names.QUEUE_LABEL: queue, names.PRIORITY_LABEL: priority}
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    container = {"name": "train", "image": IMAGE, "resources": limits}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "raw", "labels": {k: v for k, v in labels.items() if v}},
        "spec": {
            "suspend": True,
            "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
        },
    }


def a_workload(priority: str | None = "gpuwarden-low") -> Json:
    """What Kueue makes of such a Job, or of whatever else it queues."""
    spec: Json = {
        "queueName": names.QUEUE,
        "podSets": [{"name": "main", "count": 1, "template": a_job()["spec"]["template"]}],
    }
    if priority is not None:
        ref = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": priority}
        spec["priorityClassRef"] = ref
    return {"metadata": {"name": "raw"}, "spec": spec}


def with_pods(change: Callable[[Json], Any]) -> Callable[[Json], None]:
    """A change of the pods of a Job or a Workload."""

    def changed(found: Json) -> None:
        sets = found["spec"].get("podSets")
        change((sets[0] if sets else found["spec"])["template"]["spec"])

    return changed


def said(
    body: Json, before: Json | None = None, *, space: str = "vision", policy: Policy = POLICY
) -> list[str]:
    """What is said against a Job or a Workload."""
    what = "jobs" if body.get("kind") == "Job" else "workloads"
    found = of(policy, "ValidatingAdmissionPolicy")[names.admission_name(policy, what)]
    return denials(found["spec"], space, body, before)


FOREIGN = with_pods(lambda spec: spec["containers"][0].update(image="docker.io/x:latest"))
SIDECAR = with_pods(lambda spec: spec["containers"].append({"name": "s", "image": "x"}))
INIT = with_pods(lambda spec: spec.update(initContainers=[{"name": "i", "image": "x"}]))
CRITICAL = with_pods(lambda spec: spec.update(priorityClassName="system-node-critical"))


@pytest.mark.parametrize("made", [a_job, a_workload])
def test_what_is_in_order_passes(made: Callable[..., Json]) -> None:
    """With a priority of the team's, with none, and with an initial container of the catalogue."""
    assert said(made()) == []
    assert said(made(None)) == []
    assert said(made("gpuwarden-high"), space="speech") == []
    body = made()
    with_pods(lambda spec: spec.update(initContainers=[{"name": "i", "image": IMAGE}]))(body)
    assert said(body) == []


@pytest.mark.parametrize("made", [a_job, a_workload])
@pytest.mark.parametrize("name", ["gpuwarden-high", "lab2-urgent", "nothing"])
def test_priorities_of_others(made: Callable[..., Json], name: str) -> None:
    """Those of other teams, of other policies, and of nobody: the answer lists the team's own."""
    (words,) = said(made(name))
    assert f"the priority class {name} is not to be chosen here" in words
    assert "team vision has gpuwarden-low (label kueue.x-k8s.io/priority-class)" in words


@pytest.mark.parametrize("made", [a_job, a_workload])
@pytest.mark.parametrize("change", [FOREIGN, SIDECAR, INIT])
def test_images_outside_the_catalogue(
    made: Callable[..., Json], change: Callable[[Json], None]
) -> None:
    """Of every container; without a catalogue everybody chooses."""
    body = made()
    change(body)
    (words,) = said(body)
    assert "yolo:m-cu124" in words
    assert "gpuwarden submit --image" in words
    assert said(body, policy=kueue_policy(teams=TEAMS, images=[])) == []


def test_the_image_is_named() -> None:
    """In the answer to whoever writes the Job."""
    body = a_job()
    FOREIGN(body)
    assert said(body)[0].startswith("the image docker.io/x:latest is not one of the policy")


@pytest.mark.parametrize("made", [a_job, a_workload])
def test_classes_of_pods(made: Callable[..., Json]) -> None:
    """One orders the queue where no label does, and pushes pods from nodes: only those allowed."""
    for priority in (None, "gpuwarden-low"):
        body = made(priority)
        CRITICAL(body)
        (words,) = said(body)
        assert "kueue.pod_priorities" in words
    allowed = kueue_policy(teams=TEAMS, kueue={"pod_priorities": ["system-node-critical"]})
    assert said(body, policy=allowed) == []


def test_other_queues_are_others() -> None:
    """A Job without our queue is none of ours, until it is put into it."""
    for queue in (None, "theirs"):
        body = a_job("gpuwarden-high", queue)
        FOREIGN(body)
        assert said(body) == []
    assert len(said(a_job("gpuwarden-high"), body)) == 1
    moved = copy.deepcopy(body)
    moved["metadata"]["labels"][names.QUEUE_LABEL] = names.QUEUE
    assert len(said(moved, body)) == 2


@pytest.mark.parametrize("made", [a_job, a_workload])
def test_what_was_taken_on_stays(made: Callable[..., Json]) -> None:
    """Kueue starts, stops and labels it although the policy has changed; nothing new gets in."""
    old = made("gpuwarden-high")
    FOREIGN(old)
    CRITICAL(old)
    new = copy.deepcopy(old)
    new["spec"]["suspend"] = False
    new["metadata"]["annotations"] = {"x": "y"}
    if made is a_job:
        with_pods(lambda spec: spec.update(nodeSelector={"pool": "a"}))(new)
    assert said(new, old) == []
    SIDECAR(new)
    assert len(said(new, old)) >= 1
    raised = made("gpuwarden-high")
    assert len(said(raised, made())) == 1


def apply_raw(found: Scene, body: Json, space: str = "vision") -> Json:
    """`kubectl create` of a Job."""

    async def run() -> Json:
        client = found.client()
        try:
            return await client.create(names.JOBS, space, body)
        finally:
            await client.aclose()

    return asyncio.run(run())


def test_a_raw_job_is_refused_in_words(tmp_path: Path) -> None:
    """By the API server, before anything is queued; one that is in order runs."""
    with life(tmp_path, POLICY) as found:
        with pytest.raises(RefusedAction, match=r"cluster's own policy.*not to be chosen") as error:
            apply_raw(found.scene, a_job("gpuwarden-high"))
        assert error.value.reason == "denied"
        assert found.scene.cluster.store.all("Job") == []
        apply_raw(found.scene, a_job())
        found.start_pods()
        assert found.running() == {"vision/raw"}


def test_warn_lets_it_pass(tmp_path: Path) -> None:
    """For a while beside the old ways."""
    policy = kueue_policy(teams=TEAMS, kueue={"admission": "warn"})
    with scene(tmp_path, policy) as found:
        apply_raw(found, a_job("gpuwarden-high"))
        assert "not to be chosen here" in found.cluster.warnings[0]


def test_none_makes_none() -> None:
    """And nothing of the API server's is needed."""
    policy = kueue_policy(kueue={"admission": "none"})
    assert not {each.kind for each in render(policy).objects} & {
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }


def test_an_old_server_has_no_such_policies(tmp_path: Path) -> None:
    """It is said with the remedy; without them everything else is applied, and undone."""
    with scene(tmp_path, POLICY, applied=False) as found:
        store = found.cluster.store
        kinds = [each for each in store.resources if not each.kind.startswith("Validating")]
        store.resources = tuple(kinds)
        with pytest.raises(RefusedAction, match=r"since 1\.30.*admission: none"):
            planned(found.policy)
        policy = with_kueue(kueue_policy(teams=TEAMS), found, admission="none")
        assert bring_about(policy).failed is None
        undo(policy)
        assert store.all("ClusterQueue") == []


def test_what_others_have_added_is_seen_and_mended(tmp_path: Path) -> None:
    """A condition by which nothing is looked at any more, a binding of fewer namespaces."""
    with scene(tmp_path, POLICY) as found:
        name = names.admission_name(POLICY, "jobs")
        spec = found.cluster.get("ValidatingAdmissionPolicy", name, None)["spec"]
        conditions = [*spec["matchConditions"], {"name": "never", "expression": "false"}]
        found.cluster.patch(
            "ValidatingAdmissionPolicy", name, {"spec": {"matchConditions": conditions}}, None
        )
        selector = {"namespaceSelector": {"matchLabels": {"x": "y"}}}
        found.cluster.patch(
            "ValidatingAdmissionPolicyBinding", name, {"spec": {"matchResources": selector}}, None
        )
        assert {step.kind for step in planned(found.policy).steps} == {
            "ValidatingAdmissionPolicy",
            "ValidatingAdmissionPolicyBinding",
        }
        outcome = bring_about(found.policy)
        assert outcome.failed is None, outcome.error
        assert planned(found.policy).nothing
        now = found.cluster.get("ValidatingAdmissionPolicy", name, None)["spec"]
        assert [each["name"] for each in now["matchConditions"]] == ["queue"]


def test_what_submit_makes_passes(tmp_path: Path) -> None:
    """Its Jobs keep to the policy by themselves."""
    with life(tmp_path, POLICY) as found:
        found.run("one")
        assert KueueSubmitter.engine == "kueue"
        assert len(found.running()) == 1
        with pytest.raises(RefusedAction, match="not to be chosen here"):
            found.submit("two", "high")


def test_messages_have_their_room() -> None:
    """Of 300 images not all are listed: a message has 5 KiB, and one line."""
    images = [
        {"name": f"yolo:{n:03}", "image": f"example.com/{n:03}@{DIGEST}", "models": ["*"]}
        for n in range(300)
    ]
    policy = kueue_policy(teams=TEAMS, images=images)
    body = a_job()
    FOREIGN(body)
    (words,) = said(body, policy=policy)
    assert len(words) < 2048
    for found in of(policy, "ValidatingAdmissionPolicy").values():
        for rule in found["spec"]["validations"]:
            assert len(rule["message"]) < 2048
            assert "\n" not in rule["message"]
        assert len(yaml.safe_dump(found)) < 512 * 1024
