"""The training loader's waits, over a loader of torch's own."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from gpuwarden.trainer import orders
from gpuwarden.trainer.leaving import Leave, LeaveWatch
from gpuwarden.trainer.loaders import TrainLoader
from gpuwarden.trainer.ranks import Place
from gpuwarden.trainer.status import StatusBoard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class _Pictures:
    """Draws its samples in this process, with the generators that ultralytics draws from."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        random.getrandbits(32)
        np.random.random()  # noqa: NPY002 -- what ultralytics' transforms draw from
        torch.rand(1)
        if index == 8:
            signal.raise_signal(signal.SIGTERM)
        return torch.full((3, 2, 2), index)


def _loader(dataset: Any, board: StatusBoard, watch: LeaveWatch) -> TrainLoader:
    inner = torch.utils.data.DataLoader(
        dataset,
        batch_size=4,
        collate_fn=lambda samples: {"img": torch.stack(samples)},
        generator=torch.Generator(),
    )
    inner.__dict__["iterator"] = None  # ultralytics' loader keeps one
    loader = TrainLoader(
        inner, epoch=lambda: 0, board=board, watch=watch, settle=lambda: None, place=Place()
    )
    loader.follow_stateless()
    return loader


@pytest.fixture
def watch(clock: Any) -> Iterator[LeaveWatch]:
    """A watch on this process's signals."""
    watch = LeaveWatch(clock)
    watch.install()
    yield watch
    watch.restore()


@pytest.fixture
def board(jobs: Path, clock: Any) -> StatusBoard:
    """The board of a run that has just begun."""
    return StatusBoard(jobs, "run", clock=clock)


def test_a_sample_that_is_given_up_leaves_no_trace_in_the_generators(
    board: StatusBoard, watch: LeaveWatch
) -> None:
    """What is saved then is the state of the last batch, randomness included."""
    order = orders.EpochOrder(12, 0, shuffle=False)
    batches = iter(_loader(orders.StatelessDataset(_Pictures(), order, 0), board, watch))
    before = orders.get_randomness()
    for first in (0, 4):
        assert next(batches)["img"][0, 0, 0, 0] == first
    with pytest.raises(Leave):
        next(batches)
    after = orders.get_randomness()
    assert after[0] == before[0]
    assert np.array_equal(after[1][1], before[1][1])
    assert torch.equal(after[2], before[2])
    assert board.pulse.drawn == 8


def test_a_put_back_that_is_cut_off_is_done_again(board: StatusBoard, watch: LeaveWatch) -> None:
    """The signal may come while a sample gives the generators back."""

    class _CutOff(orders.StatelessDataset):
        cuts = 1

        def put_back(self) -> None:
            if self.cuts:
                self.cuts -= 1
                signal.raise_signal(signal.SIGTERM)
            super().put_back()

    dataset = _CutOff(_Pictures(), orders.EpochOrder(12, 0, shuffle=False), 0)
    before = random.getstate()
    with pytest.raises(Leave):
        next(iter(_loader(dataset, board, watch)))
    assert random.getstate() == before


def test_a_signal_before_the_wait_is_seen_at_its_beginning(
    board: StatusBoard, watch: LeaveWatch
) -> None:
    """Nothing is drawn for a training that is about to leave."""
    order = orders.EpochOrder(12, 0, shuffle=False)
    batches = iter(_loader(orders.StatelessDataset(_Pictures(), order, 0), board, watch))
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(Leave):
        next(batches)
    assert board.pulse.drawn == 0
