"""A whole engine asks before it ends, goes on where nobody heeds it, takes back what it asked."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import RULES, World, running
from tests.ruleengine.reclaim.scenes import JOB, Scene
from tests.ruleengine.worlds import Job

from gpuwarden.agent_api import Action
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.keeps import KeepDesk
from gpuwarden.ruleengine.reclaim.ports import Standing
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CHECKPOINT = "  - {level: moderate, after: 3m, do: checkpoint, grace: 2m}\n"
YIELD = "  - {level: severe, after: 8m, do: yield, notice_delivered_for: 5m, grace: 4m}\n"
REQUEUE = (
    "  - {level: severe, after: 9m, do: requeue, notice_delivered_for: 5m, grace: 60s, "
    "max_work_lost: 12h}\n"
)
END = "  - {level: severe, after: 8m, do: terminate"


def rules(world: World, *softer: str, mode: str = "enforce") -> None:
    """The rule of these worlds, with softer stages before its end, which comes after 15 minutes."""
    text = RULES.replace("MODE", mode).replace("WHITELIST", "")
    last = END.replace("after: 8m", "after: 15m")
    (world.folder / "rules.yaml").write_text(text.replace(END, "".join(softer) + last))


async def passing(world: World, until: Callable[[], bool], limit: int = 120) -> None:
    """Tick until something holds; between two ticks decisions are followed."""
    for _ in range(limit):
        if until():
            return
        await world.tick()
        for _ in range(4):
            await asyncio.sleep(0.01)
    pytest.fail(f"{world.state(JOB)}: {world.why(JOB)}, {outcomes(world)}, {world.kinds(JOB)}")


def outcomes(world: World) -> list[tuple[str, str]]:
    """(action, state) of every decision about the job, oldest first."""
    found = world.engine.ledger.job_decisions(JOB)
    return [(decision.action, decision.state) for decision in found]


@contextlib.asynccontextmanager
async def leaving(scene: Scene) -> AsyncIterator[World]:
    """The engine, once the job was asked to leave and knows it."""
    rules(scene.world, YIELD)
    async with running(scene.world) as world:
        await passing(world, lambda: len(scene.nodes.asked(Action.REQUEST_LEAVE)) == 1)
        yield world


def test_a_job_that_heeds_nothing_is_asked_to_save_to_leave_and_is_then_ended(
    servers: World,
) -> None:
    """Each once, in this order, and the attempt is ended once."""
    scene = Scene.of(servers)
    rules(servers, CHECKPOINT, YIELD)

    async def story() -> None:
        async with running(servers) as world:
            await passing(world, lambda: world.state(JOB) is CaseState.VERIFIED)
            assert outcomes(world) == [
                ("checkpoint", "unheeded"),
                ("yield", "unheeded"),
                ("terminate", "verified"),
            ]
            (save,) = scene.nodes.asked(Action.REQUEST_CHECKPOINT)
            assert save.run_id == "run-1"
            leave, hold = scene.nodes.asked(Action.REQUEST_LEAVE)
            assert (leave.then, hold.then) == ("requeue", "hold")
            assert scene.scheduler.calls.count("end terminate") == 1
            case = world.case(JOB)
            assert [(act.do, act.state.value) for act in case.acts] == outcomes(world)
            kinds = world.kinds(JOB)
            assert kinds.count("due") == 2
            assert kinds.index("notified") < kinds.index("due")
            assert world.told()["gpu_released_success_total"] == 1

    asyncio.run(story())


def test_a_job_that_leaves_when_it_is_asked_is_proven_and_never_ended(servers: World) -> None:
    """The proof is that its cards are free; nothing harder follows."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with leaving(scene) as world:
            scene.scheduler.standing = Standing.RETURNED
            await passing(world, lambda: world.state(JOB) is CaseState.VERIFIED)
            world.fleet.jobs = []
            await passing(world, lambda: world.state(JOB) is None)
            assert outcomes(world) == [("yield", "verified")]
            assert "end terminate" not in scene.scheduler.calls

    asyncio.run(story())


def test_a_keep_takes_the_request_to_leave_back_and_moves_all_that_follows(
    servers: World,
) -> None:
    """The trainer is told to stay, and asked anew only after the time that was granted."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with leaving(scene) as world:
            KeepDesk(world.engine).grant(
                "idle-held", JOB, role=Role.OWNER, by="alice", reason="mine", seconds=1200.0
            )
            await passing(world, lambda: outcomes(world) == [("yield", "withdrawn")])
            assert scene.nodes.asked(Action.CANCEL)
            assert world.state(JOB) is CaseState.NOTIFIED
            await world.tick(int(900 / 15))
            assert outcomes(world) == [("yield", "withdrawn")]
            await passing(world, lambda: len(scene.nodes.asked(Action.REQUEST_LEAVE)) == 2)
            assert "end terminate" not in scene.scheduler.calls

    asyncio.run(story())


def _works(world: World) -> None:
    world.fleet.jobs[0].utilization = 0.9


def _observes(world: World) -> None:
    rules(world, YIELD, mode="observe")


def _is_gone(world: World) -> None:
    _observes(world)
    path = world.folder / "rules.yaml"
    path.write_text(path.read_text().replace("id: idle-held", "id: idle-other"))


@pytest.mark.parametrize("change", [_works, _observes, _is_gone], ids=lambda f: f.__name__)
def test_a_request_to_leave_is_taken_back_when_its_reason_is_gone(
    servers: World, change: Callable[[World], None]
) -> None:
    """The job works again, the rule only observes or is no more: the trainer may stay."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with leaving(scene) as world:
            change(world)
            await passing(world, lambda: outcomes(world) == [("yield", "withdrawn")])
            assert scene.nodes.asked(Action.CANCEL)
            if change is not _observes:
                await passing(world, lambda: world.state(JOB) is None)
            await world.tick(80)
            assert outcomes(world) == [("yield", "withdrawn")]

    asyncio.run(story())


