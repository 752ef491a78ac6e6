"""What a training should take on each kind of cards: memory, speed, time. Pure.

A profile of the operator's, or one that was learnt here, counts where it fits exactly; elsewhere
the formula of `gpuwarden.estimates` is asked, whose answer is a wider band (docs/estimates.md).
What neither knows stays unknown, with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from gpuwarden import estimate_tables, estimates
from gpuwarden.budget_terms import quantity
from gpuwarden.estimates import Gpu, ModelCosts, Range, Unknown, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.budget_terms import Limit
    from gpuwarden.scheduling.trainings import Training
    from gpuwarden.training_profiles import Profile

START_SECONDS: Final = 900.0
"""For what is no epoch: scanning and caching images, building the model, validating the best."""
MARGIN: Final = 1.1
"""What a time limit allows beyond the upper end of what is expected."""
_ROUNDED_TO: Final = 300.0
_STATE_BYTES: Final = 16
"""Per parameter in a state: weights, their mean, and two moments, in single precision."""
_DISK_BYTES_PER_SECOND: Final = 50e6
_SAVE_SECONDS: Final = 10.0


class Fit(StrEnum):
    """Whether a training has room on a card."""

    YES = "yes"
    TIGHT = "tight"
    """What is expected has room, the upper end of its band has not."""
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of cards.

    Attributes:
        name: by the policy.
        model: by NVML.
        memory: bytes of each card, by the policy.
        count: how many there are.
        allowed: how many of them the team may hold at once.
        price: of an hour of one card, or None.
    """

    name: str
    model: str
    memory: float
    count: int
    allowed: int
    price: Limit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardEstimate:
    """A training on one kind of cards.

    Attributes:
        kind: of the cards.
        gpu: what is known of the card, or why nothing is.
        fit: whether it has room.
        batch: over all cards: what was said, or what ultralytics should choose; None: not known.
        memory: bytes on each card as NVML shows them, or why they are not known.
        offered: bytes that each card has for it.
        largest_batch: over all cards, that is sure to have room; 0: none; None: not known.
        images: per second over all cards while training, or why they are not known.
        limit: what bounds them; empty if a profile says it.
        filling_batch: below it a step takes no less time; None: not known.
        epoch_seconds: with its validation, or why it is not known.
        training_seconds: from the first epoch to the last, likewise.
        basis: `profile` or `formula`, or empty where nothing is known.
    """

    kind: Kind
    gpu: Gpu | Unknown
    fit: Fit
    batch: int | None
    memory: Range | Unknown
    offered: float
    largest_batch: int | None
    images: Range | Unknown
    limit: str
    filling_batch: int | None
    epoch_seconds: Range | Unknown
    training_seconds: Range | Unknown
    basis: str

    def gpu_hours(self, gpus: int) -> Range | None:
        """What it costs on so many cards, or None where that is not known."""
        if isinstance(self.training_seconds, Unknown):
            return None
        return self.training_seconds.scaled(gpus / 3600)

    def cost(self, gpus: int) -> str | None:
        """What that is in money, such as `12.60 EUR`; None where price or time is not known."""
        hours, price = self.gpu_hours(gpus), self.kind.price
        if hours is None or price is None:
            return None
        return quantity(hours.expected * price.amount, price.unit)

    @property
    def time_limit_seconds(self) -> float | None:
        """After which an attempt is taken to be stuck; None where the time is not known."""
        if isinstance(self.training_seconds, Unknown):
            return None
        return rounded_limit(self.training_seconds.high * MARGIN + START_SECONDS)

    def as_document(self, gpus: int) -> dict[str, Any]:
        """For machines: bytes, seconds; what is not known is absent, and `unknown` says why."""
        values: dict[str, Range | Unknown | None] = {
            "memory_bytes": self.memory,
            "images_per_second": self.images,
            "epoch_seconds": self.epoch_seconds,
            "training_seconds": self.training_seconds,
            "gpu_hours": self.gpu_hours(gpus),
        }
        found: dict[str, Any] = {
            "card": self.kind.name,
            "model": self.kind.model,
            "cards": self.kind.count,
            "allowed_cards": self.kind.allowed,
            "fit": str(self.fit),
            "card_memory_bytes": round(self.offered),
            **{
                name: {key: round(number, 3) for key, number in dataclasses.asdict(value).items()}
                for name, value in values.items()
                if isinstance(value, Range)
            },
            "cost": self.cost(gpus),
            "batch": self.batch,
            "largest_batch": self.largest_batch,
            "limit": self.limit or None,
            "filling_batch": self.filling_batch,
            "basis": self.basis or None,
            "time_limit_seconds": self.time_limit_seconds,
            "unknown": self.reasons() or None,
        }
        return {key: value for key, value in found.items() if value is not None}

    def reasons(self) -> list[str]:
        """Why something is not known; each reason once."""
        values = (self.memory, self.images, self.epoch_seconds, self.training_seconds)
        return list(dict.fromkeys(str(value) for value in values if isinstance(value, Unknown)))


