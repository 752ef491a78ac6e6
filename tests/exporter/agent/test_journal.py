from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
from typing import TYPE_CHECKING

import pytest

from gpuwarden.agent_api import Action, ActionReport, ActionState, Outcome
from gpuwarden.exporter.agent import journal as module
from gpuwarden.exporter.agent.handles import Identity
from gpuwarden.exporter.agent.journal import Journal, JournalError, Record
from gpuwarden.exporter.agent.ladder import finish
from gpuwarden.exporter.agent.proofs import Holding

if TYPE_CHECKING:
    from pathlib import Path


def record(name: str = "d-1", job_id: str = "proc-1", **about) -> Record:
    """An action that was taken on."""
    report = ActionReport(name, job_id, Action.TERMINATE, ActionState.ACCEPTED)
    fields = {"epoch": 3, "boot_id": "boot", "run_id": None, "grace": 60.0, **about}
    return Record(report, at="step", then="hold", reason="idle", accepted=100.0, **fields)


def begun(name: str = "d-1", job_id: str = "proc-1", **about) -> Record:
    """An action whose ladder began."""
    identity = Identity(7, 70, 1000)
    return record(
        name,
        job_id,
        begun=100.0,
        root=identity,
        members=(identity, Identity(8, 80, 1000)),
        holdings=(Holding("GPU-1", 7, 5), Holding("GPU-1", 8, None)),
        device_used={"GPU-1": 9},
        **about,
    )


def over(item: Record) -> Record:
    """The same action, finished."""
    return finish(item, Outcome.RECLAIMED)


def test_a_journal_remembers(tmp_path: Path) -> None:
    """What was appended is there after a restart, the last state of each action."""
    journal = Journal(tmp_path / "j")
    journal.append("accepted", record(), time=1.0)
    journal.append("begun", begun(), time=2.0)
    journal.alias("d-2", "d-1", time=3.0)
    journal.close()
    journal = Journal(tmp_path / "j")
    assert journal.find("d-1") == journal.find("d-2") == journal.attempt("proc-1") == begun()
    assert journal.unfinished() == (begun(),)
    assert journal.epoch == 3
    journal.close()


def test_an_event_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    """Another reader sees the line at once."""
    journal = Journal(tmp_path / "j")
    journal.append("begun", begun(), time=2.0)
    (line,) = (tmp_path / "j").read_text().splitlines()
    assert json.loads(line)["event"] == "begun"
    journal.close()


def test_a_torn_last_line_never_counted(tmp_path: Path) -> None:
    """What a crash left half-written is dropped, and the next line is whole."""
    journal = Journal(tmp_path / "j")
    journal.append("accepted", record(), time=1.0)
    journal.append("begun", begun(), time=2.0)
    journal.close()
    content = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(content[:-20])
    journal = Journal(tmp_path / "j")
    assert journal.find("d-1") == record()
    journal.append("begun", begun(), time=2.0)
    journal.close()
    assert (tmp_path / "j").read_bytes() == content


def test_damage_stops_the_agent(tmp_path: Path) -> None:
    """A line that is not the last and cannot be read might have been an attempt."""
    journal = Journal(tmp_path / "j")
    journal.append("begun", begun(), time=1.0)
    journal.close()
    with (tmp_path / "j").open("ab") as file:
        file.write(b"\0\0\0\n")
    with pytest.raises(JournalError, match=r"j:2: damaged"):
        Journal(tmp_path / "j")


def test_one_agent_at_a_time(tmp_path: Path) -> None:
    """A second agent with the same journal does not start; after the first it may."""
    first = Journal(tmp_path / "j")
    with pytest.raises(JournalError, match="another agent"):
        Journal(tmp_path / "j")
    first.close()
    Journal(tmp_path / "j").close()


def test_a_refusal_does_not_spend_the_attempt(tmp_path: Path) -> None:
    """The attempt is spent from `begun` on, and free again if nothing was signalled."""
    journal = Journal(tmp_path / "j")
    journal.append("accepted", record(), time=1.0)
    assert journal.attempt("proc-1") is None
    journal.append("begun", begun(), time=1.0)
    assert journal.attempt("proc-1") is not None
    journal.append("finished", finish(begun(), Outcome.REFUSED, "kill_switch"), time=2.0)
    assert journal.attempt("proc-1") is None
    journal.append("terminating", begun("d-2", terminating=True), time=3.0)
    journal.append("finished", over(begun("d-2", terminating=True)), time=3.0)
    found = journal.attempt("proc-1")
    assert found is not None
    assert found.decision_id == "d-2"
    journal.close()


