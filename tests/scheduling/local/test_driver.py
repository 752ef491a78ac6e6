"""A lab box at work: real processes, made-up cards, and an engine that may end at any moment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.scheduling.local.boxes import GIB, LabBox
from tests.scheduling.local.labs import attempts, quick, trains

from gpuwarden.errors import InvalidInput, RefusedAction, TemporaryError
from gpuwarden.job_files import LeaveRequest
from gpuwarden.scheduling.drivers import LOOP, SlotsRefused
from gpuwarden.scheduling.local.processes import ProcessTable
from gpuwarden.scheduling.local.readings import FREE_SECONDS, KILL_SECONDS
from gpuwarden.scheduling.slots import Slot
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable


# -- the plain way


def test_a_job_gets_its_cards_runs_and_is_done(lab: LabBox) -> None:
    """By UUID, in its own folder; its output is there, and its cards are anybody's afterwards."""
    first = lab.submit("a", gpus=2)
    second = lab.submit("b", "done")
    lab.until(lambda: lab.state_of(first) == "running")
    lab.tick()
    assert lab.state_of(second) == "pending"
    assert lab.entry(second).words.endswith("priority low may ask nobody to leave.")
    assert lab.entry(second).must_end == (first,)
    lab.say("a", "finish")
    lab.until(lambda: lab.state_of(second) == "done")
    assert lab.state_of(first) == "done"
    assert "cards GPU-0,GPU-1" in lab.log("a", first)
    held = {(each.entry, each.gpus, each.card) for each in lab.driver.usage(0.0, 4e9)}
    assert held == {(first, 2, "a100"), (second, 1, "a100")}


def test_a_high_job_has_a_low_one_leave_and_each_step_is_a_receipt(lab: LabBox) -> None:
    """Notified, acknowledged, saved, left, freed, started, in this order; the low one goes on."""
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.state_of(high) == "running")
    receipt = lab.notice(low)
    assert list(receipt.steps) == [
        "notified",
        "acknowledged",
        "saved",
        "left",
        "freed",
        "started",
    ]
    assert sorted(receipt.steps.values()) == list(receipt.steps.values())
    assert (receipt.outcome, receipt.successor, receipt.lost_seconds) == ("done", high, 0.0)
    assert receipt.words == "It saved its state and left."
    assert lab.state_of(low) == "pending"
    lab.say("high", "finish")
    trains(lab, "low", low)
    lab.say("low", "finish")
    lab.until(lambda: lab.state_of(low) == "done")
    assert lab.entry(low).requeues == 1
    begun = [int(line.split()[1]) for line in lab.log("low", low).splitlines() if "from" in line]
    assert begun[0] == 0
    assert begun[1] > 0
    assert begun[1] % 4 == 0  # the epoch was let end


@pytest.mark.parametrize(
    ("behaviour", "state", "words"),
    [
        ("done", "done", ""),
        ("fail", "failed", "It failed: exit 1; see gpuwarden queue logs 1."),
        (
            "lost",
            "failed",
            (
                "It failed: it left, and no state could be saved (exit 77); "
                "see gpuwarden queue logs 1."
            ),
        ),
        (
            "hold",
            "held",
            "It left because a rule ended it (exit 76): release it when the cause is gone.",
        ),
    ],
)
def test_what_becomes_of_a_job_is_said_by_its_exit_status(
    lab: LabBox, behaviour: str, state: str, words: str
) -> None:
    """An exit of 75 comes back, the others do not by themselves."""
    entry = lab.submit("a", behaviour)
    lab.until(lambda: lab.state_of(entry) == state)
    assert lab.entry(entry).words == words


