"""Made-up offenders: jobs that break rules without hiding it, against which tricks are measured.

Nothing here is clever: an offender does one thing that no rule of its kind may miss, and is called
what the rule's `match` asks for. Pure.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden import hours
from gpuwarden.ruleengine.notations import SeriesName, Stale, sorted_labels
from gpuwarden.ruleengine.rule_tests import DEFAULT_START, DeclaredJob, DeclaredRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuwarden.ruleengine.histories import History
    from gpuwarden.ruleengine.model import Rule

    Forge = Callable[[History, DeclaredJob], None]
    """Changes the series of one job in a history."""
    Shape = Callable[[float], float]
    """A value by the seconds since a series began."""

_KNOWN = {
    "user": ("eve", "ana", "root"),
    "team": ("vision",),
    "framework": ("torch", "ultralytics", "jupyter", "tensorflow", "jax"),
    "source": ("process", "slurm", "kubernetes", "cmdline"),
    "interactive": ("false", "true"),
    "model": ("yolov8m", "yolov8n", "yolo11n", "yolov5s"),
    "project": ("project", "default"),
    "run_id": ("run-1",),
    "node": ("n1", "gpu-node-1", "node01"),
    "gpu": ("NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "NVIDIA L4", "Tesla T4"),
    "job_id": ("proc-1",),
}
"""Values that are tried against a pattern of `match`, the most ordinary first."""
_REPEAT = re.compile(r"(?<!\\)\.[*+]|\[[^\]]+\][*+]?|\\[dw][*+]?")
_MAX_ALTERNATIVES = 64


@dataclass(frozen=True, slots=True)
class Offender:
    """A job that breaks a rule and hides nothing.

    Attributes:
        name: as reports call it.
        help: what it does, in a few words.
        job: what it shows.
        forge: series that few words do not make, or None.
        lasting: whether its age alone is the offence.
    """

    name: str
    help: str
    job: DeclaredJob
    forge: Forge | None = None
    lasting: bool = False


def _declared(**given: Any) -> DeclaredJob:
    """A job by the words of a test."""
    return DeclaredJob.model_validate({"job": "proc-offender", "user": "eve", **given})


_RUN: dict[str, Any] = {"saves_every": "10m"}


def job_rows(
    history: History, metric: str, job: DeclaredJob
) -> Iterator[tuple[dict[str, str], dict[int, float]]]:
    """Labels and numbers of a job's series of one metric."""
    for name, row in list(history.series.items()):
        labels = dict(name.labels)
        if name.metric == metric and labels.get("job_id") == job.job:
            numbers = {
                time: value
                for time, value in row.items()
                if value is not None and not isinstance(value, Stale)
            }
            yield labels, numbers


def _add(
    history: History, job: DeclaredJob, metric: str, extra: dict[str, str], how: Shape
) -> None:
    """Add a series of a run that has samples where its steps have: value by seconds since then."""
    for labels, numbers in job_rows(history, "yolo_steps_total", job):
        begin = min(numbers, default=0)
        name = SeriesName(metric, sorted_labels(labels | extra))
        history.series[name] = {time: how((time - begin) / 1000) for time in numbers}


def _no_number(history: History, job: DeclaredJob) -> None:
    _add(history, job, "yolo_nonfinite_loss_total", {}, lambda since: since / 30)


def _swinging(history: History, job: DeclaredJob) -> None:
    """Loss and utilization swing together, a quarter of an hour per swing."""

    def high(since: float) -> bool:
        return since % 900 < 450

    _add(
        history,
        job,
        "yolo_loss",
        {"component": "box"},
        lambda since: 9.0 if high(since) else 1.0,
    )
    for metric in ("gpu_job_utilization_ratio",):
        for labels, numbers in job_rows(history, metric, job):
            begin = min(numbers, default=0)
            row = history.series[SeriesName(metric, sorted_labels(labels))]
            row |= {time: 0.95 if high((time - begin) / 1000) else 0.2 for time in numbers}


def _leaking(history: History, job: DeclaredJob) -> None:
    """From 60 % of the card on, as much again every half hour, until it is full."""
    metric = "gpu_job_memory_bytes"
    total = job.card_memory or 40 * 2.0**30
    for labels, numbers in job_rows(history, metric, job):
        begin = min(numbers, default=0)
        row = history.series[SeriesName(metric, sorted_labels(labels))]
        for time in numbers:
            row[time] = min(0.99, 0.6 + 0.4 * (time - begin) / 1000 / 3600) * total


