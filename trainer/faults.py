"""Faults that a training can be told more about than their traceback does."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import Any

from gpuwarden import job_files
from gpuwarden.errors import GpuwardenError, PermanentError
from gpuwarden.trainer import fitting
from gpuwarden.trainer.fitting import Need

GIB = 1 << 30
_NO_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_WORKER_KILLED = re.compile(r"DataLoader worker .*(killed by signal: Killed|exited unexpectedly)")
_WRITE_FAILED = re.compile(r"PytorchStreamWriter failed writing file|unexpected pos \d+ vs \d+")
"""Torch's words for a disk that takes no more."""
_NO_SHARED_MEMORY = re.compile(r"[Bb]us error|shared memory|</torch_\d+")


class OutOfMemory(PermanentError):
    """The batch does not fit on the card; another attempt would end the same way.

    Args:
        message: what is known.
        alone: whether the training has this process only. To a launcher a rank with the status of
            one that left would mean that all leave; that of a fault means that all end.
    """

    def __init__(self, message: str, *, alone: bool) -> None:
        super().__init__(message)
        self.exit_code = job_files.EXIT_HOLD if alone else job_files.EXIT_FAULT


class DiskFull(PermanentError):
    """The disk that the run writes to has no room."""


class LoaderWorkerLost(PermanentError):
    """A loader worker was killed from outside."""


def explained(
    error: BaseException, trainer: Any = None, *, alone: bool = True
) -> GpuwardenError | None:
    """What is known about a fault, with its remedy; None for one that speaks for itself.

    Args:
        error: that ended the training.
        trainer: None if there was none yet.
        alone: see `OutOfMemory`.
    """
    if not isinstance(error, RuntimeError | MemoryError | OSError):
        return None
    said = str(error)
    if _NO_SHARED_MEMORY.search(said):
        return LoaderWorkerLost(
            "loader workers found no room in /dev/shm: give the container more (docker --shm-size, "
            "an emptyDir of medium Memory), or use fewer workers="
        )
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _WRITE_FAILED.search(said):
        return DiskFull(_no_room(said, trainer))
    if _WORKER_KILLED.search(said):
        return LoaderWorkerLost(
            f"{' '.join(said.split())[:200]}. Mostly the kernel did it for want of memory: use "
            "fewer workers=, cache=disk or none, or give the job more memory"
        )
    if _NO_MEMORY.search(said):
        return OutOfMemory(_no_memory(said, trainer), alone=alone)
    return None


def _no_room(said: str, trainer: Any) -> str:
    text = " ".join(said.split())[:200]
    folder = getattr(trainer, "save_dir", None)
    if folder is not None:
        with contextlib.suppress(OSError):
            about = os.statvfs(folder)
            text += f"; {folder} has {about.f_bavail * about.f_frsize / GIB:.2f} GiB left"
    return (
        f"{text}. States and checkpoints of before are whole: make room, or set fewer to --keep, "
        "and start again with the same words"
    )


def _no_memory(said: str, trainer: Any) -> str:
    first = said.split("\n", maxsplit=1)[0].partition(". ")[0][:200]
    if trainer is None:
        return f"{first}: use a smaller batch="
    args, batch = trainer.args, trainer.batch_size
    text = f"{first}: batch={batch} at imgsz={args.imgsz} does not fit"
    device = getattr(trainer, "device", None)
    card = '"NAME OF THE CARD"'
    if device is not None and device.type == "cuda":
        import torch

        about = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.max_memory_reserved(device)
        others = max(0, total - free - torch.cuda.memory_reserved(device))
        text += (
            f": of {total / GIB:.1f} GiB this training had up to {own / GIB:.1f}, others and the "
            f"driver {others / GIB:.1f}"
        )
        card = f'"{about.name}"'
        largest = _largest(trainer, total - others)
        if largest:
            text += f"; by the estimates batch={largest} is sure to fit"
    return (
        f"{text}. States saved before stay, but another attempt would end the same way: use a "
        f"smaller batch=, which `gpuwarden estimate "
        f"model={args.model} batch={batch} imgsz={args.imgsz} gpu={card}` finds, and --on-mismatch "
        "epoch to go on with it"
    )


def _largest(trainer: Any, memory: float) -> int | None:
    try:
        return fitting.largest_batch(Need.of(trainer), memory)
    except (AttributeError, TypeError, ValueError):
        return None


def status_of(error: BaseException, *, alone: bool = True) -> int:
    """Exit status of an attempt that an error has ended.

    Args:
        error: as it was raised.
        alone: see `OutOfMemory`.
    """
    known = error if isinstance(error, GpuwardenError) else explained(error, alone=alone)
    return known.exit_code if known is not None else job_files.EXIT_FAULT
