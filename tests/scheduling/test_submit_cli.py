"""`gpuwarden submit` as a process: what it prints, and with which exit status it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.scheduling.daemon_scenes import WAITS
from tests.scheduling.daemons import PlayedQueue, running
from tests.scheduling.policy_files import NOW, TEXT

from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.schedule_api import EntryState
from gpuwarden.scheduling.book_cli import book
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.predictions import training_of_words
from gpuwarden.scheduling.submit_cli import submit

if TYPE_CHECKING:
    from pathlib import Path

ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy by which whoever runs the tests is in team vision."""
    path = tmp_path / "policy.yaml"
    path.write_text(TEXT.replace("users: [ana, bo]", f"users: [{ME}]"), "utf-8")
    return path


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """That policy for the local engine; the test stands in the folder of its training."""
    monkeypatch.chdir(tmp_path)
    text = TEXT.replace("users: [ana, bo]", f"users: [{ME}]")
    return text.replace("engine: slurm", "engine: local")


def run(*words: str, policy: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in the policy's folder."""
    return subprocess.run(
        [sys.executable, "-m", "gpuwarden", "submit", "--policy", str(policy), *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=policy.parent,
    )


def test_a_no_is_status_1_and_says_what_would_do(policy: Path) -> None:
    """Nothing is asked of the engine for that."""
    done = run("model=yolov8x", "data=coco.yaml", "batch=256", "--yes", policy=policy)
    assert done.returncode == 1
    assert "what would have room:" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=yolov8m", "data=nowhere.yaml"], "say --images N"),
        (["model=yolov8m", "data=9", "--card", "a100"], 'did you mean "a100-40"'),
        (["model=yolov8m", "data=9", "--deadline", "tomorrow"], "is no moment"),
        (["model=yolov8m", "data=9", "--deadline", "2020-01-01"], "is past"),
        (["model=yolov8m", "data=9", "--", "--run-id=x"], "made from --name"),
        (["model=yolov8m", "data=9", "--time", "4"], "lacks a unit"),
        (["model=yolov8m", "data=9", "--time", "4:00:00"], "4:00:00 is written 4h here"),
        (["model=yolov8m", "data=9", "--time", "1-12:00"], "1-12:00 is written 1d12h here"),
        (["model=yolov8m", "data=9", "--time", "4:00"], "is not a duration"),
        (["--model", "yolov8m", "data=9"], "written model=VALUE, without dashes"),
        (["model=yolov8m", "--upload=s3://x"], "behind the words: -- --upload=VALUE"),
        (["model=yolov8m", "--", "--upload", "s3://x"], "written --upload=s3://x"),
        (["yolov8m"], "is no KEY=VALUE"),
    ],
)
def test_what_cannot_be_meant_is_told(words: list[str], told: str, policy: Path) -> None:
    """Before anything is estimated or sent."""
    result = CliRunner().invoke(submit, ["--policy", str(policy), *words], standalone_mode=True)
    text = result.output + str(result.exception)
    assert result.exit_code != 0
    assert told in text


@pytest.mark.parametrize("when", ["+9000h", "2099-12-24", "2099-12-24 8:00", "2099-12-24T08:00Z"])
def test_a_deadline_is_written_like_the_moments_of_bookings(policy: Path, when: str) -> None:
    """The same words mean the same in both commands."""
    words = ["model=yolov8m.yaml", "data=100", "--engine", "local", "-o", "json", "--dry-run"]
    words += ["--socket", str(policy.parent / "none.sock"), "--deadline", when]
    result = CliRunner().invoke(submit, ["--policy", str(policy), *words])
    assert json.loads(result.output)["task"]["deadline"] > 0


def test_every_mistake_is_told_at_once(policy: Path) -> None:
    """Of words, of names that the policy does not have, and of the data set."""
    words = ["model=yolov8m", "data=nowhere.yaml", "batch=0", "--team", "visoin"]
    names = ["--priority", "hgih", "--card", "a100", "--window", "night"]
    result = CliRunner().invoke(submit, ["--policy", str(policy), *words, *names])
    text = str(result.exception)
    for told in ("batch=0", "nowhere.yaml", 'mean "vision"', 'mean "high"', 'mean "a100-40"'):
        assert told in text
    assert "--window night: the policy knows" in text


