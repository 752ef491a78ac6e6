"""The fake API server answers as a real one did, and a real one as the engine expects.

`make test-kubernetes` builds and asks the real one. Its answers are kept, and compared with the
fake's in every run; GPUWARDEN_RECORD=1 writes them anew.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import yaml
from tests import kubernetes_manifests as manifests
from tests.kube_apiserver import ApiServer, api_server, built
from tests.kubernetes_contract import exchanges
from tests.kubernetes_servers import Cluster, User, kubeconfig, kubernetes
from tests.servers import until

from gpuwarden.errors import RefusedAction
from gpuwarden.kubernetes_clients import PODS, Kind, KubernetesClient
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.kubernetes import Kubernetes
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed, Order, Standing, State
from gpuwarden.ruleengine.verdicts import JobFacts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tests.kubernetes_store import Json

T = TypeVar("T")

ANSWERS = Path(__file__).parents[2] / "kubernetes_answers" / "kube-apiserver-1.20.2.json"
ROLE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "engine-rbac.yaml"
ROLES = "rbac.authorization.k8s.io/v1"


async def ask(*clients: KubernetesClient) -> dict[str, Any]:
    """All answers; the connections are closed."""
    try:
        return await exchanges(*clients)
    finally:
        for client in clients:
            await client.aclose()


def of_fake(cluster: Cluster, token: str) -> KubernetesClient:
    """A connection to the fake server."""
    path = cluster.folder / f"{token}.kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig(cluster.url, token)))
    return KubernetesClient.connect(path, None, timeout=10)


def test_the_fake_answers_as_a_real_server_did(tmp_path: Path) -> None:
    """Each answer to each call of the engine, to the word."""
    with kubernetes(tmp_path) as cluster:
        cluster.controllers = False
        cluster.users |= {"admin": User("admin"), "nobody": User("nobody", ())}
        clients = [of_fake(cluster, user) for user in ("admin", "nobody", "stranger")]
        said = asyncio.run(ask(*clients))
    assert said == json.loads(ANSWERS.read_text())["answers"]


# -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real one."""
    if not built():
        pytest.fail("it is not built: make test-kubernetes")
    with api_server(tmp_path_factory.mktemp("kubernetes")) as found:
        yield found


@pytest.mark.kubernetes
def test_a_real_server_answers_as_recorded(server: ApiServer) -> None:
    """What the fake is compared with is what this server says."""
    said = asyncio.run(ask(*(server.client(user) for user in ("admin", "nobody", "stranger"))))
    if os.environ.get("GPUWARDEN_RECORD"):
        about = {
            "server": "kube-apiserver 1.20.2 of Debian 12's source package kubernetes "
            "1.20.5+really1.20.2-1.1+deb12u1, built by tools/kubernetes.py with golang 1.19.8, "
            "over etcd 3.4.23",
            "by": "tests/ruleengine/reclaim/test_kubernetes_contract.py, GPUWARDEN_RECORD=1",
            "answers": said,
        }
        ANSWERS.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    assert said == json.loads(ANSWERS.read_text())["answers"]


async def eventually(look: Callable[[], Awaitable[T | None]]) -> T:
    """What controllers have brought about, once they have."""
    for _ in range(600):
        found = await look()
        if found is not None:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError("not within a minute")


