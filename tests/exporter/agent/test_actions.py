from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.servers import until

from gpuwarden import job_files
from gpuwarden.agent_api import Action, ActionReport, ActionState, Outcome, question_id
from gpuwarden.exporter.agent.authorisations import Rejected
from gpuwarden.exporter.agent.journal import Journal, Record
from gpuwarden.job_files import LeaveRequest, request_path

if TYPE_CHECKING:
    from pathlib import Path

    from tests.exporter.agent.nodes import Cards, Jobs, Node


def events(node: Node) -> list[tuple[str, str]]:
    """(event, decision) of every line of the journal."""
    found = []
    for line in (node.folder / "journal").read_text().splitlines():
        event = json.loads(line)
        record = event.get("record")
        name = event["decision_id"] if record is None else record["report"]["decision_id"]
        found.append((event["event"], name))
    return found


def test_every_step_is_on_disk_in_its_order(node: Node, jobs: Jobs, cards: Cards) -> None:
    """The journal shows each step of the ladder before the next one was taken."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    node.ask(job.job_id, grace=1.0, run_id="run-1")
    assert [event for event, _ in events(node)] == [
        "accepted", "begun", "asking", "stopping", "terminating", "terminated", "stopping",
        "killing", "finished",
    ]  # fmt: skip


def test_an_attempt_is_ended_once(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A second decision on the same attempt is answered by the first one's report."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    first = node.ask(job.job_id)
    second = node.engine.request(job.job_id)
    answer = node.actions.submit(second)
    assert answer == first
    assert node.actions.find(second.decision_id) == first
    assert [event for event, _ in events(node)].count("begun") == 1


def test_a_decision_is_carried_out_once(node: Node, jobs: Jobs, cards: Cards) -> None:
    """The same request again, as after a lost answer, gives the same report."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    request = node.engine.request(job.job_id)
    node.actions.submit(request)
    report = node.outcome(request.decision_id)
    assert node.actions.submit(request) == report
    other = dataclasses.replace(request, action=Action.INSPECT)
    with pytest.raises(Rejected) as rejected:
        node.actions.submit(other)
    assert rejected.value.error == "decision_reused"


