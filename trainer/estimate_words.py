"""The words of `gpuwarden estimate`, and what they ask for."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwarden import estimate_tables, estimates, named_files
from gpuwarden.diagnostics import did_you_mean
from gpuwarden.errors import InvalidInput, MissingExtra
from gpuwarden.estimates import Gpu, ModelCosts, Unknown, Workload
from gpuwarden.image_counts import count_images

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuwarden.trainer.probes import Probe

_Found = TypeVar("_Found")

WORDS: dict[str, str] = {
    "model": "name, weights or YAML file of a model: yolov8m, yolo11n-seg.pt, mine.yaml",
    "gpu": "card, as NVML or people call it: A100 40GB, rtx 4090, Tesla T4",
    "batch": "images per step over all cards (16); -1 for the largest that fits",
    "imgsz": "pixels of the images' sides (640; 224 to classify)",
    "amp": "mixed precision, true or false (true)",
    "optimizer": "SGD, AdamW, ... (auto)",
    "nc": "classes of the data set (80)",
    "objects": "most objects on one image after mosaic (50)",
    "gpus": "cards that share the batch (1)",
    "data": "number of images, folder, list or YAML of the training images, or coco.yaml",
    "epochs": "over the data (1)",
    "workers": "loader processes for each card",
    "cores": "that the loaders of each card have",
    "device": "for --probe: 0, 1 or cpu, as ultralytics names them",
    "task": "detect, segment, pose, obb or classify",
}
_TEXT = ("model", "gpu", "optimizer", "data", "task", "device")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        model: what is trained.
        gpu: the card, or None where none is named.
        workload: how.
        images: of the data set, or None.
        epochs: over it.
        cores: for the loaders of each card, or None where they are not told.
        yaml: what ultralytics builds the model of.
        data: a data set's YAML that is there, or None.
        workers: loader processes that were asked for, or None.
        device: by ultralytics, or None.
    """

    model: ModelCosts
    gpu: Gpu | None
    workload: Workload
    images: int | None
    epochs: int
    cores: int | None
    yaml: str
    data: Path | None
    workers: int | None
    device: str | None


def parse(words: Sequence[str]) -> Request:
    """Read the words of the command.

    Raises:
        InvalidInput: a word that is none, a value that cannot be meant, or a model or card that
            nothing is known of.
        MissingExtra: a YAML has to be measured, and ultralytics is not installed.
    """
    given = _given(words)
    numbers = {key: _number(key, text) for key, text in given.items() if key not in (*_TEXT, "amp")}
    for key in ("epochs", "workers", "cores"):
        if numbers.get(key, 1) < 1:
            raise InvalidInput(f"{key}={numbers[key]} is less than 1")
    model = _model(given["model"], given.get("task"))
    gpu = _gpu(given["gpu"]) if "gpu" in given else None
    automatic = numbers.get("batch") == -1
    if automatic and gpu is None:
        raise InvalidInput("batch=-1 is the largest that fits: on which card? Say gpu=")
    try:
        workload = Workload(
            batch=max(numbers.get("gpus", 1), 1) if automatic else numbers.get("batch", 16),
            imgsz=numbers.get("imgsz", model.imgsz),
            amp=_truth("amp", given.get("amp", "true")),
            optimizer=given.get("optimizer", "auto"),
            classes=numbers.get("nc", 80),
            objects=numbers.get("objects", 50),
            gpus=numbers.get("gpus", 1),
        )
    except ValueError as error:
        # The words' own names: what the workload calls classes is nc= here.
        raise InvalidInput(str(error).replace("classes=", "nc=", 1)) from error
    if workload.batch % workload.gpus:
        cards, less = workload.gpus, workload.batch // workload.gpus * workload.gpus
        raise InvalidInput(
            f"batch={workload.batch} cannot be shared among {cards} cards: the batch is that of "
            f"all together; say {max(less, cards)} or {less + cards}"
        )
    if automatic and gpu is not None:
        workload = _largest(model, gpu, workload)
    known = [numbers[key] for key in ("cores", "workers") if key in numbers]
    return Request(
        model=model,
        gpu=gpu,
        workload=workload,
        images=count_images(given["data"]) if "data" in given else None,
        epochs=numbers.get("epochs", 1),
        cores=min(known) if known else None,
        yaml=_yaml(given["model"], model),
        data=_description(given.get("data", "")),
        workers=numbers.get("workers"),
        device=given.get("device"),
    )


