"""Servers that refuse, hang, forget or lie: nothing is done twice, nothing taken for ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests import kubernetes_manifests as manifests
from tests.exporter.nodes import ManualClock
from tests.ruleengine.reclaim.pods import Hands, facts, hands

from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.kubernetes_clients import MAX_BUSY
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.kubernetes_settings import KubernetesSettings
from gpuwarden.ruleengine.reclaim.kubernetes import Kubernetes
from gpuwarden.ruleengine.reclaim.kubernetes_states import OVERDUE_SECONDS
from gpuwarden.ruleengine.reclaim.ports import Deed, Order, Standing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.kubernetes_store import Json


def check(
    folder: Path, story: Callable[[Hands, Json], Awaitable[None]], **settings: object
) -> None:
    """Run a story about a pod that nothing manages."""

    async def run() -> None:
        async with hands(folder, **settings) as found:
            found.cluster.create("Pod", "lab", manifests.pod("train"))
            found.cluster.run_pods()
            await story(found, found.cluster.pod("train"))

    asyncio.run(run())


class TestRefusals:
    """What the API refuses is refused, with what to do next."""

    def test_a_disruption_budget(self, tmp_path: Path) -> None:
        """It keeps the pod for now; once it allows it, the same order is carried out."""

        async def story(hands: Hands, pod: Json) -> None:
            hands.cluster.create("PodDisruptionBudget", "lab", manifests.budget("keep", "train"))
            order = await hands.claim(pod)
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "disruption_budget"
            assert (await hands.state(order)).standing is Standing.RUNNING
            hands.cluster.store.status("PodDisruptionBudget", "lab", "keep", disruptionsAllowed=1)
            await hands.platform.end(order)
            assert (await hands.state(order)).standing is Standing.ENDING

        check(tmp_path, story)

    def test_a_budget_that_the_operator_does_not_respect(self, tmp_path: Path) -> None:
        """Users can write budgets: engine.yaml may say that they protect nobody."""

        async def story(hands: Hands, pod: Json) -> None:
            hands.cluster.create("PodDisruptionBudget", "lab", manifests.budget("keep", "train"))
            order = await hands.claim(pod)
            await hands.platform.end(order)
            assert hands.cluster.pod("train")["metadata"]["deletionGracePeriodSeconds"] == 45
            assert hands.cluster.asked("POST", "/eviction") == 0

        check(tmp_path, story, respect_disruption_budgets=False)

    @pytest.mark.parametrize(
        ("status", "reason"), [(404, "gone"), (410, "gone"), (422, "invalid"), (403, "forbidden")]
    )
    def test_statuses(self, tmp_path: Path, status: int, reason: str) -> None:
        """Each is a word that the engine knows."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            hands.cluster.fail("POST", "/eviction", status)
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == reason

        check(tmp_path, story)

    def test_a_policy_of_the_cluster(self, tmp_path: Path) -> None:
        """A webhook's refusal is no missing right."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            said = 'admission webhook "policy.example.org" denied the request: not at night'
            hands.cluster.fail("POST", "/eviction", 403, body={"message": said, "code": 403})
            with pytest.raises(RefusedAction, match="not at night") as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "denied"

        check(tmp_path, story)

    def test_a_server_that_cannot_suspend(self, tmp_path: Path) -> None:
        """An old one drops the field and says 200: that is noticed."""

        async def story(hands: Hands, _pod: Json) -> None:
            hands.cluster.create("Job", "lab", manifests.job("old"))
            hands.cluster.run_pods()
            (pod,) = [p for p in hands.cluster.pods() if p["metadata"]["name"] != "train"]
            order = await hands.claim(pod)
            job = hands.cluster.get("Job", "old")
            hands.cluster.fail("PATCH", "/jobs/old", 200, body=job)
            with pytest.raises(RefusedAction) as refused:
                await hands.platform.end(order)
            assert refused.value.reason == "unsupported"

        check(tmp_path, story)


class TestUnknown:
    """Without an answer nothing is known: neither that it was done nor that it was not."""

    @pytest.mark.parametrize("status", [401, 429, 500, 503])
    def test_statuses(self, tmp_path: Path, status: int) -> None:
        """They are worth another try, and the try acts."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            # One that puts it off is asked again by itself, a few times.
            times = MAX_BUSY if status == 429 else 1
            headers = {"Retry-After": "0"}
            hands.cluster.fail("POST", "/eviction", status, times=times, headers=headers)
            with pytest.raises(ServiceUnavailable):
                await hands.platform.end(order)
            assert (await hands.state(order)).standing is Standing.RUNNING
            await hands.platform.end(order)
            assert (await hands.state(order)).standing is Standing.ENDING

        check(tmp_path, story)

    def test_a_server_that_hangs(self, tmp_path: Path) -> None:
        """Each request has its time."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            hands.cluster.fail("GET", "/pods", 0, times=10)
            with pytest.raises(ServiceUnavailable, match=r"kubernetes\.timeout"):
                await hands.state(order)

        check(tmp_path, story, timeout="200ms")

    def test_an_answer_that_is_lost(self, tmp_path: Path) -> None:
        """It was done, and nobody heard of it: the next try sees it and does nothing more."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            hands.cluster.fail("POST", "/eviction", 1)
            with pytest.raises(ServiceUnavailable):
                await hands.platform.end(order)
            await hands.platform.end(order)
            assert hands.cluster.asked("POST", "/eviction") == 1
            assert (await hands.state(order)).standing is Standing.ENDING

        check(tmp_path, story)

    @pytest.mark.parametrize("status", [403, 500])
    def test_a_pod_that_cannot_be_seen(self, tmp_path: Path, status: int) -> None:
        """Not to see it never means that it has ended, nor that it may be ended."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            hands.cluster.fail("GET", "/pods", status, times=10)
            with pytest.raises(ServiceUnavailable):
                await hands.state(order)
            assert await hands.blocked(pod) in ("forbidden", "platform_unreachable")

        check(tmp_path, story)

    @pytest.mark.parametrize(
        "body",
        [
            {"metadata": {"name": "train", "uid": "x", "namespace": "lab"}, "spec": []},
            {"metadata": {"name": "../secrets", "uid": "x", "namespace": "lab"}},
            {
                "metadata": {
                    "name": "train",
                    "namespace": "lab",
                    "uid": "x",
                    "deletionTimestamp": "soon",
                }
            },
        ],
    )
    def test_an_answer_of_another_shape(self, tmp_path: Path, body: Json) -> None:
        """It tells nothing."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            hands.cluster.fail("GET", "/pods/train", 200, times=1, body=body)
            with pytest.raises(ServiceUnavailable):
                await hands.state(order)

        check(tmp_path, story)

    def test_a_list_that_expires(self, tmp_path: Path) -> None:
        """A list over several pages that the server has forgotten begins again."""

        async def story(hands: Hands, pod: Json) -> None:
            hands.cluster.fail("GET", "/pods$", 200, body={"items": [], "metadata": {
                "continue": "1"}})  # fmt: skip
            hands.cluster.fail("GET", "/pods$", 410)
            await hands.claim(pod)

        check(tmp_path, story)

    def test_nobody_there(self, tmp_path: Path) -> None:
        """The address is told, and nothing is ended."""

        async def story(hands: Hands, pod: Json) -> None:
            path = tmp_path / "kubeconfig"
            path.write_text(path.read_text().replace(hands.cluster.url, "http://127.0.0.1:9"))
            platform = Kubernetes.from_settings(
                KubernetesSettings(kubeconfig="kubeconfig"), tmp_path
            )
            found = await platform.find(facts(pod), Deed.TERMINATE)
            await platform.aclose()
            assert isinstance(found, Blocked)
            assert found.reason == "platform_unreachable"

        check(tmp_path, story)


