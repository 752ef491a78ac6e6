"""The list by which agents of logs find what each job writes: real processes and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.exporter.nodes import ManualClock, describe, eventually, process_of

from gpuwarden.exporter.jobs import Job, NodeSnapshot, Run
from gpuwarden.exporter.log_targets import LINGER_SECONDS, LogTargets, targets
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT = [sys.executable, "-c", "import signal; signal.pause()"]


@contextmanager
def writing(out: Any, errors: Any = subprocess.DEVNULL) -> Iterator[int]:
    """A process with this output; gives its pid."""
    with subprocess.Popen(WAIT, stdout=out, stderr=errors, stdin=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def job(pid: int, *, job_id: str = "slurm-ci-7-0", log: str | None = None, **more: Any) -> Job:
    """A job with this root process, and a run if it has a log."""
    description = describe(pid, "run1", log=log)
    return Job(
        job_id=job_id,
        user="ana",
        source="slurm",
        framework="",
        interactive=False,
        root=process_of(pid),
        executables=(),
        holdings=(),
        start_time=more.get("start_time", 0.0),
        first_gpu_use=None,
        activity={},
        runs=() if log is None else (Run(description),),
    )


def test_what_a_shell_or_slurm_directed_to_a_file_is_found(tmp_path: Path) -> None:
    """Standard output and error, each a file; both in one file are one."""
    out, errors = tmp_path / "slurm-7.out", tmp_path / "slurm-7.err"
    with out.open("w") as first, errors.open("w") as second:
        with writing(first, second) as pid:
            found = [target.labels() for target in targets(job(pid))]
        with writing(first, first) as pid:
            assert [target.path for target in targets(job(pid))] == [str(out)]
    assert found == [
        {"__path__": str(path), "job_id": "slurm-ci-7-0", "user": "ana"} for path in (errors, out)
    ]


@pytest.mark.parametrize("what", ["pipe", "device", "reading", "removed", "exchanged", "pattern"])
def test_nothing_but_the_file_that_is_written_is_listed(what: str, tmp_path: Path) -> None:
    """Neither a pipe nor a device, nor what is only read, is gone, or is another file by now."""
    path = tmp_path / ("a*b" if what == "pattern" else "out")
    path.write_text("")
    mode = os.O_RDONLY if what == "reading" else os.O_WRONLY
    opened = os.open(Path("/dev/null") if what == "device" else path, mode)
    try:
        with writing(subprocess.PIPE if what == "pipe" else opened) as pid:
            if what in {"removed", "exchanged"}:
                path.unlink()
            if what == "exchanged":
                path.symlink_to("/etc/passwd")
            assert list(targets(job(pid))) == []
    finally:
        os.close(opened)


def test_a_pid_that_is_another_process_by_now_says_nothing(tmp_path: Path) -> None:
    """The root is known by its start, too."""
    with (tmp_path / "out").open("w") as out, writing(out) as former:
        ended = job(former)
        with writing(out) as later:
            taken = job(later)
            assert list(targets(taken))
            assert ended.root is not None
            former_root = replace(ended.root, pid=later, start_ticks=ended.root.start_ticks - 1)
            assert list(targets(replace(taken, root=former_root))) == []


def test_a_declared_log_must_be_the_owners_own_file(tmp_path: Path) -> None:
    """A run that names another's file, or leads to one by a link, is not followed."""
    mine, link = tmp_path / "train.log", tmp_path / "link"
    mine.write_text("")
    link.symlink_to("/etc/passwd")
    with writing(subprocess.DEVNULL) as pid:
        (found,) = targets(job(pid, log=str(mine)))
        assert found.labels()["run_id"] == "run1"
        for wrong in (link, tmp_path / "none", "train.log", f"{tmp_path}/../{mine.name}"):
            assert list(targets(job(pid, log=str(wrong)))) == []
        if os.geteuid() == 0:
            os.chown(mine, 12345, 12345)
            assert list(targets(job(pid, log=str(mine)))) == []


class Snapshots:
    """In the place of a sampler: snapshots that the test makes."""

    def __init__(self) -> None:
        self.snapshot: NodeSnapshot | None = None

    def wait(self, seconds: float) -> bool:
        """There is one."""
        return seconds >= 0

    def show(self, *jobs: Job) -> None:
        """The newest snapshot has these jobs."""
        self.snapshot = NodeSnapshot(taken_at=0.0, devices=None, jobs=jobs)


def listed(path: Path) -> dict[str, str]:
    """File -> job_id, as the list has them."""
    return {
        row["labels"]["__path__"]: row["labels"]["job_id"] for row in json.loads(path.read_bytes())
    }


def test_ended_jobs_are_listed_for_a_while(clock: ManualClock, tmp_path: Path) -> None:
    """Their last words are still read; then they are gone. The list is for the group only."""
    file, out = tmp_path / "targets.json", tmp_path / "out"
    sampler = Snapshots()
    list_ = LogTargets(file, sampler, clock=clock)
    with out.open("w") as opened, writing(opened) as pid:
        sampler.show(job(pid))
        list_.write()
        assert listed(file) == {str(out): "slurm-ci-7-0"}
        assert file.stat().st_mode & 0o777 == 0o640
        sampler.show()
    clock.advance(LINGER_SECONDS - 1)
    list_.write()
    assert listed(file) == {str(out): "slurm-ci-7-0"}
    clock.advance(2)
    list_.write()
    assert listed(file) == {}


def test_a_file_that_a_later_attempt_goes_on_with_is_the_later_ones(
    clock: ManualClock, tmp_path: Path
) -> None:
    """A requeued job of Slurm appends to the file of its first attempt."""
    file, out = tmp_path / "targets.json", tmp_path / "out"
    sampler = Snapshots()
    list_ = LogTargets(file, sampler, clock=clock)
    with out.open("w") as opened, writing(opened) as first, writing(opened) as second:
        sampler.show(job(second, job_id="slurm-ci-7-1", start_time=9.0), job(first, start_time=1.0))
        list_.write()
    assert listed(file) == {str(out): "slurm-ci-7-1"}


def test_the_exporter_lists_the_output_of_a_job_on_a_card(
    scenario_file: Path, tmp_path: Path
) -> None:
    """A process that holds a card, started by nohup into a file: its list has the page's job_id."""
    out, file = tmp_path / "nohup.out", tmp_path / "targets.json"
    with out.open("w") as opened, writing(opened) as pid:
        held = SimulatedProcess(card=0, pid=pid, memory=GIB, sm=0, mem=0)
        Scenario([Card(0)], [held]).write(scenario_file)
        command = [sys.executable, "-m", "gpuwarden", "exporter", "--collect.interval=100ms"]
        command += [f"--gpus=simulated:{scenario_file}", f"--jobs.directory={tmp_path / 'jobs'}"]
        command += [f"--logs.targets-file={file}", "--web.listen-address=127.0.0.1:0"]
        # Its parent is the launcher of the job, which this test's process is not by its name.
        command += [f"--attribution.launcher={Path('/proc/self/comm').read_text().strip()}"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as exporter:
            try:
                eventually(file.exists)
                found = eventually(lambda: listed(file))
            finally:
                exporter.terminate()
    assert list(found) == [str(out)]
    assert found[str(out)].startswith("proc-")
    assert f"-{pid}-" in found[str(out)]
