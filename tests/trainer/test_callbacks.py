"""Real trainings in this process, interrupted by real signals, compared bit by bit."""

from __future__ import annotations

import json
import signal
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from demo.datasets import TINY_MODEL
from tests.trainer.conftest import END_TO_END_MODEL
from tests.trainer.trainings import (
    BATCHES,
    Trainings,
    at_batch,
    at_epoch_end,
    digest_of,
    in_validation,
)

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.job_files import LeaveRequest
from gpuwarden.trainer import LeftTraining, attach

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.trainer.conftest import Material

pytestmark = [
    pytest.mark.training,
    # Ultralytics' and torch's own, which no user of theirs can mend.
    pytest.mark.filterwarnings("ignore"),
]


# Accumulation of 4 batches that crosses epochs, mosaics closed for the last one, every mix.
RICH = {"nbs": 32, "close_mosaic": 1, "mixup": 0.3, "copy_paste": 0.2, "multi_scale": 0.5}
PLAIN = {"optimizer": "SGD", "nbs": 16, "close_mosaic": 0}


@pytest.fixture(scope="module")
def undisturbed(
    material: Material, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, str]]:
    """Digest of the training that nobody interrupts, by data order and kind."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "jobs").mkdir()

    @cache
    def digest(order: str, kind: str) -> dict[str, str]:
        words = RICH if kind == "rich" else PLAIN
        trainings = Trainings(material, folder, folder)
        return digest_of(trainings.attempt(f"{order}-{kind}", words, data_order=order))

    return digest


@pytest.mark.parametrize(
    ("training", "hooks", "left"),
    [
        (("stateless", "rich"), at_batch(1, 3), 9),
        (("stateless", "rich"), in_validation(2), 6),
        (("stateless", "rich"), in_validation(4), 0),
        (("ultralytics", "rich"), at_epoch_end(0), 12),
        *(
            pytest.param(*others, marks=pytest.mark.sweep)
            for others in (
                (("stateless", "rich"), at_batch(0, 1), 17),
                (("stateless", "rich"), at_epoch_end(1), 6),
                (("stateless", "rich"), at_batch(2, 1), 5),
                (("stateless", "plain"), at_batch(0, 5), 13),
                (("ultralytics", "rich"), at_batch(0, 4), 14),
                (("ultralytics", "rich"), at_epoch_end(1), 6),
                (("ultralytics", "plain"), in_validation(1), 12),
            )
        ),
    ],
)
def test_an_interrupted_training_ends_bit_identical(
    trainings: Trainings,
    undisturbed: Callable[[str, str], dict[str, str]],
    training: tuple[str, str],
    hooks: dict[str, Callable[[Any], None]],
    left: int,
) -> None:
    """Model, EMA, optimizer and results are those of the undisturbed run, and no step is redone."""
    order, kind = training
    words = RICH if kind == "rich" else PLAIN
    with pytest.raises(LeftTraining) as leave:
        trainings.attempt("run", words, hooks=hooks, data_order=order)
    assert leave.value.code == 75
    trainer = trainings.attempt("run", words, data_order=order)
    status = trainings.status("run")
    assert status.counters.steps == left
    assert status.resume_mode == "exact"
    assert digest_of(trainer) == undisturbed(order, kind)


def test_the_state_is_durable_before_a_tracker_is_closed(trainings: Trainings) -> None:
    """W&B and others finish their uploads then, which takes as long as the network likes."""
    seen = []

    def closing(trainer: Any) -> None:
        status = trainings.status("run")
        checkpoint = status.checkpoint
        durable = checkpoint is not None and checkpoint.durable is not None
        seen.append((durable and checkpoint.step, status.exit, trainer.gpuwarden.batch + 1))

    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks={**at_batch(0, 2), "teardown": closing})
    assert seen == [(2, None, 2)]
    exit_ = trainings.status("run").exit
    assert exit_ is not None
    assert exit_.code == 75


def test_an_end_to_end_loss_goes_on_with_its_own_weights(
    trainings: Trainings, tmp_path: Path
) -> None:
    """They move between the last batch and validation, and must not move twice."""
    file = tmp_path / "end2end.yaml"
    file.write_text(END_TO_END_MODEL, "utf-8")
    words = {"epochs": 2}
    undisturbed = trainings.attempt("calm", words, file=file)
    with pytest.raises(LeftTraining):
        trainings.attempt("run", words, hooks=in_validation(1), file=file)
    assert digest_of(trainings.attempt("run", words, file=file)) == digest_of(undisturbed)


def test_ultralytics_own_order_is_plain_ultralytics(
    trainings: Trainings, undisturbed: Callable[[str, str], dict[str, str]]
) -> None:
    """Under --data-order ultralytics gpuwarden changes not a bit of what is learnt."""
    model = trainings.model()
    model.train(**trainings.words(name="vanilla", **RICH))
    assert digest_of(model.trainer) == undisturbed("ultralytics", "rich")


def test_workers_change_nothing(
    trainings: Trainings, undisturbed: Callable[[str, str], dict[str, str]]
) -> None:
    """With two loader workers, interrupted, the result is that of none, undisturbed."""
    from tests.trainer.many_workers import ManyWorkers as base  # noqa: N813, PLC0415 -- see model

    with pytest.raises(LeftTraining):
        trainings.attempt("run", RICH, hooks=at_batch(1, 4), base=base)
    trainer = trainings.attempt("run", RICH, base=base)
    assert trainer.train_loader.num_workers == 2
    assert trainings.status("run").counters.steps == 8
    assert digest_of(trainer) == undisturbed("stateless", "rich")


def test_a_corrupt_newest_state_costs_only_its_own_steps(
    trainings: Trainings, undisturbed: Callable[[str, str], dict[str, str]]
) -> None:
    """The state before it is resumed, the bad one put aside, and the end is the same."""
    with pytest.raises(LeftTraining):
        trainings.attempt("run", RICH, hooks=at_batch(1, 3), checkpoint_epochs=1)
    states = trainings.folder / "runs" / "run" / "states"
    newest = max(states.glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-7])
    trainer = trainings.attempt("run", RICH)
    assert trainings.status("run").counters.steps == 12
    assert newest.with_name(f"{newest.name}.bad").exists()
    assert digest_of(trainer) == undisturbed("stateless", "rich")


def _asking(trainings: Trainings, step: int, request: LeaveRequest) -> Callable[[Any], None]:
    """Plays the agent: writes the request after a step, and lets the poll see it."""

    def hook(trainer: Any) -> None:
        if trainer.gpuwarden_step() + 1 == step:
            path = job_files.request_path(trainings.jobs, "run")
            job_files.write(path, request.encode())
            trainer.gpuwarden_session.watch.reread()

    return hook


def test_hold_leaves_with_76_and_is_obeyed_once(trainings: Trainings) -> None:
    """The agent sees its decision answered; the requeued attempt is not sent away by it again."""
    request = LeaveRequest("d1", leave_by=4e9, then="hold", reason="rule memory-hog")
    with pytest.raises(LeftTraining) as leave:
        trainings.attempt("run", RICH, hooks={"on_train_batch_end": _asking(trainings, 4, request)})
    assert (leave.value.code, leave.value.reason) == (76, "rule memory-hog")
    status = trainings.status("run")
    assert status.request is not None
    assert (status.request.decision_id, status.request.state) == ("d1", "leaving")
    told = status.request.times
    assert told["received"] <= told["saving"] <= told["leaving"]
    assert status.exit is not None
    assert (status.exit.code, status.step) == (76, 4)
    assert status.checkpoint is not None
    assert (status.checkpoint.step, status.checkpoint.durable is not None) == (4, True)
    assert status.stop_latency is not None
    trainings.attempt("run", RICH)
    assert trainings.status("run").counters.steps == 14


def test_at_epoch_leaves_when_the_epoch_is_complete(trainings: Trainings) -> None:
    """Validation included, so that nothing of the epoch has to be done again."""
    request = LeaveRequest("d1", leave_by=4e9, at="epoch")
    with pytest.raises(LeftTraining) as leave:
        trainings.attempt("run", RICH, hooks={"on_train_batch_end": _asking(trainings, 2, request)})
    assert leave.value.code == 75
    status = trainings.status("run")
    assert (status.step, status.counters.phase_seconds["validate"] > 0) == (BATCHES, True)


def test_continue_saves_and_goes_on(
    trainings: Trainings, undisturbed: Callable[[str, str], dict[str, str]]
) -> None:
    """A request for a state alone is answered with one, once, and changes nothing else."""
    request = LeaveRequest("d1", leave_by=4e9, then="continue")
    trainer = trainings.attempt(
        "run", RICH, hooks={"on_train_batch_end": _asking(trainings, 4, request)}
    )
    steps = [manifest.step for manifest in trainer.gpuwarden_session._store.manifests()]
    assert steps == [18, 4]
    assert digest_of(trainer) == undisturbed("stateless", "rich")


def test_a_deadline_within_validation_leaves_time_to_save(trainings: Trainings) -> None:
    """The epoch's end would come too late: its validation is what is done again."""

    def ask(_validator: Any) -> None:
        path = job_files.request_path(trainings.jobs, "run")
        request = LeaveRequest("d1", leave_by=time.time() + 1.5, at="epoch")
        job_files.write(path, request.encode())
        model.trainer.gpuwarden_session.watch.reread()

    model = attach(trainings.model(), run_id="run", jobs_directory=trainings.jobs)
    model.add_callback("on_val_batch_end", ask)
    with pytest.raises(LeftTraining):
        model.train(**trainings.words(name="run", **RICH))
    newest = model.trainer.gpuwarden_session._store.manifests()[0]
    assert (newest.epoch, newest.batch) == (0, BATCHES)


