"""Objecting on pages and by commands, and an admin's word that lets a rule enforce again."""

from __future__ import annotations

import asyncio
import html
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.ruleengine.browsing import KEY, WEB, application
from tests.ruleengine.engines import World, running, serving
from tests.ruleengine.test_links import linked
from tests.ruleengine.test_trials import RULE, ended, trial
from tests.servers import free_port

from gpuwarden.ruleengine import tickets
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from pathlib import Path

URL = "http://engine:9837"


async def signed_in(client: httpx.AsyncClient, token: str) -> None:
    """Begin a session."""
    answer = await client.post("/sign-in", data={"token": token}, headers={"Origin": URL})
    assert answer.status_code == 303


async def filled(
    client: httpx.AsyncClient, page: str, action: str, **fields: str
) -> httpx.Response:
    """Send a page's form."""
    text = (await client.get(page)).text
    form = re.search(r'name="form" value="([^"]+)"', text)
    assert form is not None
    assert f'action="{action}"' in text
    return await client.post(action, data={"form": form[1], **fields}, headers={"Origin": URL})


def test_the_notices_link_objects_once_and_moves_no_deadline(servers: World) -> None:
    """Its form writes an appeal down, by the owner; opening it does not."""
    trial(servers)

    async def story() -> None:
        async with linked(servers) as (world, client, path):
            text = html.unescape((await client.get(path)).text)
            assert f'action="{path}/appeal"' in text
            kept = world.case().kept
            for _ in range(2):
                done = await client.post(f"{path}/appeal", data={"reason": "a demo at noon"})
                assert done.headers["location"] == f"{path}?done=appealed"
            page = (await client.get(f"{path}?done=appealed")).text
            assert "Your objection is written down" in page
            (row,) = world.engine.ledger.rows("SELECT by, role, reason, source FROM objections")
            assert row == ("alice", "owner", "a demo at noon", "appeal")
            assert world.case().kept == kept
            # Without a reason nothing is taken, and the page says why.
            refused = await client.post(f"{path}/appeal", data={"reason": " "})
            assert refused.status_code == 400
            assert "The objection was not taken" in refused.text

    asyncio.run(story())


def test_an_owner_objects_after_the_end_and_the_rule_falls_back_in_sight_of_all(
    servers: World,
) -> None:
    """On the job's page; the pages of rules and engine say it, and an admin's form lifts it."""
    trial(servers, appeals=1)
    servers.web = WEB

    async def story() -> None:
        async with running(servers) as world:
            transport = httpx.ASGITransport(app=application(world).starlette())
            await ended(world)
            async with httpx.AsyncClient(transport=transport, base_url=URL) as alice:
                await signed_in(alice, "alices-own-token-1")
                done = await filled(
                    alice, "/jobs/proc-1", "/jobs/proc-1/appeal", rule=RULE, reason="it was at work"
                )
                assert done.headers["location"] == "/jobs/proc-1?done=appealed"
                rules = html.unescape((await alice.get("/rules")).text)
                assert "the rule has fallen back to warn since" in rules
                # An owner may not lift it, and is offered no form for it.
                assert "Enforce again" not in (await alice.get("/engine")).text
            assert world.engine.trials.held != ()
            async with httpx.AsyncClient(transport=transport, base_url=URL) as root:
                await signed_in(root, "roots-own-token-01")
                done = await filled(root, "/engine", "/engine/resume", rule=RULE, reason="mended")
                assert done.headers["location"] == "/engine?done=rule&rule=idle-held"
                told = (await root.get(done.headers["location"])).text
                assert "The rule idle-held enforces again" in told
            assert world.engine.trials.held == ()

    asyncio.run(story())


def test_an_owner_sees_no_form_of_anothers_job(servers: World) -> None:
    """Nor may they send it."""
    trial(servers)
    servers.web = WEB
    servers.fleet.jobs[0].user = "bob"

    async def story() -> None:
        async with running(servers) as world:
            transport = httpx.ASGITransport(app=application(world).starlette())
            await world.until(CaseState.NOTIFIED)
            async with httpx.AsyncClient(transport=transport, base_url=URL) as alice:
                await signed_in(alice, "alices-own-token-1")
                assert (await alice.get("/jobs/proc-1")).status_code == 404
                text = (await alice.get("/engine")).text
                form = re.search(r'name="form" value="([^"]+)"', text)
                assert form is not None
                fields = {"form": form[1], "rule": RULE, "reason": "x"}
                answer = await alice.post(
                    "/jobs/proc-1/appeal", data=fields, headers={"Origin": URL}
                )
                assert answer.status_code == 404
            assert world.engine.ledger.rows("SELECT * FROM objections") == []

    asyncio.run(story())


def test_the_commands_object_regret_and_resume(servers: World, tmp_path: Path) -> None:
    """An owner by the ticket of the notice, an operator and an admin by their tokens."""
    trial(servers, appeals=2)
    servers.web = WEB
    port = free_port()
    (tmp_path / "olga").write_text("olgas-own-token-01\n")
    (tmp_path / "root").write_text("roots-own-token-01\n")

    def command(*words: str, who: str | None = None) -> tuple[int, str]:
        token = [] if who is None else ["--token-file", str(tmp_path / who)]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "gpuwarden", *words),
                *("--engine.url", f"http://127.0.0.1:{port}", *token),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    async def story() -> list[tuple[int, str]]:
        async with running(servers) as world, serving(application(world), port):
            await ended(world)
            (decision,) = world.engine.ledger.job_decisions("proc-1")
            told = ["--reason", "it was at work"]
            ticket = ["--ticket", tickets.issue(KEY, RULE, "proc-1")]
            objected = ["appeal", "proc-1", "--rule", RULE, *told]
            resumed = ["enforcement", "resume", "--rule", RULE, *told]
            return [
                await asyncio.to_thread(command, *objected, *ticket),
                await asyncio.to_thread(command, *objected),
                await asyncio.to_thread(command, "regret", decision.id, *told, who="olga"),
                await asyncio.to_thread(command, "enforcement", "show", who="olga"),
                await asyncio.to_thread(command, *resumed, who="olga"),
                await asyncio.to_thread(command, *resumed, who="root"),
            ]

    appealed, unsigned, regretted, shown, refused, resumed = asyncio.run(story())
    assert appealed == (0, "The appeal about proc-1 is written down.\n")
    assert (unsigned[0], "--ticket (owners) or --token-file" in unsigned[1]) == (2, True)
    assert regretted[0] == 0
    assert "idle-held: the rule has fallen back to warn since" in regretted[1]
    assert (shown[0], "idle-held only warns:" in shown[1]) == (0, True)
    assert (refused[0], "[role]" in refused[1]) == (1, True)
    assert resumed == (0, "Enforcement is not paused.\n")


@pytest.mark.parametrize("share", ["0%", "101%", "0.1", "-5%"])
def test_a_share_is_a_percentage_above_none(servers: World, share: str) -> None:
    """Nor does any other field of a canary have a default."""
    trial(servers, share)
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "rules", "check", str(servers.folder / "rules.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "rules[0].canary.share" in done.stdout + done.stderr
