"""Public reports by kind: what a training does where others lose work or say the wrong thing."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.trainer.trainings import BATCHES, Trainings, at_batch

from gpuwarden.trainer import LeftTraining, faults, offline
from gpuwarden.trainer.stalls import StallWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.trainer.conftest import Command


def _trainer() -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(model="yolov8m.yaml", imgsz=640),
        batch_size=64,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("error", "kind", "status", "remedy"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            faults.OutOfMemory,
            76,
            "CUDA out of memory: batch=64 at imgsz=640 .*gpuwarden estimate model=yolov8m.yaml",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            faults.OutOfMemory,
            76,
            "smaller batch=",
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            faults.LoaderWorkerLost,
            1,
            "want of memory",
        ),
        (
            RuntimeError("unable to write to file </torch_7_1_0>: No space left on device (28)"),
            faults.LoaderWorkerLost,
            1,
            "--shm-size",
        ),
        (OSError(28, "No space left on device"), faults.DiskFull, 1, "make room"),
        (
            RuntimeError("[enforce fail at inline_container.cc:595] unexpected pos 1 vs 2"),
            faults.DiskFull,
            1,
            "make room",
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."),
            faults.LoaderWorkerLost,
            1,
            "--shm-size",
        ),
    ],
)
def test_what_a_traceback_does_not_say_is_said(
    error: Exception, kind: type[Exception], status: int, remedy: str
) -> None:
    """Want of memory comes back with every attempt: it is held, not requeued for ever."""
    known = faults.explained(error, _trainer())
    assert isinstance(known, kind)
    assert faults.status_of(error) == status
    with pytest.raises(kind, match=remedy):
        raise known


def test_a_rank_without_memory_ends_the_others_by_its_fault() -> None:
    """Its launcher would take 76 for a rank that left, and wait for the others to save."""
    error = torch.OutOfMemoryError("CUDA out of memory.")
    known = faults.explained(error, _trainer(), alone=False)
    assert isinstance(known, faults.OutOfMemory)
    assert known.exit_code == faults.status_of(error, alone=False) == 1


def test_a_fault_of_the_users_own_speaks_for_itself() -> None:
    """Its traceback is what they need."""
    for error in (RuntimeError("mine"), ZeroDivisionError(), KeyError("out of memory")):
        assert faults.explained(error, _trainer()) is None
        assert faults.status_of(error) == 1


@pytest.mark.training
def test_a_batch_that_does_not_fit_is_held(command: Callable[..., Command]) -> None:
    """The status says so too, and what was saved before stays."""
    training = command("run", "--trainer", "tests.trainer.memoryless:Memoryless")
    code, _out, err = training.end()
    assert code == 76, err
    assert "Traceback" not in err
    assert "use a smaller batch=" in err
    status = training.status()
    assert status is not None
    assert status.exit is not None
    assert status.exit.code == 76


def test_a_loop_that_stands_still_shows_where() -> None:
    """A batch that took 13 hours without an error leaves a stack to look at, once."""
    code = (
        "import sys, time\n"
        "from gpuwarden.trainer.stalls import StallWatch\n"
        "watch = StallWatch(0.2)\n"
        "def stuck_in_storage():\n"
        "    sys.stdin.read()\n"
        "with watch.watching():\n"
        "    watch.beat()\n"
        "    stuck_in_storage()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        seen = ""
        while "stuck_in_storage" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        process.communicate("")
    assert "Timeout (0:00:00.2" in seen


def test_without_a_limit_nothing_is_watched() -> None:
    """A program that attaches gpuwarden may use the interpreter's one watchdog itself."""
    watch = StallWatch(0.0)
    with watch.watching():
        watch.beat()


def test_weights_that_cannot_be_read_do_not_decide_on_mixed_precision() -> None:
    """A download that was once cut short would otherwise end each training on this node."""

    def check(_model: Any) -> bool:
        raise RuntimeError("PytorchStreamReader failed reading zip archive")

    assert offline._check_amp(check, object()) is True
    assert offline._check_amp(lambda _model: False, object()) is False


