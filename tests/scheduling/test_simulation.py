"""The simulated month keeps its books, and comes out the same each time."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest
from bench.scheduling import fleets, reports, workloads
from bench.scheduling.arms import run
from bench.scheduling.measures import jain, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.scheduling.measures import Measures
    from bench.scheduling.worlds import World

    Runs = dict[str, tuple[World, Measures]]

DAYS = 1.8
LOAD = 0.8
ARMS = ("fcfs", "kill", "gpuwarden", "no notice")


@pytest.fixture(scope="module")
def runs() -> Runs:
    """A day and a half under four policies."""
    return {name: run(name, 1, days=DAYS, load=LOAD) for name in ARMS}


@pytest.mark.parametrize("name", ARMS)
def test_every_card_second_is_in_one_account(runs: Runs, name: str) -> None:
    """Useful, lost, overhead and idle together are all there is; idle is counted by itself."""
    books = runs[name][0].accounts
    assert books.total == pytest.approx(fleets.CARDS * DAYS * fleets.DAY)
    assert min(books.useful, books.lost, books.overhead, books.idle) >= 0


@pytest.mark.parametrize("name", ARMS)
def test_work_is_neither_made_nor_forgotten(runs: Runs, name: str) -> None:
    """What is called useful is what the jobs have; who is done has done all, and nobody more."""
    world, _measures = runs[name]
    lives = world.lives.values()
    assert sum(life.done * life.job.gpus for life in lives) == pytest.approx(world.accounts.useful)
    assert sum(life.lost for life in lives) == pytest.approx(world.accounts.lost)
    assert all(life.done == life.job.work for life in lives if life.finished is not None)
    assert all(0 <= life.done <= life.job.work for life in lives)


@pytest.mark.parametrize("name", ["fcfs", "gpuwarden"])
def test_the_same_seed_gives_the_same_month(runs: Runs, name: str) -> None:
    """Down to the last digit; only the time that it took differs."""
    _world, again = run(name, 1, days=DAYS, load=LOAD)
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(
        runs[name][1], seconds=0.0
    )


def test_another_seed_gives_other_jobs() -> None:
    """And the first job of a longer month is another one too."""
    first, second = (workloads.jobs(seed, days=1, load=0.5) for seed in (1, 2))
    assert first != second
    assert workloads.jobs(1, days=1, load=0.5) == first


def test_first_come_is_first_served(runs: Runs) -> None:
    """Nobody starts before who was submitted before, and nobody leaves."""
    lives = sorted(
        runs["fcfs"][0].lives.values(), key=lambda life: (life.job.submitted, life.job.id)
    )
    starts = [life.first_start for life in lives if life.first_start is not None]
    assert starts == sorted(starts)
    assert not any(life.left for life in lives)


def test_notice_loses_less_than_a_kill(runs: Runs) -> None:
    """The same planner with and without it: that is what notice is for."""
    polite, rude = runs["gpuwarden"][1], runs["no notice"][1]
    assert polite.left > 0
    assert polite.lost_hours < rude.lost_hours / 4


def test_nobody_is_asked_more_often_than_the_policy_allows(runs: Runs) -> None:
    """Three times in a day, for jobs that no window asks besides."""
    most = fleets.policy().preemption
    assert most is not None
    for life in runs["gpuwarden"][0].lives.values():
        if life.job.window is None:
            later = zip(life.left, life.left[most.at_most.times :], strict=False)
            assert all(last - first > most.at_most.per for first, last in later)


def test_what_is_booked_is_there(runs: Runs) -> None:
    """Cards are free when the slot opens."""
    world, measures = runs["gpuwarden"]
    assert world.slots
    assert measures.on_time == 1.0


def test_the_tables_and_the_picture_are_of_all_arms(runs: Runs) -> None:
    """Every policy has its row; the picture is an image that a browser draws."""
    results = {name: [measures] for name, (_world, measures) in runs.items()}
    text = reports.tables(results)
    assert all(f"| {name} |" in text for name in ARMS)
    root = ET.fromstring(reports.picture(results))  # noqa: S314 (written a line above)
    assert root.tag.endswith("svg")
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) > 10
    assert json.loads(reports.as_json(results))["kill"][0]["finished"] > 0


@pytest.mark.parametrize(
    ("values", "index"), [([1, 1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([2, 2], 1.0)]
)
def test_jains_index(values: Sequence[float], index: float) -> None:
    """1 where all have the same, 1/n where one has everything."""
    assert jain(values) == pytest.approx(index)


def test_quantiles_lie_between_values() -> None:
    """As numpy's default does it."""
    assert quantile([0.0, 10.0], 0.25) == 2.5
    assert quantile([3.0], 0.95) == 3.0
