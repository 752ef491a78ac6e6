"""How many images a training set has, counted without reading them."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

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
_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("avif", "bmp", "dng", "heic", "jp2", "jpeg", "jpeg2000"),
        *("jpg", "mpo", "png", "tif", "tiff", "webp"),
    )
)
"""What ultralytics takes for an image."""
MAX_FILES = 20_000_000
_MAX_DESCRIPTION = 4 * 1024 * 1024


def count_images(data: str) -> int:
    """Images of a training set.

    Args:
        data: a number, a folder, a list of files (`.txt`), a YAML of ultralytics' kind, or the
            name of one of ultralytics' own data sets.

    Raises:
        InvalidInput: there is none, it has no images, or it cannot be read.
        MissingExtra: a YAML is to be read, and PyYAML is not installed.
    """
    if re.fullmatch(r"[0-9]{1,12}", data):
        images = int(data)
    else:
        path = named_files.named(data)
        if not path.exists():
            known = KNOWN.get(re.sub(r"\.ya?ml$", "", data.lower()))
            if known is not None:
                return known
            hint = did_you_mean(data, [f"{name}.yaml" for name in KNOWN])
            raise InvalidInput(f"data={data}: there is no such file{f'; {hint}' if hint else ''}")
        try:
            images = _count(path)
        except OSError as error:
            raise InvalidInput(f"data={data}: {error.strerror or error}") from error
    if images < 1:
        raise InvalidInput(f"data={data}: it has no images")
    return images


def _count(path: Path) -> int:
    if path.is_dir():
        return _in_folder(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _described(path)
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


def _described(file: Path) -> int:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise MissingExtra("estimate", "yaml", "yolo") from error
    if file.stat().st_size > _MAX_DESCRIPTION:
        raise InvalidInput(f"data={file}: it is no description of a data set")
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"data={file}: it is no YAML: {error}") from error
    train = content.get("train") if isinstance(content, dict) else None
    listed = train if isinstance(train, list) else [train]
    parts = [part for part in listed if isinstance(part, str) and part]
    if not parts or len(parts) < len(listed):
        raise InvalidInput(f"data={file}: it does not say where its `train` images are")
    root = Path(str(content.get("path") or "."))
    total = 0
    for part in parts:
        candidates = [file.parent / root / part, root / part, file.parent / part]
        found = next((item for item in candidates if item.exists()), None)
        if found is None or found.suffix.lower() in (".yaml", ".yml"):
            raise InvalidInput(f"data={file}: its images {root / part} are not there; say a number")
        total += _count(found)
    return total