def rounded_limit(seconds: float) -> float:
    """A time limit, rounded up as people would write it."""
    return math.ceil(seconds / _ROUNDED_TO) * _ROUNDED_TO


def estimate(
    training: Training, kinds: Iterable[Kind], *, gpus: int, profiles: Sequence[Profile]
) -> tuple[CardEstimate, ...]:
    """What a training should take on each kind of cards, in their order."""
    return tuple(_on(training, kind, gpus=gpus, profiles=profiles) for kind in kinds)


def fitting_profile(
    training: Training, kind: Kind, *, gpus: int, profiles: Iterable[Profile]
) -> Profile | None:
    """The profile of exactly this training on these cards, or None."""
    fitting = [
        profile
        for profile in profiles
        if (profile.model, profile.batch, profile.imgsz)
        == (training.model_name, training.batch, training.imgsz)
        and profile.gpus == gpus
        and profile.hardware == kind.model
        and profile.amp in (None, training.amp)
    ]
    return min(fitting, key=lambda profile: profile.amp is None, default=None)


def save_seconds(model: ModelCosts | Unknown) -> float | None:
    """Upper end of what writing a state takes on a slow shared disk; None where it is not known."""
    if isinstance(model, Unknown):
        return None
    return _SAVE_SECONDS + model.parameters * _STATE_BYTES / _DISK_BYTES_PER_SECOND


def _on(training: Training, kind: Kind, *, gpus: int, profiles: Sequence[Profile]) -> CardEstimate:
    gpu = estimate_tables.find_gpu(kind.model, exact=True)
    # What a data sheet calls 40 GB is less to a process; an operator may also say less than all.
    offered = min(kind.memory, gpu.memory) if isinstance(gpu, Gpu) else kind.memory
    workload = _workload(training, gpus)
    largest = _largest(training, workload, offered)
    batch = training.batch
    if batch is None:
        batch = _largest(training, workload, offered * training.memory_share) or None
    profile = fitting_profile(training, kind, gpus=gpus, profiles=profiles)
    memory: Range | Unknown
    images: Range | Unknown
    if batch is None:
        missing = Unknown("batch", "its batch is chosen when it starts, by the card's memory")
        unknown = training.model if isinstance(training.model, Unknown) else missing
        memory = unknown
        fit = Fit.UNKNOWN if isinstance(training.model, Unknown) else Fit.NO
        images, limit, filling = unknown, "", None
    else:
        chosen = dataclasses.replace(workload, batch=batch)
        memory = _memory(training.model, chosen, profile)
        fit = _fit(memory, offered)
        images, limit, filling = _speed(training.model, gpu, chosen, profile)
    epoch = _epoch(training, images)
    return CardEstimate(
        kind=kind,
        gpu=gpu,
        fit=fit,
        batch=batch,
        memory=memory,
        offered=offered,
        largest_batch=largest,
        images=images,
        limit=limit,
        filling_batch=filling,
        epoch_seconds=epoch,
        training_seconds=_whole(training, epoch),
        basis=_basis(profile, memory, images),
    )


