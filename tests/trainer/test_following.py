"""A training as its owner sees it in a terminal."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.trainer.conftest import REPOSITORY

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.job_files import (
    Checkpoint,
    Counters,
    RunDescription,
    RunExit,
    RunStatus,
    UploadProgress,
)
from gpuwarden.trainer import following
from gpuwarden.trainer.follow_cli import follow
from gpuwarden.trainer.status import process_identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOW = 10_000.0
STATUS = RunStatus(
    "exp1",
    sequence=9,
    phase="train",
    phase_since=NOW - 200,
    heartbeat=NOW - 1,
    epoch=4,
    step=500,
    throughput=78.25,
    counters=Counters(
        images=6400,
        steps=100,
        data_wait_seconds=20.0,
        phase_seconds={"setup": 20.0, "train": 149.0, "validate": 49.0, "checkpoint": 1.0},
    ),
    losses={"box_loss": 1.25},
    metrics={"metrics/mAP50(B)": 0.5},
    checkpoint=Checkpoint(NOW - 90, 450, NOW - 80, 1000),
    gpu_memory_peak=3 << 30,
    resume_mode="exact",
)


def _description(**changes: Any) -> RunDescription:
    identity: dict[str, Any] = process_identity()
    described = RunDescription(
        run_id="exp1",
        **identity,
        model="yolov8m",
        batch=64,
        imgsz=640,
        amp=True,
        epochs=10,
        steps_per_epoch=100,
    )
    return dataclasses.replace(described, **changes)


def _sight(description: RunDescription | None = None, **changes: Any) -> following.Sight:
    status = dataclasses.replace(STATUS, **changes)
    return following.Sight("exp1", NOW, status, description or _description(), alive=True)


def _text(sight: following.Sight) -> str:
    return "\n".join(following.lines(sight))


def test_it_says_how_far_how_fast_and_how_long_still() -> None:
    """The time left counts validations and saves at this attempt's pace: 2 s a step, 500 left."""
    text = _text(_sight())
    assert "exp1: train since 3m 20s" in text
    assert "epoch 5 of 10, step 500 of 1000, 50.0 %, about 16m 40s left" in text
    assert "78.2 images/s while training; waiting for data 13 %" in text
    assert "train 68 %, validate 22 %, setup 9 %" in text
    assert "box_loss 1.25, mAP50(B) 0.5" in text
    assert "state of step 450 saved 1m 20s ago, 50 steps behind; resumes exactly" in text
    assert "GPU memory: peak 3.0 GiB" in text


def test_an_upload_that_is_behind_is_told() -> None:
    """A state on one disk alone is lost with it."""
    assert "upload is 5m 0s behind" in _text(_sight(upload=UploadProgress(None, NOW - 300)))
    assert "; uploaded" in _text(_sight(upload=UploadProgress(NOW - 300)))


def test_a_loop_that_stands_still_is_told() -> None:
    """A batch that never comes looks busy otherwise."""
    assert "the loop has not moved for 10m 0s" in _text(_sight(heartbeat=NOW - 600))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "complete"),
        (75, "to be brought back"),
        (76, "held"),
        (77, "not resumable"),
        (1, "fault"),
    ],
)
def test_how_it_ended_is_told(code: int, words: str) -> None:
    """With the reason that the training gave; nothing is left then."""
    text = _text(_sight(exit=RunExit(code, "why", NOW - 5)))
    assert words in text
    assert "(why), 5s ago" in text
    assert "left\n" not in text.partition("\n")[2]


def test_what_a_job_calls_itself_does_not_drive_the_terminal() -> None:
    """Escape sequences in a model's name stay text."""
    text = _text(_sight(_description(model="\x1b[2Jevil\u202e")))
    assert "\x1b" not in text
    assert "?[2Jevil?" in text


@pytest.fixture
def published(jobs: Path) -> Path:
    """A run that is being trained by this very process."""
    job_files.write(job_files.status_path(jobs, "exp1"), STATUS.encode())
    job_files.write(job_files.description_path(jobs, "exp1"), _description().encode())
    return jobs


