"""`gpuwarden train` as a process: what schedulers, agents and people see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from tests.trainer.conftest import wait_for

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.trainer.cli import load_model, parse_words, train

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.trainer.conftest import Command, Material
    from tests.trainer.trainings import Trainings

PACED = ("--trainer", "demo.paced:PacedTrainer")
SLOW = {"GPUWARDEN_DEMO_LOADER_SECONDS": "0.4"}


def _final_state(runs: Path, name: str) -> dict[str, Any]:
    newest = max((runs / name / "states").glob("*.pt"))
    state: dict[str, Any] = torch.load(newest, weights_only=True)
    return {part: state[part] for part in ("model", "ema", "optimizer")}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


@pytest.mark.training
def test_a_run_through_sigterm_and_sigkill_ends_as_if_undisturbed(
    command: Callable[..., Command], tmp_path: Path
) -> None:
    """SIGTERM: 75 and no step lost. SIGKILL: back to the last periodic state. Then 0, and 0."""
    undisturbed = command("calm")
    first = command("run", *PACED, environment=SLOW)
    first.wait_for_step(2)
    first.send(signal.SIGTERM)
    code, out, err = first.end()
    assert code == 75, err
    left = first.status()
    assert left is not None
    assert left.exit is not None
    assert (left.exit.code, left.exit.reason) == (75, "SIGTERM")
    assert left.checkpoint is not None
    assert left.checkpoint.step == left.step >= 2
    assert "gpuwarden" not in out.replace(str(tmp_path), "")
    assert "exit status 75" in err

    second = command("run", *PACED, "--checkpoint-every=500ms", environment=SLOW)
    durable = wait_for(
        lambda: (
            (status := second.status())
            and status.exit is None
            and status.checkpoint
            and status.checkpoint.step > left.step
            and status.checkpoint
        )
    )
    second.send(signal.SIGKILL)
    assert second.end()[0] == -9

    third = command("run", *PACED)
    wait_for(lambda: (third.status(), third.process.poll() is not None)[1])
    code, out, err = third.end()
    assert code == 0, err
    assert "resuming run run" in err
    done = third.status()
    assert done is not None
    assert done.counters.steps <= 18 - durable.step
    assert (done.step, done.phase) == (18, "done")

    again = command("run", *PACED)
    code, out, err = again.end()
    assert (code, "already complete" in err) == (0, True)

    assert undisturbed.end()[0] == 0
    runs = tmp_path / "runs"
    assert _equal(_final_state(runs, "run"), _final_state(runs, "calm"))

    for attempt in (first, second, third):
        for earlier, later in zip(attempt.statuses, attempt.statuses[1:], strict=False):
            assert later.sequence > earlier.sequence
            assert later.counters.images >= earlier.counters.images
            assert later.counters.data_wait_seconds >= earlier.counters.data_wait_seconds
            for phase, seconds in earlier.counters.phase_seconds.items():
                assert later.counters.phase_seconds[phase] >= seconds


@pytest.mark.training
def test_a_signal_to_the_group_and_a_late_request_hold_the_job(
    command: Callable[..., Command], jobs: Path
) -> None:
    """Workers ignore what is meant for the training; one that hangs does not keep it from 76."""
    training = command(
        "run", "--trainer", "tests.trainer.many_workers:ManyWorkers", environment=SLOW
    )
    training.wait_for_step(1)
    pid = training.process.pid
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    os.kill(int(workers[0]), signal.SIGSTOP)
    request = job_files.LeaveRequest("d7", leave_by=4e9, then="hold", reason="rule idle")
    job_files.write(job_files.request_path(jobs, "run"), request.encode())
    for _ in range(3):
        training.send(signal.SIGTERM, group=True)
    code, _out, err = training.end()
    assert code == 76, err
    assert "taken apart" not in err  # `many_workers` would say it
    status = training.status()
    assert status is not None
    assert status.request is not None
    assert (status.request.decision_id, status.request.state) == ("d7", "leaving")
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_a_signal_during_the_first_imports_is_a_leave(command: Callable[..., Command]) -> None:
    """A job that is sent away before it has begun goes at once, and comes back."""
    training = command("run")
    status_file = Path(f"/proc/{training.process.pid}/status")

    def catches_sigterm() -> bool:
        caught = status_file.read_text("ascii").partition("SigCgt:\t")[2].split()[0]
        return bool(int(caught, 16) & 1 << signal.SIGTERM - 1)

    wait_for(catches_sigterm)
    training.send(signal.SIGTERM)
    assert training.end()[0] == 75


def test_what_is_not_installed_is_named_with_its_remedy() -> None:
    """The command alone needs neither torch nor ultralytics, so their absence shows late."""
    code = (
        "import sys; sys.modules['ultralytics'] = None\n"
        "from gpuwarden.cli import main; main(['train', 'model=a.yaml', 'data=b.yaml'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, "pip install 'gpuwarden[yolo]'" in ran.stderr) == (2, True), ran.stderr


@pytest.mark.parametrize("name", ["nowhere:X", ":X", ".X", "json", "json:JSONDecoder"])
def test_a_trainer_that_is_none_is_refused(name: str) -> None:
    """Before anything is written: a typing error must not leave a run behind."""
    from gpuwarden.trainer.environments import named_class  # noqa: PLC0415 -- after offline

    with pytest.raises(InvalidInput, match=f"trainer '{name}'"):
        named_class(name)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({}, "which model"),
        ({"model": "nowhere.yaml", "data": "d.yaml"}, "model=nowhere.yaml: .*does not exist"),
        ({"model": "yolov8n.yaml"}, "which data set"),
        ({"model": "yolov8n.yaml", "resume": "auto"}, "which data set"),
    ],
)
def test_what_is_missing_is_asked_for(words: dict[str, Any], complaint: str) -> None:
    """Nothing is guessed, nor downloaded unasked."""
    with pytest.raises(InvalidInput, match=complaint):
        load_model(words)


def test_a_checkpoint_knows_its_data_set(material: Material) -> None:
    """`yolo train resume model=last.pt` needs no data= either."""
    assert load_model({"model": str(material.model), "resume": True}).task == "detect"


@pytest.mark.parametrize(
    ("name", "content"),
    [("data.yaml", "train: images\nnames: [box]\n"), ("half.pt", "not a"), ("list.yaml", "[]")],
)
def test_what_is_no_model_is_named(tmp_path: Path, name: str, content: str) -> None:
    """One line, and not the traceback of whoever stumbled over it."""
    file = tmp_path / name
    file.write_text(content, "utf-8")
    with pytest.raises(InvalidInput, match=f"model={file} is no model that can be read"):
        load_model({"model": str(file), "data": "d.yaml"})


@pytest.mark.training
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"device": "97"}, r"device=97: .*torch sees \d+ card"),
        ({"device": "gpu"}, r"device=gpu: .*torch sees \d+ card"),
        ({"optimizer": "Adan"}, "optimizer=Adan: .*not found.*AdamW"),
        ({"data": "MODEL"}, "data=.*: .*'train:' key missing"),
    ],
)
def test_what_is_refused_in_setup_is_wrong_usage(
    trainings: Trainings, words: dict[str, Any], complaint: str
) -> None:
    """Status 2 and a remedy; and the word put right in the same command trains."""
    if "data" in words:
        words = {"data": str(trainings.material.model)}
    with pytest.raises(InvalidInput, match=complaint):
        trainings.attempt("run", words)
    assert trainings.attempt("run", {"epochs": 1}).epoch == 0


def test_an_option_among_the_words_is_shown_its_place() -> None:
    """Words of `yolo` may begin with dashes, so ours cannot be told from them there."""
    with pytest.raises(InvalidInput, match="--run-id goes before the first KEY=VALUE"):
        parse_words(["model=a.yaml", "--run-id", "exp1"])


def test_help_teaches_without_torch() -> None:
    """Signals, statuses and examples; fast is asserted by what is not imported, elsewhere."""
    result = CliRunner().invoke(train, ["--help"])
    assert result.exit_code == 0
    for text in ("SIGUSR1", "75", "76", "77", "resume=auto", "--trainer MODULE:CLASS", "Slurm"):
        assert text in result.output


def test_words_are_understood_as_yolo_understands_them() -> None:
    """Types, spaces around `=`, bare booleans, a task and `train` itself."""
    words = parse_words(
        ["train", "detect", "epochs=3", "lr0=1e-3", "cos_lr", "data", "=", "a.yaml", "device=0"]
    )
    assert words == {
        "task": "detect",
        "epochs": 3,
        "lr0": 0.001,
        "cos_lr": True,
        "data": "a.yaml",
        "device": 0,
    }


@pytest.mark.parametrize(
    "words",
    [
        ["epoch=3"],
        ["nonsense"],
        ["predict"],
        ["imgsz"],
        ["lr0="],
        ["epochs=abc"],
        ["epochs=0"],
        ["amp=maybe"],
    ],
)
def test_what_yolo_would_refuse_is_refused(words: list[str]) -> None:
    """A typing error does not become a training with other settings."""
    with pytest.raises(InvalidInput):
        parse_words(words)