def test_what_trainings_took_here_stands_beside_the_estimate(tmp_path: Path, local: str) -> None:
    """From the daemon's own record of five that ended; by it goes the time limit."""
    words = ("model=yolov8m.yaml", "data=coco.yaml", "batch=64", "epochs=10")
    with running(tmp_path, local, now=NOW, driver=PlayedQueue) as here:
        here.driver.known = {
            str(n): training_of_words(words, card="a100-40", gpus=1) for n in range(5)
        }
        over = dataclasses.replace(WAITS, engine="local", state=EntryState.DONE, start=None)
        here.driver.rows = tuple(
            dataclasses.replace(over, id=str(n), started=NOW) for n in range(5)
        )
        here.driver.held = tuple(
            Holding("local", str(n), "ana", "vision", 1, NOW, NOW + 7200 + 60 * n, "a100-40")
            for n in range(5)
        )
        here.tick(9000)
        where = ["--policy", str(tmp_path / "policy.yaml"), "--socket", str(here.settings.socket)]
        done = CliRunner().invoke(submit, [*where, *words, "--dry-run"])
        assert (
            "history  2h2m (2h to 2h4m), from 5 trainings like it here; 67 % should" in done.output
        )
        data = json.loads(CliRunner().invoke(submit, [*where, *words, "-o", "json", "-y"]).output)
        assert data["history"]["a100-40"]["runs"] == 5
        assert here.driver.taken[0][0].estimate["history"]["slowest_seconds"] == 7440


def test_a_run_that_is_in_the_queue_is_not_submitted_again(tmp_path: Path, local: str) -> None:
    """Two at a time would write the same states; one after the other is a continuation."""
    with running(tmp_path, local, now=NOW, driver=PlayedQueue) as here:
        where = ["--policy", str(tmp_path / "policy.yaml"), "--socket", str(here.settings.socket)]
        words = [*where, "model=yolov8m.yaml", "data=100", "--name", "night", "-y"]
        here.driver.rows = (dataclasses.replace(WAITS, engine="local", run_id="night"),)
        here.tick(5)
        again = CliRunner().invoke(submit, words)
        assert isinstance(again.exception, RefusedAction)
        assert "is job 7 of ana already (pending)" in str(again.exception)
        assert here.driver.taken == []
        assert CliRunner().invoke(submit, [*words, "--after", "7"]).exit_code == 0
        here.driver.rows = (dataclasses.replace(here.driver.rows[0], state=EntryState.DONE),)
        here.tick(5)
        assert CliRunner().invoke(submit, words).exit_code == 0
        assert len(here.driver.taken) == 2


def test_an_old_queue_keeps_nobody_from_submitting(tmp_path: Path, local: str) -> None:
    """The engine was last seen years ago: its jobs may be long over."""
    with running(tmp_path, local, now=NOW - 10 * 365 * 86400, driver=PlayedQueue) as here:
        here.driver.rows = (dataclasses.replace(WAITS, engine="local", run_id="night"),)
        here.tick(5)
        where = ["--policy", str(tmp_path / "policy.yaml"), "--socket", str(here.settings.socket)]
        words = [*where, "model=yolov8m.yaml", "data=100", "--name", "night", "-y"]
        assert CliRunner().invoke(submit, words).exit_code == 0


def test_tasks_of_one_second_have_names_of_their_own(policy: Path) -> None:
    """A sweep that submits many at once trains as many runs."""
    words = ["model=yolov8m.yaml", "data=100", "--engine", "local", "-o", "json", "--dry-run"]
    words += ["--socket", str(policy.parent / "none.sock")]
    names = set()
    for _ in range(2):
        result = CliRunner().invoke(submit, ["--policy", str(policy), *words])
        names.add(json.loads(result.output)["task"]["run_id"])
    assert len(names) == 2


def test_a_policy_with_a_mistake_is_shown_with_its_line(policy: Path) -> None:
    """Exit status 2; so is one that is not there."""
    policy.write_text(TEXT.replace("quota:", "qouta:"), "utf-8")
    done = run("model=yolov8m", "data=9", policy=policy)
    assert done.returncode == 2
    assert 'did you mean "quota"' in done.stderr
    assert run("model=yolov8m", policy=policy.parent / "none.yaml").returncode == 2


