"""What is only asked of a job: saving, and leaving to be queued again. Nobody is ended by it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import RULES, World, running
from tests.ruleengine.reclaim.scenes import HURRY, IDLE, OTHER_NODE, RUN, Nodes, Scene, until_step
from tests.ruleengine.worlds import NODE, Job

from gpuwarden.agent_api import Action
from gpuwarden.ruleengine.reclaim.ports import Standing

if TYPE_CHECKING:
    from gpuwarden.agent_api import ActionRequest
    from gpuwarden.ruleengine.records import Decision

JOB = "proc-1"
SAVE = "- {level: moderate, after: 4m, do: checkpoint, grace: 5m}"
LEAVE = "- {level: severe, after: 8m, do: yield, notice_delivered_for: 5m, grace: 10m}"
AGAIN = """- {level: severe, after: 8m, do: requeue, notice_delivered_for: 5m, grace: 60s,
     max_work_lost: 12h}"""


def scene_of(servers: World, *stages: str, job_id: str = JOB) -> Scene:
    """A world whose rule has these stages in the place of its last."""
    scene = Scene.of(servers)
    servers.fleet.jobs = [Job(job_id, activity=dict(IDLE), run=dict(RUN))]
    head = RULES.partition("  - {level: severe")[0].replace("MODE", "enforce")
    text = head + "".join(f"  {stage}\n" for stage in stages)
    (servers.folder / "rules.yaml").write_text(text)
    return scene


def decisions(world: World, job_id: str = JOB) -> list[Decision]:
    """What was decided about the job."""
    return world.engine.ledger.job_decisions(job_id)


async def asked(world: World, nodes: Nodes, action: Action) -> ActionRequest:
    """The first request of a kind, once the agent has it."""
    for _ in range(400):
        if nodes.asked(action):
            request = nodes.asked(action)[0]
            await until_step(world, "waiting", request.job_id)
            return request
        if world.engine.ledger.open_decisions():
            await asyncio.sleep(0.01)
        else:
            await world.tick(seconds=HURRY)
    pytest.fail(f"never asked: {world.why()} {world.kinds()}")


async def settled(world: World) -> Decision:
    """The first decision, once it has its result."""
    await world.settled()
    return decisions(world)[0]


def test_a_job_that_saves_when_it_is_asked_to_has_done_it(servers: World) -> None:
    """It is seen by a saved state that is newer than the request, and stays where it is."""
    scene = scene_of(servers, SAVE)

    async def story() -> None:
        async with running(servers) as world:
            request = await asked(world, scene.nodes, Action.REQUEST_CHECKPOINT)
            assert request.run_id == "run-1"
            assert request.grace == 300.0
            world.fleet.jobs[0].saved = world.clock.wall() + 1
            await world.tick()
            decision = await settled(world)
            assert (decision.action, decision.state) == ("checkpoint", "done")
            assert world.engine.ledger.ends_since(0.0) == []
            assert scene.nodes.asked(Action.WATCH) == []

    asyncio.run(story())


def test_a_state_of_before_the_request_is_none_of_it(servers: World) -> None:
    """When its time is over the request is taken back, and that is written down."""
    scene = scene_of(servers, SAVE)
    servers.fleet.jobs[0].saved = 1_799_999_000.0

    async def story() -> None:
        async with running(servers) as world:
            await asked(world, scene.nodes, Action.REQUEST_CHECKPOINT)
            world.clock.pass_(301)
            decision = await settled(world)
            assert (decision.state, decision.reason) == (
                "unheeded", "not saved when its time was over",
            )  # fmt: skip
            assert len(scene.nodes.asked(Action.CANCEL)) == 1

    asyncio.run(story())


@pytest.mark.parametrize("stage", [SAVE, LEAVE])
def test_a_trainer_that_cannot_read_requests_is_undeliverable(servers: World, stage: str) -> None:
    """With the node's reason; a pod without the mount, say."""
    scene = scene_of(servers, stage)
    scene.nodes.delivers = False

    async def story() -> None:
        async with running(servers) as world:
            for _ in range(80):
                await world.tick()
                await asyncio.sleep(0.02)
                if decisions(world):
                    break
            decision = await settled(world)
            assert decision.state == "undeliverable"
            assert "127.0.0.1: not_mounted" in decision.reason

    asyncio.run(story())


def test_a_job_that_leaves_when_it_is_asked_to_is_proven_gone(servers: World) -> None:
    """Watched before it was asked: at the end of its epoch, to be queued again."""
    scene = scene_of(servers, LEAVE)

    async def story() -> None:
        async with running(servers) as world:
            request = await asked(world, scene.nodes, Action.REQUEST_LEAVE)
            assert (request.then, request.at, request.grace) == ("requeue", "epoch", 600.0)
            assert len(scene.nodes.asked(Action.WATCH)) == 1
            scene.nodes.holds["127.0.0.1"] = False
            decision = await settled(world)
            assert (decision.action, decision.state) == ("yield", "verified")
            report = decision.decoded_report
            assert report is not None
            assert report.proof is not None
            assert report.proof.gone
            assert [end.id for end in world.engine.ledger.ends_since(0.0)] == [decision.id]
            # Its next attempt must not find the request of this one.
            assert len(scene.nodes.asked(Action.CANCEL)) == 1

    asyncio.run(story())


