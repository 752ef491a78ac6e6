"""Prometheus slow, wrong, empty, restarted or of another time: no wrong action, nothing lost, told.

The engine's own client asks a server on the loopback that knows the fleet and misbehaves on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import pytest
from tests.ruleengine.engines import TICK, World, running
from tests.ruleengine.worlds import NODE, Answer, Fleet, Received, Sink

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.prometheus import PrometheusClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from gpuwarden.ruleengine.prometheus import Sample, Source


@dataclass
class FleetServer:
    """Prometheus' query API over a fleet; `spoil` makes another answer of each good one."""

    fleet: Fleet
    spoil: Callable[[str, bytes], Answer] | None = None
    ahead: float = 0.0
    release: threading.Event = field(default_factory=threading.Event)

    def answer(self, _method: str, request: Received) -> Answer:
        """What the query API says."""
        form = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
        query = form["query"]
        if query == "time()":
            now = self.fleet.clock.wall() + self.ahead
            data: dict[str, object] = {"resultType": "scalar", "result": [now, str(now)]}
        else:
            at = float(form["time"])
            rows = asyncio.run(self.fleet.instant(query, at))
            result = [{"metric": row.labels, "value": [at, str(row.value)]} for row in rows]
            data = {"resultType": "vector", "result": result}
        body = json.dumps({"status": "success", "data": data}).encode()
        return (200, body) if self.spoil is None else self.spoil(query, body)


@contextlib.contextmanager
def fleet_server(world: World) -> Iterator[tuple[FleetServer, Sink]]:
    """A server before the world's fleet."""
    state = FleetServer(world.fleet)
    with Sink(state.answer) as sink:
        try:
            yield state, sink
        finally:
            state.release.set()


@dataclass
class Switched:
    """A source that can be exchanged under the engine."""

    source: Source

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Rows of one query."""
        return await self.source.instant(query, time)

    async def clock_skew(self) -> float:
        """Of the source's clock."""
        return await self.source.clock_skew()


@contextlib.asynccontextmanager
async def asking(servers: World, *, patience: float = 20.0) -> AsyncIterator[FleetServer]:
    """A world whose job is due; from here on the engine asks through the real client."""
    (servers.folder / "halt").touch()
    servers.source = switch = Switched(servers.fleet)
    async with running(servers):
        await servers.until(CaseState.DUE)
        (servers.folder / "halt").unlink()
        with fleet_server(servers) as (state, sink):
            client = PrometheusClient(sink.url, timeout=patience, clock=servers.clock)
            async with client:
                switch.source = client
                yield state


def _whole(_query: str, body: bytes) -> dict[str, object]:
    document: dict[str, object] = json.loads(body)
    return document


def _error(_query: str, _body: bytes) -> Answer:
    return 500, b'{"status": "error", "errorType": "internal", "error": "boom"}'


def _proxy(_query: str, _body: bytes) -> Answer:
    return 200, b"<!doctype html><title>Sign in</title>"


