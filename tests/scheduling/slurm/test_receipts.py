"""Receipts hold what was seen, each step once and in order, and nothing that was not."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.scheduling.slurm.leaving_jobs import leaving_policy

from gpuwarden import job_files
from gpuwarden.job_files import Checkpoint, NoticeSeen, RunExit, RunStatus
from gpuwarden.platforms.slurm import SlurmJob
from gpuwarden.platforms.slurm_accounting import Attempt
from gpuwarden.platforms.slurm_listings import ListedJob
from gpuwarden.schedule_api import Outcome
from gpuwarden.scheduling.slurm.receipts import KEPT_SECONDS, Receipts, Signs, signs_in, signs_of

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_800_000_000.0
POLICY = leaving_policy("qos")


def a_job(number: int, qos: str = "low", *states: str, **fields: Any) -> ListedJob:
    """A job with four cards of one node, running since a minute unless its states say otherwise."""
    listed = {name: fields.pop(name) for name in ("preempted", "status") if name in fields}
    words = states or ("RUNNING",)
    usual: dict[str, Any] = {"start_time": NOW - 60, "nodes": ("node1",), "restarts": 0}
    job = SlurmJob(
        job_id=number,
        qos=qos,
        states=frozenset(words),
        comment=f"gpuwarden:{'0' * 16}:run=run{number}",
        **usual | fields,
    )
    return ListedJob(job, gpus=4, **listed)


def left(number: int, **fields: Any) -> ListedJob:
    """The job once it was queued again."""
    usual: dict[str, Any] = {"start_time": None, "nodes": (), "restarts": 1, "status": 75}
    return a_job(number, "low", "PENDING", **usual | fields)


class Trainer:
    """Says what a test wants."""

    def __init__(self) -> None:
        self.signs: Signs | None = None

    def __call__(self, job: ListedJob, run_id: str | None) -> Signs | None:
        """What it says now."""
        assert (run_id, job.job.start_time) == ("run1", NOW - 60)
        return self.signs


def test_every_step_is_told_once_it_is_seen() -> None:
    """From Slurm's choice to the successor's start, in the contract's order."""
    trainer = Trainer()
    receipts = Receipts(POLICY, trainer)
    receipts.observe([a_job(1), a_job(2, "high", "PENDING", start_time=None, nodes=())], NOW)
    assert receipts.preemptions() == ()
    receipts.observe([a_job(1, preempted=NOW + 1)], NOW + 2)
    (told,) = receipts.preemptions()
    assert told.steps == {"notified": NOW + 1}
    assert (told.outcome, told.deadline, told.successor) == (Outcome.OPEN, NOW + 61, "")
    trainer.signs = Signs(acknowledged=NOW + 1.5, durable=NOW - 30)
    receipts.observe([a_job(1, preempted=NOW + 1)], NOW + 3)
    trainer.signs = Signs(acknowledged=NOW + 1.5, saved=NOW + 9.2, durable=NOW + 9)
    receipts.observe([left(1)], NOW + 12)
    receipts.observe([left(1), a_job(2, "high", start_time=NOW + 11)], NOW + 15)
    (told,) = receipts.preemptions()
    assert list(told.steps.items()) == [
        ("notified", NOW + 1),
        ("acknowledged", NOW + 1.5),
        ("saved", NOW + 9.2),
        # The look came later than the successor, who tells it better.
        ("left", NOW + 11),
        ("started", NOW + 11),
    ]
    assert (told.outcome, told.successor, told.run_id) == (Outcome.DONE, "2", "run1")
    assert told.lost_seconds == 0.0


def test_accounting_tells_when_it_left() -> None:
    """Its whole seconds never put an end before the save that came within that second."""
    trainer = Trainer()
    receipts = Receipts(POLICY, trainer)
    receipts.observe([a_job(1, preempted=NOW + 1)], NOW + 2)
    trainer.signs = Signs(acknowledged=NOW + 1.5, saved=NOW + 9.2, durable=NOW + 9)
    attempt = Attempt(1, "1", NOW - 90, NOW - 60, NOW + 9, "REQUEUED", 69.0)
    other = replace(attempt, job_id=3)
    receipts.observe([left(1)], NOW + 12, [attempt, other])
    (told,) = receipts.preemptions()
    assert told.steps["left"] == NOW + 9.2
    later = replace(attempt, end=NOW + 10)
    receipts.observe([left(1)], NOW + 13, [later])
    (told,) = receipts.preemptions()
    assert told.steps["left"] == NOW + 10


