"""What pages say that was done, and what they list: so it is, also when they are loaded again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
from tests.ruleengine.browsing import ALICE, OLGA, ROOT, WEB, application
from tests.ruleengine.engines import World, running

from gpuwarden.node_api import Registration, Target
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.nodes import Nodes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OWN = {"Sec-Fetch-Site": "same-origin"}


@contextlib.asynccontextmanager
async def asked(
    servers: World, token: str, until: CaseState | None = None
) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """An engine, and the browser of somebody who has signed in."""
    servers.web = WEB
    async with running(servers) as world:
        await world.tick()
        if until is not None:
            await world.until(until)
        transport = httpx.ASGITransport(app=application(world).starlette())
        async with httpx.AsyncClient(transport=transport, base_url="http://engine:9837") as client:
            await client.post("/sign-in", data={"token": token}, headers=OWN)
            yield world, client


async def send(client: httpx.AsyncClient, path: str, **fields: str) -> httpx.Response:
    """Send a form of the engine's page."""
    found = re.search(r'name="form" value="([^"]+)"', (await client.get("/engine")).text)
    assert found is not None
    return await client.post(path, data={**fields, "form": found[1]}, headers=OWN)


async def status_of(client: httpx.AsyncClient, path: str) -> str:
    """What a page says that was done."""
    found = re.search(r'role="status">([^<]*)', (await client.get(path)).text)
    return found[1] if found else ""


def test_what_was_done_is_told_while_it_is_so(servers: World) -> None:
    """An address stays in the browser: loaded again it must not say that ends are paused."""

    async def story() -> None:
        async with asked(servers, ROOT) as (world, client):
            for done in ("paused", "rule", "rule&rule=idle-held2"):
                assert await status_of(client, f"/engine?done={done}") == "", done
            paused = await send(client, "/engine/pause", reason="an upgrade")
            where = paused.headers["location"]
            assert await status_of(client, where) == "Enforcement is paused."
            assert await status_of(client, "/engine?done=resumed") == ""
            world.engine.pauses.end(by="olga", role="admin", reason="done")
            assert await status_of(client, where) == ""
            assert (await status_of(client, "/engine?done=resumed")).startswith("Enforcement goes")
            (world.folder / "halt").touch()
            assert await status_of(client, "/engine?done=resumed") == ""

    asyncio.run(story())


def test_who_resumes_what_somebody_else_has_resumed_is_told(servers: World) -> None:
    """The page was open when another admin was faster; nothing was done, and so it says."""

    async def story() -> None:
        async with asked(servers, ROOT) as (_, client):
            for fields, why in (
                ({}, "enforcement is not paused"),
                ({"rule": "idle-held"}, "the rule idle-held has not fallen back"),
            ):
                answer = await send(client, "/engine/resume", reason="safe again", **fields)
                assert (answer.status_code, f"Not resumed: {why}." in answer.text) == (409, True)

    asyncio.run(story())


FALSE = ("No running job breaks", ">0 jobs", "0 of 0", "No job fits", "Everything could")
"""What is not so while nothing is known."""


def test_what_is_not_known_is_neither_none_nor_all(servers: World) -> None:
    """Before the first tick, and while Prometheus is down: no page counts, and none is at ease."""
    servers.fleet.down = True

    async def story() -> None:
        async with asked(servers, ROOT) as (world, client):
            for path in ("/", "/jobs", "/cards", "/shares", "/engine"):
                page = (await client.get(path)).text.partition("<main")[2]
                assert [words for words in FALSE if words in page] == [], path
            page = (await client.get("/")).text
            assert page.count("<b>unknown</b>") == 4
            world.fleet.down = False
            await world.tick()
            assert "Everything could be judged" in (await client.get("/engine")).text
            assert "nothing is known since" not in (await client.get("/")).text
            world.fleet.down = True
            await world.tick()
            assert "Everything could be judged" not in (await client.get("/engine")).text
            page = (await client.get("/")).text
            assert re.search(
                r'class="answer warn">.* So it was at .*; nothing is known since', page
            )

    asyncio.run(story())


