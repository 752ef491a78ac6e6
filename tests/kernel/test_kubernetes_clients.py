"""What an API server may answer: put off, too much, cut, expired; and what is made of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import pytest
from tests.kubernetes_servers import Cluster, kubernetes
from tests.kubernetes_store import BUILT_IN, KUEUE, Store

from gpuwarden import kubernetes_clients
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.kubernetes_clients import PODS, AnswerTooLarge, Kind, KubernetesClient
from gpuwarden.kubernetes_replies import ServerFault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

T = TypeVar("T")
LEASES = Kind("coordination.k8s.io/v1", "leases")
BUDGET = {
    "message": "Cannot evict pod as it would violate the pod's disruption budget.",
    "code": 429,
    "details": {"causes": [{"reason": "DisruptionBudget", "message": "x"}]},
}
DENIED = "jobs.batch \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied it"


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes(tmp_path, store=Store(BUILT_IN + KUEUE)) as found:
        yield found


def ask(cluster: Cluster, question: Callable[[KubernetesClient], Awaitable[T]]) -> T:
    """Ask a cluster something."""
    settings = cluster.settings()

    async def run() -> T:
        path = cluster.folder / "kubeconfig"
        assert settings.kubeconfig == str(path)
        client = KubernetesClient.connect(path, None, timeout=5.0)
        try:
            return await question(client)
        finally:
            await client.aclose()

    return asyncio.run(run())


def a_lease(name: str = "x", **spec: object) -> dict[str, object]:
    """Something small."""
    return {"metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize(("method", "status"), [("GET", 429), ("POST", 429), ("GET", 503)])
def test_what_is_put_off_is_sent_again(cluster: Cluster, method: str, status: int) -> None:
    """A server that has too many requests has done nothing: after `Retry-After` it does."""
    cluster.fail(method, "/leases", status, times=2, headers={"Retry-After": "0"})

    async def question(client: KubernetesClient) -> None:
        if method == "POST":
            await client.create(LEASES, "lab", a_lease())
        else:
            assert await client.list(LEASES, "lab") == []

    ask(cluster, question)
    assert cluster.asked(method, "/leases") == 3


def test_a_server_that_is_always_busy(cluster: Cluster) -> None:
    """It is asked a few times, and said to be."""
    cluster.fail("GET", "/leases", 429, times=100, headers={"Retry-After": "0"})
    with pytest.raises(ServerFault, match="HTTP 429"):
        ask(cluster, lambda client: client.list(LEASES, "lab"))
    assert cluster.asked("GET", "/leases") == kubernetes_clients.MAX_BUSY


def test_changes_are_not_repeated_where_they_may_have_been_made(cluster: Cluster) -> None:
    """503 and 500 say nothing of that; a budget's 429 is an answer."""
    for status, body in ((503, None), (500, None), (429, BUDGET)):
        cluster.fail("POST", "/leases", status, body=body, headers={"Retry-After": "0"})
        with pytest.raises((ServiceUnavailable, RefusedAction)):
            ask(cluster, lambda client: client.create(LEASES, "lab", a_lease()))
    assert cluster.asked("POST", "/leases") == 3


def test_a_wait_is_within_the_time_of_a_request() -> None:
    """A server that says an hour, or a date, is not believed."""
    told = ("3600", "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "", "\u0661", None)
    waits = [kubernetes_clients._wait_of("GET", 429, b"", each) for each in told]
    assert waits == [kubernetes_clients.MOST_BUSY_SECONDS, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert kubernetes_clients._wait_of("GET", 503, b"", None) is None
    assert kubernetes_clients._wait_of("PATCH", 503, b"", "1") is None


def test_pages_of_large_objects(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a page is larger than an answer may be, smaller ones are asked for; all are found."""
    for index in range(60):
        body = a_lease(f"x{index:02}")
        body["metadata"] = {"name": f"x{index:02}", "annotations": {"text": "x" * 1000}}
        cluster.create("Lease", "lab", body)
    monkeypatch.setattr(kubernetes_clients, "MAX_ANSWER_BYTES", 40_000)
    found = ask(cluster, lambda client: client.list(LEASES, "lab"))
    assert len({each["metadata"]["name"] for each in found}) == 60
    monkeypatch.setattr(kubernetes_clients, "MAX_ANSWER_BYTES", 4_000)
    with pytest.raises(AnswerTooLarge):
        ask(cluster, lambda client: client.list(LEASES, "lab"))


def test_a_watch_says_that_it_is_open(cluster: Cluster) -> None:
    """Before anything changes; of a version that is too old it says nothing but so."""
    opened: list[bool] = []

    async def question(client: KubernetesClient, version: str) -> None:
        said = client.watch(
            PODS, None, version=version, seconds=1.0, opened=lambda: opened.append(True)
        )
        async for _change in said:
            pass

    version = str(cluster.store.version)
    ask(cluster, lambda client: question(client, version))
    assert opened == [True]
    cluster.fail("GET", "/pods", 410)
    with pytest.raises(RefusedAction, match="fault 410"):
        ask(cluster, lambda client: question(client, version))
    assert opened == [True]


@pytest.mark.parametrize("status", [403, 422])
def test_policies_of_the_cluster(cluster: Cluster, status: int) -> None:
    """What an admission policy refuses is no lack of rights, whichever status it chose."""
    cluster.fail("POST", "/leases", status, body={"message": DENIED, "code": status})
    with pytest.raises(RefusedAction, match="cluster's own policy") as error:
        ask(cluster, lambda client: client.create(LEASES, "lab", a_lease()))
    assert error.value.reason == "denied"
    lack = 'validatingadmissionpolicies.admissionregistration.k8s.io is forbidden: User "x" cannot'
    cluster.fail("POST", "/leases", 403, body={"message": lack, "code": 403})
    with pytest.raises(RefusedAction) as error:
        ask(cluster, lambda client: client.create(LEASES, "lab", a_lease()))
    assert error.value.reason == "forbidden"
