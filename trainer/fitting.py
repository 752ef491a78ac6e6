"""Whether a training fits on its card, by the estimates that `gpuwarden estimate` gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwarden import estimate_tables, estimates
from gpuwarden.estimates import GIB, Unknown, Workload

_CLASSES = 80
"""Of COCO, for a data set that is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A training as the estimates know it.

    Attributes:
        model: name without folder and suffix.
        task: of ultralytics.
        batch: images per step over all cards.
        imgsz: pixels of the images' sides.
        amp: mixed precision.
        gpus: cards that share the batch.
        classes: of the data set; None: not known.
    """

    model: str
    task: str | None = None
    batch: int
    imgsz: int
    amp: bool = True
    gpus: int = 1
    classes: int | None = None

    @classmethod
    def of(cls, trainer: Any, *, gpus: int = 1) -> Need:
        """That of ultralytics' trainer, as far as it has been set up."""
        args = trainer.args
        data = getattr(trainer, "data", None)
        size = max(args.imgsz) if isinstance(args.imgsz, list | tuple) else args.imgsz
        amp = getattr(trainer, "amp", getattr(args, "amp", True))
        return cls(
            model=Path(str(args.model)).stem,
            task=getattr(args, "task", None),
            batch=int(trainer.batch_size),
            imgsz=int(size),
            amp=bool(amp) and amp != "fp32",
            gpus=gpus,
            classes=len(data["names"]) if isinstance(data, dict) and data.get("names") else None,
        )


def expected_bytes(need: Need) -> float | None:
    """Memory of each card that it will probably take; None for a model that is in no table."""
    found = estimate_tables.needed(
        need.model,
        need.batch,
        imgsz=need.imgsz,
        amp=need.amp,
        gpus=need.gpus,
        task=need.task,
        classes=need.classes,
    )
    return None if isinstance(found, Unknown) else found.total.expected


def largest_batch(need: Need, memory: float) -> int | None:
    """The largest batch that is sure to fit; None for a model that is in no table.

    Args:
        need: whose batch does not matter.
        memory: bytes that each card has for it.
    """
    model = estimate_tables.find_model(need.model, need.task, suggest=False)
    if isinstance(model, Unknown):
        return None
    try:
        workload = Workload(
            batch=max(need.batch, need.gpus),
            imgsz=need.imgsz,
            amp=need.amp,
            gpus=need.gpus,
            classes=_CLASSES if need.classes is None else need.classes,
        )
    except ValueError:
        return None
    return estimates.largest_batch(
        model, memory, workload=workload, constants=estimate_tables.tables().constants
    )


def advice(need: Need, card: float) -> str | None:
    """What to say of a training that will probably not fit.

    Args:
        need: of the training.
        card: bytes of the smallest card.
    """
    expected = expected_bytes(need)
    if expected is None or expected <= card:
        return None
    largest = largest_batch(need, card)
    text = (
        f"batch={need.batch} at imgsz={need.imgsz} will take about {expected / GIB:.1f} GiB of the "
        f"card's {card / GIB:.1f}"
    )
    return f"{text}: batch={largest} is sure to fit" if largest else text
