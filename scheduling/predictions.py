"""How long a training will take, from those that were like it and have ended. Pure.

Like it: the same model, image size, batch, kind and number of cards, and data. The interval is that
of order statistics: of N runs that are exchangeable with the next one, it falls between the k-th
and the (N+1-k)-th with the probability 1 - 2k/(N+1), whatever the distribution. The share that an
interval claims is therefore told with it: from 5 runs no honest interval claims 80 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.schedule_api import Interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.scheduling.tasks import Task

LEAST_RUNS = 5
"""Below which nothing is said."""
NEWEST_RUNS = 50
"""Older ones tell of other drivers and other data."""
CLAIM = 0.8
"""Share of the ends that should lie inside of an interval, where there are enough runs."""


@dataclass(frozen=True, slots=True, order=True)
class Features:
    """What makes runs alike; an empty text is not known, and is like no other.

    Attributes:
        model: as the trainer calls it, such as yolov8m.
        imgsz: size of an image.
        batch: of all cards.
        card: kind of cards.
        gpus: how many.
        data: name of the data set.
    """

    model: str
    imgsz: str
    batch: str
    card: str
    gpus: int
    data: str

    @property
    def known(self) -> bool:
        """Whether nothing is missing."""
        return all((self.model, self.imgsz, self.batch, self.card, self.data)) and self.gpus > 0

    def __str__(self) -> str:
        return (
            f"{self.model}, imgsz {self.imgsz}, batch {self.batch}, {self.gpus} x {self.card}, "
            f"{self.data}"
        )


@dataclass(frozen=True, slots=True)
class Training:
    """What a job trains.

    Attributes:
        features: by which it is like others.
        epochs: that it will train, or None where nobody knows.
    """

    features: Features
    epochs: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """A training that has ended by itself.

    Attributes:
        features: by which it is alike.
        epochs: that it trained, over all attempts.
        seconds: that it held its cards, over all attempts.
        ended: Unix time.
    """

    features: Features
    epochs: float
    seconds: float
    ended: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long a training takes.

    Attributes:
        shortest: seconds.
        longest: seconds.
        middle: seconds; the median.
        runs: that it rests on.
        claim: share of trainings that should lie between the two.
    """

    shortest: float
    longest: float
    middle: float
    runs: int
    claim: float

    def finish(self, since: float, *, now: float, held: float = 0.0) -> Interval:
        """When it will have ended, if it holds its cards from a moment on.

        Args:
            since: Unix time from which on it holds its cards.
            now: Unix time; what has not ended yet does not end before.
            held: seconds that earlier attempts held them.
        """
        earliest = max(now, since + self.shortest - held)
        return Interval(earliest, max(earliest, since + self.longest - held), self.runs)


@dataclass(frozen=True, slots=True)
class Unforeseen:
    """Why nothing is foretold.

    Attributes:
        runs: that were alike.
        words: one sentence.
    """

    runs: int
    words: str


def training_of(task: Task, *, card: str) -> Training:
    """What a task trains.

    Args:
        task: as it was submitted.
        card: kind of cards that it holds, or will hold.
    """
    return training_of_words(task.words, card=card, gpus=task.gpus)


def trained_words(command: Sequence[str]) -> tuple[str, ...]:
    """The words for `yolo train` in a command of `gpuwarden train`; none of another one."""
    if "train" not in command:
        return ()
    after = command[command.index("train") + 1 :]
    return tuple(word for word in after if not word.startswith("-") and "=" in word)


def training_of_words(words: Iterable[str], *, card: str, gpus: int) -> Training:
    """What `yolo train` would train by its words; what they leave out is ultralytics' default.

    Args:
        words: KEY=VALUE each; of two of a key the last one counts.
        card: kind of cards that it holds, or will hold.
        gpus: how many.
    """
    said = dict(word.split("=", 1) for word in words if "=" in word)
    epochs = said.get("epochs", "100")
    features = Features(
        model=said.get("model", "").rpartition("/")[2].removesuffix(".pt"),
        imgsz=said.get("imgsz", "640"),
        batch=said.get("batch", "16"),
        card=card,
        gpus=gpus,
        data=said.get("data", "").rpartition("/")[2],
    )
    return Training(features, float(epochs) if epochs.isdecimal() and epochs.isascii() else None)


def predict(
    history: Iterable[Run], features: Features, epochs: float | None
) -> Prediction | Unforeseen:
    """Foretell how long a training takes.

    Args:
        history: trainings that have ended by themselves, in any order.
        features: of the training.
        epochs: that it will train, or None where nobody knows.
    """
    if not features.known:
        return Unforeseen(
            0, "what it trains (model, imgsz, batch, cards, data) is not known in whole"
        )
    if epochs is None or epochs <= 0:
        return Unforeseen(0, "how many epochs it trains is not known")
    alike = sorted(
        (run for run in history if run.features == features and run.epochs > 0 and run.seconds > 0),
        key=lambda run: (run.ended, run.seconds, run.epochs),
    )[-NEWEST_RUNS:]
    if len(alike) < LEAST_RUNS:
        return Unforeseen(
            len(alike),
            f"{len(alike)} trainings like it ({features}) have ended here; from {LEAST_RUNS} on "
            "its end is foretold",
        )
    rates = sorted(run.seconds / run.epochs for run in alike)
    rank, claim = _rank(len(rates))
    return Prediction(
        rates[rank - 1] * epochs,
        rates[len(rates) - rank] * epochs,
        _median(rates) * epochs,
        len(rates),
        claim,
    )


def _rank(runs: int) -> tuple[int, float]:
    """The k of the narrowest interval that claims CLAIM, or the widest one; and what it claims."""
    rank = max(1, int((1 - CLAIM) * (runs + 1) / 2 + 1e-9))
    return rank, 1 - 2 * rank / (runs + 1)


def _median(values: list[float]) -> float:
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
