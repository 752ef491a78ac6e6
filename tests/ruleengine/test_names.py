"""Names are hidden from whoever is not of the team: every page and answer is looked through."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
import pytest
from click.testing import CliRunner
from tests.ruleengine.browsing import KEY, Series
from tests.ruleengine.engines import World, running, serving
from tests.ruleengine.leaves import a_leave
from tests.ruleengine.test_sign_ins import OWN, bearer, form, sign_in
from tests.ruleengine.worlds import GIB, Job, webhook
from tests.servers import free_port

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.channels import SlackChannel
from gpuwarden.ruleengine.deliveries import LastHop
from gpuwarden.ruleengine.name_cli import names as command
from gpuwarden.ruleengine.names import Names, own_words
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.settings import SlackSettings
from gpuwarden.ruleengine.sign_ins import Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DIRECTORY = """
version: 1
operators: {slack: "#gpu-ops"}
users:
  zebulon: {slack: U0ZEBULON, email: zebulon.z@example.org, team: speech}
  yolanda: {slack: U0YOLANDA, team: speech, sees_team: true}
  xaver: {slack: U0XAVER01, team: vision}
"""
TRACES = ("zebulon", "u0zebulon")
"""Of the one whose jobs break rules, in small letters."""
SECRETS = {name: f"{name}s-own-token-001" for name in ("zebulon", "yolanda", "xaver", "olga")}
TOKENS = tuple(
    Token(name, Role.OPERATOR if name == "olga" else Role.OWNER, secret)
    for name, secret in SECRETS.items()
)
WEB = "web:\n  tokens: []\n  read: signed-in\n"
SKIPPED = ("/metrics", "/style.css", "/v1/sd/prometheus")
"""Open to Prometheus and to browsers; of /metrics see below."""


@contextlib.asynccontextmanager
async def lived(
    servers: World, web: str = "", **more: str
) -> AsyncIterator[tuple[World, EngineApp]]:
    """An engine that has ended a job of zebulon's, is about to end another, and was paused."""
    servers.web = WEB + web
    (servers.folder / "directory.yaml").write_text(DIRECTORY)
    jobs = servers.fleet.jobs
    jobs[0].user, jobs[0].run = "zebulon", {"run_id": "Zebulon_yolo-1", "model": "yolov8m"}
    old = {"cpu": 1_799_990_000.0}
    jobs.append(Job("proc-2", "zebulon", "GPU-2", memory=31 * GIB, activity=dict(old)))
    jobs.append(Job("proc-3", "xaver", "GPU-3", utilization=0.8, memory=31 * GIB))
    jobs.append(Job("proc-4", "yolanda", "GPU-4", utilization=0.8, memory=31 * GIB))
    async with running(servers) as world:
        await world.until(CaseState.NOTIFIED)
        stored, rule = world.engine.cases.get("idle-held", "proc-2"), world.engine.rulebook.rules
        assert stored is not None
        world.engine.keep(
            stored, rule.rules[0], role="owner", by="zebulon", reason="for Zebulon", seconds=9e3
        )
        await world.until(CaseState.VERIFIED)
        world.engine.pauses.begin(by="olga", role="operator", reason="zebulon asked", seconds=None)
        await world.tick()
        now = world.clock.wall()
        made = a_leave(
            now, job_id="proc-2", user="zebulon", run_id="Zebulon_yolo-2", reason="zebulon said so"
        )
        world.engine.leaves.store.add(made, [], time=now)
        app = EngineApp(
            world.engine,
            world.hop,
            notify_token=None,
            operator_token=None,
            ticket_key=KEY,
            tokens=TOKENS,
            series=Series(),
            session_key=b"s" * 32,
            **more,
        )
        yield world, app


@contextlib.asynccontextmanager
async def browser(app: EngineApp, name: str) -> AsyncIterator[httpx.AsyncClient]:
    """A browser in which somebody has signed in."""
    transport = httpx.ASGITransport(app=app.starlette())
    async with httpx.AsyncClient(transport=transport, base_url="http://engine:9837") as client:
        assert (await sign_in(client, SECRETS[name])).status_code == 303
        yield client


