"""A job that holds a card, does nothing, and lies about it: `liars.py TRICK RUN_ID FOLDER`.

It is run as a script. Its CPU time stays far below what counts as activity.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from gpuwarden import job_files

BEAT_SECONDS = 0.5
FUTURE_SECONDS = 3600.0
QUIET_SECONDS, LOUD_SECONDS = 27.0, 6.0
"""Of who speaks up before each deadline of the rules in `test_attacks.ENFORCED`."""
STEP_SECONDS = 1.0


def _described(run_id: str, log: Path) -> job_files.RunDescription:
    """What a trainer would say of this very process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return job_files.RunDescription(
        run_id=run_id,
        pid=os.getpid(),
        pid_ns=Path("/proc/self/ns/pid").stat().st_ino,
        start_ticks=int(fields[19]),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        model="yolov8m",
        batch=64,
        imgsz=640,
        amp=True,
        epochs=100,
        log=str(log),
    )


def _steps() -> None:
    """Work on the CPU for a moment, again and again, and say nothing."""
    while True:
        time.sleep(QUIET_SECONDS)
        until = time.monotonic() + STEP_SECONDS
        while time.monotonic() < until:
            pass


def main(trick: str, run_id: str, folder: Path) -> None:
    """Play one trick for ever."""
    if trick == "idle":
        while True:
            time.sleep(60)
    if trick == "last-step":
        _steps()
    jobs, log = job_files.directory(), folder / f"{run_id}.log"
    log.write_text("training\n")
    description = _described(run_id, log)
    job_files.write(job_files.description_path(jobs, run_id), description.encode())
    begin, sequence, first = time.time(), 0, True
    while True:
        now, sequence = time.time(), sequence + 1
        ahead = FUTURE_SECONDS if trick == "future-times" else 0.0
        loud = (now - begin) % (QUIET_SECONDS + LOUD_SECONDS) > QUIET_SECONDS
        speaks = trick == "last-words" and loud
        alive = speaks or trick in ("fake-heartbeat", "future-times")
        status = job_files.RunStatus(
            run_id,
            sequence,
            phase="validate" if speaks or trick in ("frozen-phase", "future-times") else "train",
            phase_since=begin + ahead,
            heartbeat=now + ahead if alive else begin,
        )
        if first or alive or trick == "last-words":
            job_files.write(job_files.status_path(jobs, run_id), status.encode())
        if speaks or trick == "touch-log":
            log.touch()
        if trick == "future-times":
            os.utime(log, (now + ahead, now + ahead))
        first = False
        time.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
