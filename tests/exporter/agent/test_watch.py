"""`watch`: the node proves the end of a job that somebody else ends, and signals nobody itself."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from tests.exporter.agent.nodes import AgentProcess, Node, cgroup_v2
from tests.servers import until

from gpuwarden.agent_api import Action, ActionState, Outcome
from gpuwarden.exporter.agent.targets import Resolver
from gpuwarden.exporter.simulated import GIB, Fault

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tests.exporter.agent.nodes import Cards, Engine, Job, Jobs

    from gpuwarden.exporter.agent.handles import Identity
    from gpuwarden.exporter.agent.targets import Target
    from gpuwarden.exporter.processes import Process


def begun(node: Node, job_id: str, **about: object) -> str:
    """A watch that holds its processes; gives its decision."""
    request = node.engine.request(job_id, Action.WATCH, **about)
    report = node.actions.submit(request)
    assert report.state is ActionState.ACCEPTED
    node.reached(request.decision_id, "journalled")
    return request.decision_id


def end(job: Job) -> None:
    """End a job as its platform would."""
    for pid in job.states():
        os.kill(pid, signal.SIGKILL)


def test_a_job_that_others_end_is_proven_gone(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Who was there, what they held, and that NVML lists them no more."""
    job = jobs.start("loaders")
    cards.hold(job.pid, 3 * GIB)
    cards.hold(job.pids[1], 1 * GIB, card=1)
    name = begun(node, job.job_id)
    running = node.actions.find(name)
    assert running is not None
    assert running.state is ActionState.ACTING
    assert {item.pid for item in running.processes} == set(job.pids)
    assert all(item.ended_by is None for item in running.processes)
    end(job)
    report = node.outcome(name)
    assert report.outcome is Outcome.RECLAIMED
    assert report.proof is not None
    assert report.proof.gone
    assert report.proof.memory_freed == 4 * GIB
    assert len(report.proof.device_used_before) == 2
    assert {item.ended_by for item in report.processes} == {"gone"}
    assert {item.pid: item.gpu_memory for item in report.processes}[job.pid] == 3 * GIB
    assert set(report.steps) == {"journalled", "verified", "exited", "proven"}


def test_who_stays_is_named_and_left_alone(node: Node, jobs: Jobs, cards: Cards) -> None:
    """When the time given is over the survivors are told; nobody was signalled."""
    job = jobs.start("loaders")
    cards.hold(job.pid, 2 * GIB)
    os.kill(job.pids[-1], signal.SIGKILL)
    os.kill(job.pids[-1], 0)
    name = begun(node, job.job_id, grace=1.0)
    report = node.outcome(name)
    assert (report.outcome, report.reason) == (Outcome.INCOMPLETE, "survivors")
    assert str(job.pid) in report.message
    assert report.proof is not None
    assert not report.proof.gone
    assert report.proof.memory_freed == 0
    assert job.pid in job.states()


def test_memory_that_stays_is_incomplete(node: Node, jobs: Jobs, cards: Cards) -> None:
    """All have ended, and the driver still lists one: no proof."""
    node.close()
    node.proof_timeout = 0.5
    node.open()
    job = jobs.start("polite")
    cards.hold(job.pid, 4 * GIB, linger=300)
    name = begun(node, job.job_id)
    end(job)
    report = node.outcome(name)
    assert (report.outcome, report.reason) == (Outcome.INCOMPLETE, "still_listed")


def test_a_job_without_a_card_is_watched_too(node: Node, jobs: Jobs) -> None:
    """Its share of a platform's job may only load data on this node."""
    job = jobs.start("polite")
    name = begun(node, job.job_id)
    end(job)
    report = node.outcome(name)
    assert report.outcome is Outcome.RECLAIMED
    assert report.proof is not None
    assert report.proof.memory_freed == 0


@pytest.mark.parametrize("job_id", ["proc-00000000-4711-4712", "pod-nobody", "slurm-c1-4711-0"])
def test_an_unknown_job_is_refused(node: Node, job_id: str) -> None:
    """Nobody of it is here, or it is of another boot: nothing could be proven."""
    report = node.ask(job_id, Action.WATCH)
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "gone")


def test_a_watch_may_last_longer_than_a_grace(node: Node, jobs: Jobs) -> None:
    """It spans the grace, the platform's own, and what comes after; and has an end."""
    job = jobs.start("polite")
    name = begun(node, job.job_id, grace=10_800.0)
    end(job)
    assert node.outcome(name).outcome is Outcome.RECLAIMED
    assert node.ask(job.job_id, Action.WATCH, grace=10_801.0).reason == "grace"


def test_a_driver_that_says_nothing_proves_nothing(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Without the lists of now, nobody could tell later what was given back."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    cards.write(faults=[Fault("nvmlDeviceGetCount_v2", 999)])
    report = node.ask(job.job_id, Action.WATCH)
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "nvml")


