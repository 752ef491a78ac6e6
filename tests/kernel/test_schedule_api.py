"""The schedule's document: what one program writes, another reads, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.schedule_api import (
    MAX_ENTRIES,
    MAX_IDS,
    STEPS,
    BookingEntry,
    BookingState,
    BudgetEntry,
    Card,
    Cause,
    EntryState,
    Interval,
    Outcome,
    Preemption,
    Problem,
    QueueEntry,
    ScheduleDocument,
    ScheduleError,
)

NOW = 1_800_000_000.0
ENTRY = QueueEntry(
    engine="slurm",
    id="4711",
    name="night run",
    user="ana",
    state=EntryState.PENDING,
    gpus=2,
    submitted=NOW - 60,
    run_id="run-1",
    team="vision",
    priority="high",
    gpu_type="a100-40",
    position=1,
    start=Interval(NOW + 60, NOW + 600, 12),
    why="Resources",
    words="It waits for 2 cards.",
    must_end=("4700", "4701"),
    requeues=1,
    job_id="slurm-ci-4711-1",
    finish=Interval(NOW + 4000, NOW + 5000, 7),
)
DOCUMENT = ScheduleDocument(
    engine="slurm",
    cluster="ci",
    taken=NOW,
    entries=(ENTRY, dataclasses.replace(ENTRY, id="4700", start=None, state=EntryState.RUNNING)),
    preemptions=(
        Preemption(
            "p-1",
            victim="4700",
            successor="4711",
            cause=Cause.PRIORITY,
            at="epoch",
            deadline=NOW + 1200,
            run_id="run-0",
            steps={"notified": NOW, "acknowledged": NOW + 1},
            outcome=Outcome.OPEN,
        ),
    ),
    bookings=(
        BookingEntry(
            "b7k2.3", "vision", "ana", 4, "a100-40", NOW, NOW + 3600, "weekly", BookingState.ACTIVE
        ),
    ),
    budgets=(BudgetEntry("vision", "month", 5000.0, "hard", NOW, NOW + 86400, used=12.5),),
    problems=(Problem("engine_unseen", "squeue does not answer.", NOW),),
    cards=(Card("a100-40", 32),),
    timezone="Europe/Berlin",
)


def encoded(**changes: Any) -> dict[str, Any]:
    """The document as JSON's types, with fields replaced."""
    data: dict[str, Any] = json.loads(DOCUMENT.encode())
    return {**data, **changes}


def read(data: Any) -> ScheduleDocument:
    """What a reader makes of it."""
    return ScheduleDocument.decode(json.dumps(data).encode())


def test_what_is_written_is_read() -> None:
    """Every field of every part comes back as it was."""
    assert ScheduleDocument.decode(DOCUMENT.encode()) == DOCUMENT


def test_a_newer_scheduler_may_say_more() -> None:
    """Fields, and steps of a preemption, that this version does not know are left aside."""
    data = encoded(weather="fine")
    data["entries"][0]["mood"] = "good"
    data["preemptions"][0]["steps"]["waved"] = NOW
    assert read(data) == DOCUMENT


@pytest.mark.parametrize("version", ["gpuwarden.schedule/v2", "", None, 1, ["v1"]])
def test_another_version_is_refused(version: object) -> None:
    """A reader does not guess what a document of another major means."""
    with pytest.raises(ScheduleError, match="version"):
        read(encoded(version=version))


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("entries", {"state": "asleep"}, r"entries\[0\]: state is not one of pending, held"),
        ("entries", {"state": ["pending"]}, "state is not one of"),
        ("entries", {"gpus": 1.5}, "gpus is not a whole number"),
        ("entries", {"gpus": True}, "gpus is not a whole number"),
        ("entries", {"gpus": -1}, "gpus is not a whole number"),
        ("entries", {"id": None}, "id is not a text"),
        ("entries", {"id": "x" * 257}, "id is not a text"),
        ("entries", {"name": "\ud800"}, "name is not text"),
        ("entries", {"submitted": "yesterday"}, "submitted is not a number"),
        ("entries", {"submitted": 10**400}, "submitted is not a number that can be"),
        ("entries", {"start": {"earliest": 2, "latest": 1, "samples": 0}}, "ends before it begins"),
        ("entries", {"start": [1, 2]}, "start is not an object"),
        ("entries", {"must_end": "4700"}, "must_end is not a list"),
        ("entries", {"must_end": [4700]}, "must_end is not a text"),
        ("entries", {"must_end": ["1"] * (MAX_IDS + 1)}, "must_end is not a list"),
        ("entries", {"position": "first"}, "position is not a whole number"),
        ("preemptions", {"at": "once"}, "at is not one of step, epoch"),
        ("preemptions", {"steps": ["notified"]}, "steps is not an object"),
        ("preemptions", {"steps": {"notified": None}}, "steps: notified is not a number"),
        ("preemptions", {"outcome": "fine"}, "outcome is not one of"),
        ("bookings", {"end": NOW - 1}, "end is not after"),
        ("budgets", {"kind": "elastic"}, "kind is not one of hard, soft"),
        ("cards", {"count": None}, "count is not a whole number"),
    ],
)
def test_a_field_of_another_kind_is_named(part: str, change: dict[str, Any], says: str) -> None:
    """A wrong document says where it is wrong."""
    data = encoded()
    data[part][0] |= change
    with pytest.raises(ScheduleError, match=says):
        read(data)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"version":"gpuwarden.schedule/v1","entries":{}}',
        b'{"version":"gpuwarden.schedule/v1","taken":NaN}',
    ],
)
def test_what_is_no_document_is_refused(body: bytes) -> None:
    """Whatever arrives, it is read or refused by name."""
    with pytest.raises(ScheduleError):
        ScheduleDocument.decode(body)


