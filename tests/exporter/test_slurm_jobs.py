"""Which attempt of which Slurm job a process belongs to, and which cards jobs hold without one."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from tests.exporter.mirrors import ProcMirror
from tests.exporter.nodes import Children, ManualClock, eventually, process_of

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter.allocations import DeviceFiles
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, ProcessKind
from gpuwarden.exporter.inquiries import Inquiry
from gpuwarden.exporter.recollections import NamedRecord, Recollection
from gpuwarden.exporter.slurm import SlurmView
from gpuwarden.exporter.slurm_jobs import FRESH_SECONDS, PATIENCE_SECONDS
from gpuwarden.platforms.slurm import SlurmJob
from gpuwarden.platforms.slurm_texts import GresCard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.exporter.jobs import Holding, Job, NodeSnapshot

GIB = 2**30
RUNNING = frozenset({"RUNNING"})


class Controller:
    """A Slurm controller that says what the test has it say, or nothing."""

    def __init__(self) -> None:
        self.jobs: dict[int, SlurmJob] = {}
        self.cards: dict[str, tuple[GresCard, ...]] = {"node1": (GresCard(0), GresCard(1))}
        self.nodes: tuple[str, ...] = ("node1",)
        self.down = False

    def has(self, job_id: int, **changes: object) -> None:
        """Have it know a running job of this node."""
        values: dict[str, Any] = {
            "cluster": "main",
            "states": RUNNING,
            "nodes": ("node1",),
            "user_id": os.getuid(),
        }
        self.jobs[job_id] = SlurmJob(job_id, **{**values, **changes})

    def ask(self) -> SlurmView:
        """What the exporter's questions are answered with."""
        if self.down:
            raise ServiceUnavailable("slurm_load_jobs error: Unable to contact slurm controller")
        return SlurmView("main", self.nodes, dict(self.jobs), self.cards)


class Node:
    """A node of Slurm with two cards: real processes in cgroups of the test's choice."""

    def __init__(self, folder: Path, clock: ManualClock, controller: Controller) -> None:
        self.clock = clock
        self.proc = ProcMirror(folder / "proc")
        self._inquiry = Inquiry("slurm", controller.ask, every=0.01, clock=clock, gap=0.01)
        self.attribution = Attribution(
            folder / "jobs", clock=clock, proc=self.proc.folder, slurm=self._inquiry
        )
        self.gpus = [Gpu(index=n, uuid=f"GPU-{n}", name="x", minor=n) for n in (0, 1)]
        self.lists: dict[int, list[int]] = {0: [], 1: []}
        self.lost: set[int] = set()
        self.busy: set[int] = set()
        self.used: dict[int, int] = {}

    def observe(self) -> NodeSnapshot:
        """Read the node once."""
        gpus = tuple(
            Gpu(
                index=gpu.index,
                uuid=gpu.uuid,
                name=gpu.name,
                minor=gpu.minor,
                pci_bus_id=gpu.pci_bus_id,
                up=gpu.index not in self.lost,
                utilization_ratio=self._load(gpu.index),
                memory_used_bytes=self.used.get(gpu.index),
                processes=None
                if gpu.index in self.lost
                else tuple(
                    GpuProcess(pid, ProcessKind.COMPUTE, GIB, 0.25)
                    for pid in self.lists.get(gpu.index, ())
                ),
            )
            for gpu in self.gpus
        )
        devices = DeviceSnapshot(self.clock.wall(), "550", simulated=True, gpus=gpus)
        return self.attribution.observe(devices)

    def _load(self, index: int) -> float | None:
        """Cards work where somebody is on them, and where the test has them work."""
        if index in self.lost or index in self.used:
            return None
        return 0.5 if self.lists.get(index) or index in self.busy else 0.0

    def jobs(self) -> dict[str, Job]:
        """Jobs by id."""
        return {job.job_id: job for job in self.observe().jobs}

    def answered(self) -> NodeSnapshot:
        """A snapshot after the controller has answered a question that was asked after now."""
        self.observe()
        begun = self._inquiry.begun
        eventually(
            lambda: self._inquiry.told, until=lambda told: told is not None and told.number > begun
        )
        return self.observe()

    def refused(self) -> NodeSnapshot:
        """A snapshot after the controller has not answered."""
        self.observe()
        eventually(lambda: self._inquiry.problem)
        return self.observe()