class TestObstacles:
    """What holds the end up is named, and the card is not given away meanwhile."""

    def test_a_finalizer(self, tmp_path: Path) -> None:
        """T53: past its grace the pod is blocked by what has not let go."""

        async def story(hands: Hands, pod: Json) -> None:
            clock = ManualClock()
            platform = Kubernetes.from_settings(hands.cluster.settings(), tmp_path, clock=clock)
            hands.cluster.patch("Pod", "train", {"metadata": {"finalizers": ["example.org/x"]}})
            order = await hands.claim(pod)
            await platform.end(order)
            assert (await platform.state(order)).obstacle == ""
            clock.advance(45 + OVERDUE_SECONDS + 1)
            state = await platform.state(order)
            assert (state.standing, state.obstacle) == (Standing.ENDING, "blocked_by_finalizer")
            assert state.detail["finalizers"] == "example.org/x"
            hands.cluster.patch("Pod", "train", {"metadata": {"finalizers": None}})
            assert (await platform.state(order)).obstacle == "overdue"
            hands.cluster.let_go()
            assert (await platform.state(order)).standing is Standing.ENDED
            await platform.aclose()

        check(tmp_path, story)

    def test_containers_that_have_ended_behind_a_finalizer(self, tmp_path: Path) -> None:
        """The object stays, but its node has its cards back."""

        async def story(hands: Hands, pod: Json) -> None:
            hands.cluster.patch("Pod", "train", {"metadata": {"finalizers": ["example.org/x"]}})
            order = await hands.claim(pod)
            await hands.platform.end(order)
            hands.cluster.store.status("Pod", "lab", "train", phase="Failed")
            assert (await hands.state(order)).standing is Standing.ENDED

        check(tmp_path, story)

    @pytest.mark.parametrize("forgotten", [False, True])
    def test_a_lost_node(self, tmp_path: Path, forgotten: bool) -> None:
        """The API may forget the pod; its processes run on, as far as anybody knows."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            await hands.platform.end(order)
            hands.cluster.node("node1", ready="Unknown")
            if forgotten:
                hands.cluster.let_go()
            state = await hands.state(order)
            assert (state.standing, state.obstacle) == (Standing.ENDING, "node_lost")

        check(tmp_path, story)

    def test_a_node_that_was_taken_away(self, tmp_path: Path) -> None:
        """With its machine its processes are gone."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            await hands.platform.end(order)
            hands.cluster.let_go()
            hands.cluster.delete("Node", "node1", None)
            assert (await hands.state(order)).standing is Standing.ENDED

        check(tmp_path, story)


