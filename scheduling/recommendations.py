"""What somebody may want to choose otherwise before a training is submitted. Pure.

Each sentence rests on an estimate, on a profile, or on what ultralytics itself recommends; where
none of them says anything, nothing is recommended.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Final

from gpuwarden import durations, estimate_tables
from gpuwarden.estimates import GIB, ModelCosts, Range, Unknown
from gpuwarden.scheduling.estimations import CardEstimate, Fit, estimate
from gpuwarden.scheduling.trainings import NOMINAL_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.scheduling.trainings import Training
    from gpuwarden.training_profiles import Profile

IMAGES_PER_CLASS: Final = 1500
"""Ultralytics' own advice for the size of a data set to detect (docs, tips for best training)."""
_SIZES: Final = "tnsmblcxe"
"""Letters of sizes in the order of their parameters, over all of ultralytics' families."""
_NAMED = re.compile(r"(yolo(?:v?\d+))([a-z])(u?(?:-[a-z]+)?)")
_LITTLE_GAIN: Final = 1.1
_STEPS_PER_EPOCH: Final = 10
"""An epoch of fewer steps is not advised: each is one step of the optimizer at most."""


def recommendations(
    training: Training,
    chosen: CardEstimate,
    everywhere: Sequence[CardEstimate],
    *,
    gpus: int,
    profiles: Sequence[Profile],
) -> tuple[str, ...]:
    """Sentences for people, the most useful first.

    Args:
        training: what is asked for.
        chosen: the card that it will take.
        everywhere: every kind of cards, in the policy's order: the cheapest first.
        gpus: cards.
        profiles: of what is trained here.
    """
    return (
        *_off_profile(training, chosen, gpus, profiles),
        *_batch(training, chosen, gpus),
        *_cards(training, chosen, gpus, profiles),
        *_dearer(chosen, everywhere),
        *_data(training),
    )


def batches_that_fit(everywhere: Sequence[CardEstimate]) -> tuple[str, ...]:
    """For each kind of cards, the largest batch that has room on it."""
    return tuple(
        f"{each.kind.name} ({each.offered / GIB:.1f} GiB): "
        + (f"batch={each.largest_batch}" if each.largest_batch else "no batch")
        for each in everywhere
        if each.largest_batch is not None
    )


def smaller_models(
    training: Training, chosen: CardEstimate, *, gpus: int, profiles: Sequence[Profile]
) -> str | None:
    """The largest smaller model of the family that has room with the same batch, or None."""
    for sibling in reversed(siblings(training)):
        found = _of(sibling, training, chosen, gpus=gpus, profiles=profiles)
        if found.fit is Fit.YES and isinstance(found.memory, Range):
            return (
                f"{sibling.name} with the same batch needs {found.memory.expected / GIB:.1f} GiB "
                f"of {found.kind.name}"
            )
    return None


def siblings(training: Training) -> list[ModelCosts]:
    """Smaller models of the same family and task, the smallest first; of an unknown one none."""
    if isinstance(training.model, Unknown):
        return []
    match = _NAMED.fullmatch(training.model.name)
    if match is None:
        return []
    known = estimate_tables.tables().models
    names = [f"{match[1]}{letter}{match[3]}" for letter in _SIZES]
    mine = training.model.parameters
    found = [known[name] for name in names if name in known and known[name].parameters < mine]
    return sorted(found, key=lambda model: model.parameters)


def sizes(
    training: Training, chosen: CardEstimate, *, gpus: int, profiles: Sequence[Profile]
) -> tuple[tuple[str, CardEstimate], ...]:
    """What smaller models of the family would take on the chosen card."""
    return tuple(
        (model.name, _of(model, training, chosen, gpus=gpus, profiles=profiles))
        for model in siblings(training)
    )


def _of(
    model: ModelCosts,
    training: Training,
    chosen: CardEstimate,
    *,
    gpus: int,
    profiles: Sequence[Profile],
) -> CardEstimate:
    other = dataclasses.replace(training, model=model, model_name=model.name)
    return estimate(other, [chosen.kind], gpus=gpus, profiles=profiles)[0]


