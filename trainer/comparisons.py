"""Whether a state belongs to the training that is to continue it, and what else can be made of it.

A state is continued bit for bit only in the very training that it was taken from. Where something
has changed, `--on-mismatch` says what to do: refuse, go on from the beginning of the state's epoch,
or begin anew from its weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer.states import Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.trainer.runs import RunRecord

log = logging.getLogger(__name__)

REFUSE, EPOCH, WEIGHTS = "refuse", "epoch", "weights"
EXACT, EXTEND = "exact", "extend"
CHOICES = (REFUSE, EPOCH, WEIGHTS)
EXTENDABLE = frozenset({"epochs", "patience"})
"""Words that may change when a run is given more epochs."""
PATHS = frozenset({"data", "model"})
"""Words whose files may lie elsewhere on another machine: what is in them is compared instead."""
_PLACES = frozenset({"project", "name"})


class Mismatch(InvalidInput):
    """The state is of a training that differs from this one."""


def facts(trainer: Any) -> dict[str, Any]:
    """What a manifest keeps of a training that has been set up, to know it again by.

    Returns:
        `seed`, `optimizer` (its class), `classes` and `model` (digests; empty where not known).
    """
    from gpuwarden.trainer import captures

    data = trainer.data if isinstance(getattr(trainer, "data", None), dict) else {}
    model = captures.unwrapped(trainer.model)
    layers = getattr(model, "yaml", None)
    return {
        "seed": int(trainer.args.seed),
        "optimizer": type(trainer.optimizer).__name__,
        "classes": _digest(data.get("names")),
        "model": _digest(
            {name: part for name, part in layers.items() if name != "yaml_file"}
            if isinstance(layers, dict)
            else None
        ),
    }


def _digest(value: Any) -> str:
    if not value:
        return ""
    # Objects of the user's own may have no stable text; their kind must do.
    text = json.dumps(value, skipkeys=True, default=lambda part: type(part).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def draft(trainer: Any, record: RunRecord, *, reason: str, now: float, world_size: int) -> Manifest:
    """The manifest of a state that is about to be taken.

    Args:
        trainer: between two batches, or in validation.
        record: of the run.
        reason: what causes the save.
        now: Unix time.
        world_size: number of ranks.
    """
    from gpuwarden.trainer import environments, resume

    loop = trainer.gpuwarden
    position, batches = loop.position, len(trainer.train_loader)
    return Manifest(
        lineage=record.lineage,
        epoch=position.epoch,
        batch=position.batch,
        validated=position.validated,
        step=position.epoch * batches + position.batch,
        batches=batches,
        epochs=trainer.epochs,
        batch_size=trainer.batch_size,
        dataset=loop.dataset,
        order=loop.order,
        exact=loop.mode == resume.EXACT,
        reason=reason,
        time=now,
        software=environments.software(),
        words=record.words,
        world_size=world_size,
        extended=record.extended,
        fitness=None if trainer.fitness is None else float(trainer.fitness),
        **facts(trainer),
    )


def differences(
    manifest: Manifest,
    trainer: Any,
    *,
    dataset: str,
    order: str,
    words: Mapping[str, str],
    extending: bool = False,
) -> list[str]:
    """What of this training is not that of the state; the numbers of GPUs and workers may differ.

    Args:
        manifest: of the state.
        trainer: set up.
        dataset: its fingerprint, see `orders.fingerprint`.
        order: the name of its data order; empty where none is kept.
        words: the user's, as the run's record has them.
        extending: the run is being given more epochs.
    """
    wrong = []
    if manifest.epochs != trainer.epochs and not trainer.args.time and not extending:
        wrong.append(f"epochs={trainer.epochs} instead of {manifest.epochs}")
    if manifest.batch_size != trainer.batch_size:
        wrong.append(f"batch={trainer.batch_size} instead of {manifest.batch_size}")
    elif manifest.batches != len(trainer.train_loader):
        wrong.append(f"{len(trainer.train_loader)} batches an epoch instead of {manifest.batches}")
    if manifest.dataset and dataset and manifest.dataset != dataset:
        wrong.append("the data set's images or labels have changed")
    if manifest.exact and order and manifest.order != order:
        kind, was = order.rpartition("-")[0], manifest.order.rpartition("-")[0]
        newer = f": only what wrote it ({manifest.writer}) has that order" if kind == was else ""
        wrong.append(f"data order {order} instead of {manifest.order}{newer}")
    named = {
        "seed": "seed={new} instead of {old}",
        "optimizer": "optimizer {new} instead of {old}",
        "classes": "the data set's classes have changed",
        "model": "the model's layers have changed",
    }
    compared = set()
    for name, new in facts(trainer).items():
        old = getattr(manifest, name)
        if old and new and name == "model":
            compared.add("model")
        if old not in (None, "") and new not in ("", old):
            wrong.append(named[name].format(new=new, old=old))
    told = "; ".join(wrong)
    if manifest.dataset and dataset:
        compared.add("data")
    ignored = _PLACES | compared | (EXTENDABLE if extending else frozenset())
    wrong += [
        difference
        for difference in word_differences(words, manifest.words, ignore=ignored)
        if manifest.words and difference not in told
    ]
    return wrong


def kind_for(
    manifest: Manifest,
    trainer: Any,
    *,
    dataset: str,
    order: str,
    record: RunRecord,
    on_mismatch: str,
) -> str:
    """What is to be made of a state in this training.

    Args:
        manifest: of the state.
        trainer: set up.
        dataset: its fingerprint, see `orders.fingerprint`.
        order: the name of its data order.
        record: of the run, with the words of this start.
        on_mismatch: one of `CHOICES`.

    Raises:
        Mismatch: naming every difference.
    """
    extending = record.extended is not None and record.extended != manifest.extended
    wrong = differences(
        manifest, trainer, dataset=dataset, order=order, words=record.words, extending=extending
    )
    complete = manifest.validated and manifest.epoch + 1 >= trainer.epochs
    if not wrong:
        return EXTEND if extending and not complete else EXACT
    if on_mismatch == REFUSE:
        raise refusal(manifest, wrong)
    if on_mismatch == EPOCH and manifest.epoch + (manifest.batch >= manifest.batches) >= (
        trainer.epochs
    ):
        raise Mismatch(
            f"the state of step {manifest.step} is of another training ({'; '.join(wrong)}), and "
            f"all of its {trainer.epochs} epochs are done: give it more with --extend-epochs, or "
            "begin a new training from its weights with --on-mismatch weights"
        )
    log.warning(
        "the state of step %d is of another training (%s): %s, as --on-mismatch says",
        manifest.step,
        "; ".join(wrong),
        "its weights begin this one" if on_mismatch == WEIGHTS else "its epoch begins again",
    )
    return on_mismatch


def word_differences(
    now: Mapping[str, str], then: Mapping[str, str], *, ignore: frozenset[str]
) -> list[str]:
    """Words that two starts of a run do not share.

    Args:
        now: words of this start.
        then: of an earlier one.
        ignore: names that do not count.
    """
    names = sorted((set(now) | set(then)) - ignore)
    return [
        f"{name}={now.get(name, '(default)')} instead of {then.get(name, '(default)')}"
        for name in names
        if now.get(name) != then.get(name)
    ]


def refusal(manifest: Manifest, wrong: list[str]) -> Mismatch:
    """Refuses to continue a state in a training that is not its own, and says what can be done."""
    return Mismatch(
        f"the state of step {manifest.step} does not fit this training: {'; '.join(wrong)}. "
        "Put it back as it was to continue; or go on all the same with --on-mismatch epoch (from "
        "the beginning of the state's epoch) or --on-mismatch weights (from its weights alone); "
        "or start anew with --resume never"
    )


def from_epoch_start(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """A state of the same progress at the beginning of an epoch.

    What it has learnt is kept. An epoch in whose middle it was taken is trained on again from its
    first batch; one of which only the validation was missing counts as done.

    Args:
        state: see `captures.capture`.
        batches: batches per epoch when it was taken.
    """
    done = state["validated"] or state["batch"] >= batches
    return {
        **state,
        "epoch": state["epoch"] + 1 if done else state["epoch"],
        "batch": 0,
        "validated": False,
        "gradients": {},
        "last_optimizer_step": -1,
    }


@dataclass(frozen=True, slots=True)
class Continuation:
    """A state, and what is to be made of it.

    Attributes:
        kind: `exact`, `extend`, `epoch` or `weights`.
        state: see `captures.capture`.
        batches: batches per epoch when it was taken.
    """

    kind: str
    state: dict[str, Any]
    batches: int


def restore(trainer: Any, found: Continuation) -> dict[str, Any] | None:
    """Give a trainer that has been set up what it continues.

    Args:
        trainer: set up, not yet training.
        found: the state.

    Returns:
        The state that the loop is to be brought to; None to begin at the beginning.

    Raises:
        KeyError, RuntimeError, ValueError: the weights are of another model.
    """
    from gpuwarden.trainer import captures

    if found.kind == EXACT:
        captures.restore(trainer, found.state)
        _continue_rates(trainer)
        return found.state
    if found.kind == EXTEND:
        state = _extended(trainer, found.state)
        captures.restore(trainer, state)
        _continue_rates(trainer)
        criterion: Any = getattr(captures.unwrapped(trainer.model), "criterion", None)
        if found.state["validated"] and hasattr(criterion, "update"):
            criterion.update()  # as each epoch's end does, and the last one's did not
        return state
    if found.kind == EPOCH:
        state = from_epoch_start(found.state, found.batches)
        _restore_loosely(trainer, state)
        return state
    taken, own = take_weights(trainer, found.state)
    if not taken:
        raise ValueError("none of its weights fits this model")
    log.info("begins anew from weights of the run's newest state: %d of %d tensors fit", taken, own)
    return None


def _continue_rates(trainer: Any) -> None:
    """Let the schedule begin from the rates of the run's own optimizer, not of one just built."""
    rates = [group["initial_lr"] for group in trainer.optimizer.param_groups]
    trainer.scheduler.base_lrs = rates


