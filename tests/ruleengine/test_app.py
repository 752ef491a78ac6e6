"""The engine's HTTP side: who may do what, and what is answered."""

from __future__ import annotations

import asyncio
import contextlib
import html
import subprocess
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.worlds import A100, Job
from tests.servers import binary

from gpuwarden import estimate_tables
from gpuwarden.catalogue import CATALOGUE
from gpuwarden.estimates import Expectation
from gpuwarden.ruleengine import tickets
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY = b"k" * 32
SINCE_START = (
    "gpuwarden_engine_ticks_total",
    "gpuwarden_unknown_total",
    "gpuwarden_verdicts_total",
    "gpuwarden_team_gpu_seconds_total",
)
NOTIFY = {"Authorization": "Bearer notify"}
OPERATOR = {"Authorization": "Bearer operator"}


@contextlib.asynccontextmanager
async def asked(servers: World, **changes: Any) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """A running engine and a client of its application."""
    async with running(servers) as world:
        options = {
            "notify_token": "notify",
            "operator_token": "operator",
            "ticket_key": KEY,
            **changes,
        }
        app = EngineApp(world.engine, world.hop, **options).starlette()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield world, client


def keep(**changes: str) -> dict[str, str]:
    """The body of a keep."""
    return {
        "job_id": "proc-1",
        "rule": "idle-held",
        "for": "30m",
        "reason": "a meeting",
        **changes,
    }


TICKET = tickets.issue(KEY, "idle-held", "proc-1")


def test_ready_says_why_not_and_healthy_only_that_it_lives(servers: World) -> None:
    """Before the first tick it is not ready; after it, it is."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            assert (await client.get("/-/healthy")).status_code == 200
            before = await client.get("/-/ready")
            assert before.status_code == 503
            assert "Prometheus" in before.text
            await world.tick()
            assert (await client.get("/-/ready")).status_code == 200

    asyncio.run(story())


def test_the_metrics_are_the_catalogues_and_please_promtool(servers: World) -> None:
    """Names, types and labels come from the catalogue; the linter has no complaint."""

    async def story() -> str:
        async with asked(servers) as (world, client):
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            await world.tick()
            page = await client.get("/metrics")
            assert page.status_code == 200
            return page.text

    text = asyncio.run(story())
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert families <= set(CATALOGUE)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "gpu_released_success_total 1.0" in lines
    (freed,) = [line for line in lines if line.startswith("gpu_memory_freed_bytes_total ")]
    assert float(freed.split()[1]) == 30 * 2**30
    assert any(
        line.startswith("gpuwarden_decisions_total")
        and 'action="terminate"' in line
        and 'outcome="verified"' in line
        for line in lines
    )
    checked = subprocess.run(
        [binary(("promtool",)), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert checked.returncode == 0, checked.stderr


def test_what_running_jobs_should_show_is_on_the_page(servers: World) -> None:
    """For graphs; of a job that declares nothing known there is no row."""
    names = {"run_id": "r1", "model": "yolov8n", "batch": "16", "imgsz": "640", "amp": "true"}

    async def story() -> str:
        (first,) = servers.fleet.jobs
        first.run = names
        unknown = names | {"run_id": "r2", "model": "my-net"}
        servers.fleet.jobs.append(Job("proc-2", uuid="GPU-2", run=unknown))
        async with asked(servers) as (world, client):
            await world.tick()
            return (await client.get("/metrics")).text

    rows = [
        line.split()
        for line in asyncio.run(story()).splitlines()
        if line.startswith("gpuwarden_expected_")
    ]
    formula = estimate_tables.expected("yolov8n", 16, imgsz=640, amp=True, hardware=A100)
    assert isinstance(formula, Expectation)
    assert {name: float(value) for name, value in rows} == {
        'gpuwarden_expected_throughput_images_per_second{job_id="proc-1"}': pytest.approx(
            formula.throughput.expected
        ),
        'gpuwarden_expected_gpu_memory_bytes{job_id="proc-1"}': pytest.approx(
            formula.gpu_memory.expected
        ),
    }


def test_no_counter_ever_falls(servers: World) -> None:
    """Over a refusal, a decision in flight, its result and a restart: `increase()` sees no reset.

    Ticks, verdicts and the teams' GPU time count from the engine's start.
    """
    highest: dict[str, float] = {}

    async def look(client: httpx.AsyncClient) -> None:
        page = (await client.get("/metrics")).text
        now = {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in page.splitlines())
            if "_total" in name and not name.startswith(("#", *SINCE_START))
        }
        assert {
            name: now.get(name, 0.0) for name in highest if now.get(name, 0.0) < highest[name]
        } == {}
        highest.update(now)

    async def story() -> None:
        servers.agent.refuse = (403, "kill_switch")
        servers.agent.finish = False
        async with asked(servers) as (world, client):
            while world.state() is not CaseState.ACTING:
                if world.state() is CaseState.REFUSED:
                    world.agent.refuse = None
                await world.tick()
                await look(client)
        servers.agent.finish = True
        async with asked(servers) as (world, client):
            await look(client)
            await world.settled()
            await look(client)
            world.fleet.jobs.clear()
            await world.tick(8)
            await look(client)
            assert world.state() is None

    asyncio.run(story())
    ends = {name: n for name, n in highest.items() if n and 'action="terminate"' in name}
    assert sorted(name.partition("outcome=")[2].split('"')[1] for name in ends) == [
        "refused",
        "verified",
    ]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic notify"}, 401),
        (OPERATOR, 401),
        (NOTIFY, 200),
    ],
)
def test_only_alertmanagers_token_opens_the_last_hop(
    servers: World, headers: dict[str, str], status: int
) -> None:
    """Also the operators' token does not."""

    async def story() -> int:
        async with asked(servers) as (_, client):
            answer = await client.post("/v1/notify/slack", json={"alerts": []}, headers=headers)
            return answer.status_code

    assert asyncio.run(story()) == status


