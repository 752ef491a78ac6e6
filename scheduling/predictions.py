"""How long a training will take, from those that were like it and have ended. Pure.

Like it: the same model, image size, batch, kind and number of cards, and data, the same words that
change what an epoch takes, and about as many epochs. The interval is that of order statistics: of N
runs that are exchangeable with the next one, it falls between the k-th and the (N+1-k)-th with the
probability 1 - 2k/(N+1), whatever the distribution. The share that an interval claims is therefore
told with it: from 5 runs no honest interval claims 80 %.
"""

from __future__ import annotations

import math
import posixpath
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.schedule_api import Interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.scheduling.tasks import Task

LEAST_RUNS = 5
"""Below which nothing is said."""
NEWEST_RUNS = 50
"""Older ones tell of other drivers and other data."""
CLAIM = 0.8
"""Share of the ends that should lie inside of an interval, where there are enough runs."""
FARTHEST: Final = 4.0
"""By how much epochs may differ: to begin and to end weighs more in a run of one epoch."""
MOST_EPOCHS: Final = 1_000_000
_SURE: Final = 0.01
_PLAIN_CHANGE: Final = 0.1
"""Of the median: a smaller gap may be a drift, or the edge of what is usual."""
_EVERYBODYS_WEIGHTS: Final = frozenset({"best", "last", "weights", "model", "checkpoint"})
_EVERYBODYS_DATA: Final = frozenset({"data", "dataset", "config", "custom", "train"})
"""Names of files of which everybody has one, each with something else in it."""
_PACING: Final[Mapping[str, tuple[str, ...]]] = {
    "amp": ("true", "1"),
    "cache": ("false", "none", "0"),
    "compile": ("false", "none", "0"),
    "deterministic": ("true", "1"),
    "fraction": ("1", "1.0"),
    "freeze": ("none", "0"),
    "mixup": ("0", "0.0"),
    "mosaic": ("1", "1.0"),
    "multi_scale": ("0", "0.0", "false"),
    "optimizer": ("auto",),
    "patience": ("100",),
    "rect": ("false", "0"),
    "task": ("none",),
    "val": ("true", "1"),
    "workers": ("8",),
}
"""Words that change what an epoch takes, or how many are trained, and how their usual is said."""


@dataclass(frozen=True, slots=True, order=True)
class Features:
    """What makes runs alike; an empty text is not known, and is like no other.

    Attributes:
        model: as the trainer calls it, such as yolov8m.
        imgsz: size of an image.
        batch: of all cards.
        card: kind of cards.
        gpus: how many.
        data: name of the data set, or its whole path where everybody's is called so.
        pacing: words that change what an epoch takes, in order; empty: the usual.
    """

    model: str
    imgsz: str
    batch: str
    card: str
    gpus: int
    data: str
    pacing: str = ""

    @property
    def known(self) -> bool:
        """Whether nothing is missing."""
        return all((self.model, self.imgsz, self.batch, self.card, self.data)) and self.gpus > 0

    def __str__(self) -> str:
        return (
            f"{self.model}, imgsz {self.imgsz}, batch {self.batch}, {self.gpus} x {self.card}, "
            f"{self.data}{self.pacing and f', {self.pacing}'}"
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
        slowest: seconds, at the pace of the slowest of the runs.
        epochs: that it is about.
    """

    shortest: float
    longest: float
    middle: float
    runs: int
    claim: float
    slowest: float
    epochs: float

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
    return training_of_words(task.words, card=card, gpus=task.gpus, directory=task.directory)


def trained_words(command: Sequence[str]) -> tuple[str, ...]:
    """The words for `yolo train` in a command of `gpuwarden train`; none of another one."""
    if "train" not in command:
        return ()
    after = command[command.index("train") + 1 :]
    return tuple(word for word in after if not word.startswith("-") and "=" in word)


def training_of_words(
    words: Iterable[str], *, card: str, gpus: int, directory: str = ""
) -> Training:
    """What `yolo train` would train by its words; what they leave out is ultralytics' default.

    Args:
        words: KEY=VALUE each; of two of a key the last one counts.
        card: kind of cards that it holds, or will hold.
        gpus: how many.
        directory: where it starts, or an empty text where nobody knows.
    """
    said = dict(word.split("=", 1) for word in words if "=" in word)
    features = Features(
        model=_told(said.get("model", ""), directory, _EVERYBODYS_WEIGHTS).removesuffix(".pt"),
        imgsz=said.get("imgsz", "640"),
        batch=said.get("batch", "16"),
        card=card,
        gpus=gpus,
        data=_told(said.get("data", ""), directory, _EVERYBODYS_DATA),
        pacing=" ".join(
            f"{key}={said[key]}"
            for key, usual in _PACING.items()
            if key in said and said[key].lower() not in usual
        ),
    )
    return Training(features, _epochs(said))


def _told(path: str, directory: str, everybodys: frozenset[str]) -> str:
    """A file's name; of one of which everybody has another, its path, or nothing: not known."""
    name = path.rpartition("/")[2]
    if name.partition(".")[0].lower() not in everybodys:
        return name
    if not (directory or path.startswith("/")):
        return ""
    return posixpath.normpath(posixpath.join(directory, path))


def _epochs(said: Mapping[str, str]) -> float | None:
    """Of `time=`, which goes before them, nobody knows how many there will be."""
    text = said.get("epochs", "100")
    if said.get("time", "none").lower() != "none" or not (text.isdecimal() and text.isascii()):
        return None
    return float(text) if len(text) < 8 and 0 < int(text) <= MOST_EPOCHS else None


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
        (run for run in history if run.features == features and _about_as_long(run, epochs)),
        key=lambda run: (run.ended, run.seconds, run.epochs),
    )[-NEWEST_RUNS:]
    if len(alike) < LEAST_RUNS:
        return Unforeseen(
            len(alike),
            f"{len(alike)} trainings like it ({features}) have ended here; from {LEAST_RUNS} on "
            "its end is foretold",
        )
    rates = sorted(_since_change([run.seconds / run.epochs for run in alike]))
    rank, claim = _rank(len(rates))
    return Prediction(
        shortest=rates[rank - 1] * epochs,
        longest=rates[-rank] * epochs,
        middle=statistics.median(rates) * epochs,
        runs=len(rates),
        claim=claim,
        slowest=rates[-1] * epochs,
        epochs=epochs,
    )


def _about_as_long(run: Run, epochs: float) -> bool:
    """Whether a run is one, and says something of a training of so many epochs."""
    if not (run.epochs > 0 and 0 < run.seconds < math.inf):
        return False
    return epochs / FARTHEST <= run.epochs <= epochs * FARTHEST


def _since_change(rates: Sequence[float]) -> Sequence[float]:
    """The rates since they last changed for good: data that grew, another driver, other cards.

    Where all of the newest are beyond all before them, with a gap between, and that would be chance
    in one of a hundred cases only, those before tell nothing any more.

    Args:
        rates: seconds of an epoch, the oldest first.
    """
    for newest in range(LEAST_RUNS, len(rates)):
        before, since = rates[:-newest], rates[-newest:]
        gap = max(min(since) - max(before), min(before) - max(since))
        jumped = gap > _PLAIN_CHANGE * statistics.median(before)
        if jumped and 2 / math.comb(len(rates), newest) < _SURE:
            return since
    return rates


def _rank(runs: int) -> tuple[int, float]:
    """The k of the narrowest interval that claims CLAIM, or the widest one; and what it claims."""
    rank = max(1, int((1 - CLAIM) * (runs + 1) / 2 + 1e-9))
    return rank, 1 - 2 * rank / (runs + 1)
