"""What one image costs a model in training, measured without a card and without computing.

The model runs once forward and backward on fake tensors, which have shapes and no content
(`FakeTensorMode`), at two batch sizes: what autograd keeps grows by the activations of one image.
That takes seconds on one core for any YAML that ultralytics can build.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput
from gpuwarden.estimate_tables import model_costs
from gpuwarden.trainer.environments import software

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuwarden.estimates import ModelCosts

log = logging.getLogger(__name__)

IMGSZ = 640
CLASSIFY_IMGSZ = 224
_BATCHES = (2, 4)
_VERSION = 1
_FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)
"""What ultralytics raises for a YAML that it cannot make a model of."""
_MODEL_CLASSES = {
    "detect": "DetectionModel",
    "segment": "SegmentationModel",
    "pose": "PoseModel",
    "obb": "OBBModel",
    "classify": "ClassificationModel",
}


def default_cache() -> Path:
    """The folder in which measured models are remembered: `$XDG_CACHE_HOME/gpuwarden/slopes`."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "gpuwarden" / "slopes"


def costs(yaml: Path, *, cache: Path | None = None) -> ModelCosts:
    """Measure a model's YAML, or recall what was measured of the same content.

    Args:
        yaml: of ultralytics' kind; its name may hold a scale, as in `yolov8m-custom.yaml`.
        cache: folder for what was measured; one that cannot be written costs only the time.

    Raises:
        InvalidInput: the file is not there, or ultralytics cannot build a model of it.
        ModuleNotFoundError: torch or ultralytics is not installed.
    """
    source = yaml if yaml.is_file() else yaml.with_name(_without_scale(yaml.name))
    try:
        content = source.read_bytes()
    except OSError as error:
        raise InvalidInput(f"model {yaml}: {error.strerror}") from error
    # The name decides the scale, the versions how a model is built.
    key = json.dumps([_VERSION, yaml.name, software()], sort_keys=True).encode()
    name = hashlib.sha256(key + b"\0" + content).hexdigest()
    file = (default_cache() if cache is None else cache) / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return model_costs(yaml.stem, json.loads(file.read_text("utf-8")))
    row = measure(str(yaml))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(row), "utf-8")
        partial.replace(file)
    except OSError as error:
        log.warning("%s: %s; the model is measured again next time", file.parent, error.strerror)
    return model_costs(yaml.stem, row)


def packaged(name: str) -> Path | None:
    """One of ultralytics' own model files, by a name that may hold a scale; None: there is none.

    Args:
        name: such as `yolov8m-p2.yaml`; the path that is returned ends in it.

    Raises:
        ModuleNotFoundError: ultralytics is not installed.
    """
    import ultralytics

    folder = Path(ultralytics.__file__).parent / "cfg" / "models"
    old = re.sub(r"^(yolov[58][nsmlx])6(\.ya?ml)$", r"\1-p6\2", name)  # yolov5n6 was its name
    for wanted in (name, _without_scale(old)):
        for file in sorted(folder.glob("*/*.yaml")):
            if file.name == wanted:
                return file.with_name(old)
    return None


def _without_scale(name: str) -> str:
    """`yolov8-p2.yaml` for `yolov8m-p2.yaml`: one file describes all sizes of a family."""
    return re.sub(r"(\d+)([nslmx])(.+)?$", r"\1\3", name)