def test_without_a_token_file_the_last_hop_is_closed(servers: World) -> None:
    """No token is not an open door."""

    async def story() -> int:
        async with asked(servers, notify_token=None) as (_, client):
            answer = await client.post("/v1/notify/slack", json={"alerts": []}, headers=NOTIFY)
            return answer.status_code

    assert asyncio.run(story()) == 403


@pytest.mark.parametrize(
    ("path", "content", "status", "error"),
    [
        ("/v1/notify/pigeon", b'{"alerts": []}', 404, "unknown_channel"),
        ("/v1/notify/slack?channel=%3C!here%3E", b'{"alerts": []}', 400, "bad_channel"),
        ("/v1/notify/slack", b"{", 400, "malformed"),
        ("/v1/notify/slack", b"[]", 400, "malformed"),
        ("/v1/notify/slack", b" " * (4 * 1024 * 1024 + 1), 413, "too_large"),
    ],
)
def test_a_wrong_message_is_refused_with_a_word(
    servers: World, path: str, content: bytes, status: int, error: str
) -> None:
    """The word is stable, the sentence is for people."""

    async def story() -> None:
        async with asked(servers) as (_, client):
            answer = await client.post(path, content=content, headers=NOTIFY)
            assert answer.status_code == status
            assert answer.json()["error"] == error

    asyncio.run(story())


def test_a_failed_delivery_makes_alertmanager_try_again(servers: World) -> None:
    """503 where a retry can help, 422 where only a person can."""
    alert = {
        "status": "firing",
        "labels": {"user": "alice", "level": "ended"},
        "annotations": {"summary": "s"},
        "startsAt": "2026-01-01T00:00:00Z",
        "fingerprint": "f",
    }

    async def story() -> list[int]:
        async with asked(servers) as (world, client):
            found = []
            for reply in (
                {"status": 500, "body": None},
                {"status": 200, "body": {"ok": False, "error": "user_not_found"}},
                {"status": 200, "body": None},
            ):
                world.slack_reply.update(reply)
                answer = await client.post(
                    "/v1/notify/slack", json={"alerts": [alert]}, headers=NOTIFY
                )
                found.append(answer.status_code)
            return found

    assert asyncio.run(story()) == [503, 422, 200]


