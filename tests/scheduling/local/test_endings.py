"""What an end means for a job and for the notice that it had."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuwarden.job_files import RunExit, RunStatus
from gpuwarden.scheduling.engine_terms import LocalTerms
from gpuwarden.scheduling.local.endings import Ended, Ending, ending, seen
from gpuwarden.scheduling.local.launches import Record
from gpuwarden.scheduling.local.queues import Attempt, Job, Note

START, END = 1000.0, 5000.0


def job(**others: Any) -> Job:
    """A job that never ran before."""
    chosen = {
        "id": 1,
        "task_text": json.dumps({}),
        "uid": 0,
        "gid": 0,
        "user": "ana",
        "run_id": "a",
        "submitted": 0.0,
        "state": "active",
        "held": "",
        "code": "",
        "words": "",
        "ended": None,
        "requeues": 0,
        "failures": 0,
        "barren": 0,
        "epoch": -1,
        "step": -1,
        "epoch_seconds": None,
        "then_what": "",
        **others,
    }
    return Job(**chosen)


def attempt(**others: Any) -> Attempt:
    """Two cards for more than an hour."""
    names = (
        *("boot", "stub", "process", "began", "epoch", "epoch_at", "step", "saved", "saved_step"),
        *("ended", "exit", "freed", "term_at", "kill_at"),
    )
    chosen = {
        **dict.fromkeys(names),
        "id": 7,
        "job": 1,
        "created": START,
        "kind": "a100",
        "gpus": 2,
        "state": "running",
        "why": "",
        "began": START,
        **others,
    }
    return Attempt(**chosen)


def note(**others: Any) -> Note:
    """A notice that was delivered a quarter of an hour before the end."""
    names = ("acknowledged", "saved", "left", "freed", "started", "lost", "closed")
    chosen = {
        **dict.fromkeys(names),
        "id": "n",
        "attempt": 7,
        "job": 1,
        "cause": "priority",
        "successor": "2",
        "at": "epoch",
        "made": 4100.0,
        "deadline": 5300.0,
        "words": "w",
        "outcome": "open",
        "notified": 4100.0,
        "last": "",
        "leave": "",
        **others,
    }
    return Note(**chosen)


def ended(code: int | None, *, of: Job | None = None, **facts: Any) -> Ending:
    """What becomes of an attempt that ended so."""
    told, published = facts.pop("note", None), facts.pop("published", None)
    terms = facts.pop("terms", LocalTerms())
    minimum = facts.pop("minimum_run", 600.0)
    return ending(
        of or job(),
        attempt(**facts),
        Ended(code, END, published=published),
        note=told,
        terms=terms,
        minimum_run=minimum,
    )


@pytest.mark.parametrize(
    ("facts", "barren"),
    [
        ({"epoch": 0, "step": 5}, 0),
        ({"epoch": None, "step": None}, 3),
        ({"epoch": 4, "step": 41}, 0),  # it ran for an hour and got further within the epoch
        ({"epoch": 4, "step": 41, "minimum_run": 9999.0}, 3),
        ({"epoch": 4, "step": 40}, 3),
        ({"epoch": 4, "step": 41, "began": None}, 3),
        ({"epoch": 5, "step": 50}, 0),
    ],
)
def test_only_a_new_epoch_or_a_long_run_with_new_steps_gets_somewhere(
    facts: dict[str, Any], barren: int
) -> None:
    """The third time for nothing holds the job; progress takes it back to the beginning."""
    before = job(barren=2, epoch=4, step=40) if facts.get("epoch") != 0 else job(barren=2)
    found = ended(75, of=before, **facts).job
    assert found["barren"] == barren
    assert bool(found["held"]) is (barren == 3)


def test_whoever_made_way_is_in_no_loop() -> None:
    """Spur #431: asked three times before its first epoch, for bookings; it lacks nothing."""
    before = job(barren=2, epoch=4, step=40)
    asked = ended(75, of=before, note=note(cause="booking"), epoch=4, step=40).job
    assert (asked["barren"], asked["held"]) == (2, "")
    assert ended(75, of=before, note=note(notified=None), epoch=4, step=40).job["held"]
    by_hand = job(barren=2, epoch=4, step=40, then_what="hold", words="ana holds it.")
    assert ended(75, of=by_hand, epoch=4, step=40).job["barren"] == 2
    killed = ended(-9, of=before, note=note(), term_at=4900.0, epoch=4, step=40).job
    assert (killed["state"], killed["held"]) == ("waiting", "")


def test_what_was_ended_by_us_comes_back_and_what_fell_over_does_not() -> None:
    """The same signal, sent by whoever is short of memory, is a failure."""
    assert ended(-9, term_at=4900.0, epoch=0).job["state"] == "waiting"
    assert ended(137, term_at=4900.0, epoch=0).job["state"] == "waiting"
    fell = ended(-9, epoch=0).job
    assert (fell["state"], fell["words"]) == (
        "failed",
        (
            "It failed: it was ended by SIGKILL, which is the kernel's too when memory is short: "
            "see dmesg; see gpuwarden queue logs 1."
        ),
    )
    assert (
        ended(-200).job["words"]
        == "It failed: it was ended by signal 200; see gpuwarden queue logs 1."
    )