@pytest.mark.parametrize("kept", [True, False])
def test_who_was_told_and_gone_between_two_looks_is_told_of(*, kept: bool) -> None:
    """By Slurm's memory of its choice, or by the trainer's word; a step not seen is absent."""
    trainer = Trainer()
    receipts = Receipts(POLICY, trainer)
    receipts.observe([a_job(1)], NOW)
    trainer.signs = Signs(acknowledged=NOW + 1.5, saved=NOW + 2, durable=NOW + 1.9)
    receipts.observe([left(1, preempted=NOW + 1 if kept else None)], NOW + 5)
    (told,) = receipts.preemptions()
    assert ("notified" in told.steps) is kept
    assert list(told.steps)[-3:] == ["acknowledged", "saved", "left"]
    assert told.outcome is Outcome.DONE


def test_who_left_of_itself_made_way_for_nobody() -> None:
    """A job that ends, or is queued again by a person, is no preemption."""
    receipts = Receipts(POLICY, None)
    receipts.observe([a_job(1), a_job(3)], NOW)
    done = a_job(3, "low", "COMPLETED", end_time=NOW + 3)
    receipts.observe([left(1), done, a_job(2, "high", start_time=NOW + 4)], NOW + 5)
    assert receipts.preemptions() == ()


@pytest.mark.parametrize(
    ("after", "outcome", "words", "lost"),
    [
        (left(1, status=0), Outcome.FAILED, "without a state", 4 * 55.0),
        (left(1), Outcome.DONE, "queued again", 0.0),
        (a_job(1, "low", "CANCELLED", end_time=NOW + 25), Outcome.ENDED, "cancelled", 220.0),
        (a_job(1, "low", "COMPLETED", end_time=NOW + 25), Outcome.ENDED, "status 0", 220.0),
        (None, Outcome.FAILED, "without a state", 220.0),
    ],
    ids=["killed", "saved", "cancelled", "ended with 0", "forgotten"],
)
def test_what_became_of_it_is_said(
    after: ListedJob | None, outcome: Outcome, words: str, lost: float
) -> None:
    """What was trained since the last state on disk is lost, of each card."""
    trainer = Trainer()
    trainer.signs = Signs(durable=NOW - 30)
    receipts = Receipts(POLICY, trainer)
    receipts.observe([a_job(1, preempted=NOW + 1)], NOW + 2)
    receipts.observe([] if after is None else [after], NOW + 25)
    (told,) = receipts.preemptions()
    assert (told.outcome, told.lost_seconds) == (outcome, lost)
    assert words in told.words


def test_without_a_trainers_word_what_was_lost_is_not_known() -> None:
    """Not nothing: nobody can tell."""
    receipts = Receipts(POLICY, None)
    receipts.observe([a_job(1, preempted=NOW + 1)], NOW + 2)
    receipts.observe([left(1, status=0)], NOW + 25)
    (told,) = receipts.preemptions()
    assert told.lost_seconds is None
    assert list(told.steps) == ["notified", "left"]


def test_a_node_that_is_cleared_belongs_to_the_attempt_that_leaves() -> None:
    """Slurm 24.11 writes the next attempt's times there already, and its choice anew."""
    receipts = Receipts(POLICY, None)
    receipts.observe([a_job(1, preempted=NOW + 1)], NOW + 2)
    clearing = {"start_time": NOW + 15, "restarts": 1, "preempted": NOW + 15, "status": 0}
    receipts.observe([a_job(1, "low", "COMPLETING", **clearing)], NOW + 16)
    (told,) = receipts.preemptions()
    assert told.outcome is Outcome.OPEN
    receipts.observe([left(1, status=0)], NOW + 18)
    (told,) = receipts.preemptions()
    assert told.steps == {"notified": NOW + 1, "left": NOW + 18}
    assert (told.outcome, told.lost_seconds) == (Outcome.DONE, None)
    assert "nobody tells" in told.words