class TestFiles:
    """Who the engine is, is read at its start, and a mistake is told then."""

    def test_outside_a_pod(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a kubeconfig there must be a service account."""
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        with pytest.raises(InvalidInput, match="name a kubeconfig"):
            Kubernetes.from_settings(KubernetesSettings(), tmp_path)

    @pytest.mark.parametrize("text", ["", "[]", "{contexts: 3}", "clusters: []\nusers: []", "{"])
    def test_a_kubeconfig_that_cannot_be_used(self, tmp_path: Path, text: str) -> None:
        """The file is named."""
        (tmp_path / "kube").write_text(text)
        with pytest.raises(InvalidInput, match="kube"):
            Kubernetes.from_settings(KubernetesSettings(kubeconfig="kube"), tmp_path)

    @pytest.mark.parametrize("names", [["kube-system"], ["Lab"], ["../x"]])
    def test_namespaces_that_cannot_be(self, names: list[str]) -> None:
        """Kubernetes' own, and what is no name."""
        with pytest.raises(ValueError, match=r"kube-system|pattern"):
            KubernetesSettings.model_validate({"namespaces": names})

    def test_a_claim_of_somebody_else(self, tmp_path: Path) -> None:
        """A claim that the ledger garbled is refused, not guessed at."""

        async def story(hands: Hands, pod: Json) -> None:
            order = await hands.claim(pod)
            broken = {**order.claim.identity, "act": "explode"}
            claim = type(order.claim)(platform="kubernetes", identity=broken)
            with pytest.raises(RefusedAction, match="not a claim"):
                await hands.platform.end(Order("d-2", claim, Deed.TERMINATE, grace=30.0))

        check(tmp_path, story)
