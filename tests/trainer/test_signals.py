"""Who is told to leave, by what, and in which shape: always the same save, and nobody left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.trainer.conftest import wait_for
from tests.trainer.trainings import BATCHES

from gpuwarden import job_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.trainer.conftest import Command

pytestmark = pytest.mark.training

WORKERS = ("--trainer", "tests.trainer.many_workers:ManyWorkers")
PACE = "GPUWARDEN_DEMO_LOADER_SECONDS"
SLOW = {PACE: "0.4"}
GONE_SECONDS = 30.0


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for member in found:
        for task in Path(f"/proc/{member}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text("ascii").split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def nobody(pids: list[int]) -> bool:
    """Whether none of them lives."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _start(
    command: Callable[..., Command],
    *options: str,
    workers: int = 0,
    pace: str = SLOW[PACE],
    **words: object,
) -> Command:
    environment = {PACE: pace, "TEST_WORKERS": str(workers)}
    return command("run", *WORKERS, *options, environment=environment, device="cpu", **words)


def _assert_left(training: Command, pids: list[int], *, code: int = 75) -> None:
    ended, _out, err = training.end()
    assert ended == code, err
    status = training.status()
    assert status is not None
    assert status.exit is not None
    assert status.checkpoint is not None
    assert status.checkpoint.step == status.step
    wait_for(lambda: nobody(pids), seconds=GONE_SECONDS)


@pytest.mark.timeout(300)
def test_ranks_do_not_outlive_their_launcher(command: Callable[..., Command]) -> None:
    """One that was killed outright leaves no rank behind, and a state of the very step."""
    training = _start(command, "--nproc=2")
    training.wait_for_step(2)
    pids = family(training.process.pid)
    assert len([pid for pid in pids[1:] if os.getpgid(pid) == pid]) == 2
    training.process.kill()
    assert training.end()[0] == -signal.SIGKILL
    wait_for(lambda: nobody(pids), seconds=GONE_SECONDS)
    status = training.status()
    assert status is not None
    assert status.exit is not None
    assert (status.exit.code, status.resume_mode) == (75, "exact")
    assert status.checkpoint is not None
    assert status.checkpoint.step == status.step >= 2


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_what_ranks_saved_without_a_launcher_is_continued(command: Callable[..., Command]) -> None:
    """One told alone takes the other along; then nothing but the signal was lost."""
    training = _start(command, "--nproc=2")
    training.wait_for_step(2)
    pids = family(training.process.pid)
    ranks = [pid for pid in pids[1:] if os.getpgid(pid) == pid]
    os.kill(ranks[1], signal.SIGTERM)
    _assert_left(training, pids)
    left = training.status()
    assert left is not None
    training = _start(command, "--nproc=2")
    again = training.wait_for_step(left.step + 1)
    assert again.counters.steps == again.step - left.step
    pids = family(training.process.pid)
    training.send(signal.SIGTERM)
    _assert_left(training, pids)


NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize("number", NUMBERS, ids=[number.name for number in NUMBERS])
def test_one_process_leaves(
    command: Callable[..., Command], number: signal.Signals, workers: int, *, group: bool
) -> None:
    """Loader workers ignore what is meant for the training, so that it can finish its step."""
    training = _start(command, workers=workers)
    training.wait_for_step(1)
    pids = family(training.process.pid)
    assert len(pids) > workers
    training.send(number, group=group)
    _assert_left(training, pids)


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("target", ["launcher", "group", "rank 0", "rank 1", "every process"])
@pytest.mark.parametrize("number", NUMBERS[:2], ids=[number.name for number in NUMBERS[:2]])
def test_two_processes_leave(
    command: Callable[..., Command], number: signal.Signals, target: str, workers: int
) -> None:
    """Whoever is told, all leave at the same step, and the status is that of one process."""
    training = _start(command, "--nproc=2", workers=workers)
    training.wait_for_step(1)
    launcher = training.process.pid
    pids = family(launcher)
    ranks = [pid for pid in pids[1:] if os.getpgid(pid) == pid]
    assert len(pids) >= 3 + 2 * workers
    told = {"rank 0": ranks[:1], "rank 1": ranks[1:], "every process": pids}
    if target == "group":
        training.send(number, group=True)
    for pid in told.get(target, [launcher] if target == "launcher" else []):
        os.kill(pid, number)
    _assert_left(training, pids)


