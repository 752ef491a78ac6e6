"""The scheduler's file: what was seen is counted once, also where an older one is taken over."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from gpuwarden.schedule_api import STEPS, Cause, Outcome, Preemption
from gpuwarden.scheduling import sqlite_files
from gpuwarden.scheduling.store_files import MIGRATIONS
from gpuwarden.scheduling.stores import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOW = 1_800_000_000.0
GAPS = (0.0, 0.4, 30.0, 5.0, 2.0, 100_000.0)
"""Seconds from each step to the next one."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """One in a folder of its own."""
    made = Store(tmp_path)
    yield made
    made.close()


def preemption(*names: str, number: int = 1) -> Preemption:
    """A receipt with these steps."""
    times = {step: NOW + sum(GAPS[: place + 1]) for place, step in enumerate(STEPS)}
    return Preemption(
        id=f"p{number}",
        victim="1",
        successor="2",
        cause=Cause.PRIORITY,
        at="epoch",
        deadline=NOW + 600,
        steps={name: times[name] for name in names},
        outcome=Outcome.OPEN,
    )


def test_a_step_is_counted_once_however_often_it_is_told(store: Store) -> None:
    """From the one before it; one that was not seen is passed over."""
    for names in (STEPS[:1], STEPS[:2], STEPS[:2], STEPS[:4], STEPS, STEPS):
        store.keep_preemptions([preemption(*names)], now=NOW)
    assert store.step_counts() == {
        "acknowledged": {1.0: (1, pytest.approx(0.4))},
        "saved": {60.0: (1, 30.0)},
        "left": {5.0: (1, 5.0)},
        "freed": {5.0: (1, 2.0)},
        "started": {math.inf: (1, 100_000.0)},
    }
    store.keep_preemptions([preemption("notified", "left", number=2)], now=NOW)
    assert store.step_counts()["left"] == {5.0: (1, 5.0), 60.0: (1, pytest.approx(35.4))}


def test_two_clocks_make_no_step_earlier_than_the_one_before(store: Store) -> None:
    """A trainer's clock is behind the daemon's: it took no time, and no negative one."""
    odd = preemption("notified", "acknowledged")
    odd.steps["acknowledged"] = NOW - 30
    store.keep_preemptions([odd], now=NOW)
    assert store.step_counts() == {"acknowledged": {1.0: (1, 0.0)}}


def test_what_was_seen_before_it_was_counted_is_counted(tmp_path: Path) -> None:
    """A file of an older gpuwarden gives the same numbers as one that counted from the start."""
    receipts = [
        preemption(*STEPS),
        preemption("notified", "left", number=2),
        preemption("notified", number=3),
        preemption(number=4),
    ]
    counted = Store(tmp_path)
    counted.keep_preemptions(receipts, now=NOW)
    wanted = counted.step_counts()
    rows = counted.rows("SELECT * FROM preemptions")
    counted.close()
    (tmp_path / "scheduler.sqlite").unlink()
    old = sqlite_files.opened(tmp_path / "scheduler.sqlite", MIGRATIONS[:1], remedy="none")
    for row in rows:
        old.execute("INSERT INTO preemptions VALUES (?, ?, ?, ?, ?, ?, ?)", tuple(row.values()))
    old.close()
    taken = Store(tmp_path)
    assert taken.step_counts() == wanted
    taken.keep_preemptions(receipts, now=NOW)
    assert taken.step_counts() == wanted
    taken.close()
