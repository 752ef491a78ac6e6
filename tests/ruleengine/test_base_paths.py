"""The pages below a path of another host, by proxies that take it off and that leave it there."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from tests.ruleengine.browsing import ROOT, WEB, application, populate
from tests.ruleengine.engines import World, running
from tests.ruleengine.schedules import scheduler, schedules

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ORIGIN = "https://apps.example.org"
BASE = "/tools/gpuwarden"
OWN = {"Sec-Fetch-Site": "same-origin"}
TARGET = re.compile(r'\s(href|action|src)="([^"#][^"]*)"')


class Proxy(httpx.AsyncBaseTransport):
    """What stands in front: everything of this host that is not below the base is others'."""

    def __init__(self, inner: httpx.ASGITransport, *, strips: bool) -> None:
        self._inner = inner
        self._strips = strips
        self.astray: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass a request on."""
        path = request.url.raw_path.decode()
        if path != BASE and not path.startswith(f"{BASE}/"):
            self.astray.append(path)
            return httpx.Response(404, text="another program")
        if self._strips:
            path = path.removeprefix(BASE) or "/"
        url = request.url.copy_with(raw_path=path.encode())
        passed = httpx.Request(request.method, url, headers=request.headers, stream=request.stream)
        return await self._inner.handle_async_request(passed)


@contextlib.asynccontextmanager
async def proxied(
    servers: World, *, strips: bool
) -> AsyncIterator[tuple[World, httpx.AsyncClient, Proxy]]:
    """A fleet's pages, and a browser that knows them by the proxy's address only."""
    with scheduler(servers.clock) as (_, sink):
        servers.web = f"{WEB}scheduler: {{url: {sink.url}}}\n"
        servers.external_url = f"{ORIGIN}{BASE}/"
        populate(servers, 6)
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            told = schedules(sink.url, world.clock)
            app = application(world, schedules=told).starlette()
            proxy = Proxy(httpx.ASGITransport(app=app), strips=strips)
            async with httpx.AsyncClient(transport=proxy, base_url=ORIGIN) as client:
                yield world, client, proxy
            await told.aclose()


async def signed_in(client: httpx.AsyncClient) -> httpx.Response:
    """As somebody who sees everything."""
    fields = {"token": ROOT, "next": "/jobs"}
    return await client.post(f"{BASE}/sign-in", data=fields, headers=OWN)


@pytest.mark.parametrize("strips", [True, False], ids=["stripped", "kept"])
def test_every_link_of_every_page_leads_below_the_base(servers: World, *, strips: bool) -> None:
    """From the overview on: pages, the style sheet, the calendar's address, forms."""

    async def story() -> None:
        async with proxied(servers, strips=strips) as (_, client, proxy):
            await signed_in(client)
            waiting, seen = deque([f"{BASE}/", BASE]), set[str]()
            forms = set[str]()
            while waiting:
                path = waiting.popleft()
                if path in seen or len(seen) > 120:
                    continue
                seen.add(path)
                answer = await client.get(path)
                # The played scheduler has jobs that this engine does not see.
                assert answer.status_code == (404 if "/jobs/slurm-" in path else 200), path
                if not answer.headers["Content-Type"].startswith("text/html"):
                    continue
                for kind, target in TARGET.findall(answer.text):
                    found = urlsplit(urljoin(f"{ORIGIN}{path}", target.replace("&amp;", "&")))
                    assert f"{found.scheme}://{found.netloc}" == ORIGIN, target
                    assert found.path.startswith(f"{BASE}/"), (path, target)
                    whole = found.path + (f"?{found.query}" if found.query else "")
                    (forms.add if kind == "action" else waiting.append)(whole)
            inside = {path.removeprefix(BASE).partition("?")[0] for path in seen}
            wanted = {
                "/",
                "/style.css",
                "/jobs",
                "/jobs/proc-1",
                "/queue",
                "/calendar",
                "/receipts",
            }
            assert wanted | {"/calendar.ics", "/budgets", "/metrics"} <= inside
            assert f"{BASE}/sign-out" in forms
            assert proxy.astray == []

    asyncio.run(story())


