"""A tiny model and data set for each task, made of the drawn boxes."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

import yaml
from demo.datasets import NAMES, TINY_MODEL, make_detection_dataset
from tests.trainer.conftest import Material

if TYPE_CHECKING:
    from pathlib import Path

KEYPOINTS = 3

HEADS = {
    "detect": "[[2, 3, 4], 1, Detect, [nc]]",
    "segment": "[[2, 3, 4], 1, Segment, [nc, 8, 16]]",
    "pose": "[[2, 3, 4], 1, Pose, [nc, kpt_shape]]",
    "obb": "[[2, 3, 4], 1, OBB, [nc, 1]]",
    "classify": "[-1, 1, Classify, [nc]]",
    "segment26": "[[2, 3, 4], 1, Segment26, [nc, 8, 16]]",
    "pose26": "[[2, 3, 4], 1, Pose26, [nc, kpt_shape]]",
    "obb26": "[[2, 3, 4], 1, OBB26, [nc, 1]]",
}
"""By kind: a task, those of YOLO26 with 26 behind it."""


def task_of(kind: str) -> str:
    """The task of a kind."""
    return kind.removesuffix("26")


def make_material(folder: Path, kind: str, *, images: int = 48) -> Material:
    """Model and data set of a kind.

    Args:
        folder: is made.
        kind: one of `HEADS`.
        images: to train on.
    """
    model = folder / f"{kind}.yaml"
    data = make_detection_dataset(folder / "data", images=images)
    text = TINY_MODEL.replace(HEADS["detect"], HEADS[kind])
    if task_of(kind) == "pose":
        text = f"kpt_shape: [{KEYPOINTS}, 3]\n{text}"
    if kind.endswith("26"):
        text = f"end2end: True\nreg_max: 1\n{text}"
    model.write_text(text, "utf-8")
    task = task_of(kind)
    if task == "classify":
        return Material(model, _by_class(data.parent, folder / "classes"))
    if task != "detect":
        for file in (data.parent / "labels").glob("*/*.txt"):
            lines = [_label(task, line) for line in file.read_text("utf-8").splitlines()]
            file.write_text("\n".join(lines) + "\n", "utf-8")
    if task == "pose":
        described = yaml.safe_load(data.read_text("utf-8"))
        described.update(kpt_shape=[KEYPOINTS, 3], flip_idx=list(range(KEYPOINTS)))
        data.write_text(yaml.safe_dump(described), "utf-8")
    return Material(model, data)


def _label(task: str, line: str) -> str:
    """A box's line as the task writes it."""
    kind, *numbers = line.split()
    x, y, width, height = (float(number) for number in numbers)
    if task == "pose":
        points = [(x + at * width / 4, y, 2) for at in (-1, 0, 1)]
        return " ".join([line, *(f"{px:.6f} {py:.6f} {seen}" for px, py, seen in points)])
    corners = 4 if task == "obb" else 8
    turned = [math.tau * (at + 0.5) / corners for at in range(corners)]
    scale = 1 / math.sqrt(2) if task == "obb" else 0.5
    outline = [
        (
            min(max(x + scale * width * math.cos(turn), 0.0), 1.0),
            min(max(y + scale * height * math.sin(turn), 0.0), 1.0),
        )
        for turn in turned
    ]
    return " ".join([kind, *(f"{px:.6f} {py:.6f}" for px, py in outline)])


def _by_class(data: Path, folder: Path) -> Path:
    """The images in a folder for each class, by their first box."""
    for split in ("train", "val"):
        for name in NAMES:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
        for label in sorted((data / "labels" / split).glob("*.txt")):
            name = NAMES[int(label.read_text("utf-8").split()[0])]
            image = data / "images" / split / f"{label.stem}.png"
            shutil.copyfile(image, folder / split / name / image.name)
    return folder
