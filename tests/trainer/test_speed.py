"""The bench of the trainer's speed: what it prints, what it counts, and how it ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from bench.trainer import speed
from bench.trainer.beside import OURS, THEIRS, Meter, wrapper

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.conftest import Material


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_ultralytics_does_within_a_hook_is_not_counted() -> None:
    """Nor what the loop does between two hooks; what the hook does itself is, in full."""
    meter = Meter()

    def hook() -> None:
        _burn(0.01)
        meter.call(THEIRS, _burn, 0.05)
        _burn(0.01)

    meter.event("on_train_epoch_start")
    meter.call(OURS, hook)
    _burn(0.05)
    meter.event("on_train_batch_end")
    assert 0.02e9 <= meter.batches[0] < 0.05e9


@pytest.mark.training
@pytest.mark.filterwarnings("ignore")  # ultralytics' and torch's own
def test_the_hooks_cost_is_told_and_compared(
    material: Material, jobs: Path, tmp_path: Path
) -> None:
    """Positive, well under a step of the model, and missed exactly where it exceeds its target."""
    words = material.words(epochs=2, name="w", project=str(tmp_path / "runs"))
    words["model"] = str(material.model)
    table, missed = wrapper(jobs, words, rounds=1, kinds=[("stateless", 0)])
    header, line, row = table.splitlines()
    assert header.count("|") == line.count("|") == row.count("|")
    order, workers, *cells = (cell.strip() for cell in row.strip("|").split("|"))
    assert (order, workers) == ("stateless", "0")
    median, _p90, _mean, meter, share, plain, ours = (float(cell.rstrip("%")) for cell in cells[:7])
    assert 0 < median < 5000
    assert meter > 0
    assert share < 50
    assert min(plain, ours) > 0
    assert any("us a batch" in miss for miss in missed) == (median > 20)
    assert any("of an epoch" in miss for miss in missed) == (share > 1)


@pytest.mark.parametrize(("missed", "status"), [([], 0), (["wrapper: 94.4 us a batch"], 1)])
def test_a_missed_target_is_the_exit_status(
    missed: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """After all tables are there: one that misses keeps no other from being seen."""
    assert speed.report([("| a |", missed), ("| b |", [])]) == status
    out = capsys.readouterr().out
    assert out.startswith("| a |\n| b |\n")
    assert ("MISSED wrapper: 94.4 us a batch" in out) == bool(missed)
    assert ("Every target is met." in out) != bool(missed)