def test_a_job_whose_card_failed_goes_on_on_others() -> None:
    """It is no fault of the job's; and one that ended otherwise is asked for no card."""
    facts = {"note": None, "terms": LocalTerms(), "minimum_run": 600.0}
    for code in (1, -6):
        lost = Ended(code, END, broken="GPU-1: it does not answer")
        found = ending(job(), attempt(epoch=0), lost, **facts).job
        assert (found["state"], found["requeues"]) == ("waiting", 1)
    assert Ended(1, END).failed
    assert not any(Ended(code, END).failed for code in (0, 75, 76, 77, None))


def test_a_cancelled_job_is_over_however_it_left() -> None:
    """Also if it saved, and would come back."""
    cancelled = job(then_what="cancel", words="ana cancelled it.")
    for code in (0, 75, 1, None):
        found = ended(code, of=cancelled).job
        assert (found["state"], found["code"], found["then_what"]) == ("failed", "cancelled", "")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"saved": 4990.0, "saved_step": 40},
            "ana cancelled it; it saved its state before it left.",
        ),
        (
            {"saved": 4000.0, "saved_step": 30},
            "it left without saving, a state of before is there.",
        ),
        ({}, "ana cancelled it; no state of it is there."),
    ],
)
def test_of_a_cancelled_job_it_is_told_what_is_left_of_it(
    facts: dict[str, Any], words: str
) -> None:
    """Whether its owner can go on with it is what he asks next."""
    cancelled = job(then_what="cancel", words="ana cancelled it.")
    assert ended(75, of=cancelled, step=40, **facts).job["words"].endswith(words)
    assert ended(0, of=cancelled, published=0).job["words"].endswith("just become complete.")


def test_exit_0_of_who_was_asked_is_believed_only_with_its_trainings_word() -> None:
    """Volcano #394: one that obeys SIGTERM and ends with 0 was taken for done, its work for made.

    `gpuwarden train` tells in its files that it is complete. Where nothing tells, another start
    costs seconds if it is, and its end unasked then counts.
    """
    by_signal, by_notice = {"term_at": 4990.0}, {"note": note()}
    for asked in (by_signal, by_notice):
        found = ended(0, epoch=3, step=40, saved=4000.0, saved_step=30, **asked)
        assert (found.job["state"], found.job["requeues"]) == ("waiting", 1)
        assert found.job["words"].startswith("It was asked to leave and ended with exit 0")
        assert found.attempt["exit"] == 0
        assert ended(0, published=0, **asked).job["state"] == "done"
    assert found.note["outcome"] == "failed"
    assert found.note["lost"] == 2 * 1000.0
    assert ended(0).job["state"] == "done"
    assert ended(0, note=note(notified=None)).job["state"] == "done"
    held = ended(0, of=job(then_what="hold", words="ana holds it."), epoch=1).job
    assert (held["state"], held["held"]) == ("waiting", "ana holds it.")


def test_a_training_that_tells_of_its_leaving_is_not_done_whatever_its_program_says() -> None:
    """A script of its owner's that swallows the status, told to leave by whomever."""
    left = ended(0, published=75, note=note(), epoch=3, step=40, saved=4990.0, saved_step=40)
    assert left.job["state"] == "waiting"
    assert (left.note["outcome"], left.note["lost"]) == ("done", 0.0)
    assert ended(0, published=75, epoch=3).job["state"] == "waiting"
    assert ended(0, published=76, epoch=3).job["held"].startswith("It left because a rule")
    assert ended(0, published=1).job["state"] == "done"  # its program went on after a fault


def test_nothing_is_lost_where_the_last_step_was_saved() -> None:
    """Else all that was done since the last durable state, on all of its cards."""
    kept = ended(75, note=note(), epoch=3, step=40, saved=4990.0, saved_step=40).note
    assert (kept["lost"], kept["saved"], kept["left"]) == (0.0, 4990.0, END)
    assert kept["outcome"] == "done"
    short = ended(75, note=note(), epoch=3, step=41, saved=4000.0, saved_step=40).note
    assert short["lost"] == 2 * 1000.0
    assert "saved" not in short
    killed = ended(-9, note=note(), term_at=1.0, step=9).note
    assert (killed["outcome"], killed["lost"]) == ("failed", 2 * 4000.0)
    done = ended(0, note=note(), step=9, published=0).note
    assert (done["outcome"], done["lost"]) == ("ended", 0.0)


def test_whoever_saw_the_end_is_believed_first() -> None:
    """Its parent; else what it said itself; else nobody knows, and that is said."""
    said = RunStatus("a", 1, "train", 0.0, 4000.0, exit=RunExit(75, "left", 4001.0))
    record = Record(0, END)
    assert seen(record, said, rebooted=False, now=9000.0) == Ended(0, END, published=75)
    assert seen(None, said, rebooted=False, now=9000.0) == Ended(75, 4001.0)
    silent = RunStatus("a", 1, "train", 0.0, 4000.0)
    assert seen(None, silent, rebooted=True, now=9000.0) == Ended(None, 4000.0, rebooted=True)
    assert seen(None, None, rebooted=False, now=9000.0) == Ended(None, 9000.0)
    rebooted = ending(
        job(),
        attempt(epoch=0),
        Ended(None, END, rebooted=True),
        note=None,
        terms=LocalTerms(),
        minimum_run=0.0,
    )
    assert rebooted.job["words"].startswith("Its host was restarted")
