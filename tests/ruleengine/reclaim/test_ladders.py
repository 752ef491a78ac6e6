"""Jobs that a platform owns are ended by it, step by step, and proven on every node."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import TypeAdapter
from tests.ruleengine.engines import World, running
from tests.ruleengine.reclaim.scenes import (
    HURRY,
    JOB,
    OTHER_NODE,
    Scene,
    decided,
    target_changed,
    until_step,
)
from tests.ruleengine.worlds import NODE, Job

from gpuwarden.agent_api import Action
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine import api_models, explain
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.decision_steps import steps_of
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.ports import Standing


async def over(world: World, seconds: float = 600.0) -> None:
    """Let the time pass that a decision takes, and settle it."""
    for _ in range(60):
        if not world.engine.ledger.open_decisions():
            break
        world.clock.pass_(seconds / 60)
        world.engine.reclaimer.follow()
        await asyncio.sleep(0.05)
    await world.settled()


def audit(world: World) -> list[str]:
    """What the audit says from the decision on."""
    kinds = world.kinds(JOB)
    return kinds[kinds.index("authorised") :]


def test_a_platforms_job_is_watched_asked_ended_and_proven(servers: World) -> None:
    """In this order; its processes are signalled by nobody but the platform."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            assert scene.scheduler.calls == ["ask"]
            (leave,) = scene.nodes.asked(Action.REQUEST_LEAVE)
            assert (leave.then, leave.run_id) == ("hold", "run-1")
            world.clock.pass_(59)
            await asyncio.sleep(0.1)
            assert scene.scheduler.calls == ["ask"]
            world.clock.pass_(2)
            await world.settled()
            assert scene.scheduler.calls == ["ask", "end terminate"]
            assert world.state(JOB) is CaseState.VERIFIED
            assert audit(world) == [
                "authorised", "acting", "watched", "asked", "platform", "ending", "told",
                "platform", "verified",
            ]  # fmt: skip
            (decision,) = world.engine.ledger.job_decisions(JOB)
            report = decision.decoded_report
            assert report is not None
            assert report.proof is not None
            assert report.proof.gone
            assert report.proof.memory_freed == 30 * 2**30
            assert {"leave_requested", "platform_notice", "platform_end", "proven"} <= set(
                report.steps
            )
            assert not [r for r in world.agent.requests if r.action is Action.TERMINATE]
            assert world.told()["gpu_released_success_total"] == 1

    asyncio.run(story())


