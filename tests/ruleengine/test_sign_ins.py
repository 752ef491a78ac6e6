"""Signing in: tokens, sessions, the proxy's word, and forms that only our own pages can send."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.ruleengine.browsing import ALICE, OLGA, ROOT, TOKENS, WEB, application, populate
from tests.ruleengine.engines import World, running

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OWN = {"Sec-Fetch-Site": "same-origin"}
PROXY = """web:
  proxy:
    peers: [10.0.0.0/8]
    operators: {groups: [gpu-operators]}
    admins: {users: [root]}
"""
TEAM = """
version: 1
users:
  alice: {slack: U0ALICE01, team: vision, email: alice@example.org}
  bob: {slack: U0BOB0001, team: vision, sees_team: true}
  carol: {slack: U0CAROL01, team: speech}
"""


@contextlib.asynccontextmanager
async def asked(
    servers: World, *, web: str = WEB, peer: str = "127.0.0.1", until: CaseState | None = None
) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """A running engine and a browser of its pages, which keeps cookies."""
    servers.web = web
    async with running(servers) as world:
        await world.tick()
        if until is not None:
            await world.until(until)
        app = application(world).starlette()
        transport = httpx.ASGITransport(app=app, client=(peer, 40_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine:9837") as client:
            yield world, client


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token."""
    return {"Authorization": f"Bearer {token}"}


async def sign_in(client: httpx.AsyncClient, token: str) -> httpx.Response:
    """Send the sign-in form."""
    return await client.post("/sign-in", data={"token": token, "next": "/jobs"}, headers=OWN)


async def form(client: httpx.AsyncClient, path: str) -> str:
    """The value that a page gives its forms."""
    found = re.search(r'name="form" value="([^"]+)"', (await client.get(path)).text)
    assert found is not None
    return found[1]


KEEP = {"rule": "idle-held", "for": "30m", "reason": "a meeting"}


def test_with_tokens_configured_pages_and_api_are_closed(servers: World) -> None:
    """What Prometheus and supervisors read stays open; everything else asks who it is."""

    async def story() -> None:
        async with asked(servers) as (_, client):
            for path in ("/metrics", "/-/healthy", "/-/ready", "/style.css", "/v1/openapi.json"):
                assert (await client.get(path)).status_code == 200, path
            for path in ("/", "/jobs", "/jobs/proc-1", "/rules", "/engine", "/audit", "/decisions"):
                answer = await client.get(path)
                assert answer.status_code == 303, path
                assert answer.headers["location"].startswith("/sign-in?next=")
            for path in ("/v1/jobs", "/v1/jobs/proc-1", "/v1/health", "/v1/nodes", "/v1/audit"):
                assert (await client.get(path)).status_code == 401, path
                assert (await client.get(path, headers=bearer(OLGA))).status_code == 200, path
                assert (await client.get(path, headers=bearer("x" * 18))).status_code == 401, path

    asyncio.run(story())


