"""Whatever fails while a platform's job is being ended, in whatever order: it ends at most once."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import TICK, World, running
from tests.ruleengine.reclaim.scenes import HURRY, JOB, OTHER_NODE, Scene, target_changed
from tests.ruleengine.worlds import NODE

from gpuwarden.agent_api import Action
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.reclaim.ports import Standing

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 12
FAULTS = (
    "time", "time", "time", "agent", "platform", "kill switch", "leaves", "lost answer",
    "answer lost after acting", "target changed", "budget", "restart",
)  # fmt: skip


class Storm:
    """Faults as they come; remembers what must not have been done under them.

    Args:
        scene: which they befall.
        seed: decides their order.
    """

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene = scene
        self.wrongs: list[str] = []
        self._random = random.Random(seed)  # noqa: S311 (tests, which have to be repeatable)
        self._halt = scene.world.folder / "halt"
        scene.scheduler.on_end = self._watch_end

    def _watch_end(self) -> None:
        if self._halt.exists():
            self.wrongs.append("ended while the kill switch was on")
        if not self.scene.nodes.asked(Action.WATCH):
            self.wrongs.append("ended without a watch")

    def strike(self) -> bool:
        """One fault, or the end of one; says whether the engine is to be killed."""
        scene, fault = self.scene, self._random.choice(FAULTS)
        strikes: dict[str, Callable[[], object]] = {
            "time": lambda: scene.world.clock.pass_(self._random.choice((5, 15, 40))),
            "agent": lambda: scene.nodes.silent.symmetric_difference_update({"localhost"}),
            "platform": lambda: setattr(scene.scheduler, "silent", not scene.scheduler.silent),
            "kill switch": self._switch,
            "leaves": self._leave,
            "lost answer": lambda: scene.scheduler.answers.append(ServiceUnavailable("lost")),
            "answer lost after acting": self._lose_after_acting,
            "target changed": lambda: scene.scheduler.answers.append(target_changed()),
            "budget": lambda: scene.scheduler.answers.append(
                RefusedAction("disruption_budget", "429")
            ),
            "restart": lambda: None,
        }
        strikes[fault]()
        return fault == "restart"

    def _switch(self) -> None:
        if self._halt.exists():
            self._halt.unlink()
        else:
            self._halt.touch()

    def _leave(self) -> None:
        if self.scene.scheduler.standing is Standing.RUNNING and self._random.random() < 0.3:
            self.scene.scheduler.standing = Standing.ENDED

    def _lose_after_acting(self) -> None:
        self.scene.scheduler.answers.append(ServiceUnavailable("cut off"))
        self.scene.scheduler.acts_before_error = True

    def pass_over(self) -> None:
        """Nothing fails any more."""
        self.scene.nodes.silent.clear()
        self.scene.scheduler.silent = False
        self.scene.scheduler.answers.clear()
        self._halt.unlink(missing_ok=True)


async def begun(world: World) -> None:
    """Tick until something is decided about the job."""
    for _ in range(80):
        if world.engine.ledger.job_decisions(JOB):
            return
        await world.tick(seconds=HURRY)
    pytest.fail(f"nothing decided: {world.why(JOB)}")


async def weathered(world: World) -> None:
    """Let what is open come to its result once nothing fails any more."""
    for _ in range(200):
        if not world.engine.ledger.open_decisions():
            return
        world.clock.pass_(5.0)
        world.engine.reclaimer.follow()
        await asyncio.sleep(0.03)
    pytest.fail("a decision stays open")


def rages(servers: World, seed: int) -> None:
    """One storm, and what is left after it."""
    scene = Scene.of(servers, NODE, OTHER_NODE)
    storm = Storm(scene, seed)

    async def story() -> None:
        left = ROUNDS
        async with running(servers) as world:
            await begun(world)
            while left and not storm.strike():
                left -= 1
                world.engine.reclaimer.follow()
                await asyncio.sleep(0.05)
        while left:
            async with running(servers) as world:
                while left:
                    left -= 1
                    await world.tick(seconds=TICK)
                    await asyncio.sleep(0.05)
                    if storm.strike():
                        break
        storm.pass_over()
        async with running(servers) as world:
            await weathered(world)
            decisions = world.engine.ledger.job_decisions(JOB)
            ends = scene.scheduler.calls.count("end terminate")
            states = [item.state for item in decisions]
            assert storm.wrongs == []
            assert ends <= 1
            assert scene.scheduler.calls.count("ask") <= len(decisions)
            if ends:
                # Whoever was ended is never told to have been spared.
                assert states[-1] in ("verified", "incomplete"), decisions[-1].reason
            if "verified" in states:
                assert scene.scheduler.standing is Standing.ENDED
            standing = [state for state in states if state not in ("refused", "lapsed")]
            assert len(standing) <= 1
            assert len(world.engine.ledger.ends_since(0.0)) == len(standing)

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_ends_a_job_at_most_once(servers: World, seed: int) -> None:
    """A few in every run; see below for more."""
    rages(servers, seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 180))
def test_no_storm_ends_a_job_twice(servers: World, seed: int) -> None:
    """Deaths of the engine, agents and a platform that fall silent, refusals, lost answers."""
    rages(servers, seed)
