"""A host that can start nothing for a while, and processes that are not what they look like."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.local.boxes import LabBox
from tests.servers import until

from gpuwarden.scheduling.local.processes import PROC, ProcessId, ProcessTable
from gpuwarden.scheduling.local.starts import UNFIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST_THREAD_ENDS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabBox]:
    """A box of one card."""
    found = LabBox(tmp_path, cards=1)
    yield found
    found.close()


def codes(lab: LabBox) -> set[str]:
    """Of the problems that stand."""
    return {each.code for each in lab.driver.problems()}


@contextlib.contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal meanwhile."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_host_without_room_for_a_process_keeps_its_queue(
    lab: LabBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spur #520: whatever is wrong with the host is no fault of the jobs, and is tried slowly."""
    first, second = lab.submit("a", "done"), lab.submit("b", "done")
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nonexistent")
        for _ in range(5):
            lab.tick(1.0)
        assert [lab.state_of(each) for each in (first, second)] == ["pending", "pending"]
        assert "launches" in codes(lab)
    assert len(lab.driver.usage(0.0, 4e9)) <= 1, "one try a minute"
    lab.tick(1.0)
    assert lab.state_of(first) == "pending"
    lab.tick(UNFIT_SECONDS)
    lab.until(lambda: lab.state_of(second) == "done")
    assert lab.state_of(first) == "done"
    assert "launches" not in codes(lab)


def test_a_launch_of_which_nothing_is_known_is_settled_without_a_restart(lab: LabBox) -> None:
    """The state's folder is away while a job starts: later it starts once, and is followed."""
    entry = lab.submit("a", "done")
    folder = lab.state / "attempts"
    folder.rename(lab.state / "elsewhere")
    for _ in range(3):
        lab.tick(1.0)
    assert "launches" in codes(lab)
    assert not (lab.work / f"a-{entry}.log").exists()
    (lab.state / "elsewhere").rename(folder)
    lab.tick(1.0)
    lab.tick(UNFIT_SECONDS)
    lab.until(lambda: lab.state_of(entry) == "done")
    assert lab.log("a", entry).count("cards") == 1


def test_a_job_whose_files_hang_keeps_nobody_waiting(lab: LabBox) -> None:
    """Like a share that does not answer: the daemon goes on, and so does the job in the end."""
    program = lab.program()
    with program.open("rb") as file, ignored(signal.SIGIO):
        # Whoever opens the program, to run it too, waits until this is given back.
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        entry = lab.submit("a", "done")
        lab.tick()
        assert lab.state_of(entry) == "running"
        waits = (PROC / str(lab.pid(entry).pid) / "cmdline").read_bytes()
        assert b"stubs.py" in waits
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    lab.until(lambda: lab.state_of(entry) == "done")


def test_a_program_whose_first_thread_has_ended_still_runs() -> None:
    """MXNet #4242: ps calls it a zombie, and it holds its card."""
    child = subprocess.Popen(
        [sys.executable, "-c", FIRST_THREAD_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdin is not None
    with child:
        child.stdout.readline()
        stat = PROC / str(child.pid) / "stat"
        assert until(lambda: ") Z " in stat.read_text())
        process = ProcessId(child.pid, int(stat.read_text().rpartition(")")[2].split()[19]))
        assert ProcessTable.read().alive(process)
        child.kill()
        assert until(lambda: not ProcessTable.read().alive(process))
