"""The process of `gpuwarden train` ends at once when all is said, and nobody else's does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import atexit, os, sys
from gpuwarden.trainer.endings import Ending


class Large:
    def __del__(self, write=os.write):
        write(1, b"taken apart\\n")


{before}
large = Large()
ending = Ending()
atexit.register(os.write, 1, b"tracker ended\\n")
kept = open({file!r}, "w")
kept.write("not closed")
{decision}
sys.exit({status})
"""


def _ran(
    folder: Path,
    *,
    name: str = "gpuwarden",
    before: str = "",
    decision: str = "ending.settle(75)",
    status: int = 75,
    environment: dict[str, str] | None = None,
) -> tuple[int, str, str]:
    """Exit status of a program, what it printed, and what it left in its file."""
    file, script = folder / "kept", folder / name
    script.write_text(
        PROGRAM.format(before=before, file=str(file), decision=decision, status=status), "utf-8"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ran.returncode, ran.stdout, file.read_text("utf-8")


def test_a_settled_status_is_the_end(tmp_path: Path) -> None:
    """Exit functions are called and files are whole; no module is taken apart first."""
    assert _ran(tmp_path) == (75, "tracker ended\n", "not closed")


@pytest.mark.parametrize(
    "options",
    [
        {"name": "my_training.py"},
        {"decision": "", "status": 1},
        {"before": "sys.setprofile(lambda *_: None)"},
        {"environment": {"CUDA_INJECTION64_PATH": "/opt/profiler.so"}},
    ],
    ids=["a user's own script", "an error", "profiled by Python", "profiled on the card"],
)
def test_every_other_end_is_the_interpreters(tmp_path: Path, options: dict[str, object]) -> None:
    """Somebody's script goes on after a training, and tools report when all is torn down."""
    status, said, kept = _ran(tmp_path, **options)  # type: ignore[arg-type]
    assert status == options.get("status", 75)
    assert said.splitlines() == ["tracker ended", "taken apart"]
    assert kept == "not closed"


def test_a_status_is_not_changed_by_a_reader_that_is_gone(tmp_path: Path) -> None:
    """What cannot be written any more is lost, and the word of the training is not."""
    decision = "r, w = os.pipe(); os.close(r); pipe = open(w, 'w'); pipe.write('x')"
    status, _said, kept = _ran(tmp_path, decision=f"{decision}; ending.settle(76)", status=76)
    assert (status, kept) == (76, "not closed")