def _largest(model: ModelCosts, gpu: Gpu, workload: Workload) -> Workload:
    constants = estimate_tables.tables().constants
    batch = estimates.largest_batch(model, gpu.memory, workload=workload, constants=constants)
    if batch < 1:
        raise InvalidInput(f"{model.name} at {workload.imgsz} px fits {gpu.name} with no batch")
    return dataclasses.replace(workload, batch=batch)


def _given(words: Sequence[str]) -> Mapping[str, str]:
    given: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not value:
            raise InvalidInput(f"{word!r} is no KEY=VALUE, such as model=yolov8m")
        if key not in WORDS:
            hint = did_you_mean(key, WORDS)
            raise InvalidInput(f"{key!r} is no word of `gpuwarden estimate`" + _joined(hint))
        if key in given:
            raise InvalidInput(f"{key}= is said twice")
        given[key] = value
    if "model" not in given:
        raise InvalidInput("which model? Say model=yolov8m or model=path/to/model.yaml")
    return given


def _gpu(name: str) -> Gpu:
    found = estimate_tables.find_gpu(name)
    if isinstance(found, Unknown):
        raise InvalidInput(f"gpu={name}: {found}")
    return found


def _joined(hint: str | None) -> str:
    return f"; {hint}" if hint else ""


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise InvalidInput(f"{key}={text}: write a whole number")
    return int(text)


def _truth(key: str, text: str) -> bool:
    choices = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in choices:
        raise InvalidInput(f"{key}={text}: write true or false")
    return choices[text.lower()]


def _model(name: str, task: str | None) -> ModelCosts:
    """From the table; else, where it is a YAML, measured."""
    path = named_files.named(name)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if is_yaml and path.is_file():
        return _measured(path.absolute(), name)
    found = estimate_tables.find_model(name, task)
    if isinstance(found, Unknown) and (base := named_files.trained_from(path)) is not None:
        found = estimate_tables.find_model(base, task)
    if not isinstance(found, Unknown):
        return found
    if is_yaml:
        packaged = _packaged(path.name)
        if packaged is not None:
            return _measured(packaged, name)
    raise InvalidInput(
        f"model={name}: {str(found).removesuffix('?')}. Of any other model give the YAML that it "
        "was made from"
    )


def _yaml(name: str, model: ModelCosts) -> str:
    path = named_files.named(name)
    if path.suffix.lower() in (".yaml", ".yml"):
        return str(path.absolute()) if path.is_file() else path.name
    return f"{model.name}.yaml"


def probed(request: Request) -> Probe:
    """Measure what is asked for on this device.

    Raises:
        InvalidInput: it cannot be trained here.
        MissingExtra: ultralytics is not installed.
    """
    probes: Any = importlib.import_module("gpuwarden.trainer.probes")

    def measure() -> Probe:
        found: Probe = probes.run(
            request.yaml,
            request.workload,
            task=request.model.task,
            data=request.data,
            workers=8 if request.workers is None else request.workers,
            device=request.device,
        )
        return found

    return _needing_ultralytics(measure)


def _needing_ultralytics(ask: Callable[[], _Found]) -> _Found:
    try:
        return _offline(ask)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("numpy", "torch", "ultralytics"):
            raise
        raise MissingExtra("estimate", missing, "yolo") from error


def _description(data: str) -> Path | None:
    path = named_files.named(data)
    return path if path.suffix.lower() in (".yaml", ".yml") and path.is_file() else None


def _packaged(name: str) -> Path | None:
    """One of ultralytics' own YAML files, with the scale in its name."""
    try:
        slopes: Any = importlib.import_module("gpuwarden.trainer.slopes")
        found: Path | None = _offline(lambda: slopes.packaged(name))
    except ModuleNotFoundError:
        return None
    return found


def _measured(yaml: Path, name: str) -> ModelCosts:
    slopes: Any = importlib.import_module("gpuwarden.trainer.slopes")
    costs: ModelCosts = _needing_ultralytics(lambda: slopes.costs(yaml))
    return dataclasses.replace(costs, name=Path(name).name)


def _offline(ask: Callable[[], _Found]) -> _Found:
    """Ultralytics reads this when it is imported: an estimate looks nothing up."""
    os.environ.setdefault("YOLO_OFFLINE", "1")
    os.environ.setdefault("YOLO_AUTOINSTALL", "0")
    return ask()
