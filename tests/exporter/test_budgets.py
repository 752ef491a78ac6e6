"""What an exporter costs, counted: readings of each snapshot, wake-ups while nothing happens."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import Children, eventually, own_launchers
from tests.servers import free_port

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.resources import REREAD_SNAPSHOTS
from gpuwarden.exporter.sampler import Sampler
from gpuwarden.exporter.settings import ExporterSettings
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess, build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READS_PER_MEMBER = 1
"""What a process on a card does (`stat`); its owner, cgroup and I/O are read now and then."""
READS_OF_A_SNAPSHOT = 16
"""Whoever is there: pressure, the job files' folder; and what is read by turns."""
WAKE_UPS_PER_SECOND = 3
"""Two for errors of the cards, and less than one for signs of life."""


def _readings() -> int:
    content = Path("/proc/thread-self/io").read_text()
    return int(content.split("syscr:")[1].split()[0])


@pytest.fixture
def sampler(
    scenario_file: Path, jobs: Path, children: Children
) -> Iterator[Callable[[int], Sampler]]:
    """Makes a sampler of a node on which so many sleeping processes, each a job, are on a card."""
    made: list[Sampler] = []

    def make(members: int) -> Sampler:
        pids = [children.start().pid for _ in range(members)]
        processes = [SimulatedProcess(0, pid, memory=GIB, ghost=1) for pid in pids]
        nvml = Nvml(build(), scenario=Scenario([Card(0)], processes).write(scenario_file))
        attribution = Attribution(jobs, launchers=own_launchers())
        made.append(Sampler(ExporterSettings(jobs_directory=jobs), nvml, attribution))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_readings_of_a_snapshot(sampler: Callable[[int], Sampler]) -> None:
    """A process that sleeps on a card is read once in a snapshot, and nobody else is."""
    members = 40
    one = sampler(members)
    seen = []
    for _ in range(2 * REREAD_SNAPSHOTS):
        before = _readings()
        one.sample()
        seen.append(_readings() - before)
    # Other processes of the machine come and go, and each is read when it comes; at times everybody
    # is. The usual snapshot is the lower half's.
    usual = sorted(seen)[len(seen) // 2]
    assert usual <= READS_OF_A_SNAPSHOT + READS_PER_MEMBER * members + members // 4


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wake_ups(pid: int) -> int:
    """How often the threads of a process have gone to sleep, and so been woken."""
    count = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        status = (thread / "status").read_text()
        count += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return count


def test_wake_ups_while_nothing_happens(scenario_file: Path, tmp_path: Path) -> None:
    """Between two snapshots an exporter that nobody scrapes sleeps, but for the cards' errors."""
    Scenario([Card(0)]).write(scenario_file)
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuwarden", "exporter"),
            f"--gpus=simulated:{scenario_file}",
            f"--web.listen-address={address}",
            f"--jobs.directory={tmp_path / 'jobs'}",
            f"--release-file={tmp_path / 'release'}",
            "--collect.interval=1m",
        ],
        stderr=subprocess.DEVNULL,
    ) as program:
        try:
            eventually(lambda: _ready(address))
            began, before = time.monotonic(), _wake_ups(program.pid)
            time.sleep(3)
            woken, elapsed = _wake_ups(program.pid) - before, time.monotonic() - began
        finally:
            program.terminate()
    # The connection that asked whether it is ready may still be closing.
    assert woken <= WAKE_UPS_PER_SECOND * elapsed + 3
