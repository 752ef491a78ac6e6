"""What a process is, by its command line and the libraries it has loaded.

Command lines are only looked at here: what leaves this module is a framework's name and the few
words of a training that are known to hold no secret.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.exporter.job_servers import python_program
from gpuwarden.exporter.jobs import YoloCommand
from gpuwarden.exporter.processes import PROC

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_MAPS_BYTES = 4 * 1024 * 1024
"""A training maps a few thousand files; what comes after this is not looked at."""

_KERNELS = frozenset(
    {"colab_kernel_launcher", "ipykernel", "ipykernel_launcher", "pydevconsole", "spyder_kernels"}
)
_KERNEL_PROGRAMS = frozenset({"xpython", "xpython-raw"})
_TRAINERS = frozenset({"train.py", "train_aux.py", "train_dual.py"})
_LIBRARIES = (
    ("torch", b"/libtorch"),
    ("tensorflow", b"/libtensorflow"),
    ("jax", b"/jaxlib/"),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUMBER = re.compile(r"-?[0-9]{1,6}(?:\.[0-9]{1,4})?")
_OPTIONS = {
    "--weights": "model",
    "--cfg": "cfg",
    "--batch-size": "batch",
    "--batch": "batch",
    "--img-size": "imgsz",
    "--imgsz": "imgsz",
    "--img": "imgsz",
    "--epochs": "epochs",
    "--project": "project",
}
_WORDS = {"model": "model", "batch": "batch", "imgsz": "imgsz", "epochs": "epochs"} | {
    "project": "project"
}


def is_kernel(arguments: Sequence[str]) -> bool:
    """Whether a command line is a Jupyter kernel's, or a console's of an editor."""
    # Only the program: a notebook's own path may hold any word.
    program = python_program(arguments)
    if program.package in _KERNELS or program.name.removesuffix(".py") in _KERNELS:
        return True
    return bool(arguments) and arguments[0].rpartition("/")[2] in _KERNEL_PROGRAMS


def yolo_command(arguments: Sequence[str]) -> YoloCommand | None:
    """The YOLO training that a command line starts, or None.

    Known are ultralytics' `yolo [task] train key=value ...` and the train.py of yolov5 and yolov7.
    """
    for at, argument in enumerate(arguments[:4]):
        name = argument.rpartition("/")[2]
        if name in ("yolo", "ultralytics") and (at == 0 or arguments[at - 1] != "-m"):
            return _ultralytics(arguments[at + 1 :])
        if name == "ultralytics" and arguments[at - 1] == "-m":
            return _ultralytics(arguments[at + 1 :])
        if name in _TRAINERS:
            return _train_script(arguments[at + 1 :])
    return None


def _ultralytics(words: Sequence[str]) -> YoloCommand | None:
    if "train" not in words and "mode=train" not in words:
        return None
    found = {}
    for word in words:
        key, separator, value = word.partition("=")
        if separator and key in _WORDS:
            found[key] = value
    return _command(found, framework="ultralytics")


def _train_script(words: Sequence[str]) -> YoloCommand | None:
    found = dict(_options(words))
    if not found:
        return None
    # yolov5 trains from scratch with --weights '' and a --cfg.
    found["model"] = found.get("model") or found.get("cfg", "")
    return _command(found, framework="torch")


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for at, word in enumerate(words):
        option, separator, value = word.partition("=")
        name = _OPTIONS.get(option)
        if name is not None:
            yield name, value if separator else next(iter(words[at + 1 : at + 2]), "")


def _command(found: dict[str, str], *, framework: str) -> YoloCommand:
    model = found.get("model", "").rpartition("/")[2]
    project = found.get("project", "").rstrip("/").rpartition("/")[2]
    stem = re.sub(r"\.(?:pt|ya?ml|torchscript)$", "", model)

    def number(name: str) -> str:
        return found[name] if _NUMBER.fullmatch(found.get(name, "")) else ""

    return YoloCommand(
        model=stem if _NAME.fullmatch(stem) else "",
        batch=number("batch"),
        imgsz=number("imgsz"),
        epochs=number("epochs"),
        project=project if _NAME.fullmatch(project) else "",
        framework=framework,
    )


def loaded_framework(pid: int, proc: Path = PROC) -> str:
    """The framework whose library a process has mapped, or an empty string.

    Reading the maps of a training takes about a millisecond: ask once per process.
    """
    try:
        with Path(proc, str(pid), "maps").open("rb") as file:
            content = file.read(MAX_MAPS_BYTES)
    except OSError:
        return ""
    for name, mark in _LIBRARIES:
        if mark in content:
            return name
    return ""