def measure(yaml: str) -> dict[str, Any]:
    """Measure a model: a row of the models' table.

    Args:
        yaml: a path, or the name of one of ultralytics' own files, such as `yolov8m-seg.yaml`.

    Raises:
        InvalidInput: ultralytics cannot build a model of it, or not run it on fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with _quiet():
            model, task = build(yaml)
            model.train()
            imgsz = CLASSIFY_IMGSZ if task == "classify" else IMGSZ
            with FakeTensorMode(allow_non_fake_inputs=True):
                kept = {amp: _kept_per_image(model, imgsz, amp=amp) for amp in (True, False)}
                flops, operations = _work(model, imgsz)
            strides = getattr(model, "stride", None)
            anchors = 0.0
            if task != "classify" and strides is not None:
                anchors = sum((imgsz / float(stride)) ** 2 for stride in strides)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("numpy", "torch", "ultralytics"):
            raise
        raise InvalidInput(f"model {yaml}: it needs the Python module {error.name!r}") from error
    except _FAULTS as error:
        raise InvalidInput(f"model {yaml}: ultralytics cannot build or run it: {error}") from error
    return {
        "task": task,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "body_parameters": body_parameters(model),
        "gigaflops": round(flops / 1e9, 3),
        "activation_bytes": round(kept[True]),
        "activation_bytes_fp32": round(kept[False]),
        "operations": operations,
        "anchors": round(anchors),
        "imgsz": imgsz,
    }


def body_parameters(model: Any) -> int | None:
    """Parameters of all layers but the first and the last, or None of what has no list of layers.

    The first depends on the images' channels and the last on the classes: of all trainings of one
    model this number is the same, and of few others.
    """
    layers = getattr(model, "model", None)
    try:
        body = list(layers)[1:-1]  # type: ignore[arg-type]
        return sum(int(parameter.numel()) for layer in body for parameter in layer.parameters())
    except (AttributeError, TypeError):
        return None


def build(yaml: str) -> tuple[Any, str]:
    """A model with fresh weights on the CPU, and its task, by a YAML of ultralytics' kind.

    Raises:
        ValueError: a task that is not trained on images and labels of the usual kind.
    """
    tasks: Any = importlib.import_module("ultralytics.nn.tasks")
    description = tasks.yaml_model_load(yaml)
    if not isinstance(description, dict) or "backbone" not in description:
        raise ValueError("it describes no model: there is no `backbone`")
    task = str(tasks.guess_model_task(description))
    if task == "None":
        raise ValueError("its last layer is the head of no known task")
    if task not in _MODEL_CLASSES:
        raise ValueError(f"models of task {task} are not estimated")
    return getattr(tasks, _MODEL_CLASSES[task])(description, verbose=False), task


def _kept_per_image(model: Any, imgsz: int, *, amp: bool) -> float:
    """Bytes that autograd keeps for each further image."""
    few, many = (_kept(model, batch, imgsz=imgsz, amp=amp) for batch in _BATCHES)
    return (many - few) / (_BATCHES[1] - _BATCHES[0])


def _kept(model: Any, batch: int, *, imgsz: int, amp: bool) -> int:
    import torch

    own = {
        tensor.untyped_storage()._cdata  # noqa: SLF001 - a storage has no other identity
        for tensor in (*model.parameters(), *model.buffers())
    }
    seen: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:  # noqa: SLF001 - likewise
            seen[storage._cdata] = storage  # noqa: SLF001 - held, so that no id comes twice
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp),
    ):
        output = model(torch.zeros(batch, 3, imgsz, imgsz))
    total = sum(int(storage.nbytes()) for storage in seen.values())
    del output
    return total


def _work(model: Any, imgsz: int) -> tuple[float, int]:
    """Floating-point operations of the forward pass for one image, and operations of a step."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    batch = _BATCHES[0]
    images = torch.zeros(batch, 3, imgsz, imgsz)
    with FlopCounterMode(display=False) as flops:
        model(images)
    with _counting() as launched:
        outputs = [output.float().sum() for output in _tensors(model(images))]
        torch.stack([output for output in outputs if output.requires_grad]).sum().backward()
    return flops.get_total_flops() / batch, len(launched)


@contextlib.contextmanager
def _counting() -> Iterator[list[Any]]:
    """Collects what would be launched."""
    dispatch: Any = importlib.import_module("torch.utils._python_dispatch")
    launched: list[Any] = []

    def note(
        _mode: Any,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        launched.append(function)
        return function(*args, **(kwargs or {}))

    # torch has no types, and a class cannot be derived from what is not known to be one.
    mode = type("Counting", (dispatch.TorchDispatchMode,), {"__torch_dispatch__": note})
    with mode():
        yield launched


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ultralytics prints a summary of some models, and torch warns of fake tensors' innards."""
    from ultralytics.utils import LOGGER

    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        LOGGER.setLevel(level)
