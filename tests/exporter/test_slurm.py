"""A real Slurm, asked as the exporter asks it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.mirrors import ProcMirror
from tests.exporter.nodes import ManualClock, eventually
from tests.slurm_servers import CLUSTER, FREEZER, NODE, SlurmCluster, slurm

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, ProcessKind
from gpuwarden.exporter.inquiries import Inquiry
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess
from gpuwarden.exporter.slurm import SlurmQuestions, SlurmView
from gpuwarden.platforms.slurm import SlurmJob, attempt_id, parse_attempt_id
from gpuwarden.platforms.slurm_texts import GresCard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.exporter.jobs import NodeSnapshot

MINORS = (2, 3, 0, 1)
"""Of the device files in the order of gres.conf: no index is its own minor number."""
SLEEP = "exec sleep 600"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """A Slurm for this module; each test ends its own jobs."""
    # A socket's path has room for a hundred characters: pytest's folders are longer.
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        slurm(Path(folder), minors=MINORS) as running,
    ):
        yield running


@pytest.fixture
def jobs_end(cluster: SlurmCluster) -> Iterator[None]:
    """No job is left when a test ends."""
    yield
    cluster.run("scancel", f"--user={os.geteuid()}")
    eventually(lambda: cluster.run("squeue", "--noheader"), until=lambda text: not text.strip())


pytestmark = pytest.mark.usefixtures("jobs_end")


@pytest.fixture
def questions(cluster: SlurmCluster) -> SlurmQuestions:
    """What the exporter asks with."""
    return SlurmQuestions(config=str(cluster.config))


def _running(cluster: SlurmCluster, *options: str, script: str = SLEEP) -> int:
    job = cluster.submit(script, *options)
    cluster.wait_for_state(job, "RUNNING")
    return job


def _here(view: SlurmView) -> dict[int, SlurmJob]:
    """Jobs that have the node now; Slurm remembers those of earlier tests for a while."""
    return {number: job for number, job in view.jobs.items() if job.holds}


class TestAnswers:
    """What Slurm says of a node's jobs."""

    def test_a_job_and_its_cards(self, cluster: SlurmCluster, questions: SlurmQuestions) -> None:
        """Identity, owner, times and cards of a job, by the node's own order of cards."""
        before = time.time()
        number = _running(cluster, "--gres=gpu:2", "--account=vision")
        view = questions.ask()
        job = view.jobs[number]
        assert (view.cluster, view.nodes) == (CLUSTER, (NODE,))
        assert attempt_id(job, view.cluster) == f"slurm-ci-{number}-0"
        assert (job.user_id, job.account, job.partition) == (os.geteuid(), "vision", "main")
        assert job.holds
        assert job.submit_time is not None
        assert before - 2 < job.submit_time < before + 60
        assert [card.minor for card in view.cards[NODE]] == list(MINORS)
        assert view.gpus(job) == (GresCard(2), GresCard(3))

    def test_no_job(self, questions: SlurmQuestions) -> None:
        """An idle node has no jobs, which is an answer."""
        assert _here(questions.ask()) == {}

    def test_who_waits_is_not_here(self, cluster: SlurmCluster, questions: SlurmQuestions) -> None:
        """A job that has no node yet is not this node's."""
        waiting = cluster.submit(SLEEP, "--gres=gpu:3", "--begin=now+1hour")
        assert cluster.states(waiting) == {"PENDING"}
        assert _here(questions.ask()) == {}

    def test_an_ended_job(self, cluster: SlurmCluster, questions: SlurmQuestions) -> None:
        """What an ended job left behind has a name, and the job holds nothing."""
        number = cluster.submit("exit 0", "--gres=gpu:1")
        cluster.wait_for_state(number, "COMPLETED")
        job = questions.ask().jobs[number]
        assert attempt_id(job, CLUSTER) == f"slurm-ci-{number}-0"
        assert (job.holds, job.ended) == (False, True)

    def test_an_array(self, cluster: SlurmCluster, questions: SlurmQuestions) -> None:
        """Each task is a job of its own with its own card; one bears the array's number."""
        array = _running(cluster, "--array=3,5", "--gres=gpu:1")
        view = questions.ask()
        names = {attempt_id(job, view.cluster) for job in _here(view).values()}
        assert names == {f"slurm-ci-{array}_3-0", f"slurm-ci-{array}_5-0"}
        assert array in view.jobs
        cards = {view.gpus(job) for job in _here(view).values()}
        assert cards == {(GresCard(2),), (GresCard(3),)}

    @pytest.mark.parametrize(
        "options",
        [
            ("--job-name=a b=c Restarts=7 UserId=root(0)",),
            ("--job-name=x\n   UserId=eve(7) GroupId=x\n   JobState=COMPLETED Restarts=9",),
            ("--account=a|b,c\n1|2|3|N/A", "--comment=JobId=1 Restarts=4\n   JobState=FAILED"),
            ("--job-name=\N{SNOWMAN}\t\x0b\N{LINE SEPARATOR}$(reboot)", "--comment="),
        ],
    )
    def test_what_a_user_writes(
        self, cluster: SlurmCluster, questions: SlurmQuestions, options: tuple[str, ...]
    ) -> None:
        """Whatever a user has Slurm repeat, the job is what it is."""
        number = _running(cluster, "--gres=gpu:1", *options)
        view = questions.ask()
        assert list(_here(view)) == [number]
        job = view.jobs[number]
        assert attempt_id(job, view.cluster) == f"slurm-ci-{number}-0"
        assert (job.user_id, job.holds) == (os.geteuid(), True)
        # With a line feed in an account an answer in text tells nothing; one in JSON does.
        told = {(GresCard(2),)} | ({None} if "\n" in job.account else set())
        assert view.gpus(job) in told

    def test_a_requeued_job(self, cluster: SlurmCluster, questions: SlurmQuestions) -> None:
        """A job that comes back has the same number and is another attempt."""
        script = 'if [ -z "$SLURM_RESTART_COUNT" ]; then exit 75; fi; exec sleep 600'
        number = cluster.submit(script, "--requeue")
        eventually(
            lambda: questions.ask().jobs.get(number),
            until=lambda job: job is not None and job.restarts == 1,
        )
        name = attempt_id(questions.ask().jobs[number], CLUSTER)
        parsed = parse_attempt_id(name)
        assert parsed is not None
        assert (parsed.cluster, parsed.number, parsed.restarts) == (CLUSTER, str(number), 1)

    def test_another_host(self, cluster: SlurmCluster) -> None:
        """A host that is no node of the cluster is told so."""
        questions = SlurmQuestions(hosts=frozenset({"elsewhere"}), config=str(cluster.config))
        with pytest.raises(ServiceUnavailable, match="no node whose NodeHostName is elsewhere"):
            questions.ask()

    def test_no_controller(self, tmp_path: Path) -> None:
        """Without a usable configuration there is no answer, and it says why."""
        config = tmp_path / "slurm.conf"
        config.write_text("ClusterName=x\n")
        with pytest.raises(ServiceUnavailable, match="scontrol failed: "):
            SlurmQuestions(config=str(config)).ask()


