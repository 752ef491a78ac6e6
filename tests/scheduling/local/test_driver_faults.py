"""A lab box among other people's files, on a full disk, and under a clock that is set."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import resource
import signal
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.local.boxes import LabBox
from tests.scheduling.local.policy_texts import box

from gpuwarden import job_files
from gpuwarden.errors import RefusedAction, TemporaryError
from gpuwarden.scheduling.local.launches import Launcher
from gpuwarden.scheduling.local.processes import ProcessTable
from gpuwarden.scheduling.local.queues import KEPT_SECONDS
from gpuwarden.scheduling.local.readings import KILL_SECONDS
from gpuwarden.scheduling.local.starts import UNFIT_SECONDS
from gpuwarden.scheduling.local.stubs import OPEN_FILES
from gpuwarden.scheduling.sqlite_files import StateUnwritable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.scheduling.local.launches import Claim


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabBox]:
    """A box of two cards, in which a job may be asked at once."""
    preemption = {
        "minimum_run": "0s",
        "notice": "epoch",
        "deadline": "5m",
        "back_off": "0s",
        "at_most": {"times": 3, "per": "24h"},
    }
    cards = [{"name": "a100", "model": "NVIDIA A100", "memory": "40GiB", "count": 2}]
    teams = [{"name": "vision", "users": [], "quota": {"a100": 4}}]
    made = LabBox(tmp_path, box(preemption=preemption, cards=cards, teams=teams), cards=2)
    yield made
    made.close()


def runs(lab: LabBox, name: str, entry: str) -> None:
    """Tick until a job is at what it was made for: deaf, or counting its steps."""
    lab.until(lambda: entry in {str(e.job) for e in lab.driver._queue.attempts("running")})
    lab.until(lambda: {"ready", "from 0"} & set(lab.log(name, entry).splitlines()))


# -- other people's runs


@pytest.mark.skipif(os.getuid() != 0, reason="only root can write files of another user")
def test_a_job_that_borrows_the_name_of_anothers_run_has_nobody_else_leave(lab: LabBox) -> None:
    """Requests are read by the run's name: theirs must not be asked in place of this job.

    It gets no gentle notice then; at its deadline it is ended like one that does not listen.
    """
    low = lab.submit("low", "deaf", gpus=2)
    runs(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.request("low"))
    theirs = job_files.description_path(lab.jobs, "low")
    theirs.write_bytes(b"{}")
    os.chown(theirs, 65534, 65534)
    lab.tick()
    assert lab.request("low") is None
    assert "run_of_others" in {each.code for each in lab.driver.problems()}
    with pytest.raises(RefusedAction, match="another user"):
        lab.driver.hold(low, by="ana", now=lab.clock.wall())
    lab.tick()
    assert lab.request("low") is None
    with pytest.raises(RefusedAction, match="another user"):
        lab.submit("low")
    lab.tick(301)
    lab.tick(KILL_SECONDS + 1)
    lab.until(lambda: lab.state_of(high) == "running")


def test_a_token_that_another_has_used_is_not_theirs(lab: LabBox) -> None:
    """Whoever learns the word of a submission gets neither its job nor an answer in its name."""
    entry = lab.submit("a", token="t1")
    queue = lab.driver._queue
    assert queue.by_token(f"{os.getuid()}:t1") == entry
    assert queue.by_token("t1") is None


# -- a full disk


@pytest.mark.parametrize("begun", [False, True])
def test_a_launch_whose_claim_cannot_be_read_is_settled_by_the_next_tick(
    lab: LabBox, monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    """A disk that is full at that moment: what began is found, what did not is started once."""
    entry = lab.submit("a")
    whole = Launcher.launch

    def full(self: Launcher, *arguments: object, **named: object) -> Claim:
        if begun:
            whole(self, *arguments, **named)  # type: ignore[arg-type]
        raise TemporaryError("No space left on device")

    monkeypatch.setattr(Launcher, "launch", full)
    lab.tick()
    assert "launches" in {each.code for each in lab.driver.problems()}
    monkeypatch.setattr(Launcher, "launch", whole)
    lab.tick(UNFIT_SECONDS)
    runs(lab, "a", entry)
    assert lab.log("a", entry).count("from 0") == 1
    assert len(lab.driver._queue.held()) == 1


def test_a_claim_that_a_power_cut_left_empty_was_given_up(lab: LabBox) -> None:
    """A stub's own is on disk before it has its name: an empty one is of a daemon that gave up."""
    entry = lab.submit("a")
    launcher = lab.driver._launcher
    launcher._claim(7).write_bytes(b"")
    assert launcher.settle(7) is None
    runs(lab, "a", entry)


