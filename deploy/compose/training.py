#!/opt/gpuwarden/bin/python
"""A training to try compose.yaml's scheduler with, since its image has no torch.

In the place of `gpuwarden`: `training.py train --run-id NAME epochs=5 ...`. Nothing is learned and
no card is used; what the scheduler sees is what a trainer shows: a run with its epochs, that saves
and leaves when it is asked to, and goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from gpuwarden import job_files
from gpuwarden.job_files import (
    EXIT_DONE,
    EXIT_HOLD,
    EXIT_REQUEUE,
    Checkpoint,
    LeaveRequest,
    NoticeSeen,
    RequestProgress,
    RequestState,
    RunDescription,
    RunExit,
    RunStatus,
)

STEPS = 10
"""In an epoch, a second each."""


class Training:
    """A run, in the folder in which it was started.

    Args:
        run_id: by which it goes on.
        words: KEY=VALUE, as for `yolo train`.
    """

    def __init__(self, run_id: str, words: dict[str, str]) -> None:
        self._run_id = run_id
        self._epochs = int(words.get("epochs", "5"))
        self._words = words
        self._state = Path(f"{run_id}.step")
        self._root = job_files.directory()
        self._began = time.time()
        self._sequence = 0
        self._step = int(self._state.read_text()) if self._state.exists() else 0
        self._saved: Checkpoint | None = None
        self._notice: NoticeSeen | None = None
        self._request: LeaveRequest | None = None
        self._times: dict[str, float] = {}
        self._signalled = threading.Event()

    def run(self) -> int:
        """Train to the end, or until it is to leave; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: self._signalled.set())
        self._describe()
        self._write("train")
        while self._step < self._epochs * STEPS:
            self._signalled.wait(1)
            self._step += 1
            self._look()
            sys.stdout.write(f"step {self._step} of {self._epochs * STEPS}\n")
            sys.stdout.flush()
            at_end = self._step % STEPS == 0
            leaving = self._notice is not None and (at_end or self._notice.at == "step")
            if at_end or leaving:
                self._save()
            if leaving:
                hold = self._request is not None and self._request.then == "hold"
                return self._leave(EXIT_HOLD if hold else EXIT_REQUEUE)
            self._write("train")
        return self._leave(EXIT_DONE)

    def _describe(self) -> None:
        ticks = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19]
        description = RunDescription(
            run_id=self._run_id,
            pid=os.getpid(),
            pid_ns=Path("/proc/self/ns/pid").stat().st_ino,
            start_ticks=int(ticks),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            model=Path(self._words.get("model", "yolov8n")).stem,
            batch=int(self._words.get("batch", "16")),
            imgsz=int(self._words.get("imgsz", "640")),
            amp=True,
            epochs=self._epochs,
            steps_per_epoch=STEPS,
        )
        job_files.write(job_files.description_path(self._root, self._run_id), description.encode())

    def _look(self) -> None:
        """Whether it is to leave: by a signal at once, by a request where that says."""
        if self._signalled.is_set() and (self._notice is None or self._notice.at == "epoch"):
            self._notice = NoticeSeen("a signal", "step", time.time())
        if self._request is not None:
            return
        with contextlib.suppress(FileNotFoundError, job_files.JobFileError):
            path = job_files.request_path(self._root, self._run_id)
            request = LeaveRequest.decode(job_files.read(path).content)
            if request.leave_by > self._began and request.then != "continue":
                self._request = request
                self._notice = NoticeSeen(request.reason[:256], request.at, time.time())
                self._times["received"] = time.time()

    def _save(self) -> None:
        self._times.setdefault("saving", time.time())
        part = self._state.with_suffix(".part")
        part.write_text(str(self._step))
        part.replace(self._state)
        now = time.time()
        self._saved = Checkpoint(now, self._step, now, self._state.stat().st_size)

    def _leave(self, code: int) -> int:
        self._times["leaving"] = time.time()
        reason = "done" if code == EXIT_DONE else "asked to leave"
        self._write("checkpoint", RunExit(code, reason, time.time()))
        return code

    def _write(self, phase: str, ended: RunExit | None = None) -> None:
        self._sequence += 1
        progress = None
        if self._request is not None:
            state = RequestState.RECEIVED if ended is None else RequestState.LEAVING
            progress = RequestProgress(self._request.decision_id, state, dict(self._times))
        status = RunStatus(
            run_id=self._run_id,
            sequence=self._sequence,
            phase=phase,
            phase_since=self._began,
            heartbeat=time.time(),
            epoch=self._step // STEPS,
            step=self._step,
            checkpoint=self._saved,
            request=progress,
            notice=self._notice,
            exit=ended,
        )
        job_files.write(job_files.status_path(self._root, self._run_id), status.encode())


def main() -> int:
    """Read the words that `gpuwarden submit` writes, and train."""
    given = sys.argv[1:]
    run_id = given[given.index("--run-id") + 1]
    words = dict(word.split("=", 1) for word in given if "=" in word and not word.startswith("-"))
    return Training(run_id, words).run()


if __name__ == "__main__":
    sys.exit(main())
