"""A run that is started again as something else: refused by name, or continued as was asked."""

from __future__ import annotations

import dataclasses
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.trainer.trainings import BATCHES, Trainings, at_batch, digest_of

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import LeftTraining
from gpuwarden.trainer.runs import RunRecord
from gpuwarden.trainer.states import FOLDER, Manifest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


def _manifest(**changes: Any) -> Manifest:
    fitting = Manifest(
        lineage="",
        epoch=1,
        batch=2,
        step=8,
        batches=6,
        epochs=3,
        batch_size=8,
        dataset="abc",
        order="stateless-1",
        exact=True,
        reason="",
        time=0.0,
        seed=0,
        optimizer="SGD",
        words={"epochs": "3"},
    )
    return dataclasses.replace(fitting, **changes)


def _trainer() -> Any:
    return SimpleNamespace(
        epochs=3,
        batch_size=8,
        train_loader=range(6),
        args=SimpleNamespace(time=None, seed=0),
        optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1),
        model=torch.nn.Identity(),
        data={"names": {0: "cat", 1: "dog"}},
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"epochs": 5}, "epochs=3 instead of 5"),
        ({"batch_size": 16}, "batch=8 instead of 16"),
        ({"batches": 7}, "6 batches an epoch instead of 7"),
        ({"dataset": "xyz"}, "the data set's images or labels have changed"),
        ({"order": "ultralytics-1"}, "data order stateless-1 instead of ultralytics-1"),
        (
            {"order": "stateless-0", "software": {"gpuwarden": "0.9"}},
            r"order stateless-1 instead of stateless-0: only what wrote it \(gpuwarden 0.9\)",
        ),
        ({"seed": 7}, "seed=0 instead of 7"),
        ({"optimizer": "AdamW"}, "optimizer SGD instead of AdamW"),
        ({"classes": "0123"}, "the data set's classes have changed"),
        ({"words": {"epochs": "3", "lr0": "0.1"}}, r"lr0=\(default\) instead of 0.1"),
    ],
)
def test_a_state_of_another_training_is_refused(changes: dict[str, Any], complaint: str) -> None:
    """Each difference is named, with what to do about it."""
    from gpuwarden.trainer import comparisons  # noqa: PLC0415 -- after the environment is set

    where = {"dataset": "abc", "order": "stateless-1", "on_mismatch": "refuse"}
    record = RunRecord("run", "", {"epochs": "3"}, 0.0)
    assert comparisons.kind_for(_manifest(), _trainer(), record=record, **where) == "exact"
    other = _manifest(**changes)
    with pytest.raises(InvalidInput, match=rf"{complaint}.*--on-mismatch epoch"):
        comparisons.kind_for(other, _trainer(), record=record, **where)
    for choice in ("epoch", "weights"):
        where["on_mismatch"] = choice
        assert comparisons.kind_for(other, _trainer(), record=record, **where) == choice


def test_another_number_of_gpus_or_workers_is_no_other_training() -> None:
    """The batch is that of all of them together, and the order of data does not depend on them."""
    from gpuwarden.trainer import comparisons  # noqa: PLC0415 -- after the environment is set

    kind = comparisons.kind_for(
        _manifest(world_size=4),
        _trainer(),
        dataset="abc",
        order="stateless-1",
        record=RunRecord("run", "", {"epochs": "3"}, 0.0),
        on_mismatch="refuse",
    )
    assert kind == "exact"


def _left(trainings: Trainings, epoch: int, batch: int, **words: Any) -> None:
    with pytest.raises(LeftTraining):
        trainings.attempt("run", words, hooks=at_batch(epoch, batch))


