"""The signed link in an owner's notice: to open it changes nothing, its form keeps the job."""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import logging
import re
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from tests.ruleengine.browsing import KEY, WEB, application
from tests.ruleengine.engines import World, running

from gpuwarden import logs
from gpuwarden.ruleengine.cases import Case, CaseState
from gpuwarden.ruleengine.links import LIFETIME_SECONDS, Links

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

URL = "http://engine:9837"
FORM = {"for": "30m", "reason": "a meeting"}
CASE = Case("idle-held", "proc-1", opened_at=1000.0, user="alice", run_id="r1", detected_at=1060.0)


@contextlib.asynccontextmanager
async def linked(servers: World) -> AsyncIterator[tuple[World, httpx.AsyncClient, str]]:
    """An engine whose owner was told, a stranger's browser, and the path that the owner got."""
    servers.web = WEB
    async with running(servers) as world:
        await world.until(CaseState.NOTIFIED)
        (message,) = {request.json()["text"] for request in world.slack.received}
        found = re.search(rf"say why: {URL}(/keep/\S+)", html.unescape(message))
        assert found is not None
        transport = httpx.ASGITransport(app=application(world).starlette())
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            yield world, client, found[1]


def test_the_notice_carries_a_link_that_needs_no_sign_in(servers: World) -> None:
    """It answers why, in the owner's zone, and offers what the rule allows."""

    async def story() -> None:
        async with linked(servers) as (_, client, path):
            page = await client.get(path)
            assert page.status_code == 200
            text = html.unescape(page.text)
            assert "This job breaks the rule idle-held" in text
            assert "Moves the end by up to 1h; 1 of 1 left for this run." in text
            assert "Times are in Europe/Berlin" in text
            assert "+01:00" in text
            # The address is a secret: it is not handed on, and nothing of others is shown.
            assert page.headers["referrer-policy"] == "no-referrer"
            assert page.headers["cache-control"] == "no-store"
            assert 'href="/audit"' not in text
            assert (await client.get("/jobs/proc-1")).status_code == 303

    asyncio.run(story())


def test_opening_the_link_keeps_nothing(servers: World) -> None:
    """A mail scanner opens every link, with GET and with HEAD, and often."""

    async def story() -> None:
        async with linked(servers) as (world, client, path):
            for _ in range(3):
                assert (await client.get(path)).status_code == 200
                assert (await client.head(path)).status_code == 200
                assert (await client.get(f"{path}?for=1h&reason=x&done=kept")).status_code == 200
            assert "kept" not in world.kinds()

    asyncio.run(story())


def test_the_links_form_keeps_the_job_once(servers: World) -> None:
    """Pressed twice it is the same keep; a minute later it counts, and is used up."""

    async def story() -> None:
        async with linked(servers) as (world, client, path):
            for _ in range(2):
                done = await client.post(path, data=FORM)
                assert (done.status_code, done.headers["location"]) == (303, f"{path}?done=kept")
            assert "The job is kept" in (await client.get(f"{path}?done=kept")).text
            (keep,) = world.engine.ledger.keeps("idle-held", "proc-1", None)
            assert (keep.by, keep.role, keep.seconds) == ("alice", "owner", 1800.0)
            world.clock.pass_(61)
            again = await client.post(path, data=FORM)
            assert (again.status_code, "kept 1 times already" in again.text) == (403, True)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"for": "2h"}, 403, "at most 1h"),
        ({"for": "30"}, 400, "for"),
        ({"reason": " "}, 400, "reason is not a text"),
    ],
)
def test_a_link_is_bound_by_the_rule(
    servers: World, changes: dict[str, str], status: int, words: str
) -> None:
    """The page says what is allowed."""

    async def story() -> None:
        async with linked(servers) as (world, client, path):
            answer = await client.post(path, data={**FORM, **changes})
            assert answer.status_code == status
            assert words in html.unescape(answer.text)
            assert "kept" not in world.kinds()

    asyncio.run(story())


def test_a_link_of_another_rule_job_run_or_owner_keeps_nothing(servers: World) -> None:
    """Whoever passes it on passes on no more than his own case."""

    async def story() -> None:
        async with linked(servers) as (world, client, _):
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            case, links = stored.case, Links(KEY, URL)
            for changed, statuses in (
                ({"user": "bob"}, (200, 409)),
                ({"run_id": "another"}, (200, 409)),
                ({"rule_id": "other"}, (200, 404)),
                ({"job_id": "proc-2"}, (404, 404)),
            ):
                values: dict[str, Any] = changed
                path = links.url(msgspec.structs.replace(case, **values), 0.0).removeprefix(URL)
                shown, posted = await client.get(path), await client.post(path, data=FORM)
                assert (shown.status_code, posted.status_code) == statuses, changed
            forged = Links(b"o" * 32, URL).url(case, 0.0).removeprefix(URL)
            assert (await client.get(forged)).status_code == 410
            assert (await client.post(forged, data=FORM)).status_code == 410
            assert "kept" not in world.kinds()

    asyncio.run(story())


def test_a_link_ends_a_week_after_the_announced_end(servers: World) -> None:
    """And says so."""

    async def story() -> None:
        async with linked(servers) as (world, client, path):
            world.clock.pass_(8 * 60 + LIFETIME_SECONDS)
            answer = await client.get(path)
            assert (answer.status_code, "This link has ended" in answer.text) == (410, True)

    asyncio.run(story())


def test_the_link_of_a_case_does_not_change_with_time() -> None:
    """A notice that changed at every tick would be another notice."""
    links = Links(KEY, URL)
    assert links.url(CASE, 480.0) == links.url(msgspec.structs.replace(CASE, elapsed=60.0), 480.0)
    claim = links.read(links.url(CASE, 480.0).rpartition("/")[2], now=1060.0)
    assert claim is not None
    assert (claim.rule_id, claim.job_id, claim.run_id, claim.user) == (
        "idle-held",
        "proc-1",
        "r1",
        "alice",
    )
    assert claim.until == 1060 + 480 + LIFETIME_SECONDS
    assert Links(None, URL).url(CASE, 480.0) == ""
    assert Links(None, URL).read("x", now=0.0) is None


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What the engine logs, set up as its command does it."""
    root, lines = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    logs.configure("debug", "json", lines)
    yield lines
    root.handlers[:], root.level = handlers, level


def test_no_log_line_holds_a_token_or_a_link(servers: World, logged: io.StringIO) -> None:
    """Refused and granted alike."""

    async def story() -> str:
        async with linked(servers) as (_, client, path):
            await client.get(path)
            await client.post(path, data=FORM)
            for token in ("a-wrong-token-that-is-long", "olgas-own-token-01"):
                await client.post("/sign-in", data={"token": token}, headers={"Origin": URL})
            await client.get("/v1/jobs", headers={"Authorization": "Bearer wrong-but-secret"})
            return path

    token = asyncio.run(story()).removeprefix("/keep/")
    text = logged.getvalue()
    assert "signed in" in text
    for secret in (token, "a-wrong-token", "olgas-own-token", "wrong-but-secret"):
        assert secret not in text
