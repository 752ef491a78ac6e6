"""Pods end through their controllers, by the uid, and only those that were meant."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests import kubernetes_manifests as manifests
from tests.ruleengine.reclaim.pods import Hands, facts, hands

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.kubernetes import YOUNG_SECONDS
from gpuwarden.ruleengine.reclaim.kubernetes_targets import DECISION_ANNOTATION
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed, Standing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.kubernetes_store import Json


def check(folder: Path, story: Callable[[Hands], Awaitable[None]], **settings: Any) -> None:
    """Run a story on a cluster of its own."""

    async def run() -> None:
        async with hands(folder, **settings) as found:
            await story(found)

    asyncio.run(run())


def start(hands: Hands, kind: str, body: Json) -> list[Json]:
    """Make an object and let its pods run."""
    hands.cluster.create(kind, "lab", body)
    hands.cluster.run_pods()
    return hands.cluster.pods()


class TestWhatEnds:
    """Each controller is told in its own way; its pods end and do not come back."""

    @pytest.mark.parametrize(
        ("kind", "body", "field"),
        [
            ("Job", manifests.job("train"), "spec.suspend"),
            ("JobSet", manifests.job_set("train"), "spec.suspend"),
            ("PyTorchJob", manifests.pytorch_job("train", workers=2), "spec.runPolicy.suspend"),
            (
                "Notebook",
                manifests.notebook("train"),
                "metadata.annotations.kubeflow-resource-stopped",
            ),
        ],
    )
    def test_a_controller_that_can_be_suspended(
        self, tmp_path: Path, kind: str, body: Json, field: str
    ) -> None:
        """It is suspended, its pods go with the grace that they have, and none comes back."""

        async def story(hands: Hands) -> None:
            pods = start(hands, kind, body)
            order = await hands.claim(pods[0], offenders=pods)
            assert order.claim.grace == 30.0
            assert order.claim.returns
            assert order.claim.nodes == ("node1",)
            await hands.platform.end(order)
            held: Any = hands.cluster.get(kind, "train")
            assert held["metadata"]["annotations"][DECISION_ANNOTATION] == "d-1"
            for name in field.split("."):
                held = held[name]
            assert held
            assert (await hands.state(order)).standing is Standing.ENDING
            hands.cluster.let_go()
            assert (await hands.state(order)).standing is Standing.ENDED
            assert hands.cluster.pods() == []

        check(tmp_path, story)

    @pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
    def test_a_service(self, tmp_path: Path, kind: str) -> None:
        """It is scaled to nothing, and the event tells what it had."""

        async def story(hands: Hands) -> None:
            pods = start(hands, kind, manifests.service(kind, "serve", replicas=2))
            order = await hands.claim(pods[0], offenders=pods)
            assert "1 more of" in order.claim.also
            await hands.platform.end(order)
            assert hands.cluster.get(kind, "serve")["spec"]["replicas"] == 0
            hands.cluster.let_go()
            assert (await hands.state(order)).standing is Standing.ENDED
            (event,) = hands.cluster.store.all("Event")
            assert "which had 2 replicas" in event["message"]
            assert event["involvedObject"]["uid"] == pods[0]["metadata"]["uid"]

        check(tmp_path, story)

    def test_a_pod_that_nothing_manages(self, tmp_path: Path) -> None:
        """It is evicted with the rule's grace, and by its uid."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Pod", manifests.pod("train"))
            order = await hands.claim(pod)
            assert order.claim.grace is None
            assert not order.claim.returns
            assert (await hands.state(order)).standing is Standing.RUNNING
            await hands.platform.end(order)
            assert hands.cluster.pod("train")["metadata"]["deletionGracePeriodSeconds"] == 45
            await hands.platform.end(order)
            assert hands.cluster.asked("POST", "/eviction") == 1
            hands.cluster.let_go()
            assert (await hands.state(order)).standing is Standing.ENDED
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "gone"

        check(tmp_path, story)

    def test_a_job_of_a_cron_job(self, tmp_path: Path) -> None:
        """The Job is suspended; its CronJob, which leaves it alone, is not touched."""

        async def story(hands: Hands) -> None:
            template = {"spec": manifests.job("x")["spec"]}
            cron = hands.cluster.create(
                "CronJob",
                "lab",
                {
                    "metadata": {"name": "nightly"},
                    "spec": {"schedule": "0 1 * * *", "jobTemplate": template},
                },
            )
            (pod,) = start(hands, "Job", manifests.owned(manifests.job("nightly-1"), cron))
            await hands.platform.end(await hands.claim(pod))
            assert hands.cluster.get("Job", "nightly-1")["spec"]["suspend"] is True
            assert "suspend" not in hands.cluster.get("CronJob", "nightly")["spec"]

        check(tmp_path, story)

    def test_what_kueue_queues(self, tmp_path: Path) -> None:
        """Its Workload is deactivated: a suspended Job alone would be admitted again."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            uid = hands.cluster.get("Job", "train")["metadata"]["uid"]
            hands.cluster.create("Workload", "lab", manifests.workload("job-train-1", uid))
            order = await hands.claim(pod)
            await hands.platform.end(order)
            assert hands.cluster.get("Workload", "job-train-1")["spec"]["active"] is False
            hands.cluster.let_go()
            assert (await hands.state(order)).standing is Standing.ENDED
            assert hands.cluster.get("Job", "train")["spec"]["suspend"] is True

        check(tmp_path, story)

    def test_a_service_whose_pods_kueue_queues(self, tmp_path: Path) -> None:
        """It is scaled: without its Workload a pod goes, and the service makes the next one."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Deployment", manifests.service("Deployment", "serve"))
            uid = pod["metadata"]["uid"]
            hands.cluster.create("Workload", "lab", manifests.workload("w", uid))
            await hands.platform.end(await hands.claim(pod))
            assert hands.cluster.get("Deployment", "serve")["spec"]["replicas"] == 0

        check(tmp_path, story)

    @pytest.mark.parametrize("instance", ["10.0.0.7:9835", "node1.example.org:9835", "other:1"])
    def test_nodes_by_other_names(self, tmp_path: Path, instance: str) -> None:
        """A target that is an address or a long name leads to its node; any other to all pods."""

        async def story(hands: Hands) -> None:
            words = [{"type": "InternalIP", "address": "10.0.0.7"},
                     {"type": "Hostname", "address": "node1.example.org"}]  # fmt: skip
            hands.cluster.store.status("Node", None, "node1", addresses=words)
            (pod,) = start(hands, "Pod", manifests.pod("train"))
            job = replace(facts(pod), instance=instance)
            assert isinstance(await hands.platform.find(job, Deed.TERMINATE), Claim)

        check(tmp_path, story)

    def test_a_controller_of_the_operators_own(self, tmp_path: Path) -> None:
        """engine.yaml says what ends it."""

        async def story(hands: Hands) -> None:
            owner = hands.cluster.create(
                "Training", "lab", {"metadata": {"name": "own"}, "spec": {"steps": 3}}
            )
            (pod,) = start(hands, "Pod", manifests.owned(manifests.pod("own-0"), owner))
            await hands.platform.end(await hands.claim(pod))
            assert hands.cluster.get("Training", "own")["spec"]["shutdown"] == "Stop"

        own = [{"kind": "Training.example.org", "field": "spec.shutdown", "value": "Stop"}]
        check(tmp_path, story, controllers=own)