def paths(world: World, app: EngineApp) -> set[str]:
    """Every path that can be read, with everything that a parameter could be."""
    (decision,) = world.engine.ledger.job_decisions("proc-1")
    values = {
        "job_id": ["proc-1", "proc-2", "proc-3", "GPU-2", "none"],
        "decision_id": [decision.id, "none"],
        "word": ["proc", "zebulon", "Zebulon_yolo"],
        "drill_id": ["1"],
        "leave_id": ["leave-1", "none"],
        "token": ["x"],
    }
    found = set()
    for route in app.starlette().routes:
        path = getattr(route, "path", "")
        if path in SKIPPED or "GET" not in (getattr(route, "methods", None) or ()):
            continue
        names = re.findall(r"\{(\w+)", path)
        for value in values[names[0]] if names else [""]:
            found.add(re.sub(r"\{[^}]+\}", quote(value, safe=""), path))
    return found


async def looked_through(
    client: httpx.AsyncClient, known: set[str], words: tuple[str, ...], token: str
) -> tuple[list[str], int]:
    """Where one of the words stands, over all that is known or linked; and how much was read."""
    left, seen, found = set(known), set(), []
    while left:
        path = left.pop()
        seen.add(path)
        headers = bearer(token) if path.startswith("/v1/") else {}
        answer = await client.get(path, headers=headers)
        asked = path.lower()
        text = (answer.text + " ".join(answer.headers.values())).lower().replace(asked, "")
        found += [f"{path}: {word}" for word in words if word in text]
        links = re.findall(r'(?:href|action)="(/[^"#]*)"', answer.text)
        fresh = {link.replace("&amp;", "&") for link in links} - seen
        left |= {link for link in fresh if link.split("?")[0] not in SKIPPED}
        assert len(seen) < 400
    return found, len(seen)


async def leaks(world: World, app: EngineApp, name: str) -> list[str]:
    """Where somebody reads of zebulon."""
    async with browser(app, name) as client:
        found, count = await looked_through(client, paths(world, app), TRACES, SECRETS[name])
    assert count > 25
    return found


def test_an_owner_of_another_team_finds_the_name_nowhere(servers: World) -> None:
    """On no page, in no answer and in no header: neither name nor address nor name of a run."""

    async def story() -> None:
        async with lived(servers) as (world, app):
            assert await leaks(world, app, "xaver") == []
            assert await leaks(world, app, "zebulon") != []

    asyncio.run(story())


def test_who_is_of_the_team_reads_the_name(servers: World) -> None:
    """Where they may see the job at all, and on the page of who uses what."""

    async def story() -> None:
        async with lived(servers) as (world, app):
            found = await leaks(world, app, "yolanda")
            assert {"/shares: zebulon", "/jobs: zebulon", "/v1/shares: zebulon"} <= set(found)

    asyncio.run(story())


def test_nobodys_name_is_read_where_the_operator_says_so(servers: World) -> None:
    """Not by the team either, which sees the jobs all the same; nor is a team told."""

    async def story() -> None:
        async with lived(servers, "  names: nobody\n") as (world, app):
            assert await leaks(world, app, "yolanda") == []
            async with browser(app, "xaver") as client:
                document = (await client.get("/v1/shares", headers=bearer(SECRETS["xaver"]))).json()
            teams = {row["user"]: row["team"] for row in document["users"]}
            assert teams.pop("xaver") == "vision"
            assert set(teams.values()) == {""}

    asyncio.run(story())


def test_everyone_reads_names_where_the_operator_says_so(servers: World) -> None:
    """On the page of who uses what; others' jobs stay theirs."""

    async def story() -> None:
        async with lived(servers, "  names: everyone\n") as (world, app):
            found = await leaks(world, app, "xaver")
            assert "/shares: zebulon" in found
            async with browser(app, "xaver") as client:
                assert (await client.get("/jobs/proc-2")).status_code == 404

    asyncio.run(story())