def test_a_sign_in_gives_a_session_that_ends(servers: World) -> None:
    """The cookie is for our pages only, no script reads it, and after twelve hours it is over."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            refused = await sign_in(client, "not-a-token-of-ours")
            assert (refused.status_code, "not known" in refused.text) == (401, True)
            assert not client.cookies
            answer = await sign_in(client, OLGA)
            assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
            cookie = answer.headers["set-cookie"].lower()
            assert "httponly" in cookie
            assert "samesite=strict" in cookie
            assert "secure" not in cookie
            assert OLGA not in cookie
            assert "olga (operator)" in (await client.get("/jobs")).text
            world.clock.pass_(12 * 3600 - 1)
            assert (await client.get("/jobs")).status_code == 200
            world.clock.pass_(1)
            assert (await client.get("/jobs")).status_code == 303

    asyncio.run(story())


def test_over_tls_the_cookie_is_never_sent_in_the_clear(servers: World) -> None:
    """It is bound to this host, too."""
    servers.external_url = "https://gpuwarden.example.org"

    async def story() -> str:
        async with asked(servers) as (_, client):
            return (await sign_in(client, OLGA)).headers["set-cookie"]

    cookie = asyncio.run(story())
    assert cookie.startswith("__Host-gpuwarden=")
    assert "Secure" in cookie
    assert "Path=/" in cookie


def test_a_session_is_worth_nothing_elsewhere(servers: World) -> None:
    """Not with another engine's key, not changed, and not for the API."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            await sign_in(client, ROOT)
            assert (await client.get("/v1/jobs")).status_code == 401
            paused = await client.post("/v1/enforcement/pause", json={"reason": "x"})
            assert paused.status_code == 401
            other = httpx.ASGITransport(app=application(world).starlette())
            async with httpx.AsyncClient(
                transport=other, base_url="http://engine:9837", cookies=client.cookies
            ) as stranger:
                assert (await stranger.get("/jobs")).status_code == 303
            (name, value), *_ = client.cookies.items()
            client.cookies.clear()
            other_letter = "A" if value[4] != "A" else "B"
            changed = {"Cookie": f"{name}={value[:4]}{other_letter}{value[5:]}"}
            assert (await client.get("/jobs", headers=changed)).status_code == 303

    asyncio.run(story())


def test_a_session_whose_token_was_taken_away_is_over(servers: World) -> None:
    """Also if somebody else has the name now."""

    async def story() -> None:
        async with asked(servers) as (world, client):
            await sign_in(client, OLGA)
            key = b"s" * 32
            for tokens, status in ((TOKENS, 200), (TOKENS[:1], 303)):
                app = EngineApp(
                    world.engine,
                    world.hop,
                    notify_token=None,
                    operator_token=None,
                    ticket_key=None,
                    tokens=tokens,
                    session_key=key,
                ).starlette()
                transport = httpx.ASGITransport(app=app)
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://engine:9837", cookies=client.cookies
                ) as again:
                    if status == 200:
                        await sign_in(again, OLGA)
                        client.cookies = again.cookies
                    assert (await again.get("/jobs")).status_code == status

    asyncio.run(story())


@pytest.mark.parametrize(
    "target", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:x", "\r\n"]
)
def test_a_sign_in_never_leads_to_another_site(servers: World, target: str) -> None:
    """Whatever the link to it said."""

    async def story() -> str:
        async with asked(servers) as (_, client):
            answer = await client.post(
                "/sign-in", data={"token": OLGA, "next": target}, headers=OWN
            )
            return answer.headers["location"]

    assert asyncio.run(story()) == "/"


FOREIGN = (
    ({"Sec-Fetch-Site": "cross-site"}, {}, "another site"),
    ({"Sec-Fetch-Site": "same-site"}, {}, "another site"),
    ({"Origin": "http://evil.example"}, {}, "another site"),
    ({"Origin": "null"}, {}, "another site"),
    ({}, {}, "another site"),
    (OWN, {"form": ""}, "too old"),
    (OWN, {"form": "x.y"}, "too old"),
)
"""Headers of a form, fields that are not ours, and what is said of it."""


def test_a_form_that_our_page_did_not_send_changes_nothing(servers: World) -> None:
    """Though the browser sends the cookie along."""

    async def story() -> None:
        async with asked(servers, until=CaseState.NOTIFIED) as (world, client):
            await sign_in(client, ROOT)
            value = await form(client, "/jobs/proc-1")
            for headers, fields, error in FOREIGN:
                for path in ("/jobs/proc-1/keep", "/engine/pause"):
                    body = {**KEEP, "form": value, **fields}
                    answer = await client.post(path, data=body, headers=headers)
                    assert answer.status_code == 403, headers
                    assert error in answer.text
            assert "kept" not in world.kinds()
            assert world.engine.pauses.current() is None

    asyncio.run(story())


