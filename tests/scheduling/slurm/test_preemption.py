"""A training leaves for a higher one, on a real Slurm: told, saved, gone, back, and none the worse.

The whole way by the product's own batch script and trainer; nothing but the cards is made up.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.leaving_jobs import BATCHES, EPOCHS, Yard, leaving_policy, qos_words
from tests.slurm_accounting import accounted_slurm, manage

from gpuwarden import job_files
from gpuwarden.schedule_api import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.slurm_servers import SlurmCluster

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

STEPS = ["notified", "acknowledged", "saved", "left", "started"]


@pytest.fixture
def yard(box: SlurmCluster) -> Iterator[Yard]:
    """Trainings on the Slurm of all tests, where those of the QOS `normal` get a grace."""
    manage(box, "modify", "qos", "normal", "set", "gracetime=60")
    manage(box, "modify", "qos", "high", "set", "preempt=normal")
    with tempfile.TemporaryDirectory(prefix="gw-yard-") as name:
        yield Yard(box, leaving_policy("qos", low="normal"), Path(name))
    manage(box, "modify", "qos", "normal", "set", "gracetime=0")


@pytest.fixture(params=["qos", "tiers"])
def strict(request: pytest.FixtureRequest) -> Iterator[Yard]:
    """Trainings on a Slurm of their own, with each kind of preemption."""
    kind = request.param
    with (
        tempfile.TemporaryDirectory(prefix="gw") as name,
        accounted_slurm(Path(name), preemption=kind, grace=60) as cluster,
    ):
        if kind == "qos":
            manage(cluster, "add", "qos", "low", "priority=10", "gracetime=60")
            manage(cluster, "add", "qos", "high", "priority=100", "preempt=low")
            words = ("set", "qos=low,high", "defaultqos=low")
            manage(cluster, "modify", "account", "vision", *words)
        policy = leaving_policy("qos" if kind == "qos" else "partitions")
        yield Yard(cluster, policy, cluster.folder / "yard")


def interrupt(yard: Yard, *, then: str = "high", lower: str = "low") -> tuple[int, int]:
    """A low training, in the middle of which a high one is submitted; gives both numbers."""
    low = yard.submit("low", priority=lower)
    yard.wait_for_step("low", 1)
    return low, yard.submit(then, priority="high", pace=0.0)


def assert_left_and_came_back(yard: Yard, low: int, high: int) -> None:
    """The low one ends as the high one does, which nobody disturbed."""
    yard.wait(lambda jobs: jobs[high].job.states == {"COMPLETED"}, "high")
    yard.wait(lambda jobs: jobs[low].job.states == {"COMPLETED"})
    told = yard.preemption()
    assert list(told.steps) == STEPS
    assert list(told.steps.values()) == sorted(told.steps.values())
    assert (told.outcome, told.successor, told.run_id) == (Outcome.DONE, str(high), "low")
    assert told.lost_seconds == 0.0
    log = yard.log("low").read_text("utf-8", errors="replace")
    assert "leaves at the end of this epoch" in log
    assert "exit status 75" in log
    status = yard.status("low")
    assert status is not None
    # What the second attempt did, added to whole epochs, is the whole training.
    assert (BATCHES * EPOCHS - status.counters.steps) % BATCHES == 0
    assert 0 < status.counters.steps < BATCHES * EPOCHS
    assert yard.digest("low") == yard.digest("high")


def test_a_training_makes_way_and_ends_as_if_nobody_had_come(yard: Yard) -> None:
    """Told at once, it ends its epoch, saves, leaves; the other runs; it ends bit-identical."""
    low, high = interrupt(yard, lower="normal")
    assert_left_and_came_back(yard, low, high)


@pytest.mark.sweep
def test_both_kinds_of_preemption_let_an_epoch_end(strict: Yard) -> None:
    """Between qualities of service, and between partitions."""
    assert_left_and_came_back(strict, *interrupt(strict))


@pytest.mark.sweep
def test_nobody_is_told_before_his_least_run(strict: Yard) -> None:
    """A higher job waits until the lower one has run as long as the policy promises."""
    cluster = strict.cluster
    if strict.policy.slurm.preempt == "qos":
        manage(cluster, "modify", "qos", "low", "set", "PreemptExemptTime=00:00:15")
    else:
        text = cluster.config.read_text()
        cluster.config.write_text(text + "PreemptExemptTime=00:00:15\n")
        cluster.run("scontrol", "reconfigure")
    words = ("--account=vision", "--gres=gpu:a100:4", "--time=10")
    leaves = "trap 'exit 75' USR1; sleep 600 & wait"
    low = cluster.submit(leaves, *words, "--signal=B:USR1@60", *qos_words(strict.policy, "low"))
    started = strict.wait(lambda jobs: jobs[low].job.holds and jobs[low].job.start_time)
    high = cluster.submit("sleep 3", *words, *qos_words(strict.policy, "high"))
    strict.wait(lambda jobs: jobs[high].job.states == {"COMPLETED"})
    came = strict.look()[high].job.start_time
    assert came is not None
    assert came - started >= 15


@pytest.mark.sweep
def test_a_controller_that_dies_in_between_changes_nothing(strict: Yard) -> None:
    """Killed once the training is on its way out; what it had not written down comes again."""
    low, high = interrupt(strict)
    strict.wait(lambda jobs: jobs[low].preempted is not None)
    strict.cluster.kill("slurmctld")
    strict.cluster.start("slurmctld")
    strict.wait(lambda jobs: jobs[high].job.states == {"COMPLETED"}, "high")
    strict.wait(lambda jobs: jobs[low].job.states == {"COMPLETED"})
    assert strict.digest("low") == strict.digest("high")


@pytest.mark.sweep
def test_an_epoch_beyond_its_grace_is_cut_and_nothing_of_it_lost(strict: Yard) -> None:
    """At the end of the grace SIGTERM comes: the state is that of the next step."""
    if strict.policy.slurm.preempt == "qos":
        manage(strict.cluster, "modify", "qos", "low", "set", "gracetime=2")
    else:
        strict.cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=2")
    low = strict.submit("low", priority="low", pace=20.0)
    strict.wait_for_step("low", 1)
    high = strict.submit("high", priority="high", pace=0.0)
    strict.wait(lambda jobs: jobs[low].job.restarts == 1 and not jobs[low].job.holds)
    status = strict.status("low")
    assert status is not None
    assert status.exit is not None
    assert (status.exit.code, status.step % BATCHES != 0) == (job_files.EXIT_REQUEUE, True)
    strict.wait(lambda jobs: jobs[high].job.states == {"COMPLETED"}, "high")
    told = strict.preemption()
    assert (told.outcome, told.lost_seconds) == (Outcome.DONE, 0.0)
    strict.cluster.run("scancel", str(low))


@pytest.mark.sweep
def test_a_job_that_ends_with_0_within_its_grace_is_told_as_what_slurm_makes_of_it(
    strict: Yard,
) -> None:
    """Slurm 22.05 takes it for complete, and it never comes back; 24.11 queues it again."""
    cluster = strict.cluster
    trap = "trap 'sleep 2; exit 0' USR1; sleep 600 & wait"
    words = ("--account=vision", "--gres=gpu:a100:4", "--time=10")
    low = cluster.submit(trap, *words, "--signal=B:USR1@60", *qos_words(strict.policy, "low"))
    strict.wait(lambda jobs: jobs[low].job.states == {"RUNNING"})
    cluster.submit("sleep 3", *words, *qos_words(strict.policy, "high"))
    strict.wait(lambda jobs: not jobs[low].job.holds)
    strict.wait(lambda _: strict.receipts.preemptions() and "left" in strict.preemption().steps)
    told = strict.preemption()
    if cluster.version < (23, 11):
        assert told.outcome is Outcome.ENDED
        assert "does not come back" in told.words
    else:
        assert (told.outcome, told.lost_seconds) == (Outcome.DONE, None)
        assert "nobody tells" in told.words
        assert strict.look()[low].job.restarts == 1


@pytest.mark.sweep
def test_a_job_that_its_owner_cancels_meanwhile_was_not_saved_by_us(strict: Yard) -> None:
    """A cancelled job is not told as one that made way."""
    cluster = strict.cluster
    words = ("--account=vision", "--gres=gpu:a100:4", "--time=10")
    deaf = "trap '' USR1; while :; do sleep 1; done"
    low = cluster.submit(deaf, *words, "--signal=B:USR1@60", *qos_words(strict.policy, "low"))
    strict.wait(lambda jobs: jobs[low].job.states == {"RUNNING"})
    cluster.submit("sleep 3", *words, *qos_words(strict.policy, "high"))
    strict.wait(lambda jobs: jobs[low].preempted is not None)
    cluster.run("scancel", "--full", f"--signal={signal.SIGKILL.name[3:]}", str(low))
    cluster.run("scancel", str(low))
    strict.wait(lambda jobs: jobs[low].job.states == {"CANCELLED"})
    told = strict.preemption()
    assert told.outcome is Outcome.ENDED
    assert "cancelled" in told.words