def test_a_jobs_page_answers_why_and_why_not(servers: World) -> None:
    """JSON and page say the same; before the deadline, what is still missing."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            assert (await client.get("/v1/jobs/proc-9")).status_code == 404
            await world.until(CaseState.NOTIFIED)
            document = (await client.get("/v1/jobs/proc-1")).json()
            (rule,) = document["rules"]
            assert rule["verdict"] == "YES"
            assert {b["reason"] for b in rule["why_not"]} >= {"deadline", "notice_too_young"}
            assert rule["case"]["notices"][0]["proof"].startswith("slack ")
            page = await client.get("/jobs/proc-1")
            assert "It is not ended now" in page.text
            assert "default-src 'none'" in page.headers["Content-Security-Policy"]
            listed = (await client.get("/v1/jobs")).json()
            assert listed["jobs"][0]["cases"] == {"idle-held": "notified"}
            assert "proc-1" in (await client.get("/jobs")).text
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            document = (await client.get("/v1/jobs/proc-1")).json()
            (decision,) = document["decisions"]
            assert decision["report"]["proof"]["gone"] is True
            again = (await client.get(f"/v1/decisions/{decision['id']}")).json()
            assert again == decision
            ended = (await client.get("/jobs/proc-1")).text
            places = [ended.index(text) for text in ("was ended by", ">Decision <", "hours<")]
            assert places == sorted(places)  # why goes before how the job did
            assert (await client.get("/v1/decisions/none")).status_code == 404

    asyncio.run(story())


def test_a_refused_end_is_explained_and_can_still_be_put_off(servers: World) -> None:
    """While the agent says no the owner has time: the page says so, and a keep is taken."""
    servers.agent.refuse = (403, "kill_switch")

    async def story() -> None:
        async with asked(servers) as (world, client):
            while world.state() is not CaseState.REFUSED:
                await world.tick()
            page = html.unescape((await client.get("/jobs/proc-1")).text)
            assert "It is not ended now: the node's agent refused; tried again in" in page
            (decision,) = (await client.get("/v1/jobs/proc-1")).json()["decisions"]
            assert decision["state"] == "refused"
            kept = await client.post("/v1/keeps", json=keep(ticket=TICKET))
            assert kept.status_code == 201
            world.agent.refuse = None
            await world.tick(60)
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_a_job_that_cannot_be_judged_is_not_called_blameless(servers: World) -> None:
    """A dark node's job, and one that is gone, are named as what they are."""
    servers.fleet.nodes["127.0.0.2:9835"] = True
    servers.fleet.jobs[0].instance = "127.0.0.2:9835"

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.tick(8)
            world.fleet.nodes["127.0.0.2:9835"] = False
            await world.tick(50)
            assert "Nothing can be said of this job now" in (await client.get("/jobs/proc-1")).text
            world.fleet.jobs.clear()
            await world.tick()
            assert "is not seen any more" in (await client.get("/jobs/proc-1")).text

    asyncio.run(story())


def test_what_a_job_is_called_cannot_become_markup(servers: World) -> None:
    """The page escapes everything that comes from outside."""
    servers.fleet.jobs[0].job_id = "proc-<script>alert(1)<"
    servers.fleet.jobs[0].user = "<b>x</b>"

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.tick()
            listed = await client.get("/jobs")
            assert "<script>" not in listed.text
            assert "<b>x" not in listed.text
            page = await client.get("/jobs/proc-%3Cscript%3Ealert(1)%3C")
            assert page.status_code == 200
            assert "<script>" not in page.text

    asyncio.run(story())


def test_an_owner_keeps_with_the_ticket_as_often_as_the_rule_allows(servers: World) -> None:
    """Once here, at most an hour; then it is used up."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.until(CaseState.NOTIFIED)
            too_long = await client.post("/v1/keeps", json=keep(ticket=TICKET, **{"for": "2h"}))
            assert (too_long.status_code, too_long.json()["error"]) == (403, "too_long")
            first = await client.post("/v1/keeps", json=keep(ticket=TICKET))
            assert first.status_code == 201
            assert first.json()["role"] == "owner"
            second = await client.post("/v1/keeps", json=keep(ticket=TICKET))
            assert (second.status_code, second.json()["error"]) == (403, "used_up")
            assert world.kinds()[-1] == "kept"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("body", "headers", "status", "error"),
    [
        (keep(ticket="wrong"), {}, 403, "bad_ticket"),
        (keep(ticket=tickets.issue(KEY, "other", "proc-1")), {}, 403, "bad_ticket"),
        (keep(), {}, 401, "unauthorised"),
        (keep(), NOTIFY, 401, "unauthorised"),
        (keep(rule="other"), OPERATOR, 404, "no_case"),
        (keep(**{"for": "30"}), OPERATOR, 400, "malformed"),
        (keep(**{"for": "0s"}), OPERATOR, 400, "malformed"),
        (keep(reason=""), OPERATOR, 400, "malformed"),
        (keep(**{"for": "60d"}), OPERATOR, 403, "too_long"),
        (keep(**{"for": "3d"}), OPERATOR, 201, None),
    ],
)
def test_who_may_keep_and_how(
    servers: World, body: dict[str, str], headers: dict[str, str], status: int, error: str | None
) -> None:
    """Owners by ticket, operators by token; each refusal has its word."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.until(CaseState.NOTIFIED)
            answer = await client.post("/v1/keeps", json=body, headers=headers)
            assert answer.status_code == status
            assert answer.json().get("error") == error

    asyncio.run(story())


