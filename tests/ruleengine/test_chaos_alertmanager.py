"""Alertmanager down, refusing, or of another time: nobody is ended unheard, and it is told."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import TICK, World, running
from tests.ruleengine.test_alertmanager import alert
from tests.ruleengine.worlds import Answer, OwnedClock, Received, Sink, alertmanager_sink
from tests.servers import alertmanager, free_port

from gpuwarden.clock import SystemClock
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.alertmanager import MAX_REFUSED, Alert, AlertmanagerClient
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from pathlib import Path

UP = 'gpuwarden_engine_alertmanager_up{alertmanager="%s"}'


def picky(_method: str, request: Received) -> Answer:
    """An Alertmanager that takes no batch with an alert of the job `bad-...` in it."""
    bad = any(one["labels"]["job_id"].startswith("bad") for one in request.json())
    return (400, b'{"message": "invalid"}') if bad else (200, b"{}")


def posted(sink: Sink) -> list[str]:
    """Jobs of every alert that was in a batch without a bad one."""
    batches = [[one["labels"]["job_id"] for one in item.json()] for item in sink.received]
    return [
        job for batch in batches if not any(j.startswith("bad") for j in batch) for job in batch
    ]


def alerts(*jobs: str) -> list[Alert]:
    """One alert for each job."""
    return [alert(labels={"alertname": "A", "job_id": job}) for job in jobs]


@pytest.mark.parametrize("bad", [{0}, {99}, {100}, {3, 57, 150}, {249}], ids=str)
def test_an_alert_that_is_refused_does_not_hold_up_the_others(bad: set[int]) -> None:
    """Whatever its place among 250, every other one is taken, and the bad one is named."""
    names = [f"bad-{n}" if n in bad else f"proc-{n}" for n in range(250)]

    async def story(sink: Sink) -> None:
        client = AlertmanagerClient([sink.url], SystemClock())
        try:
            with pytest.raises(ServiceUnavailable) as caught:
                await client.post(alerts(*names))
            assert all(f"job bad-{n}" in str(caught.value) for n in bad)
        finally:
            await client.aclose()
        assert sorted(posted(sink)) == sorted(name for name in names if name.startswith("proc"))

    with Sink(picky) as sink:
        asyncio.run(story(sink))


def test_a_server_that_refuses_everything_is_not_asked_for_each() -> None:
    """A few single alerts are tried, and then it is given up."""

    async def story(sink: Sink) -> None:
        client = AlertmanagerClient([sink.url], SystemClock())
        try:
            with pytest.raises(ServiceUnavailable, match="HTTP 400"):
                await client.post(alerts(*(f"bad-{n}" for n in range(100))))
        finally:
            await client.aclose()
        assert len(sink.received) < 10 + 3 * MAX_REFUSED

    with Sink(picky) as sink:
        asyncio.run(story(sink))


def test_the_real_server_takes_what_is_good_of_a_bad_batch(tmp_path: Path) -> None:
    """A label without a name costs no other alert; no alert at all is taken as well."""
    bad = alert(labels={"alertname": "A", "job_id": "proc-bad", "": "x"})

    async def story(url: str) -> None:
        client = AlertmanagerClient([url], SystemClock())
        try:
            assert await client.post([]) == 1
            with pytest.raises(ServiceUnavailable, match="job proc-bad"):
                await client.post([*alerts("proc-1", "proc-2"), bad, *alerts("proc-3")])
        finally:
            await client.aclose()

    config = "route: {receiver: nobody}\nreceivers: [{name: nobody}]\n"
    with alertmanager(config, tmp_path / "state") as server:
        asyncio.run(story(server.url))
        found = server.json("/api/v2/alerts?active=true")
        assert {one["labels"]["job_id"] for one in found} == {"proc-1", "proc-2", "proc-3"}


@pytest.mark.parametrize("off", [-600.0, 600.0])
def test_an_alertmanager_of_another_time_stops_every_end(servers: World, off: float) -> None:
    """It answers 200, and what it was told never appears or never goes: nothing is ended."""
    theirs = OwnedClock()

    async def story() -> None:
        (servers.folder / "halt").touch()
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            (world.folder / "halt").unlink()
            world.alerts.url, other = sink.url, world.alerts.url
            world.engine.teller._alertmanager._urls = (sink.url,)
            theirs.jump(world.clock.wall() - theirs.wall() + off)
            # The due case's alert is repeated every minute: from then on it is known.
            for _ in range(4):
                theirs.pass_(15)
                world.clock.pass_(15)
                await world.engine.teller.tell(world.engine.view)
            await world.tick()
            assert world.agent.requests == []
            assert "clock_skew" in world.why()
            assert any("an Alertmanager's clock is" in text for text in world.engine.problems)
            told = world.told()
            skew = told['gpuwarden_engine_clock_skew_seconds{peer="alertmanager"}']
            assert abs(skew - 600) <= 20
            world.engine.teller._alertmanager._urls = (other,)
            await world.tick(5)
            assert world.agent.ended == ["proc-1"]

    with alertmanager_sink(theirs) as (sink, _):
        asyncio.run(story())


def test_one_replica_of_two_is_enough_and_the_other_is_named(servers: World) -> None:
    """Owners are told through the living one; which one is down is on the page of metrics."""
    dead = f"http://127.0.0.1:{free_port()}"

    async def story() -> None:
        async with running(servers) as world:
            client = world.engine.teller._alertmanager
            client._urls = (dead, world.alerts.url)
            await world.until(CaseState.NOTIFIED)
            told = world.told()
            assert (told[UP % dead], told[UP % world.alerts.url]) == (0, 1)
            assert world.engine.problems == []

    asyncio.run(story())


def test_before_any_alert_stands_it_is_known_whether_one_would_be_taken(servers: World) -> None:
    """An Alertmanager that is down is told of on a quiet day, and that it is back as well."""
    servers.fleet.jobs.clear()
    servers.alerts_reply["status"] = 503

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(2)
            assert "no Alertmanager takes the alerts" in world.engine.problems[0]
            assert world.told()[UP % world.alerts.url] == 0
            world.alerts_reply["status"] = 200
            await world.tick()
            assert world.engine.problems == []
            assert world.told()[UP % world.alerts.url] == 1
            quiet = len(world.alerts.received)
            await world.tick(8)
            # Once a minute, not in every tick.
            assert len(world.alerts.received) == quiet + 2

    asyncio.run(story())


def test_notices_that_alertmanager_takes_and_routes_nowhere_end_nobody_and_are_told(
    servers: World,
) -> None:
    """It answers 200 to everything; nobody comes to the last hop, so that nothing is proven."""
    servers.forwarding = False

    async def story() -> None:
        async with running(servers) as world:
            while world.engine.teller.undeliverable == 0:
                await world.tick()
            waited = world.clock.wall() - world.case().marks[-1].at
            assert waited <= world.engine.settings.notices.undelivered_after + TICK
            assert world.told()["gpuwarden_engine_notices_undeliverable"] == 1
            names = {one["labels"]["alertname"] for one in world.alerts.received[-1].json()}
            assert names == {"GpuwardenJobNotice", "GpuwardenNoticeUndeliverable"}
            await world.tick(80)
            assert world.state() is CaseState.DETECTED
            assert world.agent.requests == []
            # The route is mended: the deadline begins there, and all of it is kept.
            world.forwarding = True
            await world.tick(2)
            assert world.state() is CaseState.NOTIFIED
            assert world.case().notice_age <= TICK
            assert world.told()["gpuwarden_engine_notices_undeliverable"] == 0

    asyncio.run(story())


def test_while_alertmanager_is_down_nothing_that_stands_is_lost(servers: World) -> None:
    """A notice that nobody took is sent when it is back, and the deadline begins only there."""
    servers.alerts_reply["status"] = 500
    servers.forwarding = False

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(40)
            assert world.state() is CaseState.DETECTED
            assert world.slack.received == []
            world.alerts_reply["status"] = 200
            world.forwarding = True
            await world.tick(2)
            assert world.state() is CaseState.NOTIFIED
            assert world.case().notice_age <= 15
            assert len(world.slack.received) == 1
            assert json.dumps(world.alerts.received[-1].json()).count("GpuwardenJobNotice") == 1
            assert world.case().notified_at is not None

    asyncio.run(story())
