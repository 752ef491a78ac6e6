"""Every task that is said to resume exactly, interrupted and compared bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.trainer.task_data import HEADS, make_material, task_of
from tests.trainer.trainings import BATCHES, Trainings, at_batch, digest_of, in_validation

from gpuwarden.trainer import LeftTraining

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.training,
    pytest.mark.filterwarnings("ignore"),  # ultralytics' and torch's own
]

# Accumulation that crosses epochs, mosaics closed for the last epoch.
WORDS = {"nbs": 32, "close_mosaic": 1}


def _words(kind: str) -> dict[str, Any]:
    extra = {"copy_paste": 0.5, "mixup": 0.3} if task_of(kind) == "segment" else {}
    classes = {"dropout": 0.2} if kind == "classify" else {}
    return {**WORDS, **extra, **classes, "task": task_of(kind)}


@pytest.mark.parametrize("kind", ["segment", pytest.param("classify", marks=pytest.mark.sweep)])
def test_a_task_resumes_exactly(kind: str, tmp_path: Path, jobs: Path) -> None:
    """In the middle of an accumulation, with and without loader workers; to the last bit."""
    from tests.trainer.many_workers import many_workers  # noqa: PLC0415 -- after offline

    trainings = Trainings(make_material(tmp_path / "material", kind), tmp_path, jobs)
    words = _words(kind)
    undisturbed = digest_of(trainings.attempt("calm", words))
    base = many_workers(task_of(kind))
    with pytest.raises(LeftTraining):
        trainings.attempt("run", words, hooks=at_batch(1, 3), base=base)
    trainer = trainings.attempt("run", words, base=base)
    status = trainings.status("run")
    assert (status.resume_mode, status.counters.steps) == ("exact", 3 * BATCHES - 9)
    assert trainer.train_loader.num_workers == 2
    assert digest_of(trainer) == undisturbed


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", HEADS)
def test_every_kind_of_interruption_of_a_task(kind: str, tmp_path: Path, jobs: Path) -> None:
    """Within epochs, at their ends, in validation and the final evaluation; in both data orders."""
    trainings = Trainings(make_material(tmp_path / "material", kind), tmp_path, jobs)
    words = _words(kind)
    orders = ("stateless",) if kind == "classify" else ("stateless", "ultralytics")
    for order in orders:
        points = {  # anew: validations are counted
            "first": at_batch(0, 1),
            "within": at_batch(1, 4),
            "closing": at_batch(2, 1),
            "validation": in_validation(2),
            "final": in_validation(4),
        }
        undisturbed = digest_of(trainings.attempt(f"{order}-calm", words, data_order=order))
        for name, hooks in points.items():
            run = f"{order}-{name}"
            with pytest.raises(LeftTraining):
                trainings.attempt(run, words, hooks=hooks, data_order=order)
            trainer = trainings.attempt(run, words, data_order=order)
            assert trainings.status(run).resume_mode == "exact"
            assert digest_of(trainer) == undisturbed, run


def test_a_task_without_proof_says_so(tmp_path: Path, jobs: Path) -> None:
    """Classification validates in a random order of ultralytics' own, which is not kept."""
    trainings = Trainings(make_material(tmp_path / "material", "classify"), tmp_path, jobs)
    words = {**_words("classify"), "epochs": 1}
    trainings.attempt("run", words, data_order="ultralytics")
    assert trainings.status("run").resume_mode == "epoch"
