"""That a job was ended is told once it can be heard, however long nobody could be told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.test_chaos_ledger import begin_again, lives
from tests.ruleengine.test_invariants import due

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.unheard_news import KEEP_SECONDS, NEWS_SECONDS, Quiet, UnheardNews

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATIENCE = 120.0
OVER_THE_NEWS = 70
"""Ticks: over a quarter of an hour."""


def told_of_the_end(world: World) -> int:
    """How often the owner was told that the job was ended."""
    texts = [request.body.decode() for request in world.slack.received]
    return sum("was ended" in text for text in texts)


def _down(world: World) -> None:
    world.alerts_reply["status"] = 503


@pytest.mark.parametrize("restarted", [False, True], ids=["one life", "restarted meanwhile"])
def test_an_end_is_told_after_an_outage_of_alertmanager(servers: World, *, restarted: bool) -> None:
    """It was away when the job was ended and for longer than news stands; told once, not never."""

    async def story() -> None:
        async with due(servers) as world:
            _down(world)
            world.forwarding = False
            await world.tick()
            await world.settled()
            assert world.agent.ended == ["proc-1"]
            world.fleet.jobs.clear()
            await world.tick(OVER_THE_NEWS)
            if not restarted:
                await _is_back(world)
        if restarted:
            async with running(servers) as world:
                await world.tick(4)
                await _is_back(world)

    asyncio.run(story())


async def _is_back(world: World) -> None:
    assert told_of_the_end(world) == 0
    world.alerts_reply["status"] = 200
    world.forwarding = True
    await world.tick(OVER_THE_NEWS)
    assert told_of_the_end(world) == 1
    standing = {
        alert["labels"]["alertname"]
        for alert in world.alerts.received[-1].json()
        if alert["endsAt"] > rfc3339(world.clock.wall())
    }
    assert "GpuwardenJobEnded" not in standing


def test_an_end_is_told_though_no_engine_ran_for_an_hour_after_it(servers: World) -> None:
    """It was killed right after its proof; the next life tells, and tells once."""

    async def story() -> None:
        async with due(servers) as world:
            world.forwarding = False
            _down(world)
            await world.tick()
            await world.settled()
            world.fleet.jobs.clear()
        servers.clock.pass_(3600)
        async with running(servers) as world:
            await _is_back(world)

    asyncio.run(story())


def test_what_was_told_is_not_told_again_after_a_restart(servers: World) -> None:
    """The last word of the former life is some minutes old: nobody gets a message twice for it."""

    async def story() -> None:
        async with due(servers) as world:
            await world.tick()
            await world.settled()
            world.fleet.jobs.clear()
            await world.tick(4)
            assert told_of_the_end(world) == 1
        servers.clock.pass_(600)
        async with running(servers) as world:
            await world.tick(OVER_THE_NEWS)
            assert told_of_the_end(world) == 1

    asyncio.run(story())


def _deaf_once_told(world: World) -> None:
    """Alertmanager goes down once the owner has the notice."""
    if world.state() is CaseState.NOTIFIED:
        _down(world)
        world.forwarding = False


def _killed_unheard(servers: World, tmp_path: Path, choose: Callable[[int], list[int]]) -> None:
    jobs = servers.fleet.jobs

    async def one(at: int, how: str) -> None:
        servers.alerts_reply["status"], servers.forwarding, servers.fleet.jobs = 200, True, jobs
        await lives(servers, at=at, how=how, after_tick=_deaf_once_told)
        servers.clock.pass_(45)  # longer than a request lives
        await lives(servers, after_tick=_deaf_once_told)
        assert servers.agent.ended == ["proc-1"], (at, how)
        servers.clock.pass_(2 * NEWS_SECONDS)
        servers.alerts_reply["status"], servers.forwarding, servers.fleet.jobs = 200, True, []
        async with running(servers) as world:
            await world.tick(10)
        assert told_of_the_end(servers) == 1, (at, how)

    async def story() -> None:
        writes = await lives(servers, after_tick=_deaf_once_told)
        number = 0
        for at in choose(writes):
            for how in ("before", "after", "full"):
                number += 1
                begin_again(servers, tmp_path, number)
                await one(at, how)

    asyncio.run(story())


def test_an_engine_killed_while_nobody_hears_it_ends_a_job_once_and_tells_it_once(
    servers: World, tmp_path: Path
) -> None:
    """Around its decision; Alertmanager is away from the notice on, until long after the end."""
    _killed_unheard(servers, tmp_path, lambda writes: [writes - 2])


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_an_engine_killed_at_any_write_of_its_act_tells_it_once(
    servers: World, tmp_path: Path
) -> None:
    """At each single write from the last look on."""
    _killed_unheard(servers, tmp_path, lambda writes: list(range(writes - 9, writes + 1)))


def test_quiet_times_are_remembered_until_their_news_was_out(tmp_path: Path) -> None:
    """Two with a moment between them are one; a long day between ends the former."""
    with Ledger(tmp_path / "l") as ledger:
        news = UnheardNews(ledger, PATIENCE)
        assert news.quiet(1000.0) is None
        for now in (1000.0, 1060.0):
            news.taken(now)
        assert news.quiet(1060.0 + PATIENCE) is None
        assert news.quiet(5000.0) == Quiet(1060.0, 5000.0)
        news.taken(5000.0)
        assert news.quiet(5030.0) == Quiet(1060.0, 5000.0)
        assert news.quiet(6000.0) == Quiet(1060.0, 6000.0)
        for now in range(5060, 5060 + int(NEWS_SECONDS) + 60, 60):
            news.taken(float(now))
        late = 5060.0 + NEWS_SECONDS + 60 - 60
        assert news.quiet(9000.0) == Quiet(late, 9000.0)
        again = UnheardNews(ledger, PATIENCE).quiet(9000.0)
        assert again is not None
        assert late - KEEP_SECONDS <= again.begun <= late
        # A clock that was set back makes nothing quiet.
        assert news.quiet(100.0) == Quiet(1060.0, 5000.0)
