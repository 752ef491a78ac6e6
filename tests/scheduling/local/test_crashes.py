"""A local engine that ends at any moment: nothing is lost, and nothing is started twice."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Any

import pytest
from tests.scheduling.local.boxes import GIB, LabBox
from tests.scheduling.local.labs import attempts, trains

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.local.driver import LocalDriver
from gpuwarden.scheduling.local.launches import Launcher
from gpuwarden.scheduling.local.processes import ProcessId, ProcessTable, send
from gpuwarden.scheduling.local.progress import RunFiles


def test_jobs_outlive_the_engine_and_are_found_again(lab: LabBox) -> None:
    """By pid, start and boot; one that ended meanwhile is read from its record."""
    stays, ends = lab.submit("stays"), lab.submit("ends")
    trains(lab, "stays", stays)
    trains(lab, "ends", ends)
    pid = lab.pid(stays)
    lab.lose()
    lab.say("ends", "finish")
    record = lab.state / "attempts" / "2.record"
    deadline = time.monotonic() + 20
    while not record.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lab.open()
    lab.until(lambda: lab.state_of(ends) == "done")
    assert lab.state_of(stays) == "running"
    assert lab.pid(stays) == pid
    assert len(attempts(lab)) == 2


def test_a_launch_that_was_cut_off_happens_once_or_not_at_all(
    lab: LabBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the start, the job is started later; killed behind it, it is found."""
    entry = lab.submit("a")

    class Cut(BaseException):
        pass

    def before(*_arguments: Any, **_named: Any) -> None:
        raise Cut

    whole = Launcher.launch

    def behind(self: Launcher, *arguments: Any, **named: Any) -> None:
        whole(self, *arguments, **named)
        raise Cut

    for launch, begun in ((before, 0), (behind, 1)):
        monkeypatch.setattr(Launcher, "launch", launch)
        with pytest.raises(Cut):
            lab.tick()
        lab.lose()
        monkeypatch.setattr(Launcher, "launch", whole)
        lab.open()
        running = lab.driver._queue.attempts("running")
        assert len(running) == begun
    trains(lab, "a", entry)
    assert lab.log("a", entry).count("from 0") == 1
    assert len(lab.driver._queue.held()) == 1


def test_a_stub_that_comes_too_late_starts_nothing(lab: LabBox) -> None:
    """The launch was given up after a restart; whoever was about to do it finds it claimed."""
    entry = lab.submit("a", "done")
    assert lab.driver._launcher.settle(1) is None
    lab.tick()
    assert lab.state_of(entry) == "held"
    assert "given up before it began" in lab.entry(entry).words
    assert not (lab.work / f"a-{entry}.log").exists()


@pytest.mark.parametrize("step", ["told", "notified", "leaving", "left", "freed"])
def test_killed_in_any_step_of_a_preemption_nothing_is_lost_or_done_twice(
    lab: LabBox, step: str
) -> None:
    """The next engine goes on from what is on disk: one notice, one attempt each, six receipts."""
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    lab.say("low", "pause")
    high = lab.submit("high", gpus=2, priority="high")
    if step == "told":
        lab.driver._give_notices = lambda _now: None  # type: ignore[method-assign]
        lab.driver._launch = lambda *_: None  # type: ignore[method-assign]
    lab.until(lab.driver.preemptions)
    if step in ("leaving", "left", "freed"):
        (lab.work / "low.pause").unlink()
    if step in ("left", "freed"):
        lab.cards.used = {0: 5 * GIB} if step == "left" else {}
        lab.driver._launch = lambda *_: None  # type: ignore[method-assign]
        lab.until(lambda: step in lab.steps(low))
    told = lab.notice(low)
    lab.lose()
    lab.cards.used = {}
    lab.open()
    (lab.work / "low.pause").unlink(missing_ok=True)
    lab.until(lambda: lab.state_of(high) == "running")
    receipt = lab.notice(low)
    assert receipt.id == told.id
    assert list(receipt.steps) == [
        "notified",
        "acknowledged",
        "saved",
        "left",
        "freed",
        "started",
    ]
    assert len([each for each in lab.driver.preemptions() if each.victim == low]) == 1
    assert [job for job, _start in attempts(lab)] == [low, high]


def test_after_a_restart_of_the_host_everything_that_ran_comes_back_once(lab: LabBox) -> None:
    """No process of that boot is there; a process that has its number now is left alone."""
    entry = lab.submit("a")
    trains(lab, "a", entry)
    process = lab.pid(entry)
    lab.driver._queue.change_attempt(1, boot="another")  # a test restarts no host
    (lab.state / "attempts" / "1.record").unlink(missing_ok=True)
    lab.until(lambda: len(attempts(lab)) == 2)
    assert lab.entry(entry).requeues == 1
    assert ProcessTable.read().alive(process)
    send(process, signal.SIGKILL)


