"""With a rule engine a lab box has jobs asked by it; without its answer it asks by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.scheduling.local.engines import PlayedEngine, served
from tests.scheduling.local.labs import trains
from tests.servers import free_port

from gpuwarden.scheduling.local import notices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.scheduling.local.boxes import LabBox

STEPS = ["notified", "acknowledged", "saved", "left", "freed", "started"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PlayedEngine]:
    """An engine whose agent writes to the box's job files."""
    with served(PlayedEngine(tmp_path / "node")) as found:
        yield found


@pytest.fixture
def lab(open_lab: Callable[..., LabBox], engine: PlayedEngine) -> LabBox:
    """A box of two cards that an engine watches."""
    return open_lab(engine=engine.url)


def codes(lab: LabBox) -> set[str]:
    """Of the problems."""
    return {each.code for each in lab.driver.problems()}


def test_the_engine_has_a_job_asked_and_each_step_is_a_receipt(
    lab: LabBox, engine: PlayedEngine
) -> None:
    """Once, by its own request; what the trainer answers to that is read on the box."""
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.state_of(high) == "running")
    assert list(lab.notice(low).steps) == STEPS
    assert (lab.notice(low).outcome, lab.notice(low).lost_seconds) == ("done", 0.0)
    (order,) = engine.asked
    assert (order["run_id"], order["cause"], order["successor"]) == ("low", "priority", high)
    assert (order["at"], order["then"], order["key"]) == ("epoch", "requeue", lab.notice(low).id)
    assert codes(lab).isdisjoint({"engine_unreachable", "not_asked"})


def test_whom_the_engine_protects_is_not_asked_and_another_is(
    lab: LabBox, engine: PlayedEngine
) -> None:
    """A whitelist entry, a keep or a pause of the engine's is also one against the box."""
    first, second = lab.submit("first"), lab.submit("second")
    trains(lab, "first", first)
    trains(lab, "second", second)
    engine.refused = {"second": (409, "protected")}
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.state_of(high) == "running")
    assert lab.state_of(second) == "running"
    assert list(lab.notice(first).steps) == STEPS
    (told,) = [each for each in lab.driver.preemptions() if each.victim == second]
    assert (told.steps, told.outcome) == ({}, "withdrawn")
    assert told.words.startswith("The engine did not have it asked: protected")
    assert "not_asked" in codes(lab)


def test_an_engine_that_does_not_answer_costs_no_preemption(
    open_lab: Callable[..., LabBox],
) -> None:
    """The job files are used instead, and that is told."""
    lab = open_lab(engine=f"http://127.0.0.1:{free_port()}")
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.state_of(low) == "leaving")
    assert "engine_unreachable" in codes(lab)
    lab.until(lambda: lab.state_of(high) == "running")
    assert list(lab.notice(low).steps) == STEPS


@pytest.mark.parametrize("word", ["unknown_job", "closed"])
def test_an_engine_that_cannot_ask_is_done_without(
    lab: LabBox, engine: PlayedEngine, word: str
) -> None:
    """One that has no exporter of this box, or takes no leaves, protects nobody."""
    engine.refused = {"low": (404, word)}
    low = lab.submit("low", gpus=2)
    trains(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: lab.state_of(high) == "running")
    assert list(lab.notice(low).steps) == STEPS
    assert len(engine.asked) == 1


def test_a_leave_that_the_engine_calls_back_ends_nobody(lab: LabBox, engine: PlayedEngine) -> None:
    """Enforcement was paused: beyond the deadline that was told the job is there."""
    low = lab.submit("low", "stuck", gpus=2)
    trains(lab, "low", low)
    lab.submit("high", priority="high")
    lab.until(lambda: "notified" in lab.steps(low))
    engine.called_back = True
    lab.tick(6)
    assert lab.notice(low).outcome == "withdrawn"
    assert "enforcement is paused" in lab.notice(low).words
    lab.tick(notices.PROTECTED_SECONDS - 60)
    assert lab.state_of(low) == "running"
    assert len(engine.asked) == 1


def test_a_notice_that_became_useless_is_taken_back_at_the_engine(
    lab: LabBox, engine: PlayedEngine
) -> None:
    """The request that its agent wrote goes with it."""
    low = lab.submit("low", "stuck", gpus=2)
    trains(lab, "low", low)
    high = lab.submit("high", priority="high")
    lab.until(lambda: "notified" in lab.steps(low))
    lab.driver.cancel(high, by="ana", now=lab.clock.wall())
    lab.until(lambda: lab.notice(low).outcome == "withdrawn")
    assert engine.withdrawn == [leave["id"] for leave in engine.leaves.values()]
    assert lab.request("low") is None


def test_a_leave_that_no_agent_delivers_is_delivered_by_file(
    lab: LabBox, engine: PlayedEngine
) -> None:
    """The deadline counts from then on: the job has the time that it was to have."""
    engine.delivers = False
    low = lab.submit("low", "stuck", gpus=2)
    trains(lab, "low", low)
    lab.submit("high", priority="high")
    lab.until(lambda: engine.leaves)
    before = lab.notice(low)
    assert before.steps == {}
    for leave in engine.leaves.values():
        leave["state"] = "undeliverable"
    lab.tick(6)
    lab.until(lambda: "notified" in lab.steps(low))
    request = lab.request("low")
    assert request is not None
    assert request.decision_id == before.id
    assert before.deadline is not None
    assert request.leave_by == lab.notice(low).deadline >= before.deadline + 6


def test_killed_before_the_leave_was_written_down_the_engine_is_asked_for_the_same_one(
    lab: LabBox, engine: PlayedEngine
) -> None:
    """One key, one leave: the job is asked once, and its receipts are whole."""
    low = lab.submit("low", "stuck", gpus=2)
    trains(lab, "low", low)
    lab.submit("high", priority="high")
    lab.until(lambda: "notified" in lab.steps(low))
    note = lab.notice(low).id
    lab.driver._queue.change_note(note, leave="", notified=None)  # as a SIGKILL leaves it
    lab.lose()
    lab.open()
    lab.until(lambda: "notified" in lab.steps(low))
    assert [order["key"] for order in engine.asked] == [note, note]
    assert len(engine.leaves) == 1
