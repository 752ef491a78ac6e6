"""YOLO trainings that declare nothing, recognised by their command line.

Known are ultralytics' `yolo`, and the train.py of yolov5, yolov7, yolov9 and their like, also
behind what launches them (torchrun, accelerate, srun, ...). A command line may hold names and
secrets: what leaves this module are a few words that cannot, and what is none of those is dropped
and counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpuwarden.exporter.job_servers import python_program
from gpuwarden.exporter.jobs import YoloCommand

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_LAUNCHER_WORDS = 64
"""Words before a launched program that are looked through for it."""
MAX_WORDS = 4096
"""Words of a program that are looked at; no training needs more."""
MAX_DEVICES = 1024

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_LAUNCHERS = frozenset(
    {
        *("accelerate", "composer", "deepspeed", "horovodrun", "mpiexec", "mpirun", "torchrun"),
        *("conda", "mamba", "micromamba", "pipenv", "pixi", "poetry", "rye", "uv"),
        *("env", "nice", "nohup", "numactl", "setsid", "stdbuf", "sudo", "taskset", "time"),
        *("timeout", "unbuffer", "xvfb-run"),
        *("compute-sanitizer", "ncu", "nsys", "nvprof", "py-spy", "scalene"),
        *("bash", "dash", "sh", "zsh"),
        *("prun", "srun", "jsrun", "aprun"),
    }
)
_LAUNCHER_MODULES = frozenset({"accelerate", "deepspeed", "torch", "torchrun", "coverage"})
_ULTRALYTICS = frozenset({"yolo", "ultralytics"})
_SCRIPTS = frozenset({"train.py", "train_aux.py", "train_dual.py", "train_triple.py"})
_TASKS = ("detect", "segment", "semantic", "depth", "classify", "pose", "obb")
_MODES = ("train", "val", "predict", "export", "track", "benchmark")
_SPECIAL = frozenset(
    {"help", "checks", "version", "settings", "cfg", "copy-cfg", "login", "logout", "solutions"}
)
_KEYS = ("model", "batch", "imgsz", "epochs", "project", "device")

_OPTIONS = {
    "--weights": "weights",
    "--cfg": "cfg",
    "--conf-file": "cfg",
    "--batch-size": "batch",
    "--imgsz": "imgsz",
    "--img-size": "imgsz",
    "--epochs": "epochs",
    "--project": "project",
    "--device": "device",
}
_SHORTEST = len("--img")
"""argparse takes any beginning of an option: people write --img and --batch."""
_SIGNS = ("--weights", "--cfg", "--hyp", "--img")
"""Options by which such a script is told from the many others that are called train.py."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = re.compile(r"\.(?:pt|pth|ya?ml|torchscript|onnx|engine)$")
_SAVED = re.compile(r"(?:last|best|epoch[0-9]*)")
"""Weights of an earlier run: which model they are is not in their name."""
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")
_AUTO = re.compile(r"-1|0?\.[0-9]{1,4}|auto(?:batch)?|None|none|")
"""A batch that the training finds by itself, or takes from elsewhere."""
_SIZES = re.compile(r"[\[(]?\s*([1-9][0-9]{0,5})(?:\s*[,x]\s*([1-9][0-9]{0,5}))?\s*[\])]?")
_DEVICES = re.compile(r"(?:cuda:|gpu:)?(?:-1|[0-9]{1,4})")


@dataclass(slots=True)
class _Values:
    """Values of a command line by key, and how many of them could not be taken."""

    given: dict[str, str] = field(default_factory=dict)
    refused: int = 0

    def name(self, key: str) -> str:
        value = self.given.get(key, "").strip("'\"").rstrip("/").rpartition("/")[2]
        return self._taken(value, fits=bool(_NAME.fullmatch(value)) or not value)

    def model(self, key: str) -> str:
        value = self.given.get(key, "")
        if "://" in value:
            # An address may hold a key, and its last word is none of a model.
            return self._taken(value, fits=False)
        stem = _SUFFIX.sub("", self.name(key))
        return "" if _SAVED.fullmatch(stem) else stem

    def number(self, key: str) -> str:
        value = self.given.get(key, "").strip()
        automatic = key == "batch" and _AUTO.fullmatch(value) is not None
        if automatic or not value:
            return ""
        return self._taken(value, fits=_NUMBER.fullmatch(value) is not None)

    def size(self) -> str:
        """Side of an image in pixels; of a rectangle the longer one, as ultralytics trains."""
        value = self.given.get("imgsz", "").strip()
        match = _SIZES.fullmatch(value)
        if match is None:
            return self._taken(value, fits=not value)
        return str(max(int(match[1]), int(match[2] or 0)))

    def devices(self) -> int | None:
        """How many cards are asked for; None where that is not said."""
        value = self.given.get("device", "").strip().strip("[]()").replace(" ", "")
        if value in ("", "None", "none", "cuda", "auto"):
            return None
        if value in ("cpu", "mps"):
            return 0
        names = [item for item in value.split(",") if item]
        if len(names) > MAX_DEVICES or not all(_DEVICES.fullmatch(item) for item in names):
            self.refused += 1
            return None
        return len(names)

    def _taken(self, value: str, *, fits: bool) -> str:
        if fits:
            return value
        self.refused += 1
        return ""