def test_an_engine_that_was_restarted_takes_the_request_back_as_well(servers: World) -> None:
    """What lost its reason while no engine ran is not forgotten."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with leaving(scene):
            pass
        _observes(servers)
        async with running(servers) as world:
            await passing(world, lambda: outcomes(world) == [("yield", "withdrawn")])
            assert scene.nodes.asked(Action.CANCEL)

    asyncio.run(story())


def test_a_job_without_a_trainer_is_asked_for_nothing_and_ended_at_its_time(
    servers: World,
) -> None:
    """What cannot be done is written down, and holds nothing back."""
    Scene.of(servers)
    servers.fleet.jobs[0].run = None
    rules(servers, CHECKPOINT, YIELD)

    async def story() -> None:
        async with running(servers) as world:
            await passing(world, lambda: world.state(JOB) is CaseState.VERIFIED)
            assert outcomes(world) == [("terminate", "verified")]
            case = world.case(JOB)
            assert [(act.do, act.state.value) for act in case.acts] == [
                ("checkpoint", "skipped"),
                ("yield", "skipped"),
                ("terminate", "verified"),
            ]
            assert case.elapsed >= 15 * 60
            assert world.kinds(JOB).count("skipped") == 2

    asyncio.run(story())


def test_a_bare_process_is_not_requeued_since_nothing_would_bring_it_back(
    servers: World,
) -> None:
    """The node's agent ends it at the time of the last stage."""
    rules(servers, REQUEUE)

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.VERIFIED, limit=120)
            (end,) = [r for r in world.agent.requests if r.action is Action.TERMINATE]
            assert end.job_id == "proc-1"
            acts = [(act.do, act.state.value) for act in world.case().acts]
            assert acts == [("requeue", "skipped"), ("terminate", "verified")]
            (event,) = [e for e in world.engine.ledger.events("proc-1") if e["kind"] == "skipped"]
            assert "nothing would bring it back" in str(event)

    asyncio.run(story())


def test_a_requeue_is_the_platforms_own_and_ends_the_attempt(servers: World) -> None:
    """The job comes back as another attempt; nothing harder follows for this one."""
    scene = Scene.of(servers)
    scene.scheduler.becomes = Standing.RETURNED
    rules(servers, REQUEUE)

    async def story() -> None:
        async with running(servers) as world:
            await passing(world, lambda: world.state(JOB) is CaseState.VERIFIED)
            await world.tick(40)
            assert outcomes(world) == [("requeue", "verified")]
            assert scene.scheduler.calls.count("end requeue") == 1

    asyncio.run(story())


def test_a_request_counts_for_the_limits_while_it_stands_and_the_jobs_own_not_against_it(
    servers: World,
) -> None:
    """One owner's two jobs: the second waits for the first's cool-down, its own end does not."""
    scene = Scene.of(servers)
    rules(servers, YIELD)
    second = Job(
        f"{JOB[:-1]}1",
        uuid="GPU-2",
        activity=dict(servers.fleet.jobs[0].activity),
        run={"run_id": "run-2"},
    )
    servers.fleet.jobs.append(second)

    async def story() -> None:
        async with running(servers) as world:
            await passing(world, lambda: len(scene.nodes.asked(Action.REQUEST_LEAVE)) == 1)
            await world.tick(2)
            assert "cool_down" in world.why(second.job_id) | world.why(JOB)
            first = scene.nodes.asked(Action.REQUEST_LEAVE)[0].job_id
            found = world.engine.ledger.job_decisions
            await passing(
                world, lambda: [d.state for d in found(first)][1:] == ["verified"], limit=160
            )
            assert [d.action for d in found(first)] == ["yield", "terminate"]

    asyncio.run(story())


def test_a_missed_state_is_asked_for_before_the_end_and_judged_then(servers: World) -> None:
    """T51: who saves when asked loses little and is ended; who does not would lose too much."""
    scene = Scene.of(servers)
    rules(servers, CHECKPOINT)
    path = servers.folder / "rules.yaml"
    path.write_text(path.read_text().replace("max_work_lost: 12h", "max_work_lost: 30m"))

    async def story() -> None:
        async with running(servers) as world:
            await passing(world, lambda: world.state(JOB) is CaseState.DUE)
            await world.tick(8)
            assert outcomes(world) == [("checkpoint", "unheeded")]
            assert world.why(JOB) == {"work_lost"}
            world.fleet.jobs[0].saved = world.clock.wall()
            await passing(world, lambda: world.state(JOB) is CaseState.VERIFIED)
            assert outcomes(world)[1:] == [("terminate", "verified")]
            assert scene.scheduler.calls.count("end terminate") == 1

    asyncio.run(story())


def test_a_notice_tells_each_step_with_its_time_and_how_to_put_them_off(servers: World) -> None:
    """T44: nobody is surprised by the first of them, nor by the last."""
    Scene.of(servers)
    rules(servers, CHECKPOINT, YIELD)

    async def story() -> None:
        async with running(servers) as world:
            await passing(world, lambda: world.state(JOB) is CaseState.NOTIFIED)
            (message,) = world.slack.received
            text = message.json()["text"]
            steps = text.partition("*What happens next:*")[2].partition("*To keep it:*")[0]
            found = [line for line in steps.splitlines() if line.startswith("- ")]
            assert [len(re.findall(r"\d\d:\d\d:\d\d", line)) for line in found] == [1, 1, 1]
            for line, words in zip(found, ("save its state", "leave", "is ended"), strict=True):
                assert words in line
            assert f"gpuwarden keep {JOB}" in text

    asyncio.run(story())
