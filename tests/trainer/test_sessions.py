"""Attempts that meet others at the same run, before anything is trained."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.trainer.conftest import wait_for

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.job_files import LeaveRequest
from gpuwarden.trainer.leaving import LeaveWatch
from gpuwarden.trainer.runs import RunIsLocked, RunRecord
from gpuwarden.trainer.sessions import Session
from gpuwarden.trainer.settings import TrainSettings
from gpuwarden.trainer.states import FOLDER
from gpuwarden.trainer.status import process_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.trainer.conftest import Material

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

_HOLDER = """\
import sys
from pathlib import Path
from gpuwarden.trainer.runs import RunLock, RunRecord
folder = Path(sys.argv[1])
lock = RunLock(folder)
lock.acquire()
print("locked", flush=True)
if input() == "finish":
    RunRecord("run", "theirs", {}, 1.0, finished=2.0).write(folder)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has locked the folder but not yet said whose it is."""
    folder = tmp_path / "runs" / "run" / FOLDER
    folder.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


@pytest.fixture
def run(
    material: Material, jobs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Attempts the run; what is to happen while it waits for its lock happens then, if anything."""
    from ultralytics import YOLO  # noqa: PLC0415 -- after its environment is set

    watch = LeaveWatch()
    watch.install()
    caplog.set_level("INFO", "gpuwarden")

    def attempt(meanwhile: Callable[[], None] | None = None) -> tuple[int, str]:
        def act() -> None:
            if meanwhile is not None:
                wait_for(lambda: "waiting up to" in caplog.text)
                meanwhile()

        thread = threading.Thread(target=act)
        thread.start()
        try:
            model = YOLO(str(material.model))
            settings = TrainSettings(run_id="run", jobs_directory=jobs)
            words: dict[str, Any] = material.words(
                project=str(tmp_path / "runs"), name="run", exist_ok=True
            )
            return Session(settings, watch=watch).run(model, words, train=model.train)
        finally:
            thread.join()

    yield attempt
    watch.restore()


def test_a_signal_ends_the_wait_for_the_former_attempt(
    other: subprocess.Popen[str], run: Callable[..., tuple[int, str]], jobs: Path
) -> None:
    """It leaves at once, and `hold` holds although nothing was trained."""

    def leave() -> None:
        request = LeaveRequest("d1", leave_by=4e9, then="hold")
        job_files.write(job_files.request_path(jobs, "run"), request.encode())
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(leave) == (76, "SIGTERM")
    assert other.poll() is None


def test_a_run_begun_meanwhile_is_not_superseded(
    other: subprocess.Popen[str], run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """Of two attempts started at once the later one finds the work of the earlier."""

    def finish() -> None:
        other.communicate("finish\n")

    with pytest.raises(InvalidInput, match="was started with other words"):
        run(finish)
    record = RunRecord.read(tmp_path / "runs" / "run" / FOLDER)
    assert record is not None
    assert record.lineage == "theirs"


@pytest.mark.parametrize("lives", [True, False])
def test_a_name_that_is_being_trained_elsewhere_is_refused(
    run: Callable[..., tuple[int, str]], jobs: Path, tmp_path: Path, *, lives: bool
) -> None:
    """Two trainings in two folders would write one status; one that is over, or gone, does not."""
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        identity: dict[str, Any] = process_identity(process.pid)
        description = job_files.RunDescription(
            run_id="run",
            **identity,
            model="m",
            batch=1,
            imgsz=64,
            amp=False,
            epochs=1,
            world_size=1,
            checkpoints=str(tmp_path / "elsewhere"),
        )
        job_files.write(job_files.description_path(jobs, "run"), description.encode())
        running = job_files.RunStatus("run", 1, "train", phase_since=1.0, heartbeat=1.0)
        over = dataclasses.replace(running, exit=job_files.RunExit(0, "complete", 2.0))
        path = job_files.status_path(jobs, "run")
        job_files.write(path, running.encode())
        with pytest.raises(RunIsLocked, match=rf"process {process.pid} into .*elsewhere"):
            run()
        assert not (tmp_path / "runs").exists()
        if lives:  # as a notebook's kernel does
            job_files.write(path, over.encode())
        else:
            process.communicate()
        assert run() == (0, "complete")


def test_slow_batches_leave_earlier_before_a_deadline(
    material: Material, jobs: Path, tmp_path: Path, clock: Any
) -> None:
    """The step that would end after it is not begun: what it would cost is known by the last."""
    from ultralytics import YOLO  # noqa: PLC0415 -- after its environment is set

    def slow(trainer: Any) -> None:
        clock.advance(10.0)
        if trainer.gpuwarden_step() == 1:
            request = LeaveRequest("d1", leave_by=clock.wall() + 11.0, at="epoch")
            job_files.write(job_files.request_path(jobs, "run"), request.encode())
            trainer.gpuwarden_session.watch.reread()

    model = YOLO(str(material.model))
    model.add_callback("on_train_batch_end", slow)
    watch = LeaveWatch(clock)
    session = Session(TrainSettings(run_id="run", jobs_directory=jobs), watch=watch, clock=clock)
    words: dict[str, Any] = material.words(project=str(tmp_path / "runs"), name="run")
    assert session.run(model, words, train=model.train)[0] == job_files.EXIT_REQUEUE
    assert session.saver.newest is not None
    assert session.saver.newest.batch == 2
