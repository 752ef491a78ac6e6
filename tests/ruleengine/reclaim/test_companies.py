"""What ends together with a job: due by the same stage, and with nothing against its own end."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.reclaim.scenes import HURRY, IDLE, JOB, Scene, Scheduler, decided
from tests.ruleengine.worlds import NODE, Job

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.guards import Blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpuwarden.ruleengine.reclaim.ports import Claim, Deed
    from gpuwarden.ruleengine.verdicts import JobFacts

SIBLING = "slurm-c1-4712-0"
LONG_AGO = 1_799_900_000.0
"""More than a day before: so much work is not to be lost."""


@dataclass
class Batch(Scheduler):
    """A platform that ends both jobs at once."""

    on_find: Callable[[], None] | None = None

    async def find(
        self, job: JobFacts, deed: Deed, *, offenders: Collection[str] = ()
    ) -> Claim | Blocked:
        """Recognise the attempt; the other one would end too."""
        claim = await super().find(job, deed, offenders=offenders)
        if self.on_find is not None:
            self.on_find()
        if isinstance(claim, Blocked) or SIBLING not in offenders:
            return claim
        return dataclasses.replace(claim, also=f"{SIBLING}, of the same batch")


def batch(world: World, *, started: float) -> tuple[Scene, Batch, Job]:
    """Two idle jobs that end together, and when the second began."""
    scene = Scene.of(world)
    platform = Batch(scene.fuse)
    scene.scheduler = scene.nodes.scheduler = platform
    world.platforms = (platform,)
    sibling = Job(
        SIBLING,
        uuid="GPU-7",
        instance=NODE,
        activity=dict(IDLE),
        started=started,
        run={"run_id": "run-7"},
    )
    world.fleet.jobs.append(sibling)
    return scene, platform, sibling


def test_a_job_that_is_due_and_spared_is_not_among_those_that_may_end(servers: World) -> None:
    """A day of its work would be lost: what protects it from its own end protects it here too."""
    scene, platform, _ = batch(servers, started=LONG_AGO)

    async def story() -> None:
        async with decided(scene) as world:
            assert world.state(SIBLING) is CaseState.DUE
            assert "work_lost" in world.why(SIBLING)
            assert platform.offenders == {JOB}

    asyncio.run(story())


def test_the_last_look_is_one_at_all_that_would_end(servers: World) -> None:
    """Until then the other one has become worth sparing: neither of them is ended."""
    scene, platform, sibling = batch(servers, started=1_799_990_000.0)

    def grown() -> None:
        sibling.started = LONG_AGO

    async def story() -> None:
        async with running(scene.world) as world:
            for _ in range(80):
                if platform.offenders:
                    break
                # Asked on the tick's facts; what changes here only the last look can see.
                platform.on_find = grown
                await world.tick(seconds=HURRY)
            else:
                pytest.fail(f"never asked: {world.why(JOB)}")
            assert platform.offenders == {JOB, SIBLING}
            assert world.engine.ledger.open_decisions() == []
            assert "not_all_offenders" in world.why(JOB)

    asyncio.run(story())


def test_what_ends_together_does_so_where_nothing_speaks_for_any_of_it(servers: World) -> None:
    """One decision, and its record says what else went."""
    scene, platform, _ = batch(servers, started=1_799_990_000.0)

    async def story() -> None:
        async with running(scene.world) as world:
            for _ in range(80):
                if world.engine.ledger.open_decisions():
                    break
                await world.tick(seconds=HURRY)
            else:
                pytest.fail(f"nothing decided: {world.why(JOB)} {world.why(SIBLING)}")
            assert platform.offenders == {JOB, SIBLING}
            assert len(world.engine.ledger.open_decisions()) == 1

    asyncio.run(story())