def _restore_loosely(trainer: Any, state: dict[str, Any]) -> None:
    """Give a trainer what it can use of a state of another training; its settings stay its own.

    Weights, EMA, moments of an optimizer of the same kind, loss scale and results so far are taken
    over; learning rates, patience and batch size are those of the new words.

    Args:
        trainer: set up.
        state: from `from_epoch_start`.

    Raises:
        RuntimeError: the weights are of another model.
    """
    from gpuwarden.trainer import captures

    model = captures.unwrapped(trainer.model)
    model.load_state_dict(state["model"])
    trainer.ema.ema.load_state_dict(state["ema"])
    trainer.ema.updates = state["updates"]
    _restore_moments(trainer, state["optimizer"])
    trainer.scaler.load_state_dict(state["scaler"])
    trainer.best_fitness = state["best_fitness"]
    trainer.stopper.best_fitness = state["stopper"]["best_fitness"]
    trainer.stopper.best_epoch = state["epoch"]  # patience begins anew with the new words
    if state["results"] is not None:
        trainer.csv.write_text(state["results"], "utf-8")
    if state["criterion"]:
        model.criterion = model.init_criterion()
        for name, value in state["criterion"].items():
            setattr(model.criterion, name, value)


def _restore_moments(trainer: Any, saved: dict[str, Any]) -> None:
    own = trainer.optimizer.state_dict()
    same = [len(group["params"]) for group in own["param_groups"]] == [
        len(group["params"]) for group in saved["param_groups"]
    ]
    if not same:
        log.warning("the optimizer begins anew: its groups of parameters have changed")
        return
    kept = {**own, "state": saved["state"]}
    try:
        trainer.optimizer.load_state_dict(kept)
        trainer.optimizer.zero_grad()
    except (KeyError, ValueError, RuntimeError) as error:
        trainer.optimizer.load_state_dict(own)
        log.warning("the optimizer begins anew: %s", error)


def take_weights(trainer: Any, state: dict[str, Any]) -> tuple[int, int]:
    """Begin a new training from a state's averaged weights, as far as their shapes fit.

    Args:
        trainer: set up.
        state: of any training.

    Returns:
        How many tensors were taken over, and how many the model has.
    """
    import torch

    from gpuwarden.trainer import captures

    model = captures.unwrapped(trainer.model)
    own = model.state_dict()
    fitting = {
        name: value
        for name, value in state["ema"].items()
        if name in own and own[name].shape == value.shape
    }
    with torch.no_grad():
        model.load_state_dict(fitting, strict=False)
        trainer.ema.ema.load_state_dict(model.state_dict())
    return len(fitting), len(own)


def _extended(trainer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A finished run's last state as the beginning of further epochs."""
    stopper = {**state["stopper"], "patience": trainer.stopper.patience}
    if not state["validated"]:
        return {**state, "stopper": stopper}
    epoch = state["epoch"] + 1
    stopper["best_epoch"] = max(state["stopper"]["best_epoch"], epoch)  # it counts from 1
    stopper["possible_stop"] = False
    return {**state, "epoch": epoch, "batch": 0, "validated": False, "stopper": stopper}