def test_who_stays_beyond_grace_and_kill_is_overdue() -> None:
    """And is told of until it is gone."""
    receipts = Receipts(POLICY, None)
    receipts.observe([a_job(1, preempted=NOW)], NOW + 2)
    receipts.observe([a_job(1, preempted=NOW)], NOW + 130)
    (told,) = receipts.preemptions()
    assert told.outcome is Outcome.OVERDUE


def test_only_who_preempts_it_is_its_successor() -> None:
    """Not a job of its own priority, of another node, or one that was there already."""
    receipts = Receipts(POLICY, None)
    before = a_job(9, "high", start_time=NOW - 500)
    receipts.observe([a_job(1, preempted=NOW + 1), before], NOW + 2)
    others = [
        before,
        a_job(4, "low", start_time=NOW + 5),
        a_job(5, "high", start_time=NOW + 5, nodes=("node2",)),
    ]
    receipts.observe([left(1), *others], NOW + 6)
    (told,) = receipts.preemptions()
    assert "started" not in told.steps
    receipts.observe([left(1), *others, a_job(6, "high", start_time=NOW + 8)], NOW + 9)
    (told,) = receipts.preemptions()
    assert told.successor == "6"


def test_an_attempt_is_asked_once_and_each_attempt_is_its_own() -> None:
    """A job that comes back and has to leave again has a second receipt, with its own id."""
    receipts = Receipts(POLICY, None)
    receipts.observe([a_job(1, preempted=NOW + 1)], NOW + 2)
    receipts.observe([left(1)], NOW + 3)
    again = {"start_time": NOW + 20, "restarts": 1}
    receipts.observe([a_job(1, preempted=NOW + 1, **again)], NOW + 25)
    assert len(receipts.preemptions()) == 1  # Slurm may remember the first choice still
    receipts.observe([a_job(1, preempted=NOW + 30, **again)], NOW + 31)
    first, second = receipts.preemptions()
    assert first.id != second.id
    assert second.outcome is Outcome.OPEN


def test_what_is_over_is_forgotten_after_a_day() -> None:
    """What is open never is."""
    receipts = Receipts(POLICY, None)
    receipts.observe([a_job(1, preempted=NOW + 1), a_job(3, preempted=NOW + 1)], NOW + 2)
    receipts.observe([left(1), a_job(3, preempted=NOW + 1)], NOW + 3)
    receipts.observe([a_job(3, preempted=NOW + 1)], NOW + 4 + KEPT_SECONDS)
    assert [each.victim for each in receipts.preemptions()] == ["3"]


def test_a_status_of_an_earlier_attempt_says_nothing(tmp_path: Path) -> None:
    """The file stays until the next attempt writes its own."""
    status = RunStatus(
        "run1",
        sequence=3,
        phase="train",
        phase_since=NOW,
        heartbeat=NOW + 8,
        checkpoint=Checkpoint(time=NOW + 8, step=4, durable=NOW + 8.5),
        notice=NoticeSeen("SIGUSR1", "epoch", NOW + 1.5),
    )
    # A periodic state is not the one with which it leaves.
    heard = Signs(NOW + 1.5, None, NOW + 8, NOW + 8.5, heard=NOW + 8)
    assert signs_of(status, NOW) == heard
    status = replace(status, exit=RunExit(75, "SIGUSR1", NOW + 9))
    assert signs_of(status, NOW) == replace(heard, saved=NOW + 8.5, status=75)
    assert signs_of(status, NOW + 20) is None
    earlier = replace(status, checkpoint=Checkpoint(time=NOW, step=1, durable=NOW + 2))
    found = signs_of(earlier, NOW)
    assert found is not None
    assert found.saved is None
    (tmp_path / "jobs").mkdir()
    job = a_job(1, start_time=NOW, user_id=os.geteuid())
    assert signs_in(tmp_path)(job, "run1") is None
    assert signs_in(tmp_path)(job, None) is None
    path = job_files.status_path(tmp_path, "run1")
    job_files.write(path, status.encode())
    assert signs_in(tmp_path)(job, "run1") == signs_of(status, NOW)
    for somebody in (os.geteuid() + 1, None):
        others = a_job(1, start_time=NOW, user_id=somebody)
        assert signs_in(tmp_path)(others, "run1") is None
    path.write_text("{", "utf-8")
    assert signs_in(tmp_path)(job, "run1") is None
