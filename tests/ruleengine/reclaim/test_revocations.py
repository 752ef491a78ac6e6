"""What speaks against a decision after it was made stops whatever cannot be undone yet."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.reclaim.scenes import IDLE, JOB, Scene, Scheduler, decided, until_step
from tests.ruleengine.worlds import NODE, Job

from gpuwarden.agent_api import Action, Outcome
from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.keeps import KeepDesk
from gpuwarden.ruleengine.reclaim.ports import Standing
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpuwarden.agent_api import ActionRequest
    from gpuwarden.ruleengine.reclaim.ports import Claim, Deed
    from gpuwarden.ruleengine.records import Decision
    from gpuwarden.ruleengine.verdicts import JobFacts

SIBLING = "slurm-c1-4712-0"
ENTRY = """
whitelist:
- {match: {MATCH}, rules: [idle-held], reason: "a demo for the board", approved_by: ops,
   expires: 2099-01-01T00:00:00Z}
"""


def spared(match: str) -> str:
    """A whitelist of one entry."""
    return ENTRY.replace("MATCH", match)


def kept(world: World, job_id: str = JOB) -> None:
    """An operator keeps a job for an hour."""
    desk = KeepDesk(world.engine)
    desk.grant("idle-held", job_id, role=Role.OPERATOR, by="ops", reason="demo", seconds=3600)


def result(world: World) -> Decision:
    """The only decision there is."""
    (decision,) = world.engine.ledger.job_decisions(JOB)
    return decision


WAYS: dict[str, tuple[Callable[[World], None], str]] = {
    "whitelist": (lambda world: world.rules(whitelist=spared("user: alice")), "whitelist: "),
    "mode": (lambda world: world.rules("warn"), "the rule's mode is warn"),
    "rule": (
        lambda world: (world.folder / "rules.yaml").write_text(
            (world.folder / "rules.yaml").read_text().replace("id: idle-held", "id: another")
        ),
        "the rule is no longer in force",
    ),
    "keep": (kept, "the job is kept"),
}


@pytest.mark.parametrize(
    "way",
    [
        "whitelist",
        "keep",
        *(pytest.param(way, marks=pytest.mark.sweep) for way in ("mode", "rule")),
    ],
)
def test_who_is_spared_during_the_grace_is_told_so_at_once(servers: World, way: str) -> None:
    """The request to leave is taken back while the job may still stay, and no end follows."""
    scene = Scene.of(servers)
    change, words = WAYS[way]

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            change(world)
            await world.settled()
            assert result(world).state == "refused"
            assert result(world).reason.startswith(f"withheld: {words}")
            assert scene.scheduler.calls == ["ask"]
            assert len(scene.nodes.asked(Action.CANCEL)) == 1
            assert world.state(JOB) is CaseState.REFUSED
            assert world.engine.ledger.ends_since(0.0) == []

    asyncio.run(story())


def test_what_the_job_does_in_its_grace_ends_it_no_later(servers: World) -> None:
    """To save and to leave is work: who could end a grace by it would never be ended."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.fleet.jobs[0].utilization = 0.9
            await world.tick(count=4, seconds=10)
            assert world.case(JOB).last == "no"
            world.clock.pass_(31)
            await world.settled()
            assert scene.scheduler.calls == ["ask", "end terminate"]
            assert world.state(JOB) is CaseState.VERIFIED

    asyncio.run(story())


