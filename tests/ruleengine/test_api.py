"""The API and its description: every route is described, and answers as described."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from tests.ruleengine.browsing import (
    ALICE,
    OLGA,
    ROOT,
    WEB,
    WHITELIST,
    Series,
    application,
    populate,
)
from tests.ruleengine.engines import World, running

from gpuwarden.ruleengine import explain
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gpuwarden.ruleengine.app import EngineApp

ADMIN = {"Authorization": f"Bearer {ROOT}"}


@contextlib.asynccontextmanager
async def asked(
    servers: World, series: Series | None = None, jobs: int = 8
) -> AsyncIterator[tuple[World, httpx.AsyncClient, EngineApp]]:
    """A fleet's engine, an admin's client, and the application itself."""
    servers.web = WEB
    servers.rules(whitelist=WHITELIST)
    populate(servers, jobs)
    async with running(servers) as world:
        app = application(world, series)
        transport = httpx.ASGITransport(app=app.starlette())
        async with httpx.AsyncClient(
            transport=transport, base_url="http://engine:9837", headers=ADMIN
        ) as client:
            yield world, client, app


def check(description: dict[str, Any], path: str, method: str, answer: httpx.Response) -> None:
    """Hold an answer against its description."""
    responses = description["paths"][path][method]["responses"]
    assert str(answer.status_code) in responses, (path, answer.status_code, answer.text)
    content = responses[str(answer.status_code)].get("content")
    if content is None:
        return
    schema = content["application/json"]["schema"]
    whole = {**schema, "components": description["components"]}
    jsonschema.Draft202012Validator(whole).validate(answer.json())


def test_every_route_is_described_and_every_description_is_a_route(servers: World) -> None:
    """The description is valid OpenAPI 3.1, and made from what is served."""

    async def story() -> None:
        async with asked(servers) as (_, client, app):
            description = (await client.get("/v1/openapi.json")).json()
            OpenAPIV31SpecValidator(description).validate()
            described = {
                (method.upper(), path)
                for path, methods in description["paths"].items()
                for method in methods
            }
            served = {
                (method, getattr(route, "path", ""))
                for route in app.starlette().routes
                for method in getattr(route, "methods", ()) or ()
                if method != "HEAD" and getattr(route, "path", "").startswith("/v1/")
            }
            assert described == served
            names = [
                operation["operationId"]
                for methods in description["paths"].values()
                for operation in methods.values()
            ]
            assert len(names) == len(set(names))

    asyncio.run(story())


def test_every_documented_answer_has_the_documented_shape(servers: World) -> None:
    """Before the first tick, with open cases, and after a job was ended."""

    async def story() -> None:
        async with asked(servers) as (world, client, _):
            description = (await client.get("/v1/openapi.json")).json()
            seen: set[tuple[str, str, int]] = set()

            async def ask(method: str, path: str, body: object = None, **values: str) -> None:
                answer = await client.request(method, path.format(**values), json=body)
                check(description, path, method.lower(), answer)
                seen.add((method, path, answer.status_code))

            async def read() -> None:
                for path in (
                    *(
                        "/v1/jobs",
                        "/v1/fleet",
                        "/v1/cards",
                        "/v1/decisions",
                        "/v1/rules",
                        "/v1/protections",
                        "/v1/health",
                    ),
                    *("/v1/audit", "/v1/enforcement", "/v1/nodes", "/v1/sd/prometheus"),
                    *("/v1/trials", "/v1/drills", "/v1/shares", "/v1/names", "/v1/budgets"),
                    "/v1/leaves",
                ):
                    await ask("GET", path)
                for path in ("/v1/jobs/{job_id}", "/v1/jobs/{job_id}/history"):
                    await ask("GET", path, job_id="proc-1")
                    await ask("GET", path, job_id="none")
                await ask("GET", "/v1/matches/{word}", word="proc")

            await read()
            await world.until(CaseState.NOTIFIED)
            await read()
            keep = {"job_id": "proc-1", "rule": "idle-held", "for": "1m", "reason": "a meeting"}
            await ask("POST", "/v1/keeps", keep)
            await ask("POST", "/v1/keeps", {**keep, "for": "1"})
            await ask("POST", "/v1/keeps", {**keep, "job_id": "none"})
            await ask("POST", "/v1/appeals", keep)
            await ask("POST", "/v1/appeals", {**keep, "job_id": "none"})
            await ask("POST", "/v1/enforcement/pause", {"reason": "an upgrade", "for": "1m"})
            await read()
            await ask("POST", "/v1/enforcement/resume", {"reason": "done"})
            await ask("POST", "/v1/enforcement/resume", {"reason": "done"})
            for path in ("/v1/nodes", "/v1/nodes/leave", "/v1/nodes/forget"):
                await ask("POST", path, {"address": "node7:9835"})
            await ask("POST", "/v1/notify/{channels}", {"alerts": []}, channels="slack")
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            await read()
            (decision,) = (await client.get("/v1/decisions")).json()["decisions"]
            await ask("GET", "/v1/decisions/{decision_id}", decision_id=decision["id"])
            await ask("GET", "/v1/decisions/{decision_id}", decision_id="none")
            for number in (decision["id"], "none"):
                await ask("GET", "/v1/decisions/{decision_id}/audit", decision_id=number)
            regret = {"decision_id": decision["id"], "reason": "it was at work"}
            await ask("POST", "/v1/drills", {"node": "127.0.0.1", "reason": "a try"})
            await ask("GET", "/v1/drills/{drill_id}", drill_id="1")
            await ask("POST", "/v1/regrets", regret)
            await ask("POST", "/v1/regrets", {**regret, "decision_id": "none"})
            await ask("POST", "/v1/leaves", {})
            for method in ("GET", "DELETE"):
                await ask(method, "/v1/leaves/{leave_id}", leave_id="none")
            await ask("POST", "/v1/names/open", {"reason": "who is it?"})
            await ask("POST", "/v1/names/close")
            await ask("GET", "/v1/openapi.json")
            described = {
                (method.upper(), path)
                for path, methods in description["paths"].items()
                for method in methods
            }
            assert described == {(method, path) for method, path, _ in seen}

    asyncio.run(story())


def test_jobs_are_filtered_and_those_in_trouble_come_first(servers: World) -> None:
    """By user and node in part, by team and rule exactly; a page at a time."""

    async def story() -> None:
        async with asked(servers, jobs=24) as (world, client, _):
            await world.until(CaseState.NOTIFIED)

            async def ids(query: str) -> list[str]:
                document = (await client.get(f"/v1/jobs?{query}")).json()
                assert document["total"] >= len(document["jobs"])
                return [job["job_id"] for job in document["jobs"]]

            everything = await ids("")
            assert len(everything) == 24
            broken = await ids("broken=true")
            assert everything[: len(broken)] == broken
            assert set(broken) == set(await ids("rule=idle-held"))
            assert await ids("rule=other") == []
            assert await ids("offset=5&limit=3") == everything[5:8]
            assert await ids("offset=100") == []
            alices = await ids("user=ALI")
            assert set(alices) == set(await ids("team=vision"))
            assert "proc-1" in alices
            assert set(await ids("node=gpu02")) < set(everything)
            assert (await client.get("/v1/jobs?limit=x")).status_code == 400

    asyncio.run(story())


def test_cards_tell_who_holds_them_and_which_are_free(servers: World) -> None:
    """An owner learns that a card is taken, and not by whom."""

    async def story() -> None:
        async with asked(servers) as (world, client, _):
            await world.tick()
            world.fleet.jobs.pop()
            free = world.fleet.jobs.pop()
            world.fleet.spare_cards.append((free.instance, free.uuid, "NVIDIA L4"))
            await world.tick()
            document = (await client.get("/v1/cards")).json()
            assert (document["all"], document["free"]) == (7, 1)
            (card,) = (await client.get("/v1/cards?free=true")).json()["cards"]
            assert (card["uuid"], card["holders"], card["jobs"]) == (free.uuid, 0, [])
            nodes = [card["node"] for card in document["cards"]]
            assert nodes == sorted(nodes)
            alice = {"Authorization": f"Bearer {ALICE}"}
            owners = (await client.get("/v1/cards", headers=alice)).json()["cards"]
            assert {job["user"] for card in owners for job in card["jobs"]} == {"alice"}
            assert sum(card["holders"] for card in owners) == 6
            anonymous = await client.get("/v1/cards?free=1", headers={"Authorization": ""})
            assert anonymous.status_code == 401
            page = await client.get("/cards?free=1&model=l4")
            assert page.text.count(">free<") == 1
            # A card that is cut into instances is not one of its own.
            world.fleet.spare_cards.append((free.instance, "MIG-1", "NVIDIA L4 MIG 1g.5gb"))
            await world.tick()
            (part,) = (await client.get("/v1/cards?free=true")).json()["cards"]
            assert part["uuid"] == "MIG-1"

    asyncio.run(story())


def test_a_card_that_breaks_a_rule_is_told_of_as_a_card(servers: World) -> None:
    """By its UUID, with the rule's verdict; owners are not shown it."""
    rule = (
        "- id: full-card\n  target: gpu\n  mode: warn\n  cold_start: 0s\n  for: 30s\n"
        "  clear_after: 30s\n"
        "  when: {signal: card_memory_share, agg: min, window: 60s, above: 10%}\n"
        "  stages: [{level: light, after: 0s, do: log}]\n"
    )

    async def story() -> None:
        async with asked(servers) as (world, client, _):
            path = world.folder / "rules.yaml"
            path.write_text(path.read_text().replace("whitelist:", f"{rule}whitelist:"))
            await world.tick(8)
            card = world.fleet.jobs[0].uuid
            document = (await client.get(f"/v1/jobs/{card}")).json()
            assert (document["target"], document["running"]) == ("gpu", True)
            page = (await client.get(f"/jobs/{card}")).text
            assert f"<h1>Card <code>{card}</code></h1>" in page
            assert "This card breaks the rule full-card, and rules on cards only tell." in page
            assert "This job" not in page
            world.fleet.spare_cards.append(("127.0.0.1:9835", other := "GPU-spare", "NVIDIA L4"))
            await world.tick()
            assert "This card breaks no rule." in (await client.get(f"/jobs/{other}")).text
            alice = {"Authorization": f"Bearer {ALICE}"}
            assert (await client.get(f"/jobs/{card}", headers=alice)).status_code == 404
            gone = explain.answer({**document, "rules": [], "running": False})
            assert gone == "This card is not seen any more."
            world.fleet.jobs.clear()
            await world.tick()
            assert "No running job is seen." in (await client.get("/")).text

    asyncio.run(story())


