"""What the trainer's tests share: a clock, a tiny model and data set, and real trainings."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from demo.datasets import TINY_MODEL, make_detection_dataset

from gpuwarden import job_files
from gpuwarden.trainer.states import Manifest

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator

    from tests.trainer.trainings import Trainings

REPOSITORY = Path(__file__).resolve().parents[2]

END_TO_END_MODEL = f"end2end: True\nreg_max: 1\n{TINY_MODEL}"
"""With a loss whose weights move at each epoch's end, as YOLO26's do."""


class FakeClock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def wall(self) -> float:
        """Unix time in seconds."""
        return 1_700_000_000.0 + self.now

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still."""
    return FakeClock()


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A node's folder for job files, as its exporter and agent make it."""
    root = tmp_path / "node"
    (root / "jobs").mkdir(parents=True)
    (root / "requests").mkdir()
    return root


@pytest.fixture(scope="session", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ultralytics reads this when imported: no look-ups, and settings of our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLO_OFFLINE", "1")
        patch.setenv("YOLO_AUTOINSTALL", "0")
        patch.setenv("YOLO_CONFIG_DIR", str(tmp_path_factory.mktemp("ultralytics")))
        patch.delenv("GPUWARDEN_RUN_ID", raising=False)
        yield


@dataclass
class Material:
    """A model and a data set to train on, and the words of a short training."""

    model: Path
    data: Path

    def words(self, **others: Any) -> dict[str, Any]:
        """3 epochs of 6 batches of 8."""
        return {
            "data": str(self.data),
            "epochs": 3,
            "batch": 8,
            "imgsz": 64,
            "plots": False,
            "workers": 0,
            "verbose": False,
            "optimizer": "AdamW",
            **others,
        }


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """The model and data set of all trainings."""
    folder = tmp_path_factory.mktemp("material")
    model = folder / "tiny.yaml"
    model.write_text(TINY_MODEL, "utf-8")
    return Material(model, make_detection_dataset(folder / "data", images=48))


@pytest.fixture
def trainings(material: Material, tmp_path: Path, jobs: Path) -> Trainings:
    """Trainings into the test's own project."""
    from tests.trainer.trainings import Trainings  # noqa: PLC0415 -- after its environment is set

    return Trainings(material, tmp_path, jobs)


def draft(step: int = 1) -> Manifest:
    """A manifest before its state is written."""
    return Manifest(
        lineage="",
        epoch=0,
        batch=step,
        step=step,
        batches=10,
        epochs=3,
        batch_size=8,
        dataset="d",
        order="o",
        exact=True,
        reason="test",
        time=0.0,
    )


def copy_by_pickle(value: Any) -> Any:
    """What a spawned process would get."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301 -- our own object


def wait_for(what: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """What the callable gives once it is true.

    Raises:
        AssertionError: it never was.
    """
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, "what the test waits for never came"
        time.sleep(0.02)
    return value


def published(jobs: Path, run_id: str) -> bytes | None:
    """Content of a run's status file."""
    try:
        return job_files.read(job_files.status_path(jobs, run_id)).content
    except FileNotFoundError:
        return None


@dataclass
class Command:
    """`gpuwarden train` as a process of its own, in a group of its own."""

    process: subprocess.Popen[str]
    run_id: str
    jobs: Path
    former: bytes | None
    statuses: list[job_files.RunStatus] = field(default_factory=list)

    def status(self) -> job_files.RunStatus | None:
        """This attempt's published status; it must decode at any moment, and is kept."""
        content = published(self.jobs, self.run_id)
        if content is None or content == self.former:
            return None
        status = job_files.RunStatus.decode(content)
        if not self.statuses or self.statuses[-1] != status:
            self.statuses.append(status)
        return status

    def wait_for_step(self, step: int) -> job_files.RunStatus:
        """The first status seen with so many steps behind it."""

        def reached() -> job_files.RunStatus | None:
            assert self.process.poll() is None, self.process.communicate()
            status = self.status()
            return status if status is not None and status.step >= step else None

        status: job_files.RunStatus = wait_for(reached)
        return status

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the training, or to it and its loader workers."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, out, err


@pytest.fixture
def command(material: Material, jobs: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `gpuwarden train` with a run id, options and words."""
    started: list[Command] = []

    def start(
        run_id: str,
        *options: str,
        environment: dict[str, str] | None = None,
        **words: Any,
    ) -> Command:
        chosen = {
            "model": material.model,
            **material.words(project=tmp_path / "runs", name=run_id),
            **words,
        }
        former = published(jobs, run_id)
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpuwarden",
                "train",
                f"--jobs-directory={jobs}",
                *(("--run-id", run_id) if "--resume" not in options else ()),
                *options,
                *(f"{name}={value}" for name, value in chosen.items()),
            ],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(Command(process, run_id, jobs, former))
        return started[-1]

    yield start
    for item in started:
        if item.process.poll() is None:
            item.process.kill()
        item.process.communicate()