def test_the_value_of_one_persons_form_is_worth_nothing_to_another(servers: World) -> None:
    """An owner cannot lend the operator's browser his own."""

    async def story() -> None:
        async with asked(servers, until=CaseState.NOTIFIED) as (world, client):
            await sign_in(client, ALICE)
            lent = await form(client, "/jobs/proc-1")
            client.cookies.clear()
            await sign_in(client, OLGA)
            answer = await client.post(
                "/jobs/proc-1/keep", data={**KEEP, "form": lent}, headers=OWN
            )
            assert answer.status_code == 403
            assert "kept" not in world.kinds()

    asyncio.run(story())


def test_an_old_browsers_form_is_known_by_its_origin(servers: World) -> None:
    """Over plain HTTP there is no Sec-Fetch-Site."""

    async def story() -> None:
        async with asked(servers, until=CaseState.NOTIFIED) as (world, client):
            await sign_in(client, OLGA)
            answer = await client.post(
                "/jobs/proc-1/keep",
                data={**KEEP, "form": await form(client, "/jobs/proc-1")},
                headers={"Origin": "http://engine:9837"},
            )
            assert answer.status_code == 303
            assert world.kinds()[-1] == "kept"

    asyncio.run(story())


@pytest.mark.parametrize("url", ["http://GPU-Box:80", "http://gpu-box"])
def test_an_origin_is_ours_however_engine_yaml_writes_it(servers: World, url: str) -> None:
    """Behind a proxy that says another host; browsers write small letters and no usual port."""
    servers.external_url = url

    async def story() -> None:
        async with asked(servers) as (_, client):
            for origin, status in (("http://gpu-box", 303), ("http://gpu-box:81", 403)):
                answer = await client.post(
                    "/sign-in", data={"token": OLGA}, headers={"Origin": origin}
                )
                assert answer.status_code == status, origin

    asyncio.run(story())


def test_an_owner_sees_and_keeps_their_own_jobs_only(servers: World) -> None:
    """Those of others are to them as if they were not there; the audit has who and why."""
    populate(servers, 8)

    async def story() -> None:
        async with asked(servers, until=CaseState.NOTIFIED) as (world, client):
            theirs = next(job.job_id for job in world.fleet.jobs if job.user == "bob")
            listed = (await client.get("/v1/jobs", headers=bearer(ALICE))).json()["jobs"]
            assert {job["user"] for job in listed} == {"alice"}
            for path in (f"/v1/jobs/{theirs}", f"/v1/jobs/{theirs}/history"):
                assert (await client.get(path, headers=bearer(ALICE))).status_code == 404
            matches = await client.get(f"/v1/matches/{theirs}", headers=bearer(ALICE))
            found = matches.json()
            assert (found["matches"], found["whole"], found["more"]) == ([], False, False)
            kept = await client.post(
                "/v1/keeps", json={**KEEP, "job_id": theirs}, headers=bearer(ALICE)
            )
            assert kept.status_code == 404
            own = {**KEEP, "job_id": "proc-1", "for": "2h", "by": "somebody else"}
            denied_length = await client.post("/v1/keeps", json=own, headers=bearer(ALICE))
            assert denied_length.json()["error"] == "too_long"
            assert (await client.get("/v1/audit", headers=bearer(ALICE))).status_code == 403
            await sign_in(client, ALICE)
            assert (await client.get(f"/jobs/{theirs}")).status_code == 404
            assert theirs not in (await client.get("/jobs")).text
            body = {**KEEP, "form": await form(client, "/jobs/proc-1")}
            denied = await client.post(f"/jobs/{theirs}/keep", data=body, headers=OWN)
            assert denied.status_code == 404
            too_long = await client.post(
                "/jobs/proc-1/keep", data={**body, "for": "2h"}, headers=OWN
            )
            assert (too_long.status_code, "at most 1h" in too_long.text) == (403, True)
            assert (await client.post("/engine/pause", data=body, headers=OWN)).status_code == 403
            for _ in range(2):  # pressed twice: the same keep
                done = await client.post("/jobs/proc-1/keep", data=body, headers=OWN)
                assert done.headers["location"] == "/jobs/proc-1?done=kept"
            (event,) = [e for e in world.engine.ledger.events("proc-1") if e["kind"] == "kept"]
            detail: Any = event["detail"]
            assert (detail["by"], detail["reason"]) == ("alice", "a meeting")
            assert "is kept until" in (await client.get("/jobs/proc-1?done=kept")).text

    asyncio.run(story())


