from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.servers import until

from gpuwarden.agent_api import Action, ActionReport, ActionState, Outcome, ProcessRef
from gpuwarden.exporter.agent.journal import JournalError, Record
from gpuwarden.exporter.processes import boot_time, read_process, start_time
from gpuwarden.exporter.simulated import GIB, Fault
from gpuwarden.job_files import LeaveRequest, request_path

if TYPE_CHECKING:
    from tests.exporter.agent.nodes import Cards, Jobs, Node


def ended_by(report) -> dict[int, str | None]:
    """How each process ended, by pid."""
    return {item.pid: item.ended_by for item in report.processes}


def test_a_job_that_leaves_on_sigterm_is_not_killed(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A job that goes when asked is reclaimed at once, long before its grace is over."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    report = node.ask(job.job_id, grace=600.0)
    assert report.outcome is Outcome.RECLAIMED
    assert ended_by(report) == {job.pid: "SIGTERM"}
    assert "sigkill" not in report.steps
    assert list(report.steps) == [
        "verified", "journalled", "stopped", "sigterm", "exited", "proven"
    ]  # fmt: skip


def test_memory_is_accounted_per_process_and_card(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Freed memory is what NVML attributed to the processes that ended, on all their cards."""
    job = jobs.start("polite")
    cards.hold(job.pid, 3 * GIB)
    cards.hold(job.pid, 2 * GIB, card=1)
    report = node.ask(job.job_id)
    assert report.proof is not None
    assert report.proof.gone
    assert report.proof.memory_freed == 5 * GIB
    assert report.processes[0].gpu_memory == 5 * GIB
    before, after = report.proof.device_used_before, report.proof.device_used_after
    assert sorted(before[uuid] - after[uuid] for uuid in before) == [2 * GIB, 3 * GIB]


def test_a_job_gets_its_grace_to_save(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A helper that a job starts in order to save is left alone during the grace."""
    job = jobs.start("saver")
    cards.hold(job.pid)
    report = node.ask(job.job_id, grace=600.0)
    assert report.outcome is Outcome.RECLAIMED
    assert ended_by(report) == {job.pid: "SIGTERM"}
    assert job.report.with_suffix(".saved").read_text() == "state"


def test_a_daemonised_grandchild_is_known_by_its_start(
    node: Node, jobs: Jobs, cards: Cards
) -> None:
    """What left the tree is the one that the engine saw also where that knows only a time."""
    job = jobs.start("daemoniser")
    cards.hold(job.pids[1])
    daemon = read_process(job.pids[1])
    assert daemon is not None
    seen = (ProcessRef(daemon.pid, start_time=start_time(daemon, booted=boot_time()) + 0.3),)
    report = node.ask(job.job_id, grace=1.0, seen=seen)
    assert report.outcome is Outcome.RECLAIMED
    assert ended_by(report) == dict.fromkeys(job.pids, "SIGKILL")


def test_inspect_touches_nothing(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A dry run names every process that would end, and signals none."""
    job = jobs.start("family")
    cards.hold(job.pid, 7 * GIB)
    report = node.ask(job.job_id, Action.INSPECT)
    assert report.outcome is Outcome.DONE
    assert ended_by(report) == dict.fromkeys(job.pids)
    assert report.processes[0].gpu_memory == 7 * GIB
    assert set(job.states()) == set(job.pids)
    assert "T" not in job.states().values()


def test_memory_that_stays_is_incomplete(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A driver that still lists the dead process is no proof, whatever /proc says."""
    node.close()
    node.proof_timeout = 0.5
    node.open()
    job = jobs.start("polite")
    cards.hold(job.pid, 4 * GIB, linger=300)
    report = node.ask(job.job_id)
    assert report.outcome is Outcome.INCOMPLETE
    assert report.reason == "still_listed"
    assert report.proof is not None
    assert not report.proof.gone
    assert report.proof.memory_freed == 0
    assert not job.states()


def test_the_proof_waits_for_the_driver(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Memory that the driver frees a moment later is freed."""
    job = jobs.start("polite")
    cards.hold(job.pid, linger=0.5)
    report = node.ask(job.job_id)
    assert report.outcome is Outcome.RECLAIMED
    assert report.proof is not None
    assert report.proof.seconds > 0


def test_a_successor_does_not_spoil_the_proof(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A job that takes the memory at once hides the drop, not the proof."""
    job, successor = jobs.start("polite"), jobs.start("polite")
    cards.hold(job.pid, 20 * GIB)
    cards.hold(successor.pid, 20 * GIB, after=job.pid)
    report = node.ask(job.job_id)
    assert report.outcome is Outcome.RECLAIMED
    assert report.proof is not None
    assert report.proof.memory_freed == 20 * GIB
    assert report.proof.device_used_after == report.proof.device_used_before
    assert set(successor.states()) == {successor.pid}


def test_a_card_that_does_not_tell_is_no_proof(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A card that is lost after the act cannot show that it was left."""
    node.close()
    node.proof_timeout = 0.5
    node.open()
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = node.engine.request(job.job_id, grace=1.0)
    node.actions.submit(request)
    node.reached(request.decision_id, "sigterm")
    cards.write(faults=[Fault("*", 15, card=0)])
    report = node.outcome(request.decision_id)
    assert report.outcome is Outcome.INCOMPLETE
    assert report.reason == "nvml"
    assert not job.states()


def test_the_leave_request_comes_first_and_goes_last(node: Node, jobs: Jobs, cards: Cards) -> None:
    """During the grace the trainer finds a request to hold; a resumed run must not find it."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = node.engine.request(
        job.job_id, run_id="run-1", grace=1.0, reason="idle", then="requeue"
    )
    node.actions.submit(request)
    report = node.reached(request.decision_id, "sigterm")
    assert report.steps["leave_requested"] <= report.steps["sigterm"]
    path = request_path(node.jobs, "run-1")
    asked = LeaveRequest.decode(path.read_bytes())
    assert (asked.decision_id, asked.then, asked.reason) == (request.decision_id, "hold", "idle")
    assert node.outcome(request.decision_id).outcome is Outcome.RECLAIMED
    assert not path.exists()


def test_who_follows_the_request_at_once_is_reclaimed(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A job that has left before its signal, as it was asked to, has given its card back."""
    job = jobs.start("polite")
    cards.hold(job.pid, 6 * GIB)
    saved: list[Record] = []

    def save(name: str, record: Record) -> None:
        saved.append(record)
        if name == "asking":
            os.kill(job.pid, signal.SIGKILL)
            until(lambda: not job.states())

    request = node.engine.request(job.job_id, run_id="run-1")
    report = ActionReport("d", job.job_id, Action.TERMINATE, ActionState.ACTING)
    with node.ladder.resolver.resolve(request) as target:
        record = Record(
            report, 1, request.boot_id, "run-1", 1.0, "step", "hold", "", 0.0, begun=0.0,
            members=target.group.identities, holdings=target.holdings,
        )  # fmt: skip
        node.ladder.climb(record, target, save)
    last = saved[-1].report
    assert (last.outcome, ended_by(last)) == (Outcome.RECLAIMED, {job.pid: "gone"})
    assert last.proof is not None
    assert last.proof.memory_freed == 6 * GIB
    assert not request_path(node.jobs, "run-1").exists()


@pytest.mark.parametrize("event", ["asking", "stopping", "terminating", "terminated", "killing"])
def test_a_journal_that_fails_on_the_way_stops_the_ladder(
    event: str, node: Node, jobs: Jobs, cards: Cards
) -> None:
    """A step that cannot be journalled is not taken, and nobody stays stopped."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    saved: list[Record] = []

    def save(name: str, record: Record) -> None:
        if name == event:
            raise JournalError("the disk is full")
        saved.append(record)

    request = node.engine.request(job.job_id, grace=1.0, run_id="run-1")
    report = ActionReport("d", job.job_id, Action.TERMINATE, ActionState.ACTING)
    with node.ladder.resolver.resolve(request) as target:
        record = Record(
            report, 1, request.boot_id, "run-1", 1.0, "step", "hold", "", 0.0, begun=0.0,
            members=target.group.identities, holdings=target.holdings,
        )  # fmt: skip
        node.ladder.climb(record, target, save)
    last = saved[-1].report
    signalled = event in ("terminated", "killing")
    expected = Outcome.INCOMPLETE if signalled else Outcome.FAILED
    assert (last.outcome, last.reason) == (expected, "journal")
    assert until(lambda: job.states() == {job.pid: "S"})