# -- a clock that is set


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_is_set_takes_no_time_from_a_notice(lab: LabBox, hours: int) -> None:
    """Forward it would end a job at once, back it would let it stay for hours."""
    low = lab.submit("low", "deaf", gpus=2)
    runs(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.steps(low))
    lab.clock.set += hours * 3600.0
    lab.tick()
    lab.tick(240)
    assert lab.state_of(low) == "leaving"
    assert lab.driver._queue.attempts("running")[0].term_at is None
    request = lab.request("low")
    assert request is not None
    assert 0 < request.leave_by - lab.clock.wall() < 60
    lab.tick(61)
    assert lab.driver._queue.attempts("running")[0].term_at is not None
    lab.clock.set += hours * 3600.0
    lab.tick()
    assert lab.state_of(low) == "leaving"
    lab.tick(KILL_SECONDS + 1)
    lab.until(lambda: lab.state_of(high) == "running")


# -- what a job says of itself


def published(lab: LabBox, entry: str, **said: object) -> None:
    """Write a status for a job that writes none itself, and look at it."""
    process = lab.pid(entry)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    described = {
        "version": 1,
        "run_id": "low",
        "pid": process.pid,
        "pid_ns": 1,
        "boot_id": boot,
        "start_ticks": process.ticks,
        "model": "m",
        "batch": 1,
        "imgsz": 64,
        "amp": False,
        "epochs": 9,
    }
    now = lab.clock.wall()
    usual = {"phase": "train", "phase_since": now, "heartbeat": now, "epoch": 0, "step": 0}
    status = {"version": 1, "run_id": "low", "sequence": 1, **usual, **said}
    for name, document in (("low.json", described), ("low.status.json", status)):
        (lab.jobs / "jobs" / name).write_text(json.dumps(document), "utf-8")
    lab.tick(1)


@pytest.mark.parametrize(
    "said",
    [
        [{"request": {"decision_id": "x", "state": "saving"}}],
        [{"epoch": 1}, {"epoch": 2, "heartbeat": 1e300}],
        [{"epoch": 1, "heartbeat": -1e300}, {"epoch": 2}],
        [{"checkpoint": {"time": 1e300, "step": 1, "durable": 1e300}}],
    ],
)
def test_nothing_that_a_job_says_of_itself_keeps_it_from_being_asked(
    lab: LabBox, said: list[dict[str, object]]
) -> None:
    """To be leaving without having been asked, or epochs that are longer than its life."""
    low = lab.submit("low", "deaf", gpus=2)
    runs(lab, "low", low)
    for each in said:
        published(lab, low, **each)
    lab.submit("high", priority="high")
    lab.tick(5)
    assert lab.request("low") is not None


def test_epochs_of_days_protect_for_two_hours(lab: LabBox) -> None:
    """Its owner's own word, which whoever submits may choose."""
    low = lab.submit("low", "deaf", gpus=2, epoch_seconds=1e8)
    runs(lab, "low", low)
    lab.submit("high", priority="high")
    lab.tick(7100)
    assert lab.request("low") is None
    lab.tick(200)
    assert lab.request("low") is not None


# -- cards that fail


def test_a_job_whose_card_falls_off_the_bus_goes_on_on_another(lab: LabBox) -> None:
    """Its crash is the card's; the other card serves on, and nobody waits for the lost one."""
    job = lab.submit("job")
    runs(lab, "job", job)
    (first,) = lab.driver._queue.held()
    lab.cards.lost = {int(first.removeprefix("GPU-"))}
    os.kill(lab.pid(job).pid, signal.SIGABRT)
    lab.until(lambda: lab.entry(job).requeues == 1)
    lab.until(lambda: lab.state_of(job) == "running")
    (second,) = lab.driver._queue.held()
    assert second != first
    assert f"Card {first} is off limits: it does not answer." in [
        each.words for each in lab.driver.problems()
    ]


# -- a full disk