def test_with_epoch_the_epoch_begins_again_under_the_new_words(trainings: Trainings) -> None:
    """What was learnt is kept, the new rates hold, and an interruption is then exact again."""
    _left(trainings, 1, 3)
    with pytest.raises(InvalidInput, match=r"lr0=0.001 instead of \(default\).*--on-mismatch"):
        trainings.attempt("run", {"lr0": 0.001})
    rates: list[float] = []

    def note(trainer: Any) -> None:
        rates.append(trainer.optimizer.param_groups[0]["initial_lr"])

    with pytest.raises(LeftTraining):
        trainings.attempt(
            "run",
            {"lr0": 0.001},
            on_mismatch="epoch",
            hooks={"on_train_epoch_start": note, **at_batch(2, 2)},
        )
    assert rates == [0.001, 0.001]
    assert trainings.status("run").counters.steps == BATCHES + 2
    trainer = trainings.attempt("run", {"lr0": 0.001}, on_mismatch="epoch")
    assert trainings.status("run").counters.steps == BATCHES - 2
    assert trainings.status("run").resume_mode == "exact"
    digest_of(trainer)  # asserts that results.csv has one row for each epoch


def test_with_weights_another_model_begins_from_what_fits(
    trainings: Trainings, tmp_path: Path
) -> None:
    """As when classes were added: a new training, and the old weights stay beside it.

    One that ended before its first state begins from them again, not from nothing.
    """
    file = tmp_path / "model.yaml"
    file.write_text(trainings.material.model.read_text("utf-8"), "utf-8")
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(1, 3), file=file)
    folder = trainings.folder / "runs" / "run"
    old = torch.load(max((folder / FOLDER).glob("*.pt")), weights_only=True)["ema"]
    file.write_text(file.read_text("utf-8").replace("[16, 3, 2]", "[24, 3, 2]"), "utf-8")
    with pytest.raises(InvalidInput, match="the model's layers have changed"):
        trainings.attempt("run", {}, file=file)
    seen: dict[str, torch.Tensor] = {}

    def note(trainer: Any) -> None:
        seen.update({name: value.clone() for name, value in trainer.model.state_dict().items()})

    def fail(_trainer: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainings.attempt(
            "run", {}, file=file, on_mismatch="weights", hooks={"on_train_batch_end": fail}
        )
    trainer = trainings.attempt(
        "run", {}, file=file, on_mismatch="weights", hooks={"on_train_start": note}
    )
    name = "model.3.conv.weight"
    assert torch.equal(seen[name], old[name])
    assert trainings.status("run").counters.steps == 3 * BATCHES
    assert list((folder / "weights").glob("best-before-*.pt"))
    assert trainer.best.exists()
    trainings.attempt("run", {}, file=file, on_mismatch="weights")
    record = RunRecord.read(folder / FOLDER)
    assert record is not None
    assert record.finished is not None


def test_other_data_is_not_trained_on_unasked(trainings: Trainings, tmp_path: Path) -> None:
    """A data set that was edited in place has the same words, and is another all the same."""
    copy = tmp_path / "data"
    shutil.copytree(trainings.material.data.parent, copy)
    data = copy / trainings.material.data.name
    data.write_text(
        data.read_text("utf-8").replace(str(trainings.material.data.parent), str(copy)), "utf-8"
    )
    _left(trainings, 1, 3, data=str(data))
    label = next(path for path in sorted(copy.rglob("train/*.txt")) if path.read_text("utf-8"))
    label.write_text(label.read_text("utf-8").splitlines()[0] + "\n0 0.5 0.5 0.1 0.1\n", "utf-8")
    for cache in copy.rglob("*.cache"):
        cache.unlink()
    with pytest.raises(InvalidInput, match="the data set's images or labels have changed"):
        trainings.attempt("run", {"data": str(data)})
    trainings.attempt("run", {"data": str(data)}, on_mismatch="epoch")
    assert trainings.status("run").counters.steps == 2 * BATCHES


def test_more_epochs_are_given_only_when_asked_for(trainings: Trainings) -> None:
    """A finished run stays finished, and is extended once however often the script is started."""
    trainings.attempt("run", {})
    trainings.attempt("run", {})
    assert trainings.status("run").counters.steps == 3 * BATCHES  # nothing was trained again
    with pytest.raises(InvalidInput, match="--extend-epochs TOTAL"):
        trainings.attempt("run", {"epochs": 5})
    with pytest.raises(InvalidInput, match="has 3 epochs already"):
        trainings.attempt("run", {}, extend_epochs=2)
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, extend_epochs=5, hooks=at_batch(3, 2))
    assert trainings.status("run").counters.steps == 2
    trainer = trainings.attempt("run", {}, extend_epochs=5)
    assert trainings.status("run").counters.steps == 2 * BATCHES - 2
    assert (trainer.epochs, trainer.epoch) == (5, 4)
    digest_of(trainer)
    sequence = trainings.status("run").sequence
    trainings.attempt("run", {}, extend_epochs=5)
    assert trainings.status("run").sequence == sequence