def test_a_job_that_stays_is_left_alone_and_it_is_written_down(servers: World) -> None:
    """No signal follows, the request is taken back, and it counts for no limit."""
    scene = scene_of(servers, LEAVE)

    async def story() -> None:
        async with running(servers) as world:
            await asked(world, scene.nodes, Action.REQUEST_LEAVE)
            world.clock.pass_(599)
            await asyncio.sleep(0.1)
            assert world.engine.ledger.open_decisions()
            world.clock.pass_(2)
            decision = await settled(world)
            assert (decision.state, decision.reason) == (
                "unheeded", "still there when its time was over",
            )  # fmt: skip
            assert world.engine.ledger.ends_since(0.0) == []
            assert world.agent.ended == []
            assert len(scene.nodes.asked(Action.CANCEL)) == 1

    asyncio.run(story())


def test_a_request_that_lost_its_reason_is_taken_back(servers: World) -> None:
    """Once, whoever asks for it how often, and also over the engine's death."""
    scene = scene_of(servers, LEAVE)

    async def story() -> None:
        async with running(servers) as world:
            await asked(world, scene.nodes, Action.REQUEST_LEAVE)
            (decision,) = world.engine.ledger.open_decisions()
            servers.agent.silent = True
            await world.engine.reclaimer.withdraw(decision, "its rule is gone")
        servers.agent.silent = False
        async with running(servers) as world:
            (decision,) = world.engine.ledger.open_decisions()
            await world.engine.reclaimer.withdraw(decision, "again")
            decision = await settled(world)
            assert (decision.state, decision.reason) == ("withdrawn", "its rule is gone")
            assert len(scene.nodes.asked(Action.CANCEL)) == 1

    asyncio.run(story())


def test_a_withdrawal_changes_nothing_about_an_end(servers: World) -> None:
    """What a platform was told to do is not taken back half way."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with running(servers) as world:
            while not world.engine.ledger.open_decisions():
                await world.tick()
            (decision,) = world.engine.ledger.open_decisions()
            await until_step(world, "waiting", "slurm-c1-4711-0")
            await world.engine.reclaimer.withdraw(decision, "no reason")
            world.clock.pass_(61)
            await world.settled()
            assert "end terminate" in scene.scheduler.calls

    asyncio.run(story())


@pytest.mark.parametrize("returns", [True, False])
def test_a_job_that_is_queued_again_must_be_seen_to_be(servers: World, returns: bool) -> None:
    """A platform that ends it and does not start it again has not done what it was told."""
    job_id = "slurm-c1-4711-0"
    scene = scene_of(servers, AGAIN, job_id=job_id)
    scene.scheduler.becomes = Standing.RETURNED if returns else Standing.ENDED

    async def story() -> None:
        async with running(servers) as world:
            for _ in range(80):
                await world.tick()
                if decisions(world, job_id):
                    break
            await asyncio.sleep(0.2)
            world.clock.pass_(61)
            await world.settled()
            (decision,) = decisions(world, job_id)
            (leave,) = scene.nodes.asked(Action.REQUEST_LEAVE)
            assert leave.then == "requeue"
            assert scene.scheduler.calls == ["ask", "end requeue"]
            assert decision.state == ("verified" if returns else "incomplete")
            assert returns or decision.reason.startswith("not_returned: ")

    asyncio.run(story())


def test_nothing_brings_a_bare_process_back(servers: World) -> None:
    """A requeue is not offered for it, and is never turned into an end."""
    scene_of(servers, AGAIN)

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(80)
            assert decisions(world) == []
            assert "skipped" in world.kinds()

    asyncio.run(story())


def test_all_nodes_of_a_job_are_asked_and_one_that_delivers_is_enough(servers: World) -> None:
    """Rank 0 runs on one of them; the others have nobody to ask."""
    scene = scene_of(servers, LEAVE, job_id="slurm-c1-4711-0")
    jobs = [
        Job(
            "slurm-c1-4711-0",
            "alice",
            f"GPU-{n}",
            instance=node,
            activity=dict(IDLE),
            run=dict(RUN),
        )
        for n, node in enumerate((NODE, OTHER_NODE))
    ]
    servers.fleet.jobs, servers.fleet.nodes = jobs, {NODE: True, OTHER_NODE: True}
    scene.nodes.undelivered = {"localhost"}

    async def story() -> None:
        async with running(servers) as world:
            await asked(world, scene.nodes, Action.REQUEST_LEAVE)
            await asyncio.sleep(0.1)
            assert len(scene.nodes.asked(Action.REQUEST_LEAVE)) == 2
            assert len(scene.nodes.asked(Action.WATCH)) == 2
            scene.nodes.holds["127.0.0.1"] = False
            await asyncio.sleep(0.1)
            assert world.engine.ledger.open_decisions()
            scene.nodes.holds["localhost"] = False
            await world.settled()
            (decision,) = decisions(world, "slurm-c1-4711-0")
            assert decision.state == "verified"

    asyncio.run(story())
