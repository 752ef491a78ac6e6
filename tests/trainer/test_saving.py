"""When states are due, and what the loop waits for."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.trainer.conftest import draft

from gpuwarden.trainer.saving import Saver, best_interval
from gpuwarden.trainer.states import Manifest, Position, StateStore
from gpuwarden.trainer.status import StatusBoard

if TYPE_CHECKING:
    from pathlib import Path


def test_the_best_interval_is_that_of_young_and_daly_within_bounds() -> None:
    """The square root of twice the cost and the time between failures; unknown is the longest."""
    assert best_interval(0.5, 3600.0) == math.sqrt(3600.0)
    assert best_interval(0.001, 3600.0) == 60.0
    assert best_interval(10.0, 86400.0) == 300.0
    assert best_interval(0.0, 3600.0) == 300.0


class SlowStore(StateStore):
    """Writes when told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "mine")
        self.gate = threading.Event()

    def write(self, state: dict[str, Any], draft: Manifest) -> Manifest:
        """As a disk that is slow."""
        self.gate.wait(60)
        return super().write(state, draft)


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    """On a disk that has stopped."""
    folder = tmp_path / "states"
    folder.mkdir()
    return SlowStore(folder)


def test_where_no_thread_can_be_started_a_state_is_written_all_the_same(
    store: SlowStore, jobs: Path, clock: Any
) -> None:
    """A container's limit of processes counts threads: the training must not end with it."""
    store.gate.set()
    saver = Saver(store, StatusBoard(jobs, "run", clock=clock), every=300.0, clock=clock)
    before = threading.stack_size((1 << 47) - (1 << 20))  # more than there are addresses
    try:
        with pytest.raises(RuntimeError, match="start new thread"):
            threading.Thread(target=print).start()
        state: dict[str, Any] = {"model": {"w": torch.ones(3)}, "ema": {}, "optimizer": {}}
        position = Position(0, 1)
        assert saver.save(position, capture=lambda: state, draft=draft(), background=True)
    finally:
        threading.stack_size(before)
    saver.collect()
    assert saver.newest == position


def test_a_save_that_may_come_later_does_not_wait_for_a_slow_disk(
    store: SlowStore, jobs: Path, clock: Any
) -> None:
    """While a state is being written the loop goes on; the next boundary after it saves again."""
    told: list[int] = []
    saver = Saver(
        store,
        StatusBoard(jobs, "run", clock=clock),
        every=300.0,
        clock=clock,
        committed=lambda manifest: told.append(manifest.step),
    )
    state = {"model": {"w": torch.ones(3)}, "ema": {}, "optimizer": {}}

    def save(step: int, *, later: bool) -> bool:
        return saver.save(
            Position(0, step),
            capture=lambda: dict(state),
            draft=draft(step),
            background=True,
            later=later,
        )

    assert save(1, later=False)
    assert save(2, later=True)  # would wait for ever
    assert not saver.due
    clock.advance(1000)
    assert not saver.due
    store.gate.set()
    saver.collect(wait=True)
    assert told == [1]
    assert saver.newest == Position(0, 1)
    assert saver.due
    assert save(3, later=True)
    saver.collect(wait=True)
    assert told == [1, 3]
    assert not saver.due
