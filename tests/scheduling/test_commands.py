"""`gpuwarden queue`, `book` and `usage` as people type them, against a daemon that runs."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import pwd
import time
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import icalendar
import pytest
from click.testing import CliRunner, Result
from tests.scheduling.daemons import PlayedQueue, running
from tests.scheduling.policy_files import NOW, TEXT

from gpuwarden.cli import gpuwarden
from gpuwarden.errors import GpuwardenError
from gpuwarden.schedule_api import Cause, EntryState, Interval, Outcome, Preemption, QueueEntry
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.queue_texts import about, between

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scheduling.daemons import Running

ME = pwd.getpwuid(os.geteuid()).pw_name
HOUR = 3600.0
POLICY = TEXT.replace("users: [ana, bo]", f"users: [ana, bo, {ME}]")
WAITS = QueueEntry(
    engine="slurm",
    id="8",
    name="night",
    user="ana",
    state=EntryState.PENDING,
    gpus=2,
    submitted=NOW - 600,
    run_id="run-8",
    team="vision",
    priority="high",
    gpu_type="a100-40",
    position=1,
    start=Interval(NOW + 60, NOW + 4000, 6),
    why="Resources",
    words="It waits for 2 cards.",
    must_end=("7",),
)
RUNS = dataclasses.replace(
    WAITS,
    id="7",
    run_id="run-7",
    name="day \x1b[31m",
    user="cy",
    team="speech",
    state=EntryState.LEAVING,
    started=NOW - 90000,
    start=None,
    must_end=(),
    position=None,
    finish=Interval(NOW + 50, NOW + 3000, 0),
    words="It was asked to leave.",
)
LEAVES = Preemption(
    "p1",
    victim="7",
    successor="8",
    cause=Cause.PRIORITY,
    at="epoch",
    deadline=NOW + 1200,
    steps={"notified": NOW, "acknowledged": NOW + 1.5, "saved": NOW + 40},
    outcome=Outcome.OPEN,
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A daemon with a job that runs and one that waits for it."""
    with running(tmp_path_factory.mktemp("daemon"), POLICY, now=NOW) as found:
        found.driver.rows = (WAITS, RUNS, dataclasses.replace(WAITS, id="6", state=EntryState.DONE))
        found.driver.asked_to_leave = (LEAVES,)
        found.driver.held = (
            Holding("slurm", "7", "cy", "speech", 2, NOW - 90000, None, "a100-40"),
            Holding("slurm", "5", "=cmd", "vision", 1, NOW - HOUR, NOW, "h100-80"),
        )
        found.tick(61)
        found.clock.now = NOW + 5
        found.tick()
        yield found


def command(here: Running, *words: str, given: str | None = None) -> Result:
    """What a command prints, and its status."""
    runner = CliRunner()
    socket = {"GPUWARDEN_SCHEDULER_SOCKET": str(here.settings.socket)}
    return runner.invoke(gpuwarden, list(words), env=socket, input=given)


def told(here: Running, *words: str) -> str:
    """What a command prints that is done."""
    found = command(here, *words)
    assert found.exit_code == 0, found.output
    return found.output


# -- queue


def test_the_queue_is_one_list_with_reasons(here: Running) -> None:
    """Who waits, where, since when, until when, and why; what has ended is left out."""
    text = told(here, "queue")
    waits, runs = text.splitlines()[1:3]
    assert waits.split()[:7] == ["8", "night", "ana", "vision", "high", "pending", "#1"]
    assert "2 a100-40" in waits
    assert "starts" in waits
    assert "(n=6)" in waits
    assert "It waits for 2 cards." in waits
    assert "(planned)" in runs
    assert "\x1b" not in text
    assert "done" not in text
    assert "done" in told(here, "queue", "--all")


def test_the_queue_can_be_narrowed(here: Running) -> None:
    """By team; and to one's own, which are none here."""
    assert "night" not in told(here, "queue", "--team", "speech")
    assert told(here, "queue", "--team", "nobody") == "nothing waits, and nothing runs\n"
    rows = json.loads(told(here, "queue", "--mine", "-o", "json"))
    assert (rows["version"], rows["entries"]) == ("gpuwarden.schedule/v1", [])


def test_a_job_tells_why_it_waits_and_who_would_have_to_end(here: Running) -> None:
    """With the receipts of whoever is leaving for it, and the time between them."""
    text = told(here, "queue", "show", "8")
    for line in (
        "waits at place 1: It waits for 2 cards.",
        "would have to end: 7 day",
        "7 leaves for 8 (priority, at the epoch): open",
        "asked to leave",
        "its trainer has read it  +1.5 s",
        "its state is saved  +38.5 s",
        "deadline Fri 2027-01-15 09:20",
    ):
        assert line in text, text
    assert "the cards are free" not in text
    found = json.loads(told(here, "queue", "show", "run-8", "-o", "json"))
    assert [item["id"] for item in found["preemptions"]] == ["p1"]


