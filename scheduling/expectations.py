"""What trainings like one that is to be submitted took here, beside what is estimated. Pure.

History goes before a formula where there is enough of it: it knows the disks, the data set and the
machine. It is asked of the daemon; where none answers, the estimate stands alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.errors import InvalidInput
from gpuwarden.estimates import Range
from gpuwarden.scheduling.calibrations import wilson
from gpuwarden.scheduling.estimations import MARGIN, rounded_limit
from gpuwarden.scheduling.predictions import (
    LEAST_RUNS,
    Features,
    Prediction,
    Run,
    Unforeseen,
    predict,
    training_of_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.scheduling.estimations import CardEstimate

SCHEMA: Final = "gpuwarden.runs/v1"
LATE_MARGIN: Final = 1.5
"""What a time limit allows beyond the slowest run where foretold ends come late here."""
_MOST_LATE: Final = 1 / (LEAST_RUNS + 1)
"""Share of the ends that may come after their interval: of the fewest runs that foretell one."""


@dataclass(frozen=True, slots=True)
class Past:
    """What the daemon remembers of trainings of a model with some data.

    Attributes:
        runs: that ended by themselves, on any cards.
        ends: how many ends that it foretold within the last months came to pass.
        late: how many of these came after their interval.
    """

    runs: tuple[Run, ...] = ()
    ends: int = 0
    late: int = 0

    @property
    def comes_late(self) -> bool:
        """Whether more of the ends than was claimed surely come after their interval."""
        return wilson(self.late, self.ends)[0] > _MOST_LATE


@dataclass(frozen=True, slots=True)
class Limit:
    """After which an attempt may be ended.

    Attributes:
        seconds: from its start on.
        words: what it rests on.
    """

    seconds: float
    words: str


def expected(
    estimates: Iterable[CardEstimate],
    past: Past | None,
    words: Mapping[str, Sequence[str]],
    *,
    gpus: int,
    directory: str,
) -> dict[str, Prediction | Unforeseen]:
    """What history says of a training on each kind of cards; nothing where there is none.

    Args:
        estimates: of every kind of cards.
        past: by the daemon, or None where it does not answer.
        words: kind of cards -> the words of `yolo train` there.
        gpus: cards.
        directory: where it starts.
    """
    if past is None:
        return {}
    found = {}
    for each in estimates:
        card = each.kind.name
        training = training_of_words(words[card], card=card, gpus=gpus, directory=directory)
        found[card] = predict(past.runs, training.features, training.epochs)
    return found


def time_limit(foretold: Prediction, estimated: float | None, past: Past, *, tight: bool) -> Limit:
    """After which an attempt is taken to be stuck, by history.

    Args:
        foretold: by history.
        estimated: by the estimate, seconds, or None.
        past: that `foretold` rests on.
        tight: whether a short limit is of use to an engine; else the longer of the two is taken.
    """
    late = past.comes_late
    seconds = rounded_limit(foretold.slowest * (LATE_MARGIN if late else MARGIN))
    words = f"the slowest of {foretold.runs} trainings like it here, and a "
    words += "half more: ends that were foretold come late here" if late else "tenth more"
    if estimated is not None and estimated > seconds and (late or not tight):
        return Limit(estimated, "the upper end of the estimate, which is more than history says")
    return Limit(seconds, words)


def gpu_hours(foretold: Prediction, gpus: int) -> Range:
    """What it costs on so many cards, by history."""
    seconds = Range(foretold.shortest, foretold.middle, foretold.longest)
    return seconds.scaled(gpus / 3600)


def as_document(found: Prediction | Unforeseen) -> dict[str, Any]:
    """For machines; nothing but the reason where nothing is foretold."""
    if isinstance(found, Unforeseen):
        return {"runs": found.runs, "unknown": found.words}
    return {
        "runs": found.runs,
        "seconds": {
            "low": round(found.shortest, 3),
            "expected": round(found.middle, 3),
            "high": round(found.longest, 3),
        },
        "claim": round(found.claim, 4),
        "slowest_seconds": round(found.slowest, 3),
    }


def read_past(document: Mapping[str, Any]) -> Past:
    """Read what the daemon answers.

    Raises:
        InvalidInput: it is no such answer.
    """
    try:
        if document["schema"] != SCHEMA:
            raise InvalidInput(f"this is no document of {SCHEMA}")
        runs = tuple(_run(row, document["of"]) for row in document["runs"])
        return Past(runs, int(document["ends"]["count"]), int(document["ends"]["late"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"this is no document of {SCHEMA}: {error!r}") from error


def _run(row: Mapping[str, Any], of: Mapping[str, Any]) -> Run:
    features = Features(
        model=str(of["model"]),
        imgsz=str(of["imgsz"]),
        batch=str(row["batch"]),
        card=str(row["card"]),
        gpus=int(row["gpus"]),
        data=str(of["data"]),
        pacing=str(of["pacing"]),
    )
    numbers = [float(row[name]) for name in ("epochs", "seconds", "ended")]
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError("a number is none")
    return Run(features, *numbers)
