"""How many images a training set has, counted without reading them."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any, Literal

from gpuwarden import named_files
from gpuwarden.diagnostics import did_you_mean
from gpuwarden.errors import InvalidInput, MissingExtra

# As ultralytics' own files in cfg/datasets say them, of version 8.4.190.
KNOWN = {
    "argoverse": 39384,
    "coco": 118287,
    "coco-pose": 56599,
    "coco128": 128,
    "coco128-seg": 128,
    "coco8": 4,
    "coco8-pose": 4,
    "coco8-seg": 4,
    "dotav1": 1411,
    "dotav1.5": 1411,
    "globalwheat2020": 3422,
    "imagenet": 1281167,
    "lvis": 100170,
    "objects365": 1742289,
    "open-images-v7": 1743042,
    "sku-110k": 8219,
    "visdrone": 6471,
    "voc": 16551,
}
KNOWN_VALIDATION = {
    "argoverse": 15062,
    "coco": 5000,
    "coco-pose": 2346,
    "coco128": 128,
    "coco128-seg": 128,
    "coco8": 4,
    "coco8-pose": 4,
    "coco8-seg": 4,
    "dotav1": 458,
    "dotav1.5": 458,
    "globalwheat2020": 748,
    "imagenet": 50000,
    "lvis": 19809,
    "objects365": 80000,
    "open-images-v7": 41620,
    "sku-110k": 588,
    "visdrone": 548,
    "voc": 4952,
}
"""Likewise, of the images that each epoch is validated by."""
Split = Literal["train", "val"]
_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "validation", "valid", "test"),
}
"""Of a data set to classify, in the order in which ultralytics looks for them."""
_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("avif", "bmp", "dng", "heic", "jp2", "jpeg", "jpeg2000"),
        *("jpg", "mpo", "png", "tif", "tiff", "webp"),
    )
)
"""What ultralytics takes for an image."""
_DESCRIPTIONS = (".yaml", ".yml")
MAX_FILES = 20_000_000
_MAX_DESCRIPTION = 4 * 1024 * 1024


def count_images(data: str, *, split: Split = "train") -> int:
    """Images of a data set.

    Args:
        data: a number, a folder, a list of files (`.txt`), a YAML of ultralytics' kind, or the
            name of one of ultralytics' own data sets.
        split: those to train with, or those that each epoch is validated by: only YAMLs, folders of
            a data set to classify, and ultralytics' own data sets tell them apart.

    Raises:
        InvalidInput: there is none, it has no images, or it cannot be read.
        MissingExtra: a YAML is to be read, and PyYAML is not installed.
    """
    if re.fullmatch(r"[0-9]{1,12}", data):
        images = int(data)
    else:
        path = named_files.named(data)
        if not path.exists():
            table = KNOWN if split == "train" else KNOWN_VALIDATION
            known = table.get(re.sub(r"\.ya?ml$", "", data.lower()))
            if known is not None:
                return known
            hint = did_you_mean(data, [f"{name}.yaml" for name in KNOWN])
            raise InvalidInput(f"data={data}: there is no such file{f'; {hint}' if hint else ''}")
        try:
            images = _count(path, split)
        except OSError as error:
            raise InvalidInput(f"data={data}: {error.strerror or error}") from error
    if images < 1:
        raise InvalidInput(f"data={data}: it has no images")
    return images


def count_classes(data: str) -> int | None:
    """Classes that a data set's YAML names; None where it names none, or data is no such file.

    Raises:
        InvalidInput: it cannot be read.
        MissingExtra: PyYAML is not installed.
    """
    path = named_files.named(data)
    if path.suffix.lower() not in _DESCRIPTIONS or not path.is_file():
        return None
    content = _description(path)
    number, names = content.get("nc"), content.get("names")
    if isinstance(names, (list, dict)) and names:
        return len(names)
    return number if isinstance(number, int) and number > 0 else None


def _count(path: Path, split: Split) -> int:
    if path.is_dir():
        inner = next((path / name for name in _FOLDERS[split] if (path / name).is_dir()), None)
        if inner is None and split == "val":
            raise InvalidInput(f"data={path}: it has no folder of images to validate by")
        return _in_folder(inner or path)
    if path.suffix.lower() in _DESCRIPTIONS:
        return _described(path, split)
    return _in_list(path)


def _in_list(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _in_folder(folder: Path) -> int:
    images = files = 0
    for _root, folders, names in os.walk(folder):
        files += len(names) + len(folders)
        if files > MAX_FILES:
            raise InvalidInput(f"data={folder}: it has more than {MAX_FILES} files; say a number")
        images += sum(Path(name).suffix.lower() in _SUFFIXES for name in names)
    return images


def _description(file: Path) -> dict[str, Any]:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise MissingExtra("estimate", "yaml", "yolo") from error
    if file.stat().st_size > _MAX_DESCRIPTION:
        raise InvalidInput(f"data={file}: it is no description of a data set")
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"data={file}: it is no YAML: {error}") from error
    return content if isinstance(content, dict) else {}


def _described(file: Path, split: Split) -> int:
    content = _description(file)
    said = content.get(split)
    listed = said if isinstance(said, list) else [said]
    parts = [part for part in listed if isinstance(part, str) and part]
    if not parts or len(parts) < len(listed):
        raise InvalidInput(f"data={file}: it does not say where its `{split}` images are")
    root = Path(str(content.get("path") or "."))
    total = 0
    for part in parts:
        candidates = [file.parent / root / part, root / part, file.parent / part]
        found = next((item for item in candidates if item.exists()), None)
        if found is None or found.suffix.lower() in _DESCRIPTIONS:
            raise InvalidInput(f"data={file}: its images {root / part} are not there; say a number")
        total += _in_folder(found) if found.is_dir() else _in_list(found)
    return total
