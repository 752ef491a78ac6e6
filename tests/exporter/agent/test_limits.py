from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.servers import until

from gpuwarden.agent_api import Action, Outcome
from gpuwarden.durations import parse
from gpuwarden.exporter.processes import read_process

if TYPE_CHECKING:
    from tests.exporter.agent.nodes import Cards, Job, Jobs, Node


def child_of(host: Job, *, other_than: int = 0) -> int:
    """The job that a supervisor runs now."""

    def there() -> int:
        pid = int(json.loads(host.report.read_text())[1])
        # Between fork and exec it is not yet the job that it will be.
        ready = pid != other_than and host.report.with_suffix(".job").exists()
        return pid if ready and read_process(pid) is not None else 0

    return until(there)


@pytest.fixture
def host(jobs: Jobs) -> Job:
    """A supervisor that starts its job again whenever it ends."""
    return jobs.start("respawner")


def restarted(host: Job, node: Node, cards: Cards) -> int:
    """End a supervisor's job, and give the one that takes its place."""
    first = child_of(host)
    cards.hold(first)
    host.report.with_suffix(".job").unlink()
    assert node.ask(host.part(first)).outcome is Outcome.RECLAIMED
    second = child_of(host, other_than=first)
    cards.hold(second)
    return second


def test_a_job_that_comes_back_is_left_alone(node: Node, host: Job, cards: Cards) -> None:
    """What is started again and again is not ended again and again: people have to look."""
    second = restarted(host, node, cards)
    for action in (Action.INSPECT, Action.TERMINATE):
        report = node.ask(host.part(second), action)
        assert (report.outcome, report.reason) == (Outcome.REFUSED, "cooldown")
    assert "was started again by the same process" in report.message
    node.close()
    node.open()
    assert node.ask(host.part(second)).reason == "cooldown"
    assert read_process(second) is not None


def test_a_cooldown_has_an_end(node: Node, host: Job, cards: Cards) -> None:
    """After it the job is ended as any other, and its next one is left alone again."""
    second = restarted(host, node, cards)
    node.close()
    path = node.folder / "journal"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["record"]["begun_at"] = line["record"]["begun_at"] and (
            line["record"]["begun_at"] - node.cooldown
        )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    node.open()
    assert node.ask(host.part(second)).outcome is Outcome.RECLAIMED


def test_no_cooldown_is_none(node: Node, host: Job, cards: Cards) -> None:
    """0s switches it off."""
    node.close()
    node.cooldown = parse("0s")
    node.open()
    second = restarted(host, node, cards)
    assert node.ask(host.part(second)).outcome is Outcome.RECLAIMED


def test_the_same_command_elsewhere_is_another_job(
    node: Node, jobs: Jobs, host: Job, cards: Cards
) -> None:
    """Neither what ran beside it all the time nor what somebody else starts has come back."""
    restarted(host, node, cards)
    beside, other = jobs.start("respawner"), jobs.start("polite")
    pid = child_of(beside)
    cards.hold(pid)
    cards.hold(other.pid)
    assert node.ask(beside.part(pid)).outcome is Outcome.RECLAIMED
    assert node.ask(other.job_id).outcome is Outcome.RECLAIMED


def test_a_dry_run_tells_of_the_limits(node: Node, jobs: Jobs, cards: Cards) -> None:
    """`inspect` refuses for the same reason as the act that it stands for."""
    node.close()
    node.per_hour = 0
    node.open()
    job = jobs.start("polite")
    cards.hold(job.pid)
    reasons = {node.ask(job.job_id, action).reason for action in (Action.INSPECT, Action.TERMINATE)}
    assert reasons == {"rate_limit"}
    assert job.states()
