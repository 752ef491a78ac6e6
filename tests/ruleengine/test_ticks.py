"""A Prometheus that fails is spared, and a tick that comes late ends nothing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import TICK, World, running

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ticks import MAX_BACK_OFF_SECONDS, Breaker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def due(servers: World) -> AsyncIterator[World]:
    """A world in which nothing but a late tick keeps proc-1 from its end."""
    (servers.folder / "halt").touch()
    async with running(servers) as world:
        await world.until(CaseState.DUE)
        (world.folder / "halt").unlink()
        yield world


# -- the breaker


@pytest.mark.parametrize(
    ("failures", "tick", "wait"),
    [
        (0, 15.0, 0.0),
        (2, 15.0, 0.0),
        (3, 15.0, 30.0),
        (4, 15.0, 60.0),
        (50, 15.0, 60.0),
        (3, 1.0, 2.0),
        (5, 1.0, 8.0),
        (2000, 1.0, 60.0),
    ],
)
def test_it_is_asked_less_often_from_the_third_failure_on(
    failures: int, tick: float, wait: float
) -> None:
    """Twice the tick, then twice that, and never more than a minute."""
    breaker = Breaker(tick)
    for _ in range(failures):
        breaker.failed(100.0)
    assert breaker.wait(100.0) == wait
    assert breaker.wait(100.0 + MAX_BACK_OFF_SECONDS) == 0.0


def test_the_first_success_closes_it() -> None:
    """Nothing of the failures before is held against the next one."""
    breaker = Breaker(15.0)
    for _ in range(9):
        breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    assert (breaker.failures, breaker.wait(0.0)) == (1, 0.0)


def test_a_prometheus_that_is_down_is_spared_and_found_again(servers: World) -> None:
    """Ten minutes of ticks ask it some ten times; its first answer is judged, and it is told."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            before = world.case()
            world.fleet.down = True
            asked = []
            for _ in range(40):
                queries = world.fleet.queries
                await world.tick()
                asked.append(world.fleet.queries > queries)
            assert asked[:5] == [True, True, True, False, True]
            assert sum(asked) <= 14
            assert world.case() == before
            assert world.engine.ticks.outcomes["discarded"] == 40
            assert any("in a row" in text for text in world.engine.problems)
            assert world.told()["gpuwarden_engine_failed_ticks"] == sum(asked)
            # Who asks whether jobs are ended now is told that none is, and by whose order else.
            assert [block.reason for block in world.engine.view.halted] == ["no_facts"]
            (world.folder / "halt").touch()
            world.engine.pauses.begin(by="ops", role="admin", reason="why not", seconds=None)
            await world.tick()
            reasons = [block.reason for block in world.engine.view.halted]
            assert reasons == ["no_facts", "kill_switch", "paused"]
            (world.folder / "halt").unlink()
            world.engine.pauses.end(by="ops", role="admin", reason="all is well")
            world.fleet.down = False
            await world.tick(5)
            assert world.engine.problems == []
            assert "no_facts" not in {block.reason for block in world.engine.view.halted}
            assert world.told()["gpuwarden_engine_failed_ticks"] == 0
            queries = world.fleet.queries
            await world.tick()
            assert world.fleet.queries > queries

    asyncio.run(story())


# -- the budget


def test_a_late_tick_judges_and_ends_nothing(servers: World) -> None:
    """Half of its interval is what a tick may take; the next one in time ends the job."""

    async def story() -> None:
        async with due(servers) as world:
            waited = world.case().due_for
            first = world.fleet.queries + 1

            def delay() -> None:
                if world.fleet.queries == first:
                    world.clock.pass_(TICK / 2 + 0.5)

            world.fleet.before_answer = delay
            await world.tick()
            assert world.why() == {"late_tick"}
            assert world.agent.requests == []
            assert world.case().due_for > waited
            assert world.engine.ticks.outcomes["overrun"] == 1
            halted = 'gpuwarden_engine_enforcement_halted{reason="late_tick"}'
            assert world.told()[halted] == 1
            await world.tick()
            assert world.agent.ended == ["proc-1"]
            assert halted not in world.told()

    asyncio.run(story())


# -- how long it takes at the least

AT_ONCE = """
version: 1
limits: {terminate: {per_tick: 1, per_hour: 3, per_user_per_day: 2,
  halt_above_share_of_running: 10%}}
rules:
- id: idle-held
  description: As soon as it can be
  mode: enforce
  target: job
  match: {}
  cold_start: 0s
  ignore_phases: {}
  when: {silent_for: 1s, signals: [cpu]}
  for: 0s
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 0s, do: notify}
  - {level: severe, after: 0s, do: terminate, notice_delivered_for: 0s, grace: 1s,
     max_work_lost: 12h}
"""


def test_with_all_windows_at_zero_the_second_tick_acts(servers: World) -> None:
    """From the scrape that shows it: one tick detects and tells, the next one ends."""

    async def story() -> None:
        (servers.folder / "rules.yaml").write_text(AT_ONCE)
        (job,) = servers.fleet.jobs
        async with running(servers) as world:
            for _ in range(6):
                job.activity["cpu"] = world.clock.wall() + TICK
                await world.tick()
            assert world.state() is None
            await world.tick()
            assert "notify" in world.kinds()
            assert world.agent.requests == []
            await world.tick()
            assert world.agent.ended == [job.job_id]

    asyncio.run(story())