@pytest.mark.parametrize("day", ["2027-13-45T25:61:61Z", "0001-01-01T00:00:00+14:00"])
def test_a_reason_that_looks_like_a_time_is_shown_as_it_is(servers: World, day: str) -> None:
    """Whoever writes one cannot close the job's page, or the operators' audit."""
    because = f"until {day} at least"

    async def story() -> None:
        async with asked(servers, until=CaseState.NOTIFIED) as (world, client):
            keep = {**KEEP, "job_id": "proc-1", "reason": because}
            kept = await client.post("/v1/keeps", json=keep, headers=bearer(ALICE))
            assert kept.status_code == 201
            world.engine.pauses.begin(by="root", role="admin", reason=because, seconds=None)
            await world.tick()
            for path in ("/", "/jobs/proc-1", "/audit", "/protections", "/engine"):
                page = await client.get(path, headers=bearer(ROOT))
                assert (page.status_code, because in page.text) == (200, True)

    asyncio.run(story())


def test_however_many_jobs_others_have_an_owner_finds_their_own(servers: World) -> None:
    """By a beginning that all have in common, running or remembered."""
    populate(servers, 60)
    mine = {job.job_id for job in servers.fleet.jobs if job.user == "alice"}
    for job in servers.fleet.jobs:
        job.utilization = 0.0
    servers.fleet.jobs.sort(key=lambda job: job.user == "alice")

    async def story() -> None:
        async with asked(servers, until=CaseState.NOTIFIED) as (world, client):
            for _ in range(2):
                found = (await client.get("/v1/matches/proc", headers=bearer(ALICE))).json()
                assert {row["job_id"] for row in found["matches"]} == mine
                assert not found["more"]
                world.fleet.jobs.clear()
                await world.tick()

    asyncio.run(story())


def test_a_teams_jobs_are_shared_where_the_directory_says_so(servers: World) -> None:
    """Bob sees alice's jobs, and alice does not see bob's."""
    populate(servers, 8)

    async def story() -> dict[str, set[str]]:
        async with asked(servers, web=PROXY, peer="10.1.2.3") as (world, client):
            (world.folder / "directory.yaml").write_text(TEAM)
            await world.tick()
            return {
                name: {
                    job["user"]
                    for job in (
                        await client.get("/v1/jobs", headers={"X-Forwarded-User": name})
                    ).json()["jobs"]
                }
                for name in ("alice", "bob", "nobody")
            }

    assert asyncio.run(story()) == {"alice": {"alice"}, "bob": {"alice", "bob"}, "nobody": set()}


def test_the_proxys_word_is_believed_only_from_its_address(servers: World) -> None:
    """From elsewhere such a request is refused, so that a mistake shows."""
    headers = {"X-Forwarded-User": "root"}

    async def story(peer: str) -> tuple[int, int, int]:
        async with asked(servers, web=PROXY, peer=peer) as (_, client):
            page, api = await client.get("/jobs", headers=headers), await client.get("/jobs")
            metrics = await client.get("/metrics", headers=headers)
            return page.status_code, api.status_code, metrics.status_code

    assert asyncio.run(story("10.1.2.3")) == (200, 303, 200)
    assert asyncio.run(story("192.0.2.7")) == (403, 303, 200)
    assert asyncio.run(story("::ffff:10.1.2.3")) == (200, 303, 200)