def test_a_job_is_meant_by_its_id_or_by_a_name_that_one_open_job_has(tmp_path: Path) -> None:
    """A number is an id and nothing else; of what has ended a name brings nothing back."""
    local = POLICY.replace("engine: slurm", "engine: local")
    mine = dataclasses.replace(WAITS, user=ME, name="exp", run_id="exp")
    rows = (
        dataclasses.replace(mine, id="1", state=EntryState.DONE),
        dataclasses.replace(mine, id="2"),
        dataclasses.replace(mine, id="3", name="5", run_id="5"),
        dataclasses.replace(mine, id="4", name="twin", run_id="a", state=EntryState.RUNNING),
        dataclasses.replace(mine, id="6", name="twin", run_id="b"),
        dataclasses.replace(
            mine, id="7", name="over", run_id="over", state=EntryState.FAILED, why="cancelled"
        ),
    )
    with running(tmp_path, local, now=NOW, driver=PlayedQueue) as here:
        here.driver.rows = rows
        here.tick()
        assert told(here, "queue", "cancel", "exp", "a") == (
            "2 exp: out of the queue\n4 twin: asked to leave for good\n"
        )
        assert told(here, "queue", "hold", "b") == "6 twin: held\n"
        assert told(here, "queue", "show", "over").startswith("7 over: cancelled")
        rows_of_all = json.loads(told(here, "queue", "--all", "-o", "json"))["entries"]
        assert [item["state"] for item in rows_of_all if item["id"] == "7"] == ["failed"]
        for name, words in (("5", "no job 5"), ("twin", "jobs 4, 6"), ("over", "no job over")):
            found = command(here, "queue", "hold", name)
            assert (found.exit_code, words in found.output) == (1, True), found.output
        assert here.driver.commands == [("cancel", "2", ME), ("cancel", "4", ME), ("hold", "6", ME)]


def test_a_job_that_is_not_there_is_an_answer(here: Running) -> None:
    """And no traceback."""
    found = command(here, "queue", "show", "99")
    assert isinstance(found.exception, GpuwardenError)
    assert found.exception.exit_code == 1


def test_what_was_foretold_is_told_with_its_number(here: Running) -> None:
    """Nothing has come to pass yet: that is said, and no share of nothing."""
    text = told(here, "queue", "calibration")
    assert "nothing that was foretold has come to pass yet" in text
    assert "2 are open, 0 became void" in text


def test_without_a_daemon_the_queue_says_how_to_reach_one(tmp_path: Path) -> None:
    """Status 3: a needed service is missing."""
    found = CliRunner().invoke(
        gpuwarden, ["queue", "--socket", str(tmp_path / "none"), "--policy", str(tmp_path / "no")]
    )
    assert isinstance(found.exception, GpuwardenError)
    assert found.exception.exit_code == 3
    assert "gpuwarden scheduler" in str(found.exception)


def test_jobs_of_a_local_queue_are_commanded(tmp_path: Path) -> None:
    """Each by itself: one that is not there spoils no other, and is told."""
    local = POLICY.replace("engine: slurm", "engine: local")
    with running(tmp_path, local, now=NOW, driver=PlayedQueue) as here:
        here.driver.rows = (dataclasses.replace(WAITS, id="1", user=ME),)
        found = command(here, "queue", "cancel", "3", "1")
        assert found.exit_code == 1
        assert "no job 3" in found.output
        assert here.driver.commands == [("cancel", "1", ME)]


def test_moments_far_away_have_their_year_and_those_gone_by_are_said_to_be() -> None:
    """A start that was foretold and did not come is no start that is ahead."""
    zone = ZoneInfo("Europe/Berlin")
    far = between(Interval(NOW + 400 * 86400, NOW + 401 * 86400, 9), now=NOW, zone=zone)
    assert far == "2028-02-19 09:00 to 2028-02-20 09:00 (n=9)"
    gone = between(Interval(NOW - 600, NOW - 300, 3), now=NOW, zone=zone)
    assert gone == "08:50 to 08:55 (n=3, has passed)"


