"""Job files in containers, made of real PID and mount namespaces."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import Children, ManualClock, eventually, own_launchers

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.recollections import Recollection
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess
from gpuwarden.job_files import EXIT_FAULT, RunExit, RunStatus, status_path, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuwarden.exporter.jobs import Job
    from gpuwarden.exporter.nvml import Nvml

UNSHARE = ("unshare", "--pid", "--mount", "--fork", "--mount-proc")


def _may_unshare() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not _may_unshare(), reason="namespaces cannot be made here")

TRAINER = """
import os, sys, time
from pathlib import Path
from gpuwarden.job_files import RunDescription, description_path, write
root, run_id, pid, namespace = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
write(description_path(root, run_id), RunDescription(
    run_id=run_id,
    pid=pid or os.getpid(),
    pid_ns=int(namespace) or Path("/proc/self/ns/pid").stat().st_ino,
    start_ticks=int(stat[19]),
    boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    model="yolov8n", batch=16, imgsz=640, amp=False, epochs=3,
).encode())
if "COMM" in os.environ:
    Path("/proc/self/comm").write_bytes(os.environb[b"COMM"])
print("written", flush=True)
time.sleep(600)
"""
OWN = 'mount -t tmpfs tmpfs "$1" && mkdir -m 1777 "$1/jobs" && '


class Containers:
    """Trainings in containers, and what the node makes of them."""

    def __init__(
        self,
        jobs: Path,
        clock: ManualClock,
        *,
        children: Children,
        driver: Callable[[Scenario], Nvml],
        scenario_file: Path,
    ) -> None:
        self.jobs = jobs
        self.clock = clock
        self._children = children
        self._driver = driver
        self._scenario_file = scenario_file
        self._nvml: Nvml | None = None
        self.attribution = Attribution(jobs, launchers=own_launchers(), clock=clock)

    def start(
        self, run_id: str = "run-1", *, prepare: str = OWN, pid: int = 0, namespace: int = 0
    ) -> int:
        """Start a training in a container; gives its pid on the node."""
        script = f'{prepare}exec "$0" -c "$2" "$1" {run_id} {pid} {namespace}'
        child = self._children.start(
            *UNSHARE, "sh", "-c", script, sys.executable, str(self.jobs), TRAINER
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
        (inner,) = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        return int(inner)

    def put_on_card(self, *pids: int) -> None:
        """Have the driver list processes."""
        processes = [SimulatedProcess(0, pid, memory=GIB) for pid in pids]
        scenario = Scenario([Card(0)], processes)
        if self._nvml is None:
            self._nvml = self._driver(scenario)
        else:
            scenario.write(self._scenario_file)

    def restart(self) -> None:
        """Replace the exporter by one that knows what was kept."""
        kept = Recollection.decode(self.attribution.recollect().encode())
        self.attribution.close()
        self.attribution = Attribution(self.jobs, launchers=own_launchers(), clock=self.clock)
        self.attribution.recall(kept)

    def names(self) -> set[tuple[str, str]]:
        """Whose GPU time was lost, and why."""
        assert self._nvml is not None
        return set(self.attribution.observe(self._nvml.snapshot()).lost_gpu_seconds)

    def lost(self) -> list[float]:
        """GPU time lost, as the node counts it."""
        assert self._nvml is not None
        snapshot = self.attribution.observe(self._nvml.snapshot())
        return list(snapshot.lost_gpu_seconds.values())

    def observed(self) -> tuple[dict[int, tuple[str, ...]], dict[str, int]]:
        """Host pid of each job's process on the card -> its runs; and what was dropped."""
        assert self._nvml is not None
        snapshot = self.attribution.observe(self._nvml.snapshot())
        runs: dict[int, tuple[str, ...]] = {}
        for row in snapshot.processes:
            job: Job = next(item for item in snapshot.jobs if item.job_id == row.job_id)
            runs[row.pid] = tuple(run.description.run_id for run in job.runs)
        return runs, dict(snapshot.dropped)


@pytest.fixture
def containers(
    jobs: Path,
    clock: ManualClock,
    children: Children,
    driver: Callable[[Scenario], Nvml],
    scenario_file: Path,
) -> Iterator[Containers]:
    """Containers on a node of one card."""
    made = Containers(jobs, clock, children=children, driver=driver, scenario_file=scenario_file)
    yield made
    made.attribution.close()


