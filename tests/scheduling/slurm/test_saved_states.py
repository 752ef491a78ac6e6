"""What jobs of other nodes have saved, by a real Prometheus."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.leaving_jobs import leaving_policy
from tests.servers import Server, backfill, prometheus

from gpuwarden.platforms.slurm import SlurmJob
from gpuwarden.platforms.slurm_listings import ListedJob
from gpuwarden.schedule_api import Outcome
from gpuwarden.scheduling.slurm.receipts import Receipts, Signs, first_of
from gpuwarden.scheduling.slurm.saved_states import SavedStates

if TYPE_CHECKING:
    from collections.abc import Iterator

TAKEN, DURABLE = "yolo_checkpoint_timestamp_seconds", "yolo_checkpoint_durable_timestamp_seconds"


def a_job(number: int, now: float) -> ListedJob:
    """A job that runs since five minutes, in its second attempt."""
    job = SlurmJob(
        job_id=number,
        qos="low",
        states=frozenset({"RUNNING"}),
        start_time=now - 300,
        nodes=("node7",),
        restarts=1,
    )
    return ListedJob(job, gpus=2, preempted=now - 60)


@pytest.fixture(scope="module")
def now() -> float:
    """When the module begins: Prometheus looks ten minutes back from its own clock."""
    return float(int(time.time()))


@pytest.fixture(scope="module")
def server(now: float, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that saw three jobs save, one of them in an attempt before."""
    rows = [
        (TAKEN, "slurm-ci-1-1", now - 50),
        (DURABLE, "slurm-ci-1-1", now - 48.5),
        (TAKEN, "slurm-ci-2-1", now - 40),
        (DURABLE, "slurm-ci-2-1", now - 200),
        (TAKEN, "slurm-ci-3-0", now - 400),
        (DURABLE, "slurm-ci-3-0", now - 399),
    ]
    lines = [
        f'{name}{{job_id="{job}",run_id="r",instance="n"}} {value} {now - 30:.0f}'
        for name, job, value in rows
    ]
    folder = tmp_path_factory.mktemp("prometheus")
    backfill("\n".join([*lines, "# EOF\n"]), folder / "tsdb")
    with prometheus("global: {}\n", folder / "tsdb") as found:
        yield found


def test_an_attempts_newest_state_is_known_by_its_node(server: Server, now: float) -> None:
    """One that is being written, or was another attempt's, says nothing."""
    states = SavedStates(server.url, lambda: "ci")
    assert states(a_job(1, now), None) == Signs(durable=now - 50, on_disk=now - 48.5)
    assert states(a_job(2, now), None) is None
    assert states(a_job(3, now), None) is None
    assert states(a_job(4, now), "r") is None


def test_a_receipt_takes_it_where_the_trainer_is_out_of_sight(server: Server, now: float) -> None:
    """Saved after the notice, left with the status of one that saved: nothing is lost."""
    states = SavedStates(server.url, lambda: "ci")
    receipts = Receipts(leaving_policy("qos"), first_of(lambda _job, _run: None, states))
    receipts.observe([a_job(1, now)], now - 45)
    (told,) = receipts.preemptions()
    assert list(told.steps) == ["notified"]
    gone = SlurmJob(job_id=1, qos="low", states=frozenset({"PENDING"}), restarts=2)
    receipts.observe([ListedJob(gone, gpus=2, status=75)], now - 40)
    (told,) = receipts.preemptions()
    assert told.steps == {"notified": now - 60, "saved": now - 48.5, "left": now - 40}
    assert (told.outcome, told.lost_seconds) == (Outcome.DONE, 0.0)


def test_a_prometheus_that_fails_is_left_in_peace_for_a_while() -> None:
    """It says nothing, and no tick asks it for each job again."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    asked.append(1)
                    connection.close()

        threading.Thread(target=refuse, daemon=True).start()
        states = SavedStates(f"http://127.0.0.1:{listening.getsockname()[1]}", lambda: "ci")
        assert all(states(a_job(number, 0.0), None) is None for number in range(1, 50))
        listening.shutdown(socket.SHUT_RDWR)
    assert len(asked) == 1
