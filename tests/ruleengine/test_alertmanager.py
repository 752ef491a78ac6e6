"""Alerts through the real Alertmanager, and back to the engine's last hop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, eventually, running, serving
from tests.ruleengine.worlds import OwnedClock, Sink, alertmanager_sink
from tests.servers import alertmanager, fetch, free_port

from gpuwarden.clock import SystemClock
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.alertmanager import Alert, AlertmanagerClient
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.notices import AlertBook

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONFIG = """
route:
  receiver: hop
  group_by: [user, job_id, alertname]
  group_wait: 0s
  group_interval: 1s
  repeat_interval: 1h
receivers:
- name: hop
  webhook_configs:
  - url: http://127.0.0.1:PORT/v1/notify/slack
    send_resolved: false
    http_config: {authorization: {type: Bearer, credentials: "hop-token"}}
"""


def alert(**changes: object) -> Alert:
    """An alert that fires now."""
    now = time.time()
    return dataclasses.replace(
        Alert(
            labels={"alertname": "A", "service": "gpuwarden-jobs", "job_id": "proc-1", "team": ""},
            annotations={"summary": "s"},
            starts_at=now - 10,
            ends_at=now + 240,
            url="http://engine/jobs/proc-1",
        ),
        **changes,
    )


def test_alertmanager_takes_and_resolves_what_is_posted(tmp_path: Path) -> None:
    """The real server lists a firing alert, without empty labels, and drops a resolved one."""

    async def story(url: str, active: Callable[[], list[dict[str, object]]]) -> None:
        client = AlertmanagerClient([url], SystemClock())
        try:
            assert await client.post([alert()]) == 1
            (found,) = active()
            assert "team" not in found["labels"]
            assert client.skew < 5
            await client.post([alert(ends_at=time.time())])
            assert active() == []
        finally:
            await client.aclose()

    config = "route: {receiver: nobody}\nreceivers: [{name: nobody}]\n"
    with alertmanager(config, tmp_path / "state") as server:
        asyncio.run(story(server.url, lambda: server.json("/api/v2/alerts?active=true")))


def test_every_replica_is_told_and_one_is_enough() -> None:
    """A dead replica does not hold the others up; only when all fail is it an error."""

    async def story(living: Sink, reply: dict[str, int]) -> None:
        dead = f"http://127.0.0.1:{free_port()}"
        client = AlertmanagerClient([dead, living.url], SystemClock())
        try:
            assert await client.post([alert()] * 101) == 1
            assert [len(request.json()) for request in living.received] == [100, 1]
            reply["status"] = 400
            with pytest.raises(ServiceUnavailable, match="HTTP 400"):
                await client.post([alert()])
        finally:
            await client.aclose()

    with alertmanager_sink() as (sink, reply):
        asyncio.run(story(sink, reply))


def test_clocks_that_differ_are_measured() -> None:
    """The Date header of an answer tells how far apart the clocks are."""

    async def story(url: str) -> None:
        client = AlertmanagerClient([url], OwnedClock(time.time() - 600))
        try:
            await client.post([alert()])
            assert 598 <= client.skew <= 602
        finally:
            await client.aclose()

    with alertmanager_sink() as (sink, _):
        asyncio.run(story(sink.url))


def test_the_book_posts_changes_at_once_and_repeats_what_stands() -> None:
    """Nothing between two resends; a change of level resolves and fires in one post."""
    book = AlertBook(resend=60.0)
    moderate = alert(labels={"alertname": "A", "level": "moderate"})
    severe = alert(labels={"alertname": "A", "level": "severe"})
    book.update([moderate], 1000.0)
    assert [a.ends_at for a in book.pending(1000.0)] == [1240.0]
    book.posted(1000.0)
    book.update([dataclasses.replace(moderate, annotations={"summary": "other"})], 1030.0)
    assert book.pending(1030.0) == []
    assert [a.annotations["summary"] for a in book.pending(1060.0)] == ["other"]
    book.posted(1060.0)
    book.update([severe], 1061.0)
    ends = {a.labels["level"]: a.ends_at for a in book.pending(1061.0)}
    assert ends == {"moderate": 1061.0, "severe": 1301.0}
    book.posted(1061.0)
    book.update([severe], 1400.0)
    assert {a.labels["level"] for a in book.pending(1400.0)} == {"severe"}


def test_a_refused_post_is_due_again() -> None:
    """Until a replica took it, it is pending."""
    book = AlertBook(resend=60.0)
    book.update([alert()], 1000.0)
    assert len(book.pending(1000.0)) == 1
    assert len(book.pending(1001.0)) == 1


def test_a_notice_goes_round_through_the_real_alertmanager(servers: World, tmp_path: Path) -> None:
    """Engine, Alertmanager, last hop, Slack: refused first, taken then, proven in the ledger."""
    servers.forwarding = False
    port = free_port()

    async def story(url: str) -> None:
        servers.alerts.url = url
        # Alertmanager lives in real time: the engine's clock starts there.
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
                world.slack_reply["status"] = 500
                while not any(kind == "notify" for kind in world.kinds()):
                    await world.tick()
                await eventually(lambda: len(world.slack.received) >= 2)
                world.slack_reply["status"] = 200
                stored = world.engine.cases.get("idle-held", "proc-1")
                assert stored is not None
                number, stage = stored.id, "moderate-notify:enforce"
                ledger = world.engine.ledger
                for _ in range(600):
                    if ledger.delivery(number, [stage]).complete:
                        break
                    await asyncio.sleep(0.1)  # the ledger belongs to this thread
                (notice,) = ledger.notices(number)
                assert notice.recipient == "U0ALICE01"
                assert "ts=" in notice.proof

    with alertmanager(CONFIG.replace("PORT", str(port)), tmp_path / "state") as server:
        asyncio.run(story(server.url))
        assert fetch(server.url + "/-/healthy")


def test_an_alertmanager_with_another_clock_is_told_of(servers: World) -> None:
    """It takes alerts that are over by its own time, and nobody hears of them: not ready."""

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(12)
            assert world.engine.problems == []
            world.clock.jump(90)
            await world.tick(5)
            (problem,) = world.engine.problems
            assert "an Alertmanager's clock is" in problem

    late = OwnedClock()
    with alertmanager_sink(late) as (sink, _):
        servers.alerts = sink
        servers.clock.pass_ = _together(servers.clock, late)  # type: ignore[method-assign]
        asyncio.run(story())


def _together(first: OwnedClock, second: OwnedClock) -> Callable[[float], None]:
    """Let time pass on both; only the first one's wall clock is then set by somebody."""
    pass_ = first.pass_

    def both(seconds: float) -> None:
        pass_(seconds)
        second.pass_(seconds)

    return both
