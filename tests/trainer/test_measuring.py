"""Losses that are no numbers are counted by batch, though they are looked at once a second."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gpuwarden.trainer.measuring import nonfinite

GOOD, BAD = {"box": torch.tensor(1.0)}, {"box": torch.tensor(math.nan)}


@pytest.mark.parametrize(
    ("mean", "losses", "count"),
    [
        (GOOD, [GOOD, GOOD], 0),
        (BAD, [GOOD, BAD, GOOD, BAD], 2),
        (BAD, [GOOD, GOOD], 0),  # it was none earlier in the epoch
        (None, [GOOD, BAD], 1),  # no mean is known after a batch did not fit
        (torch.tensor([1.0, math.inf]), [torch.tensor([1.0, math.inf])], 1),  # older releases
        ({"box": math.inf}, [{"box": 1.0, "cls": math.inf}], 1),  # a trainer of one's own
        (BAD, [], 0),
    ],
)
def test_each_batch_whose_loss_is_no_number_counts(
    mean: Any, losses: list[Any], count: int
) -> None:
    """Whatever shape the losses have."""
    assert nonfinite(mean, losses) == count
