"""All that a training must have back to go on as if it had never stopped.

A capture is a dictionary of CPU tensors and plain values (what `torch.load(weights_only=True)`
accepts), copied so that training may go on while it is written.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpuwarden.trainer import orders
from gpuwarden.trainer.states import NotStorable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.trainer.ranks import Place
    from gpuwarden.trainer.states import Position

log = logging.getLogger(__name__)

_CRITERION = ("updates", "o2m", "o2o")
"""Counters of the end-to-end loss, which weighs its two heads by progress."""


def unwrapped(model: Any) -> Any:
    """The module inside torch.compile's and DDP's wrappers."""
    from ultralytics.utils.torch_utils import unwrap_model

    return unwrap_model(model)


def plain(value: Any) -> Any:
    """A copy made of CPU tensors, numbers, strings, None, lists, tuples and dictionaries.

    Raises:
        NotStorable: naming the type.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.generic):  # before float: numpy's float64 is one
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return value.item() if value.ndim == 0 else torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    raise NotStorable(f"cannot store a {type(value).__module__}.{type(value).__qualname__}")


def randomness() -> dict[str, Any]:
    """State of every generator of this process, storable."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": plain(random.getstate()),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_randomness(state: dict[str, Any]) -> None:
    """Put back what `randomness` gave."""
    name, keys, position, has_gauss, gauss = state["numpy"]
    orders.set_randomness(
        (
            tuple(state["python"]),
            (name, keys.numpy().astype(np.uint32), position, has_gauss, gauss),
            state["torch"],
        )
    )
    if state["cuda"] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def after_last_batch(trainer: Any) -> dict[str, Any]:
    """What an epoch's end changes before its validation: part of a state from before that end.

    Resuming such a state goes through the end of the epoch again, where ultralytics moves the
    end-to-end loss's weights on, and validation draws from the generators.
    """
    return {"random": randomness(), "criterion": _criterion(trainer)}


def _criterion(trainer: Any) -> dict[str, Any]:
    criterion = getattr(unwrapped(trainer.model), "criterion", None)
    return {
        name: plain(getattr(criterion, name))
        for name in _CRITERION
        if criterion is not None and hasattr(criterion, name)
    }


def capture(
    trainer: Any,
    position: Position,
    *,
    last_optimizer_step: int,
    current_step: int,
    earlier: dict[str, Any] | None = None,
    stream: dict[str, Any] | None = None,
    elapsed: float = 0.0,
    peers: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Copy the training's whole state.

    Args:
        trainer: ultralytics' trainer, between two batches or in validation.
        position: where in the training it is.
        last_optimizer_step: global batch number of the last optimizer step, -1 for none.
        current_step: global batch number of the last batch; gradients are kept if it is later.
        earlier: see `after_last_batch`, if the training has moved on from `position` since.
        stream: state of ultralytics' own data order, or None.
        elapsed: seconds trained so far, for the time column of results.csv.
        peers: `peer_part` of every other rank, in order.

    Raises:
        NotStorable: see `plain`.
    """
    model = unwrapped(trainer.model)
    gradients = {}
    if last_optimizer_step != current_step:
        gradients = {
            name: plain(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
    return {
        "epoch": position.epoch,
        "batch": position.batch,
        "validated": position.validated,
        "model": plain(dict(model.state_dict())),
        "ema": plain(dict(trainer.ema.ema.state_dict())),
        "updates": trainer.ema.updates,
        "optimizer": plain(trainer.optimizer.state_dict()),
        "scaler": plain(trainer.scaler.state_dict()),
        "best_fitness": plain(trainer.best_fitness),
        "fitness": plain(trainer.fitness),
        "stopper": plain(dict(vars(trainer.stopper))),
        "metrics": plain(dict(trainer.metrics or {})),
        "tloss": plain(trainer.tloss),
        "loss_items": plain(trainer.loss_items if hasattr(trainer, "loss_items") else None),
        "loss": plain(trainer.loss),
        "loss_names": list(trainer.loss_names),
        "nan_recovery_attempts": trainer.nan_recovery_attempts,
        "last_optimizer_step": last_optimizer_step,
        "accumulate": trainer.accumulate,
        "gradients": gradients,
        "results": trainer.csv.read_text("utf-8") if trainer.csv.exists() else None,
        **(after_last_batch(trainer) if earlier is None else earlier),
        "stream": stream,
        "elapsed": elapsed,
        "peers": list(peers),
    }


_PEERS_OWN = ("tloss", "loss_items", "loss", "random", "stream")
"""What of a state each rank has for itself, besides its buffers."""


def peer_part(
    trainer: Any,
    *,
    earlier: dict[str, Any] | None = None,
    stream: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a rank other than the first adds to a state; all else is the same on every rank.

    Weights and gradients are: the ranks average them. Buffers are not: each normalises its own
    batches.

    Args:
        trainer: as for `capture`.
        earlier: likewise.
        stream: likewise, of this rank.
    """
    return {
        "buffers": _buffers(unwrapped(trainer.model)),
        "ema_buffers": _buffers(trainer.ema.ema),
        "tloss": plain(trainer.tloss),
        "loss_items": plain(trainer.loss_items if hasattr(trainer, "loss_items") else None),
        "loss": plain(trainer.loss),
        "random": (after_last_batch(trainer) if earlier is None else earlier)["random"],
        "stream": stream,
    }


def _buffers(model: Any) -> dict[str, Any]:
    own = {name for name, _buffer in model.named_buffers()}
    return {name: plain(value) for name, value in model.state_dict().items() if name in own}


def for_rank(state: dict[str, Any], place: Place) -> dict[str, Any]:
    """A state as this rank continues it.

    A state that was written by fewer ranks has no part of this one, which then starts from rank
    0's buffers; what it draws is set apart from the others' by its number.

    Args:
        state: as `capture` made it.
        place: of this rank among those that train now.
    """
    peers, rank = state.get("peers") or [], place.rank
    if place.leads:
        if place.world != len(peers) + 1:
            log.info(
                "goes on with %d process(es) instead of %d: the data come in the same order, but "
                "sums are rounded otherwise",
                place.world,
                len(peers) + 1,
            )
        return state
    if rank > len(peers):
        generator = torch.Generator().manual_seed(rank)
        random_state = {
            **state["random"],
            "python": plain(random.Random(rank).getstate()),  # noqa: S311 -- augmentation
            "torch": generator.get_state(),
        }
        return {**state, "random": random_state, "results": None}
    part = peers[rank - 1]
    return {
        **state,
        **{name: part[name] for name in _PEERS_OWN},
        "results": None,  # rank 0 writes the file
        "model": {**state["model"], **part["buffers"]},
        "ema": {**state["ema"], **part["ema_buffers"]},
    }


def restore(trainer: Any, state: dict[str, Any]) -> None:
    """Give a trainer that has been set up its state back, all but what its loop resets.

    Gradients and generators follow in `restore_live`, right before the next batch.
    """
    model = unwrapped(trainer.model)
    model.load_state_dict(state["model"])
    trainer.ema.ema.load_state_dict(state["ema"])
    trainer.ema.updates = state["updates"]
    groups = trainer.optimizer.param_groups
    for saved, group in zip(state["optimizer"]["param_groups"], groups, strict=True):
        if "fused" in saved:
            saved["fused"] = group.get("fused")  # today's device chooses the kernel
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scaler.load_state_dict(state["scaler"])
    trainer.best_fitness = state["best_fitness"]
    trainer.fitness = state["fitness"]
    trainer.metrics = dict(state["metrics"])
    trainer.nan_recovery_attempts = state["nan_recovery_attempts"]
    vars(trainer.stopper).update(state["stopper"])
    trainer.loss_names = tuple(state["loss_names"])
    # The criterion is made in the first forward pass; a state whose epoch is complete has none.
    if state["criterion"] or getattr(model, "criterion", None) is None:
        model.criterion = model.init_criterion()
        for name, value in state["criterion"].items():
            setattr(model.criterion, name, value)
    if state["results"] is not None:
        trainer.csv.write_text(state["results"], "utf-8")
    restore_losses(trainer, state)


def restore_losses(trainer: Any, state: dict[str, Any]) -> None:
    """Put the running means and the last loss back, on the training's device."""
    device = trainer.device
    for name in ("tloss", "loss_items"):
        items = state[name]
        moved = None if items is None else {key: item.to(device) for key, item in items.items()}
        setattr(trainer, name, moved)
    trainer.loss = None if state["loss"] is None else state["loss"].to(device)


def restore_live(trainer: Any, state: dict[str, Any]) -> None:
    """Put gradients and generators back: the very last thing before the next batch."""
    gradients = state["gradients"]
    for name, parameter in unwrapped(trainer.model).named_parameters():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device).clone()
    restore_randomness(state["random"])


class StandIn:
    """Plays the model while batches of an earlier attempt are passed over: computes nothing.

    Ultralytics' loop then advances its own counters, warm-up and progress by itself.
    """

    def __init__(self, names: list[str], device: Any) -> None:
        self._names, self._device = names, device

    def __call__(self, _batch: Any) -> tuple[Any, dict[str, Any]]:
        """A loss of zero that can be propagated back, and its items."""
        loss = torch.zeros(1, requires_grad=True, device=self._device)
        return loss, {name: torch.zeros((), device=self._device) for name in self._names}


def stand_in_batch() -> dict[str, Any]:
    """A batch for the `StandIn`, with what the progress bar reads."""
    return {"img": torch.zeros(1, 1, 1, 1), "cls": torch.zeros(1), STAND_IN: True}


STAND_IN = "gpuwarden_stand_in"
