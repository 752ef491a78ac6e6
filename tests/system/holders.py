"""A job that holds a card and does nothing: `holders.py WAY RECORD RUN_ID`, run as a script.

WAY says how it goes: `notice` leaves when it is asked to (by its platform's signal, or by a
request to its run), `term` on SIGTERM, `stays` on nothing but SIGKILL. What happens to it stands in
the file RECORD, one line each: what, and the time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from gpuwarden import job_files

LOOK_SECONDS = 0.2
SAVE_SECONDS = 0.3


class Holder:
    """One job."""

    def __init__(self, record: Path, run_id: str) -> None:
        self._record = record
        self._run_id = run_id

    def note(self, what: str) -> None:
        """Write down what happens, at once."""
        with self._record.open("a") as out:
            out.write(f"{what} {time.time():.3f}\n")

    def leave(self, why: str) -> None:
        """Save, and go; as a trainer does that must not come back by itself."""
        self.note(f"asked by {why}")
        time.sleep(SAVE_SECONDS)
        self.note("saved")
        os._exit(job_files.EXIT_HOLD)

    def describe(self) -> None:
        """Say which run this is, so that it can be asked to leave."""
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        description = job_files.RunDescription(
            run_id=self._run_id,
            pid=os.getpid(),
            pid_ns=Path("/proc/self/ns/pid").stat().st_ino,
            start_ticks=int(fields[19]),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            model="yolov8m",
            batch=64,
            imgsz=640,
            amp=True,
            epochs=100,
        )
        status = job_files.RunStatus(
            self._run_id, 1, phase="train", phase_since=time.time(), heartbeat=time.time()
        )
        root = job_files.directory()
        job_files.write(job_files.description_path(root, self._run_id), description.encode())
        job_files.write(job_files.status_path(root, self._run_id), status.encode())

    def requested(self) -> bool:
        """Whether the run was asked to leave."""
        return job_files.request_path(job_files.directory(), self._run_id).exists()


def main(way: str, record: Path, run_id: str) -> None:
    """Hold the card until it is time to go."""
    holder = Holder(record, run_id)
    if way == "term":
        signal.signal(signal.SIGTERM, lambda *_: holder.leave("SIGTERM"))
    else:
        signal.signal(signal.SIGTERM, lambda *_: holder.note("deaf to SIGTERM"))
    if way == "notice":
        signal.signal(signal.SIGUSR1, lambda *_: holder.leave("SIGUSR1"))
        if run_id:
            holder.describe()
    holder.note(f"start {os.getpid()}")
    while True:
        time.sleep(LOOK_SECONDS)
        if way == "notice" and run_id and holder.requested():
            holder.leave("request")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