OFFENDERS = (
    Offender(
        "crashed training",
        "holds its card and does nothing",
        _declared(like="idle", run=_RUN),
    ),
    Offender(
        "forgotten notebook",
        "holds its card and does nothing, at a prompt",
        _declared(like="idle", framework="jupyter", interactive=True),
    ),
    Offender("crashed job", "likewise, without a trainer that speaks", _declared(like="idle")),
    Offender(
        "slow hog",
        "fills the card's memory for few images",
        _declared(like="hog", run=_RUN),
    ),
    Offender(
        "greedy hog",
        "fills the card to the last byte for hardly any image",
        _declared(like="hog", memory="39.5GiB", throughput="10 img/s", run=_RUN),
    ),
    Offender(
        "spinning training",
        "keeps the card busy for almost no image",
        _declared(like="spinning", run=_RUN),
    ),
    Offender(
        "hung training",
        "keeps the card busy and counts no step",
        _declared(like="spinning", throughput="0 img/s", run=_RUN),
    ),
    Offender(
        "starved training",
        "waits for its data",
        _declared(like="starved", run=_RUN),
    ),
    Offender(
        "half used pair",
        "holds two cards and uses one",
        _declared(gpus=2, cards=[{}, {"utilization": "0%"}], run=_RUN),
    ),
    Offender(
        "unused card",
        "holds a card and has put nothing on it",
        _declared(like="idle", memory="0GiB"),
    ),
    Offender("leaking training", "takes ever more memory", _declared(run=_RUN), _leaking),
    Offender(
        "oversized training",
        "declares what its card cannot hold",
        _declared(run=_RUN | {"model": "yolov8x", "batch": 512}),
    ),
    Offender(
        "broken training", "counts losses that are no numbers", _declared(run=_RUN), _no_number
    ),
    Offender(
        "swinging training", "its loss swings and does not fall", _declared(run=_RUN), _swinging
    ),
    Offender(
        "busy job",
        "uses its card and its memory to the full",
        _declared(memory="39GiB", utilization="99%"),
    ),
    Offender("old job", "has run for a month", _declared(age="30d", run=_RUN), lasting=True),
)
"""In the order in which they are tried; the first that a rule finds soonest is its offender."""


def example(pattern: str, key: str = "") -> str | None:
    """A text that an anchored pattern matches, or None where none was found.

    Args:
        pattern: of a rule's `match`.
        key: which label; the ordinary values of that label are tried first.
    """
    compiled = re.compile(pattern)
    tried = [*_KNOWN.get(key, ())]
    for part in re.split(r"\|", pattern.strip("()"))[:_MAX_ALTERNATIVES]:
        plain = part.replace("(?:", "").strip("()^$")
        tried += [re.sub(r"\\(.)", r"\1", _REPEAT.sub(filler, plain)) for filler in ("1", "a", "")]
    return next((text for text in tried if text and compiled.fullmatch(text)), None)


def disguised(offender: Offender, rule: Rule) -> DeclaredJob | str:
    """The offender's job, called what a rule's `match` asks for; or which label it could not be."""
    job, run = offender.job, offender.job.run
    change: dict[str, Any] = {"team": rule.team} if rule.team else {}
    for key, pattern in rule.match.items():
        text = example(pattern, key)
        if text is None:
            return f"no made-up {key} matches {pattern!r}"
        if key in ("model", "project", "run_id"):
            run = run or DeclaredRun.model_validate(_RUN)
            # What the offender declares is its offence where it fits the pattern already.
            if key == "run_id" or not re.fullmatch(pattern, str(getattr(run, key))):
                run = run.model_copy(update={"id" if key == "run_id" else key: text})
        elif key == "interactive":
            change[key] = text == "true"
        elif key == "node":
            change[key] = f"{text}:9835"
        elif key in ("gpu", "job_id"):
            change["hardware" if key == "gpu" else "job"] = text
        elif not re.fullmatch(pattern, str(getattr(job, key))):
            change[key] = text
    return job.model_copy(update={**change, "run": run})


def moment_for(rule: Rule) -> dt.datetime:
    """A moment from which on a rule counts for as long as possible: its hours matter to it."""
    begin = DEFAULT_START.timestamp()

    def lasts(start: float) -> int:
        return next(
            (n for n in range(168) if not hours.within(rule.only_during, start + n * 3600)), 168
        )

    best = max(range(168), key=lambda n: lasts(begin + n * 3600)) if rule.only_during else 0
    return DEFAULT_START + dt.timedelta(hours=best)