@pytest.mark.training
@pytest.mark.filterwarnings("ignore")
def test_last_pt_is_the_old_one_or_the_new_one(trainings: Trainings) -> None:
    """A full disk in the middle of it leaves the old checkpoint, which loads."""
    import os  # noqa: PLC0415 -- its fsync is what fails here

    sums: list[bytes] = []

    def spoil(trainer: Any) -> None:
        if trainer.epoch != 1:
            return
        sums.append(trainer.last.read_bytes())

        def full(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space left"):
        trainings.attempt("run", {}, hooks={"on_train_epoch_end": spoil})
    last = trainings.folder / "runs" / "run" / "weights" / "last.pt"
    assert last.read_bytes() == sums[0]
    assert torch.load(last, weights_only=False)["epoch"] == 0


@pytest.mark.training
@pytest.mark.filterwarnings("ignore")
def test_patience_goes_on_counting(trainings: Trainings) -> None:
    """An interruption does not give a training that has stopped learning more epochs."""
    words = {"epochs": 6, "patience": 3}

    def spoil(trainer: Any) -> None:
        trainer.stopper.best_fitness = 1.0  # nothing that this model learns is as good

    undisturbed = trainings.attempt("calm", words, hooks={"on_train_start": spoil})
    with pytest.raises(LeftTraining):
        trainings.attempt("run", words, hooks={"on_train_start": spoil, **at_batch(1, 2)})
    trainer = trainings.attempt("run", words)
    assert (trainer.epoch, trainer.stop) == (undisturbed.epoch, True)
    assert trainer.epoch < 5


@pytest.mark.training
@pytest.mark.filterwarnings("ignore")
def test_a_run_that_stopped_early_is_complete(trainings: Trainings) -> None:
    """Nothing is trained again, and no second folder appears."""
    words = {"epochs": 6, "patience": 1}

    def spoil(trainer: Any) -> None:
        trainer.stopper.best_fitness = 1.0

    trainings.attempt("run", words, hooks={"on_train_start": spoil})
    sequence = trainings.status("run").sequence
    trainings.attempt("run", words)
    assert trainings.status("run").sequence == sequence
    assert [path.name for path in (trainings.folder / "runs").iterdir()] == ["run"]


@pytest.mark.training
@pytest.mark.filterwarnings("ignore")
def test_each_epoch_has_an_order_of_its_own(trainings: Trainings) -> None:
    """Also with loader workers, where ultralytics' own repeats the first (yolov5#6741)."""
    from tests.trainer.many_workers import ManyWorkers  # noqa: PLC0415 -- after its environment

    orders: dict[int, list[str]] = {}

    class Noting(ManyWorkers):
        """Remembers what it was given."""

        def preprocess_batch(self, batch: Any) -> Any:
            orders.setdefault(self.epoch, []).extend(batch["im_file"])
            return super().preprocess_batch(batch)

    trainings.attempt("run", {}, base=Noting)
    assert len(orders) == 3
    assert len(orders[0]) == 8 * BATCHES
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])


@pytest.mark.sweep
@pytest.mark.training
def test_a_second_start_of_a_run_is_told_who_trains_it(
    command: Callable[..., Command], tmp_path: Path
) -> None:
    """Two jobs with one run id must not write the same states; the first does not notice."""
    slow = {"GPUWARDEN_DEMO_LOADER_SECONDS": "0.4"}
    paced = ("--trainer", "demo.paced:PacedTrainer")
    first = command("run", *paced, environment=slow, epochs=100)
    first.wait_for_step(1)
    second = command("run", *paced, "--lock-wait=500ms", epochs=100)
    code, _out, err = second.end()
    assert (code, f"pid {first.process.pid} on " in err) == (1, True), err
    assert str(tmp_path / "runs" / "run") in err
    first.send(signal.SIGTERM)
    assert first.end()[0] == 75
