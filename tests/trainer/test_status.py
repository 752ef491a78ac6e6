from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gpuwarden import job_files
from gpuwarden.job_files import Checkpoint, RequestState, RunDescription, RunStatus
from gpuwarden.trainer.status import StatusBoard, finite_numbers, process_identity

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def board(jobs: Path, clock: Any) -> StatusBoard:
    """The board of a run that has just begun."""
    return StatusBoard(jobs, "run", clock=clock)


def _published(jobs: Path) -> RunStatus:
    return RunStatus.decode(job_files.read(job_files.status_path(jobs, "run")).content)


def test_it_writes_once_a_second(board: StatusBoard, jobs: Path, clock: Any) -> None:
    """However fast the steps are, the node's disk sees one write a second."""
    for _ in range(40):
        board.pulse.steps += 1
        board.beat()
        clock.advance(0.125)
    status = _published(jobs)
    assert status.sequence == 5
    assert status.counters.steps == 33


def test_the_heartbeat_is_the_loops(board: StatusBoard, jobs: Path, clock: Any) -> None:
    """A loop that hangs lets its heartbeat and its phase's seconds stand still."""
    board.enter("train")
    clock.advance(2)
    board.beat()
    before = _published(jobs)
    clock.advance(100)
    assert _published(jobs) == before
    board.beat()
    after = _published(jobs)
    assert after.heartbeat - before.heartbeat == 100
    assert after.counters.phase_seconds["train"] == 102


def test_phases_share_the_time_among_them(board: StatusBoard, jobs: Path, clock: Any) -> None:
    """Saving within training is saving; together the phases are the attempt's whole time."""
    clock.advance(3)
    board.enter("train")
    clock.advance(5)
    with board.during("checkpoint"):
        clock.advance(2)
        assert _published(jobs).phase == "checkpoint"
    clock.advance(1)
    board.enter("done")
    seconds = _published(jobs).counters.phase_seconds
    assert seconds == {"setup": 3, "train": 6, "checkpoint": 2, "done": 0}
    assert board.pulse.saving == 2


def test_throughput_is_that_of_training(board: StatusBoard, jobs: Path, clock: Any) -> None:
    """Images per second of the last ten seconds; validation does not dilute it."""
    board.enter("train")
    for _ in range(30):
        clock.advance(1)
        board.pulse.images += 16
        board.beat()
    assert _published(jobs).throughput == pytest.approx(16)
    with board.during("validate"):
        clock.advance(60)
        board.beat()
        assert _published(jobs).throughput == pytest.approx(16)
    clock.advance(1)
    board.pulse.images += 32
    board.beat()
    assert _published(jobs).throughput == pytest.approx(32)


def test_what_is_not_finite_is_left_out(board: StatusBoard, jobs: Path) -> None:
    """A loss of NaN is counted, not published: the contract knows finite numbers only."""
    board.pulse.nonfinite += 1
    board.figures(losses={"box": float("nan"), "cls": 1.5}, lr={"pg0": 0.01})
    board.beat(force=True)
    status = _published(jobs)
    assert (status.losses, status.lr) == ({"cls": 1.5}, {"pg0": 0.01})
    assert status.counters.nonfinite_losses == 1
    assert len(finite_numbers({f"m{number}": number for number in range(100)})) == 64
    assert finite_numbers({"text": "x", "none": None}) == {}


def test_answers_and_the_end_are_published_at_once(
    board: StatusBoard, jobs: Path, clock: Any
) -> None:
    """The agent waits for them: they do not wait for the second to pass."""
    board.beat()
    board.answered("d1", RequestState.RECEIVED)
    first = {"received": clock.wall()}
    assert _published(jobs).request == job_files.RequestProgress("d1", RequestState.RECEIVED, first)
    board.saved(Checkpoint(clock.wall(), 7, clock.wall(), 100))
    board.finish(75, "SIGTERM " * 100)
    ended = _published(jobs)
    assert ended.exit is not None
    assert (ended.exit.code, len(ended.exit.reason)) == (75, 256)
    assert ended.checkpoint == Checkpoint(clock.wall(), 7, clock.wall(), 100)