def test_a_path_that_is_not_there_is_a_page_for_people_and_json_for_programs(
    servers: World,
) -> None:
    """Also one that takes another method."""

    async def story() -> None:
        async with asked(servers) as (_, client, _app):
            for path in ("/v1/nothing", "/v1/keeps"):
                answer = await client.get(path)
                assert (
                    answer.json()["error"] == {404: "not_found", 405: "method"}[answer.status_code]
                )
            page = await client.get("/nothing")
            assert (page.status_code, "<h1>Not found</h1>" in page.text) == (404, True)
            assert "default-src 'none'" in page.headers["Content-Security-Policy"]
            job = await client.get("/jobs/proc-none")
            assert (job.status_code, "No job of this name is known" in job.text) == (404, True)

    asyncio.run(story())


def test_the_audit_is_told_in_pages_and_by_person(servers: World) -> None:
    """Newest first; what people changed has who and why."""

    async def story() -> None:
        async with asked(servers) as (world, client, _):
            await world.until(CaseState.NOTIFIED)
            await client.post("/v1/enforcement/pause", json={"reason": "an upgrade"})
            everything = (await client.get("/v1/audit?limit=500")).json()["events"]
            found: list[Any] = []
            before = ""
            while before is not None:
                page = (await client.get(f"/v1/audit?limit=2&before={before}")).json()
                found += page["events"]
                before = page["before"]
            assert found == everything
            assert [event["id"] for event in found] == sorted(
                (event["id"] for event in found), reverse=True
            )
            (event,) = (await client.get("/v1/audit?people=true")).json()["events"]
            assert (event["kind"], event["by"], event["reason"]) == ("paused", "root", "an upgrade")

    asyncio.run(story())


