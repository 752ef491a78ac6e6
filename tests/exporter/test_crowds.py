"""Ten thousand of everything: what is shown is bounded, what is not is counted, nobody waits."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import describe, own_launchers
from tests.exporter.test_collector import JOB, SNAPSHOT

from gpuwarden.exporter import collector
from gpuwarden.exporter.allowances import BYTES, BYTES_OF_USER, FILES, FILES_OF_USER, Allowance
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.collector import MAX_ON_CARD, MAX_WAITING, MAX_WAITING_IN_ALL, collect
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, ProcessKind
from gpuwarden.exporter.jobs import GpuProcessRow, Holding, Job, NodeSnapshot
from gpuwarden.exporter.runs import MAX_ENTRIES
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess
from gpuwarden.exporter.vocabularies import MAX_WORDS
from gpuwarden.job_files import RunStatus, description_path, status_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.exporter.nodes import Children, ManualClock

    from gpuwarden.exporter.nvml import Nvml

    Driver = Callable[[Scenario], Nvml]


LISTED = 8000
"""As many processes as the simulated driver holds."""


def _job(number: int, user: str = "ann", **changes: object) -> Job:
    named = dataclasses.replace(JOB, job_id=f"job-{number}", user=user, start_time=float(number))
    return dataclasses.replace(named, **changes)  # type: ignore[arg-type]


def _series(snapshot: NodeSnapshot, family: str) -> list[str]:
    families, _ = collect(snapshot, totals={})
    return dict(families.written()).get(family, "").splitlines()


class TestCards:
    """A card with more on it than anybody runs."""

    def test_ten_thousand_processes(
        self, driver: Driver, jobs: Path, children: Children, clock: ManualClock
    ) -> None:
        """As many as the driver lists are counted; those with the most memory have series."""
        held = [
            SimulatedProcess(0, children.start().pid, memory=GIB * size, sm=1) for size in (3, 2, 1)
        ]
        ghosts = [
            SimulatedProcess(0, 3_000_000 + at, memory=1, sm=1, ghost=1)
            for at in range(LISTED - len(held))
        ]
        devices = driver(Scenario([Card(0)], [*held, *ghosts])).snapshot()
        attribution = Attribution(jobs, launchers=own_launchers(), clock=clock)
        snapshot = attribution.observe(devices)
        attribution.close()
        families, dropped = collect(snapshot, totals={}, max_processes=2)
        pages = dict(families.written())
        (count,) = pages["gpu_processes"].splitlines()
        assert float(count.rpartition(" ")[2]) == LISTED
        sizes = [float(line.rpartition(" ")[2]) for line in _lines(pages)]
        assert sizes == [3 * GIB, 2 * GIB]
        assert snapshot.dropped["no_process"] == len(ghosts)
        assert dropped == {"process_limit": 1}
        assert len(snapshot.jobs) == 3

    def test_rows_beyond_the_limit(self) -> None:
        """Ten thousand rows cost as many series as are allowed."""
        rows = tuple(
            GpuProcessRow(0, "GPU-a", pid, "ann", "j", 1.0, memory_bytes=pid)
            for pid in range(1, 10_001)
        )
        snapshot = NodeSnapshot(1.0, None, processes=rows)
        families, dropped = collect(snapshot, totals={}, max_processes=256)
        assert len(_lines(dict(families.written()))) == 256
        assert dropped == {"process_limit": 9_744}

    def test_ten_thousand_jobs(self) -> None:
        """Of the jobs on a card those with the most memory have series; on another card all."""
        crowd = [_job(at, holdings=(Holding(0, "GPU-a", at, 0.0),)) for at in range(10_000)]
        alone = _job(10_000, holdings=(Holding(1, "GPU-b", 1, 0.0),))
        snapshot = dataclasses.replace(SNAPSHOT, jobs=(*crowd, alone))
        families, dropped = collect(snapshot, totals={})
        shown = dict(families.written())["gpu_job_info"].splitlines()
        assert len(shown) == MAX_ON_CARD + 1
        assert dropped["job_limit"] == 10_000 - MAX_ON_CARD
        assert any('job_id="job-9999"' in line for line in shown)
        assert not any('job_id="job-1"' in line for line in shown)

    def test_a_job_on_two_cards(self) -> None:
        """A job that has room on one of its cards is shown as a whole."""
        crowd = [_job(at, holdings=(Holding(0, "GPU-a", 10, 0.0),)) for at in range(MAX_ON_CARD)]
        both = (Holding(0, "GPU-a", 1, 0.0), Holding(1, "GPU-b", 1, 0.0))
        snapshot = dataclasses.replace(SNAPSHOT, jobs=(*crowd, _job(9000, holdings=both)))
        held = [line for line in _series(snapshot, "gpu_job_holds_gpu") if "job-9000" in line]
        assert len(held) == 2


class TestUsers:
    """A user who makes more than anybody needs."""

    def test_trainings_without_a_card(self) -> None:
        """Whoever declares ten thousand trainings has series of his oldest only."""
        crowd = [_job(at, holdings=()) for at in range(10_000)]
        other = _job(20_000, user="ben", holdings=())
        snapshot = dataclasses.replace(SNAPSHOT, jobs=(*crowd, other))
        families, dropped = collect(snapshot, totals={})
        shown = dict(families.written())["gpu_job_info"]
        users = Counter("ann" if 'user="ann"' in line else "ben" for line in shown.splitlines())
        assert users == {"ann": MAX_WAITING, "ben": 1}
        assert 'job_id="job-0"' in shown
        assert dropped["job_limit"] == 10_000 - MAX_WAITING

    def test_a_user_of_many_names(self) -> None:
        """Thousands of uids do not make it thousands of jobs."""
        crowd = [_job(at, user=str(at), holdings=()) for at in range(10_000)]
        snapshot = dataclasses.replace(SNAPSHOT, jobs=tuple(crowd))
        assert len(_series(snapshot, "gpu_job_info")) == MAX_WAITING_IN_ALL

    def test_executables(self) -> None:
        """Beyond its share one that matches no whitelist stands for the rest of a job's."""
        many = tuple(("/usr/bin/python3", f"/c{at}") for at in range(1000))
        snapshot = dataclasses.replace(SNAPSHOT, jobs=(_job(1, executables=many),))
        shown = _series(snapshot, "gpu_job_executable")
        assert len(shown) == MAX_WORDS + 1
        assert sum('executable=""' in line for line in shown) == 1

    def test_a_process_of_many_names(self, tmp_path: Path, clock: ManualClock) -> None:
        """A process that calls itself something else every moment costs no memory each time."""
        for name, content in {
            "sys/kernel/random/boot_id": "01234567-89ab-cdef-0123-456789abcdef\n",
            "stat": "btime 1700000000\n",
            "self/ns/pid": "",
            "self/ns/mnt": "",
            "500/ns/mnt": "",
            "500/status": "Name:\tx\nUid:\t40001\t40001\t40001\t40001\n",
            "500/cgroup": "0::/user.slice/session-1.scope\n",
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        (tmp_path / "500/exe").symlink_to("/bin/sh")
        gpu = Gpu(0, "GPU-1", "x", processes=(GpuProcess(500, ProcessKind.COMPUTE, GIB),))
        devices = DeviceSnapshot(clock.wall(), "550", simulated=True, gpus=(gpu,))
        attribution = Attribution(tmp_path / "jobs", clock=clock, proc=tmp_path)
        for at in range(30):
            rest = f"S 1 500 500 0 -1 0 0 0 0 0 {at} 4 5 6 20 0 1 0 77 0 9"
            (tmp_path / "500/stat").write_text(f"500 (name-{at}) {rest}\n")
            attribution.observe(devices)
        kept = attribution._facts
        attribution.close()
        assert len(kept) == 1

    def test_all_limits_are_counted(self) -> None:
        """Each limit has its counter from the start."""
        assert {"job_limit", "process_limit", "run_limit", "series_limit", "job_file_waits"} <= set(
            collector.DROP_REASONS
        )


class TestFiles:
    """Files without end."""

    @pytest.mark.parametrize("user", [1000, 0])
    def test_an_allowance(self, user: int) -> None:
        """One user's files end at his share; all users' together at theirs."""
        allowance = Allowance()
        assert sum(allowance.takes(user, 1) for _ in range(10_000)) == FILES_OF_USER
        assert allowance.takes(user + 1, BYTES_OF_USER)
        assert not allowance.takes(user + 1, 1)
        others = sum(allowance.takes(2000 + at % 100, 1) for at in range(10_000))
        assert others == FILES - FILES_OF_USER - 1
        fresh = Allowance()
        taken = sum(fresh.takes(at, BYTES_OF_USER) for at in range(100))
        assert taken == BYTES // BYTES_OF_USER

    def test_ten_thousand_job_files(
        self, jobs: Path, children: Children, clock: ManualClock
    ) -> None:
        """A user's ten thousand files are read in turn, and another user's at once."""
        child = children.start()
        description = describe(child.pid)
        for at in range(MAX_ENTRIES - 2):
            path = description_path(jobs, f"run-{at}")
            path.write_bytes(dataclasses.replace(description, run_id=f"run-{at}").encode())
        mine = children.start()
        honest = description_path(jobs, "zz-honest")
        honest.write_bytes(describe(mine.pid, "zz-honest").encode())
        for path in (jobs / "jobs").iterdir():
            if path != honest:
                os.chown(path, 65534, -1)
        attribution = Attribution(jobs, launchers=own_launchers(), clock=clock)
        first = attribution.observe(None)
        assert [run.description.run_id for job in first.jobs for run in job.runs] == ["zz-honest"]
        assert first.dropped["job_file_waits"] == MAX_ENTRIES - 2 - FILES_OF_USER
        waiting = [attribution.observe(None).dropped.get("job_file_waits", 0) for _ in range(40)]
        attribution.close()
        assert waiting[0] == first.dropped["job_file_waits"] - FILES_OF_USER
        assert waiting[-1] == 0

    def test_a_crowd_of_files_hides_no_run_that_was_seen_alive(
        self, jobs: Path, children: Children, clock: ManualClock
    ) -> None:
        """Nor what its trainer says from then on; that it ends is seen too, and counted once."""
        names = [f"run-{number}" for number in range(4)]
        own = {name: children.start() for name in names}

        def say(sequence: int) -> None:
            for name in names:
                status = RunStatus(name, sequence, phase="scan", phase_since=1.0, heartbeat=1.0)
                status_path(jobs, name).write_bytes(status.encode())

        def seen() -> dict[str, int]:
            observed = attribution.observe(None)
            runs = [run for job in observed.jobs for run in job.runs]
            crowded.append(observed.dropped.get("job_file_entries", 0))
            return {run.status.run_id: run.status.sequence for run in runs if run.status}

        for name, child in own.items():
            description_path(jobs, name).write_bytes(describe(child.pid, name).encode())
        say(1)
        crowded: list[int] = []
        attribution = Attribution(jobs, launchers=own_launchers(), clock=clock)
        assert seen() == dict.fromkeys(names, 1)
        for number in range(3 * MAX_ENTRIES):
            os.close(os.open(jobs / "jobs" / f"{number}.junk", os.O_CREAT | os.O_WRONLY))
        say(2)
        assert seen() == dict.fromkeys(names, 2)
        for name in names:
            description_path(jobs, name).unlink()
            status_path(jobs, name).unlink()
        assert seen() == {}
        attribution.close()
        assert crowded == [0, 1, 1]


def _lines(pages: dict[str, str]) -> list[str]:
    return pages["gpu_process_memory_bytes"].splitlines()