def _cut(_query: str, body: bytes) -> Answer:
    return 200, body[: len(body) // 2]


def _warned(query: str, body: bytes) -> Answer:
    return 200, json.dumps(_whole(query, body) | {"warnings": ["store-2: no answer"]}).encode()


def _partial(query: str, body: bytes) -> Answer:
    return 200, json.dumps(_whole(query, body) | {"isPartial": True}).encode()


def _one_bad(query: str, body: bytes) -> Answer:
    return _error(query, body) if "gpu_info" in query else (200, body)


def _kept(query: str, body: bytes) -> Answer:
    """A cache in between: of an hour ago, and the clock is right all the same."""
    document = _whole(query, body)
    for row in document["data"]["result"] if query != "time()" else ():  # type: ignore[index]
        row["value"][0] -= 3600
    return 200, json.dumps(document).encode()


def _kept_in_part(query: str, body: bytes) -> Answer:
    """One answer of many, and of that one row."""
    document = _whole(query, body)
    if "gpu_job_utilization_ratio" in query:
        document["data"]["result"][-1]["value"][0] -= 3600  # type: ignore[index]
    return 200, json.dumps(document).encode()


def _overloaded(_query: str, _body: bytes) -> Answer:
    return 503, b'{"status": "error", "errorType": "timeout", "error": "query timed out"}'


SPOILS = (_error, _proxy, _cut, _warned, _partial, _one_bad, _overloaded, _kept, _kept_in_part)


def test_wrong_answers_change_nothing_and_are_told(servers: World) -> None:
    """A due job stays and its case is as it was, whatever comes; then it is judged afresh."""

    async def story() -> None:
        async with asking(servers) as server:
            before = servers.engine.cases.all()
            for number, spoil in enumerate(SPOILS, start=1):
                server.spoil = spoil
                servers.engine.breaker.succeeded()  # so that each spoil is met
                await servers.tick()
                assert servers.engine.cases.all() == before, spoil
                assert servers.why() == {"no_facts"}, spoil
                told = servers.told()
                assert told['gpuwarden_engine_ticks_total{outcome="discarded"}'] == number, spoil
            assert "is Prometheus up?" in servers.engine.problems[0]
            assert servers.agent.requests == []
            server.spoil = None
            await servers.tick()
            assert "postponed" in servers.kinds()
            await servers.tick(3)
            assert servers.agent.ended == ["proc-1"]

    asyncio.run(story())


def test_a_server_that_hangs_is_given_up_and_told(servers: World) -> None:
    """The tick ends all the same, as discarded; the next one that is answered counts."""

    async def story() -> None:
        async with asking(servers, patience=0.1) as server:

            def hang(_query: str, body: bytes) -> Answer:
                server.release.wait(30)
                return 200, body

            server.spoil = hang
            await asyncio.wait_for(servers.tick(), 30)
            assert servers.engine.ticks.outcomes["discarded"] == 1
            assert servers.why() == {"no_facts"}
            assert servers.agent.requests == []
            server.release.set()

    asyncio.run(story())


def test_a_server_of_another_time_ends_nothing(servers: World) -> None:
    """An hour, or just over five seconds, behind or ahead: it is told by how much."""

    async def story() -> None:
        async with asking(servers) as server:
            for ahead in (-3600.0, 3600.0, -6.0, 6.0):
                server.ahead = ahead
                await servers.tick()
                assert servers.agent.requests == []
                assert "clock_skew" in servers.why()
                told = servers.told()
                assert told['gpuwarden_engine_clock_skew_seconds{peer="fleet"}'] == abs(ahead)
                assert told['gpuwarden_engine_enforcement_halted{reason="clock_skew"}'] == 1
            server.ahead = 0.0
            await servers.tick()
            assert servers.agent.ended == ["proc-1"]

    asyncio.run(story())


def _forgetful(world: World) -> None:
    """No series at all: restarted on an empty disk, or its samples are an hour late."""
    world.fleet.jobs, world.fleet.nodes = [], {}


def _without_jobs_of_dark_nodes(world: World) -> None:
    """The node is dark, and what it held is forgotten as well; other nodes are lit."""
    world.fleet.jobs = []
    world.fleet.nodes = {NODE: False} | {f"127.0.0.{n}:9835": True for n in range(3, 23)}


@pytest.mark.parametrize(
    "forget", [_forgetful, _without_jobs_of_dark_nodes], ids=lambda f: f.__name__
)
def test_what_prometheus_forgets_has_not_ended(
    servers: World, forget: Callable[[World], None]
) -> None:
    """A case of a node that is not lit stands still; it is not closed as if the job were gone."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            before, jobs, nodes = world.case(), world.fleet.jobs, world.fleet.nodes
            forget(world)
            await world.tick(int(8 * 60 / TICK))
            held = world.case()
            assert (held.state, held.elapsed) == (CaseState.NOTIFIED, before.elapsed)
            assert world.agent.requests == []
            world.fleet.jobs, world.fleet.nodes = jobs, nodes
            while not world.agent.requests:
                await world.tick()
            assert world.kinds().count("notified") == 1
            assert world.case().elapsed >= 8 * 60

    asyncio.run(story())


def test_a_replica_that_knows_half_ends_nothing(servers: World) -> None:
    """Now one replica answers and now the other, which has not scraped the node: never due."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            for turn in range(80):
                world.fleet.nodes[NODE] = bool(turn % 2)
                await world.tick()
            assert world.agent.requests == []
            assert world.state() is CaseState.NOTIFIED

    asyncio.run(story())