def test_a_signal_that_comes_too_late_is_the_programs(trainings: Trainings) -> None:
    """A script that trains one model after the other must not lose it with the training done."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: seen.append(number))

    def late(_trainer: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        assert not seen

    try:
        trainings.attempt("run", {"epochs": 1}, hooks={"on_train_end": late})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_what_is_trained_again_after_nan_is_saved_again(trainings: Trainings) -> None:
    """Ultralytics goes back to last.pt: a state of the same position before that is another."""
    from ultralytics.models.yolo.detect import DetectionTrainer  # noqa: PLC0415 -- see model

    passes: list[int] = []

    class Poisoned(DetectionTrainer):
        """Sees NaN once, at the end of its second epoch."""

        def preprocess_batch(self, batch: Any) -> Any:
            batch = super().preprocess_batch(batch)
            step = self.gpuwarden_step()
            if step == BATCHES + 2:
                passes.append(step)
            if step == 2 * BATCHES - 1 and len(passes) == 1:
                batch["img"] *= float("nan")
            return batch

    def leave(trainer: Any) -> None:
        if trainer.gpuwarden_step() == BATCHES + 2:
            session = trainer.gpuwarden_session
            session.saver._last = float("-inf")  # a periodic state is due
            session.boundaries.wake()
            if len(passes) == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(LeftTraining):
        trainings.attempt("run", RICH, hooks={"on_train_batch_end": leave}, base=Poisoned)
    states = trainings.folder / "runs" / "run" / "states"
    saved = [json.loads(path.read_text("utf-8")) for path in sorted(states.glob("0*.json"))]
    assert [state["step"] for state in saved] == [BATCHES + 3, BATCHES + 3]
    assert saved[0]["sha256"] != saved[1]["sha256"]


def test_a_plain_checkpoint_is_resumed_where_it_is(trainings: Trainings) -> None:
    """`resume=True` with a last.pt of plain ultralytics goes on in its folder, not beside it."""

    def crash(trainer: Any) -> None:
        if trainer.epoch == 1:
            raise ZeroDivisionError

    model = trainings.model()
    model.add_callback("on_train_epoch_end", crash)
    with pytest.raises(ZeroDivisionError):
        model.train(**trainings.words(name="plain"))
    folder = trainings.folder / "runs" / "plain"
    model = trainings.model(folder / "weights" / "last.pt")
    attach(model, run_id="run", jobs_directory=trainings.jobs).train(resume=True)
    assert model.trainer.save_dir == folder
    assert trainings.status("run").counters.steps == 12


def test_exact_states_are_not_given_up_for_a_checkpoint(trainings: Trainings) -> None:
    """Ultralytics' own resume of last.pt would lose steps: the way to continue is told."""
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(1, 3))
    folder = trainings.folder / "runs" / "run"
    last = folder / "weights" / "last.pt"
    for word in (True, str(last)):
        model = attach(trainings.model(last), jobs_directory=trainings.jobs)
        with pytest.raises(InvalidInput, match=r"--run-id run .*epochs=3"):
            model.train(resume=word)
    trainings.attempt("run", {})
    assert trainings.status("run").counters.steps == 9


