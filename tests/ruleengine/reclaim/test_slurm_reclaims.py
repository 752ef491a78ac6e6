"""From the rule to the proof: the engine ends real jobs of a real Slurm, and no other way."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.reclaim.scenes import Fuse, Nodes
from tests.ruleengine.reclaim.test_slurm import TRAINER
from tests.ruleengine.reclaim.test_slurm import World as Jobs
from tests.ruleengine.worlds import Job
from tests.servers import until
from tests.slurm_servers import commands_of, slurm

from gpuwarden.agent_api import Action
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.reclaim.ports import Standing
from gpuwarden.ruleengine.reclaim.slurm import Slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IDLE = {"cpu": 1_799_990_000.0}


@dataclass
class Living:
    """What a node's agent sees of a job: its trainer lives, or does not."""

    pid: int

    @property
    def standing(self) -> Standing:
        """As the double of the agents asks for it."""
        return Standing.RUNNING if Path(f"/proc/{self.pid}").exists() else Standing.ENDED


@dataclass
class Story:
    """One idle job of Slurm, and the engine that judges it."""

    world: World
    jobs: Jobs
    number: int
    nodes: Nodes = field(init=False)

    def __post_init__(self) -> None:
        """Give the job to the engine's world."""
        pid = int(self.jobs.lines(self.number).split()[1])
        self.nodes = Nodes(Living(pid), Fuse())  # type: ignore[arg-type]
        owner = Path("~").expanduser().owner()
        text = (self.world.folder / "directory.yaml").read_text()
        (self.world.folder / "directory.yaml").write_text(text.replace("alice", owner))
        self.world.agent.steps = self.nodes.answer
        self.world.platforms = (Slurm(commands_of(self.jobs.cluster, 5)),)
        self.world.fleet.jobs = [
            Job(self.job, user=owner, activity=dict(IDLE), run={"run_id": "run-1"})
        ]

    @property
    def job(self) -> str:
        """The attempt."""
        return f"slurm-ci-{self.number}-0"

    async def decided(self) -> None:
        """Tick until the engine has decided."""
        for _ in range(80):
            if self.world.engine.ledger.job_decisions(self.job):
                return
            await self.world.tick()
        pytest.fail(f"nothing decided: {self.world.why(self.job)}")

    async def step(self, *names: str) -> None:
        """Wait until the decision has come to one of these steps."""
        (decision,) = self.world.engine.ledger.job_decisions(self.job)
        for _ in range(1000):
            act = self.world.engine.ledger.platform_act(decision.id)
            if act is not None and act.step in names:
                return
            self.world.engine.reclaimer.follow()
            await asyncio.sleep(0.01)
        pytest.fail(f"not at {names}: {act}")

    async def over(self) -> None:
        """Wait for the result, in real time: Slurm has no other."""
        for _ in range(1500):
            if not self.world.engine.ledger.open_decisions():
                return
            self.world.engine.reclaimer.follow()
            await asyncio.sleep(0.02)
        pytest.fail(f"open: {self.world.kinds(self.job)}")

    def record(self) -> tuple[str, ...]:
        """State, why it waits and restarts, by Slurm."""
        words = ("-h", "--states=all", f"--jobs={self.number}", "-O", "State,Reason,RestartCnt")
        return tuple(self.jobs.cluster.run("squeue", *words).split())


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """A Slurm of one node."""
    with (
        tempfile.TemporaryDirectory(prefix="gw") as name,
        slurm(Path(name), gpus=2, settings=("KillWait=2",)) as cluster,
    ):
        (cluster.folder / "train.py").write_text(TRAINER)
        yield Jobs(cluster)


@pytest.fixture
def story(servers: World, jobs: Jobs) -> Iterator[Callable[..., Story]]:
    """Starts a trainer that leaves with a status, whose script asks for a signal or not."""

    def begin(status: int, script: str = "") -> Story:
        return Story(servers, jobs, jobs.start(status, "--gres=gpu:1", script=script))

    yield begin
    for pid in jobs.trainers():
        os.kill(pid, signal.SIGKILL)
    for number in jobs.cluster.run("squeue", "--noheader", "-o", "%A").split():
        jobs.cluster.run("scancel", number)
    until(lambda: not jobs.cluster.run("squeue", "--noheader").strip(), 30)


def test_who_heeds_his_own_signal_and_would_come_back_is_held(
    story: Callable[..., Story],
) -> None:
    """RequeueExit takes it back into the queue; there it stays until a person releases it."""
    told = story(75, "#SBATCH --signal=B:USR1@60")

    async def tell() -> None:
        async with running(told.world) as world:
            await told.decided()
            await told.over()
            assert world.state(told.job) is CaseState.VERIFIED
            assert told.record() == ("PENDING", "JobHeldUser", "1")
            assert told.jobs.lines(told.number).split()[2:] == ["SIGUSR1"]
            assert not [r for r in world.agent.requests if r.action is Action.TERMINATE]

    asyncio.run(tell())


def test_who_heeds_nothing_has_his_grace_and_is_killed_by_slurm(
    story: Callable[..., Story],
) -> None:
    """Not a second before the grace is over."""
    told = story(-1)

    async def tell() -> None:
        async with running(told.world) as world:
            await told.decided()
            await told.step("waiting")
            world.clock.pass_(59)
            await asyncio.sleep(0.2)
            assert told.record()[0] == "RUNNING"
            world.clock.pass_(2)
            await told.over()
            assert world.state(told.job) is CaseState.VERIFIED
            assert told.record() == ("CANCELLED", "None", "0")
            assert told.jobs.lines(told.number).split()[2:] == ["SIGTERM"]

    asyncio.run(tell())


def test_a_controller_that_dies_in_the_middle_is_waited_for(story: Callable[..., Story]) -> None:
    """Nothing is known meanwhile, nothing is claimed, and then it goes on; also an engine anew."""
    told = story(-1)
    cluster = told.jobs.cluster

    async def tell() -> None:
        async with running(told.world) as world:
            await told.decided()
            await told.step("waiting")
            world.clock.pass_(61)
            await told.step("proving")
            cluster.stop_daemon("slurmctld")
            until(lambda: told.nodes.scheduler.standing is Standing.ENDED, 20)
            await asyncio.sleep(0.2)
            assert world.state(told.job) is CaseState.ACTING
        async with running(told.world) as world:
            cluster.start("slurmctld")
            await told.over()
            assert world.state(told.job) is CaseState.VERIFIED
            assert told.record() == ("CANCELLED", "None", "0")

    try:
        asyncio.run(tell())
    finally:
        if not told.jobs.cluster.serves("slurmctld"):
            cluster.start("slurmctld")