def test_a_job_whose_parent_was_killed_too_comes_back(lab: LabBox) -> None:
    """Nobody saw how it ended: its own word counts, else it goes on from its newest state."""
    entry = lab.submit("a")
    trains(lab, "a", entry)
    attempt = lab.driver._queue.attempts("running")[0]
    assert attempt.stub is not None
    send(attempt.stub, signal.SIGKILL)
    lab.tick()
    assert lab.state_of(entry) == "running"  # the job itself goes on
    send(lab.pid(entry), signal.SIGKILL)
    lab.until(lambda: lab.entry(entry).requeues == 1)
    lab.until(lambda: lab.state_of(entry) == "running")


def test_a_second_engine_cannot_give_the_same_card(lab: LabBox) -> None:
    """The reservation is the card's row: whoever comes second is refused, and changes nothing."""
    first, second = lab.submit("a"), lab.submit("b")
    queue = lab.driver._queue
    queue.reserve(int(first), kind="a100", cards=["GPU-0"], now=1.0)
    with pytest.raises(RefusedAction):
        queue.reserve(int(second), kind="a100", cards=["GPU-1", "GPU-0"], now=2.0)
    assert queue.held() == {"GPU-0": 1}
    assert lab.state_of(second) == "pending"
    lab.lose()
    lab.open()


def test_a_clean_process_that_has_the_number_of_a_dead_one_is_not_signalled() -> None:
    """Identity is pid and start: a signal to another start goes nowhere."""
    other = subprocess.Popen(["/bin/sleep", "60"])
    try:
        table = ProcessTable.read()
        (mine,) = (each for each in table.tree([_id_of(table, other.pid)]))
        wrong = type(mine)(mine.pid, mine.ticks + 1)
        assert not send(wrong, signal.SIGTERM)
        assert not table.alive(wrong)
        assert other.poll() is None
        assert send(mine, signal.SIGTERM)
        assert other.wait(timeout=10) == -signal.SIGTERM
    finally:
        other.kill()
        other.wait()


def _id_of(table: ProcessTable, pid: int) -> Any:
    return ProcessId(pid, table._rows[pid].ticks)  # there is no other way to learn its start


class Cut(BaseException):
    """The end of a daemon in the middle of something."""


def cut(*_arguments: Any, **_named: Any) -> None:
    """Take the place of what a daemon was about to do."""
    raise Cut


def test_killed_before_a_request_is_taken_back_the_next_attempt_does_not_leave_for_it(
    lab: LabBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had left for somebody; what it was asked then would send it away again and again."""
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    high = lab.submit("high", "done", gpus=2, priority="high")
    lab.until(lab.driver.preemptions)
    monkeypatch.setattr(RunFiles, "withdraw", cut)
    with pytest.raises(Cut):
        lab.until(lambda: False)
    monkeypatch.undo()
    lab.lose()
    lab.open()
    assert lab.request("low") is not None
    lab.until(lambda: lab.state_of(high) == "done")
    lab.until(lambda: lab.state_of(low) == "running")
    assert lab.request("low") is None
    lab.until(lambda: lab.log("low", low).count("from ") == 2)
    assert [job for job, _start in attempts(lab)] == [low, high, low]


@pytest.mark.parametrize("verb", ["cancel", "hold"])
def test_killed_before_it_was_done_an_order_is_carried_out_by_the_next_engine(
    lab: LabBox, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Who gave it got no answer, and the queue says that the job is leaving: so it does."""
    entry = lab.submit("a")
    trains(lab, "a", entry)
    monkeypatch.setattr(LocalDriver, "_end", cut)
    monkeypatch.setattr(RunFiles, "ask", cut)
    with pytest.raises(Cut):
        getattr(lab.driver, verb)(entry, by="ana", now=lab.clock.wall())
    monkeypatch.undo()
    lab.lose()
    lab.open()
    lab.until(lambda: lab.state_of(entry) == {"cancel": "failed", "hold": "held"}[verb])
    assert "ana" in lab.entry(entry).words


def test_killed_before_a_hold_is_taken_back_the_job_goes_on(
    lab: LabBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was released: what it was asked is gone before its epoch ends."""
    entry = lab.submit("a")
    trains(lab, "a", entry)
    lab.say("a", "pause")
    lab.driver.hold(entry, by="ana", now=lab.clock.wall())
    monkeypatch.setattr(RunFiles, "withdraw", cut)
    with pytest.raises(Cut):
        lab.driver.release(entry, by="ana", now=lab.clock.wall())
    monkeypatch.undo()
    lab.lose()
    lab.open()
    lab.tick()
    assert lab.request("a") is None