def test_a_job_that_cannot_be_started_says_why(lab: LabBox) -> None:
    """Its folder is gone, or its program is: it is held, and no cards are for it."""
    first = lab.submit("a", "done")
    lab.work.rename(lab.folder / "elsewhere")
    lab.until(lambda: lab.state_of(first) == "held")
    assert "It could not be started: [Errno 2] No such file" in lab.entry(first).words
    assert lab.entry(first).why == "not_started"
    assert "not_started" in {each.code for each in lab.driver.problems()}
    lab.work.mkdir()
    lab.program().unlink()
    lab.program()
    lab.program().chmod(0o644)
    entry = lab.submit("b")
    lab.until(lambda: lab.state_of(entry) == "held")
    assert "Permission denied" in lab.entry(entry).words
    assert lab.driver._queue.held() == {}  # nobody else can see a reservation that is not given
    lab.program().chmod(0o755)
    lab.driver.release(first, by="ana", now=lab.clock.wall())
    lab.until(lambda: lab.state_of(first) == "done")
    assert lab.entry(first).why == ""


def test_a_failed_job_is_tried_again_so_often_as_the_policy_says(
    open_lab: Callable[..., LabBox],
) -> None:
    """Twice, and then it has failed; by default never."""
    lab = open_lab()
    lab.policy = lab.policy.model_copy(
        update={"local": lab.policy.local.model_copy(update={"retries": 2})}
    )
    lab.driver.adopt(lab.policy)
    entry = lab.submit("a", "fail")
    lab.until(lambda: lab.state_of(entry) == "failed")
    assert len(attempts(lab)) == 3


def test_a_job_that_comes_back_without_a_new_epoch_is_held(lab: LabBox) -> None:
    """Three times for nothing: told, shown as a problem, and released by a person alone."""
    entry = lab.submit("a", "leave")
    lab.until(lambda: lab.state_of(entry) == "held")
    assert lab.entry(entry).why == LOOP
    assert "It came back 3 times without a new epoch" in lab.entry(entry).words
    assert len(attempts(lab)) == 3
    assert [each.code for each in lab.driver.problems()] == ["requeue_loop"]
    lab.driver.release(entry, by="ana", now=lab.clock.wall())
    lab.until(lambda: len(attempts(lab)) == 4)


def test_jobs_wait_for_jobs(lab: LabBox) -> None:
    """For success: after a failure somebody has to say so."""
    first = lab.submit("a")
    second = lab.submit("b", "done", after=(first,))
    third = lab.submit("c", "done", after=(lab.submit("x", "fail"),))
    lab.until(lambda: lab.state_of(third) == "held")
    assert lab.state_of(second) == "pending"
    lab.say("a", "finish")
    lab.until(lambda: lab.state_of(second) == "done")
    assert "which failed or was cancelled" in lab.entry(third).words
    lab.driver.release(third, by="ana", now=lab.clock.wall())
    lab.until(lambda: lab.state_of(third) == "done")


# -- people


def test_people_cancel_hold_and_release(lab: LabBox) -> None:
    """What runs saves first; what waits is out at once."""
    entry = lab.submit("a", gpus=2)
    other = lab.submit("b", "done")
    trains(lab, "a", entry)
    lab.driver.hold(entry, by="ana", now=lab.clock.wall())
    assert lab.state_of(entry) == "leaving"
    lab.until(lambda: lab.state_of(entry) == "held")
    assert lab.entry(entry).words == f"ana holds it: gpuwarden queue release {entry} lets it go on."
    lab.until(lambda: lab.state_of(other) == "done")
    assert lab.request("a") is None
    lab.driver.release(entry, by="ana", now=lab.clock.wall())
    trains(lab, "a", entry)
    lab.until(lambda: lab.log("a", entry).count("from") == 2)  # it hears signals by then
    lab.driver.cancel(entry, by="ana", now=lab.clock.wall())
    lab.until(lambda: lab.state_of(entry) == "failed")
    assert lab.entry(entry).standing == "cancelled"
    assert lab.entry(entry).words == "ana cancelled it; it saved its state before it left."
    assert (lab.work / "a.state").exists()
    with pytest.raises(RefusedAction, match="over already"):
        lab.driver.cancel(entry, by="ana", now=lab.clock.wall())
    with pytest.raises(RefusedAction, match="is not held"):
        lab.driver.release(entry, by="ana", now=lab.clock.wall())
    with pytest.raises(RefusedAction, match="there is no job 99"):
        lab.driver.hold("99", by="ana", now=lab.clock.wall())