def test_who_leaves_when_asked_is_not_ended(servers: World) -> None:
    """The platform says it is over, the node proves it, and the hard step never comes."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            scene.scheduler.standing = Standing.ENDED
            await world.settled()
            assert world.state(JOB) is CaseState.VERIFIED
            assert scene.scheduler.calls == ["ask"]
            # A run keeps its name: resumed by hand, it must not find its old request.
            assert len(scene.nodes.asked(Action.CANCEL)) == 1

    asyncio.run(story())


def test_a_job_on_two_nodes_is_one_decision_with_an_outcome_for_each(servers: World) -> None:
    """Proven only if both are; otherwise it says which node is not."""
    scene = Scene.of(servers, NODE, OTHER_NODE)
    scene.nodes.unproven["localhost"] = "still_listed"

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "incomplete"
            assert decision.reason == "localhost: still_listed"
            parts = world.engine.ledger.parts(decision.id)
            watches = {p.host: p.state for p in parts if p.action == "watch"}
            assert watches == {"127.0.0.1": "reclaimed", "localhost": "incomplete"}
            report = decision.decoded_report
            assert report is not None
            assert report.proof is not None
            assert not report.proof.gone
            assert report.proof.memory_freed == 30 * 2**30
            assert "proven" not in report.steps
            assert set(decision.gpus) == {"GPU-1", "GPU-2"}
            steps = steps_of(world.engine.ledger, decision.id)
            record = explain.decision_record(decision, None, steps)
            shown = TypeAdapter(api_models.Decision).validate_python(record)
            assert shown.steps is not None
            assert shown.steps.word == "ENDED"
            assert {(n.node, n.action): n.state for n in shown.steps.nodes} == {
                ("127.0.0.1", "watch"): "reclaimed",
                ("127.0.0.1", "request_leave"): "done",
                ("127.0.0.1", "cancel"): "done",
                ("localhost", "watch"): "incomplete",
                ("localhost", "request_leave"): "done",
                ("localhost", "cancel"): "done",
            }

    asyncio.run(story())


def test_no_second_victim_on_any_card_of_an_unproven_job(servers: World) -> None:
    """Neither on the node that could not prove it, while the job is still seen there."""
    scene = Scene.of(servers, NODE, OTHER_NODE)
    scene.nodes.unproven["localhost"] = "survivors"

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await world.settled()
            world.fleet.jobs.append(
                Job(
                    "proc-9", "bob", "GPU-2", activity={"cpu": 1_799_990_000.0}, instance=OTHER_NODE
                )
            )
            await world.tick(60)
            assert world.state("proc-9") is CaseState.DUE
            assert "incomplete_reclaim" in world.why("proc-9")

    asyncio.run(story())


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [("dead", "agent_unreachable"), ("refuses", "refused"), ("found", "another_attempt")],
)
def test_nothing_is_done_unless_everybody_is_ready(
    servers: World, trouble: str, reason: str
) -> None:
    """One node that does not answer or does not watch, or a platform that objects, is enough."""
    scene = Scene.of(servers, NODE, OTHER_NODE)
    if trouble == "dead":
        servers.agent.silent_hosts = {"localhost"}
    elif trouble == "refuses":
        scene.nodes.refuses["localhost"] = "nvml"
    else:
        scene.scheduler.found = Blocked("another_attempt", "it was requeued meanwhile")

    async def story() -> None:
        async with running(scene.world) as world:
            while not (world.why(JOB) or world.engine.ledger.job_decisions(JOB)):
                await world.tick(seconds=HURRY)
            await world.settled()
            if trouble == "refuses":
                (decision,) = world.engine.ledger.job_decisions(JOB)
                assert (decision.state, decision.reason) == (
                    "refused", "not watched: localhost: nvml",
                )  # fmt: skip
                assert world.engine.ledger.ends_since(0.0) == []
            else:
                assert world.why(JOB) == {reason}
                assert world.engine.ledger.job_decisions(JOB) == []
            assert scene.scheduler.calls == []
            assert scene.nodes.asked(Action.REQUEST_LEAVE) == []

    asyncio.run(story())


def test_without_an_adapter_nothing_is_done_and_the_remedy_is_told(servers: World) -> None:
    """By pid it is never ended."""
    scene = Scene.of(servers)
    servers.platforms = ()

    async def story() -> None:
        async with running(scene.world) as world:
            while world.state(JOB) is not CaseState.DUE:
                await world.tick()
            (block,) = world.engine.view.blocks["idle-held", JOB]
            assert block.reason == "platform"
            assert "give `slurm`" in block.sentence

    asyncio.run(story())


@pytest.mark.parametrize("way", ["kill switch", "pause"])
def test_the_hard_step_is_withheld_by_whoever_stops_everything(servers: World, way: str) -> None:
    """What was asked for is taken back, the attempt is not spent, and it is said why."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            if way == "kill switch":
                (world.folder / "halt").touch()
            else:
                world.engine.pauses.begin(by="ops", role="operator", reason="move", seconds=None)
            world.clock.pass_(61)
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "refused"
            assert decision.reason.startswith("withheld: ")
            assert scene.scheduler.calls == ["ask"]
            assert len(scene.nodes.asked(Action.CANCEL)) == 1
            assert world.engine.ledger.ends_since(0.0) == []

    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "state", "word"),
    [
        (target_changed(), "refused", "target_changed: "),
        (RefusedAction("forbidden", "no right to scancel"), "refused", "forbidden: "),
    ],
)
def test_a_platform_that_refuses_has_ended_nobody(
    servers: World, error: RefusedAction, state: str, word: str
) -> None:
    """It is not counted as an end, and not tried at once again."""
    scene = Scene.of(servers)
    scene.scheduler.answers = [error]

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == state
            assert decision.reason.startswith(word)
            assert scene.scheduler.calls == ["ask"]
            assert world.engine.ledger.ends_since(0.0) == []
            assert world.state(JOB) is CaseState.REFUSED

    asyncio.run(story())