def test_a_project_that_cannot_be_written_is_named(trainings: Trainings) -> None:
    """Before anything is loaded for a training whose work could not be kept."""
    (trainings.folder / "runs").write_text("a file", "utf-8")
    with pytest.raises(InvalidInput, match=r"runs/run/states .*say project=FOLDER"):
        trainings.attempt("run", {})


def test_another_model_is_refused(trainings: Trainings, tmp_path: Path) -> None:
    """A model file that was edited between attempts is named, not a tensor's trouble alone."""
    file = tmp_path / "model.yaml"
    file.write_text(TINY_MODEL, "utf-8")
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(0, 1), file=file)
    file.write_text(TINY_MODEL.replace("[16, 3, 2]", "[64, 3, 2]"), "utf-8")
    with pytest.raises(InvalidInput, match="the model's layers have changed"):
        trainings.attempt("run", {}, file=file)
    status = trainings.status("run")
    assert status.exit is not None
    assert status.exit.code == InvalidInput.exit_code


def test_a_run_whose_states_are_all_damaged_does_not_start_anew(trainings: Trainings) -> None:
    """Neither at once nor when the command is tried again, for that would lose days unseen."""
    with pytest.raises(LeftTraining):
        trainings.attempt("run", {}, hooks=at_batch(1, 3))
    states = trainings.folder / "runs" / "run" / "states"
    for path in states.glob("0*.json"):
        path.write_text("{", "utf-8")
    for _ in range(2):
        with pytest.raises(InvalidInput, match="--resume never"):
            trainings.attempt("run", {})