def yolo_command(arguments: Sequence[str]) -> YoloCommand | None:
    """The YOLO training that a command line starts, or None.

    Args:
        arguments: the command line, the program first.
    """
    words = arguments[: MAX_LAUNCHER_WORDS + MAX_WORDS]
    for program, own in _programs(words):
        name = program.rpartition("/")[2]
        command = None
        if name in _ULTRALYTICS or (name == "gpuwarden" and own[:1] == ["train"]):
            command = _ultralytics(own)
        elif name in _SCRIPTS:
            command = _script(program, own)
        if command is not None:
            return command
    return None


def _programs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """What a command line may run, with its own words: more than one behind a launcher.

    Options of launchers take values or do not: which word is the program is not known for sure, so
    each that looks like one is tried.
    """
    if not words:
        return
    head = words[0].rpartition("/")[2]
    if _PYTHON.fullmatch(head):
        program = python_program(words)
        name = program.module or program.script
        if program.package in _LAUNCHER_MODULES or program.name in _LAUNCHERS:
            yield from _launched(program.arguments)
        elif name:
            yield (program.package or name) if program.module else name, list(program.arguments)
    elif head in _LAUNCHERS:
        yield from _launched(words[1:])
    else:
        yield words[0], list(words[1:])


def _launched(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for at, word in enumerate(words[:MAX_LAUNCHER_WORDS]):
        name = word.rpartition("/")[2]
        if _PYTHON.fullmatch(name):
            yield from _programs(words[at:])
        elif name in _ULTRALYTICS or name in _SCRIPTS or name == "gpuwarden":
            yield word, list(words[at + 1 :])


# ---------------------------------------------------------------------------------------------
# yolo [TASK] [MODE] KEY=VALUE ...


def _ultralytics(words: Sequence[str]) -> YoloCommand | None:
    values, mode = _Values(), ""
    joined = _joined(words)
    if not joined:
        return None
    for word in joined:
        plain = word.removeprefix("--").removesuffix(",")
        key, separator, value = plain.partition("=")
        if not separator and plain in _MODES:
            mode = plain
        elif separator and key == "mode":
            mode = value
        elif separator and key in _KEYS:
            values.given[key] = value
        elif not separator and plain.lstrip("-") in _SPECIAL:
            return None
    # Without a mode ultralytics trains; but then something must show that this is its program.
    if mode != "train" and (mode or not values.given):
        return None
    return _command(values, values.model("model"), framework="ultralytics")


def _joined(words: Sequence[str]) -> list[str]:
    """Words with the spaces around `=` taken away, as ultralytics does it."""
    found: list[str] = []
    waits = False
    for at, word in enumerate(words):
        if found and (waits or (word.startswith("=") and "=" not in found[-1])):
            found[-1] += word
        else:
            found.append(word)
        after = "".join(words[at + 1 : at + 2])
        waits = word.endswith("=") and "=" not in word[:-1] and "=" not in after
    return found


# ---------------------------------------------------------------------------------------------
# train.py --OPTION VALUE ...


def _script(path: str, words: Sequence[str]) -> YoloCommand | None:
    values = _Values()
    signs = "yolo" in path.lower()
    for at, word in enumerate(words):
        option, separator, value = word.partition("=")
        if not separator:
            value = "".join(words[at + 1 : at + 2])
        signs = signs or option.startswith(_SIGNS) or _is_data(option, value)
        key = _option(option)
        if key is not None and not value.startswith("--"):
            values.given[key] = value
    if not signs or not values.given:
        return None
    # A configuration says what the model is; weights beside it are what it begins with.
    model = values.model("cfg") or values.model("weights")
    return _command(values, model, framework="torch")


def _is_data(option: str, value: str) -> bool:
    """Whether an option names a dataset as these scripts do, by a file of YAML."""
    return option == "--data" and value.endswith((".yaml", ".yml"))


def _option(word: str) -> str | None:
    """The key of an option, which may be cut short."""
    if word in _OPTIONS:
        return _OPTIONS[word]
    if len(word) < _SHORTEST or not word.startswith("--"):
        return None
    keys = {key for option, key in _OPTIONS.items() if option.startswith(word)}
    return keys.pop() if len(keys) == 1 else None


def _command(values: _Values, model: str, *, framework: str) -> YoloCommand:
    command = YoloCommand(
        model=model,
        batch=values.number("batch"),
        imgsz=values.size(),
        epochs=values.number("epochs"),
        project=values.name("project"),
        devices=values.devices(),
        framework=framework,
    )
    return replace(command, refused=values.refused)
