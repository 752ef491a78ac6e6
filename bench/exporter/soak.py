"""Take snapshots by the hundred thousand: `python -m bench.exporter.soak`.

What an exporter keeps of processes, jobs and runs must go with them. Each snapshot is the real one
(simulated driver, /proc, job files, page) of a node on which jobs are replaced all the time; memory
and open files are read as it goes, and must not grow past the warm-up. Exits with 1 where they do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.nvml import open_gpus
from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.processes import Launchers, boot_id, read_process
from gpuwarden.exporter.runs import prepare
from gpuwarden.exporter.sampler import Sampler
from gpuwarden.exporter.scenarios import Card, Scenario, SimulatedProcess
from gpuwarden.exporter.settings import ExporterSettings
from gpuwarden.job_files import RunDescription, description_path, write

MIB = 1024 * 1024
CARDS = 4
JOBS = 8
CHURN_SNAPSHOTS = 10
"""After so many snapshots the oldest job is replaced by a new one."""
WARM_UP_SHARE = 0.2
ALLOWED_BYTES = 4 * MIB


class Churn:
    """Jobs of one process each, of which the oldest is replaced now and then."""

    def __init__(self, scenario: Path, jobs: Path) -> None:
        """Begin with all jobs running.

        Args:
            scenario: the driver's file.
            jobs: the folder of the job files.
        """
        self._scenario = scenario
        self._jobs = jobs
        self._running: list[subprocess.Popen[bytes]] = []
        self.started = 0
        for _ in range(JOBS):
            self._start()
        self._write()

    def replace(self) -> None:
        """End the oldest job and start another."""
        self._end(self._running.pop(0))
        self._start()
        self._write()

    def close(self) -> None:
        """End all jobs."""
        for job in self._running:
            self._end(job)

    def _start(self) -> None:
        job = subprocess.Popen(["/bin/sleep", "86400"], start_new_session=True)
        self._running.append(job)
        self.started += 1
        process = read_process(job.pid)
        if process is None:
            raise RuntimeError("a process ended by itself")
        description = RunDescription(
            run_id=f"run-{self.started}",
            pid=job.pid,
            pid_ns=Path("/proc/self/ns/pid").stat().st_ino,
            start_ticks=process.start_ticks,
            boot_id=boot_id(),
            model="yolov8n",
            batch=16,
            imgsz=640,
            amp=False,
            epochs=3,
        )
        write(description_path(self._jobs, description.run_id), description.encode())

    def _end(self, job: subprocess.Popen[bytes]) -> None:
        job.kill()
        job.wait()
        # What a trainer that ends in order does; the others' files are reaped after ten minutes.
        for path in (self._jobs / "jobs").iterdir():
            if f'"pid":{job.pid},' in path.read_text().replace(" ", ""):
                path.unlink()

    def _write(self) -> None:
        Scenario(
            cards=[Card(index) for index in range(CARDS)],
            processes=[
                SimulatedProcess(number % CARDS, job.pid, memory=MIB, sm=10)
                for number, job in enumerate(self._running)
            ],
        ).write(self._scenario)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def main() -> int:
    """Run the soak test; 0 if nothing grew."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.exporter.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--snapshots", type=int, default=100_000, metavar="N")
    parser.add_argument(
        "--for",
        dest="seconds",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="end after this time, however many snapshots there have been",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return _run(Path(folder), arguments.snapshots, arguments.seconds)


def _run(folder: Path, snapshots: int, seconds: float) -> int:
    scenario, jobs = folder / "scenario", folder / "jobs"
    prepare(jobs)
    churn = Churn(scenario, jobs)
    comm = Path("/proc/self/comm").read_text().strip()
    sampler = Sampler(
        ExporterSettings(jobs_directory=jobs),
        open_gpus(f"simulated:{scenario}"),
        Attribution(jobs, launchers=Launchers.with_extra([comm])),
    )
    began = time.monotonic()
    seen: list[tuple[float, int, int]] = []
    taken = 0
    try:
        while taken < snapshots and time.monotonic() - began < seconds:
            page = sampler.sample()
            page.body.get_encoded(Format.OPENMETRICS, compressed=True)
            taken += 1
            if taken % CHURN_SNAPSHOTS == 0:
                churn.replace()
            if taken % 500 == 0:
                seen.append((taken, _resident(), _open_files()))
            if taken % 5000 == 0:
                _, resident, files = seen[-1]
                print(
                    f"{taken} snapshots: {resident / MIB:.1f} MiB, {files} open files", flush=True
                )
    finally:
        sampler.stop()
        churn.close()
    return _verdict(seen, taken, churn.started)


def _verdict(seen: list[tuple[float, int, int]], taken: int, started: int) -> int:
    settled = [item for item in seen if item[0] >= taken * WARM_UP_SHARE]
    if len(settled) < 2:
        print(f"{taken} snapshots are too few to judge")
        return 1
    (_, first, first_files), (_, last, last_files) = settled[0], settled[-1]
    print(
        f"{taken} snapshots, {started} processes: "
        f"memory {first / MIB:.1f} -> {last / MIB:.1f} MiB, "
        f"open files {first_files} -> {last_files}"
    )
    return int(last - first > ALLOWED_BYTES or last_files > first_files)


if __name__ == "__main__":
    sys.exit(main())
