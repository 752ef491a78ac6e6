"""A training in a process of its own, for notebooks.

A kernel lives on when a training is over, and what torch has allocated lives on with it: the card
stays full for whoever comes next. A child process gives everything back.
"""

from __future__ import annotations

import codecs
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.errors import GpuwardenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.trainer.settings import TrainSettings

log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None))


class TrainingFailed(GpuwardenError):
    """The child process ended by a fault; what it said is above."""


def in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None


def obstacle(model: Any, trainer: type | None, words: Mapping[str, Any]) -> str | None:
    """Why a training cannot be handed to another process; None if it can.

    Args:
        model: an `ultralytics.YOLO`.
        trainer: class given to `model.train`.
        words: given to it.
    """
    if trainer is not None and (
        trainer.__module__ == "__main__" or "<locals>" in trainer.__qualname__
    ):
        return f"the trainer class {trainer.__name__} is defined in this notebook"
    for name, value in words.items():
        items = value if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(item, (*_PLAIN, Path)) for item in items):
            return f"{name}= is a {type(value).__name__}"
    if _own_callbacks(model):
        return "callbacks were added to the model"
    if not model.overrides.get("model"):
        return "the model has no file"
    return None


def _own_callbacks(model: Any) -> bool:
    module: Any = importlib.import_module("ultralytics.utils.callbacks")
    default = module.get_default_callbacks()
    return any(
        function not in default.get(event, [])
        for event, functions in model.callbacks.items()
        for function in functions
    )


def command(
    model: Any, trainer: type | None, settings: TrainSettings, words: Mapping[str, Any]
) -> list[str]:
    """The `gpuwarden train` that does what `model.train` would.

    Args:
        model: an `ultralytics.YOLO`.
        trainer: class given to `model.train`.
        settings: gpuwarden's own choices.
        words: given to `model.train`.
    """
    said = {name: value for name, value in words.items() if value is not None}
    said.setdefault("task", model.task)
    said["model"] = getattr(model, "ckpt_path", None) or model.overrides["model"]
    for name in ("pretrained", "data"):
        if model.overrides.get(name) is not None:
            said.setdefault(name, model.overrides[name])
    options = list(settings.as_options())
    if trainer is not None:
        options.append(f"--trainer={trainer.__module__}:{trainer.__qualname__}")
    return [
        sys.executable,
        "-m",
        "gpuwarden",
        "train",
        *options,
        "--with-parent",
        *(f"{name}={_text(value)}" for name, value in said.items()),
    ]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return repr([str(item) if isinstance(item, Path) else item for item in value])
    return str(value)


def run(arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """Train in a child process, whose output appears here as it comes.

    An interrupt (the kernel's stop button) asks the training to save and leave, and waits for it.

    Args:
        arguments: see `command`.

    Returns:
        Exit status, and what the training has left: see `--result`.
    """
    with tempfile.TemporaryDirectory(prefix="gpuwarden-") as folder:
        result = Path(folder) / "result.json"
        at = arguments.index("--with-parent")
        with subprocess.Popen(
            [*arguments[:at], f"--result={result}", *arguments[at:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a kernel's interrupt goes to its whole group
        ) as process:
            code = _follow(process)
        try:
            return code, json.loads(result.read_bytes())
        except (OSError, ValueError):
            return code, {}


def _follow(process: subprocess.Popen[bytes]) -> int:
    if process.stdout is None:
        raise ValueError("its output is not piped")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ended = False
    while not ended:
        try:
            part = os.read(process.stdout.fileno(), 1 << 16)
            sys.stdout.write(decoder.decode(part, final=not part))
            sys.stdout.flush()
            ended = not part
        except KeyboardInterrupt:
            log.warning("interrupted: the training saves its state and leaves")
            process.terminate()
    return process.wait()


def take_over(model: Any, result: Mapping[str, Any]) -> Any:
    """Give the model of this process what the child has learnt, as ultralytics does after DDP.

    Args:
        model: an `ultralytics.YOLO`.
        result: of `run`.

    Returns:
        The metrics of the best weights: names to numbers; None if nothing was trained now.
    """
    best = Path(result.get("best") or "")
    if not best.is_file():
        return None
    trained = type(model)(str(best), task=model.task)
    for name in ("model", "ckpt", "ckpt_path", "overrides", "cfg", "model_name"):
        if hasattr(trained, name):
            setattr(model, name, getattr(trained, name))
    return result.get("metrics")


def check(code: int, result: Mapping[str, Any]) -> None:
    """Raise what became of a training that has failed.

    Args:
        code: its exit status.
        result: of `run`.

    Raises:
        TrainingFailed: it ended by a fault or was refused.
    """
    leaves = (job_files.EXIT_REQUEUE, job_files.EXIT_HOLD, job_files.EXIT_NOT_RESUMABLE)
    if code not in (job_files.EXIT_DONE, *leaves):
        reason = result.get("reason") or "see what it said above"
        raise TrainingFailed(f"the training ended with status {code}: {reason}")