def test_a_pseudonym_is_the_same_everywhere_and_for_ever(servers: World) -> None:
    """In pages and API, for all readers, after a restart; and another engine has others."""

    async def story() -> None:
        async with lived(servers) as (world, app):
            async with browser(app, "xaver") as client:
                answer = await client.get("/v1/shares", headers=bearer(SECRETS["xaver"]))
                page = (await client.get("/shares")).text
            users = {row["user"]: row for row in answer.json()["users"]}
            (alias,) = [
                name for name, row in users.items() if row["cards"] == 2 and row["team"] == "speech"
            ]
            assert re.fullmatch(r"user-[a-z2-7]{6}", alias)
            assert alias in page
            assert users["xaver"]["yours"]
            for key, same in ((KEY, True), (b"o" * 32, False)):
                again = EngineApp(
                    world.engine,
                    world.hop,
                    notify_token=None,
                    operator_token=None,
                    ticket_key=key,
                    tokens=TOKENS,
                )
                async with browser(again, "xaver") as client:
                    assert (alias in (await client.get("/shares")).text) is same

    asyncio.run(story())


OPENED = "  operator_names: opened\n"


def test_an_operator_reads_names_only_while_they_are_open(servers: World) -> None:
    """With a reason that is in the audit, in this session alone, and for a while."""

    async def story() -> None:
        async with lived(servers, OPENED) as (world, app):
            assert await leaks(world, app, "olga") == []
            async with browser(app, "olga") as client, browser(app, "olga") as other:
                fields = {"form": await form(client, "/names"), "for": "30m"}
                refused = await client.post("/names/open", data=fields, headers=OWN)
                assert refused.status_code == 400
                opened = await client.post(
                    "/names/open", data={**fields, "reason": "who is it?"}, headers=OWN
                )
                assert opened.status_code == 303
                assert "zebulon" in (await client.get("/jobs")).text
                assert "zebulon" not in (await other.get("/jobs")).text
                api = await client.get("/v1/jobs", headers=bearer(SECRETS["olga"]))
                assert "zebulon" not in api.text
                audit = (await client.get("/audit?people=1")).text
                assert "names opened" in audit
                assert "who is it?" in audit
                world.clock.pass_(1800)
                assert "zebulon" not in (await client.get("/jobs")).text

    asyncio.run(story())


def test_names_are_closed_before_their_time_and_never_open_for_long(servers: World) -> None:
    """By whoever opened them; over eight hours are refused."""

    async def story() -> None:
        async with lived(servers, OPENED) as (_, app):
            transport = httpx.ASGITransport(app=app.starlette())
            async with httpx.AsyncClient(
                transport=transport,
                base_url="http://engine:9837",
                headers=bearer(SECRETS["olga"]),
            ) as client:
                for body, status in (
                    ({"reason": "x", "for": "9h"}, 400),
                    ({"for": "1h"}, 400),
                    ({"reason": "x"}, 201),
                ):
                    answer = await client.post("/v1/names/open", json=body)
                    assert answer.status_code == status, answer.text
                assert "zebulon" in (await client.get("/v1/jobs")).text
                assert (await client.post("/v1/names/close")).json()["hidden"] is True
                assert "zebulon" not in (await client.get("/v1/jobs")).text
                as_owner = bearer(SECRETS["xaver"])
                refused = await client.post("/v1/names/open", json=body, headers=as_owner)
                assert refused.status_code == 403

    asyncio.run(story())


def test_a_filter_does_not_tell_who_a_pseudonym_is(servers: World) -> None:
    """It looks for what is read, not for what is hidden."""

    async def story() -> None:
        async with lived(servers, OPENED) as (_, app), browser(app, "olga") as client:
            headers = bearer(SECRETS["olga"])
            everybody = (await client.get("/v1/jobs", headers=headers)).json()["jobs"]
            alias = next(job["user"] for job in everybody if job["job_id"] == "proc-2")
            for word, count in (("zebulon", 0), (alias, 2)):
                found = (await client.get(f"/v1/jobs?user={word}", headers=headers)).json()
                assert found["total"] == count
                page = (await client.get(f"/jobs?user={word}")).text
                assert ("proc-2" in page) is bool(count)

    asyncio.run(story())


@pytest.mark.parametrize(("header", "status"), [({}, 401), (bearer("m" * 20), 200)])
def test_metrics_can_be_for_prometheus_alone(servers: World, header: dict, status: int) -> None:
    """They name users: with a token of its own nobody else reads them."""

    async def story() -> None:
        async with lived(servers, metrics_token="m" * 20) as (_, app):
            transport = httpx.ASGITransport(app=app.starlette())
            async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
                assert (await client.get("/metrics", headers=header)).status_code == status

    asyncio.run(story())


