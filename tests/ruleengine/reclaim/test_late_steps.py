"""What was decided long ago is not carried out by an engine that comes back: it is judged anew."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.ruleengine.engines import World, running
from tests.ruleengine.reclaim.scenes import JOB, Scene, decided, until_step

from gpuwarden.agent_api import Action, ActionRequest
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.reclaim.ports import Standing

if TYPE_CHECKING:
    from tests.ruleengine.worlds import Answer


def test_an_end_that_was_interrupted_is_not_made_an_hour_later(servers: World) -> None:
    """The job was told to go, it is not known to have heard, and it may be at work by now."""
    scene = Scene.of(servers)
    scene.scheduler.answers = [ServiceUnavailable("the line was cut")]

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            scene.scheduler.silent = True
            world.clock.pass_(61)
            await until_step(world, "ending")
            for _ in range(200):
                if not scene.scheduler.answers:
                    break
                await asyncio.sleep(0.01)
            assert not scene.scheduler.answers
        scene.scheduler.silent = False
        servers.clock.pass_(3600)
        async with running(servers) as world:
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "refused"
            assert decision.reason.startswith("withheld: no engine ran when its time came")
            assert scene.scheduler.calls == ["ask"]
            assert len(scene.nodes.asked(Action.CANCEL)) == 1

    asyncio.run(story())


def test_a_trainer_is_not_asked_to_leave_an_hour_after_the_decision(servers: World) -> None:
    """A request that never arrived is not made up for once nobody knows whether it still holds."""
    scene = Scene.of(servers)

    def deaf(host: str, what: ActionRequest | str) -> Answer:
        asks = isinstance(what, ActionRequest) and what.action is Action.REQUEST_LEAVE
        return (503, b"{}") if asks else scene.nodes.answer(host, what)

    servers.agent.steps = deaf

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "asking")
        servers.agent.steps = scene.nodes.answer
        servers.clock.pass_(3600)
        async with running(servers) as world:
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "refused"
            assert decision.reason.startswith("withheld: no engine ran when its time came")
            assert scene.nodes.asked(Action.REQUEST_LEAVE) == []
            assert scene.scheduler.calls == []

    asyncio.run(story())


def test_a_job_that_comes_back_after_a_passing_refusal_is_held_all_the_same(
    servers: World,
) -> None:
    """A budget that forbade the first try says nothing about the hold after the second."""
    scene = Scene.of(servers)
    scene.scheduler.successor = "slurm-c1-4711-1"
    scene.scheduler.becomes = Standing.RETURNED
    scene.scheduler.answers = [RefusedAction("disruption_budget", "429")]

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await world.settled()
            assert scene.scheduler.calls.count("end terminate") == 2
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())
