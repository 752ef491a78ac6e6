"""Servers that fail halfway: real Alertmanagers of one cluster, a real mail server, Slack."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP
from tests.ruleengine.engines import World, running, serving
from tests.ruleengine.test_alertmanager import CONFIG
from tests.ruleengine.test_deliveries import Mailbox, Post, post
from tests.servers import alertmanager, free_port

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.servers import Server


# -- Alertmanager's replicas


@contextlib.contextmanager
def cluster(folder: Path, port: int) -> Iterator[tuple[Server, Server]]:
    """Two Alertmanagers that know each other, and call the last hop on a port."""
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    # The second waits so long for the first's word before it tells the same.
    flags = ["--cluster.peer-timeout=1s", "--cluster.settle-timeout=1s"]
    text = CONFIG.replace("PORT", str(port))
    with (
        alertmanager(text, folder / "a", cluster=first, flags=flags) as one,
        alertmanager(
            text, folder / "b", cluster=second, flags=[*flags, f"--cluster.peer={first}"]
        ) as other,
    ):
        yield one, other


@contextlib.asynccontextmanager
async def living(servers: World, port: int, *urls: str) -> AsyncIterator[World]:
    """An engine in real time, whose notices go through real Alertmanagers to its last hop."""
    servers.forwarding = False
    servers.alerts.url, servers.replicas = urls[0], urls[1:]
    servers.clock.jump(time.time() - servers.clock.wall() - 300)
    servers.fleet.jobs[0].started = servers.clock.wall() - 7200
    servers.fleet.jobs[0].activity = {"cpu": servers.clock.wall() - 7200}
    async with running(servers) as world:
        app = EngineApp(
            world.engine,
            world.hop,
            notify_token="hop-token",
            operator_token=None,
            ticket_key=None,
        )
        async with serving(app, port):
            while not any(kind == "notify" for kind in world.kinds()):
                await world.tick()
            yield world


def proven(world: World) -> bool:
    """Whether the owner's notice is proven."""
    stored = world.engine.cases.get("idle-held", "proc-1")
    assert stored is not None
    return world.engine.ledger.delivery(stored.id, ["moderate-notify:enforce"]).complete


async def until_proven(world: World) -> None:
    """The ledger belongs to this thread: look again and again."""
    for _ in range(600):
        if proven(world):
            return
        await asyncio.sleep(0.05)
    pytest.fail("never proven")


def test_every_replica_is_told_and_the_owner_hears_once(servers: World, tmp_path: Path) -> None:
    """Both hold the alert; what the second passes on as well is known already."""
    port = free_port()

    async def story(one: Server, other: Server) -> None:
        async with living(servers, port, one.url, other.url) as world:
            await until_proven(world)
            for server in (one, other):
                alerts = await asyncio.to_thread(server.json, "/api/v2/alerts")
                assert {alert["labels"]["job_id"] for alert in alerts} == {"proc-1"}
            assert len(world.slack.received) == 1

    with cluster(tmp_path, port) as (one, other):
        asyncio.run(story(one, other))


def test_with_one_replica_down_the_owner_hears_all_the_same(servers: World, tmp_path: Path) -> None:
    """The other passes it on; which one is down is known."""
    port = free_port()

    async def story(one: Server, other: Server) -> None:
        async with living(servers, port, one.url, other.url) as world:
            await until_proven(world)
            assert world.told()[UP % one.url] == 0.0
            assert world.told()[UP % other.url] == 1.0

    with cluster(tmp_path, port) as (one, other):
        one.stop()
        asyncio.run(story(one, other))


UP = 'gpuwarden_engine_alertmanager_up{alertmanager="%s"}'


# -- the mail server


class Breaking(SMTP):
    """Breaks off where its mailbox says."""

    async def smtp_DATA(self, arg: str) -> None:  # noqa: N802 - aiosmtpd's interface
        """Take the mail, or hang up while it is being sent."""
        if self.event_handler.fault == "mid-data":
            await self.push("354 go ahead")
            self.transport.close()
            return
        await super().smtp_DATA(arg)


@dataclass
class Faulty(Mailbox):
    """A mailbox whose server fails: hangs, mid-data, or takes a mail and says nothing."""

    fault: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle_DATA(  # noqa: N802 - aiosmtpd's interface
        self, server: Any, session: Any, envelope: Any
    ) -> str:
        """Take a mail, and fail."""
        if self.fault == "hangs":
            await self.over.wait()
        answer = await super().handle_DATA(server, session, envelope)
        if self.fault == "unanswered":
            server.transport.close()
        return answer


class Server25(Controller):
    """A mail server of that kind."""

    def factory(self) -> SMTP:
        """One connection's protocol."""
        return Breaking(self.handler)


@contextlib.contextmanager
def faulty_mail() -> Iterator[tuple[int, Faulty]]:
    """Such a server on the loopback."""
    mailbox, port = Faulty(), free_port()
    controller = Server25(mailbox, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield port, mailbox
    finally:
        controller.loop.call_soon_threadsafe(mailbox.over.set)
        controller.stop()


FAULTS = (("hangs", 1), ("mid-data", 1), ("unanswered", 2))
"""What fails, and how many copies arrive once it is mended and tried again."""


@pytest.mark.parametrize(("fault", "copies"), FAULTS)
def test_a_mail_server_that_breaks_off_has_taken_nothing(
    tmp_path: Path, fault: str, copies: int
) -> None:
    """It is no proof, and tried again: rather twice than never, where the answer was lost."""

    async def story(made: Post, mailbox: Faulty) -> None:
        receipt = await made.send("email")
        assert (receipt.delivered, receipt.retry) == (0, True)
        assert made.states() == {"email": "failed"}
        mailbox.fault = ""
        receipt = await made.send("email")
        assert (receipt.delivered, receipt.failed) == (1, ())
        assert made.complete()
        await made.send("email")
        assert len(mailbox.mails) == copies

    async def whole(port: int, mailbox: Faulty) -> None:
        mailbox.fault = fault
        async with post(tmp_path, port, mailbox, patience="300ms") as made:
            await story(made, mailbox)

    with faulty_mail() as (port, mailbox):
        asyncio.run(whole(port, mailbox))


# -- Slack, with the whole engine


SLACK = (
    {"status": 200, "body": {"ok": True}},
    {"status": 429, "body": None},
)


@pytest.mark.parametrize("reply", SLACK, ids=str)
def test_nothing_is_ended_while_slack_refuses_and_operators_are_paged(
    servers: World, reply: dict[str, Any]
) -> None:
    """Long past the deadline; once it takes the notice, the promised time begins to run."""

    async def story() -> None:
        async with running(servers) as world:
            good = dict(world.slack_reply)
            world.slack_reply.update(reply)
            await world.tick(50)
            assert world.state() is CaseState.DETECTED
            assert world.agent.requests == []
            names = {alert["labels"]["alertname"] for alert in world.alerts.received[-1].json()}
            assert "GpuwardenNoticeUndeliverable" in names
            world.slack_reply.update(good)
            await world.until(CaseState.NOTIFIED)
            told = world.clock.monotonic()
            await world.until(CaseState.VERIFIED)
            assert world.clock.monotonic() - told >= 300

    asyncio.run(story())
