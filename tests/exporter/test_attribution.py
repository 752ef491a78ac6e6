"""Who uses which card: real processes, the simulated driver, the job files."""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.exporter.nodes import (
    Children,
    ManualClock,
    declare,
    describe,
    eventually,
    own_launchers,
    process_of,
)

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, ProcessKind
from gpuwarden.exporter.processes import boot_id, proc_job_id
from gpuwarden.exporter.simulated import GIB, Card, Fault, Scenario, SimulatedProcess
from gpuwarden.job_files import RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.exporter.jobs import Job, NodeSnapshot
    from gpuwarden.exporter.nvml import Nvml

    Driver = Callable[[Scenario], Nvml]


class Node:
    """A node whose cards are simulated; everything else on it is real."""

    def __init__(self, driver: Driver, jobs: Path, clock: ManualClock) -> None:
        self._driver = driver
        self._file: Path | None = None
        self._nvml: Nvml | None = None
        self.jobs_directory = jobs
        self.clock = clock
        self.attribution = Attribution(jobs, launchers=own_launchers(), clock=clock)

    def cards(self, scenario: Scenario) -> None:
        """Begin with these cards."""
        self._nvml = self._driver(scenario)

    def observe(self) -> NodeSnapshot:
        """Read the node as the sampler does."""
        return self.attribution.observe(None if self._nvml is None else self._nvml.snapshot())

    def jobs(self) -> dict[str, Job]:
        """Its jobs by id."""
        return {job.job_id: job for job in self.observe().jobs}


@pytest.fixture
def node(driver: Driver, jobs: Path, clock: ManualClock) -> Iterator[Node]:
    """A node without cards, until the test gives it some."""
    made = Node(driver, jobs, clock)
    yield made
    made.attribution.close()


def _job_id(pid: int) -> str:
    return proc_job_id(process_of(pid), boot_id())


def _status(clock: ManualClock, **changes: object) -> RunStatus:
    values: dict[str, Any] = {
        "run_id": "run-1",
        "sequence": 1,
        "phase": "train",
        "phase_since": clock.wall() - 10,
        "heartbeat": clock.wall() - 3,
    }
    return RunStatus(**{**values, **changes})


