"""A node for tests: real processes, scenarios in a folder, a clock that the test moves."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwarden.exporter import processes
from gpuwarden.exporter.processes import Launchers, Process, boot_id, read_process
from gpuwarden.job_files import RunDescription, RunStatus, description_path, status_path, write

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

DEADLINE_SECONDS = 30.0


def eventually(look: Callable[[], T], *, until: Callable[[T], bool] = bool) -> T:
    """Look until it is as expected; a busy machine gets its time."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        seen = look()
        if until(seen):
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE_SECONDS:g} s; last seen: {seen!r}")
        time.sleep(0.01)


class ManualClock:
    """Time that stands still until a test moves it."""

    def __init__(self, wall: float | None = None) -> None:
        self._wall = time.time() if wall is None else wall
        self._monotonic = 1000.0

    def wall(self) -> float:
        """Unix time."""
        return self._wall

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self._wall += seconds
        self._monotonic += seconds


class Children:
    """Processes that a test starts; all of them are gone when it ends."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str | bytes) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own and wait until it is what it should be."""
        child = subprocess.Popen(
            arguments or ("sleep", "600"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._started.append(child)
        own = process_of(os.getpid()).comm

        def begun() -> bool:
            # The kernel gives it its name first, and its command line a moment later.
            now = process_of(child.pid)
            return now.comm != own and (now.ended or bool(processes.arguments(child.pid)))

        eventually(begun)
        return child

    def script(self, text: str) -> subprocess.Popen[bytes]:
        """Start a shell script; it has begun when it printed a line."""
        child = self.start("sh", "-c", text)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        """End a process and wait for it."""
        child.kill()
        child.wait()

    def close(self) -> None:
        """End what is left."""
        for child in self._started:
            if child.poll() is None:
                # Its session is its own, so that children of scripts go with it.
                os.killpg(child.pid, 9)
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()


def process_of(pid: int) -> Process:
    """A process that is there."""
    found = read_process(pid)
    assert found is not None
    return found


def own_launchers() -> Launchers:
    """The usual launchers and this test's own process, so that each child is a job."""
    return Launchers.with_extra([process_of(os.getpid()).comm])


def describe(pid: int, run_id: str = "run-1", **changes: object) -> RunDescription:
    """A description of a run by a live process."""
    process = process_of(pid)
    values: dict[str, Any] = {
        "run_id": run_id,
        "pid": pid,
        "pid_ns": Path("/proc/self/ns/pid").stat().st_ino,
        "start_ticks": process.start_ticks,
        "boot_id": boot_id(),
        "model": "yolov8n",
        "batch": 16,
        "imgsz": 640,
        "amp": False,
        "epochs": 3,
    }
    return RunDescription(**{**values, **changes})


def declare(
    root: Path, description: RunDescription, status: RunStatus | None = None
) -> RunDescription:
    """Write a run's files as its trainer would."""
    write(description_path(root, description.run_id), description.encode())
    if status is not None:
        write(status_path(root, status.run_id), status.encode())
    return description