def test_a_submission_that_is_said_twice_is_one_job(lab: LabBox) -> None:
    """By its token, after a lost answer; without one a run is in the queue once at most."""
    first = lab.submit("a", token="t1")
    assert lab.submit("a", token="t1") == first
    with pytest.raises(RefusedAction, match="of the run a is in the queue already"):
        lab.submit("a", token="t2")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"team": "gone"}, "there is no team gone"),
        ({"priority": "urgent"}, "there is no priority urgent: low, normal, high are"),
        ({"gpus": 3}, "team vision may use 2 cards of a kind at most"),
        ({"gpu_type": "h100"}, "there are no cards h100: a100 are"),
        ({"window": "noon"}, "there is no window noon"),
        ({"memory_bytes": 50.0 * GIB}, "it needs more memory than a card has: 40 GiB at most"),
        ({"after": ("77",)}, "--after 77: there is no such job here"),
        ({"image": f"yolo@sha256:{'0' * 64}"}, "this engine starts no containers"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    lab: LabBox, others: dict[str, Any], words: str
) -> None:
    """With what there is instead."""
    with pytest.raises((RefusedAction, InvalidInput), match=words):
        lab.submit("a", **others)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_job_runs_as_who_submitted_it(lab: LabBox) -> None:
    """With that user's rights and nothing of the daemon's environment."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as whoever started the daemon may
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as after:
        after.callback(signal.signal, signal.SIGUSR1, before)
        after.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        patch.setenv("SECRET_OF_THE_DAEMON", "1")
        for folder in (lab.folder, *lab.folder.parents):
            if folder.stat().st_mode & 0o077 == 0:  # pytest's own, for the user of the test alone
                folder.chmod(0o711)
        os.chown(lab.work, 65534, 65534)
        lab.program().write_text(
            "#!/bin/sh\nid -u; id -G; env; pwd; grep '^Sig[BI]' /proc/self/status\n"
            "for _ in $(seq 600); do [ -e seen ] && exit 0; sleep 0.1; done; exit 1\n",
            "utf-8",
        )
        task = Task(
            name="nobody",
            run_id="nobody",
            user="root",
            team="vision",
            priority="low",
            gpus=1,
            words=("model=yolov8n",),
            directory=str(lab.work),
            program=str(lab.program()),
        )
        entry = lab.driver.submit(task, uid=65534, gid=65534, now=lab.clock.wall())
        lab.until(lambda: lab.state_of(entry) == "running")
        name = lab.entry(entry).job_id
        (lab.work / "seen").touch()
        lab.until(lambda: lab.state_of(entry) == "done")
    assert name is not None
    assert name.startswith("proc-")
    log = lab.work / f"nobody-{entry}.log"
    assert log.stat().st_uid == 65534
    said = log.read_text().splitlines()
    assert said[:2] == ["65534", "65534"]
    assert not any("SECRET" in line for line in said)
    # The C library keeps its own two from every program, so what ignored them before stays.
    settable = sum(1 << number - 1 for number in signal.valid_signals())
    masks = dict(line.split(":\t") for line in said if line.startswith("Sig"))
    assert {name: int(mask, 16) & settable for name, mask in masks.items()} == {
        "SigBlk": 0,
        "SigIgn": 0,
    }


def test_a_request_of_a_rule_is_not_overwritten(lab: LabBox) -> None:
    """The agent has a job leave and be held: a notice of the queue must not bring it back."""
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    files = lab.driver._files(lab.driver._queue.job(low))  # type: ignore[arg-type]
    lab.say("low", "pause")
    files.ask(LeaveRequest("of-a-rule", lab.clock.wall() + 300, "epoch", "hold", "idle"))
    high = lab.submit("high", priority="high")
    lab.until(lab.driver.preemptions)
    lab.tick()
    request = lab.request("low")
    assert request is not None
    assert request.decision_id == "of-a-rule"
    assert "notified" not in lab.steps(low)
    lab.driver.hold(low, by="ana", now=lab.clock.wall())
    (lab.work / "low.pause").unlink()
    lab.until(lambda: lab.state_of(high) == "running")
    assert lab.state_of(low) == "held"


# -- cards


def test_a_card_that_somebody_else_uses_is_off_limits(lab: LabBox) -> None:
    """By a process of its own, or by memory that no process shows; each is told."""
    lab.cards.foreign = {0: {os.getpid()}}
    lab.cards.used = {1: 3 * GIB}
    entry = lab.submit("a", "done")
    lab.tick()
    assert lab.state_of(entry) == "pending"
    assert lab.entry(entry).why == "off_limits"
    assert lab.entry(entry).words.startswith(
        "It needs 1 card, and 0 of those that there are can be"
    )
    words = [each.words for each in lab.driver.problems()]
    foreign = f"process {os.getpid()} uses it, and is no job of this queue on this card"
    assert words == [
        f"Card GPU-0 is off limits: {foreign}.",
        "Card GPU-1 is off limits: 3.0 GiB of its memory are in use by no process.",
    ]
    lab.cards.used = {}
    lab.until(lambda: lab.state_of(entry) == "done")
    assert "cards GPU-1" in lab.log("a", entry)


def test_cards_are_handed_on_when_their_memory_is_back_and_not_before(lab: LabBox) -> None:
    """The victim has left: until its memory is free, the successor waits."""
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    lab.cards.used = {0: 5 * GIB}
    high = lab.submit("high", gpus=2, priority="high")
    lab.until(lambda: "left" in lab.steps(low))
    for _ in range(3):
        lab.tick()
    assert lab.state_of(high) == "pending"
    assert "freed" not in lab.notice(low).steps
    assert lab.notice(low).outcome == "open"
    lab.tick(FREE_SECONDS + 1)
    assert "memory_not_back" in {each.code for each in lab.driver.problems()}
    lab.cards.used = {}
    lab.until(lambda: lab.state_of(high) == "running")
    assert lab.notice(low).steps["freed"] >= lab.notice(low).steps["left"] + FREE_SECONDS


def test_while_the_driver_is_gone_nothing_starts_and_ends_are_seen(lab: LabBox) -> None:
    """Cannot see is not free: but a job that ended has ended."""
    entry = lab.submit("a", gpus=2)
    other = lab.submit("b", "done")
    trains(lab, "a", entry)
    lab.cards.gone = True
    lab.say("a", "finish")
    deadline = time.monotonic() + 20
    while lab.state_of(entry) != "done":
        with pytest.raises(TemporaryError):
            lab.tick()
        assert time.monotonic() < deadline
    assert lab.state_of(other) == "pending"
    assert [each.code for each in lab.driver.problems()] == ["cards_unseen"]
    lab.cards.gone = False
    lab.until(lambda: lab.state_of(other) == "done")


def test_what_a_job_leaves_behind_is_ended_with_it(lab: LabBox) -> None:
    """A child in a session of its own would hold the card for good."""
    entry = lab.submit("a", "rude")
    lab.until(lambda: lab.state_of(entry) == "done")
    attempt = next(each for each in lab.driver._queue.attempts("ended", "freed"))
    assert attempt.stub is not None
    deadline = time.monotonic() + 30
    while ProcessTable.read().tree([attempt.stub]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- victims that do not go


def test_a_job_that_does_not_leave_is_ended_after_its_deadline_and_not_before(
    lab: LabBox,
) -> None:
    """A signal that it can refuse first, then one that it cannot; what it lost is told."""
    stuck = lab.submit("stuck", "stuck", gpus=2)
    trains(lab, "stuck", stuck)
    high = lab.submit("high", priority="high")
    lab.until(lambda: "acknowledged" in lab.steps(stuck))
    notified = lab.notice(stuck).steps["notified"]
    lab.clock.ahead += notified + 299 - lab.clock.wall()
    lab.tick()
    assert lab.driver._queue.attempts("running")[0].term_at is None
    lab.tick(2)
    assert lab.driver._queue.attempts("running")[0].term_at is not None
    assert lab.notice(stuck).outcome == "overdue"
    assert "victim_overdue" in {each.code for each in lab.driver.problems()}
    lab.tick(KILL_SECONDS - 5)
    assert lab.state_of(stuck) == "leaving"
    lab.tick(6)
    lab.until(lambda: lab.state_of(high) == "running")
    receipt = lab.notice(stuck)
    assert "saved" not in receipt.steps
    assert receipt.outcome == "failed"
    assert receipt.lost_seconds is not None
    assert receipt.lost_seconds > 0  # by the clock of the machine, which the test does not move
    assert lab.state_of(stuck) == "pending"
    assert "ended after its deadline" not in lab.entry(high).words


def test_a_job_that_tells_nothing_is_asked_all_the_same(lab: LabBox) -> None:
    """What it did not tell is absent from its receipt; it is killed only behind the last signal."""
    deaf = lab.submit("deaf", "deaf", gpus=2)
    lab.until(lambda: lab.state_of(deaf) == "running")
    log = lab.work / f"deaf-{deaf}.log"
    lab.until(lambda: log.exists() and "ready" in log.read_text())
    high = lab.submit("high", priority="high")
    lab.until(lambda: "notified" in lab.steps(deaf))
    lab.tick(301)
    lab.tick(KILL_SECONDS + 1)
    lab.until(lambda: lab.state_of(high) == "running")
    assert list(lab.steps(deaf)) == ["notified", "left", "freed", "started"]
    assert lab.entry(deaf).requeues == 1


def test_a_job_that_dies_while_it_saves_has_failed_and_its_successor_starts(lab: LabBox) -> None:
    """Somebody else killed it, for want of memory perhaps: it is not started again unasked."""
    low = lab.submit("low", "dies", gpus=2)
    trains(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.state_of(high) == "running")
    assert lab.state_of(low) == "failed"
    assert "ended by SIGKILL" in lab.entry(low).words
    receipt = lab.notice(low)
    assert receipt.outcome == "failed"
    assert "saved" not in receipt.steps
    assert receipt.lost_seconds is not None
    assert receipt.lost_seconds > 0


def test_a_job_has_to_leave_so_often_and_is_then_left_alone(
    open_lab: Callable[..., LabBox],
) -> None:
    """Two high jobs after one another have it leave; the third one waits, and is told why."""
    often = {
        "minimum_run": "0s",
        "notice": "step",
        "deadline": "5m",
        "back_off": "0s",
        "at_most": {"times": 2, "per": "24h"},
    }
    lab = open_lab(preemption=often)
    low = lab.submit("low", gpus=2)
    for name in ("h1", "h2"):
        trains(lab, "low", low)
        high = lab.submit(name, priority="high")
        lab.until(lambda high=high: lab.state_of(high) == "running")
        lab.say(name, "finish")
        lab.until(lambda high=high: lab.state_of(high) == "done")
    trains(lab, "low", low)
    third = lab.submit("h3", priority="high")
    for _ in range(5):
        lab.tick()
    assert lab.state_of(low) == "running"
    assert (lab.state_of(third), lab.entry(third).why) == ("pending", "no_victim")
    assert lab.entry(third).must_end == (low,)
    assert "the 2nd time within 1d" in lab.driver._queue.notes(closed_since=0.0)[-1].words


def test_a_notice_is_taken_back_when_its_successor_is_gone(lab: LabBox) -> None:
    """The job had not followed it yet, and trains on."""
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    lab.say("low", "pause")
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.request("low") is not None)
    lab.driver.cancel(high, by="ana", now=lab.clock.wall())
    lab.tick()
    assert lab.request("low") is None
    assert lab.notice(low).outcome == "withdrawn"
    assert lab.state_of(low) == "running"


def test_a_job_is_told_for_the_window_that_closes(open_lab: Callable[..., LabBox]) -> None:
    """And comes back when it opens: by the policy's clocks."""
    lab = open_lab()
    zone = {"timezone": "UTC"}
    hour = time.gmtime(lab.clock.wall()).tm_hour
    window = {
        "name": "nights",
        "from": f"{hour:02d}:00",
        "to": f"{(hour + 2) % 24:02d}:00",
        "running": "leave",
    }
    lab.driver.adopt(quick(**zone, windows=[window]).model_copy(update={"local": lab.policy.local}))
    entry = lab.submit("a", window="nights")
    trains(lab, "a", entry)
    lab.tick(2 * 3600)
    lab.until(lambda: lab.state_of(entry) == "held")
    assert lab.notice(entry).cause == "window"
    assert "Window nights is closed until" in lab.entry(entry).words
    lab.tick(22 * 3600)
    lab.until(lambda: lab.state_of(entry) == "running")