def _page(
    cluster: SlurmCluster, scenario: Scenario, folder: Path, number: int
) -> dict[str, tuple[dict[str, str], float]]:
    """What one page of an exporter that was told nothing of Slurm says of a job, by family."""
    path = scenario.write(folder / "scenario")
    command = [sys.executable, "-m", "gpuwarden", "exporter", f"--gpus=simulated:{path}"]
    command += [f"--jobs.directory={folder / 'jobs'}", "--once"]
    done = subprocess.run(
        command, env=os.environ | cluster.environment, capture_output=True, text=True, check=True
    )
    return {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
        if sample.labels.get("job_id") == f"slurm-ci-{number}-0"
        or sample.labels.get("collector") == "slurm"
    }


@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="needs cgroups v1 of its own")
def test_a_job_in_its_own_cgroup(tmp_path: Path) -> None:
    """From submission to the page: a process of a job that Slurm put into its cgroup itself."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        slurm(Path(folder), gpus=2, node=f"node{os.getpid()}", cgroups=True) as cluster,
    ):
        number = _running(cluster, "--gres=gpu:1", script="echo $$; exec sleep 600")
        output = cluster.folder / f"log/job-{number}.out"
        (pid,) = eventually(lambda: output.read_text().split() if output.exists() else [])
        busy = [SimulatedProcess(0, int(pid), memory=GIB, sm=30)]
        found = _page(cluster, Scenario([Card(0), Card(1)], busy), tmp_path, number)
        labels, holds = found["gpu_job_holds_gpu"]
        assert (labels["uuid"], holds) == (Card(0).uuid, 1.0)
        assert found["gpu_job_utilization_ratio"][1] == 0.3
        assert found["gpu_job_memory_bytes"][1] == GIB
        assert found["gpu_process_memory_bytes"][0]["pid"] == pid
        assert (
            f"/slurm_{cluster.node}/uid_{os.geteuid()}/job_{number}/"
            in (found["gpu_job_executable"][0]["cgroup"])
        )


def test_one_page(cluster: SlurmCluster, tmp_path: Path) -> None:
    """`gpuwarden exporter --once` finds Slurm by itself and shows a card held by a job."""
    number = _running(cluster, "--gres=gpu:1")
    cards = [Card(index, minor=minor) for index, minor in enumerate((0, 1, 2, 3))]
    found = _page(cluster, Scenario(cards), tmp_path, number)
    for name, value in (("holds_gpu", 1.0), ("utilization_ratio", 0.0), ("memory_bytes", 0.0)):
        labels, seen = found[f"gpu_job_{name}"]
        assert (labels["gpu"], labels["uuid"], seen) == ("2", Card(2).uuid, value)
    assert found["gpuwarden_collector_success"][1] == 1.0
    labels, _ = found["gpu_job_platform_info"]
    del labels["job_id"]
    assert {name: value for name, value in labels.items() if value} == {
        "platform": "slurm",
        "platform_job_id": str(number),
        "cluster": CLUSTER,
        "partition": "main",
    }
    assert found["gpu_job_submit_timestamp_seconds"][1] > 0


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--no-collector.slurm", None),
        ("--collector.slurm", 'gpuwarden_collector_success{collector="slurm"} 0.0'),
    ],
)
def test_a_choice(tmp_path: Path, flag: str, line: str | None) -> None:
    """What is switched off is not asked; that what is asked does not answer is said."""
    scenario = Scenario([Card(0)]).write(tmp_path / "scenario")
    command = [sys.executable, "-m", "gpuwarden", "exporter", f"--gpus=simulated:{scenario}"]
    command += [f"--jobs.directory={tmp_path / 'jobs'}", "--once", flag]
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=x\n")
    environment = os.environ | {"SLURM_CONF": str(config)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = [text for text in done.stdout.splitlines() if 'collector="slurm"' in text]
    assert said == ([] if line is None else [line])
    assert "gpu_up{" in done.stdout


class Node:
    """This host, its Slurm jobs in their cgroups, and what the exporter makes of it."""

    def __init__(self, folder: Path, clock: ManualClock, questions: SlurmQuestions) -> None:
        self.proc = ProcMirror(folder / "proc")
        self.inquiry: Inquiry[SlurmView] = Inquiry("slurm", questions.ask, every=1.0, gap=0.05)
        self.attribution = Attribution(
            folder / "jobs", clock=clock, proc=self.proc.folder, slurm=self.inquiry
        )
        self.on_card: list[int] = []

    def observe(self) -> NodeSnapshot:
        """Read the node; the processes of `on_card` are on the card of /dev/nvidia2."""
        listed = tuple(GpuProcess(pid, ProcessKind.COMPUTE, 1000, 0.5) for pid in self.on_card)
        gpus = [
            Gpu(
                index=index,
                uuid=f"GPU-{minor}",
                name="x",
                minor=minor,
                utilization_ratio=0.5 if minor == 2 and listed else 0.0,
                processes=listed if minor == 2 else (),
            )
            for index, minor in enumerate((0, 1, 2, 3))
        ]
        devices = DeviceSnapshot(0.0, "550", simulated=True, gpus=tuple(gpus))
        return self.attribution.observe(devices)

    def held(self) -> dict[str, list[tuple[str, float | None]]]:
        """Job -> its cards and how busy they are with it."""
        return {
            job.job_id: [(item.uuid, item.utilization_ratio) for item in job.holdings]
            for job in self.observe().jobs
        }

    def put(self, pids: tuple[int, ...], number: int) -> None:
        """Show a job's processes in its cgroup, and those on the card."""
        self.proc.put(pids, f"/system.slice/slurmstepd.scope/job_{number}/step_batch/user/task_0")