def test_a_job_that_is_being_ended_cannot_be_kept(servers: World) -> None:
    """The answer says that it is too late, instead of pretending."""
    servers.agent.finish = False

    async def story() -> None:
        async with asked(servers) as (world, client):
            while not world.agent.requests:
                await world.tick()
            answer = await client.post("/v1/keeps", json=keep(), headers=OPERATOR)
            assert (answer.status_code, answer.json()["error"]) == (409, "too_late")

    asyncio.run(story())


def test_a_ticket_is_of_one_rule_and_one_attempt() -> None:
    """And of one key; without a key there is none."""
    assert tickets.valid(KEY, "idle-held", "proc-1", TICKET)
    assert not tickets.valid(KEY, "idle-held", "proc-2", TICKET)
    assert not tickets.valid(KEY, "idle", "proc-1", TICKET)
    assert not tickets.valid(b"o" * 32, "idle-held", "proc-1", TICKET)
    assert not tickets.valid(None, "idle-held", "proc-1", "")
    assert tickets.issue(None, "idle-held", "proc-1") == ""


def test_the_landing_page_leads_to_what_there_is(servers: World) -> None:
    """Every path on it answers."""

    async def story() -> None:
        async with asked(servers) as (_, client):
            page = await client.get("/")
            assert page.status_code == 200
            for path in ("/jobs", "/metrics"):
                assert path in page.text
                assert (await client.get(path)).status_code == 200

    asyncio.run(story())


def test_a_grades_own_numbers_are_on_the_jobs_page(servers: World) -> None:
    """A stage with a condition of its own says what it saw, beside the rule."""
    text = (servers.folder / "rules.yaml").read_text()
    stage = "{level: moderate, after: 2m, do: notify,"
    worse = "when: {signal: gpu_memory_share, agg: min, window: 60s, above: 60%, gpus: any},"
    assert stage in text
    (servers.folder / "rules.yaml").write_text(text.replace(stage, f"{stage} {worse}"))

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.tick(8)
            (rule,) = (await client.get("/v1/jobs/proc-1")).json()["rules"]
            (grade,) = rule["grades"]
            assert (grade["stage"], grade["truth"]) == ("moderate-notify", "YES")
            page = (await client.get("/jobs/proc-1")).text
            assert "Stage moderate-notify" in page
            assert grade["evidence"][0]["measured"] in html.unescape(page)

    asyncio.run(story())


def test_a_shared_card_counts_once_and_cards_elsewhere_name_their_node(servers: World) -> None:
    """On the landing page two jobs on one card hold one; a job's page says which card is where."""
    far = "gpu02.example.org:9835"
    servers.fleet.nodes[far] = True
    servers.fleet.jobs += [
        Job("proc-2", uuid="GPU-1"),
        Job("wide", uuid="GPU-3"),
        Job("wide", uuid="GPU-4", instance=far),
    ]

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.tick()
            assert "<b>3</b> GPUs held by them" in (await client.get("/")).text
            job = (await client.get("/v1/jobs/wide")).json()["job"]
            assert sorted(job["gpus"]) == ["0", f"{far} GPU 0"]

    asyncio.run(story())


def test_rules_that_a_job_breaks_come_first_on_its_page(servers: World) -> None:
    """Whatever their order in the file."""
    text = (servers.folder / "rules.yaml").read_text()
    head, rule = text.split("- id: idle-held", 1)
    calm = rule.replace("at_most: 5%", "above: 99%")
    (servers.folder / "rules.yaml").write_text(f"{head}- id: calm{calm}\n- id: idle-held{rule}")

    async def story() -> None:
        async with asked(servers) as (world, client):
            await world.tick(2)
            rules = (await client.get("/v1/jobs/proc-1")).json()["rules"]
            assert [rule["rule"] for rule in rules] == ["idle-held", "calm"]

    asyncio.run(story())