@pytest.mark.sweep
@pytest.mark.parametrize("nproc", [1, 2])
def test_set_up_is_left_at_once(command: Callable[..., Command], nproc: int) -> None:
    """Nothing was trained, so nothing is lost: the job comes back and begins."""
    options = ("--nproc=2",) if nproc == 2 else ()
    training = _start(command, *options)
    wait_for(training.status)
    pids = family(training.process.pid)
    training.send(signal.SIGTERM)
    code, _out, err = training.end()
    assert code == 75, err
    wait_for(lambda: nobody(pids), seconds=GONE_SECONDS)
    status = training.status()
    assert status is not None
    assert status.step == 0


@pytest.mark.sweep
@pytest.mark.parametrize("at", ["step", "epoch"])
def test_a_request_to_hold_is_carried_out_by_all(
    command: Callable[..., Command], jobs: Path, at: str
) -> None:
    """Rank 0 alone reads it; the launcher passes its status on."""
    training = _start(command, "--nproc=2")
    training.wait_for_step(1)
    pids = family(training.process.pid)
    request = job_files.LeaveRequest("d1", leave_by=4e9, at=at, then="hold", reason="rule idle")
    job_files.write(job_files.request_path(jobs, "run"), request.encode())
    _assert_left(training, pids, code=76)
    status = training.status()
    assert status is not None
    assert status.request is not None
    assert (status.request.decision_id, status.request.state) == ("d1", "leaving")
    assert at == "step" or status.step % BATCHES == 0


@pytest.mark.sweep
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_patient_notice_ends_with_the_epoch(command: Callable[..., Command], nproc: int) -> None:
    """The notice is told of at once; the state is that of the epoch's end; the launcher waits."""
    # With the launcher's grace already begun, its ranks would be killed long before.
    options = ("--nproc=2", "--grace=3s") if nproc == 2 else ()
    training = _start(command, "--on-signal=epoch", *options)
    training.wait_for_step(1)
    pids = family(training.process.pid)
    training.send(signal.SIGUSR1)
    wait_for(lambda: (now := training.status()) and now.notice and now.notice.at == "epoch")
    _assert_left(training, pids)
    status = training.status()
    assert status is not None
    assert status.step
    assert status.step % BATCHES == 0


@pytest.mark.sweep
@pytest.mark.parametrize("nproc", [1, 2])
def test_an_end_cuts_a_patient_notice_short(command: Callable[..., Command], nproc: int) -> None:
    """At the end of a scheduler's grace the state is that of the next step."""
    options = ("--nproc=2",) if nproc == 2 else ()
    training = _start(command, "--on-signal=epoch", *options, pace="1.5")  # 9 s an epoch
    training.wait_for_step(1)
    pids = family(training.process.pid)
    training.send(signal.SIGUSR1)
    wait_for(lambda: (now := training.status()) and now.notice)
    training.send(signal.SIGTERM)
    _assert_left(training, pids)
    status = training.status()
    assert status is not None
    assert status.step % BATCHES


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(
    command: Callable[..., Command], first: int, then: int
) -> None:
    """At the very step, with the whole batch; that sums are rounded otherwise is said."""
    training = _start(command, f"--nproc={first}")
    training.wait_for_step(2)
    training.send(signal.SIGTERM)
    assert training.end()[0] == 75
    left = training.status()
    assert left is not None
    training = command("run", f"--nproc={then}", *WORKERS, device="cpu")
    wait_for(lambda: (training.status(), training.process.poll() is not None)[1], seconds=120)
    code, _out, err = training.end()
    assert code == 0, err
    assert f"goes on with {then} process(es) instead of {first}" in err
    done = training.status()
    assert done is not None
    assert done.counters.steps == 3 * BATCHES - left.step
    assert done.counters.images == 8 * done.counters.steps


@pytest.mark.sweep
def test_a_rank_that_dies_ends_the_training_with_a_fault(command: Callable[..., Command]) -> None:
    """The states stay: the same command goes on from the newest, and comes to its end."""
    training = _start(command, "--nproc=2", "--checkpoint-every=500ms")
    status = wait_for(lambda: (now := training.status()) and now.checkpoint and now)
    pids = family(training.process.pid)
    ranks = [pid for pid in pids[1:] if os.getpgid(pid) == pid]
    os.kill(ranks[1], signal.SIGKILL)
    code, _out, err = training.end()
    assert code == 1, err
    assert "rank 1 ended with SIGKILL" in err
    wait_for(lambda: nobody(pids), seconds=GONE_SECONDS)
    training = command("run", "--nproc=2", *WORKERS, device="cpu")
    wait_for(lambda: (training.status(), training.process.poll() is not None)[1])
    assert training.end()[0] == 0
    done = training.status()
    assert done is not None
    assert done.counters.steps <= 3 * BATCHES - status.checkpoint.step