def test_an_objection_is_confirmed_where_there_is_one(servers: World) -> None:
    """To who objected, and not to who was sent an address that says so."""

    async def story() -> None:
        async with asked(servers, ALICE, CaseState.NOTIFIED) as (_, client):
            assert await status_of(client, "/jobs/proc-1?done=appealed") == ""
            sent = await send(client, "/jobs/proc-1/appeal", rule="idle-held", reason="I work")
            assert "Your objection" in await status_of(client, sent.headers["location"])

    asyncio.run(story())


def _decided(world: World, moments: dict[str, list[float]]) -> None:
    """Decisions about jobs of these users, at these times."""
    (known,) = world.engine.ledger.job_decisions("proc-1")
    with world.engine.ledger.transaction() as db:
        names = [row[1] for row in db.execute("PRAGMA table_info(decisions)")]
        kept = ", ".join(
            name for name in names if name not in ("id", "job_id", "user", "created_at")
        )
        for user, times in moments.items():
            for number, at in enumerate(times):
                db.execute(
                    f"INSERT INTO decisions (id, job_id, user, created_at, {kept}) "  # noqa: S608
                    f"SELECT ?1, ?1, ?2, ?3, {kept} FROM decisions WHERE id=?4",
                    (f"{user}-{number:03}", user, at, known.id),
                )


async def _walked(client: httpx.AsyncClient, token: str) -> list[str]:
    """Every decision that somebody sees, page by page."""
    found: list[str] = []
    path = "/v1/decisions?limit=10"
    while True:
        answer = await client.get(path, headers={"Authorization": f"Bearer {token}"})
        document: dict[str, Any] = answer.json()
        found += [decision["id"] for decision in document["decisions"]]
        if document["before"] is None:
            return found
        path = f"/v1/decisions?limit=10&before={quote(document['before'])}"


def test_no_decision_is_lost_between_two_pages(servers: World) -> None:
    """However many were taken at once, and however many of others are newer."""

    async def story() -> None:
        async with asked(servers, OLGA, CaseState.VERIFIED) as (world, client):
            (own,) = world.engine.ledger.job_decisions("proc-1")
            later = own.created_at + 100
            # Those of one tick are less than a millisecond apart.
            burst = [later + number * 0.00007 for number in range(40)]
            spread = [later + 60 + number for number in range(25)]
            _decided(world, {"bob": burst, "carol": spread})
            every = [f"carol-{n:03}" for n in reversed(range(25))]
            every += [*(f"bob-{n:03}" for n in reversed(range(40))), own.id]
            assert await _walked(client, OLGA) == every
            assert await _walked(client, ALICE) == [own.id]
            first = await client.get("/v1/decisions", headers={"Authorization": f"Bearer {ALICE}"})
            assert [decision["id"] for decision in first.json()["decisions"]] == [own.id]

    asyncio.run(story())


def test_the_audit_of_people_has_every_change_with_who_and_why(servers: World) -> None:
    """A node that is forgotten, an objection and a rule that may enforce again, too."""

    async def story() -> None:
        async with asked(servers, ROOT, CaseState.NOTIFIED) as (world, client):
            rule, engine = world.engine.rulebook.rule("idle-held"), world.engine
            assert rule is not None
            nodes = Nodes(engine.ledger, world.clock, heartbeat=60, limit=10)
            engine.nodes = nodes
            target = Target.parse("node7:9835")
            nodes.register(Registration(target, "a" * 64, "boot-1"), peer="10.0.0.7")
            answer = await client.post(
                "/v1/nodes/forget",
                content=json.dumps({"address": "node7:9835", "reason": "sold"}),
                headers={"Authorization": f"Bearer {OLGA}"},
            )
            assert answer.status_code == 200
            words = {"user": "alice", "by": "alice", "role": "owner", "source": "appeal"}
            engine.trials.appeal(rule, "proc-1", reason="I work", **words)
            engine.trials.regret(
                "idle-held", "proc-1", "d-1", by="gpuwarden", role="engine", reason="it is back"
            )
            engine.trials.regret(
                "idle-held", "proc-1", "d-2", by="olga", role="operator", reason="a mistake"
            )
            told = await client.get(
                "/v1/audit?people=1", headers={"Authorization": f"Bearer {ROOT}"}
            )
            assert [
                (event["kind"], event["by"], event["reason"]) for event in told.json()["events"]
            ] == [
                ("regret", "olga", "a mistake"),
                ("appeal", "alice", "I work"),
                ("node_forgotten", "olga", "sold"),
            ]

    asyncio.run(story())
