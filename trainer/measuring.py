"""Figures of a training that cost something to look up: once per written status."""

from __future__ import annotations

import importlib
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.trainer.status import StatusBoard


def publish(trainer: Any, board: StatusBoard, *, gradient_norm: Any = None) -> None:
    """Look them up and hand them to the board.

    Args:
        trainer: ultralytics' trainer, set up.
        board: of the attempt.
        gradient_norm: of the newest optimizer step, a tensor; None where it is not asked for.
    """
    import torch

    losses = trainer.label_loss_items(trainer.tloss) if trainer.tloss else {}
    board.figures(
        losses={name.rpartition("/")[2]: value for name, value in losses.items()},
        lr={f"pg{at}": group["lr"] for at, group in enumerate(trainer.optimizer.param_groups)},
    )
    board.set(loader_workers=int(getattr(trainer.train_loader, "num_workers", 0)))
    if gradient_norm is not None and math.isfinite(norm := float(gradient_norm)):
        board.set(gradient_norm=norm)
    if trainer.scaler.is_enabled():
        board.set(amp_scale=float(trainer.scaler.get_scale()))
    if trainer.device.type == "cuda":
        board.set(
            gpu_memory_peak=torch.cuda.max_memory_allocated(trainer.device),
            gpu_memory_allocated=torch.cuda.memory_allocated(trainer.device),
            gpu_memory_reserved=torch.cuda.memory_reserved(trainer.device),
        )


def nonfinite(mean: Any, losses: Sequence[Any]) -> int:
    """How many of some batches had a loss that is no number.

    Args:
        mean: running mean of the epoch, which stays no number once a loss was none; None: not
            known. As long as it is one, no other is looked at.
        losses: components of each batch's loss; the epoch's.
    """
    if mean is not None and _is_finite(mean):
        return 0
    return sum(not _is_finite(items) for items in losses)


def _is_finite(items: Any) -> bool:
    """Whether all components are numbers: a mapping of tensors, or one tensor as in older releases.

    Reads them: torch's own test would compute with several kernels what one look tells.
    """
    for part in items.values() if isinstance(items, dict) else [items]:
        values = part.reshape(-1).tolist() if hasattr(part, "reshape") else [part]
        if not all(map(math.isfinite, values)):
            return False
    return True


def metrics(trainer: Any) -> dict[str, Any]:
    """What the newest validation has measured, losses and rates apart."""
    others = ("train/", "val/", "lr/")
    return {
        name: value
        for name, value in (trainer.metrics or {}).items()
        if not name.startswith(others)
    }


@contextmanager
def clipping() -> Iterator[list[Any]]:
    """Within, the norms that gradients are clipped by are kept; nothing is computed for it.

    Ultralytics clips gradients in each step and drops the norm that torch gives back.
    """
    module: Any = importlib.import_module("torch.nn.utils")
    original = module.clip_grad_norm_
    norms: list[Any] = []

    def keep(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        norms.append(norm)
        return norm

    module.clip_grad_norm_ = keep
    try:
        yield norms
    finally:
        module.clip_grad_norm_ = original