class TestWhatDoesNotEnd:
    """Whatever is not certain to end just what was meant is left alone, and it is said why."""

    @pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "Job"])
    def test_one_idle_pod_of_three(self, tmp_path: Path, kind: str) -> None:
        """T10: its controller is left alone, and the busy ones are named."""

        async def story(hands: Hands) -> None:
            body = manifests.service(kind, "serve", replicas=3)
            if kind == "Job":
                body = manifests.job("serve", spec={"parallelism": 3, "completions": 3})
            pods = start(hands, kind, body)
            assert len(pods) == 3
            found = await hands.find(pods[0], offenders=pods[:2])
            assert isinstance(found, Blocked)
            assert found.reason == "not_all_offenders"
            assert pods[2]["metadata"]["name"] in found.sentence
            assert pods[1]["metadata"]["name"] not in found.sentence

        check(tmp_path, story)

    def test_a_helper_without_a_card(self, tmp_path: Path) -> None:
        """A training's launcher ends with it; a worker that works does not."""

        async def story(hands: Hands) -> None:
            body = manifests.pytorch_job("train", workers=2, launcher_gpus=0)
            pods = start(hands, "PyTorchJob", body)
            master, *workers = pods
            assert await hands.blocked(workers[0]) == "not_all_offenders"
            order = await hands.claim(workers[0], offenders=workers)
            assert master["metadata"]["name"] in order.claim.also

        check(tmp_path, story)

    def test_another_controller(self, tmp_path: Path) -> None:
        """What it would do is not known: nothing is done, and the setting that helps is named."""

        async def story(hands: Hands) -> None:
            owner = hands.cluster.create(
                "Training", "lab", {"metadata": {"name": "own"}, "spec": {"suspend": False}}
            )
            deployment = manifests.service("Deployment", "serve")
            pods = start(hands, "Deployment", manifests.owned(deployment, owner))
            found = await hands.find(pods[0])
            assert isinstance(found, Blocked)
            assert found.reason == "unknown_controller"
            assert "kubernetes.controllers" in found.sentence

        check(tmp_path, story)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"annotations": {"kubernetes.io/config.mirror": "x"}}, "static_pod"),
            ({"labels": {"kueue.x-k8s.io/managed": "true"}}, "queued_by_kueue"),
        ],
    )
    def test_pods_of_their_own_kind(self, tmp_path: Path, change: Json, reason: str) -> None:
        """Static pods, and what Kueue queues without a Workload that would be known."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Pod", manifests.pod("train", metadata=change))
            assert await hands.blocked(pod) == reason

        check(tmp_path, story)

    def test_a_daemon(self, tmp_path: Path) -> None:
        """Every node has one, and it would be back at once."""

        async def story(hands: Hands) -> None:
            daemon = hands.cluster.create("DaemonSet", "lab", manifests.service("DaemonSet", "d"))
            (pod,) = start(hands, "Pod", manifests.owned(manifests.pod("d-1"), daemon))
            assert await hands.blocked(pod) == "daemon_set"

        check(tmp_path, story)

    def test_places_that_are_not_allowed(self, tmp_path: Path) -> None:
        """Only the namespaces of the file, and never Kubernetes' own."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Pod", manifests.pod("train"))
            own = hands.cluster.create("Pod", "kube-system", manifests.pod("dns"))
            assert await hands.blocked(pod) == "not_found"
            assert await hands.blocked(own) == "not_found"
            assert hands.cluster.asked("GET", "^/api/v1/namespaces/lab/") == 0

        check(tmp_path, story, namespaces=["other"])

    def test_the_systems_namespaces(self, tmp_path: Path) -> None:
        """Where every namespace is allowed, Kubernetes' own are not."""

        async def story(hands: Hands) -> None:
            own = hands.cluster.create("Pod", "kube-system", manifests.pod("dns"))
            assert await hands.blocked(own) == "namespace_not_allowed"

        check(tmp_path, story)

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
    def test_one_that_has_ended(self, tmp_path: Path, phase: str) -> None:
        """It is gone by itself, both before the decision and after it."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Pod", manifests.pod("train"))
            order = await hands.claim(pod)
            hands.cluster.store.status("Pod", "lab", "train", phase=phase)
            assert await hands.blocked(pod) == "gone"
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "gone"

        check(tmp_path, story)


class TestAnotherAttempt:
    """T2: nothing is done to another pod or controller of the same name."""

    def test_a_pod_of_the_same_name(self, tmp_path: Path) -> None:
        """It has another uid: it stays, and no second try is made."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Pod", manifests.pod("train"))
            order = await hands.claim(pod)
            hands.cluster.store.remove("Pod", "lab", "train", pod["metadata"]["uid"])
            start(hands, "Pod", manifests.pod("train"))
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "target_changed"
            assert "deletionTimestamp" not in hands.cluster.pod("train")["metadata"]
            assert await hands.blocked(pod) == "not_found"

        check(tmp_path, story)

    def test_a_pod_that_is_replaced_at_the_last_moment(self, tmp_path: Path) -> None:
        """The server itself compares the uid: between our look and the deletion is a moment."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Pod", manifests.pod("train"))
            order = await hands.claim(pod)
            body = {"code": 409, "message": "the UID in the precondition does not match"}
            hands.cluster.fail("POST", "/eviction", 409, body=body)
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "target_changed"

        check(tmp_path, story)

    def test_a_controller_of_the_same_name(self, tmp_path: Path) -> None:
        """It is another one by its uid: it is not suspended."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            hands.cluster.controllers = False
            hands.cluster.delete("Job", "train")
            hands.cluster.create("Job", "lab", manifests.job("train"))
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "target_changed"
            assert not hands.cluster.get("Job", "train")["spec"]["suspend"]

        check(tmp_path, story)

    def test_a_controller_with_new_pods(self, tmp_path: Path) -> None:
        """Pods that came after the decision were not meant."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Deployment", manifests.service("Deployment", "serve"))
            order = await hands.claim(pod)
            hands.cluster.patch("Deployment", "serve", {"spec": {"replicas": 2}})
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "target_changed"
            assert hands.cluster.get("Deployment", "serve")["spec"]["replicas"] == 2

        check(tmp_path, story)

    def test_a_controller_that_changes_meanwhile(self, tmp_path: Path) -> None:
        """A conflict of versions is looked at again, and then done once."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            hands.cluster.fail("PATCH", "/jobs/train", 409)
            await hands.platform.end(order)
            assert hands.cluster.get("Job", "train")["spec"]["suspend"] is True
            await hands.platform.end(order)
            assert hands.cluster.asked("PATCH", "/jobs/train") == 2

        check(tmp_path, story)

    def test_a_controller_that_never_rests(self, tmp_path: Path) -> None:
        """The tries are bounded."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            hands.cluster.fail("PATCH", "/jobs/train", 409, times=100)
            with pytest.raises(ServiceUnavailable):
                await hands.platform.end(order)
            assert hands.cluster.asked("PATCH", "/jobs/train") == 3

        check(tmp_path, story)


class TestLeavingFirst:
    """A trainer that was asked to leave may be gone before its controller is told."""

    def test_its_successor_has_not_begun(self, tmp_path: Path) -> None:
        """It comes back by itself; once its Job is suspended it does not."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            hands.cluster.store.status("Pod", "lab", pod["metadata"]["name"], phase="Failed")
            assert (await hands.state(order)).standing is Standing.RETURNED
            await hands.platform.end(order)
            hands.cluster.let_go()
            assert hands.cluster.get("Job", "train")["spec"]["suspend"] is True
            assert (await hands.state(order)).standing is Standing.ENDED

        check(tmp_path, story)

    def test_it_has_no_successor_yet(self, tmp_path: Path) -> None:
        """A Job that is not done will start one: it has returned, until it is told not to."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            hands.cluster.controllers = False
            hands.cluster.store.status("Pod", "lab", pod["metadata"]["name"], phase="Failed")
            state = await hands.state(order)
            assert (state.standing, state.successor) == (Standing.RETURNED, "Job.batch/train")
            await hands.platform.end(order)
            assert (await hands.state(order)).standing is Standing.ENDED

        check(tmp_path, story)

    def test_its_successor_has_just_begun(self, tmp_path: Path) -> None:
        """It has nothing to lose, and came only because of the request: `terminate` holds."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            hands.cluster.store.status("Pod", "lab", pod["metadata"]["name"], phase="Failed")
            hands.cluster.run_pods()
            assert (await hands.state(order)).standing is Standing.RETURNED
            await hands.platform.end(order)
            assert hands.cluster.get("Job", "train")["spec"]["suspend"] is True
            assert (await hands.state(order)).standing is Standing.ENDING
            hands.cluster.let_go()
            assert (await hands.state(order)).standing is Standing.ENDED

        check(tmp_path, story)

    def test_its_successor_has_run_for_long(self, tmp_path: Path) -> None:
        """That is another attempt, of which nobody was told: it is left alone."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            before = hands.cluster.store.now() - YOUNG_SECONDS - 1
            hands.cluster.store.now = lambda: before
            hands.cluster.store.status("Pod", "lab", pod["metadata"]["name"], phase="Failed")
            hands.cluster.run_pods()
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "target_changed"
            assert not hands.cluster.get("Job", "train")["spec"]["suspend"]

        check(tmp_path, story)

    def test_its_job_is_done(self, tmp_path: Path) -> None:
        """There is nothing to keep from coming back."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            hands.cluster.store.status("Pod", "lab", pod["metadata"]["name"], phase="Succeeded")
            done = [{"type": "Complete", "status": "True"}]
            hands.cluster.store.status("Job", "lab", "train", conditions=done)
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "gone"
            assert (await hands.state(order)).standing is Standing.ENDED

        check(tmp_path, story)