def test_who_the_proxy_says_it_is(servers: World) -> None:
    """Roles by users and groups; a mail address finds the user of the directory."""
    told = {
        ("x", "", ""): "x (owner)",
        ("x", "", "staff,gpu-operators"): "x (operator)",
        ("root", "", ""): "root (admin)",
        ("114837", "Alice@example.org", ""): "alice (owner)",
        ("114837", "nobody@example.org", ""): "114837 (owner)",
    }

    async def story() -> None:
        async with asked(servers, web=PROXY, peer="10.1.2.3") as (world, client):
            (world.folder / "directory.yaml").write_text(TEAM)
            await world.tick()
            for (user, email, groups), expected in told.items():
                headers = {
                    "X-Forwarded-User": user,
                    "X-Forwarded-Email": email,
                    "X-Forwarded-Groups": groups,
                }
                assert expected in (await client.get("/jobs", headers=headers)).text
            for wrong in ("", " ", "x" * 201, "x\u00a0y", "a\tb"):
                refused = await client.get("/jobs", headers={"X-Forwarded-User": wrong.encode()})
                assert refused.status_code == 403, wrong
            for name in ("User", "Email", "Groups"):
                # Whoever adds a header to the proxy's own is not believed, in whichever order.
                own = [("X-Forwarded-User", "x")] if name != "User" else []
                twice = [(f"X-Forwarded-{name}", value) for value in ("gpu-operators", "root")]
                assert (await client.get("/jobs", headers=own + twice)).status_code == 403

    asyncio.run(story())


def test_names_and_groups_of_any_script_are_read_as_the_proxy_wrote_them(servers: World) -> None:
    """In UTF-8, as a directory of a company has them."""
    web = PROXY.replace("groups: [gpu-operators]", "groups: [运维, Équipe GPU]")

    async def story() -> None:
        async with asked(servers, web=web, peer="10.1.2.3") as (_, client):
            for groups, role in (
                ("staff,运维", "operator"),
                ("Équipe GPU", "operator"),
                ("运", "owner"),
            ):
                headers = {
                    "X-Forwarded-User": "张伟".encode(),
                    "X-Forwarded-Groups": groups.encode(),
                }
                page = await client.get("/jobs", headers=headers)
                assert (page.status_code, f"张伟 ({role})" in page.text) == (200, True), groups

    asyncio.run(story())


def test_a_proxy_that_sets_the_user_alone_lets_nobody_choose_their_groups(servers: World) -> None:
    """With `email_header: null` and `groups_header: null` what came from outside is not read."""
    web = PROXY.replace("peers:", "email_header: null\n    groups_header: null\n    peers:")
    chosen = {
        "X-Forwarded-User": "x",
        "X-Forwarded-Email": "alice@example.org",
        "X-Forwarded-Groups": "gpu-operators",
    }

    async def story() -> None:
        async with asked(servers, web=web, peer="10.1.2.3") as (world, client):
            (world.folder / "directory.yaml").write_text(TEAM)
            await world.tick()
            assert "x (owner)" in (await client.get("/jobs", headers=chosen)).text

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["Basic eDp5", "Bearer of-another-server-0001"])
def test_what_authorization_says_to_the_proxy_costs_nobody_the_page(
    servers: World, kind: str
) -> None:
    """Proxies pass it on; it is no way in by itself."""
    headers = {"Authorization": kind, "X-Forwarded-User": "x"}

    async def story() -> tuple[int, int]:
        async with asked(servers, web=PROXY, peer="10.1.2.3") as (_, client):
            named = await client.get("/jobs", headers=headers)
            unnamed = await client.get("/v1/jobs", headers={"Authorization": kind})
            return named.status_code, unnamed.status_code

    assert asyncio.run(story()) == (200, 401)


def test_a_password_of_a_server_in_front_leaves_open_pages_open(servers: World) -> None:
    """As where nginx asks for one, and passes it on."""

    async def story() -> int:
        async with asked(servers, web="") as (_, client):
            headers = {"Authorization": "Basic eDp5"}
            return (await client.get("/jobs", headers=headers)).status_code

    assert asyncio.run(story()) == 200


