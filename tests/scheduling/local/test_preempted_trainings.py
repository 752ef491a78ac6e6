"""Real trainings on a lab box: one leaves for another, goes on, and ends as if nothing had been."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from demo.datasets import TINY_MODEL, make_detection_dataset
from tests.scheduling.local.boxes import LabBox
from tests.scheduling.local.labs import quick

from gpuwarden import job_files
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[3]
STEPS = ["notified", "acknowledged", "saved", "left", "freed", "started"]


class TrainingBox(LabBox):
    """A box in which jobs are `gpuwarden train` itself, on the CPU."""

    data: Path
    model: Path

    def prepare(self) -> None:
        """Make a model and a data set."""
        self.model = self.folder / "tiny.yaml"
        self.model.write_text(TINY_MODEL, "utf-8")
        self.data = make_detection_dataset(self.folder / "data", images=48)

    def real_program(self) -> Path:
        """`gpuwarden` of these sources, offline."""
        path = self.folder / "real-gpuwarden"
        settings = {
            "YOLO_OFFLINE": "1",
            "YOLO_AUTOINSTALL": "0",
            "YOLO_CONFIG_DIR": str(self.folder / "ultralytics"),
            "PYTHONPATH": str(REPOSITORY / "src"),
            "OMP_NUM_THREADS": "1",
        }
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        python = Path(sys.executable)
        path.write_text(f'#!/bin/sh\nexec env {words} {python} -m gpuwarden "$@"\n', "utf-8")
        path.chmod(0o755)
        return path

    def words(self, name: str, epochs: int) -> tuple[str, ...]:
        """Of a training of six batches an epoch."""
        return (
            f"model={self.model}",
            f"data={self.data}",
            f"project={self.folder / 'runs'}",
            f"name={name}",
            f"epochs={epochs}",
            "batch=8",
            "imgsz=64",
            "plots=False",
            "workers=0",
            "verbose=False",
            "optimizer=AdamW",
        )

    def train(self, name: str, priority: str, *, epochs: int, **others: Any) -> str:
        """Submit a training."""
        task = Task(
            name=name,
            run_id=name,
            user="ana",
            team="vision",
            priority=priority,
            gpus=1,
            words=self.words(name, epochs),
            directory=str(self.work),
            program=str(self.real_program()),
            **others,
        )
        return self.driver.submit(task, uid=os.getuid(), gid=os.getgid(), now=self.clock.wall())

    def steps_done(self, run_id: str) -> int:
        """Batches that a run has trained on; 0 before it publishes."""
        try:
            content = job_files.read(job_files.status_path(self.jobs, run_id)).content
        except FileNotFoundError:
            return 0
        return job_files.RunStatus.decode(content).step

    def learnt(self, name: str) -> tuple[bytes, list[str]]:
        """Weights, and results without their times."""
        import torch  # noqa: PLC0415 (seconds)

        folder = self.folder / "runs" / name
        saved = torch.load(folder / "weights" / "last.pt", weights_only=False)
        model = saved["ema"] or saved["model"]
        weights = b"".join(
            value.contiguous().numpy().tobytes() for value in model.state_dict().values()
        )
        rows = [line.split(",") for line in (folder / "results.csv").read_text().splitlines()]
        return weights, [",".join([*row[:1], *row[2:]]) for row in rows]


@pytest.fixture
def trainings(tmp_path: Path) -> Iterator[TrainingBox]:
    """A box of two cards."""
    made = TrainingBox(tmp_path, quick(), cards=2)
    made.prepare()
    yield made
    made.close()


def disturbed(box: TrainingBox, *, epochs: int) -> tuple[str, str, str]:
    """Have one training run alone, and another beside it until a third one wants its card."""
    alone = box.train("alone", "normal", epochs=epochs)
    low = box.train("low", "low", epochs=epochs)
    box.until(lambda: box.steps_done("low") > 2, seconds=90)
    high = box.submit("high", priority="high")
    return alone, low, high


def finished(box: TrainingBox, alone: str, low: str) -> None:
    """Let the third one end, and the others come to theirs; compare what they learnt."""
    box.say("high", "finish")
    box.until(lambda: box.state_of(alone) == box.state_of(low) == "done", seconds=120)
    assert box.entry(low).requeues == 1
    assert box.learnt("low") == box.learnt("alone")
    begun = box.log("low", low)
    assert "resum" in begun.lower()


@pytest.mark.training
@pytest.mark.timeout(240)
def test_a_training_leaves_for_another_and_ends_bit_identical(trainings: TrainingBox) -> None:
    """Each step is a receipt with its time; nothing is trained twice."""
    alone, low, high = disturbed(trainings, epochs=8)
    trainings.until(lambda: trainings.state_of(high) == "running", seconds=60)
    receipt = trainings.notice(low)
    assert list(receipt.steps) == STEPS
    assert sorted(receipt.steps.values()) == list(receipt.steps.values())
    assert (receipt.outcome, receipt.lost_seconds) == ("done", 0.0)
    assert trainings.steps_done("low") % 6 == 0  # whole epochs
    finished(trainings, alone, low)