class TestCards:
    """What of a card is whose."""

    def test_a_sole_tenant_has_the_cards_utilization(self, node: Node, children: Children) -> None:
        """On a card of its own a job is as busy as the card is."""
        child = children.start()
        process = SimulatedProcess(0, child.pid, memory=5 * GIB, sm=40)
        node.cards(Scenario([Card(0, utilization=55), Card(1)], [process]))
        job = node.jobs()[_job_id(child.pid)]
        (holding,) = job.holdings
        assert (holding.index, holding.uuid) == (0, Card(0).uuid)
        assert (holding.memory_bytes, holding.utilization_ratio) == (5 * GIB, 0.55)
        assert job.user == pwd.getpwuid(os.getuid()).pw_name
        assert (job.source, job.framework, job.first_gpu_use) == ("process", "", node.clock.wall())

    def test_tenants_of_a_shared_card(self, node: Node, children: Children) -> None:
        """On a shared card each job has what its own processes did, and no more."""
        first, second = children.start(), children.start()
        processes = [
            SimulatedProcess(0, first.pid, memory=3 * GIB, sm=60),
            SimulatedProcess(0, second.pid, memory=GIB),
        ]
        node.cards(Scenario([Card(0, utilization=97)], processes))
        jobs = node.jobs()
        assert jobs[_job_id(first.pid)].holdings[0].utilization_ratio == 0.6
        assert jobs[_job_id(second.pid)].holdings[0].utilization_ratio == 0.0

    def test_unified_memory(self, node: Node, children: Children) -> None:
        """Where the card has no memory of its own, what a process uses of the node's is known."""
        process = SimulatedProcess(0, children.start().pid, memory=5 * GIB, sm=40)
        faults = [Fault("nvmlDeviceGetMemoryInfo*", 3)]
        node.cards(Scenario([Card(0)], [process], faults=faults))
        snapshot = node.observe()
        (job,) = snapshot.jobs
        assert (job.holdings[0].memory_bytes, job.holdings[0].utilization_ratio) == (5 * GIB, 0.4)
        assert snapshot.unattributed == {}
        assert snapshot.dropped == {}

    def test_a_shared_card_that_cannot_be_measured(self, node: Node, children: Children) -> None:
        """Without samples nobody on a shared card is known to be idle."""
        pids = [children.start().pid, children.start().pid]
        processes = [SimulatedProcess(0, pid, memory=GIB) for pid in pids]
        faults = [Fault("nvmlDeviceGetProcessUtilization", 3)]
        node.cards(Scenario([Card(0, utilization=0)], processes, faults=faults))
        for job in node.jobs().values():
            assert job.holdings[0].utilization_ratio is None
            assert job.holdings[0].memory_bytes == GIB

    def test_a_process_that_proc_does_not_know(self, node: Node, children: Children) -> None:
        """A stranger's memory is nobody's, and a card shared with a stranger is shared."""
        child = children.start()
        processes = [
            SimulatedProcess(0, child.pid, memory=GIB, sm=10),
            SimulatedProcess(0, 3_999_999, memory=7 * GIB, sm=80, ghost=1),
        ]
        node.cards(Scenario([Card(0)], processes))
        snapshot = node.observe()
        assert snapshot.unattributed == {Card(0).uuid: 7 * GIB}
        assert [row.pid for row in snapshot.processes] == [child.pid]
        assert snapshot.jobs[0].holdings[0].utilization_ratio == 0.1
        assert snapshot.dropped == {"no_process": 1}

    def test_a_lost_card_is_still_held(
        self, node: Node, children: Children, scenario_file: Path
    ) -> None:
        """A job does not become idle by the loss of a card: it holds it, with nothing known."""
        child = children.start()
        processes = [SimulatedProcess(card, child.pid, memory=GIB) for card in (0, 1)]
        scenario = Scenario([Card(0), Card(1)], processes)
        node.cards(scenario)
        assert len(node.jobs()[_job_id(child.pid)].holdings) == 2
        replace(scenario, faults=[Fault("*", 15, card=1)]).write(scenario_file)
        holdings = eventually(
            lambda: node.jobs()[_job_id(child.pid)].holdings,
            until=lambda holdings: holdings[1].memory_bytes is None,
        )
        assert (holdings[0].memory_bytes, holdings[1].utilization_ratio) == (GIB, None)

    @pytest.mark.parametrize(
        "fault", [Fault("*", 15), Fault("nvmlDeviceGetComputeRunningProcesses*", 999)]
    )
    def test_the_only_card_is_lost(
        self, node: Node, children: Children, scenario_file: Path, fault: Fault
    ) -> None:
        """A job whose only card does not tell is still there, as old as it was; it may end."""
        child = children.start()
        scenario = Scenario([Card(0)], [SimulatedProcess(0, child.pid, memory=GIB)])
        node.cards(scenario)
        first_use = node.jobs()[_job_id(child.pid)].first_gpu_use
        replace(scenario, faults=[replace(fault, card=0)]).write(scenario_file)
        node.clock.advance(60)
        job = eventually(
            lambda: node.observe().jobs[0],
            until=lambda job: job.holdings[0].memory_bytes is None,
        )
        assert (job.job_id, job.first_gpu_use) == (_job_id(child.pid), first_use)
        assert job.holdings[0].utilization_ratio is None
        children.kill(child)
        assert node.jobs() == {}

    def test_the_dead_are_gone_at_once(self, node: Node, children: Children) -> None:
        """A job ends with its processes, though the driver still lists them."""
        child = children.start()
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid, memory=GIB, linger=600)]))
        assert len(node.jobs()) == 1
        children.kill(child)
        snapshot = node.observe()
        assert (snapshot.jobs, snapshot.processes) == ((), ())
        assert snapshot.unattributed == {Card(0).uuid: GIB}

    def test_without_a_driver(self, node: Node, children: Children) -> None:
        """Without a driver declared trainings are still seen, holding nothing."""
        child = children.start()
        declare(node.jobs_directory, describe(child.pid), _status(node.clock))
        job = node.jobs()[_job_id(child.pid)]
        assert (job.holdings, job.first_gpu_use, job.executables) == ((), None, ())
        assert job.runs[0].description.run_id == "run-1"