def test_a_budget_that_forbids_the_end_for_now_is_waited_for(servers: World) -> None:
    """A disruption budget passes by itself; it is told again, within bounds."""
    scene = Scene.of(servers)
    scene.scheduler.answers = [RefusedAction("disruption_budget", "429") for _ in range(8)]

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await world.settled()
            assert scene.scheduler.calls == ["ask", "end terminate"]
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())


def test_a_budget_that_never_allows_it_is_told_and_nobody_is_ended(servers: World) -> None:
    """After five minutes it is given up, and the reason stays the platform's."""
    scene = Scene.of(servers)
    scene.scheduler.answers = [RefusedAction("disruption_budget", "429") for _ in range(10_000)]

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await until_step(world, "ending")
            await asyncio.sleep(0.05)
            world.clock.pass_(301)
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert (decision.state, decision.reason) == ("refused", "disruption_budget: 429")
            assert scene.scheduler.calls == ["ask"]

    asyncio.run(story())


@pytest.mark.parametrize("acted", [True, False])
def test_an_answer_that_is_lost_leads_to_no_second_end(servers: World, acted: bool) -> None:
    """Where it may have acted the platform is asked first what became of the attempt."""
    scene = Scene.of(servers)
    scene.scheduler.answers = [ServiceUnavailable("connection lost")]
    scene.scheduler.acts_before_error = acted

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await world.settled()
            assert scene.scheduler.calls == ["ask", "end terminate"]
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())


def test_an_attempt_that_hangs_is_incomplete_with_its_obstacle(servers: World) -> None:
    """The platform's own words say what holds it up."""
    scene = Scene.of(servers)
    scene.scheduler.ends_at_once = False

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await until_step(world, "proving")
            scene.scheduler.obstacle = "blocked_by_finalizer"
            await over(world)
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "incomplete"
            assert decision.reason.startswith("blocked_by_finalizer: slurm says ENDING")
            assert scene.scheduler.calls == ["ask", "end terminate"]

    asyncio.run(story())


@pytest.mark.parametrize("when", ["left by itself", "was ended"])
def test_a_job_that_its_platform_queues_again_is_held(servers: World, when: str) -> None:
    """Whether its trainer left to be queued or its controller replaces it: it does not start."""
    scene = Scene.of(servers)
    scene.scheduler.successor = "slurm-c1-4711-1"
    if when == "was ended":
        scene.scheduler.becomes = Standing.RETURNED

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            if when == "left by itself":
                scene.scheduler.standing = Standing.RETURNED
            else:
                world.clock.pass_(61)
            await world.settled()
            assert scene.scheduler.calls.count("end terminate") == (1 if "left" in when else 2)
            assert scene.scheduler.standing is Standing.ENDED
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())


@pytest.mark.parametrize("when", ["left by itself", "was ended"])
def test_a_job_that_runs_again_is_not_reclaimed(servers: World, when: str) -> None:
    """Its successor is named, and never ended under the decision that was about another attempt."""
    scene = Scene.of(servers)
    scene.scheduler.successor, scene.scheduler.successor_runs = "slurm-c1-4711-1", True
    scene.scheduler.becomes = Standing.RETURNED

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            if when == "left by itself":
                scene.scheduler.standing = Standing.RETURNED
            else:
                world.clock.pass_(61)
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "incomplete"
            assert decision.reason.startswith("returned: ")
            assert "slurm-c1-4711-1" in decision.reason
            assert scene.scheduler.standing is Standing.RETURNED

    asyncio.run(story())


def test_a_platform_that_falls_silent_is_no_proof(servers: World) -> None:
    """Not being able to see a job never means that it has ended."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            scene.scheduler.silent = True
            scene.nodes.holds["127.0.0.1"] = False
            world.clock.pass_(61)
            await over(world)
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "incomplete"
            assert decision.reason.startswith("platform_silent: ")

    asyncio.run(story())


def test_whoever_could_not_be_told_is_not_waited_for(servers: World) -> None:
    """No trainer and no notice: only the platform's own grace is of use to the job."""
    scene = Scene.of(servers)
    scene.nodes.delivers = False
    scene.scheduler.notices = False

    async def story() -> None:
        async with decided(scene) as world:
            await world.settled()
            assert scene.scheduler.calls == ["end terminate"]
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())