def test_a_proxys_admin_pauses_by_the_page_and_not_by_a_header(servers: World) -> None:
    """The API takes no change from a header that a browser's request carries by itself."""
    headers = {"X-Forwarded-User": "root"}

    async def story() -> None:
        async with asked(servers, web=PROXY, peer="10.1.2.3") as (world, client):
            client.headers.update(headers)
            direct = await client.post("/v1/enforcement/pause", json={"reason": "x"})
            assert direct.status_code == 401
            value = await form(client, "/engine")
            body = {"form": value, "reason": "storage", "for": ""}
            foreign = {"Sec-Fetch-Site": "cross-site"}
            assert (
                await client.post("/engine/pause", data=body, headers=foreign)
            ).status_code == 403
            assert (await client.post("/engine/pause", data=body, headers=OWN)).status_code == 303
            assert "paused by root" in world.engine.pauses.sentence
            assert "Enforcement is paused" in (await client.get("/rules")).text
            await client.post("/engine/resume", data=body, headers=OWN)
            assert world.engine.pauses.current() is None

    asyncio.run(story())


def test_who_comes_by_a_link_from_elsewhere_need_not_sign_in_again(servers: World) -> None:
    """A strict cookie does not come along: our page asks once more, and then it does."""

    async def story() -> None:
        async with asked(servers) as (_, client):
            headers = {"Sec-Fetch-Site": "cross-site"}
            answer = await client.get("/jobs?user=alice&team=vision", headers=headers)
            assert answer.status_code == 200
            assert 'content="0; url=/jobs?user=alice&amp;team=vision"' in answer.text
            again = await client.get("/jobs?user=alice&team=vision", headers=OWN)
            assert (
                again.headers["location"] == "/sign-in?next=%2Fjobs%3Fuser%3Dalice%26team%3Dvision"
            )

    asyncio.run(story())


def test_a_change_that_cannot_be_written_is_not_told_as_done(servers: World) -> None:
    """Neither on the page nor by the API; what could be read is still shown."""

    async def story() -> None:
        async with asked(servers, until=CaseState.NOTIFIED) as (world, client):
            await sign_in(client, ROOT)
            body = {**KEEP, "form": await form(client, "/jobs/proc-1")}
            world.engine.ledger.rows("PRAGMA query_only=1")
            for path in ("/jobs/proc-1/keep", "/engine/pause"):
                answer = await client.post(path, data=body, headers=OWN)
                assert answer.status_code == 503
                assert "cannot be written" in answer.text
            paused = await client.post(
                "/v1/enforcement/pause", json={"reason": "x"}, headers=bearer(ROOT)
            )
            assert (paused.status_code, paused.json()["error"]) == (503, "ledger")
            assert world.engine.pauses.current() is None
            assert (await client.get("/jobs/proc-1")).status_code == 200

    asyncio.run(story())


def test_signing_out_forgets_the_session(servers: World) -> None:
    """Only by our own form."""

    async def story() -> None:
        async with asked(servers) as (_, client):
            await sign_in(client, OLGA)
            assert (
                await client.post("/sign-out", data={"form": ""}, headers=OWN)
            ).status_code == 403
            value = await form(client, "/jobs")
            answer = await client.post("/sign-out", data={"form": value}, headers=OWN)
            assert answer.headers["location"] == "/sign-in"
            assert (await client.get("/jobs")).status_code == 303

    asyncio.run(story())


def test_without_web_settings_pages_are_readable_and_nothing_can_be_changed(servers: World) -> None:
    """As on loopback by default; `read: signed-in` closes them."""

    async def story() -> None:
        async with asked(servers, web="", until=CaseState.NOTIFIED) as (world, client):
            page = (await client.get("/jobs/proc-1")).text
            assert "Keep the job" not in page
            answer = await client.post("/jobs/proc-1/keep", data=KEEP, headers=OWN)
            assert answer.status_code == 303
            assert answer.headers["location"].startswith("/sign-in")
            assert "kept" not in world.kinds()
        async with asked(servers, web="web: {read: signed-in}\n") as (_, client):
            assert (await client.get("/jobs")).status_code == 303
            assert (await client.get("/v1/jobs")).status_code == 401

    asyncio.run(story())