class TestJobs:
    """Which processes are one job, and what it is."""

    def test_children_in_their_own_session(self, node: Node, children: Children) -> None:
        """A child that left the session, and then lost its parent, stays in the job."""
        script = "setsid sh -c 'sleep 600 & echo $!; wait' & read x; exit"
        child = children.start("sh", "-c", script)
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        job_id = _job_id(child.pid)
        processes = [SimulatedProcess(0, pid, memory=GIB) for pid in (child.pid, grandchild)]
        node.cards(Scenario([Card(0)], processes))
        job = node.jobs()[job_id]
        assert job.holdings[0].memory_bytes == 2 * GIB
        assert job.resources is not None
        assert job.resources.threads == 3
        children.kill(child)
        left = node.jobs()
        assert list(left) == [job_id]
        assert left[job_id].holdings[0].memory_bytes == GIB
        os.killpg(process_of(grandchild).pgid, 9)

    def test_a_notebook(self, node: Node, children: Children, tmp_path: Path) -> None:
        """A Jupyter kernel is interactive, and known by what it runs."""
        program = tmp_path / "ipykernel_launcher.py"
        program.write_text("read x")
        child = children.start("bash", str(program), "-f", "k.json")
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        job = node.jobs()[_job_id(child.pid)]
        assert (job.framework, job.interactive) == ("jupyter", True)

    def test_an_undeclared_training(self, node: Node, children: Children) -> None:
        """A training that declares nothing is recognised by its command line."""
        child = children.start("bash", "-c", "read x", "yolo", "train", "model=yolov8s.pt")
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        job = node.jobs()[_job_id(child.pid)]
        assert (job.source, job.framework) == ("cmdline", "ultralytics")
        assert job.command is not None
        assert job.command.model == "yolov8s"

    def test_a_declared_training(self, node: Node, children: Children) -> None:
        """A declared training's word is shown on the job of its own process."""
        child, other = children.start(), children.start()
        declare(node.jobs_directory, describe(child.pid), _status(node.clock))
        node.cards(
            Scenario([Card(0)], [SimulatedProcess(0, pid) for pid in (child.pid, other.pid)])
        )
        jobs = node.jobs()
        job = jobs[_job_id(child.pid)]
        assert (job.source, job.framework) == ("trainer", "ultralytics")
        assert [run.description.run_id for run in job.runs] == ["run-1"]
        assert jobs[_job_id(other.pid)].runs == ()

    def test_executables_of_holders_only(self, node: Node, children: Children) -> None:
        """What holds a card is named by its executable and cgroup; its helpers are not."""
        child = children.script("sleep 600 & echo; wait")
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        shell = os.path.realpath(shutil.which("sh") or "")
        cgroup = process_of(child.pid).cgroup
        assert node.jobs()[_job_id(child.pid)].executables == ((shell, cgroup),)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can make root's programs")
    def test_an_executable_that_is_not_known_is_not_said_to_be_none(
        self, node: Node, children: Children, tmp_path: Path
    ) -> None:
        """After an upgrade of its program a job's executable is absent: open, not wrong."""
        copy = tmp_path / "service"
        shutil.copy(shutil.which("sleep") or "", copy)
        child = children.start(str(copy), "600")
        copy.unlink()
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        for _ in range(2):
            snapshot = node.observe()
            assert snapshot.jobs[0].executables == ()
            assert snapshot.dropped["executable"] == 1

    def test_mps_serves_all(self, node: Node, children: Children, tmp_path: Path) -> None:
        """The MPS server is nobody's job, and its clients share the card by their own values."""
        server_file = tmp_path / "nvidia-cuda-mps-server"
        shutil.copy(shutil.which("sleep") or "", server_file)
        server, client = children.start(str(server_file), "600"), children.start()
        processes = [
            SimulatedProcess(0, server.pid, memory=35 * 2**20),
            SimulatedProcess(0, client.pid, memory=GIB, sm=30, kind="mps"),
        ]
        node.cards(Scenario([Card(0)], processes))
        snapshot = node.observe()
        assert [job.job_id for job in snapshot.jobs] == [_job_id(client.pid)]
        rows = {row.pid: row.job_id for row in snapshot.processes}
        assert rows == {server.pid: "", client.pid: _job_id(client.pid)}