def test_the_claim_and_the_words_of_the_platform_are_kept(servers: World) -> None:
    """Who was recognised by what, and what was said of it, stand in the ledger."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await world.settled()
            act = world.engine.ledger.platform_act(scene.decided())
            assert act is not None
            assert json.loads(act.claim)["identity"] == {"job_id": JOB, "deed": "terminate"}
            assert (act.word, act.notice, act.tries) == ("ENDED", "sent", 1)
            assert scene.scheduler.offenders == frozenset({JOB})

    asyncio.run(story())


def test_a_decision_that_has_not_begun_in_time_lapses(servers: World) -> None:
    """Its engine died before every node watched: the next one finds it too old."""
    scene = Scene.of(servers, NODE, OTHER_NODE)
    scene.nodes.slow = {"localhost"}

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "watching")
        servers.clock.pass_(40)
        async with running(servers) as world:
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "lapsed"
            assert scene.scheduler.calls == []
            assert scene.nodes.asked(Action.REQUEST_LEAVE) == []
            assert world.engine.ledger.ends_since(0.0) == []

    asyncio.run(story())


def test_a_grace_runs_only_while_an_engine_does(servers: World) -> None:
    """Whoever was told a minute has it, whatever happened to the engine meanwhile."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(30)
            await asyncio.sleep(0.2)
        servers.clock.pass_(300)
        async with running(servers) as world:
            world.engine.reclaimer.follow()
            await asyncio.sleep(0.2)
            world.clock.pass_(25)
            await asyncio.sleep(0.2)
            assert scene.scheduler.calls == ["ask"]
            world.clock.pass_(10)
            await world.settled()
            assert scene.scheduler.calls == ["ask", "end terminate"]

    asyncio.run(story())


def test_an_end_whose_time_has_long_passed_is_not_made(servers: World) -> None:
    """What was judged an hour ago is judged anew: the request is taken back."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
        servers.clock.pass_(3600)
        async with running(servers) as world:
            world.engine.reclaimer.follow()
            await asyncio.sleep(0.2)
            world.clock.pass_(61)
            await world.settled()
            (decision,) = world.engine.ledger.job_decisions(JOB)
            assert decision.state == "refused"
            assert decision.reason.startswith("withheld: no engine ran when its time came")
            assert scene.scheduler.calls == ["ask"]
            assert len(scene.nodes.asked(Action.CANCEL)) == 1

    asyncio.run(story())


def test_a_platform_that_is_no_longer_named_leaves_the_decision_open(servers: World) -> None:
    """Until engine.yaml says again how it is reached; nothing is guessed meanwhile."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
        servers.platforms = ()
        async with running(servers) as world:
            world.clock.pass_(61)
            world.engine.reclaimer.follow()
            await asyncio.sleep(0.3)
            assert len(world.engine.ledger.open_decisions()) == 1
        servers.platforms = (scene.scheduler,)
        async with running(servers) as world:
            world.engine.reclaimer.follow()
            await asyncio.sleep(0.2)
            world.clock.pass_(61)
            await world.settled()
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())


def test_a_watch_that_ran_out_is_begun_anew_before_the_end(servers: World) -> None:
    """One of before would prove nothing of an end that came after it."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            scene.nodes.expired = {"127.0.0.1"}
            await asyncio.sleep(0.2)
            scene.nodes.expired = set()
            world.clock.pass_(61)
            await world.settled()
            assert len(scene.nodes.asked(Action.WATCH)) == 2
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())


def test_what_an_earlier_life_could_not_ask_is_asked_by_the_new_one(servers: World) -> None:
    """An agent that has heard the new engine obeys none of before: the question is signed anew."""
    scene = Scene.of(servers, NODE, OTHER_NODE)
    scene.nodes.silent = {"localhost"}

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "watching")
            scene.nodes.epochs["localhost"] = world.engine.epoch + 1
        scene.nodes.silent = set()
        async with running(servers) as world:
            await until_step(world, "waiting")
            assert world.engine.reclaimer.superseded == ""
            world.clock.pass_(61)
            await world.settled()
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())
