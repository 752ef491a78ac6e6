"""Nothing reaches for a network that nobody asked it to reach for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuwarden.trainer import offline

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.trainer.conftest import Command, Material

HERE = Path(__file__).parent


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """Environment of a process, and of all that it starts, whose attempts are noted."""
    noted = tmp_path / "attempts"
    noted.touch()
    path = os.pathsep.join(
        [str(HERE / "watched_sockets"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {
        "PYTHONPATH": path,
        "NOTED_ATTEMPTS": str(noted),
        "YOLO_CONFIG_DIR": str(tmp_path / "ultralytics"),
        # Not set by the user, and so chosen by gpuwarden:
        "YOLO_OFFLINE": "",
        "YOLO_AUTOINSTALL": "",
    }


def _attempts(environment: dict[str, str]) -> str:
    return Path(environment["NOTED_ATTEMPTS"]).read_text("utf-8")


def test_the_watch_sees_attempts(watched: dict[str, str]) -> None:
    """A test of the test: a look-up is noted and refused."""
    code = "import socket; socket.create_connection(('192.0.2.1', 9), 1)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **watched},
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "192.0.2.1" in _attempts(watched)


@pytest.mark.training
def test_a_training_opens_no_connection(
    command: Callable[..., Command], watched: dict[str, str], tmp_path: Path
) -> None:
    """From the first import over workers, validation and plots to the end; nor does its resume."""
    trainer = ("--trainer", "tests.trainer.many_workers:ManyWorkers")
    training = command("run", *trainer, environment=watched, epochs=1, plots=True)
    code, _out, err = training.end()
    assert (code, _attempts(watched)) == (0, ""), err
    assert list((tmp_path / "runs" / "run").glob("*.png"))
    again = command("run", environment=watched, epochs=1, plots=True)
    assert (again.end()[0], _attempts(watched)) == (0, "")


def test_the_users_word_counts_more_than_an_images_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And without a word, a user's own variable more than the default."""
    for before, online, after in (
        ("1", True, "0"),
        ("", True, "0"),
        ("0", False, "0"),
        ("", False, "1"),
    ):
        monkeypatch.setenv("YOLO_OFFLINE", before)
        offline.choose(online=online)
        assert os.environ["YOLO_OFFLINE"] == after
        assert offline.chosen() == (after == "1")


@pytest.mark.sweep
@pytest.mark.training
def test_what_is_not_here_is_asked_for_instead_of_downloaded(
    command: Callable[..., Command],
    watched: dict[str, str],
    material: Material,
    tmp_path: Path,
) -> None:
    """Weights and data sets alike: at once, with the remedy, and without an attempt."""
    weights = command("run", environment=watched, model="yolo11n.pt")
    code, _out, err = weights.end()
    assert (code, "--online" in err, "Traceback" in err) == (2, True, False), err
    data = tmp_path / "gone.yaml"
    data.write_text(
        material.data.read_text("utf-8").replace(str(material.data.parent), str(tmp_path / "gone"))
        + "\ndownload: https://192.0.2.1/data.zip\n",
        "utf-8",
    )
    missing = command("other", environment=watched, data=data)
    code, _out, err = missing.end()
    assert (code, "--online" in err, "Traceback" in err) == (2, True, False), err
    assert _attempts(watched) == ""