def _off_profile(
    training: Training, chosen: CardEstimate, gpus: int, profiles: Sequence[Profile]
) -> Iterator[str]:
    """How this model is trained here otherwise, where it is not done so."""
    here = [
        profile
        for profile in profiles
        if (profile.model, profile.hardware) == (training.model_name, chosen.kind.model)
        and profile.gpus == gpus
    ]
    if not here or any(
        (profile.batch, profile.imgsz) == (training.batch, training.imgsz) for profile in here
    ):
        return
    ways = ", ".join(
        f"batch {profile.batch} at {profile.imgsz} px"
        + (f" ({profile.throughput:.0f} images/s)" if profile.throughput is not None else "")
        for profile in sorted(here, key=lambda each: (each.imgsz, each.batch))
    )
    yield (
        f"off profile: {training.model_name} on {chosen.kind.name} is known here with {ways}; what "
        "is said of this training rests on the formula, and a rule for profiles will not fit it"
    )


def _batch(training: Training, chosen: CardEstimate, gpus: int) -> Iterator[str]:
    batch, largest = training.batch, chosen.largest_batch
    if batch is None or largest is None:
        return
    if chosen.fit is Fit.TIGHT:
        yield f"batch {batch} may run out of memory; batch={largest} is sure to have room"
    filling = chosen.filling_batch
    step = 8 * gpus
    better = math.ceil((filling or 0) / step) * step
    # More than the data set has is no batch, and near it an epoch is hardly a step.
    most = largest
    if not isinstance(training.images, Unknown):
        most = min(most, training.images // _STEPS_PER_EPOCH)
    if better > most:
        better = most // step * step
    if better > batch * _LITTLE_GAIN:
        same = (
            f"; up to {NOMINAL_BATCH} ultralytics sums its gradients, so that the steps stay the "
            "same"
            if better <= NOMINAL_BATCH
            else ""
        )
        yield (
            f"a step takes no less time below batch {filling}: batch={better} has room on "
            f"{chosen.kind.name} and needs fewer steps{same}"
        )


def _cards(
    training: Training, chosen: CardEstimate, gpus: int, profiles: Sequence[Profile]
) -> Iterator[str]:
    """Whether fewer cards would do as well."""
    if gpus == 1 or training.batch is None:
        return
    alone = estimate(training, [chosen.kind], gpus=1, profiles=profiles)[0]
    if alone.fit is not Fit.YES:
        return
    if isinstance(alone.images, Unknown) or isinstance(chosen.images, Unknown):
        return
    gain = chosen.images.expected / alone.images.expected
    if gain < gpus / 2:
        yield (
            f"{gpus} cards are only {gain:.1f} times as fast as one with this batch: each has "
            f"{training.batch // gpus} images a step"
        )


def _dearer(chosen: CardEstimate, everywhere: Sequence[CardEstimate]) -> Iterator[str]:
    """What a dearer card would save."""
    if isinstance(chosen.training_seconds, Unknown):
        return
    names = [each.kind.name for each in everywhere]
    for each in everywhere[names.index(chosen.kind.name) + 1 :]:
        if each.fit is not Fit.YES or isinstance(each.training_seconds, Unknown):
            continue
        gain = chosen.training_seconds.expected / each.training_seconds.expected
        if gain >= 1.5:
            yield (
                f"--card {each.kind.name} would take {span(each.training_seconds.expected)} "
                f"instead of {span(chosen.training_seconds.expected)}"
            )
            return


def _data(training: Training) -> Iterator[str]:
    model = training.model
    if isinstance(training.images, Unknown) or isinstance(model, Unknown):
        return
    each = training.images / training.classes
    if model.task == "detect" and each < IMAGES_PER_CLASS and not _is_known(training.data):
        yield (
            f"the data set has {each:.0f} images for each of {training.classes} classes; "
            f"ultralytics recommends {IMAGES_PER_CLASS} and more, and to start with a pretrained "
            "model where there are fewer"
        )


def _is_known(data: str) -> bool:
    """Whether it is one of ultralytics' own data sets, which nobody needs to be told of."""
    return bool(re.fullmatch(r"(coco|voc|lvis|objects365)[a-z0-9-]*(\.ya?ml)?", data.lower()))


def span(seconds: float) -> str:
    """Seconds as people say them, to two units: 45s, 12m30s, 3h20m, 4d6h."""
    whole = max(1, round(seconds))
    step = 1 if whole < 3600 else 60 if whole < 86400 else 3600
    return durations.render(max(1, round(whole / step)) * step)