def test_keeps_and_whitelist_tell_until_when_why_and_by_whom(servers: World) -> None:
    """A keep that is over is not listed; an entry that expired is, as such."""

    async def story() -> None:
        async with asked(servers) as (world, client, _):
            await world.until(CaseState.NOTIFIED)
            body = {"job_id": "proc-1", "rule": "idle-held", "for": "30m", "reason": "a meeting"}
            await client.post("/v1/keeps", json=body, headers={"Authorization": f"Bearer {OLGA}"})
            document = (await client.get("/v1/protections")).json()
            (keep,) = document["keeps"]
            assert (keep["by"], keep["reason"], keep["user"]) == ("olga", "a meeting", "alice")
            assert [entry["expired"] for entry in document["whitelist"]] == [False, True]
            world.clock.pass_(3600)
            assert (await client.get("/v1/protections")).json()["keeps"] == []

    asyncio.run(story())


def test_an_owner_is_not_told_who_else_is_spared(servers: World) -> None:
    """Neither by the list nor in the words of a rule."""

    async def story() -> tuple[str, str]:
        async with asked(servers) as (_, client, _app):
            alice = {"Authorization": f"Bearer {ALICE}"}
            texts = []
            for headers in (ADMIN, alice):
                answers = [
                    await client.get(path, headers=headers)
                    for path in ("/v1/rules", "/v1/protections")
                ]
                texts.append("".join(answer.text for answer in answers))
            return texts[0], texts[1]

    admins, owners = asyncio.run(story())
    assert admins.count("nightly regression runs") == 2
    assert "nightly regression runs" not in owners