def test_a_job_that_moves_as_a_whole(tmp_path: Path, clock: ManualClock) -> None:
    """A job that its platform moves to another cgroup, parents first, stays one job."""
    for name, content in {
        "sys/kernel/random/boot_id": "01234567-89ab-cdef-0123-456789abcdef\n",
        "stat": "btime 1000\n",
        "self/ns/pid": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)

    def put(pid: int, ppid: int, cgroup: str) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir(exist_ok=True)
        rest = f"S {ppid} {pid} {pid} 0 -1 0 0 0 0 0 3 4 5 6 20 0 1 0 {pid} 0 9"
        (folder / "stat").write_text(f"{pid} (python) {rest}\n")
        (folder / "status").write_text("Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")

    processes = (GpuProcess(pid=51, kind=ProcessKind.COMPUTE, memory_bytes=GIB),)
    gpu = Gpu(index=0, uuid="GPU-1", name="x", processes=processes)
    devices = DeviceSnapshot(clock.wall(), "550", simulated=True, gpus=(gpu,))
    attribution = Attribution(tmp_path / "jobs", clock=clock, proc=tmp_path)
    for cgroup in ("/user.slice/session-1.scope", "/batch.slice/7.scope"):
        put(50, 1, cgroup)
        put(51, 50, cgroup)
        assert [job.job_id for job in attribution.observe(devices).jobs] == ["proc-01234567-50-50"]
    attribution.close()


class TestActivity:
    """When a job last showed life."""

    def test_first_sight_counts(self, node: Node, children: Children) -> None:
        """A job is active when it is first seen, and silent from then on if it does nothing."""
        child = children.start()
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        began = node.clock.wall()
        assert node.jobs()[_job_id(child.pid)].activity == {"cpu": began}
        node.clock.advance(60)
        job = node.jobs()[_job_id(child.pid)]
        assert (job.activity, job.first_gpu_use) == ({"cpu": began}, began)

    def test_a_busy_child_is_life(self, node: Node, children: Children) -> None:
        """CPU time anywhere in the tree shows life."""
        child = children.script("echo; while :; do :; done & wait")
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))

        def active_at() -> float:
            node.clock.advance(0.1)
            return node.jobs()[_job_id(child.pid)].activity["cpu"] - node.clock.wall()

        assert active_at() <= 0
        assert eventually(active_at, until=lambda age: age == 0) == 0

    def test_log_and_heartbeat(self, node: Node, children: Children, tmp_path: Path) -> None:
        """A run's log and heartbeat are signs of life with their own times."""
        child, log = children.start(), tmp_path / "train.log"
        log.write_text("epoch 1\n")
        os.utime(log, (0, node.clock.wall() - 7))
        description = describe(child.pid, log=str(log))
        declare(node.jobs_directory, description, _status(node.clock))
        activity = node.jobs()[_job_id(child.pid)].activity
        assert activity["log"] == pytest.approx(node.clock.wall() - 7)
        assert activity["heartbeat"] == pytest.approx(node.clock.wall() - 3)

    @pytest.mark.parametrize("hours", [1, 10_000])
    def test_a_log_of_tomorrow(
        self, node: Node, children: Children, tmp_path: Path, hours: int
    ) -> None:
        """A log that was touched into the future is no sign of life."""
        child, log = children.start(), tmp_path / "train.log"
        log.write_text("")
        os.utime(log, (0, node.clock.wall() + 3600 * hours))
        declare(node.jobs_directory, describe(child.pid, log=str(log)))
        snapshot = node.observe()
        assert "log" not in snapshot.jobs[0].activity
        assert snapshot.dropped == {"future": 1}

    @pytest.mark.parametrize(
        "log", ["/dev/zero", "/usr", "relative.log", "/a\0b", "/\ud800", "/none"]
    )
    def test_a_log_that_is_none(self, node: Node, children: Children, log: str) -> None:
        """Devices, folders and paths that lead nowhere are no logs."""
        child = children.start()
        declare(node.jobs_directory, describe(child.pid, log=log))
        snapshot = node.observe()
        assert "log" not in snapshot.jobs[0].activity
        assert "hanging" not in snapshot.dropped

    def test_a_log_behind_a_link(self, node: Node, children: Children, tmp_path: Path) -> None:
        """Links are not followed: they lead to whatever is touched most."""
        child, link = children.start(), tmp_path / "train.log"
        target = tmp_path / "target"
        target.write_text("")
        link.symlink_to(target)
        declare(node.jobs_directory, describe(child.pid, log=str(link)))
        snapshot = node.observe()
        assert "log" not in snapshot.jobs[0].activity
        assert snapshot.dropped == {"log_owner": 1}