def test_rotation_keeps_what_at_most_once_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts of this boot, open actions, the epoch and the newest reports survive."""
    monkeypatch.setattr(module, "KEEP_FINISHED", 2)
    journal = Journal(tmp_path / "j")
    inspected = dataclasses.replace(
        record("d-i").report, action=Action.INSPECT, state=ActionState.FINISHED
    )
    journal.append("finished", dataclasses.replace(record("d-i"), report=inspected), time=1.0)
    journal.append("finished", over(begun("d-1", "proc-1", terminating=True)), time=1.0)
    journal.append("begun", begun("d-2", "proc-2"), time=1.0)
    journal.alias("d-3", "d-1", time=1.0)
    for number in range(10):
        last = dataclasses.replace(record(f"e-{number}", epoch=9), report=inspected)
        report = dataclasses.replace(inspected, decision_id=f"e-{number}")
        journal.append("finished", dataclasses.replace(last, report=report), time=1.0)
    journal.rotate(time=2.0)
    journal.append("begun", begun("d-4", "proc-4"), time=3.0)
    journal.close()
    journal = Journal(tmp_path / "j")
    assert list(journal.records) == ["d-1", "d-2", "e-8", "e-9", "d-4"]
    assert journal.attempt("proc-1") is not None
    assert journal.find("d-3") is not None
    assert journal.epoch == 9
    journal.close()
    assert (tmp_path / "j.1").exists()


def test_a_large_journal_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays bounded, and so do the old ones that are kept for the audit."""
    monkeypatch.setattr(module, "ROTATE_BYTES", 10_000)
    journal = Journal(tmp_path / "j")
    for number in range(200):
        journal.append("finished", over(begun("d-1", terminating=True)), time=float(number))
    journal.close()
    assert (tmp_path / "j").stat().st_size < 12_000
    old = sorted(path.name for path in tmp_path.iterdir())
    assert old == ["j", "j.1", "j.2", "j.3", "j.4", "j.lock"]


def test_the_audit_is_not_pushed_out_by_what_must_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old journals last for many events, however much of the new one must be kept."""
    monkeypatch.setattr(module, "ROTATE_BYTES", 1000)
    journal = Journal(tmp_path / "j")
    for number in range(60):
        name = f"d-{number}"
        item = over(begun(name, f"proc-{number}", terminating=True))
        journal.append("finished", item, time=float(number))
    journal.close()
    events = [
        json.loads(line)
        for path in tmp_path.iterdir()
        if path.name != "j.lock"
        for line in path.read_text().splitlines()
    ]
    told = {event["time"] for event in events if event["event"] == "finished"}
    assert told >= set(range(30, 60))


def test_an_attempt_of_an_earlier_boot_is_forgotten_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rotation leaves out is not known any more, and asking for it is no error."""
    monkeypatch.setattr(module, "KEEP_FINISHED", 1)
    journal = Journal(tmp_path / "j")
    journal.append("finished", over(begun("d-1", "proc-old", terminating=True)), time=1.0)
    later = over(begun("d-2", "proc-new", terminating=True, boot_id="later"))
    journal.append("finished", later, time=2.0)
    journal.rotate(time=3.0)
    assert journal.attempt("proc-old") is None
    assert journal.attempt("proc-new") == later
    journal.close()


def test_a_closed_journal_is_not_written(tmp_path: Path) -> None:
    """A thread that is late must not write to whatever has the descriptor's number by now."""
    journal = Journal(tmp_path / "j")
    journal.close()
    others = [tmp_path / f"other-{number}" for number in range(4)]
    with contextlib.ExitStack() as stack:
        for path in others:
            stack.enter_context(path.open("wb"))
        with pytest.raises(JournalError):
            journal.append("accepted", record(), time=1.0)
    assert [path.read_bytes() for path in others] == [b""] * 4


def test_a_full_disk_is_an_error_and_leaves_no_half_line(tmp_path: Path) -> None:
    """What cannot be written does not count, and what is written later is whole."""
    journal = Journal(tmp_path / "j")
    journal.append("accepted", record(), time=1.0)
    size = (tmp_path / "j").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(JournalError, match="cannot be written"):
            journal.append("begun", begun(), time=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "j").stat().st_size == size
    assert journal.attempt("proc-1") is None
    journal.close()
    journal = Journal(tmp_path / "j")
    assert journal.find("d-1") == record()
    journal.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="the owner of the folder does not matter to root")
def test_a_folder_that_is_missing_is_made_private(tmp_path: Path) -> None:
    """The journal's folder is nobody else's business."""
    Journal(tmp_path / "new" / "j").close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "j").stat().st_mode & 0o777 == 0o600
