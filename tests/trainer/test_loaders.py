"""The training loader's waits, over a loader that is a plain iterable."""

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


class _Drawing:
    """Draws samples in this process, as a loader without workers does; told to leave meanwhile."""

    num_workers = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        yield 0
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 -- what ultralytics' transforms draw from
        torch.manual_seed(1)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the wait goes on")


def test_a_sample_that_is_given_up_leaves_no_trace_in_the_generators(
    jobs: Path, clock: Any
) -> None:
    """What is saved then is the state of the last batch, randomness included."""
    watch = LeaveWatch(clock)
    watch.install()
    try:
        loader = TrainLoader(
            _Drawing(),
            epoch=lambda: 0,
            board=StatusBoard(jobs, "run", clock=clock),
            watch=watch,
            settle=lambda: None,
            place=Place(),
        )
        batches = iter(loader)
        assert next(batches) == 0
        before = orders.get_randomness()
        with pytest.raises(Leave):
            next(batches)
    finally:
        watch.restore()
    after = orders.get_randomness()
    assert after[0] == before[0]
    assert np.array_equal(after[1][1], before[1][1])
    assert torch.equal(after[2], before[2])
