"""The global pause: who may set it, and that nothing is ended while it holds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
from tests.ruleengine.engines import World, running, serving
from tests.servers import free_port

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.sign_ins import Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKENS = (
    Token("root", Role.ADMIN, "admins-token-00001"),
    Token("olga", Role.OPERATOR, "operators-token-01"),
)
ADMIN = {"Authorization": "Bearer admins-token-00001"}
OPERATOR = {"Authorization": "Bearer operators-token-01"}


def application(world: World) -> EngineApp:
    """The engine's HTTP side, with an admin and an operator."""
    return EngineApp(
        world.engine,
        world.hop,
        notify_token="notify",
        operator_token=None,
        ticket_key=None,
        tokens=TOKENS,
    )


@contextlib.asynccontextmanager
async def asked(servers: World) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """A running engine and a client of its application."""
    async with running(servers) as world:
        transport = httpx.ASGITransport(app=application(world).starlette())
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield world, client


def test_while_enforcement_is_paused_nothing_is_ended_and_every_place_says_why(
    servers: World,
) -> None:
    """A job that is due waits, over a restart too; it is ended after somebody resumes."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            answer = await client.post(
                "/v1/enforcement/pause", json={"reason": "a storage outage"}, headers=ADMIN
            )
            assert answer.status_code == 201
            await world.until(CaseState.DUE)
            await world.tick(3)
            assert "paused" in world.why()
            assert world.agent.requests == []
            assert 'gpuwarden_engine_enforcement_halted{reason="paused"} 1.0' in (
                metrics := (await client.get("/metrics")).text
            )
            assert "gpuwarden_engine_enforcement_paused 1.0" in metrics
            (rule,) = (await client.get("/v1/jobs/proc-1")).json()["rules"]
            sentences = [block["sentence"] for block in rule["why_not"]]
            assert (
                "enforcement is paused by root until somebody resumes: a storage outage"
                in sentences
            )
        async with asked(servers) as (world, client):
            await world.tick(20)
            assert world.agent.requests == []
            document = (await client.get("/v1/enforcement")).json()
            assert document["paused"]["by"] == "root"
            answer = await client.post(
                "/v1/enforcement/resume", json={"reason": "storage is back"}, headers=ADMIN
            )
            assert (answer.status_code, answer.json()["paused"]) == (200, None)
            while not world.agent.requests:
                await world.tick()
            assert "gpuwarden_engine_enforcement_paused 0.0" in (await client.get("/metrics")).text

    asyncio.run(story())


def test_a_pause_that_comes_at_the_last_moment_still_counts(servers: World) -> None:
    """It is read again after the last look at the facts, right before the decision is written."""

    async def story() -> None:
        async with asked(servers) as (world, _):
            asked_for: list[str] = []
            begun: list[str] = []

            def last_look() -> None:
                # The agent said who it is: what follows is the look before the act.
                if asked_for and not begun:
                    begun.append("now")
                    world.engine.pauses.begin(
                        by="root", role="admin", reason="a mistake", seconds=None
                    )

            world.agent.on_node = lambda: asked_for.append("who it is")
            world.fleet.before_answer = last_look
            while not begun:
                await world.tick()
            assert "paused" in world.why()
            await world.tick(20)
            assert world.agent.requests == []
            assert "paused" in world.why()

    asyncio.run(story())


def test_a_pause_with_an_end_ends_by_itself(servers: World) -> None:
    """To the second, by the engine's clock."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            body = {"reason": "an upgrade", "for": "2h"}
            await client.post("/v1/enforcement/pause", json=body, headers=ADMIN)
            world.clock.pass_(2 * 3600 - 1)
            assert (await client.get("/v1/enforcement")).json()["paused"] is not None
            world.clock.pass_(1)
            assert (await client.get("/v1/enforcement")).json()["paused"] is None

    asyncio.run(story())


def test_a_later_pause_replaces_an_earlier_one(servers: World) -> None:
    """Its end too: what was longer before does not come back."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            for body in ({"reason": "first"}, {"reason": "second", "for": "1h"}):
                await client.post("/v1/enforcement/pause", json=body, headers=ADMIN)
            assert (await client.get("/v1/enforcement")).json()["paused"]["reason"] == "second"
            world.clock.pass_(3600)
            assert (await client.get("/v1/enforcement")).json()["paused"] is None

    asyncio.run(story())


def test_who_may_pause(servers: World) -> None:
    """Only admins, with a reason; the ledger's audit has who and why."""

    async def story() -> None:
        async with asked(servers) as (world, client):

            async def asks(path: str, body: object, headers: dict[str, str]) -> tuple[int, str]:
                answer = await client.post(path, content=json.dumps(body), headers=headers)
                return answer.status_code, answer.json().get("error", "")

            pause, why = "/v1/enforcement/pause", {"reason": "because"}
            assert await asks(pause, why, {}) == (401, "unauthorised")
            assert await asks(pause, why, {"Authorization": "Bearer x"}) == (401, "unauthorised")
            assert await asks(pause, why, OPERATOR) == (403, "role")
            assert await asks(pause, {}, ADMIN) == (400, "malformed")
            assert await asks(pause, {"reason": " "}, ADMIN) == (400, "malformed")
            for wrong in ("0s", "9999y", "999999999y", "5"):
                assert await asks(pause, {**why, "for": wrong}, ADMIN) == (400, "malformed")
            # No file takes half a character, and terminals obey the others.
            for wrong in ("\ud800", "\x1b[2J", "a\x00b", "\u202egnp.exe"):
                assert await asks(pause, {"reason": wrong}, ADMIN) == (400, "malformed")
            assert await asks("/v1/enforcement/resume", why, ADMIN) == (409, "not_paused")
            assert world.engine.pauses.current() is None
            assert await asks(pause, why, ADMIN) == (201, "")
            assert await asks("/v1/enforcement/resume", why, OPERATOR) == (403, "role")
            assert await asks("/v1/enforcement/resume", why, ADMIN) == (200, "")
            kinds = [
                (event["kind"], event["detail"]["by"], event["detail"]["reason"])  # type: ignore[index]
                for event in world.engine.ledger.events("")
            ]
            assert kinds == [("paused", "root", "because"), ("resumed", "root", "because")]

    asyncio.run(story())


def test_the_command_pauses_and_resumes(servers: World, tmp_path: Path) -> None:
    """With an admin's token; what the engine refuses is said, with exit status 1."""
    port = free_port()
    (tmp_path / "admin").write_text("admins-token-00001\n")
    (tmp_path / "operator").write_text("operators-token-01\n")

    def enforcement(*arguments: str, who: str = "admin") -> tuple[int, str]:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "gpuwarden", "enforcement", *arguments),
                *("--engine.url", f"http://127.0.0.1:{port}"),
                *("--token-file", str(tmp_path / who)),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    async def story() -> list[tuple[int, str]]:
        async with running(servers) as world, serving(application(world), port):
            return [
                await asyncio.to_thread(enforcement, "show"),
                await asyncio.to_thread(enforcement, "pause", "--reason", "x", who="operator"),
                await asyncio.to_thread(enforcement, "pause", "--reason", "an upgrade"),
                await asyncio.to_thread(enforcement, "resume", "--reason", "done"),
            ]

    shown, refused, paused, resumed = asyncio.run(story())
    assert shown == (0, "Enforcement is not paused.\n")
    assert (refused[0], "[role]" in refused[1]) == (1, True)
    assert paused == (0, "Enforcement is paused by root until somebody resumes: an upgrade\n")
    assert resumed == (0, "Enforcement is not paused.\n")
