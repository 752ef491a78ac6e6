"""Faults in the middle of a reclaim, on real servers.

Nothing is ended without a delivered notice, nothing is ended twice, and the audit tells all of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.servers import fetch, until
from tests.system.reclaims import Cell, Ground, Job, cells, ground
from tests.system.test_reclaims import begun, check, needs_cgroups

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.sweep, pytest.mark.timeout(600)]


def folder() -> tempfile.TemporaryDirectory[str]:
    """A short path, for it holds Munge's socket."""
    return tempfile.TemporaryDirectory(prefix="gw")


def rows(here: Ground, query: str, *values: object) -> list[dict[str, Any]]:
    """Rows of the ledger; none before there is one."""
    if not here.ledger.exists():
        return []
    with here.open_ledger() as ledger:
        return [dict(row) for row in ledger.execute(query, values)]


def events(here: Ground, job: Job, kind: str) -> list[dict[str, Any]]:
    """Lines of the audit about a job."""
    query = "SELECT * FROM events WHERE job_id=? AND kind=?"
    return rows(here, query, job.job_id, kind)


def completed(here: Ground) -> float:
    """How many ticks the engine has completed."""
    name = 'gpuwarden_engine_ticks_total{outcome="completed"}'
    for line in fetch(here.url("engine") + "/metrics").decode().splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def ticks(here: Ground, number: int) -> None:
    """Let some ticks pass."""
    begun_at = completed(here)
    until(lambda: completed(here) >= begun_at + number, 120, every=0.5)


def untouched(here: Ground, job: Job) -> bool:
    """Whether nothing was decided about a job, and it is there."""
    found = rows(here, "SELECT * FROM decisions WHERE job_id=?", job.job_id)
    return job.alive and not found and not events(here, job, "notified")


def moments(cell: Cell) -> Iterator[str]:
    """What the timeline of an audit names."""
    return (moment["what"] for moment in cell.audit["timeline"])


def test_a_notice_that_nobody_takes_and_an_agent_that_dies_in_the_grace() -> None:
    """Alertmanager is down, then Slack and the mail server refuse; then the agent is killed.

    The whole way the job stays until its owner has the notice on both channels, and then it is
    ended once: the agent that was killed between SIGTERM and SIGKILL finishes when it is back.
    """
    with folder() as name, ground(Path(name), platforms=False) as here:
        here.servers["alertmanager"].kill()
        job = here.start("process", "kill", 0)
        until(lambda: events(here, job, "notify"), 120)
        # It would be due six ticks later.
        ticks(here, 10)
        assert untouched(here, job)

        here.sinks.slack_refuses = "channel_not_found"
        here.sinks.mail_refuses = "550 5.1.1 no such user"
        here.servers["alertmanager"].start()
        failed = "SELECT * FROM notices WHERE state='failed'"
        until(lambda: len(rows(here, failed)) == 2, 120)
        ticks(here, 10)
        assert untouched(here, job)

        here.sinks.slack_refuses = here.sinks.mail_refuses = None
        until(lambda: events(here, job, "acting"), 150)
        until(lambda: job.lines("deaf"), 60)
        here.servers["agent"].kill()
        ticks(here, 3)
        assert job.alive
        here.servers["agent"].start()
        (cell,) = cells(here, [job])
        assert check(here, cell) == []
        assert begun(here) == [job.job_id]
        assert list(moments(cell)).count("sigterm") == 1

        notices = [n for n in cell.audit["notices"] if n["stage"].startswith("moderate")]
        said = {n["channel"]: n["refusals"][0]["error"] for n in notices}
        assert "channel_not_found" in said["slack"]
        assert "5.1.1 no such user" in said["email"]
        assert all(n["state"] == "proven" and n["attempts"] > 1 for n in notices)
        first = min(n["refusals"][0]["at"] for n in notices)
        proven = max(n["proven_at"] for n in notices)
        assert first < proven < cell.audit["decision"]["created_at"]


@needs_cgroups
@pytest.mark.parametrize("event", ["acting", "told"])
def test_slurms_controller_is_killed_in_the_middle(event: str) -> None:
    """Before it was told to end the job, or after: it is ended once, by it, when it is back."""
    with folder() as name, ground(Path(name)) as here:
        assert here.cluster is not None
        job = here.start("slurm", "kill", 0)
        until(lambda: events(here, job, event), 150, every=0.01)
        here.cluster.kill("slurmctld")
        ticks(here, 3)
        here.cluster.start("slurmctld")
        (cell,) = cells(here, [job])
        assert check(here, cell) == []
        assert begun(here) == []


@needs_cgroups
def test_an_api_server_that_refuses_fails_and_forgets() -> None:
    """409, 429, 500 and 410 to the change that ends a pod: each pod is ended once, or kept.

    What was told to be gone and is there is neither ended nor counted as such: operators look.
    """
    with folder() as name, ground(Path(name)) as here:
        assert here.kubelet is not None
        statuses = (409, 429, 500, 410)
        jobs = [here.start("pod", "term", place) for place in range(len(statuses))]
        for job, status in zip(jobs, statuses, strict=True):
            here.kubelet.cluster.fail("PATCH", f"/jobs/pod-term-{job.card}$", status)
        found = dict(zip(statuses, cells(here, jobs), strict=True))
        states = {status: cell.audit["decision"]["state"] for status, cell in found.items()}
        assert states == {409: "verified", 429: "verified", 500: "verified", 410: "incomplete"}
        for status, cell in found.items():
            assert cell.broken == []
            assert cell.told_first
            patches = here.kubelet.cluster.asked("PATCH", f"/jobs/pod-term-{cell.job.card}$")
            if status == 410:
                assert cell.job.alive
                assert cell.audit["result"]["memory_freed"] in (None, 0)
            else:
                assert check(here, cell) == []
                assert patches == 2