def test_many_at_once_are_one(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Requests that arrive at the same moment lead to one ladder."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    requests = [node.engine.request(job.job_id, grace=1.0) for _ in range(8)]
    together = threading.Barrier(len(requests))
    answers = []

    def submit(request) -> None:
        together.wait()
        answers.append(node.actions.submit(request).decision_id)

    threads = [threading.Thread(target=submit, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    report = node.outcome(answers[0])
    assert report.outcome is Outcome.RECLAIMED
    assert [event for event, _ in events(node)].count("begun") == 1
    assert all(node.actions.find(request.decision_id) == report for request in requests)


def test_the_attempt_stays_spent_over_a_restart(node: Node, jobs: Jobs, cards: Cards) -> None:
    """An agent that was restarted answers for what it did before."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    first = node.ask(job.job_id)
    node.close()
    node.open()
    assert node.actions.submit(node.engine.request(job.job_id)) == first


def test_an_older_engine_is_over(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Once an engine of a later epoch has spoken, an earlier one commands nothing, ever."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    node.ask(job.job_id, Action.INSPECT, epoch=7)
    node.close()
    node.open()
    with pytest.raises(Rejected) as rejected:
        node.actions.submit(node.engine.request(job.job_id, epoch=6))
    assert rejected.value.error == "stale_epoch"
    assert node.ask(job.job_id, epoch=7).outcome is Outcome.RECLAIMED


def test_the_limit_slides_and_survives_a_restart(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Within any hour no more than the limit are ended, whatever was restarted meanwhile."""
    node.close()
    node.per_hour = 1
    node.open()
    started = [jobs.start("polite") for _ in range(3)]
    for job in started:
        cards.hold(job.pid)
    assert node.ask(started[0].job_id).outcome is Outcome.RECLAIMED
    assert node.ask(started[1].job_id).reason == "rate_limit"
    node.close()
    old = node.folder / "journal"
    text = old.read_text()
    node.open()
    assert node.ask(started[1].job_id).reason == "rate_limit"
    node.close()
    # An hour later: the same journal with the attempt further back.
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        record = line["record"]
        for clock in ("begun", "begun_at"):
            record[clock] = record[clock] and record[clock] - 3601
    old.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    node.open()
    assert node.ask(started[1].job_id).outcome is Outcome.RECLAIMED


def test_a_clock_set_forward_lifts_no_limit(node: Node, jobs: Jobs, cards: Cards) -> None:
    """An hour is an hour of the machine's, whatever is done to its wall clock meanwhile."""
    node.close()
    node.per_hour = 1
    node.open()
    first, second = jobs.start("polite"), jobs.start("polite")
    for job in (first, second):
        cards.hold(job.pid)
    assert node.ask(first.job_id).outcome is Outcome.RECLAIMED
    node.close()
    path = node.folder / "journal"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        record = line["record"]
        # As if the clock had been two hours behind then.
        record["begun"] = record["begun"] and record["begun"] - 7200
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    node.open()
    assert node.ask(second.job_id).reason == "rate_limit"
    assert second.states()


def test_a_limit_of_zero_is_zero(node: Node, jobs: Jobs, cards: Cards) -> None:
    """0 ends nothing; it never means without limit."""
    node.close()
    node.per_hour = 0
    node.open()
    job = jobs.start("polite")
    cards.hold(job.pid)
    assert node.ask(job.job_id).reason == "rate_limit"
    assert job.states()


@pytest.mark.parametrize("grace", [0.0, 0.5, 3600.5])
def test_a_grace_has_bounds(grace: float, node: Node, jobs: Jobs, cards: Cards) -> None:
    """No grace at all, and one without end, are refused."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    assert node.ask(job.job_id, grace=grace).reason == "grace"


def test_without_a_journal_nothing_is_done(node: Node, jobs: Jobs, cards: Cards) -> None:
    """An audit that cannot be written forbids the action, and the answer says so."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    descriptor = node.journal._descriptor  # the disk fails under the agent
    node.journal._descriptor = os.open("/dev/full", os.O_WRONLY)
    report = node.actions.submit(node.engine.request(job.job_id))
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "journal")
    assert job.states()
    os.close(node.journal._descriptor)
    node.journal._descriptor = descriptor


@pytest.mark.parametrize("damage", ["removed", "replaced", "cut", "another agent's"])
def test_without_its_own_journal_an_agent_ends_nobody(
    damage: str, node: Node, jobs: Jobs, cards: Cards
) -> None:
    """An agent that cannot show what it did before refuses, until it is started anew."""
    done, job = jobs.start("polite"), jobs.start("polite")
    for item in (done, job):
        cards.hold(item.pid)
    first = node.ask(done.job_id)
    path = node.folder / "journal"
    content = path.read_bytes()
    match damage:
        case "removed":
            path.unlink()
        case "replaced":
            path.rename(node.folder / "away")
            path.write_bytes(content)
        case "cut":
            os.truncate(path, 0)
        case _:
            # Somebody removed the lock too, and started a second agent.
            (node.folder / "journal.lock").unlink()
            other = Journal(path)
            other.alias("d-9", first.decision_id, time=0.0)
            other.close()
    report = node.ask_once(job.job_id)
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "journal")
    assert "start the agent anew" in report.message
    assert job.states()
    # What it knows it still tells, and what is put back does not count by itself.
    assert node.actions.find(first.decision_id) == first
    path.write_bytes(content)
    assert node.ask_once(job.job_id).reason == "journal"
    node.close()
    node.open()
    assert node.actions.submit(node.engine.request(done.job_id)) == first
    assert node.ask(job.job_id).outcome is Outcome.RECLAIMED


def test_a_journal_that_is_lost_in_a_grace_ends_the_ladder(
    node: Node, jobs: Jobs, cards: Cards
) -> None:
    """A journal that goes away in the grace spares what SIGTERM did not end, and that is told."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = node.engine.request(job.job_id, grace=1.0)
    node.actions.submit(request)
    node.reached(request.decision_id, "sigterm")
    (node.folder / "journal").rename(node.folder / "away")
    report = node.outcome(request.decision_id)
    assert (report.outcome, report.reason) == (Outcome.INCOMPLETE, "journal")
    assert until(lambda: job.states() == {job.pid: "S"})


def test_a_stopping_agent_leaves_nobody_stopped(node: Node, jobs: Jobs, cards: Cards) -> None:
    """When the agent ends during a grace, the job runs, and the next agent finishes."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = node.engine.request(job.job_id, grace=3.0)
    node.actions.submit(request)
    node.reached(request.decision_id, "sigterm")
    until(lambda: job.states() == {job.pid: "S"})
    node.close()
    assert job.states() == {job.pid: "S"}
    node.open()
    report = node.outcome(request.decision_id)
    assert report.outcome is Outcome.RECLAIMED
    assert [item.ended_by for item in report.processes] == ["SIGKILL"]


def stored(node: Node, until_event: str) -> None:
    """Cut the journal after an event, as a crash right behind it would have left it."""
    path = node.folder / "journal"
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        kept.append(line)
        if json.loads(line)["event"] == until_event:
            break
    path.write_text("".join(kept))


@pytest.mark.parametrize(
    ("event", "lives"),
    [
        ("accepted", True),
        ("begun", True),
        ("stopping", True),
        ("terminating", False),
        ("terminated", False),
        ("killing", False),
    ],
)
def test_a_crash_is_made_good(
    event: str, lives: bool, *, node: Node, jobs: Jobs, cards: Cards
) -> None:
    """Whatever was last in the journal, nobody stays stopped and what was begun is finished."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = node.engine.request(job.job_id, grace=3600.0)
    node.actions.submit(request)
    node.reached(request.decision_id, "sigterm")
    node.close()
    if event in ("stopping", "terminating", "killing"):
        os.kill(job.pid, signal.SIGSTOP)
        until(lambda: job.states() == {job.pid: "T"})
    if event in ("terminated", "killing"):
        path = node.folder / "journal"
        text = path.read_text()
        last = json.loads(text.splitlines()[-1])
        last["record"]["sigterm_at"] -= 3600
        path.write_text(text + json.dumps(last) + "\n")
    else:
        stored(node, event)
    if event == "terminating":
        # Its whole grace would be due again: shorten it.
        path = node.folder / "journal"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[-1]["record"]["grace"] = 1.0
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    node.open()
    report = node.outcome(request.decision_id)
    expected = (Outcome.FAILED, "restarted") if lives else (Outcome.RECLAIMED, "")
    assert (report.outcome, report.reason) == expected
    assert bool(job.states()) is lives
    assert "T" not in job.states().values()
    if lives:
        assert node.ask(job.job_id, grace=1.0).outcome is Outcome.RECLAIMED


def test_the_kill_switch_holds_over_a_crash(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Whoever throws the switch and restarts the agent gets no signal sent by the restart."""
    job = jobs.start("saver")
    cards.hold(job.pid)
    request = node.engine.request(job.job_id, grace=1.0)
    # As if the crash had come right before the signals: the journal is ahead of them.
    with node.ladder.resolver.resolve(request) as target:
        report = ActionReport(request.decision_id, job.job_id, Action.TERMINATE, ActionState.ACTING)
        members = target.group.identities
        record = Record(
            report, 1, request.boot_id, None, 1.0, "step", "hold", "", 0.0, begun=0.0,
            members=members, stopped=members, terminating=True, holdings=target.holdings,
        )  # fmt: skip
    node.journal.append("terminating", record, time=0.0)
    node.close()
    node.kill_switch.touch()
    node.open()
    outcome = node.outcome(request.decision_id)
    assert (outcome.outcome, outcome.reason) == (Outcome.INCOMPLETE, "kill_switch")
    assert job.states() == {job.pid: "S"}
    assert not job.report.with_suffix(".saved").exists()


def test_a_reboot_ends_what_was_begun(node: Node, jobs: Jobs, cards: Cards) -> None:
    """After a reboot the processes are gone, and nobody who has their pids now is touched."""
    job = jobs.start("stubborn")
    cards.hold(job.pid, 5 << 30)
    request = node.engine.request(job.job_id, grace=3600.0)
    node.actions.submit(request)
    node.reached(request.decision_id, "sigterm")
    node.close()
    path = node.folder / "journal"
    path.write_text(path.read_text().replace(request.boot_id, "another-boot"))
    node.open()
    report = node.outcome(request.decision_id)
    assert (report.outcome, report.reason) == (Outcome.RECLAIMED, "rebooted")
    assert report.proof is not None
    assert report.proof.memory_freed == 5 << 30
    assert job.states()


def test_a_journal_of_another_agent_is_not_shared(node: Node) -> None:
    """Two agents on one journal could both end an attempt: the second does not start."""
    with pytest.raises(Exception, match="another agent is using"):
        Journal(node.folder / "journal")


# ---------------------------------------------------------------------------------------------
# Leave requests


def asked(node: Node, run_id: str) -> LeaveRequest | None:
    """The leave request to a run, if there is one."""
    path: Path = request_path(node.jobs, run_id)
    return LeaveRequest.decode(path.read_bytes()) if path.exists() else None


def test_a_run_is_asked_to_leave(node: Node, jobs: Jobs) -> None:
    """`request_leave` writes what the trainer reads, and signals nobody."""
    job = jobs.start("polite")
    report = node.ask(
        job.job_id, Action.REQUEST_LEAVE, run_id="run-1", then="requeue", at="epoch", reason="r"
    )
    assert report.outcome is Outcome.DONE
    request = asked(node, "run-1")
    assert request is not None
    assert (request.then, request.at, request.reason) == ("requeue", "epoch", "r")
    assert job.states()


def test_a_run_is_asked_to_save_and_go_on(node: Node, jobs: Jobs) -> None:
    """`request_checkpoint` asks for nothing but a checkpoint."""
    node.ask(jobs.start("polite").job_id, Action.REQUEST_CHECKPOINT, run_id="run-1")
    request = asked(node, "run-1")
    assert request is not None
    assert request.then == "continue"


def test_a_request_can_be_withdrawn(node: Node, jobs: Jobs) -> None:
    """`cancel` removes the request; where there is none it says so. It need name no decision."""
    job = jobs.start("polite")
    node.ask(job.job_id, Action.REQUEST_LEAVE, run_id="run-1")
    assert node.ask(job.job_id, Action.CANCEL, run_id="run-1").outcome is Outcome.DONE
    assert asked(node, "run-1") is None
    report = node.ask(job.job_id, Action.CANCEL, run_id="run-1")
    assert (report.outcome, report.reason) == (Outcome.UNDELIVERABLE, "no_request")


def test_a_decision_takes_back_its_own_request_only(node: Node, jobs: Jobs) -> None:
    """A late `cancel` of an older decision leaves the newer one's request where it is."""
    job = jobs.start("polite")

    def ask(decision: str, action: Action) -> ActionReport:
        asked_as = question_id(decision, action)
        return node.ask(job.job_id, action, run_id="run-1", decision_id=asked_as)

    assert ask("leave-old", Action.REQUEST_LEAVE).outcome is Outcome.DONE
    assert ask("7-4-new", Action.REQUEST_LEAVE).outcome is Outcome.DONE
    late = ask("leave-old", Action.CANCEL)
    assert (late.outcome, late.reason) == (Outcome.UNDELIVERABLE, "no_request")
    standing = asked(node, "run-1")
    assert standing is not None
    assert standing.decision_id == question_id("7-4-new", Action.REQUEST_LEAVE)
    assert ask("7-4-new", Action.CANCEL).outcome is Outcome.DONE
    assert asked(node, "run-1") is None


def test_the_ladders_own_request_is_not_taken_back_by_another(node: Node, jobs: Jobs) -> None:
    """`terminate` writes its request under the decision's plain id: that is its own, too."""
    job = jobs.start("polite")
    request = LeaveRequest(decision_id="7-5-end", leave_by=time.time() + 60.0)
    job_files.write(request_path(node.jobs, "run-1"), request.encode())
    other = question_id("leave-old", Action.CANCEL)
    report = node.ask(job.job_id, Action.CANCEL, run_id="run-1", decision_id=other)
    assert report.reason == "no_request"
    own = question_id("7-5-end", Action.CANCEL)
    report = node.ask(job.job_id, Action.CANCEL, run_id="run-1", decision_id=own)
    assert report.outcome is Outcome.DONE


@pytest.mark.parametrize("action", [Action.REQUEST_LEAVE, Action.REQUEST_CHECKPOINT, Action.CANCEL])
def test_without_a_run_nobody_can_be_asked(action: Action, node: Node, jobs: Jobs) -> None:
    """A job without a trainer of ours cannot be asked, and the engine learns it."""
    report = node.ask(jobs.start("polite").job_id, action)
    assert (report.outcome, report.reason) == (Outcome.UNDELIVERABLE, "no_run")


def test_requests_that_nobody_needs_are_removed(node: Node, jobs: Jobs) -> None:
    """A request goes when its job has gone; one whose job still runs stays."""
    gone, stays = jobs.start("polite"), jobs.start("polite")
    node.ask(gone.job_id, Action.REQUEST_LEAVE, run_id="gone")
    node.ask(stays.job_id, Action.REQUEST_LEAVE, run_id="stays")
    os.kill(gone.pid, signal.SIGKILL)
    until(lambda: not gone.states())
    node.actions.sweep()
    assert asked(node, "gone") is None
    assert asked(node, "stays") is not None


def test_old_requests_are_removed(node: Node) -> None:
    """A request that an earlier agent left, long past its time, goes; a young one stays."""
    now = node.ladder.clock.wall()
    for run_id, leave_by in (("old", now - 3600), ("young", now)):
        node.ladder.requests.write(run_id, LeaveRequest("unknown", leave_by))
    (node.jobs / "requests" / "broken.json").write_text("{")
    node.actions.sweep()
    assert asked(node, "old") is None
    assert asked(node, "young") is not None


def test_an_open_action_is_acting(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Until it is over, the report says what has been done so far."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = node.engine.request(job.job_id, grace=1.0)
    assert node.actions.submit(request).state is ActionState.ACCEPTED
    report = node.reached(request.decision_id, "sigterm")
    assert (report.state, report.outcome) == (ActionState.ACTING, None)
    assert node.outcome(request.decision_id).state is ActionState.FINISHED
