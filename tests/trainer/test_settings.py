from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer.settings import TrainSettings


def test_checkpoint_every_takes_a_duration_or_seconds() -> None:
    """Python users may say 90 or "90s", and a missing unit is explained."""
    assert TrainSettings.from_options(checkpoint_every="1m30s").checkpoint_seconds == 90
    assert TrainSettings.from_options(checkpoint_every=90).checkpoint_seconds == 90
    with pytest.raises(InvalidInput, match="lacks a unit"):
        TrainSettings.from_options(checkpoint_every="90")


@pytest.mark.parametrize(
    "options",
    [
        {"run_id": "../etc"},
        {"run_id": ""},
        {"resume": "yes"},
        {"data_order": "random"},
        {"checkpoint_every": 0},
        {"checkpoint_every": float("nan")},
        {"checkpoint_every": float("inf")},
        {"checkpoint_epochs": 0},
        {"keep": 0},
        {"colour": "red"},
    ],
)
def test_impossible_choices_are_refused(options: dict[str, object]) -> None:
    """What cannot be meant is an error, not a silent default."""
    with pytest.raises(InvalidInput):
        TrainSettings.from_options(**options)


def test_a_run_id_means_that_the_run_is_continued() -> None:
    """With a run id the default is to resume, without one it is to start; both can be said."""
    assert not TrainSettings.from_options().resumes
    assert TrainSettings.from_options(run_id="exp1").resumes
    assert not TrainSettings.from_options(run_id="exp1", resume="never").resumes
    assert TrainSettings.from_options(resume="auto").resumes


def test_the_jobs_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's setting reaches Python users too."""
    monkeypatch.setenv("GPUWARDEN_JOBS", "/somewhere")
    assert TrainSettings.from_options().jobs_directory == Path("/somewhere")


def test_importing_the_trainer_loads_neither_torch_nor_ultralytics() -> None:
    """`gpuwarden train --help` and scripts that only import it stay fast."""
    code = (
        "import sys, gpuwarden.trainer, gpuwarden.trainer.cli\n"
        "print({'torch', 'ultralytics', 'numpy'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "set()"
