"""The table of interruptions of one process: orders, workers, accumulation, mosaics, points."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from demo.datasets import TINY_MODEL, make_detection_dataset
from tests.trainer.conftest import Material
from tests.trainer.trainings import (
    BATCHES,
    Trainings,
    at_batch,
    at_epoch_end,
    digest_of,
    in_validation,
)

from gpuwarden.trainer import LeftTraining

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = [
    pytest.mark.training,
    pytest.mark.sweep,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # ultralytics' and torch's own
]


def _points() -> dict[str, dict[str, Callable[[Any], None]]]:
    return {
        "(0,1)": at_batch(0, 1),
        f"(0,{BATCHES})": at_batch(0, BATCHES),
        "validation of 0": in_validation(1),
        "(1,0)": at_epoch_end(0),
        "(1,3)": at_batch(1, 3),
        "(2,0)": at_epoch_end(1),
        "(2,4)": at_batch(2, 4),
        "final evaluation": in_validation(4),
    }


@pytest.mark.parametrize("close_mosaic", [0, 1])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("order", "workers"), [("stateless", 0), ("stateless", 2), ("ultralytics", 0)]
)
def test_every_kind_of_interruption_of_one_process(
    material: Material,
    tmp_path: Path,
    jobs: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    order: str,
    workers: int,
    accumulate: int,
    close_mosaic: int,
) -> None:
    """Model, EMA, optimizer and results are those of the undisturbed run; no step is done twice."""
    from tests.trainer.many_workers import ManyWorkers as base  # noqa: N813, PLC0415 -- after offline

    monkeypatch.setitem(os.environ, "TEST_WORKERS", str(workers))
    trainings = Trainings(material, tmp_path, jobs)
    words = {"nbs": 8 * accumulate, "close_mosaic": close_mosaic, "multi_scale": 0.5}
    options: dict[str, Any] = {"data_order": order, "base": base}
    undisturbed = digest_of(trainings.attempt("calm", words, **options))
    for number, (point, hooks) in enumerate(_points().items()):
        run = f"run{number}"
        with pytest.raises(LeftTraining):
            trainings.attempt(run, words, hooks=hooks, **options)
        left = trainings.status(run).step
        trainer = trainings.attempt(run, words, **options)
        status = trainings.status(run)
        assert status.resume_mode == "exact", point
        assert status.counters.steps == 3 * BATCHES - left, point
        assert digest_of(trainer) == undisturbed, point


def test_stripes_change_nothing(
    tmp_path: Path, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a data set with more images than stay in memory, any worker draws the same mosaics."""
    from tests.trainer.many_workers import ManyWorkers as base  # noqa: N813, PLC0415 -- after offline

    model = tmp_path / "tiny.yaml"
    model.write_text(TINY_MODEL, "utf-8")
    data = make_detection_dataset(tmp_path / "data", images=330)
    trainings = Trainings(Material(model, data), tmp_path, jobs)
    words = {"epochs": 2, "close_mosaic": 0}
    monkeypatch.setitem(os.environ, "TEST_WORKERS", "0")
    undisturbed = digest_of(trainings.attempt("calm", words, base=base))
    for number, (workers, hooks) in enumerate(((2, at_batch(0, 40)), (1, at_batch(1, 3)))):
        run = f"run{number}"
        monkeypatch.setitem(os.environ, "TEST_WORKERS", str(workers))
        with pytest.raises(LeftTraining):
            trainings.attempt(run, words, hooks=hooks, base=base)
        trainer = trainings.attempt(run, words, base=base)
        assert trainer.train_loader.num_workers == workers
        assert digest_of(trainer) == undisturbed