@pytest.mark.parametrize(
    "path", ["decisions?before=yesterday", "decisions?before=2027-01-01T00:00:00"]
)
def test_a_time_without_an_offset_is_refused(servers: World, path: str) -> None:
    """It would mean another moment in each place."""

    async def story() -> int:
        async with asked(servers) as (_, client, _app):
            return (await client.get(f"/v1/{path}")).status_code

    assert asyncio.run(story()) == 400


def test_a_jobs_history_is_that_of_the_job_beside_what_it_should_do(servers: World) -> None:
    """Whatever the job is called, the query is about it; it is not asked for at every look."""
    servers.fleet.jobs[0].job_id = 'proc-"} or vector(1) #'
    series = Series()

    async def story() -> None:
        async with asked(servers, series) as (world, client, _):
            await world.tick()
            path = "/v1/jobs/proc-%22%7D%20or%20vector(1)%20%23/history"
            first = (await client.get(path)).json()
            assert all('job_id="proc-\\"} or vector(1) #"' in query for query in series.queries)
            charts = {chart["signal"]: chart for chart in first["charts"]}
            assert set(charts) == {"gpu_utilization", "gpu_memory", "throughput"}
            assert charts["gpu_utilization"]["expected"] is None
            memory = charts["gpu_memory"]["expected"]
            assert 10 * 2**30 < memory["low"] < memory["high"] < 40 * 2**30
            span = dt.datetime.fromisoformat(first["end"]) - dt.datetime.fromisoformat(
                first["start"]
            )
            assert span == dt.timedelta(hours=6)
            count = len(series.queries)
            assert (await client.get(path)).json() == first
            assert len(series.queries) == count
            world.clock.pass_(16)
            await client.get(path)
            assert len(series.queries) == 2 * count

    asyncio.run(story())


def test_a_prometheus_without_an_answer_costs_the_charts_only(servers: World) -> None:
    """The page says why there are none."""

    async def story() -> None:
        async with asked(servers, Series(answers=False)) as (world, client, _):
            await world.until(CaseState.NOTIFIED)
            document = (await client.get("/v1/jobs/proc-1/history")).json()
            assert (document["charts"], document["problem"]) == (
                [],
                "Prometheus has no history of this job.",
            )
            page = await client.get("/jobs/proc-1", headers=ADMIN)
            assert "Prometheus has no history of this job." in page.text
            assert "This job breaks the rule" in page.text

    asyncio.run(story())
