"""A deadline that ends epochs in the middle is told of, by what runs have needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.scheduling.daemons import PlayedDriver, running
from tests.scheduling.policy_files import NOW, TEXT, a_policy

from gpuwarden.schedule_api import EntryState, QueueEntry
from gpuwarden.scheduling.graces import LEAST_RUNS, short_deadline
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.predictions import Features, Training

if TYPE_CHECKING:
    from pathlib import Path

TERMS: dict[str, Any] = {
    "minimum_run": "30m",
    "notice": "epoch",
    "deadline": "20m",
    "back_off": "30m",
    "at_most": {"times": 3, "per": "24h"},
}


@pytest.mark.parametrize(
    ("epochs", "short"),
    [
        ([600.0] * 100, False),
        ([600.0] * 95 + [5000.0] * 5, False),
        ([600.0] * 94 + [1500.0] * 6, True),
        ([1200.0] * 100, False),
        ([1200.1] * 100, True),
        ([5000.0] * (LEAST_RUNS - 1), False),
        ([], False),
    ],
)
def test_one_epoch_in_twenty_may_be_cut(epochs: list[float], *, short: bool) -> None:
    """More is told, with a deadline that would do; too few runs say nothing."""
    found = short_deadline(a_policy(preemption=TERMS), epochs)
    assert (found is not None) is short


def test_the_words_say_what_to_write() -> None:
    """How many were cut, and from which length on they are not."""
    found = short_deadline(a_policy(preemption=TERMS), [600.0] * 90 + [1501.0] * 10)
    assert found is not None
    assert "in 10 of the 100 newest runs" in found
    assert "write deadline: 26m, or notice: step" in found


@pytest.mark.parametrize("terms", [None, TERMS | {"notice": "step"}])
def test_who_finishes_no_epoch_needs_no_time_for_one(terms: dict[str, Any] | None) -> None:
    """Without preemption, or with a notice at the step."""
    priorities = [{"name": "low", "value": 1}]
    policy = a_policy(preemption=terms, priorities=priorities, bookings=None, windows=None)
    assert short_deadline(policy, [9999.0] * 100) is None


def test_the_daemon_tells_of_it(tmp_path: Path) -> None:
    """Once enough runs have ended by themselves; it counts their epochs and nothing else."""
    names = [str(number) for number in range(1, LEAST_RUNS + 1)]
    features = Features("yolov8x", "1280", "16", "a100-40", 1, "big.yaml")
    with running(tmp_path, TEXT, now=NOW) as here:
        assert isinstance(here.driver, PlayedDriver)
        here.driver.known = dict.fromkeys(names, Training(features, 2))
        here.driver.rows = tuple(
            QueueEntry("slurm", name, name, "ana", EntryState.DONE, gpus=1, submitted=NOW)
            for name in names
        )
        here.driver.held = tuple(
            Holding("slurm", name, "ana", "vision", 1, NOW, NOW + 3600, "a100-40") for name in names
        )
        here.tick(7200)  # learnt at its end, and told by the next account
        here.tick(120)
        (problem,) = here.client.schedule().problems
    assert problem.code == "deadline_short"
    assert "write deadline: 30m" in problem.words