@pytest.fixture
def node(tmp_path: Path, clock: ManualClock, questions: SlurmQuestions) -> Iterator[Node]:
    """This host as a node of the cluster."""
    made = Node(tmp_path, clock, questions)
    yield made
    made.attribution.close()


class TestNode:
    """Jobs of a real Slurm on a node."""

    def test_a_job_from_its_start_to_its_end(self, cluster: SlurmCluster, node: Node) -> None:
        """Held while allocated, used while a process is on it, and gone with the job."""
        number = _running(cluster, "--gres=gpu:2")
        name = f"slurm-ci-{number}-0"
        held = eventually(node.held, until=bool)
        assert held == {name: [("GPU-2", 0.0), ("GPU-3", 0.0)]}
        pids = eventually(lambda: cluster.pids(number), until=bool)
        node.put(pids, number)
        node.on_card = [pids[0]]
        held = eventually(node.held, until=bool)
        assert held == {name: [("GPU-2", 0.5), ("GPU-3", 0.0)]}
        cluster.run("scancel", str(number))
        eventually(lambda: cluster.states(number), until=lambda states: states == {"CANCELLED"})
        node.proc.remove(pids)
        node.on_card = []
        assert eventually(node.held, until=lambda held: not held) == {}

    def test_a_controller_that_hangs(self, cluster: SlurmCluster, node: Node) -> None:
        """A controller that takes questions and answers none stalls no snapshot."""
        known = _running(cluster, "--gres=gpu:1")
        pids = eventually(lambda: cluster.pids(known), until=bool)
        node.put(pids, known)
        node.on_card = [pids[0]]
        eventually(node.held, until=bool)
        new = _running(cluster, "--gres=gpu:1")
        more = eventually(lambda: cluster.pids(new), until=bool)
        cluster.freeze("slurmctld")
        try:
            begun = node.inquiry.begun
            eventually(lambda: node.inquiry.begun, until=lambda number: number > begun)
            node.put(more, new)
            node.on_card.append(more[0])
            snapshot = node.observe()
            assert f"slurm-ci-{known}-0" in {job.job_id for job in snapshot.jobs}
            # What it said before it hung is of no use for a job that was first seen since.
            assert snapshot.dropped["slurm_pending"] == 1
            (row,) = [row for row in snapshot.processes if row.pid == more[0]]
            assert row.job_id == ""
        finally:
            cluster.thaw("slurmctld")
        both = {f"slurm-ci-{known}-0", f"slurm-ci-{new}-0"}
        assert eventually(node.held, until=lambda held: len(held) == 2).keys() == both

    @pytest.mark.sweep
    def test_a_controller_that_is_restarted(self, cluster: SlurmCluster, node: Node) -> None:
        """While it is down known jobs keep their names, and that it is down is said.

        The last test of this Slurm: 22.05 gives no cards to new jobs until slurmd registers again.
        """
        number = _running(cluster, "--gres=gpu:1")
        pids = eventually(lambda: cluster.pids(number), until=bool)
        node.put(pids, number)
        node.on_card = [pids[0]]
        name = f"slurm-ci-{number}-0"
        assert eventually(node.held, until=bool).keys() == {name}
        # It writes down now and then what it knows; a new one forgets what came later.
        cluster.run("scontrol", "reconfigure")
        cluster.stop_daemon("slurmctld")
        snapshot = eventually(node.observe, until=lambda snapshot: bool(snapshot.impaired))
        assert snapshot.impaired == {"slurm"}
        assert [job.job_id for job in snapshot.jobs] == [name]
        cluster.start("slurmctld")
        snapshot = eventually(node.observe, until=lambda snapshot: not snapshot.impaired)
        assert [job.job_id for job in snapshot.jobs] == [name]
