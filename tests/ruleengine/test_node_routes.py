"""Nodes over HTTP: whose token does what, and what Prometheus is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.ruleengine.engines import World, running

from gpuwarden.node_api import (
    DISCOVERY_PATH,
    FORGET_PATH,
    LEAVE_PATH,
    REGISTER_PATH,
    Goodbye,
    Registration,
    Target,
)
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.nodes import Nodes
from gpuwarden.ruleengine.settings import NodeSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NODE = {"Authorization": "Bearer node"}
OPERATOR = {"Authorization": "Bearer operator"}
TARGET = Target.parse("node7:9835")
SAID = Registration(TARGET, "a" * 64, "boot-1", "http", "0.1.0").encode()
GOODBYE = Goodbye(TARGET, "a" * 64).encode()


@contextlib.asynccontextmanager
async def asked(
    servers: World, *, closed: bool = False, **changes: Any
) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """A running engine with nodes, and a client of its application."""
    async with running(servers) as world:
        if not closed:
            world.engine.nodes = Nodes(world.engine.ledger, world.clock, heartbeat=60, limit=100)
        options = {"notify_token": "notify", "operator_token": "operator", "node_token": "node"}
        app = EngineApp(world.engine, world.hop, ticket_key=None, **{**options, **changes})
        transport = httpx.ASGITransport(app=app.starlette(), client=("10.0.0.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield world, client


def test_from_registration_to_goodbye(servers: World) -> None:
    """Registered it is a target; after its goodbye it is none, and both are answered with 200."""

    async def story() -> None:
        async with asked(servers) as (_, client):
            empty = await client.get(DISCOVERY_PATH)
            assert (empty.status_code, empty.json()) == (200, [])
            answer = await client.post(REGISTER_PATH, content=SAID, headers=NODE)
            assert (answer.status_code, answer.json()) == (200, {"heartbeat_seconds": 60})
            found = await client.get(DISCOVERY_PATH)
            assert found.headers["content-type"] == "application/json"
            assert found.json() == [{"targets": ["node7:9835"], "labels": {}}]
            left = await client.post(LEAVE_PATH, content=GOODBYE, headers=NODE)
            assert left.status_code == 200
            assert (await client.get(DISCOVERY_PATH)).json() == []

    asyncio.run(story())


SETTINGS = {
    REGISTER_PATH: "nodes.registration.token_file",
    LEAVE_PATH: "nodes.registration.token_file",
    FORGET_PATH: "web.operator_token_file",
}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (REGISTER_PATH, {}, 401),
        (REGISTER_PATH, {"Authorization": "Bearer nod"}, 401),
        (REGISTER_PATH, {"Authorization": "Basic node"}, 401),
        (REGISTER_PATH, OPERATOR, 401),
        (REGISTER_PATH, {"Authorization": "Bearer notify"}, 401),
        (LEAVE_PATH, {}, 401),
        (LEAVE_PATH, OPERATOR, 401),
        (FORGET_PATH, {}, 401),
        (FORGET_PATH, NODE, 401),
    ],
)
def test_each_token_opens_its_own_door(
    servers: World, path: str, headers: dict[str, str], status: int
) -> None:
    """Nodes register and leave, operators forget; who has the wrong token hears which it takes."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            await client.post(REGISTER_PATH, content=SAID, headers=NODE)
            answer = await client.post(path, content=SAID, headers=headers)
            assert answer.status_code == status
            assert answer.headers["www-authenticate"] == "Bearer"
            assert f"token of {SETTINGS[path]}" in answer.json()["message"]
            assert world.engine.nodes is not None
            assert len(world.engine.nodes.present()) == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"", 400, "malformed"),
        (b"{", 400, "malformed"),
        (b"[" * 4000, 400, "malformed"),
        (b"{}", 400, "version"),
        (b"x" * 5000, 413, "too_large"),
        (SAID.replace(b"node7", b"169.254.169.254"), 400, "forbidden_address"),
        (SAID.replace(b"node7", b"127.0.0.1"), 400, "forbidden_address"),
        (SAID.replace(b"node7:9835", b"node7:9835/x"), 400, "bad_address"),
    ],
)
def test_bodies_that_are_refused(servers: World, body: bytes, status: int, error: str) -> None:
    """What is too large or no registration is refused with a reason, and nothing is kept."""

    async def story() -> None:
        async with asked(servers) as (_, client):
            answer = await client.post(REGISTER_PATH, content=body, headers=NODE)
            assert (answer.status_code, answer.json()["error"]) == (status, error)
            assert (await client.get(DISCOVERY_PATH)).json() == []

    asyncio.run(story())


def test_too_often_says_when_to_come_back(servers: World) -> None:
    """A node that speaks too often is told to wait."""

    async def story() -> None:
        async with asked(servers) as (_, client):
            for _ in range(30):
                answer = await client.post(REGISTER_PATH, content=SAID, headers=NODE)
            assert (answer.status_code, answer.json()["error"]) == (429, "too_often")
            assert answer.headers["retry-after"] == "5"

    asyncio.run(story())


def test_without_registration_the_doors_are_closed(servers: World) -> None:
    """Prometheus keeps what it had: an empty list would make it drop all targets."""

    async def story() -> None:
        async with asked(servers, closed=True) as (_, client):
            assert (await client.get(DISCOVERY_PATH)).status_code == 404
            for path in (REGISTER_PATH, LEAVE_PATH, FORGET_PATH):
                answer = await client.post(path, content=SAID, headers=NODE)
                assert answer.status_code == 404
            assert (await client.get(REGISTER_PATH)).json()["nodes"] == []
        async with asked(servers, operator_token=None) as (_, client):
            answer = await client.post(FORGET_PATH, content=SAID, headers=OPERATOR)
            assert answer.status_code == 403
            assert "web.operator_token_file" in answer.json()["message"]

    asyncio.run(story())


def test_a_node_that_vanished_ends_nothing_until_it_is_forgotten(servers: World) -> None:
    """One of two nodes is dark: no job is ended anywhere, until an operator forgets it."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            names = {job.instance for job in world.fleet.jobs}
            world.engine.settings = world.engine.settings.model_copy(
                update={"nodes": NodeSettings(names=tuple(names))}
            )
            await client.post(REGISTER_PATH, content=SAID, headers=NODE)
            await world.tick()
            document = (await client.get(REGISTER_PATH)).json()
            assert (document["expected"], document["lit"]) == (2, 1)
            vanished = next(item for item in document["nodes"] if item["address"] == "node7:9835")
            assert (vanished["state"], vanished["lit"], vanished["expected"]) == (
                "registered",
                False,
                True,
            )
            assert "dark_nodes" in {block.reason for block in world.engine.view.halted}
            page = (await client.get("/metrics")).text
            assert 'gpuwarden_engine_nodes{state="registered"} 1.0' in page
            assert 'gpuwarden_engine_nodes{state="lit"} 1.0' in page
            forgotten = await client.post(
                FORGET_PATH, content=json.dumps({"address": "node7:9835"}), headers=OPERATOR
            )
            assert forgotten.status_code == 200
            await world.tick()
            assert "dark_nodes" not in {block.reason for block in world.engine.view.halted}

    asyncio.run(story())