class Real:
    """A platform on a real server, in a namespace of its own, with the shipped role's rights."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.admin = server.client("admin")
        self.platform = Kubernetes.from_settings(server.settings("engine"), Path("/"))
        self.namespace = namespace

    async def create(self, kind: Kind, body: Json) -> None:
        """Make an object as its user."""
        await self.admin.create(kind, self.namespace, body)

    async def pods(self, count: int) -> list[Json]:
        """Pods, once there are so many."""

        async def there() -> list[Json] | None:
            found = await self.admin.list(PODS, self.namespace)
            return [dict(item) for item in found] if len(found) == count else None

        return await eventually(there)

    async def find(self, pod: Json, deed: Deed, offenders: list[Json]) -> Claim | Blocked:
        """Recognise a pod."""
        jobs = [f"pod-{item['metadata']['uid']}" for item in offenders]
        job = JobFacts(f"pod-{pod['metadata']['uid']}", "node1:9835")
        return await self.platform.find(job, deed, offenders=jobs)

    async def order(self, pod: Json, deed: Deed, offenders: list[Json]) -> Order:
        """An order for it."""
        found = await self.find(pod, deed, offenders)
        assert isinstance(found, Claim), found
        return Order("d-1", found, deed, grace=30.0, reason="idle")

    async def over(self, order: Order) -> State:
        """What has become of it in the end."""

        async def over() -> State | None:
            state = await self.platform.state(order)
            going = state.standing in (Standing.RUNNING, Standing.ENDING)
            # A controller that is there will make a successor: it is awaited.
            waiting = state.standing is Standing.RETURNED and "(" not in state.successor
            return None if going or waiting else state

        return await eventually(over)


@pytest.fixture(scope="module")
def allowed(server: ApiServer) -> ApiServer:
    """The server, once the shipped role is in force for the user `engine`."""
    places = {
        "Namespace": Kind("v1", "namespaces"),
        "ClusterRole": Kind(ROLES, "clusterroles"),
        "ClusterRoleBinding": Kind(ROLES, "clusterrolebindings"),
    }
    user = {"kind": "User", "name": "engine", "apiGroup": "rbac.authorization.k8s.io"}

    async def apply() -> None:
        admin = server.client("admin")
        for document in yaml.safe_load_all(ROLE.read_text()):
            if document["kind"] == "ClusterRoleBinding":
                document["subjects"].append(user)
            if document["kind"] in places:
                await admin.create(places[document["kind"]], None, document)
        await admin.aclose()

    async def may() -> bool:
        engine = server.client("engine")
        try:
            await engine.list(Kind("v1", "nodes"), None)
            await engine.list(PODS, None)
        except RefusedAction:
            return False
        finally:
            await engine.aclose()
        return True

    asyncio.run(apply())
    until(lambda: asyncio.run(may()))
    return server


def run(server: ApiServer, namespace: str, story: Callable[[Real], Awaitable[None]]) -> None:
    """Run a story on a real server."""

    async def told() -> None:
        real = Real(server, namespace)
        spaces = Kind("v1", "namespaces")
        try:
            path = {"metadata": {"name": namespace}}
            await real.admin.create(spaces, None, path)
            await story(real)
        finally:
            await real.platform.aclose()
            await real.admin.aclose()

    asyncio.run(asyncio.wait_for(told(), 100))


DEPLOYMENTS = Kind("apps/v1", "deployments")


@pytest.mark.kubernetes
def test_a_real_deployment(allowed: ApiServer) -> None:
    """One offender of two is refused; both are ended by a scale to nothing, and stay so."""

    async def story(real: Real) -> None:
        body = manifests.service("Deployment", "serve", replicas=2, node=None)
        await real.create(DEPLOYMENTS, body)
        pods = await real.pods(2)
        found = await real.find(pods[0], Deed.TERMINATE, [pods[0]])
        assert isinstance(found, Blocked)
        assert found.reason == "not_all_offenders"
        order = await real.order(pods[0], Deed.TERMINATE, pods)
        await real.platform.end(order)
        assert (await real.over(order)).standing is Standing.ENDED
        await real.pods(0)
        await real.platform.end(order)
        events = await real.admin.list(Kind("v1", "events"), real.namespace)
        assert any("which had 2 replicas" in item["message"] for item in events)

    run(allowed, "real-deployment", story)


@pytest.mark.kubernetes
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (DEPLOYMENTS, manifests.service("Deployment", "train", node=None)),
        (Kind("apps/v1", "statefulsets"), manifests.service("StatefulSet", "train", node=None)),
        (Kind("batch/v1", "jobs"), manifests.job("train", node=None)),
    ],
    ids=["Deployment", "StatefulSet", "Job"],
)
def test_a_real_pod_comes_back(allowed: ApiServer, kind: Kind, body: Json) -> None:
    """An evicted pod is replaced by its controller, and its successor is named."""

    async def story(real: Real) -> None:
        await real.create(kind, body)
        (pod,) = await real.pods(1)
        order = await real.order(pod, Deed.REQUEUE, [])
        await real.platform.end(order)
        state = await real.over(order)
        (new,) = await real.pods(1)
        assert state.standing is Standing.RETURNED
        assert new["metadata"]["uid"] != pod["metadata"]["uid"]
        assert new["metadata"]["uid"] in state.successor

    run(allowed, f"real-{kind.plural}", story)


@pytest.mark.kubernetes
def test_a_real_server_that_cannot_suspend(allowed: ApiServer) -> None:
    """1.20 drops the field without a word: it is noticed, and the Job is not said to be ended."""

    async def story(real: Real) -> None:
        await real.create(Kind("batch/v1", "jobs"), manifests.job("train", node=None))
        (pod,) = await real.pods(1)
        order = await real.order(pod, Deed.TERMINATE, [])
        with pytest.raises(RefusedAction) as refused:
            await real.platform.end(order)
        assert refused.value.reason == "unsupported"
        assert (await real.platform.state(order)).standing is Standing.RUNNING

    run(allowed, "real-suspend", story)


@pytest.mark.kubernetes
def test_a_real_pod_that_nothing_manages(allowed: ApiServer) -> None:
    """Evicted by its uid; another of its name is left alone."""

    async def story(real: Real) -> None:
        await real.create(PODS, manifests.pod("train", node=None))
        (pod,) = await real.pods(1)
        order = await real.order(pod, Deed.TERMINATE, [])
        await real.platform.end(order)
        assert (await real.over(order)).standing is Standing.ENDED
        await real.create(PODS, manifests.pod("train", node=None))
        with pytest.raises(RefusedAction) as refused:
            await real.platform.end(order)
        assert refused.value.reason == "target_changed"
        await real.pods(1)

    run(allowed, "real-pod", story)
