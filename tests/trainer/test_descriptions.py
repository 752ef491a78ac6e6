"""What a training says of itself once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from gpuwarden import job_files
from gpuwarden.trainer import descriptions
from gpuwarden.trainer.status import StatusBoard

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.conftest import FakeClock


def described(root: Path, clock: FakeClock, model: str, built: Any) -> str:
    """What a training of these weights calls its model."""
    args = SimpleNamespace(model=model, imgsz=640, amp=True, project=None)
    trainer = SimpleNamespace(
        args=args, batch_size=8, epochs=3, model=built, device=SimpleNamespace(type="cpu")
    )
    descriptions.publish(
        trainer,
        StatusBoard(root, "run", clock=clock),
        run_id="run",
        folder=root,
        log_file=None,
        world_size=1,
    )
    content = job_files.read(job_files.description_path(root, "run")).content
    return job_files.RunDescription.decode(content).model


def made_from(file: str) -> SimpleNamespace:
    """A model as ultralytics builds it."""
    return SimpleNamespace(yaml={"yaml_file": file, "nc": 2})


@pytest.mark.parametrize(
    ("model", "built", "name"),
    [
        ("yolov8m.pt", "yolov8m.pt", "yolov8m"),
        ("/models/yolo11n-seg.yaml", made_from("yolov8n.yaml"), "yolo11n-seg"),
        ("runs/detect/train/weights/best.pt", "runs/detect/train/weights/best.pt", "best"),
        ("runs/detect/train/weights/best.pt", made_from("yolov8m.yaml"), "yolov8m"),
        ("best.pt", SimpleNamespace(module=made_from("/x/yolo26s.yaml")), "yolo26s"),
        ("best.pt", made_from("mine.yaml"), "best"),
        ("mine.yaml", made_from("mine.yaml"), "mine"),
        ("best.pt", SimpleNamespace(yaml=None), "best"),
        ("best.pt", SimpleNamespace(yaml={}), "best"),
    ],
)
def test_weights_are_called_by_the_model_that_they_were_made_from(
    jobs: Path, clock: FakeClock, model: str, built: Any, name: str
) -> None:
    """A name that is a model's stays; one that says nothing gives way to a known model."""
    assert described(jobs, clock, model, built) == name
