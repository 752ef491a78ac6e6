"""The whole daemon of a lab box, killed with SIGKILL in every step of a preemption."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.scheduling.local.labs import quick
from tests.scheduling.local.test_preempted_trainings import STEPS, TrainingBox
from tests.scheduling.local.whole_daemons import WholeDaemon, entry_of, is_in, receipt_of, timeline

from gpuwarden.scheduling.queue_cli import queue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuwarden.schedule_api import ScheduleDocument

pytestmark = pytest.mark.skipif(
    pwd.getpwuid(os.getuid()).pw_name != "root", reason="the policy of these tests names root"
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[WholeDaemon]:
    """A daemon with one card."""
    made = WholeDaemon(tmp_path)
    made.start()
    yield made
    made.stop()


def preempted(daemon: WholeDaemon, low: str, *, kill_at: tuple[str, ...], **high: Any) -> str:
    """Have a job leave for another; the daemon is killed as soon as each of some steps is seen."""
    successor = daemon.submit("high", "high", **high)
    for step in kill_at:
        if step == "submitted":
            daemon.kill()
        else:
            daemon.until(lambda found, step=step: step in steps_of(found, low))
            daemon.kill()
        daemon.start()
    return successor


def steps_of(found: ScheduleDocument, victim: str) -> dict[str, float]:
    """Of the newest preemption of a job; none before there is one."""
    receipt = receipt_of(found, victim)
    return {} if receipt is None else receipt.steps


def checked(daemon: WholeDaemon, low: str, high: str) -> str:
    """The receipts once the successor runs: each step once, in order; returns them as a line."""
    found = daemon.until(lambda found: is_in(found, high, "running"))
    receipt = receipt_of(found, low)
    assert receipt is not None
    assert list(receipt.steps) == STEPS
    assert sorted(receipt.steps.values()) == list(receipt.steps.values())
    assert receipt.steps["freed"] - receipt.steps["left"] >= 0.5  # the driver's memory lingers
    assert len([each for each in found.preemptions if each.victim == low]) == 1
    assert (receipt.outcome, receipt.lost_seconds) == ("done", 0.0)
    return timeline(receipt)


def test_a_daemon_that_is_killed_on_the_way_goes_on(daemon: WholeDaemon) -> None:
    """Right behind the notice, and between leaving and the start: nothing twice, nothing lost."""
    low = daemon.submit("low", "low")
    daemon.until(lambda _found: daemon.steps_done("low") > 2)
    high = preempted(daemon, low, kill_at=("notified", "left"))
    checked(daemon, low, high)
    (daemon.work / "high.finish").touch()
    (daemon.work / "low.finish").touch()
    found = daemon.until(lambda found: is_in(found, low, "done"))
    assert entry_of(found, low).requeues == 1
    answer = CliRunner().invoke(queue, ["--socket", str(daemon.socket), "logs", low, "-n", "2"])
    assert answer.exit_code == 0, answer.output
    assert [line.split()[0] for line in answer.output.splitlines()] == ["cards", "from"]
    assert (daemon.work / f"low-{low}.log").read_text().count("from") == 2


@pytest.mark.sweep
@pytest.mark.training
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", ["submitted", *STEPS])
def test_real_trainings_and_a_daemon_that_is_killed_in_each_step(
    daemon: WholeDaemon, tmp_path: Path, step: str
) -> None:
    """Whatever the moment, the low one ends bit-identical to one that nobody disturbed."""
    (tmp_path / "box").mkdir()
    box = TrainingBox(tmp_path / "box", quick(), cards=0)
    box.prepare()
    program = str(box.real_program())

    def words(name: str, epochs: int) -> dict[str, Any]:
        return {"words": box.words(name, epochs), "program": program}

    alone = daemon.submit("alone", "high", **words("alone", 8))
    daemon.until(lambda found: is_in(found, alone, "done"), seconds=180)
    low = daemon.submit("low", "low", **words("low", 8))
    daemon.until(lambda _found: daemon.steps_done("low") > 2, seconds=90)
    high = preempted(daemon, low, kill_at=(step,), **words("high", 1))
    found = daemon.until(lambda found: is_in(found, high, "done"), seconds=180)
    receipt = receipt_of(found, low)
    assert receipt is not None
    assert list(receipt.steps) == STEPS
    print(step, timeline(receipt))  # noqa: T201 (the figures are the result, with -s)
    found = daemon.until(lambda found: is_in(found, low, "done"), seconds=180)
    assert entry_of(found, low).requeues == 1
    assert box.learnt("low") == box.learnt("alone")
    box.driver.stop()