def test_a_training_in_a_container_is_seen(containers: Containers) -> None:
    """Pid 1 of a container, with a folder of its own, is the node's process on the card."""
    pid = containers.start()
    containers.put_on_card(pid)
    assert containers.observed()[0] == {pid: ("run-1",)}
    assert list((containers.jobs / "jobs").iterdir()) == []


def test_a_container_that_ends_while_nobody_looks(
    containers: Containers, children: Children
) -> None:
    """What its training lost is counted by the next exporter, once the driver had its time."""
    pid = containers.start()
    containers.put_on_card(pid)
    containers.observed()
    containers.clock.advance(50)
    containers.restart()
    assert containers.observed()[0] == {pid: ("run-1",)}
    containers.restart()
    children.close()
    assert eventually(lambda: containers.observed()[0] == {})
    assert containers.lost() == []
    containers.clock.advance(60)
    (lost,) = containers.lost()
    # From its start to when it was last known to live.
    assert 50 <= lost < 110
    containers.restart()
    assert containers.lost() == [lost]


def test_a_training_that_ends_in_a_container_that_goes_on(containers: Containers) -> None:
    """Its lost work is counted while its container is still read, and nothing hangs on that."""
    pid = containers.start()
    containers.put_on_card(pid)
    containers.observed()
    now = containers.clock.wall()
    status = RunStatus("run-1", 1, "done", now, now, exit=RunExit(EXIT_FAULT, "fault", now + 20))
    inside = Path(f"/proc/{pid}/root{containers.jobs}")
    write(status_path(inside, "run-1"), status.encode())
    containers.clock.advance(30)
    containers.observed()
    containers.clock.advance(601)
    containers.observed()
    assert containers.observed() == ({pid: ()}, {})
    (lost,) = containers.lost()
    assert 20 <= lost < 80
    assert containers.names() == {(getpass.getuser(), "fault")}


def test_two_containers_do_not_mix(containers: Containers) -> None:
    """Both trainings are pid 1 of theirs and of the same name; each is told of its own process."""
    pids = [containers.start(), containers.start()]
    containers.put_on_card(*pids)
    assert containers.observed()[0] == dict.fromkeys(pids, ("run-1",))


def test_a_name_that_is_a_line(containers: Containers) -> None:
    """A process cannot take another's pid in its container by what it calls itself."""
    child = containers.start(prepare=OWN + 'export COMM="$(printf "x\\rNSpid:\\t7")" && ')
    assert Path(f"/proc/{child}/comm").read_bytes() == b"x\rNSpid:\t7\n"
    containers.put_on_card(child)
    assert containers.observed()[0] == {child: ("run-1",)}


def test_the_nodes_own_folder_in_a_container(containers: Containers) -> None:
    """Where the node's folder is mounted into the container, its files are read once."""
    pid = containers.start(prepare="")
    containers.put_on_card(pid)
    assert containers.observed() == ({pid: ("run-1",)}, {})


def test_a_container_speaks_for_nobody_else(containers: Containers) -> None:
    """A run that names a process of another container, or of the node, is not believed."""
    victim = containers.start("victim")
    namespace = Path(f"/proc/{victim}/ns/pid").stat().st_ino
    liar = containers.start("liar", namespace=namespace)
    own = Path("/proc/self/ns/pid").stat().st_ino
    other = containers.start("other", pid=os.getpid(), namespace=own)
    containers.put_on_card(victim, liar, other)
    runs, dropped = containers.observed()
    assert runs == {victim: ("victim",), liar: (), other: ()}
    assert dropped["job_file_pid_namespace"] == 2


@pytest.mark.parametrize(
    "prepare",
    [
        'mount -t tmpfs tmpfs "$1" && ln -s "$1/real" "$1/jobs" && mkdir "$1/real" && ',
        'mount -t tmpfs tmpfs "$1" && mkdir "$1.real" && ln -s "$1.real" "$1/jobs" && ',
    ],
)
def test_links_are_not_followed(containers: Containers, prepare: str) -> None:
    """Whoever is root in a container cannot lead the node elsewhere."""
    pid = containers.start(prepare=prepare)
    containers.put_on_card(pid)
    assert containers.observed()[0] == {pid: ()}


def test_a_container_that_ends_leaves_nothing(containers: Containers, children: Children) -> None:
    """With its last process the container's runs are forgotten, and no file stays open."""
    pid = containers.start()
    containers.put_on_card(pid)
    containers.observed()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        containers.observed()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    children.close()
    assert eventually(lambda: containers.observed()[0] == {})
    assert containers.attribution._pods._folders == {}