def test_a_task_goes_to_the_daemon_of_this_machine(tmp_path: Path, local: str) -> None:
    """As whoever asks; the answer names the job. What it costs is told before, and in JSON."""
    with running(tmp_path, local, now=NOW, driver=PlayedQueue) as here:
        where = ["--policy", str(tmp_path / "policy.yaml"), "--socket", str(here.settings.socket)]
        words = [*where, "model=yolov8m.yaml", "data=100", "--name", "exp1"]
        dry = CliRunner().invoke(submit, [*words, "--dry-run"])
        assert dry.exit_code == 0
        assert "nobody waits, and 40 of 40 cards are free" in dry.output
        assert "history  0 trainings like it (yolov8m.yaml, imgsz 640" in dry.output
        assert "warning  its states would lie in" in dry.output
        assert '"schema": "gpuwarden.task/v1"' in dry.output
        assert here.driver.taken == []
        done = CliRunner().invoke(submit, [*words, "-o", "json"])
        document = json.loads(done.output)
        assert (document["submitted"], document["job"]["id"]) == (True, "1")
        (task, uid, _gid, token) = here.driver.taken[0]
        assert (task.user, task.directory, uid) == (ME, str(tmp_path), os.geteuid())
        assert task.command[:5] == (
            *("gpuwarden", "train", "--run-id", "exp1"),
            "--on-signal=epoch",
        )
        assert len(token) == 16
        refused = CliRunner().invoke(submit, [*words, "--gpus", "8", "batch=16"])
        assert isinstance(refused.exception, RefusedAction)
        assert "there are 4 cards" in str(refused.exception)


def test_a_task_for_a_slot_starts_with_it(tmp_path: Path, local: str) -> None:
    """Team and cards are the slot's; what would not fit it is not sent."""
    with running(tmp_path, local, now=NOW, driver=PlayedQueue) as here:
        socket = str(here.settings.socket)
        slot = ("--team", "vision", "--gpus", "2", "--card", "a100-40", "--for", "2h")
        when = ("--from", "2027-01-15T20:00", "--socket", socket, "-y", "-o", "json")
        made = CliRunner().invoke(book, [*slot, *when])
        assert made.exit_code == 0, made.output
        here.tick(5)
        (entry,) = here.client.schedule().bookings
        where = ["--policy", str(tmp_path / "policy.yaml"), "--socket", socket]
        words = [*where, "model=yolov8m.yaml", "data=100", "batch=16", "-y", "--booking"]
        done = CliRunner().invoke(submit, [*words, entry.id, "--time", "3h"])
        assert done.exit_code == 0, done.output
        assert "this may take longer" in done.output
        ((task, *_others),) = here.driver.taken
        assert (task.not_before, task.gpu_type, task.team) == (entry.start, "a100-40", "vision")
        large = CliRunner().invoke(submit, [*words, entry.id, "--gpus", "4"])
        assert isinstance(large.exception, InvalidInput)
        none = CliRunner().invoke(submit, [*words, "nobody"])
        assert isinstance(none.exception, RefusedAction)
        assert len(here.driver.taken) == 1


def test_without_its_daemon_the_local_engine_takes_nothing(policy: Path) -> None:
    """Status 3; what can be said without it is said."""
    nowhere = str(policy.parent / "none.sock")
    words = ("model=yolov8m.yaml", "data=100", "--engine", "local", "--socket", nowhere)
    done = run(*words, policy=policy)
    assert done.returncode == 3
    assert "UNKNOWN when it starts" in done.stdout
    assert "gpuwarden scheduler" in done.stderr


def test_profiles_must_be_profiles(policy: Path) -> None:
    """A mistake in them is told at its line; what is learnt is used."""
    profiles = policy.parent / "profiles.yaml"
    profiles.write_text("version: 1\nprofiles:\n- {model: yolov8m, batch: 64}\n", "utf-8")
    words = ["model=yolov8m", "data=9", "--profiles", str(profiles)]
    done = run(*words, policy=policy)
    assert done.returncode == 2
    assert "profiles.yaml:3:" in done.stderr


def test_the_help_shows_examples_on_lines_of_their_own() -> None:
    """And every exit status."""
    text = CliRunner().invoke(submit, ["--help"]).output
    assert "\n    gpuwarden submit model=yolov8m data=coco.yaml batch=64" in text
    assert "0   submitted" in text
