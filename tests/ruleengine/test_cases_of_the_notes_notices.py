"""Public reports of alerts that acted on the wrong news, twice, or never, by kind."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.test_notices import ALICE, CONTEXT, OUTLOOK, rule, told
from tests.ruleengine.worlds import webhook

from gpuwarden.ruleengine import notices
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.notices import AlertBook

if TYPE_CHECKING:
    from collections.abc import Mapping

NOT_KNOWN = "0001-01-01T00:00:00Z"


async def _news(world: World) -> dict[str, Any]:
    """The body that Alertmanager would send of the owner's first notice."""
    world.forwarding = False
    while "notify" not in world.kinds():
        await world.tick()
    return webhook(world.alerts.received[-1].json())


@pytest.mark.parametrize(
    ("alerts", "messages"),
    [
        ([{"status": "resolved"}], 0),
        ([{"status": "firing", "endsAt": -1.0}], 0),
        ([{"status": "firing", "endsAt": -86400.0}], 0),
        ([{"status": "firing"}, {"status": "resolved"}], 1),
        ([{"status": "resolved"}, {"status": "firing"}, {"status": "resolved"}], 1),
        ([{"status": "firing", "endsAt": NOT_KNOWN}], 1),
        ([{"status": "firing", "endsAt": 240.0}], 1),
        ([{"status": "firing", "endsAt": "nonsense"}], 1),
    ],
)
def test_only_what_fires_now_leads_to_a_message(
    servers: World, alerts: list[dict[str, object]], messages: int
) -> None:
    """T1, T42: news of an end, or of what is over, does nothing; a mixed message does its part."""

    async def story() -> None:
        async with running(servers) as world:
            body = await _news(world)
            (first,) = body["alerts"]
            body["alerts"] = [
                {**first, **_dated(change, world.clock.wall()), "fingerprint": f"f{number}"}
                for number, change in enumerate(alerts)
            ]
            await world.hop.receive(body, ["slack"])
            assert len(world.slack.received) == messages
            assert world.agent.requests == []

    asyncio.run(story())


def _dated(change: Mapping[str, object], now: float) -> dict[str, object]:
    """With moments, given from now on, as Alertmanager writes them: with nanoseconds."""
    ends = change.get("endsAt")
    if not isinstance(ends, float):
        return dict(change)
    return {**change, "endsAt": rfc3339(now + ends).replace("Z", "456789Z")}


def test_a_message_that_comes_three_times_is_sent_once(servers: World) -> None:
    """T42: after a 5xx, or from each of several Alertmanagers, the same news comes again."""

    async def story() -> None:
        async with running(servers) as world:
            body = await _news(world)
            world.slack_reply["status"] = 500
            refused = await world.hop.receive(body, ["slack"])
            assert refused.retry
            world.slack_reply["status"] = 200
            before = len(world.slack.received)
            results = [await world.hop.receive(body, ["slack"]) for _ in range(3)]
            assert [result.delivered for result in results] == [1, 1, 1]
            assert len(world.slack.received) == before + 1

    asyncio.run(story())


@pytest.mark.parametrize("values", [("4.2 %", "4.3 %", "0 %"), ("1", "2", "3")])
def test_a_value_that_changes_makes_no_new_alert(values: tuple[str, ...]) -> None:
    """T38: three values are one alert, told once; only a level makes another one of it."""
    book, posts = AlertBook(resend=3600.0), 0
    for number, value in enumerate(values):
        case = msgspec.structs.replace(told(), because=f"measured {value}", elapsed=60.0 * number)
        alerts = notices.case_alerts(
            case, rule(), evidence=(), outlook=OUTLOOK, owner=ALICE, context=CONTEXT
        )
        book.update(alerts, 1000.0 + number)
        posts += book.due(1000.0 + number)
        book.posted(1000.0 + number)
    assert posts == 1


def test_the_end_of_a_job_is_news_that_outlives_the_notice(servers: World) -> None:
    """T37: what is resolved within group_wait is told to nobody, so the end is its own alert."""

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            await world.tick()
            now = rfc3339(world.clock.wall())
            stands = {
                one["labels"]["alertname"]: one["endsAt"] > now
                for one in world.alerts.received[-1].json()
            }
            assert stands["GpuwardenJobEnded"]
            assert not stands.get("GpuwardenJobNotice", False)
            await world.tick(int(14 * 60 / 15))
            names = [one["labels"]["alertname"] for one in world.alerts.received[-1].json()]
            assert "GpuwardenJobEnded" in names

    asyncio.run(story())


def test_silence_of_the_engine_ends_its_alerts(servers: World) -> None:
    """T39: each post says that the alert ends four repeats later; without more posts it does."""

    async def story() -> None:
        async with running(servers) as world:
            while "notify" not in world.kinds():
                await world.tick()
            (alert,) = world.alerts.received[-1].json()
            assert alert["endsAt"] == rfc3339(world.clock.wall() + 4 * 60)
            started = alert["startsAt"]
            await world.tick(8)
            assert world.alerts.received[-1].json()[0]["startsAt"] == started

    asyncio.run(story())


def test_a_notice_says_what_an_owner_asks_for(servers: World) -> None:
    """T44: when exactly and why, the cards, how to put it off, how often; no reminder after."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            await world.tick(4)
            (message,) = world.slack.received
            text = message.json()["text"]
            assert re.search(r"\d\d:\d\d.{0,20}Europe/Berlin", text), text
            for word in ("idle-held", "GPU utilization", "GPU 0", "gpuwarden keep proc-1", "1h"):
                assert word in text

    asyncio.run(story())
