"""A small detection data set, drawn rather than downloaded, and a model that learns it at once.

For the demo, the tests and the benches.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("disc", "box")

# 0.15 M parameters: set up, trained for 3 epochs and evaluated in under a second.
TINY_MODEL = """\
nc: 2
scales: {n: [0.33, 0.25, 1024]}
backbone:
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, Conv, [64, 3, 2]]
  - [-1, 1, Conv, [64, 3, 2]]
head:
  - [[2, 3, 4], 1, Detect, [nc]]
"""


def make_detection_dataset(
    folder: Path, images: int = 32, *, size: int = 64, seed: int = 0
) -> Path:
    """Draw discs and boxes on noise, a quarter of the images for validation.

    Args:
        folder: is made; what an earlier call with the same arguments drew is drawn again.
        images: for training; at least 4 more are drawn for validation.
        size: pixels of a side.
        seed: of the drawing.

    Returns:
        Path of its `data.yaml`, with absolute paths, for `data=`.
    """
    random = np.random.default_rng(seed)
    for split, count in (("train", images), ("val", max(4, images // 4))):
        (folder / "images" / split).mkdir(parents=True, exist_ok=True)
        (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture, labels = _draw(random, size)
            picture.save(folder / "images" / split / f"{number:05d}.png")
            text = "".join(f"{line}\n" for line in labels)
            (folder / "labels" / split / f"{number:05d}.txt").write_text(text, "utf-8")
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(NAMES))
    description = folder / "data.yaml"
    description.write_text(
        # A JSON string is YAML as well, whatever characters the folder's name has.
        f"path: {json.dumps(str(folder.resolve()))}\n"
        f"train: images/train\nval: images/val\nnames:\n{names}",
        "utf-8",
    )
    return description


def _draw(random: np.random.Generator, size: int) -> tuple[Image.Image, list[str]]:
    noise = random.integers(0, 96, (size, size, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    pen = ImageDraw.Draw(picture)
    labels = []
    for _ in range(int(random.integers(1, 4))):
        kind = int(random.integers(len(NAMES)))
        width, height = (int(side) for side in random.integers(size // 6, size // 2, 2))
        left, top = int(random.integers(size - width)), int(random.integers(size - height))
        colour = tuple(int(value) for value in random.integers(128, 256, 3))
        corners = (left, top, left + width, top + height)
        (pen.ellipse if kind == 0 else pen.rectangle)(corners, fill=colour)
        middle = ((left + width / 2) / size, (top + height / 2) / size)
        labels.append(
            f"{kind} {middle[0]:.6f} {middle[1]:.6f} {width / size:.6f} {height / size:.6f}"
        )
    return picture, labels
