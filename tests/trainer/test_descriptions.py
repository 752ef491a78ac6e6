"""What a training says of itself once."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuwarden import job_files
from gpuwarden.estimate_tables import find_model
from gpuwarden.estimates import Unknown
from gpuwarden.trainer import descriptions
from gpuwarden.trainer.status import StatusBoard

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.conftest import FakeClock
    from tests.trainer.trainings import Trainings


def described(
    root: Path, clock: FakeClock, model: str, built: Any, *, loader: Any = None, **words: Any
) -> job_files.RunDescription:
    """What a training of these weights says of itself."""
    args = SimpleNamespace(model=model, amp=True, project=None, **({"imgsz": 640} | words))
    trainer = SimpleNamespace(
        args=args, batch_size=8, epochs=3, model=built, device=SimpleNamespace(type="cpu")
    )
    if loader is not None:
        trainer.train_loader = loader
    descriptions.publish(
        trainer,
        StatusBoard(root, "run", clock=clock),
        run_id="run",
        folder=root,
        log_file=None,
        world_size=1,
    )
    content = job_files.read(job_files.description_path(root, "run")).content
    return job_files.RunDescription.decode(content)


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
    assert described(jobs, clock, model, built).model == name


def _yaml(folder: Path, name: str, *, change: bool) -> Path:
    """One of ultralytics' own models by this name, with a layer more where it is changed."""
    tasks: Any = importlib.import_module("ultralytics.nn.tasks")
    content = dict(tasks.yaml_model_load("yolov8n.yaml"))
    if change:
        content["backbone"] = [*content["backbone"], [-1, 1, "Conv", [1024, 1, 1]]]
        content["head"] = [[_later(source), *rest] for source, *rest in content["head"]]
    path = folder / name
    path.write_text(json.dumps({key: content[key] for key in ("nc", "scales", "backbone", "head")}))
    return path


def _later(source: int | list[int]) -> int | list[int]:
    """Where a layer takes its input from, behind one more layer of the backbone."""
    if isinstance(source, list):
        return [source[0], *(at + (at > 9) for at in source[1:])]
    return source


@pytest.mark.parametrize("name", ["yolov8n.yaml", "best.pt"])
def test_a_model_with_layers_of_ones_own_does_not_go_by_the_known_ones_name(
    jobs: Path, clock: FakeClock, tmp_path: Path, name: str
) -> None:
    """People change a model's YAML and keep its name; what the known model needs is not theirs.

    Other classes, channels and a copy of the file are still that model.
    """
    tasks: Any = importlib.import_module("ultralytics.nn.tasks")

    def called(*, change: bool, **words: Any) -> str:
        path = _yaml(tmp_path, "yolov8n.yaml", change=change)
        model = tasks.DetectionModel(str(path), verbose=False, **words)
        return described(jobs, clock, name, SimpleNamespace(module=model)).model

    assert called(change=False, nc=3, ch=1) == "yolov8n"
    other = called(change=True, nc=3)
    assert other.startswith("yolov8n-custom-")
    assert isinstance(find_model(other), Unknown)
    assert called(change=True, nc=80, ch=1) == other


def _loader(*shapes: tuple[int, int]) -> SimpleNamespace:
    return SimpleNamespace(dataset=SimpleNamespace(batch_shapes=np.array(shapes)))


@pytest.mark.parametrize(
    ("words", "loader", "sizes"),
    [
        ({}, None, ""),
        ({"multi_scale": 0.0, "rect": False}, _loader((192, 640)), ""),
        ({"multi_scale": 0.5, "task": "detect"}, None, "320-960"),
        ({"multi_scale": True}, None, "320-960"),
        ({"multi_scale": 1.0, "imgsz": 64}, None, "1-128"),
        ({"multi_scale": 0.5, "task": "classify"}, None, ""),
        ({"rect": True}, _loader((640, 640), (640, 640)), ""),
        ({"rect": True, "imgsz": 1408}, _loader((192, 1408)), "192-1408"),
        ({"rect": True, "multi_scale": 0.1}, _loader((384, 640)), "384-704"),
        ({"rect": True}, SimpleNamespace(dataset=SimpleNamespace()), ""),
    ],
)
def test_images_that_are_not_all_squares_of_one_size_are_told(
    jobs: Path, clock: FakeClock, words: dict[str, Any], loader: Any, sizes: str
) -> None:
    """As `multi_scale` and `rect` make them; validation does not count."""
    assert described(jobs, clock, "yolov8n.pt", None, loader=loader, **words).sizes == sizes


def test_a_training_of_many_sizes_says_so_before_its_first_batch(trainings: Trainings) -> None:
    """What a node tells of it is known by when there is something to compare."""
    seen = []

    def look(_trainer: Any) -> None:
        content = job_files.read(job_files.description_path(trainings.jobs, "run")).content
        seen.append(job_files.RunDescription.decode(content).sizes)

    trainings.attempt("run", {"epochs": 1, "multi_scale": 0.5}, hooks={"on_train_start": look})
    assert seen == ["32-96"]
