from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from tests.exporter.agent.nodes import LAUNCHER

from gpuwarden.agent_api import Action, Outcome
from gpuwarden.exporter.agent.deliveries import Deliveries
from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.processes import Launchers
from gpuwarden.job_files import request_path

if TYPE_CHECKING:
    from pathlib import Path

    from tests.exporter.agent.nodes import Engine, Jobs, Node

ASKS = (Action.REQUEST_LEAVE, Action.REQUEST_CHECKPOINT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make mount namespaces")
@pytest.mark.parametrize(
    ("way", "delivered"),
    [
        ("mounted", True),
        ("other", False),
        ("link", False),
        ("missing", False),
        ("chroot", False),
    ],
)
def test_a_container_is_asked_if_it_sees_the_request(
    way: str, delivered: bool, node: Node, jobs: Jobs
) -> None:
    """A job that does not see the node's folder cannot follow a request, and that is told."""
    job = jobs.start("shut_in", node.jobs / "requests", way)
    # The container is a job of its own: its first process is all that is known of it.
    os.kill(job.pid, 9)
    for action in ASKS:
        report = node.ask(job.job_id, action, run_id="run-1", seen=job.seen)
        path = request_path(node.jobs, "run-1")
        assert path.exists() is delivered
        if delivered:
            assert report.outcome is Outcome.DONE
        else:
            assert (report.outcome, report.reason) == (Outcome.UNDELIVERABLE, "not_mounted")
            assert "mount it into the pod" in report.message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make mount namespaces")
def test_a_link_of_the_nodes_own_is_no_obstacle(
    node: Node, engine: Engine, jobs: Jobs, tmp_path: Path
) -> None:
    """Where the node's path leads over a link, such as /var/run, a job may see what it leads to."""
    link = tmp_path / "run"
    link.symlink_to(node.jobs)
    deliveries = Deliveries(link, Launchers.with_extra([LAUNCHER]))
    for way, obstacle in (("mounted", None), ("other", "not_mounted")):
        job = jobs.start("shut_in", node.jobs / "requests", way)
        os.kill(job.pid, 9)
        found = deliveries.obstacle(engine.request(job.job_id, ASKS[0], seen=job.seen))
        assert (found and found[0]) == obstacle


def test_a_job_that_is_gone_cannot_be_asked(node: Node, jobs: Jobs) -> None:
    """Where no process of a job is known, nobody can follow its request."""
    job = jobs.start("polite")
    missing = f"{job.job_id[:-1]}{(int(job.job_id[-1]) + 1) % 10}"
    for job_id in (missing, "pod-8f4f5a0c-0000-4000-8000-000000000001"):
        report = node.ask(job_id, Action.REQUEST_LEAVE, run_id="run-1")
        assert (report.outcome, report.reason) == (Outcome.UNDELIVERABLE, "no_process")
    assert not request_path(node.jobs, "run-1").exists()


def test_a_file_system_that_hangs_is_told(node: Node, engine: Engine, jobs: Jobs) -> None:
    """Who makes a look at his files hang is not asked, and the agent goes on."""
    calls, free = BlockingCalls(patience=0.05), threading.Event()
    job = jobs.start("polite")
    deliveries = Deliveries(node.jobs, Launchers.with_extra([LAUNCHER]), calls=calls)
    request = engine.request(job.job_id, Action.REQUEST_LEAVE)
    assert deliveries.obstacle(request) is None
    assert calls.make(os.getuid(), free.wait) is None
    obstacle = deliveries.obstacle(request)
    assert obstacle is not None
    assert obstacle[0] == "hangs"
    free.set()
    calls.close()