def test_a_process_that_is_gone_without_a_word_is_noticed(published: Path) -> None:
    """After SIGKILL nobody writes how it ended."""
    assert following.look(published, "exp1", now=NOW).alive is True
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity: dict[str, Any] = process_identity(process.pid)
        job_files.write(
            job_files.description_path(published, "exp1"), _description(**identity).encode()
        )
        assert following.look(published, "exp1", now=NOW).alive is True
        process.kill()
    sight = following.look(published, "exp1", now=NOW)
    assert sight.ended
    assert "gone without a word" in _text(sight)


def test_a_run_that_is_not_here_is_told_with_those_that_are(published: Path) -> None:
    """A typing error, or the wrong node."""
    with pytest.raises(InvalidInput, match=r"no run exp2; those there: exp1"):
        following.look(published, "exp2", now=NOW)
    with pytest.raises(InvalidInput, match="not a run id"):
        following.look(published, "../exp1", now=NOW)
    path = job_files.status_path(published, "exp3")
    path.write_bytes(b"{")
    with pytest.raises(InvalidInput, match="not valid JSON"):
        following.look(published, "exp3", now=NOW)


def test_without_a_name_the_newest_run_is_shown(published: Path) -> None:
    """The usual case is one training on a node."""
    shown = CliRunner().invoke(follow, ["--once", "--jobs-directory", str(published)])
    assert (shown.exit_code, "exp1: train since" in shown.output) == (0, True)
    empty = CliRunner().invoke(follow, ["--jobs-directory", str(published / "jobs")])
    assert isinstance(empty.exception, InvalidInput)


def test_following_ends_with_the_attempt(published: Path) -> None:
    """Through the words of `gpuwarden train` too, and without torch."""
    ended = dataclasses.replace(STATUS, exit=RunExit(75, "SIGTERM", NOW))
    job_files.write(job_files.status_path(published, "exp1"), ended.encode())
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['ultralytics'] = None\n"
        "from gpuwarden.cli import main\n"
        f"main(['train', '--follow', 'exp1', '--jobs-directory', {str(published)!r}])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=REPOSITORY,
    )
    assert ran.returncode == 0, ran.stderr
    assert "to be brought back (SIGTERM)" in ran.stdout


class _Engine(BaseHTTPRequestHandler):
    answers: dict[str, Any]

    def do_GET(self) -> None:
        answer = self.answers.get(self.path)
        self.send_response(200 if answer is not None else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Not on the test's output."""


@pytest.fixture
def engine() -> Iterator[tuple[str, dict[str, Any]]]:
    """An engine's address, and its answers by path."""
    answers: dict[str, Any] = {}
    handler = type("Engine", (_Engine,), {"answers": answers})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", answers
        server.shutdown()
        thread.join()


def test_the_engine_is_asked_seldom_and_never_in_the_way(
    engine: tuple[str, dict[str, Any]], clock: Any
) -> None:
    """No engine, one that errs, one that does not know the run: a line each, never an error."""
    url, answers = engine
    view = following.EngineView(url, "exp1", clock=clock)
    (line,) = view.lines()
    assert "no answer from http://127.0.0.1" in line
    answers["/v1/jobs"] = {"jobs": [{"job_id": "proc/1", "run_id": "exp1"}]}
    answers["/v1/jobs/proc%2F1"] = {"job_id": "proc/1", "rules": []}
    assert view.lines() == (line,)
    clock.advance(following.ENGINE_SECONDS)
    assert view.lines() == ("engine: job proc/1 breaks no rule",)
    answers["/v1/jobs"] = {"jobs": []}
    clock.advance(following.ENGINE_SECONDS)
    assert view.lines() == ("engine: sees no job with this run",)
    answers["/v1/jobs"] = ["nonsense"]
    clock.advance(following.ENGINE_SECONDS)
    assert "no answer" in view.lines()[0]
    assert following.EngineView(None, "exp1", clock=clock).lines() == ()
    bad = following.EngineView("file:///etc/passwd", "exp1", clock=clock)
    assert "not an http(s) URL" in bad.lines()[0]