@pytest.mark.parametrize("back", [False, True], ids=["for good", "for a moment"])
def test_a_job_that_changes_hands_in_its_grace_is_not_ended_on_the_former_owners_notice(
    servers: World, *, back: bool
) -> None:
    """The new owner was told nothing yet; a label that only flickers takes nothing back."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            for user in ("bob", "alice") if back else ("bob",):
                world.fleet.jobs[0].user = user
                await world.tick(seconds=5)
            assert result(world).finished_at is None
            world.clock.pass_(61)
            await world.settled()
            if back:
                assert world.state(JOB) is CaseState.VERIFIED
                return
            assert result(world).reason.startswith("withheld: its owner is another one")
            assert scene.scheduler.calls == ["ask"]
            assert len(scene.nodes.asked(Action.CANCEL)) == 1
            told = len(world.slack.received)
            while len(world.engine.ledger.job_decisions(JOB)) < 2:
                await world.tick()
            assert "U0BOB0001" in {r.json()["channel"] for r in world.slack.received[told:]}
            assert world.engine.ledger.job_decisions(JOB)[-1].user == "bob"

    asyncio.run(story())


def test_files_that_are_wrong_for_a_while_hold_back_only_what_cannot_be_undone(
    servers: World,
) -> None:
    """Somebody is at work on them: until they can be read again nobody knows whom they spare."""
    scene = Scene.of(servers)
    scene.scheduler.silent = True

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            good = (world.folder / "rules.yaml").read_text()
            (world.folder / "rules.yaml").write_text("version: [")
            world.clock.pass_(30)
            await asyncio.sleep(0.2)
            assert result(world).finished_at is None
            (world.folder / "rules.yaml").write_text(good)
            scene.scheduler.silent = False
            world.clock.pass_(31)
            await world.settled()
            assert scene.scheduler.calls == ["ask", "end terminate"]

    asyncio.run(story())


@pytest.mark.sweep
def test_files_that_are_still_wrong_at_the_end_of_the_grace_spare_the_job(servers: World) -> None:
    """It is judged anew once they can be read."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            (world.folder / "rules.yaml").write_text("version: [")
            world.clock.pass_(61)
            await world.settled()
            assert result(world).state == "refused"
            assert "not usable" in result(world).reason
            assert scene.scheduler.calls == ["ask"]

    asyncio.run(story())


def test_a_restarted_engine_knows_by_what_its_decision_wrote_down_whom_the_whitelist_means(
    servers: World,
) -> None:
    """No tick has seen the job since, and nothing else says in which cgroup it runs."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            (job,) = world.engine.view.facts.jobs.values() if world.engine.view.facts else ()
            ((_, cgroup),) = job.executables
        servers.rules(whitelist=spared(f'cgroup: "{cgroup}"'))
        servers.clock.pass_(61)
        async with running(servers) as world:
            await world.settled()
            assert result(world).reason.startswith("withheld: whitelist: a demo for the board")
            assert scene.scheduler.calls == ["ask"]

    asyncio.run(story())


@pytest.mark.sweep
def test_a_change_that_means_others_stops_nothing(servers: World) -> None:
    """A new entry, and a decision of before a restart, whose job is gone from every list."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
        servers.rules(whitelist=spared('cgroup: "/system.slice/other.service"'))
        async with running(servers) as world:
            while world.engine.ledger.open_decisions():
                world.engine.reclaimer.follow()
                world.clock.pass_(10)
                await asyncio.sleep(0.05)
            assert scene.scheduler.calls == ["ask", "end terminate"]

    asyncio.run(story())


@dataclass
class Pair(Scheduler):
    """A platform that ends both jobs at once."""

    async def find(
        self, job: JobFacts, deed: Deed, *, offenders: Collection[str] = ()
    ) -> Claim | Blocked:
        """Recognise the attempt, with the other one."""
        claim = await super().find(job, deed, offenders=offenders)
        if isinstance(claim, Blocked):
            return claim
        other = SIBLING if job.job_id == JOB else JOB
        return dataclasses.replace(claim, also=f"{other}, of the same batch", company=(other,))


def test_a_keep_of_what_would_end_together_with_it_spares_both(servers: World) -> None:
    """The platform cannot end one without the other."""
    scene = Scene.of(servers)
    scene.scheduler = scene.nodes.scheduler = pair = Pair(scene.fuse)
    servers.platforms = (pair,)
    servers.fleet.jobs.append(
        Job(SIBLING, uuid="GPU-7", instance=NODE, activity=dict(IDLE), run={"run_id": "run-7"})
    )

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            kept(world, SIBLING)
            await world.settled()
            assert result(world).reason == (
                f"withheld: {SIBLING} may end together with it, and must not: the job is kept"
            )
            assert pair.calls == ["ask"]

    asyncio.run(story())


@pytest.mark.sweep
def test_a_keep_comes_too_late_once_the_platform_was_told(servers: World) -> None:
    """The answer says so, instead of pretending; during the grace it does not."""
    scene = Scene.of(servers)
    scene.scheduler.ends_at_once = False

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await until_step(world, "proving")
            with pytest.raises(Refusal, match="already being ended"):
                kept(world)

    asyncio.run(story())


def test_a_job_that_is_kept_during_its_grace_has_all_of_that_time(servers: World) -> None:
    """The keep of the last minute is worth what it says."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            kept(world)
            await world.settled()
            rule = world.engine.rulebook.rule("idle-held")
            assert rule is not None
            assert cases.remaining(world.case(JOB), rule) == pytest.approx(3600)

    asyncio.run(story())


def test_what_comes_back_days_later_is_not_held_for_an_old_decision(servers: World) -> None:
    """Its owner has queued it again meanwhile; only an engine that was away could think else."""
    scene = Scene.of(servers)
    scene.scheduler.ends_at_once = False

    async def story() -> None:
        async with decided(scene) as world:
            await until_step(world, "waiting")
            world.clock.pass_(61)
            await until_step(world, "proving")
            assert scene.scheduler.calls == ["ask", "end terminate"]
        scene.scheduler.standing = Standing.RETURNED
        scene.scheduler.successor = "slurm-c1-4711-1"
        servers.clock.pass_(3 * 86400)
        async with running(servers) as world:
            await world.settled()
            assert scene.scheduler.calls == ["ask", "end terminate"]
            assert result(world).reason.startswith("returned: ")

    asyncio.run(story())


def test_an_agent_that_hangs_holds_up_no_tick(servers: World) -> None:
    """The decision is on disk; who carries it out is waited for by nobody else."""
    hangs, asked = threading.Event(), threading.Event()

    def hang(request: ActionRequest) -> None:
        if request.action is Action.TERMINATE:
            asked.set()
            hangs.wait(30)

    servers.agent.on_action = hang

    async def story() -> None:
        async with running(servers) as world:
            for _ in range(80):
                await world.tick()
                if world.engine.ledger.open_decisions():
                    break
            await asyncio.to_thread(asked.wait, 30)
            await world.tick(count=3)
            assert not hangs.is_set()
            assert world.state("proc-1") is CaseState.AUTHORISED
            hangs.set()
            await world.settled()
            assert world.state("proc-1") is CaseState.VERIFIED

    asyncio.run(story())


def test_a_request_is_not_repeated_against_a_word_that_was_said_meanwhile(servers: World) -> None:
    """The first may have been taken on; the second would be one of our own will."""
    servers.agent.lose_answers = 1

    def stop(request: ActionRequest) -> None:
        if request.action is Action.TERMINATE:
            (servers.folder / "halt").touch()

    servers.agent.on_action = stop

    async def story() -> None:
        async with running(servers) as world:
            for _ in range(80):
                await world.tick()
                if world.agent.requests:
                    break
            await world.settled()
            assert len(world.agent.requests) == 1
            assert world.state("proc-1") is CaseState.VERIFIED

    asyncio.run(story())


@pytest.mark.parametrize(
    "outcome", [Outcome.RECLAIMED, pytest.param(Outcome.DONE, marks=pytest.mark.sweep)]
)
def test_an_end_that_an_agent_only_calls_a_success_is_not_one(
    servers: World, outcome: Outcome
) -> None:
    """Reclaimed is what NVML shows."""
    servers.agent.outcome = outcome
    servers.agent.proves = False

    async def story() -> None:
        async with running(servers) as world:
            for _ in range(80):
                await world.tick()
                if world.agent.requests:
                    break
            await world.settled()
            assert world.state("proc-1") is CaseState.INCOMPLETE
            (decision,) = world.engine.ledger.job_decisions("proc-1")
            assert decision.reason.startswith("unproven: ")

    asyncio.run(story())
