"""The engine is killed between any two steps of an end: what is taken up ends the job once."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.ruleengine.engines import TICK, World, running
from tests.ruleengine.reclaim.scenes import HURRY, JOB, OTHER_NODE, Fuse, Killed, Scene
from tests.ruleengine.worlds import NODE

from gpuwarden.agent_api import Action
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ledger import Ledger

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator
    from pathlib import Path

POINTS = range(1, 61)
"""Steps, to disk or platform, at which the engine dies; the last ones are never reached."""
FEW = (2, 12, 20, 24, 27, 33)


class FusedLedger(Ledger):
    """A ledger that kills its engine before or after the n-th write from the decision on."""

    def __init__(self, path: Path, fuse: Fuse, point: int) -> None:
        self._fuse = fuse
        self._point: int | None = point
        super().__init__(path)

    def authorise(self, *about: Any, **more: Any) -> None:
        """The fuse burns from here on."""
        if self._point is not None:
            self._fuse.left, self._point = self._point, None
        super().authorise(*about, **more)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._fuse.step("before a write")
        with super()._transaction() as db:
            yield db
        self._fuse.step("after a write")


async def killed(scene: Scene, point: int) -> None:
    """Run the engine until it is killed, or is done with the job."""
    servers = scene.world
    servers.open_ledger = lambda path: FusedLedger(path, scene.fuse, point)
    async with running(servers) as world:
        for _ in range(150):
            try:
                decided = bool(world.engine.ledger.job_decisions(JOB))
                await world.tick(seconds=TICK if decided else HURRY)
            except Killed:
                return
            await asyncio.sleep(0.03)
            if scene.fuse.dead or world.state(JOB) is CaseState.VERIFIED:
                return
    pytest.fail("neither killed nor done")


async def taken_up(scene: Scene) -> World:
    """Start it again, and let it come to its end."""
    scene.fuse.left, scene.fuse.dead = None, False
    scene.world.open_ledger = Ledger
    async with running(scene.world) as world:
        for _ in range(150):
            if world.state(JOB) is CaseState.VERIFIED:
                break
            await world.tick()
            await asyncio.sleep(0.03)
        else:
            pytest.fail(f"still {world.state(JOB)} after dying {scene.fuse.at}: {world.why(JOB)}")
        decisions = world.engine.ledger.job_decisions(JOB)
        assert [item.state for item in decisions if item.state != "lapsed"] == ["verified"]
        assert len(world.engine.ledger.ends_since(0.0)) == 1
        kinds = world.kinds(JOB)
        steps = [kind for kind in kinds if kind in ("watched", "asked", "ending", "verified")]
        assert steps == ["watched", "asked", "ending", "verified"]
    return world


def survives(servers: World, point: int) -> None:
    """One death and one life after it."""
    scene = Scene.of(servers, NODE, OTHER_NODE)

    async def story() -> None:
        await killed(scene, point)
        await taken_up(scene)
        assert scene.scheduler.calls.count("ask") <= 1
        assert scene.scheduler.calls.count("end terminate") == 1
        assert scene.scheduler.calls[-1] == "end terminate"
        asked = scene.nodes.asked(Action.REQUEST_LEAVE)
        assert len({request.decision_id for request in asked}) <= 1

    asyncio.run(story())


@pytest.mark.parametrize("point", FEW)
def test_an_engine_that_was_killed_ends_a_job_once(servers: World, point: int) -> None:
    """Some of the points, in every run; see below for all."""
    survives(servers, point)


@pytest.mark.sweep
@pytest.mark.parametrize("point", POINTS)
def test_wherever_it_is_killed_a_job_is_ended_once(servers: World, point: int) -> None:
    """Before and after each write, and before and after the platform has acted."""
    survives(servers, point)
