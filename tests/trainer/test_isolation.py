"""A notebook's training, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.trainer.conftest import REPOSITORY, wait_for

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import LeftTraining, attach
from gpuwarden.trainer.cli import train
from gpuwarden.trainer.isolation import TrainingFailed
from gpuwarden.trainer.settings import TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.trainings import Trainings

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def apart(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose `train` starts another process, which finds the tests' modules."""
    monkeypatch.chdir(REPOSITORY)
    model = trainings.model()
    return attach(model, isolate=True, run_id="run", jobs_directory=trainings.jobs)


def test_the_model_has_the_best_weights_afterwards(
    apart: Any, trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    """And this process has not trained; a second call finds the run complete."""
    metrics = apart.train(**trainings.words(name="run", epochs=1))
    assert "metrics/mAP50(B)" in metrics
    assert apart.ckpt_path == str(trainings.folder / "runs" / "run" / "weights" / "best.pt")
    assert apart.ckpt["train_args"]["epochs"] == 1
    assert "1 epochs completed" in capsys.readouterr().out
    assert apart.trainer is None
    assert trainings.status("run").counters.steps == 6


def test_what_it_refuses_reaches_the_notebook(apart: Any, trainings: Trainings) -> None:
    """With the child's own words, not a status alone."""
    with pytest.raises(TrainingFailed, match=r"status 2: .*nowhere.yaml"):
        apart.train(**{**trainings.words(name="run"), "data": "nowhere.yaml"})


@pytest.mark.sweep
def test_leaving_is_the_same_as_without_a_child(apart: Any, trainings: Trainings) -> None:
    """The stop button of a notebook is an interrupt: the state is saved, and goes on from there."""
    from tests.trainer.interrupted import Interrupted  # noqa: PLC0415 -- after its environment

    with pytest.raises(LeftTraining) as left:
        apart.train(trainer=Interrupted, **trainings.words(name="run"))
    assert (left.value.code, left.value.reason) == (75, "SIGTERM")
    apart.train(**trainings.words(name="run"))
    assert trainings.status("run").counters.steps == 16


@pytest.mark.sweep
def test_what_no_other_process_has_is_told(
    apart: Any, trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks and classes of the notebook; in a kernel such a training stays in its process."""

    class Local:
        pass

    with pytest.raises(InvalidInput, match="the trainer class Local is defined in this notebook"):
        apart.train(trainer=Local)
    with pytest.raises(InvalidInput, match="augmentations= is a list"):
        apart.train(augmentations=[Local()])
    apart.add_callback("on_train_start", print)
    with pytest.raises(InvalidInput, match="callbacks were added"):
        apart.train(**trainings.words(name="run"))
    monkeypatch.setitem(sys.modules, "IPython", _kernel())
    model = attach(trainings.model(), run_id="here", jobs_directory=trainings.jobs)
    model.add_callback("on_train_start", print)
    model.train(**trainings.words(name="here", epochs=1))
    assert model.trainer is not None
    other = attach(trainings.model(), run_id="there", jobs_directory=trainings.jobs)
    other.train(**trainings.words(name="there", epochs=1))
    assert other.trainer is None


def _kernel() -> Any:
    from types import SimpleNamespace  # noqa: PLC0415 -- for this alone

    shell = SimpleNamespace(kernel=object())
    return SimpleNamespace(get_ipython=lambda: shell)


def test_settings_become_the_options_that_make_them(tmp_path: Path) -> None:
    """Nothing that was chosen in Python is lost on the way to the command line."""
    chosen = TrainSettings(
        run_id="exp1",
        jobs_directory=tmp_path,
        checkpoint_seconds=0.0,
        mtbf_seconds=5400.0,
        upload="file:///x",
        upload_wait_seconds=0.0,
        export=("onnx", "engine"),
        extend_epochs=7,
        gradient_norm=True,
        keep=5,
        lock_seconds=1.5,
        stall_seconds=600.0,
    )
    options = list(chosen.as_options())
    assert "--checkpoint-every=auto" in options
    seen: dict[str, Any] = {}

    def note(**given: Any) -> None:
        seen.update(given)

    command = type(train)("train", params=train.params, callback=note)
    ran = CliRunner().invoke(command, options)
    assert ran.exit_code == 0, ran.output
    for name in ("words", "nproc", "follow", "result", "with_parent"):
        seen.pop(name)
    assert TrainSettings.from_options(**seen) == chosen


@pytest.mark.sweep
def test_a_child_leaves_with_its_kernel(trainings: Trainings, tmp_path: Path) -> None:
    """A kernel that is restarted must not leave a training behind that nobody sees."""
    result = tmp_path / "result.json"
    words = trainings.words(name="run", epochs=100)
    child = [sys.executable, "-m", "gpuwarden", "train", "--run-id=run", "--with-parent"]
    child += [f"--jobs-directory={trainings.jobs}", f"--result={result}"]
    child += [f"{name}={value}" for name, value in words.items()]
    child.append(f"model={trainings.material.model}")
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *child],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
        env={**os.environ},
    ) as kernel:
        status = trainings.folder / "node" / "jobs" / "run.status.json"
        wait_for(lambda: status.exists() and trainings.status("run").step > 1)
        kernel.send_signal(signal.SIGKILL)
    wait_for(result.exists)
    document = json.loads(result.read_text("utf-8"))
    assert (document["code"], document["reason"], document["run_id"]) == (75, "SIGTERM", "run")
