"""`gpuwarden scheduler` as a process beside a real Slurm: killed, reloaded and stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml
from tests.scheduling.policy_files import TEXT
from tests.scheduling.slurm.tasks import CARDS, PRIORITIES, TEAMS
from tests.servers import free_port, until

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.schedule_api import EntryState
from gpuwarden.scheduling.daemon_clients import DaemonClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.schedule_api import QueueEntry, ScheduleDocument


@pytest.fixture
def place(tmp_path: Path, box: SlurmCluster) -> Path:
    """A folder with the box's policy."""
    policy = yaml.safe_load(TEXT) | {"cards": CARDS, "teams": TEAMS, "priorities": PRIORITIES}
    policy["slurm"] = {"config": str(box.config), "programs": str(box.program("squeue").parent)}
    del policy["budgets"], policy["images"]
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
    return tmp_path


@pytest.fixture
def start(place: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts daemons on a port, whose ends are seen to."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(port: int) -> subprocess.Popen[bytes]:
        words = ["-m", "gpuwarden", "scheduler", "--policy", str(place / "policy.yaml")]
        words += ["--state", str(place / "state"), "--socket", str(place / "s.sock")]
        words += ["--listen", f"127.0.0.1:{port}", "--tick", "1s"]
        with (place / "log").open("ab") as log:
            running.append(subprocess.Popen([sys.executable, *words], stdout=log, stderr=log))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait(30)


def schedule(place: Path) -> ScheduleDocument | None:
    """What the daemon shows, once it has seen its engine."""
    try:
        found = DaemonClient(place / "s.sock").schedule()
    except ServiceUnavailable:
        return None
    return found if found.taken else None


def entry(place: Path, job: int) -> QueueEntry | None:
    """A job of the daemon's schedule."""
    found = schedule(place)
    rows = () if found is None else found.entries
    return next((item for item in rows if item.id == str(job)), None)


def test_the_daemon_lives_beside_slurm(
    box: SlurmCluster, place: Path, start: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    """It is killed and back, reads its policy again, and leaves; the job runs on all the while."""
    port, file = free_port(), place / "policy.yaml"
    daemon = start(port)
    job = box.submit("sleep 120", "--account=vision", "--gres=gpu:2", "--time=5")

    def running() -> bool:
        assert daemon.poll() is None, (place / "log").read_text()
        found = entry(place, job)
        return found is not None and found.state is EntryState.RUNNING

    until(running, 60)
    before = entry(place, job)
    assert before is not None
    assert (before.team, before.gpus) == ("vision", 2)
    # The account is read when a daemon starts, and then each minute. By its number slurmdbd has a
    # job some seconds before it has it in a stretch of time, which is what a daemon asks for.
    stretch = ("--starttime=now-1hours", "--endtime=now")
    until(lambda: "gres/gpu=2" in box.run("sacct", "-anPo", "AllocTRES", *stretch), 60)
    daemon.kill()
    daemon.wait(30)
    assert (place / "s.sock").exists()
    daemon = start(port)
    until(running, 60)
    after = entry(place, job)
    assert after is not None
    assert (after.id, after.started) == (before.id, before.started)
    # A mistake in the policy is told, and the old one counts; mended, it is taken.
    text = file.read_text()
    file.write_text(text.replace("version: 1", "version: 2"))
    daemon.send_signal(signal.SIGHUP)
    until(lambda: "policy_invalid" in codes(place), 30)
    file.write_text(text)
    daemon.send_signal(signal.SIGHUP)
    until(lambda: "policy_invalid" not in codes(place), 30)
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert 'gpuwarden_scheduler_gpus{state="running",team="vision"} 2.0' in metrics
    until(lambda: used_gpu_hours(place) > 0, 30)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(60) == 0, (place / "log").read_text()
    assert not (place / "s.sock").exists()
    assert box.states(job) == {"RUNNING"}
    box.run("scancel", str(job))


def used_gpu_hours(place: Path) -> float:
    """Of all teams in the last hour, by the account."""
    used = DaemonClient(place / "s.sock").ask("GET", "/v1/usage", parameters={"from": "now-1h"})
    return float(used["total"]["gpu_hours"])


def codes(place: Path) -> set[str]:
    """Of what an operator should know."""
    found = schedule(place)
    return set() if found is None else {problem.code for problem in found.problems}