def _workload(training: Training, gpus: int) -> Workload:
    return Workload(
        batch=gpus if training.batch is None else training.batch,
        imgsz=min(8192, training.largest_imgsz),
        amp=training.amp,
        optimizer=training.optimizer,
        classes=min(100_000, training.classes),
        gpus=gpus,
    )


def _largest(training: Training, workload: Workload, offered: float) -> int | None:
    if isinstance(training.model, Unknown):
        return None
    constants = estimate_tables.tables().constants
    return estimates.largest_batch(training.model, offered, workload=workload, constants=constants)


def _memory(
    model: ModelCosts | Unknown, workload: Workload, profile: Profile | None
) -> Range | Unknown:
    if profile is not None and profile.gpu_memory is not None:
        return _around(profile.gpu_memory, profile.tolerance)
    if isinstance(model, Unknown):
        return model
    return estimates.memory(model, workload, estimate_tables.tables().constants).total


def _fit(memory: Range | Unknown, offered: float) -> Fit:
    if isinstance(memory, Unknown):
        return Fit.UNKNOWN
    if memory.high <= offered:
        return Fit.YES
    return Fit.TIGHT if memory.expected <= offered else Fit.NO


def _speed(
    model: ModelCosts | Unknown, gpu: Gpu | Unknown, workload: Workload, profile: Profile | None
) -> tuple[Range | Unknown, str, int | None]:
    """Images per second, what bounds them, and the batch from which launches no longer do."""
    known: Range | None = None
    if profile is not None and profile.throughput is not None:
        known = _around(profile.throughput, profile.tolerance)
    if isinstance(model, Unknown):
        return known or model, "", None
    if isinstance(gpu, Unknown):
        return known or gpu, "", None
    found = estimates.speed(model, gpu, workload, estimate_tables.tables().constants)
    if known is not None:
        return known, "", found.filling_batch
    return found.images, found.limit, found.filling_batch


def _around(value: float, tolerance: float | None) -> Range:
    # A profile without a tolerance of its own is an operator's word: a twentieth is what one that
    # was learnt has at least (docs/profiles.md).
    spread = min(0.95, 0.05 if tolerance is None else tolerance)
    return Range(value * (1 - spread), value, value * (1 + spread))


def _epoch(training: Training, images: Range | Unknown) -> Range | Unknown:
    """Of one epoch with its validation.

    A forward pass is a third of a training step's arithmetic; non-maximum suppression and the
    metrics come on top of it. An image of the validation so counts as between a third of one that
    is trained and a whole one, and as a half; where they are not counted, there are taken to be
    between none and as many as are trained.
    """
    if isinstance(training.images, Unknown):
        return training.images
    if isinstance(images, Unknown):
        return images
    count, validated = training.images, training.validated
    low, middle, high = (
        (0.0, count / 10, float(count))
        if validated is None
        else (validated / 3, validated / 2, float(validated))
    )
    return Range(
        (count + low) / images.high,
        (count + middle) / images.expected,
        (count + high) / images.low,
    )


def _whole(training: Training, epoch: Range | Unknown) -> Range | Unknown:
    if training.seconds is not None:
        # It ends when its time is up, or an epoch later.
        last = epoch.high if isinstance(epoch, Range) else 0.0
        return Range(training.seconds, training.seconds, training.seconds + last)
    return epoch if isinstance(epoch, Unknown) else epoch.scaled(training.epochs)


def _basis(profile: Profile | None, memory: Range | Unknown, images: Range | Unknown) -> str:
    if isinstance(memory, Unknown) and isinstance(images, Unknown):
        return ""
    if profile is None:
        return "formula"
    said = (profile.gpu_memory is not None, profile.throughput is not None)
    return "profile" if all(said) else "profile, formula"