def test_a_missing_directory_is_said_once_and_tried_again(
    board: StatusBoard, jobs: Path, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The node's part may come later or never; the training does not depend on it."""
    (jobs / "jobs").rmdir()
    for _ in range(30):
        clock.advance(1)
        board.beat()
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
    (jobs / "jobs").mkdir()
    clock.advance(10)
    board.beat()
    assert _published(jobs).sequence == 31


def _description() -> RunDescription:
    return RunDescription(
        "run", **process_identity(), model="m", batch=1, imgsz=64, amp=False, epochs=1
    )


def test_a_description_that_is_gone_is_written_again(
    board: StatusBoard, jobs: Path, clock: Any
) -> None:
    """Without it the node cannot tell whose status this is, and sees a job that says nothing."""
    path = job_files.description_path(jobs, "run")
    board.describe(_description())
    for _ in range(2):
        path.unlink()
        clock.advance(1)
        board.beat()
        assert RunDescription.decode(job_files.read(path).content) == _description()


def test_a_description_reaches_a_folder_that_comes_late(
    board: StatusBoard, jobs: Path, clock: Any
) -> None:
    """The node's part may be installed or started after the training."""
    (jobs / "jobs").rmdir()
    board.describe(_description())
    (jobs / "jobs").mkdir()
    clock.advance(10)
    board.beat()
    assert job_files.description_path(jobs, "run").exists()


def test_the_end_is_told_even_right_after_a_failed_write(
    board: StatusBoard, jobs: Path, clock: Any
) -> None:
    """There is no later beat that would tell it."""
    (jobs / "jobs").rmdir()
    board.beat()
    (jobs / "jobs").mkdir()
    clock.advance(1)
    board.finish(75, "SIGTERM")
    ended = _published(jobs)
    assert ended.exit is not None
    assert ended.exit.code == 75


def test_a_process_is_identified_as_the_kernel_does() -> None:
    """Pid, namespace, start and boot: a reused pid is another process."""
    identity = process_identity()
    assert identity["pid"] == os.getpid()
    assert RunDescription.decode(_description().encode()) == _description()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = process_identity(child.pid)
        child.communicate(b"\n")
    assert other["start_ticks"] >= identity["start_ticks"]
    assert other["boot_id"] == identity["boot_id"]


def test_any_name_of_a_process_is_understood() -> None:
    """Libraries rename processes; the kernel cuts names at 15 bytes, within a character too."""
    code = (
        "import ctypes\n"
        "ctypes.CDLL(None).prctl(15, b') 1 \\xe8\\xae')\n"
        "from gpuwarden.trainer.status import process_identity\n"
        "print(process_identity())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "'start_ticks'" in ran.stdout, ran.stderr


def test_what_follows_a_validation_is_not_a_standstill(
    board: StatusBoard, jobs: Path, clock: Any
) -> None:
    """Writing results may take seconds; a trainer that hangs is at 0 once the window is over."""
    board.enter("train")
    board.pulse.images += 16
    clock.advance(1)
    with board.during("validate"):
        clock.advance(5)
    clock.advance(5)
    board.beat()
    assert _published(jobs).throughput == pytest.approx(16)
    clock.advance(5)
    board.beat()
    assert _published(jobs).throughput == 0


def test_each_state_of_a_request_keeps_its_first_time_and_another_request_begins_anew(
    board: StatusBoard, jobs: Path, clock: Any
) -> None:
    """A receipt is when it came so far, however often that is said."""
    begun = clock.wall()
    for state in (RequestState.RECEIVED, RequestState.SAVING, RequestState.SAVING):
        board.answered("d1", state)
        clock.now += 1.0
    told = _published(jobs).request
    assert told is not None
    assert told.times == {"received": begun, "saving": begun + 1.0}
    board.answered("d2", RequestState.RECEIVED)
    told = _published(jobs).request
    assert told is not None
    assert told.times == {"received": begun + 3.0}