def test_past_a_hard_budget_running_jobs_leave_and_wait_for_the_next_day(
    open_lab: Callable[..., LabBox],
) -> None:
    """Counted from this queue's own record of who held what."""
    budget = {
        "team": "vision",
        "per": "day",
        "limit": "1 GPU-hours",
        "kind": "hard",
        "running": "leave",
    }
    lab = open_lab(budgets=[budget], timezone="UTC")
    midnight = 86400 - lab.clock.wall() % 86400
    lab.clock.ahead += midnight + 60  # so that no day ends in between
    entry = lab.submit("a", gpus=2)
    trains(lab, "a", entry)
    lab.tick(1700)
    assert lab.state_of(entry) == "running"
    lab.tick(120)
    lab.until(lambda: lab.state_of(entry) == "held")
    assert lab.notice(entry).cause == "budget"
    assert "of 1.0 GPU-hours for this day" in lab.entry(entry).words
    lab.tick(86400)
    lab.until(lambda: lab.state_of(entry) == "running")


def test_booked_cards_are_given_back_in_time_and_used(lab: LabBox) -> None:
    """Who holds them is told; the team's job starts in its slot, and what it uses is counted."""
    low = lab.submit("low", gpus=2, priority="high")
    trains(lab, "low", low)
    now = lab.clock.wall()
    slot = Slot("b1", "nlp", "bo", 2, "a100", now + 1000, now + 8200, 900.0)
    lab.driver.book([slot], now)
    lab.tick()
    assert lab.state_of(low) == "running"
    lab.tick(101)
    lab.until(lambda: lab.state_of(low) == "pending")
    receipt = lab.notice(low)
    assert (receipt.cause, receipt.successor, receipt.outcome) == ("booking", "b1", "done")
    assert receipt.deadline == pytest.approx(slot.start)
    user = lab.submit("user", team="nlp", gpus=2)
    lab.tick(1000)
    lab.until(lambda: lab.state_of(user) == "running")
    lab.tick(60)
    (use,) = lab.driver.slot_uses()
    assert (use.slot, use.held, use.gpus) == ("b1", True, 2)
    assert use.used_gpu_seconds is not None
    assert use.used_gpu_seconds > 100
    assert "started" in lab.notice(low).steps
    lab.driver.book([], lab.clock.wall())
    lab.say("user", "finish")
    lab.until(lambda: lab.state_of(low) == "running")
    with pytest.raises(SlotsRefused, match="b2: there are no cards h100"):
        lab.driver.book([Slot("b2", "nlp", "bo", 1, "h100", now, now + 1, 0.0)], now)