def test_children_that_turn_up_must_go_as_well(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A process that was begotten after the watch began is waited for."""
    job = jobs.start("relay")
    cards.hold(job.pid)
    name = begun(node, job.job_id, grace=20.0)
    first = job.pid
    os.kill(first, signal.SIGTERM)

    def joined() -> int | None:
        report = node.actions.find(name)
        assert report is not None
        others = {item.pid for item in report.processes} - {first}
        return min(others, default=None)

    successor = until(joined)
    report = node.actions.find(name)
    assert report is not None
    assert report.state is ActionState.ACTING
    os.kill(successor, signal.SIGKILL)
    assert node.outcome(name).outcome is Outcome.RECLAIMED


class Late(Resolver):
    """Between its look at /proc and what follows, a job begets its successor and is gone."""

    going: ClassVar[list[Job]] = []

    def adopt(
        self,
        target: Target,
        processes: Mapping[int, Process],
        known: Collection[tuple[int, int]] = (),
    ) -> tuple[Identity, ...]:
        """Let the job go first, once: the look is of before."""
        if self.going:
            pid = self.going.pop().pid
            os.kill(pid, signal.SIGTERM)
            until(lambda: not Path(f"/proc/{pid}/exe").exists())
        return super().adopt(target, processes, known)


def test_whoever_is_begotten_while_the_agent_looks_is_waited_for(
    tmp_path: Path, jobs: Jobs, cards: Cards, engine: Engine
) -> None:
    """All who were known are gone, and the look at /proc was before their successor."""
    node = Node(tmp_path / "node", cards, engine, resolver=Late)
    try:
        job = jobs.start("relay")
        cards.hold(job.pid)
        name = begun(node, job.job_id, grace=60.0)
        Late.going.append(job)
        successor = until(lambda: _joined(node, name, job.pid))
        os.kill(successor, signal.SIGKILL)
        assert node.outcome(name).outcome is Outcome.RECLAIMED
    finally:
        node.close()
        node.driver.close()


def _joined(node: Node, name: str, root: int) -> int | None:
    report = node.actions.find(name)
    assert report is not None
    assert report.state is not ActionState.FINISHED, "it ended with one of the job alive"
    return min({item.pid for item in report.processes} - {root}, default=None)


def test_a_watch_is_taken_up_after_a_restart(node: Node, jobs: Jobs, cards: Cards) -> None:
    """By identity, with what NVML listed before; also where all have gone meanwhile."""
    stays, goes = jobs.start("loaders"), jobs.start("polite")
    cards.hold(stays.pid, 5 * GIB)
    cards.hold(goes.pid, 6 * GIB, card=1)
    names = [begun(node, job.job_id) for job in (stays, goes)]
    node.close()
    end(goes)
    node.open()
    gone = node.outcome(names[1])
    assert gone.outcome is Outcome.RECLAIMED
    assert gone.proof is not None
    assert gone.proof.memory_freed == 6 * GIB
    running = node.actions.find(names[0])
    assert running is not None
    assert running.state is ActionState.ACTING
    end(stays)
    report = node.outcome(names[0])
    assert report.outcome is Outcome.RECLAIMED
    assert report.proof is not None
    assert report.proof.memory_freed == 5 * GIB


def test_watching_spends_no_attempt(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Two watches and an end of one job go on beside one another."""
    job = jobs.start("polite")
    cards.hold(job.pid, 2 * GIB)
    names = [begun(node, job.job_id) for _ in range(2)]
    assert node.ask(job.job_id, Action.TERMINATE).outcome is Outcome.RECLAIMED
    assert {node.outcome(name).outcome for name in names} == {Outcome.RECLAIMED}


def test_the_kill_switch_does_not_blind(node: Node, jobs: Jobs, cards: Cards) -> None:
    """It stops ends; what others do is still seen."""
    node.kill_switch.touch()
    job = jobs.start("polite")
    cards.hold(job.pid)
    name = begun(node, job.job_id)
    end(job)
    assert node.outcome(name).outcome is Outcome.RECLAIMED


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The uid of a pod and its cgroup, as a kubelet lays them out."""
    mount = cgroup_v2()
    if mount is None or os.geteuid() != 0:
        pytest.skip("needs a cgroup v2 that can be written")
    uid = str(uuid.uuid4())
    above = mount / f"kubepods-{tmp_path.name[-8:]}.slice"
    folder = above / f"kubepods-pod{uid.replace('-', '_')}.slice"
    folder.mkdir(parents=True)
    yield uid, folder
    if folder.exists():
        until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()
    above.rmdir()


def test_a_platforms_job_is_known_by_its_cgroup(
    node: Node, jobs: Jobs, cards: Cards, pod: tuple[str, Path]
) -> None:
    """All trees in it belong to it, and it stays known when the cgroup has gone with it."""
    uid, folder = pod
    found = [jobs.start("loaders"), jobs.start("polite")]
    for pid in (pid for job in found for pid in job.pids):
        (folder / "cgroup.procs").write_text(str(pid))
    cards.hold(found[1].pid, 7 * GIB)
    name = begun(node, f"pod-{uid}")
    running = node.actions.find(name)
    assert running is not None
    assert {item.pid for item in running.processes} == {pid for job in found for pid in job.pids}
    end(found[1])
    node.actions.find(name)
    end(found[0])
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()
    report = node.outcome(name)
    assert report.outcome is Outcome.RECLAIMED
    assert report.proof is not None
    assert report.proof.memory_freed == 7 * GIB


def test_an_agent_that_was_killed_goes_on_watching(
    jobs: Jobs, cards: Cards, engine: Engine, tmp_path: Path
) -> None:
    """SIGKILL of the agent itself loses neither the watch nor its account."""
    agent = AgentProcess.beside(tmp_path, cards, engine)
    agent.start()
    try:
        job = jobs.start("polite")
        cards.hold(job.pid, 3 * GIB)
        request = engine.request(job.job_id, Action.WATCH)
        agent.post(engine, request)
        agent.outcome(request.decision_id, "journalled")
        agent.stop(signal.SIGKILL)
        end(job)
        agent.start()
        report = agent.outcome(request.decision_id)
        assert report.outcome is Outcome.RECLAIMED
        assert report.proof is not None
        assert report.proof.memory_freed == 3 * GIB
        assert agent.post(engine, request) == report
    finally:
        agent.stop()