@pytest.mark.parametrize("strips", [True, False], ids=["stripped", "kept"])
def test_forms_and_redirects_stay_below_the_base(servers: World, *, strips: bool) -> None:
    """Signed out, in, a job kept, out again; the cookie goes to nobody else on the host."""

    async def story() -> None:
        async with proxied(servers, strips=strips) as (world, client, proxy):
            out = await client.get(f"{BASE}/jobs?user=alice")
            assert out.headers["Location"] == f"{BASE}/sign-in?next=%2Fjobs%3Fuser%3Dalice"
            page = await client.get(out.headers["Location"])
            assert f'action="{BASE}/sign-in"' in page.text
            answer = await signed_in(client)
            assert (answer.status_code, answer.headers["Location"]) == (303, f"{BASE}/jobs")
            (cookie,) = answer.headers.get_list("Set-Cookie")
            assert cookie.startswith("__Secure-gpuwarden=")
            for word in (f"Path={BASE};", "Secure", "HttpOnly", "SameSite=strict"):
                assert word in cookie
            job = (await client.get(f"{BASE}/jobs/proc-1")).text
            form = re.search(r'name="form" value="([^"]+)"', job)
            assert form is not None
            fields = {"rule": "idle-held", "for": "30m", "reason": "a meeting", "form": form[1]}
            kept = await client.post(f"{BASE}/jobs/proc-1/keep", data=fields, headers=OWN)
            assert kept.headers["Location"] == f"{BASE}/jobs/proc-1?done=kept"
            assert world.kinds()[-1] == "kept"
            # Who follows a link from elsewhere is led to the same page once more.
            client.cookies.clear()
            elsewhere = {"Sec-Fetch-Site": "cross-site"}
            bounced = await client.get(f"{BASE}/queue?user=bob", headers=elsewhere)
            assert f"url={BASE}/queue?user=bob" in bounced.text
            await signed_in(client)
            job = (await client.get(f"{BASE}/jobs/proc-1")).text
            form = re.search(r'name="form" value="([^"]+)"', job)
            assert form is not None
            gone = await client.post(f"{BASE}/sign-out", data={"form": form[1]}, headers=OWN)
            assert gone.headers["Location"] == f"{BASE}/sign-in"
            assert not client.cookies
            assert proxy.astray == []

    asyncio.run(story())


def test_notices_links_and_the_api_are_below_the_base(servers: World) -> None:
    """What people are sent leads through the proxy; programs may ask with or without the base."""

    async def story() -> None:
        async with proxied(servers, strips=False) as (world, client, _):
            bearer = {"Authorization": f"Bearer {ROOT}"}
            answer = await client.get(f"{BASE}/v1/jobs", headers=bearer)
            assert answer.json()["jobs"]
            direct = httpx.ASGITransport(app=application(world).starlette())
            async with httpx.AsyncClient(transport=direct, base_url="http://engine") as near:
                assert (await near.get("/v1/jobs", headers=bearer)).json() == answer.json()
                assert (await near.get("/-/ready")).status_code == 200
                assert (await near.get(f"{BASE}x/jobs", headers=bearer)).status_code == 404

    asyncio.run(story())


@pytest.mark.parametrize("path", ["//evil.example.org", "/a;b", '/a"b', "/..", "/a/../b"])
def test_a_path_that_could_mean_something_else_is_refused(servers: World, path: str) -> None:
    """In a redirect, a cookie, or a page."""
    servers.external_url = f"{ORIGIN}{path}"

    async def story() -> None:
        async with running(servers):
            raise AssertionError("it was taken")

    with pytest.raises(InvalidInput, match="external_url"):
        asyncio.run(story())
