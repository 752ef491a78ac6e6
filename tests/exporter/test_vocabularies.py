"""What a job says in labels is bounded over its life, not only on one page."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from tests.exporter.test_collector import DESCRIPTION, JOB, SNAPSHOT, STATUS

from gpuwarden.exporter.collector import collect
from gpuwarden.exporter.jobs import Job, Run, YoloCommand
from gpuwarden.exporter.pages import Bodies, Format
from gpuwarden.exporter.vocabularies import (
    MAX_DESCRIPTIONS,
    MAX_RUNS,
    MAX_RUNS_IN_A_LIFE,
    MAX_WORDS,
    MAX_WORDS_IN_A_LIFE,
    RUNS,
    Vocabularies,
)


class Life:
    """Pages of one job after another, and every series that was ever on them."""

    def __init__(self) -> None:
        self._said = Vocabularies()
        self.series: set[str] = set()
        self.dropped = 0

    def show(self, job: Job) -> list[str]:
        """The next page's series of trainings."""
        snapshot = dataclasses.replace(SNAPSHOT, jobs=(job,))
        families, dropped = collect(snapshot, totals={}, vocabularies=self._said)
        self.dropped += dropped.get("series_limit", 0) + dropped.get("run_limit", 0)
        page = Bodies(families)[Format.TEXT].decode()
        shown = [line.rpartition(" ")[0] for line in page.splitlines() if line.startswith("yolo_")]
        self.series |= set(shown)
        return shown


def _named(family: str, series: set[str] | list[str]) -> list[str]:
    return [name for name in series if name.startswith(f"{family}{{")]


@pytest.mark.parametrize(
    ("family", "limit"),
    [
        ("yolo_loss", MAX_WORDS),
        ("yolo_metric", MAX_WORDS),
        ("yolo_learning_rate", MAX_WORDS),
        ("yolo_resume_mode", 8),
        ("yolo_info", MAX_DESCRIPTIONS),
    ],
)
def test_new_words_with_each_page(family: str, limit: int) -> None:
    """Who says something else each time says no more in all than who says it all at once."""
    life = Life()
    for number in range(100):
        word = f"w{number}"
        status = dataclasses.replace(
            STATUS, losses={word: 1.0}, metrics={word: 1.0}, lr={word: 1.0}, resume_mode=word
        )
        run = Run(dataclasses.replace(DESCRIPTION, model=word), status)
        life.show(dataclasses.replace(JOB, runs=(run,)))
    assert len(_named(family, life.series)) == limit
    assert life.dropped >= 100 - limit


def test_what_was_said_is_said_on() -> None:
    """A full vocabulary silences new words, and none of the old ones."""
    life = Life()
    first = {f"c{number}": 1.0 for number in range(MAX_WORDS)}
    for losses in (first, {"new": 1.0}, first):
        status = dataclasses.replace(STATUS, losses=losses)
        shown = life.show(dataclasses.replace(JOB, runs=(Run(DESCRIPTION, status),)))
    assert len(_named("yolo_loss", shown)) == MAX_WORDS


def test_many_runs_at_once() -> None:
    """A process that declares a thousand runs shows a few of them; the rest are counted."""
    runs = tuple(
        Run(dataclasses.replace(DESCRIPTION, run_id=f"run-{number}"), STATUS)
        for number in range(200)
    )
    life = Life()
    shown = life.show(dataclasses.replace(JOB, runs=runs))
    assert len(_named("yolo_epoch", shown)) == MAX_RUNS
    assert life.dropped == 200 - MAX_RUNS


def test_a_new_run_with_each_page() -> None:
    """Over its life a job has a bounded number of runs, far more than anybody trains."""
    said = Vocabularies()
    admitted = [said.admit("job", RUNS, str(number)) for number in range(MAX_RUNS_IN_A_LIFE + 5)]
    assert list(itertools.compress(range(len(admitted)), admitted)) == list(
        range(MAX_RUNS_IN_A_LIFE)
    )


def test_a_command_line_that_changes() -> None:
    """A process that rewrites its own command line makes no series without end."""
    life = Life()
    for number in range(50):
        command = YoloCommand(f"m{number}", "16", "640", "100")
        life.show(dataclasses.replace(JOB, runs=(), command=command))
    assert len(_named("yolo_info", life.series)) == MAX_DESCRIPTIONS


def test_each_job_has_words_of_its_own() -> None:
    """One job's flood silences no other job, and a job that is gone leaves nothing behind."""
    said = Vocabularies()
    assert all(said.admit("loud", "yolo_loss", str(number)) for number in range(MAX_WORDS))
    assert not said.admit("loud", "yolo_loss", "more")
    assert said.admit("quiet", "yolo_loss", "more")
    said.forget({"quiet"})
    assert said.admit("loud", "yolo_loss", "more")


def test_all_the_words_of_a_life() -> None:
    """A thousand runs that each say all they can say no more than a job may in its life."""
    said = Vocabularies()
    admitted = sum(
        said.admit("job", family, str(word), run_id=str(run))
        for run in range(MAX_RUNS_IN_A_LIFE)
        for family in ("yolo_loss", "yolo_metric", "yolo_learning_rate")
        for word in range(MAX_WORDS)
    )
    assert admitted == MAX_WORDS_IN_A_LIFE
    assert said.admit("job", "yolo_loss", "0", run_id="0")
    said.forget(set())
    assert said.admit("job", "yolo_loss", "another", run_id="0")
