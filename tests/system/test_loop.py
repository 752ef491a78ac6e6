"""The whole loop on real parts: the five outcomes, and no wrong or double action in an outage."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from demo.__main__ import settle
from demo.jobs import Cards, Job, Starter, cast
from demo.outcomes import ReadBack
from demo.story import Story
from tests.servers import fetch, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from demo.stack import Stack

pytestmark = pytest.mark.system


@pytest.mark.training
@pytest.mark.timeout(800)
def test_each_of_the_five_jobs_comes_to_its_right_end(stack: Stack) -> None:
    """Left alone, resumed, reclaimed, notified, protected: read back from Prometheus and ledger."""
    story = Story(stack, print)
    try:
        # A slow machine takes longer; what becomes of the jobs is the claim.
        record = story.run(within=600)
        settle(stack)
        read = ReadBack(stack, record)
        wrong = {item.job: item.wrong for item in read.outcomes() if item.wrong}
        assert wrong == {}
        counters = read.counters()
        freed = counters.pop("gpu_memory_freed_bytes_total")
        assert counters == {
            "gpu_idle_detected_total": 1,
            "gpu_released_success_total": 2,
            "gpu_release_failed_total": 0,
        }
        assert freed == (37 + 30) * 1024**3
    finally:
        story.stop()


@contextmanager
def idle_notebook(stack: Stack) -> Iterator[Job]:
    """A crashed notebook's kernel on a card."""
    job = cast()["notebook"]
    story = Story(stack, lambda _moment: None)
    story.jobs["notebook"] = job
    Starter(stack).notebook(job)
    try:
        Cards(stack).put(job)
        yield job
    finally:
        story.stop()


def events(stack: Stack, kind: str) -> list[dict[str, Any]]:
    """Lines of the audit of one kind."""
    if not stack.ledger.exists():
        return []
    with stack.open_ledger() as ledger:
        return [dict(row) for row in ledger.execute("SELECT * FROM events WHERE kind=?", (kind,))]


def decisions(stack: Stack) -> list[dict[str, Any]]:
    """Every decision of the ledger."""
    with stack.open_ledger() as ledger:
        return [dict(row) for row in ledger.execute("SELECT * FROM decisions")]


def engine_metric(stack: Stack, name: str, labels: str = "") -> float:
    """A value of the engine's page; 0 if it has no such series."""
    for line in fetch(stack.url("engine") + "/metrics").decode().splitlines():
        if line.startswith(f"{name}{labels}"):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def begun(stack: Stack) -> list[str]:
    """Jobs whose ladder the agent journalled as begun, one entry for each time."""
    journal = stack.folder / "agent" / "agent.journal"
    lines = [json.loads(line) for line in journal.read_text().splitlines() if line.strip()]
    return [line["record"]["report"]["job_id"] for line in lines if line["event"] == "begun"]


@pytest.mark.timeout(300)
def test_an_engine_killed_in_the_grace_ends_the_job_once_and_learns_the_outcome(
    stack: Stack,
) -> None:
    """After kill -9 the agent finishes alone; the new engine asks it instead of acting again."""
    with idle_notebook(stack) as job:
        until(lambda: events(stack, "acting"), 150)
        stack.servers["engine"].kill()
        # The grace is 10 s, and the notebook is deaf to SIGTERM: the agent's SIGKILL ends it.
        until(lambda: job.ended, 60)
        stack.servers["engine"].start()
        until(lambda: events(stack, "verified"), 60)
        (decision,) = decisions(stack)
        assert decision["state"] == "verified"
        assert decision["job_id"] == job.job_id
        assert begun(stack) == [job.job_id]
        until(lambda: engine_metric(stack, "gpu_released_success_total") == 1, 30)
        assert engine_metric(stack, "gpu_release_failed_total") == 0


@pytest.mark.timeout(300)
def test_without_prometheus_nothing_is_decided_and_afterwards_once(stack: Stack) -> None:
    """30 s of outage after the notice: no action in it, and the deadline starts no earlier."""
    with idle_notebook(stack) as job:
        until(lambda: events(stack, "notified"), 150)
        stack.servers["prometheus"].kill()
        failed = 'gpuwarden_engine_ticks_total{outcome="discarded"}'
        # A tick takes 2 s: 15 failed ones are 30 s.
        until(lambda: engine_metric(stack, failed) >= 15, 120)
        assert not job.ended
        assert decisions(stack) == []
        stack.servers["prometheus"].start()
        until(lambda: events(stack, "verified"), 150)
        assert [item["job_id"] for item in decisions(stack)] == [job.job_id]
        assert begun(stack) == [job.job_id]


@pytest.mark.timeout(300)
def test_a_notice_that_nobody_took_ends_no_job(stack: Stack) -> None:
    """Slack and the mail server refuse: no deadline runs, and the operators are told."""
    stack.sinks.slack_refuses = "channel_not_found"
    stack.sinks.mail_refuses = "550 5.1.1 no such user"
    with idle_notebook(stack) as job:
        until(lambda: events(stack, "notify"), 150)
        elapsed = "gpuwarden_engine_ticks_total"
        start = engine_metric(stack, elapsed, '{outcome="completed"}')
        # The severe stage would be due 15 s after the notice: 25 ticks are 50 s.
        until(lambda: engine_metric(stack, elapsed, '{outcome="completed"}') >= start + 25, 150)
        assert not job.ended
        assert decisions(stack) == []
        assert events(stack, "notified") == []