def test_times_are_told_shortly() -> None:
    """The two largest units, and an interval in as few words as say it."""
    assert [about(n) for n in (7, 90, 3700, 90000, 86400 * 12 + 7200)] == [
        "7s",
        "1m",
        "1h1m",
        "1d1h",
        "12d",
    ]
    zone = ZoneInfo("Europe/Berlin")
    assert between(Interval(NOW, NOW + 60, 3), now=NOW, zone=zone) == "09:00 to 09:01 (n=3)"
    assert between(Interval(NOW, NOW, 0), now=NOW, zone=zone) == "09:00 (planned)"
    later = between(Interval(NOW + 86400, NOW + 90000, 3), now=NOW, zone=zone)
    assert later == "Sat 01-16 09:00 to 10:00 (n=3)"


# -- book

SLOT = ("--gpus", "4", "--card", "a100-40", "--from", "fri 20:00", "--for", "4h")


def test_a_booking_is_shown_with_its_cost_made_listed_extended_and_given_back(
    here: Running,
) -> None:
    """The whole life of one, as people type it."""
    shown = told(here, "book", *SLOT, "--dry-run")
    assert "4 x a100-40: Fri 2027-01-15 20:00 to Sat 2027-01-16 00:00" in shown
    assert "16.0 GPU-hours, 30.40 EUR" in shown
    assert "nothing is booked" in told(here, "book", "list")
    made = json.loads(told(here, "book", *SLOT, "--words", "paper", "--yes", "-o", "json"))
    name = made["booking"]
    listed = told(here, "book", "list", "--team", "vision")
    assert all(word in listed for word in (name, "4 x a100-40", ME, "booked", "paper"))
    assert "20.0 GPU-hours" in told(here, "book", "extend", name, "--by", "1h")
    assert "used not known" in told(here, "book", "show", name)
    assert told(here, "book", "cancel", name, "--yes") == f"given back: {name}\n"
    assert f"given back by {ME}" in told(here, "book", "show", name)
    assert name not in told(here, "book", "list")
    assert name in told(here, "book", "list", "--all")