def test_a_state_that_cannot_be_written_starts_nobody_and_loses_nobody(lab: LabBox) -> None:
    """It is told as what it is, and with room again all goes on."""
    first = lab.submit("first")
    runs(lab, "first", first)
    second = lab.submit("second")
    db = lab.driver._queue._db
    (pages,) = tuple(db.execute("PRAGMA page_count").fetchone())
    db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StateUnwritable, match=r"queue\.db cannot be written \(.*full\)"):
        deque((lab.submit(f"more-{number}") for number in range(1000)), maxlen=0)
    db.execute("PRAGMA max_page_count = 1000000")
    lab.until(lambda: lab.state_of(second) == "running")
    assert lab.state_of(first) == "running"


def test_how_a_job_ended_is_written_when_there_is_room_again(lab: LabBox) -> None:
    """A parent that cannot write stays until it can: the end of its job is not guessed."""
    job = lab.submit("job")
    runs(lab, "job", job)
    (attempt,) = lab.driver._queue.attempts("running")
    part = lab.state / "attempts" / f"{attempt.id}.record.part"
    part.mkdir()  # nothing can be written by that name
    lab.say("job", "finish")
    process = lab.pid(job)
    lab.until(lambda: not ProcessTable.read().alive(process))
    assert lab.state_of(job) == "running"
    part.rmdir()
    lab.until(lambda: lab.state_of(job) == "done")


# -- what a job is started with


def test_a_job_takes_over_no_limit_of_the_daemons(lab: LabBox) -> None:
    """Neither its shelter from the kernel's choice when memory is short, nor few open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    adjusted = Path("/proc/self/oom_score_adj")
    score = adjusted.read_text("ascii")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        with contextlib.suppress(PermissionError):  # not everybody may shelter himself
            adjusted.write_text("-500", "ascii")
        job = lab.submit("job")
        runs(lab, "job", job)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        adjusted.write_text(score, "ascii")
    pid = lab.pid(job).pid
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text("ascii")) >= 0
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, OPEN_FILES) if hard != resource.RLIM_INFINITY else OPEN_FILES


def test_a_job_that_others_wait_for_is_not_forgotten(lab: LabBox) -> None:
    """Forgotten, it would be neither done nor failed, and they would start."""
    first = lab.submit("first", "fail")
    second = lab.submit("second", options=(), after=(first,))
    lab.until(lambda: lab.state_of(first) == "failed")
    lab.tick(2 * KEPT_SECONDS)
    lab.tick()
    assert lab.state_of(second) == "held"
    assert first in lab.entry(second).words


def test_a_directory_of_users_that_does_not_answer_costs_nobody_his_place(
    lab: LabBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held for a minute, and started when the user is known again: nobody has to release it."""
    known = pwd.getpwuid

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    job = lab.submit("job")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    lab.tick()
    lab.tick()
    assert lab.state_of(job) == "held"
    assert "This host knows no user with the number" in lab.entry(job).words
    monkeypatch.setattr(pwd, "getpwuid", known)
    lab.tick(UNFIT_SECONDS)
    lab.until(lambda: lab.state_of(job) == "running")


# -- jobs that leave otherwise than a trainer does


def test_a_program_that_obeys_and_ends_with_0_is_not_done(lab: LabBox) -> None:
    """Volcano #394: its work was taken for made. It waits for its turn again."""
    low = lab.submit("low", "meek", gpus=2)
    runs(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: "notified" in lab.steps(low))
    lab.tick(301)
    lab.until(lambda: lab.state_of(high) == "running")
    assert (lab.state_of(low), lab.entry(low).requeues) == ("pending", 1)
    assert lab.notice(low).outcome == "failed"


def test_a_job_that_somebody_stopped_is_let_go_on_to_leave(lab: LabBox) -> None:
    """`kill -STOP` by its owner: with the signal alone it would be killed a minute later."""
    low = lab.submit("low", gpus=2)
    runs(lab, "low", low)
    os.kill(lab.pid(low).pid, signal.SIGSTOP)
    high = lab.submit("high", priority="high")
    lab.until(lambda: "notified" in lab.steps(low))
    lab.tick(301)
    lab.until(lambda: lab.state_of(high) == "running")
    assert lab.entry(low).requeues == 1
    assert lab.notice(low).words == "It saved its state and left."