def test_a_user_cannot_hide_the_queue_behind_a_long_name() -> None:
    """Texts are cut to what a reader takes, and what is no text is replaced."""
    entry = dataclasses.replace(
        ENTRY, name="n" * 5000, words="w" * 5000, must_end=("1",) * 999, why="\ud800"
    )
    found = ScheduleDocument.decode(dataclasses.replace(DOCUMENT, entries=(entry,)).encode())
    (row,) = found.entries
    assert (len(row.name), len(row.words), len(row.must_end), row.why) == (256, 1024, MAX_IDS, "?")


def test_rows_that_do_not_fit_are_counted() -> None:
    """A queue beyond the limit is shown up to it, and says how much is missing."""
    many = (Card("a100", 1),) * (MAX_ENTRIES + 5)
    found = ScheduleDocument.decode(dataclasses.replace(DOCUMENT, cards=many).encode())
    assert (len(found.cards), found.left_out) == (MAX_ENTRIES, 5)


def test_the_steps_are_those_of_the_contract() -> None:
    """Their order is what receipts are read by."""
    assert STEPS == ("notified", "acknowledged", "saved", "left", "freed", "started")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_nothing_but_the_contracts_error_is_raised(data: st.DataObject) -> None:
    """Whatever a field is replaced by, the document is read or refused."""
    whole = encoded()
    part = data.draw(st.sampled_from(["", "entries", "preemptions", "bookings", "budgets"]))
    target = whole[part][0] if part else whole
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    try:
        ScheduleDocument.decode(json.dumps(whole).encode())
    except ScheduleError as error:
        assert str(error)  # noqa: PT017 (either is right; what is not is another error)


def test_the_first_document_of_this_version_stays_readable() -> None:
    """What a scheduler of v1 once wrote is understood by each field for as long as v1 lasts."""
    recorded = Path(__file__).with_name("schedule_v1.json").read_bytes()
    assert ScheduleDocument.decode(recorded) == DOCUMENT


def test_codes_of_older_schedulers_are_read_in_the_one_way_of_today() -> None:
    """They wrote `-` in some; what is written now has `_` alone, whoever made the code."""
    old = dataclasses.replace(
        DOCUMENT,
        entries=(dataclasses.replace(ENTRY, why="after-failed"),),
        problems=(Problem("victim-overdue", "Job a-1 is late.", NOW),),
    )
    data = json.loads(old.encode())
    assert (data["entries"][0]["why"], data["problems"][0]["code"]) == (
        "after_failed",
        "victim_overdue",
    )
    data["entries"][0]["why"], data["problems"][0]["code"] = "after-failed", "victim-overdue"
    found = ScheduleDocument.decode(json.dumps(data).encode())
    assert (found.entries[0].why, found.problems[0].code) == ("after_failed", "victim_overdue")
    assert found.problems[0].words == "Job a-1 is late."


def test_what_was_cancelled_is_no_failure_to_people() -> None:
    """The contract has no state of its own for it: the code tells."""
    failed = dataclasses.replace(ENTRY, state=EntryState.FAILED, why="timeout")
    assert failed.standing == "failed"
    assert dataclasses.replace(failed, why="cancelled").standing == "cancelled"
    assert dataclasses.replace(ENTRY, why="cancelled").standing == "pending"