@pytest.mark.parametrize(("zone", "told_so"), [("America/New_York", True), ("Europe/Paris", False)])
def test_whose_clocks_the_times_are_by_is_told_to_who_has_others(
    here: Running, monkeypatch: pytest.MonkeyPatch, *, zone: str, told_so: bool
) -> None:
    """A colleague abroad reads in the evening what begins at noon for him."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        shown = told(here, "book", *SLOT, "--dry-run")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert ("by the clocks of Europe/Berlin; here the first begins" in shown) is told_so


def test_what_the_engine_keeps_besides_is_told(here: Running) -> None:
    """Whole nodes for two cards, say: when it is booked, and to whoever looks."""
    here.driver.remark = "this Slurm keeps whole nodes"
    text = told(here, "book", *SLOT, "--yes")
    assert "note: this Slurm keeps whole nodes" in text
    name = text.partition("booked: ")[2].split()[0]
    assert "this Slurm keeps whole nodes" in told(here, "book", "list")
    assert "this Slurm keeps whole nodes" in told(here, "book", "show", name)
    here.driver.remark = ""
    told(here, "book", "cancel", name, "--yes")


def test_nothing_is_booked_or_given_back_without_an_answer(here: Running) -> None:
    """A script that forgets --yes changes nothing."""
    for words in (("book", *SLOT), ("book", "cancel", "b1")):
        found = command(here, *words)
        assert found.exit_code == 2
        assert "--yes" in found.output
    assert here.driver.slots == ()


def test_a_conflict_is_told_and_other_times_are_proposed(here: Running) -> None:
    """Status 1, who has it, and when it would do."""
    first = json.loads(told(here, "book", *SLOT, "--yes", "-o", "json"))["booking"]
    big = ("--gpus", "14", "--card", "a100-40", "--from", "fri 21:00", "--for", "1h")
    found = command(here, "book", *big, "--yes")
    assert found.exit_code == 1
    assert f"vision ({ME}) has 4" in found.output
    assert "It would do from:" in found.output
    assert "Fri 2027-01-15 19:00" in found.output
    assert found.output.count("[conflict]") == 1
    told(here, "book", "cancel", first, "--yes")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ((), 2, "--gpus, --from, --for missing"),
        (("--gpus", "1", "--from", "noon", "--for", "1h", "--card", "a100-40"), 2, "no moment"),
        (("--gpus", "1", "--from", "+1h", "--for", "1", "--card", "a100-40"), 2, "lacks a unit"),
        (("--gpus", "1", "--from", "+1h", "--for", "1h"), 2, "say which cards"),
        (("--gpus", "1", "--from", "+1m", "--for", "1h", "--card", "a100-40"), 1, "lead_time"),
        (("--gpus", "1", "--from", "+1h", "--for", "9d", "--card", "a100-40"), 1, "longest"),
        (("show", "b9"), 1, "no booking"),
        (("extend", "b9"), 2, "either --by or --to"),
        (("cancel", "b9", "--yes"), 1, "no booking b9"),
    ],
)
def test_what_cannot_be_booked_says_why(
    here: Running, words: tuple[str, ...], status: int, says: str
) -> None:
    """With the status that its kind of no has."""
    found = command(here, "book", *words)
    if isinstance(found.exception, GpuwardenError):
        assert (found.exception.exit_code, says in str(found.exception)) == (status, True)
    else:
        assert (found.exit_code, says in found.output) == (status, True), found.output


def test_the_calendar_is_read_by_other_programs(here: Running) -> None:
    """Each slot is an event with a lasting id; what was given back is cancelled, not gone."""
    made = json.loads(
        told(
            here,
            "book",
            *SLOT,
            "--repeat",
            "weekly",
            "--until",
            "2027-04-10",
            "--yes",
            "-o",
            "json",
        )
    )
    name = made["booking"]
    told(here, "book", "cancel", f"{name}.2", "--yes")
    body = told(here, "book", "calendar", "--team", "vision")
    calendar = icalendar.Calendar.from_ical(body)
    events = {
        str(event["UID"]): event
        for event in calendar.walk("VEVENT")
        if str(event["UID"]).startswith(name)
    }
    assert len(events) == len(made["slots"]) == 13
    second = events[f"{name}.2@ci.gpuwarden"]
    assert (str(second["STATUS"]), int(second["SEQUENCE"])) == ("CANCELLED", 1)
    others = [event for uid, event in events.items() if ".2@" not in uid]
    assert {str(event["STATUS"]) for event in others} == {"CONFIRMED"}
    # 20:00 on the wall before and after the night in which clocks are put forward.
    clocks = {f"{event['DTSTART'].dt:%H:%M}" for event in events.values()}
    offsets = {event["DTSTART"].dt.utcoffset().total_seconds() for event in events.values()}
    assert (clocks, offsets) == ({"20:00"}, {3600, 7200})
    assert [str(zone["TZID"]) for zone in calendar.walk("VTIMEZONE")] == ["Europe/Berlin"]
    starts = sorted(event["DTSTART"].dt.timestamp() for event in events.values())
    assert starts == [slot["start"] for slot in made["slots"]]
    assert "/v1/calendar.ics?team=vision&key=" in told(
        here, "book", "calendar", "--team", "vision", "--address"
    )
    told(here, "book", "cancel", name, "--yes")


# -- usage


def test_usage_is_told_by_what_was_asked(here: Running) -> None:
    """A table, and the total of its lines."""
    text = told(here, "usage", "--by", "user", "--from", "now-2d")
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["USER", "TEAM", "GPU-HOURS", "BY", "SLURM", "JOBS", "STARTS", "COST"]
    assert lines[1][:5] == ["cy", "speech", "50.0", "1", "1"]
    assert lines[-1][:2] == ["total", "51.0"]


def test_budgets_tell_what_is_used_and_what_will_be(tmp_path: Path) -> None:
    """A forecast only where there is enough to go by; a spent hard one is a status of its own."""
    text = POLICY.replace("limit: 5000 GPU-hours", "limit: 0.5 GPU-hours")
    with running(tmp_path, text, now=NOW) as here:
        here.driver.held = (Holding("slurm", "5", "ana", "vision", 1, NOW - HOUR, NOW, "h100-80"),)
        here.tick(61)
        found = command(here, "usage", "--budgets", "--check")
        assert found.exit_code == 1
        rows = [line.split() for line in found.output.splitlines()]
        assert rows[1] == ["vision", "month", "hard", "1.0", "0.5", "200", "%", "too", "early"]
        assert rows[2][:5] == ["vision", "day", "soft", "1.0", "300.0"]
        assert "soft" in told(here, "usage", "--budgets")
        data = json.loads(told(here, "usage", "--budgets", "-o", "json"))["budgets"]
        assert [(item["per"], item["used"]) for item in data] == [("month", 1.0), ("day", 1.0)]
        assert "no budgets" in told(here, "usage", "--budgets", "--team", "speech", "--check")


def test_a_spreadsheet_takes_no_name_for_a_formula(here: Running) -> None:
    """Users choose names; who opens the file does not choose what it does."""
    text = told(here, "usage", "--by", "user", "--from", "now-2d", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["name"] for row in rows] == ["cy", "'=cmd"]
    assert [float(row["gpu_hours"]) for row in rows] == [pytest.approx(50.003, abs=0.01), 1.0]


def test_a_stretch_that_is_none_is_refused(here: Running) -> None:
    """To before from."""
    found = command(here, "usage", "--from", "now", "--to", "now-1h")
    assert isinstance(found.exception, GpuwardenError)
    assert found.exception.exit_code == 2