def test_the_commands_tell_and_open(servers: World, tmp_path: Path) -> None:
    """Against a served engine: who uses what, hidden, open, hidden again."""
    token = tmp_path / "token"
    token.write_text(SECRETS["olga"])

    async def story() -> list[str]:
        port = free_port()
        async with lived(servers, OPENED) as (_, app), serving(app, port):
            common = ["--token-file", str(token), "--engine.url", f"http://127.0.0.1:{port}"]
            said = []
            for words in (
                ["shares"],
                ["open", "--reason", "x", "--for", "1m"],
                ["shares"],
                ["close"],
                ["show"],
            ):
                done = await asyncio.to_thread(CliRunner().invoke, command, [*words, *common])
                assert done.exit_code == 0, done.output
                said.append(done.output)
            return said

    before, opened, after, closed, shown = asyncio.run(story())
    assert "zebulon" not in before
    assert "Names are open to you until " in opened
    assert "zebulon  speech  2" in re.sub(" +", "  ", after)
    assert (
        closed
        == shown
        == ("Names are hidden from you; `gpuwarden names open --reason WHY` opens them.\n")
    )


CHANNELS = (
    DIRECTORY
    + """
teams:
  speech: {contact: {slack: "#speech-lead"}, channels: ["#speech-gpu"]}
  vision: {channels: ["#vision-gpu"]}
"""
)


@pytest.mark.parametrize(
    ("channel", "named"),
    [("#speech-gpu", True), ("#speech-lead", True), ("#vision-gpu", False), ("#general", False)],
)
def test_a_channel_names_the_people_of_the_team_whose_own_it_is(
    servers: World, channel: str, named: bool
) -> None:
    """Elsewhere a pseudonym stands for the owner, the one that pages have."""

    async def story() -> None:
        async with lived(servers) as (world, _):
            (servers.folder / "directory.yaml").write_text(CHANNELS)
            await world.tick()
            names = Names(world.engine, KEY, identified=True)
            settings = SlackSettings(url=world.slack.url, token_file="t")
            slack = SlackChannel(settings, "xoxb-test", clock=world.clock)
            hop = LastHop(
                world.engine.ledger,
                {"slack": slack},
                directory=lambda: world.engine.rulebook.directory,
                clock=world.clock,
                names=names,
            )
            alert = {
                "labels": {"alertname": "A", "user": "zebulon", "level": "severe", "job_id": "j"},
                "annotations": {"summary": "Job j of Zebulon", "description": "zebulon's run"},
                "startsAt": "2026-01-01T00:00:00Z",
            }
            try:
                await hop.receive(webhook([alert]), ["slack"], channel_target=channel)
            finally:
                await slack.aclose()
            text = world.slack.received[-1].body.decode().lower()
            assert ("zebulon" in text) is named
            assert (names.alias("zebulon") in text) is not named

    asyncio.run(story())


def test_a_user_who_is_called_like_a_word_spoils_no_page(servers: World) -> None:
    """Their name is hidden where a field names them; texts keep the word, which tells nothing."""
    servers.fleet.jobs.append(Job("proc-9", "gpu", "GPU-9", utilization=0.8, memory=31 * GIB))

    async def story() -> None:
        async with lived(servers) as (_, app), browser(app, "xaver") as client:
            document = (await client.get("/v1/shares", headers=bearer(SECRETS["xaver"]))).json()
            assert "gpu" not in {row["user"] for row in document["users"]}
            rules = (await client.get("/v1/rules", headers=bearer(SECRETS["xaver"]))).json()
            assert "gpu_utilization" in rules["rules"][0]["text"]
            assert "user-" not in rules["rules"][0]["text"]

    asyncio.run(story())


def test_names_of_people_are_no_words_of_ours() -> None:
    """Else they would stay in texts."""
    people = "alice bob carol ana ben cho dmitri eve lin maria olga wei jun müller singh kim"
    assert own_words().isdisjoint(people.split())