@pytest.fixture
def controller() -> Controller:
    """The controller of the test's cluster."""
    return Controller()


@pytest.fixture
def node(tmp_path: Path, clock: ManualClock, controller: Controller) -> Iterator[Node]:
    """A node of that cluster."""
    made = Node(tmp_path, clock, controller)
    yield made
    made.attribution.close()


def _ids(snapshot: NodeSnapshot) -> list[str]:
    return [job.job_id for job in snapshot.jobs]


def _cgroup(number: int | str) -> str:
    return f"/system.slice/slurmstepd.scope/job_{number}/step_batch/user/task_0"


@pytest.fixture
def start(node: Node, children: Children) -> Callable[..., int]:
    """Starts a process in a cgroup, on card 0."""

    def begin(cgroup: str, *command: str) -> int:
        child = children.start(*command)
        node.proc.put([child.pid], cgroup)
        node.lists[0].append(child.pid)
        return child.pid

    return begin


class TestIdentity:
    """The name of an attempt, and that it never changes."""

    @pytest.mark.parametrize(
        ("cgroup", "job", "job_id"),
        [
            (_cgroup(211), {}, "slurm-main-211-0"),
            (_cgroup(211), {"restarts": 2}, "slurm-main-211-2"),
            ("/slurm/uid_1000/job_211/step_batch", {}, "slurm-main-211-0"),
            ("/slurm_n1/uid_1000/job_211", {}, "slurm-main-211-0"),
            ("/system.slice/n1_slurmstepd.scope/job_211/step_0", {}, "slurm-main-211-0"),
            (_cgroup(211), {"array_job_id": 209, "array_task_id": 7}, "slurm-main-209_7-0"),
            (_cgroup(211), {"het_job_id": 210, "het_job_offset": 1}, "slurm-main-211-0"),
        ],
    )
    def test_by_the_controllers_word(
        self,
        node: Node,
        controller: Controller,
        start: Callable[..., int],
        *,
        cgroup: str,
        job: dict[str, object],
        job_id: str,
    ) -> None:
        """Cluster, number and attempt name a job, whichever cgroup its processes are in."""
        controller.has(211, partition="gpu", account="vision", submit_time=5.0, **job)
        start(cgroup)
        (found,) = node.answered().jobs
        assert (found.job_id, found.source) == (job_id, "slurm")
        facts = found.platform
        assert (facts.platform, facts.number, facts.cluster) == ("slurm", "211", "main")
        assert (facts.partition, facts.account, facts.submit_time) == ("gpu", "vision", 5.0)

    def test_it_is_withheld_until_the_controller_answers(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """While the controller is down a new job is nobody's, rather than somebody else later."""
        controller.has(211)
        controller.down = True
        pid = start(_cgroup(211))
        snapshot = node.refused()
        assert _ids(snapshot) == []
        assert [(row.pid, row.job_id) for row in snapshot.processes] == [(pid, "")]
        assert snapshot.dropped["slurm_pending"] == 1
        assert snapshot.impaired == {"slurm"}
        assert snapshot.failed == frozenset()
        controller.down = False
        snapshot = node.answered()
        assert _ids(snapshot) == ["slurm-main-211-0"]
        assert snapshot.impaired == frozenset()

    def test_who_is_known_stays_so(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """A controller that goes down takes no job's name, for however long."""
        controller.has(211)
        start(_cgroup(211))
        assert _ids(node.answered()) == ["slurm-main-211-0"]
        controller.down = True
        node.clock.advance(2 * PATIENCE_SECONDS)
        snapshot = node.refused()
        assert _ids(snapshot) == ["slurm-main-211-0"]
        assert "slurm_unresolved" not in snapshot.dropped

    def test_patience_ends_once(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """A job that nobody could name for ten minutes keeps the name that it then gets."""
        controller.has(211)
        controller.down = True
        start(_cgroup(211))
        assert _ids(node.refused()) == []
        node.clock.advance(PATIENCE_SECONDS)
        snapshot = node.observe()
        assert _ids(snapshot) == ["slurm-unresolved-211"]
        assert snapshot.dropped["slurm_unresolved"] == 1
        controller.down = False
        assert _ids(node.answered()) == ["slurm-unresolved-211"]

    def test_a_requeued_job_is_another_attempt(
        self,
        node: Node,
        controller: Controller,
        children: Children,
        start: Callable[..., int],
    ) -> None:
        """The same number with other processes is not taken for the attempt of before."""
        controller.has(211)
        first = children.start()
        node.proc.put([first.pid], _cgroup(211))
        node.lists[0] = [first.pid]
        assert _ids(node.answered()) == ["slurm-main-211-0"]
        controller.down = True
        node.refused()
        children.kill(first)
        node.proc.remove([first.pid])
        node.lists[0] = []
        start(_cgroup(211))
        assert _ids(node.observe()) == []
        controller.has(211, restarts=1)
        controller.down = False
        assert _ids(node.answered()) == ["slurm-main-211-1"]

    def test_a_step_of_the_same_attempt(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """Processes that join do not change the name, though the controller counts on."""
        controller.has(211)
        start(_cgroup(211))
        assert _ids(node.answered()) == ["slurm-main-211-0"]
        controller.has(211, restarts=1)
        start("/system.slice/slurmstepd.scope/job_211/step_1/user/task_0")
        assert _ids(node.answered()) == ["slurm-main-211-0"]

    def test_a_job_that_the_controller_does_not_know(
        self, node: Node, start: Callable[..., int]
    ) -> None:
        """What an ended job left behind on a card is seen, under a name that nobody acts on."""
        start(_cgroup(211))
        snapshot = node.answered()
        assert _ids(snapshot) == ["slurm-unresolved-211"]
        assert snapshot.jobs[0].source == "slurm"

    def test_a_name_outlives_the_exporter(
        self, node: Node, controller: Controller, start: Callable[..., int], tmp_path: Path
    ) -> None:
        """An exporter that starts while the controller is down knows who was known before."""
        controller.has(211, partition="gpu")
        start(_cgroup(211))
        assert _ids(node.answered()) == ["slurm-main-211-0"]
        controller.down = True
        known = Recollection.decode(node.attribution.recollect().encode())
        (tmp_path / "next").mkdir()
        later = Node(tmp_path / "next", node.clock, controller)
        later.lists = node.lists
        later.proc.put(node.lists[0], _cgroup(211))
        later.attribution.recall(known)
        snapshot = later.refused()
        assert _ids(snapshot) == ["slurm-main-211-0"]
        assert snapshot.jobs[0].platform.partition == ""
        controller.down = False
        snapshot = later.answered()
        assert _ids(snapshot) == ["slurm-main-211-0"]
        assert snapshot.jobs[0].platform.partition == "gpu"
        later.attribution.close()

    def test_a_name_does_not_outlive_its_processes(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """What the number was called before is nothing to an attempt of other processes."""
        named = {"211": NamedRecord("slurm-main-211-0", 211, ((4_000_000, 1),))}
        node.attribution.recall(Recollection("b", 0.0, {}, {}, named=named))
        controller.has(211, restarts=1)
        start(_cgroup(211))
        assert _ids(node.answered()) == ["slurm-main-211-1"]

    def test_nobody_is_asked(self, tmp_path: Path, clock: ManualClock, children: Children) -> None:
        """With the collector off a Slurm job has a name at once: an unresolved one."""
        proc = ProcMirror(tmp_path / "proc")
        child = children.start()
        proc.put([child.pid], _cgroup(211))
        attribution = Attribution(tmp_path / "jobs", clock=clock, proc=proc.folder)
        processes = (GpuProcess(child.pid, ProcessKind.COMPUTE, GIB),)
        gpu = Gpu(index=0, uuid="GPU-0", name="x", processes=processes)
        devices = DeviceSnapshot(clock.wall(), "550", simulated=True, gpus=(gpu,))
        snapshot = attribution.observe(devices)
        assert _ids(snapshot) == ["slurm-unresolved-211"]
        assert snapshot.impaired == frozenset()
        attribution.close()


SLUID = "s5K1KKYAYG5D00"
BEHIND_SLUID = f"/system.slice/slurmstepd.scope/{SLUID}/step_batch"


class TestSluid:
    """Slurm 26.05 names cgroups by an id of its own."""

    @pytest.mark.skipif(os.geteuid() != 0, reason="slurmstepd is root's")
    def test_by_slurms_own_process(
        self,
        node: Node,
        controller: Controller,
        children: Children,
        *,
        start: Callable[..., int],
        tmp_path: Path,
    ) -> None:
        """The step's manager, which is root's, tells whose step it serves."""
        controller.has(211)
        manager = tmp_path / "slurmstepd"
        manager.symlink_to("/bin/bash")
        child = children.start("bash", "-c", f'exec -a "slurmstepd: [211.batch]" {manager}')
        eventually(lambda: process_of(child.pid).comm, until=lambda comm: comm == "slurmstepd")
        node.proc.put([child.pid], f"{BEHIND_SLUID}/slurm")
        start(f"{BEHIND_SLUID}/user/task_0")
        assert _ids(node.answered()) == ["slurm-main-211-0"]

    @pytest.mark.parametrize(
        ("owner", "job_id"),
        [(os.getuid(), "slurm-main-211-0"), (os.getuid() + 1, f"slurm-unresolved-{SLUID}")],
    )
    def test_by_its_owners_word(
        self,
        node: Node,
        controller: Controller,
        start: Callable[..., int],
        *,
        owner: int,
        job_id: str,
    ) -> None:
        """A process's own environment names a job of its own owner, and of nobody else."""
        controller.has(211, user_id=owner)
        start(f"{BEHIND_SLUID}/user/task_0", "env", "SLURM_JOB_ID=211", "sleep", "600")
        assert _ids(node.answered()) == [job_id]

    def test_nothing_tells(self, node: Node, start: Callable[..., int]) -> None:
        """Where nothing tells, it is kept as it is, once."""
        start(f"{BEHIND_SLUID}/user/task_0")
        assert _ids(node.answered()) == [f"slurm-unresolved-{SLUID}"]


def _held(snapshot: NodeSnapshot) -> dict[str, tuple[Holding, ...]]:
    return {job.job_id: job.holdings for job in snapshot.jobs}


class TestCards:
    """Cards that jobs were given, with and without a process on them."""

    def test_a_job_without_a_process(self, node: Node, controller: Controller) -> None:
        """A crashed job's card is held and unused; the job is its owner's, since it started."""
        controller.has(211, gpus={"node1": (1,)}, start_time=123.0)
        snapshot = node.answered()
        (job,) = snapshot.jobs
        assert job.job_id == "slurm-main-211-0"
        (holding,) = job.holdings
        assert (holding.index, holding.uuid) == (1, "GPU-1")
        assert (holding.memory_bytes, holding.utilization_ratio) == (0, 0.0)
        assert (job.root, job.start_time, job.first_gpu_use) == (None, 123.0, None)
        assert job.user != ""
        assert snapshot.devices is not None
        assert [gpu.processes for gpu in snapshot.devices.gpus] == [(), ()]

    def test_one_of_two_cards_is_used(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """A card that a job leaves alone is held beside the one that it uses."""
        controller.has(211, gpus={"node1": (0, 1), "node2": (0, 1)})
        start(_cgroup(211))
        (job,) = node.answered().jobs
        used, unused = job.holdings
        assert (used.uuid, used.memory_bytes, used.utilization_ratio) == ("GPU-0", GIB, 0.5)
        assert (unused.uuid, unused.memory_bytes, unused.utilization_ratio) == ("GPU-1", 0, 0.0)

    def test_a_job_that_works_without_its_card(
        self, node: Node, controller: Controller, children: Children
    ) -> None:
        """Its processes are its tree, though none is on a card."""
        controller.has(211, gpus={"node1": (0,)})
        child = children.start()
        node.proc.put([child.pid], _cgroup(211))
        (job,) = node.answered().jobs
        assert job.root is not None
        assert job.root.pid == child.pid
        assert job.holdings[0].utilization_ratio == 0.0
        assert job.resources is not None
        assert job.resources.threads == 1

    def test_an_ended_jobs_stale_cgroup(self, node: Node, controller: Controller) -> None:
        """A job that the controller has no more holds nothing, whatever is left of its cgroup."""
        controller.has(211, gpus={"node1": (0,)})
        assert _ids(node.answered()) == ["slurm-main-211-0"]
        del controller.jobs[211]
        assert _ids(node.answered()) == []

    @pytest.mark.parametrize(
        ("states", "held"),
        [
            ({"RUNNING"}, True),
            ({"SUSPENDED"}, True),
            ({"COMPLETING"}, True),
            ({"RUNNING", "COMPLETING"}, True),
            ({"CONFIGURING"}, False),
            ({"PENDING"}, False),
            ({"COMPLETED"}, False),
            ({"A_STATE_OF_TOMORROW"}, False),
        ],
    )
    def test_in_which_states(
        self, node: Node, controller: Controller, states: set[str], held: bool
    ) -> None:
        """A suspended job keeps its cards, and one that ends has them until it has ended."""
        controller.has(211, gpus={"node1": (0,)}, states=frozenset(states))
        assert bool(node.answered().jobs) is held

    def test_the_node_has_its_own_order(self, node: Node, controller: Controller) -> None:
        """Slurm's index is a place in the node's list, whose device file has another number."""
        node.gpus = [
            Gpu(index=0, uuid="GPU-a", name="x", minor=3),
            Gpu(index=1, uuid="GPU-b", name="x", minor=2),
        ]
        controller.cards = {"node1": (GresCard(2), GresCard(3))}
        controller.has(211, gpus={"node1": (0,)})
        (job,) = node.answered().jobs
        assert [item.uuid for item in job.holdings] == ["GPU-b"]

    def test_a_node_whose_list_is_not_known(self, node: Node, controller: Controller) -> None:
        """Without the node's list an index is no card: a guess could call a busy card idle."""
        controller.cards = {}
        controller.has(211, gpus={"node1": (0,)})
        snapshot = node.answered()
        assert _ids(snapshot) == []
        assert snapshot.dropped["slurm_cards"] == 1

    def test_two_nodes_on_a_host(self, node: Node, controller: Controller) -> None:
        """Where several slurmd share a host, each has its own order of its own cards."""
        controller.nodes = ("node1", "node2")
        controller.cards = {"node1": (GresCard(0),), "node2": (GresCard(1),)}
        controller.has(211, nodes=("node2",), gpus={"node2": (0,)})
        (job,) = node.answered().jobs
        assert [item.uuid for item in job.holdings] == ["GPU-1"]

    def test_an_instance_of_mig(self, node: Node, controller: Controller) -> None:
        """Where Slurm knows the UUID, that is the card."""
        controller.cards = {"node1": (GresCard(0, "GPU-1"),)}
        controller.has(211, gpus={"node1": (0,)})
        (job,) = node.answered().jobs
        assert [item.uuid for item in job.holdings] == ["GPU-1"]

    @pytest.mark.parametrize("gpus", [None, {"node1": (7,)}])
    def test_cards_that_cannot_be_found(
        self, node: Node, controller: Controller, gpus: dict[str, tuple[int, ...]] | None
    ) -> None:
        """A card that is not known by its number is nobody's, and that is counted."""
        controller.has(211, gpus=gpus)
        snapshot = node.answered()
        assert _ids(snapshot) == []
        assert snapshot.dropped["slurm_cards"] == 1

    def test_work_under_another_name(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """With a stranger on its card a job is not known to be idle: it may be the job's work."""
        controller.has(211, gpus={"node1": (0,)})
        start("/docker/" + "ab" * 32)
        held = _held(node.answered())
        (holding,) = held["slurm-main-211-0"]
        assert (holding.memory_bytes, holding.utilization_ratio) == (None, None)

    def test_a_card_that_works_for_nobody(self, node: Node, controller: Controller) -> None:
        """A busy card on which the driver lists nobody is held, and not known to be idle."""
        controller.has(211, gpus={"node1": (0, 1)})
        node.busy.add(0)
        hidden, unused = _held(node.answered())["slurm-main-211-0"]
        assert (hidden.memory_bytes, hidden.utilization_ratio) == (None, None)
        assert (unused.memory_bytes, unused.utilization_ratio) == (0, 0.0)

    def test_a_card_without_load_that_is_full(self, node: Node, controller: Controller) -> None:
        """Where no load is told, as of an A100's instances, memory shows that somebody is there."""
        controller.has(211, gpus={"node1": (0, 1)})
        node.used = {0: 8 * GIB, 1: 600 * 2**20}
        hidden, unused = _held(node.answered())["slurm-main-211-0"]
        assert (hidden.memory_bytes, hidden.utilization_ratio) == (None, None)
        assert (unused.memory_bytes, unused.utilization_ratio) == (0, 0.0)

    def test_a_server_of_mps_without_a_client(
        self, node: Node, controller: Controller, children: Children, tmp_path: Path
    ) -> None:
        """Whom a server of MPS works for is not listed on every card: that is no idle job."""
        file = tmp_path / "nvidia-cuda-mps-server"
        shutil.copy(shutil.which("sleep") or "", file)
        server = children.start(str(file), "600")
        controller.has(211, gpus={"node1": (0,)})
        node.proc.put([server.pid], "/system.slice/mps.service")
        node.lists[0].append(server.pid)
        (holding,) = _held(node.answered())["slurm-main-211-0"]
        assert (holding.memory_bytes, holding.utilization_ratio) == (None, None)

    def test_a_card_of_two_jobs(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """Of two jobs that were given one card, the one without a process does nothing with it."""
        controller.has(211, gpus={"node1": (0,)})
        controller.has(212, gpus={"node1": (0,)})
        start(_cgroup(211))
        held = _held(node.answered())
        assert held["slurm-main-211-0"][0].utilization_ratio == 0.5
        assert held["slurm-main-212-0"][0].utilization_ratio == 0.0

    def test_a_lost_card(self, node: Node, controller: Controller) -> None:
        """Of a card that does not answer it is known whose it is, and nothing else."""
        controller.has(211, gpus={"node1": (0,)})
        node.lost.add(0)
        (job,) = node.answered().jobs
        (holding,) = job.holdings
        assert (holding.memory_bytes, holding.utilization_ratio) == (None, None)

    def test_an_old_answer(self, node: Node, controller: Controller) -> None:
        """Who had a card two minutes ago is not who has it now."""
        controller.has(211, gpus={"node1": (0,)})
        assert _ids(node.answered()) == ["slurm-main-211-0"]
        controller.down = True
        node.refused()
        node.clock.advance(FRESH_SECONDS + 1)
        assert _ids(node.observe()) == []

    def test_a_withheld_job_holds_nothing_yet(
        self, node: Node, controller: Controller, start: Callable[..., int]
    ) -> None:
        """A new attempt is not shown by the controller's word of the attempt of before."""
        controller.has(211, gpus={"node1": (1,)})
        assert _ids(node.answered()) == ["slurm-main-211-0"]
        controller.down = True
        node.refused()
        start(_cgroup(211))
        assert _ids(node.observe()) == []


def test_minor_numbers_by_the_drivers_files(tmp_path: Path) -> None:
    """/dev/nvidia0 is the third card where the driver says so, not the first."""
    minors = (2, 3, 0, 1, 6, 7, 4, 5)
    gpus = []
    for index, minor in enumerate(minors):
        folder = tmp_path / f"driver/nvidia/gpus/0000:{index + 16:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA A100\nGPU UUID: \t GPU-{index}\nDevice Minor: \t {minor}\n"
        )
        bus = f"00000000:{index + 16:02X}:00.0"
        gpus.append(Gpu(index=index, uuid=f"GPU-{index}", name="x", pci_bus_id=bus))
    devices = DeviceSnapshot(0.0, "1", simulated=False, gpus=tuple(gpus))
    found = DeviceFiles(tmp_path).uuids(devices)
    assert found == {minor: f"GPU-{index}" for index, minor in enumerate(minors)}
    assert found[0] == "GPU-2"