class TestComingBack:
    """`requeue` ends one pod, whose controller starts another."""

    @pytest.mark.parametrize(
        ("kind", "body"),
        [
            ("Job", manifests.job("train")),
            ("Deployment", manifests.service("Deployment", "train", replicas=2)),
            ("StatefulSet", manifests.service("StatefulSet", "train", replicas=2)),
        ],
    )
    def test_its_controller_starts_another(self, tmp_path: Path, kind: str, body: Json) -> None:
        """Only the one pod goes, and its successor is named."""

        async def story(hands: Hands) -> None:
            pods = start(hands, kind, body)
            order = await hands.claim(pods[0], Deed.REQUEUE)
            await hands.platform.end(order)
            assert (await hands.state(order)).standing is Standing.ENDING
            hands.cluster.let_go()
            state = await hands.state(order)
            assert state.standing is Standing.RETURNED
            new = {p["metadata"]["uid"] for p in hands.cluster.pods()} - {
                p["metadata"]["uid"] for p in pods
            }
            assert any(uid in state.successor for uid in new)
            assert len(hands.cluster.pods()) == len(pods)

        check(tmp_path, story)

    def test_one_that_its_controller_has_not_started_yet(self, tmp_path: Path) -> None:
        """As long as the controller is there, it comes back."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod, Deed.REQUEUE)
            hands.cluster.controllers = False
            await hands.platform.end(order)
            hands.cluster.let_go()
            state = await hands.state(order)
            assert (state.standing, state.successor) == (Standing.RETURNED, "Job.batch/train")

        check(tmp_path, story)

    @pytest.mark.parametrize(
        ("kind", "body", "reason"),
        [
            ("Pod", manifests.pod("train"), "no_controller"),
            ("PyTorchJob", manifests.pytorch_job("train"), "unsure_return"),
            ("JobSet", manifests.job_set("train"), "unsure_return"),
            ("Job", manifests.job("train", spec={"backoffLimit": 0}), "backoff_limit"),
        ],
    )
    def test_what_would_not_come_back(
        self, tmp_path: Path, kind: str, body: Json, reason: str
    ) -> None:
        """Nothing is requeued that might be lost."""

        async def story(hands: Hands) -> None:
            pods = start(hands, kind, body)
            assert await hands.blocked(pods[0], Deed.REQUEUE) == reason

        check(tmp_path, story)

    def test_a_job_that_ignores_disruptions(self, tmp_path: Path) -> None:
        """Its evicted pods do not count against its limit."""

        async def story(hands: Hands) -> None:
            rules = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget",
                                                                "status": "True"}]}]  # fmt: skip
            spec = {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
            (pod,) = start(hands, "Job", manifests.job("train", spec=spec))
            await hands.claim(pod, Deed.REQUEUE)

        check(tmp_path, story)

    def test_what_kueue_queues(self, tmp_path: Path) -> None:
        """An evicted pod would be replaced without its turn."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            uid = hands.cluster.get("Job", "train")["metadata"]["uid"]
            hands.cluster.create("Workload", "lab", manifests.workload("w", uid))
            assert await hands.blocked(pod, Deed.REQUEUE) == "queued_by_kueue"

        check(tmp_path, story)

    def test_one_that_somebody_brings_back(self, tmp_path: Path) -> None:
        """T52: a Job that is resumed after its end has returned, with its new pod."""

        async def story(hands: Hands) -> None:
            (pod,) = start(hands, "Job", manifests.job("train"))
            order = await hands.claim(pod)
            await hands.platform.end(order)
            hands.cluster.let_go()
            hands.cluster.patch("Job", "train", {"spec": {"suspend": False}})
            state = await hands.state(order)
            assert state.standing is Standing.RETURNED
            assert hands.cluster.pods()[0]["metadata"]["uid"] in state.successor

        check(tmp_path, story)
