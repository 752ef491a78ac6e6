"""The fleet as people watch it: figures of a real Prometheus, and the engine's part of the rows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.ruleengine.browsing import ALICE, KEY, TOKENS
from tests.ruleengine.engines import World, running
from tests.ruleengine.fleets import END, GIB, NOW, SCRAPE, START, History
from tests.ruleengine.test_api import asked
from tests.ruleengine.worlds import Job, OwnedClock
from tests.servers import Server, backfill, free_port, prometheus

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.fleet_figures import (
    FRESH_SECONDS,
    Figures,
    FleetFigures,
    figure_queries,
)
from gpuwarden.ruleengine.prometheus import PrometheusClient, Sample
from gpuwarden.ruleengine.replicas import AnyReplica

if TYPE_CHECKING:
    from collections.abc import Iterator

# ---------------------------------------------------------------------------------------------
# What Prometheus says

EPOCH_SECONDS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that holds ten minutes of a few jobs."""
    history = History()
    history.node("n1:9835")
    for index, uuid in enumerate(("a", "b", "c", "d")):
        history.card(uuid, index=index)
    history.job("train", {"a": 0.9, "b": 0.5}, memory=20 * GIB)
    history.run("train", "r-train", images=50)
    names = {"job_id": "train", "run_id": "r-train"}
    history.add("yolo_epoch", lambda time: (time - START) // EPOCH_SECONDS, **names)
    history.add("yolo_epochs_planned", 100, **names)
    history.job("young", {"c": 0.0})
    names = {"job_id": "young", "run_id": "r-young"}
    history.add("yolo_epoch", lambda time: 0.0 if time > END - 100 else None, **names)
    history.add("yolo_epochs_planned", 10, **names)
    gone = {"job_id": "gone", "gpu": "0", "uuid": "d"}
    history.add("gpu_job_utilization_ratio", lambda t: 0.7 if t < END - 30 else None, **gone)
    storage = tmp_path_factory.mktemp("figures") / "tsdb"
    backfill(history.text(), storage)
    with prometheus("global: {}\n", storage) as running_server:
        yield running_server


def figures_of(*shards: tuple[str, ...]) -> Figures:
    """What is measured, asked of servers."""

    async def story() -> Figures:
        clients = [[PrometheusClient(url, timeout=3.0) for url in shard] for shard in shards]
        try:
            source = AnyReplica(clients)
            clock = OwnedClock(wall=NOW)
            return await FleetFigures(source, clock, scrape_interval=SCRAPE).now()
        finally:
            for client in (client for shard in clients for client in shard):
                await client.aclose()

    return asyncio.run(story())


def test_every_figure_is_measured(server: Server) -> None:
    """The mean use of a job's cards, its fullest card, its epoch and the time that is left."""
    found = figures_of((server.url,))
    assert found.problem == ""
    assert set(found.values) == set(figure_queries(SCRAPE))
    assert found.of("utilization", "train") == pytest.approx(0.7)
    assert found.of("memory", "train") == 20 * GIB
    assert found.of("epoch", "train") == 10
    assert found.of("epochs", "train") == 100
    # Ninety epochs are left, and five have passed in the last five minutes.
    assert found.of("time_left", "train") == pytest.approx(90 * EPOCH_SECONDS)


def test_what_is_not_known_is_absent(server: Server) -> None:
    """A training without a pace has no end; a sample of half a minute ago is no figure."""
    found = figures_of((server.url,))
    assert found.of("epoch", "young") == 0
    assert found.of("utilization", "young") == 0.0
    assert found.of("time_left", "young") is None
    assert found.of("utilization", "gone") is None


def test_a_replica_that_is_away_is_passed_over(server: Server) -> None:
    """The next one is asked; without any of a shard there are no figures, and it is said why."""
    dead = f"http://127.0.0.1:{free_port()}"
    assert figures_of((dead, server.url)).of("epoch", "train") == 10
    lost = figures_of((server.url,), (dead,))
    assert lost.problem.startswith("Prometheus gave no figures: ")
    assert not lost.values


@dataclass
class Counting:
    """A source that counts, and waits until it may answer."""

    value: float = 0.5
    queries: int = 0
    down: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def instant(self, _query: str, _time: float) -> list[Sample]:
        """One job, or no answer."""
        self.queries += 1
        await self.gate.wait()
        if self.down:
            raise ServiceUnavailable("it is down")
        return [Sample({"job_id": "proc-1"}, self.value)]


def test_however_many_watch_prometheus_is_asked_once() -> None:
    """All who ask meanwhile have one answer, and it is kept for a moment."""

    async def story() -> None:
        source, clock = Counting(), OwnedClock()
        figures = FleetFigures(source, clock, scrape_interval=SCRAPE)
        waiting = [asyncio.create_task(figures.now()) for _ in range(50)]
        await asyncio.sleep(0)
        waiting.pop().cancel()  # somebody goes away
        source.gate.set()
        answers = await asyncio.gather(*waiting)
        each = len(figure_queries(SCRAPE))
        assert source.queries == each
        assert {answer.of("utilization", "proc-1") for answer in answers} == {0.5}
        clock.pass_(FRESH_SECONDS - 1)
        await figures.now()
        assert source.queries == each
        clock.pass_(2)
        source.down = True
        assert (await figures.now()).problem == "Prometheus gave no figures: it is down"
        source.down = False
        clock.pass_(FRESH_SECONDS)
        assert (await figures.now()).problem == ""

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------
# What the engine makes of it


def test_the_gravest_comes_first_and_says_what_comes_next(servers: World) -> None:
    """A row holds what the job does, what it should do, and how far its case has come."""

    async def story() -> None:
        async with asked(servers, jobs=24) as (world, client, _):
            await world.until(CaseState.NOTIFIED)
            document = (await client.get("/v1/fleet?limit=5")).json()
            assert (document["total"], document["broken"]) == (24, 3)
            assert (document["cards"], document["held"]) == (24, 24)
            first = document["jobs"][0]
            assert (first["job_id"], first["user"], first["team"]) == ("proc-1", "alice", "vision")
            assert (first["model"], first["batch"], first["imgsz"]) == ("yolov8m", 64, 640)
            assert (first["utilization"], first["memory_bytes"]) == (0.0, 30 * GIB)
            assert first["memory_expected"]["low"] < first["memory_expected"]["high"]
            verdict = first["verdict"]
            assert (verdict["state"], verdict["rule"], verdict["level"]) == (
                "notified",
                "idle-held",
                "moderate",
            )
            assert verdict["end"]["kind"] == "terminate"
            assert 300 <= verdict["end"]["in_seconds"] <= 480
            assert document["jobs"][4]["verdict"]["state"] == "ok"
            protected = (await client.get("/v1/fleet?user=ci")).json()["jobs"]
            assert {job["verdict"]["state"] for job in protected} == {"protected"}
            assert "nightly regression runs" in protected[0]["verdict"]["protected"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("query", "users"),
    [
        ("sort=user&limit=1", ["alice"]),
        ("sort=user&reverse=1&limit=1", ["dmitri"]),
        ("user=DMI&limit=1", ["dmitri"]),
        ("team=speech&limit=1", ["bob"]),
        ("rule=idle-held&sort=user", ["alice", "alice", "carol"]),
        ("broken=1&sort=user", ["alice", "alice", "carol"]),
        ("node=gpu05&limit=1&offset=1&sort=user", ["bob"]),
        ("sort=utilization&limit=1", ["alice"]),
        ("rule=none", []),
        ("limit=0", []),
    ],
)
def test_rows_are_asked_for(servers: World, query: str, users: list[str]) -> None:
    """By filter, in an order, a part at a time."""

    async def story() -> list[str]:
        async with asked(servers, jobs=24) as (world, client, _):
            await world.until(CaseState.DETECTED)
            found = (await client.get(f"/v1/fleet?{query}")).json()
            return [job["user"] for job in found["jobs"]]

    assert asyncio.run(story()) == users


def test_what_cannot_be_read_is_refused(servers: World) -> None:
    """With what it could be; and no answer is larger than a part."""

    async def story() -> None:
        async with asked(servers, jobs=700) as (world, client, _):
            await world.tick()
            refused = await client.get("/v1/fleet?sort=price")
            assert refused.status_code == 400
            assert "verdict, user, team" in refused.json()["message"]
            assert (await client.get("/v1/fleet?limit=x")).status_code == 400
            document = (await client.get("/v1/fleet?limit=9999")).json()
            assert (document["total"], len(document["jobs"])) == (700, 500)

    asyncio.run(story())


def test_owners_see_their_own(servers: World) -> None:
    """And nobody else's job, card or number."""

    async def story() -> dict[str, Any]:
        async with asked(servers, jobs=24) as (world, client, _):
            await world.until(CaseState.DETECTED)
            alice = {"Authorization": f"Bearer {ALICE}"}
            answer = await client.get("/v1/fleet", headers=alice)
            document: dict[str, Any] = answer.json()
            return document

    document = asyncio.run(story())
    assert {job["user"] for job in document["jobs"]} == {"alice"}
    assert document["total"] == len(document["jobs"])


def test_a_hidden_name_is_found_by_nothing(servers: World) -> None:
    """Neither the filter nor the order tells who a pseudonym is."""
    servers.web = "web: {tokens: [], names: nobody}\n"
    servers.fleet.jobs = [
        Job("proc-1", "alice", activity={"cpu": 1_799_990_000.0}),
        Job("proc-2", "bob", "GPU-2"),
    ]

    async def story() -> list[dict[str, Any]]:
        async with running(servers) as world:
            await world.tick(6)
            app = EngineApp(
                world.engine,
                world.hop,
                notify_token=None,
                operator_token=None,
                ticket_key=KEY,
                tokens=TOKENS,
            )
            transport = httpx.ASGITransport(app=app.starlette())
            async with httpx.AsyncClient(transport=transport, base_url="http://e:1") as client:
                paths = ("", "?user=alice", "?team=vision", "?sort=user", "?user=user-")
                return [(await client.get(f"/v1/fleet{path}")).json() for path in paths]

    everybody, by_name, by_team, sorted_, by_alias = asyncio.run(story())
    assert (everybody["total"], by_name["total"], by_team["total"]) == (2, 0, 0)
    assert by_alias["total"] == 2
    aliases = [job["user"] for job in sorted_["jobs"]]
    assert aliases == sorted(aliases)
    assert all(alias.startswith("user-") for alias in aliases)
    assert {job["team"] for job in everybody["jobs"]} == {""}