def test_a_run_that_stopped_early_may_go_on(trainings: Trainings) -> None:
    """With new patience, counted from where it stopped; its rates are its own optimizer's."""
    words = {"epochs": 6, "patience": 2, "optimizer": "auto"}

    def spoil(trainer: Any) -> None:
        trainer.stopper.best_fitness = 1.0  # nothing that this model learns is as good

    first = trainings.attempt("run", words, hooks={"on_train_start": spoil})
    assert (first.stop, first.epoch) == (True, 1)
    rates = [group["initial_lr"] for group in first.optimizer.param_groups]
    trainer = trainings.attempt("run", {**words, "patience": 3}, extend_epochs=6)
    assert trainer.epoch == 4
    assert trainer.stopper.patience == 3
    assert trainer.scheduler.base_lrs == rates
    assert type(trainer.optimizer) is type(first.optimizer)


def test_the_same_data_elsewhere_is_the_same_data(trainings: Trainings, tmp_path: Path) -> None:
    """Another machine has it in another folder; what is in it counts, and the resume is exact."""
    _left(trainings, 1, 3)
    copy = tmp_path / "elsewhere"
    shutil.copytree(trainings.material.data.parent, copy)
    data = copy / trainings.material.data.name
    data.write_text(
        data.read_text("utf-8").replace(str(trainings.material.data.parent), str(copy)), "utf-8"
    )
    trainings.attempt("run", {"data": str(data)})
    assert trainings.status("run").counters.steps == 3 * BATCHES - BATCHES - 3
    sequence = trainings.status("run").sequence
    trainings.attempt("run", {})
    assert trainings.status("run").sequence == sequence


def test_no_epoch_is_trained_beyond_the_plan(trainings: Trainings) -> None:
    """Neither by an extension to what is done already, nor by another word for a finished run."""
    trainings.attempt("run", {})
    trainings.attempt("run", {}, extend_epochs=3)
    assert trainings.status("run").counters.steps == 0
    with pytest.raises(InvalidInput, match="all of its 3 epochs are done"):
        trainings.attempt("run", {"lr0": 0.001}, on_mismatch="epoch")
    sequence = trainings.status("run").sequence
    trainings.attempt("run", {})  # what was refused has changed nothing: it is still complete
    assert trainings.status("run").sequence == sequence
    trainings.attempt("run", {"lr0": 0.001, "epochs": 4}, on_mismatch="epoch")
    assert trainings.status("run").counters.steps == BATCHES


def test_a_damaged_record_does_not_become_a_new_training(trainings: Trainings) -> None:
    """Its states are beside it, and would be trained a second time without a word."""
    _left(trainings, 1, 3)
    record = trainings.folder / "runs" / "run" / FOLDER / RunRecord.FILE
    content = record.read_bytes()
    record.write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidInput, match=r"its run\.json cannot be used"):
        trainings.attempt("run", {})
    record.write_bytes(content)
    trainings.attempt("run", {})
    assert trainings.status("run").counters.steps == 3 * BATCHES - BATCHES - 3


def test_names_and_models_of_any_kind_have_a_digest() -> None:
    """Classes may be numbered and named at once, and a model's file hold anything."""
    from gpuwarden.trainer import comparisons  # noqa: PLC0415 -- after the environment is set

    trainer = _trainer()
    trainer.data = {"names": {0: "cat", "1": "dog", (2, 3): object()}}
    trainer.model.yaml = {"nc": 2, "head": [object()], "yaml_file": "a"}
    first = comparisons.facts(trainer)
    trainer.model.yaml = {"nc": 2, "head": [object()], "yaml_file": "b"}
    assert comparisons.facts(trainer) == first
    assert first["model"] != ""