def test_sizes_are_taken_as_ultralytics_takes_them(trainings: Trainings) -> None:
    """A pair of sizes is allowed there; what is told of it must not end the training."""
    trainings.attempt("run", {"epochs": 1, "imgsz": [64, 64]})
    described = job_files.read(job_files.description_path(trainings.jobs, "run")).content
    assert job_files.RunDescription.decode(described).imgsz == 64


def test_the_status_tells_of_the_training(trainings: Trainings) -> None:
    """Images trained on, not validated; losses, rates, metrics; phases that add up to the whole."""
    trainer = trainings.attempt("run", RICH)
    status = trainings.status("run")
    counters = status.counters
    assert (counters.images, counters.steps, status.step) == (144, 18, 18)
    assert (status.phase, status.epoch, status.exit and status.exit.code) == ("done", 2, 0)
    assert set(status.losses) == {"box_loss", "cls_loss", "dfl_loss"}
    assert set(status.lr) == {"pg0", "pg1", "pg2"}
    assert "metrics/mAP50(B)" in status.metrics
    assert status.throughput is not None
    assert status.throughput > 0
    busy = counters.data_wait_seconds + counters.compute_seconds
    assert 0 < busy <= counters.phase_seconds["train"]
    assert {"setup", "scan", "train", "validate", "checkpoint"} <= set(counters.phase_seconds)
    described = job_files.RunDescription.decode(
        job_files.read(job_files.description_path(trainings.jobs, "run")).content
    )
    assert (described.model, described.batch, described.imgsz) == ("tiny", 8, 64)
    assert (described.epochs, described.world_size, described.amp) == (3, 1, False)
    assert described.checkpoints == str(trainer.save_dir / "states")


def test_an_unknown_loop_resumes_from_whole_epochs_and_says_so(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    """Never a wrong resume: the broken epoch is done again from its beginning."""
    from ultralytics.models.yolo.detect import DetectionTrainer  # noqa: PLC0415 -- see model

    class OwnLoop(DetectionTrainer):
        """One that gpuwarden cannot know."""

        def _do_train(self) -> None:
            super()._do_train()

    with pytest.raises(LeftTraining) as leave:
        trainings.attempt("run", RICH, hooks=at_batch(1, 3), base=OwnLoop)
    assert leave.value.code == 75
    assert trainings.status("run").resume_mode == "epoch"
    assert "its trainer has a loop of its own" in caplog.text
    trainings.attempt("run", RICH, base=OwnLoop)
    assert trainings.status("run").counters.steps == 12


def test_a_fault_is_told_and_its_states_stay(trainings: Trainings) -> None:
    """An exception of the user's own reaches them, and the status says exit 1."""

    def fail(trainer: Any) -> None:
        if trainer.epoch == 1:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        trainings.attempt("run", RICH, hooks={"on_train_epoch_end": fail}, checkpoint_epochs=1)
    status = trainings.status("run")
    assert status.exit is not None
    assert (status.exit.code, status.exit.reason) == (1, "ZeroDivisionError: mine")
    trainings.attempt("run", RICH)
    assert trainings.status("run").counters.steps == 12


def test_a_model_attached_again_has_the_newer_options(trainings: Trainings) -> None:
    """A notebook's cell is run twice; the second is no layer upon the first."""
    model = trainings.model()
    attach(model, run_id="first", jobs_directory=trainings.jobs)
    attach(model, run_id="second", jobs_directory=trainings.jobs)
    model.train(**trainings.words(name="run", epochs=1))
    assert trainings.status("second").phase == "done"
    assert not job_files.status_path(trainings.jobs, "first").exists()
