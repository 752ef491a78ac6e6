"""The daemon's view of a real Slurm: the queue, what comes back, what is used, what is left."""

from __future__ import annotations

import datetime as dt
import os
import shlex
import time
import zoneinfo
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.drivers import WallClock, a_driver
from tests.scheduling.slurm.tasks import a_task, box_policy
from tests.servers import until
from tests.slurm_accounting import manage

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.schedule_api import Cause, EntryState
from gpuwarden.scheduling.drivers import LEAK
from gpuwarden.scheduling.slurm import memories
from gpuwarden.scheduling.slurm.driver import read_entries
from gpuwarden.scheduling.slurm.hold_desks import HoldDesk
from gpuwarden.scheduling.slurm.loops import History
from gpuwarden.scheduling.slurm.observations import Reader, read_jobs
from gpuwarden.scheduling.slurm.receipts import Signs
from gpuwarden.scheduling.slurm.submissions import SlurmSubmitter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.schedule_api import QueueEntry
    from gpuwarden.scheduling.slurm.clusters import Cluster
    from gpuwarden.scheduling.slurm.driver import SlurmDriver


@pytest.fixture
def empty(box: SlurmCluster) -> Iterator[SlurmCluster]:
    """The box without anybody's jobs, before and after."""
    clear(box)
    yield box
    clear(box)


def clear(box: SlurmCluster) -> None:
    """End everybody's jobs."""
    if jobs := box.run("squeue", "--noheader", "-o", "%A").split():
        box.run("scancel", *jobs)
    until(lambda: not box.run("squeue", "--noheader").strip(), every=0.2)


def entry(driver: SlurmDriver, job: int) -> QueueEntry:
    """The entry of a job after a look."""
    driver.tick(time.time())
    return next(each for each in driver.entries() if each.id == str(job))


def test_the_queue_of_a_real_cluster(empty: SlurmCluster, cluster: Cluster, tmp_path: Path) -> None:
    """Who runs, who waits and for whom; with a daemon and without one."""
    policy = box_policy(empty)
    submitter = SlurmSubmitter(policy, cluster, environment={"PATH": "/usr/bin:/bin"})
    first = empty.submit("exec sleep 600", "--gres=gpu:4", "--account=vision", "--time=5")
    empty.wait_for_state(first, "RUNNING")
    task = a_task(run_id="run-9", gpus=2, program="/bin/sleep")
    second = int(submitter.submit(task, token="a-token-of-9").id)
    with a_driver(policy, tmp_path) as driver:
        until(lambda: entry(driver, second).why in ("Resources", "Priority"), every=0.3)
        waits = entry(driver, second)
        assert waits.state is EntryState.PENDING
        assert waits.position == 1
        assert waits.run_id == "run-9"
        assert (waits.team, waits.gpus, waits.gpu_type) == ("vision", 2, "a100-40")
        assert waits.must_end == (str(first),)
        # A plan comes with the backfill scheduler's next round.
        until(lambda: entry(driver, second).start is not None, every=0.3)
        assert entry(driver, first).state is EntryState.RUNNING
        empty.run("scancel", str(second))
        until(lambda: entry(driver, second).state is EntryState.FAILED, every=0.2)
        assert entry(driver, second).why == "cancelled"
        # A disk that is full stops nobody; the state is a folder that is not there here.
        for left in tmp_path.iterdir():
            left.unlink()
        tmp_path.rmdir()
        third = empty.submit("exec sleep 600", "--gres=gpu:1", "--account=vision", "--hold")
        assert entry(driver, third).state is EntryState.HELD
        assert "state_not_kept" in {problem.code for problem in driver.problems()}
    alone = {each.id: each.state for each in read_entries(policy, time.time())}
    assert alone[str(first)] is EntryState.RUNNING


def test_a_loop_is_held_and_told_of(empty: SlurmCluster, tmp_path: Path) -> None:
    """A job that left with 75 before this daemon began leaves again, and is held for it."""
    policy = box_policy(
        empty,
        slurm=box_policy(empty).slurm.model_dump(exclude_defaults=True)
        | {"requeues": {"times": 1, "per": "10m"}, "timeout": "20s"},
    )
    job = empty.submit("exit 75", "--gres=gpu:1", "--account=vision", "--requeue", "--time=5")
    key = f"{job}/{os.geteuid()}/{empty.run('squeue', '-h', f'-j{job}', '-o', '%j').strip()}"
    before = History(restarts=0, times=(time.time(),), paused=0)
    memories.save(tmp_path, memories.Memory(histories={key: before}))
    with a_driver(policy, tmp_path) as driver:
        until(lambda: entry(driver, job).why == "requeue_loop", every=0.3)
        found = entry(driver, job)
        assert found.state is EntryState.HELD
        assert "scontrol release" in found.words
        assert [problem.code for problem in driver.problems()] == ["requeue_loop"]
    with a_driver(policy, tmp_path) as again:
        assert entry(again, job).why == "requeue_loop"


@pytest.mark.sweep
def test_who_came_back_by_itself_waits_before_it_starts_again(
    empty: SlurmCluster, cluster: Cluster, tmp_path: Path
) -> None:
    """As long as it is told, by Slurm's own beginning; a person may have it go on."""
    usual = box_policy(empty)
    slurm = usual.slurm.model_dump(exclude_defaults=True)
    slurm |= {"requeues": {"times": 1, "per": "10m"}, "timeout": "20s"}
    script = '[ -n "$SLURM_RESTART_COUNT" ] && exec sleep 600; sleep 2; exit 75'
    job = empty.submit(script, "--gres=gpu:1", "--account=vision", "--requeue", "--time=5")
    empty.wait_for_state(job, "RUNNING")
    with a_driver(box_policy(empty, slurm=slurm), tmp_path) as driver:
        assert entry(driver, job).state is EntryState.RUNNING
        until(lambda: "It came back once within 10m" in entry(driver, job).words, every=0.3)
        back = time.time()
        assert entry(driver, job).state is EntryState.PENDING
        (waits,) = [each for each in read_jobs(cluster) if each.job.job_id == job]
        assert waits.eligible is not None
        assert back + 50 < waits.eligible < back + 70
        empty.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        until(lambda: "It came back once" not in entry(driver, job).words, every=0.3)
        (waits,) = [each for each in read_jobs(cluster) if each.job.job_id == job]
        assert waits.eligible is not None
        assert waits.eligible < back + 30


def test_a_training_that_wants_to_be_held_is_held_though_slurm_queued_it(
    empty: SlurmCluster, cluster: Cluster
) -> None:
    """As 24.11 does with who leaves within its grace; its own user may release it, and once."""
    comment = "--comment=gpuwarden:token-of-76:run=stops"
    wanted = ("--gres=gpu:1", "--account=vision", "--time=5", "--requeue", comment)
    job = empty.submit("sleep 1; exit 75", *wanted)
    said: list[float] = []

    def signs(last: ListedJob, run_id: str | None) -> Signs:
        said.append(last.job.start_time or 0.0)
        return Signs(status=76 if run_id == "stops" else 75)

    policy, desk = box_policy(empty), HoldDesk(cluster, {}, epochs=None, signs=signs)
    reader = Reader(cluster)

    def held() -> str:
        desk.watch(reader.read(time.time()), policy, time.time())
        remark = desk.remarks.get(str(job))
        return "" if remark is None else remark.words

    words = until(held, every=0.3)
    assert "the status that means hold (76)" in words
    assert "JobHeldUser" in empty.run("squeue", "-h", f"-j{job}", "-o", "%r")
    assert held() == words
    assert len(set(said)) == 1
    empty.run("scontrol", "release", str(job))
    assert held() == ""
    assert "JobHeldUser" not in empty.run("squeue", "-h", f"-j{job}", "-o", "%r")


@pytest.mark.sweep
def test_each_attempt_is_used_time_once(empty: SlurmCluster, tmp_path: Path) -> None:
    """A job that came back held cards twice; eight seconds of two cards are sixteen."""
    begin = time.time() - 1
    script = '[ -n "$SLURM_RESTART_COUNT" ] && exec sleep 600; sleep 1; exit 75'
    job = empty.submit(script, "--gres=gpu:2", "--account=speech", "--requeue", "--time=5")
    until(lambda: "1" in empty.run("squeue", "-h", f"-j{job}", "-O", "RestartCnt"), every=0.2)
    # A job that came back waits until its credential has expired.
    empty.wait_for_state(job, "RUNNING")
    with a_driver(box_policy(empty), tmp_path) as driver:
        driver.tick(time.time())

        def both() -> bool:
            found = [h for h in driver.usage(begin, time.time()) if h.entry == str(job)]
            return len(found) == 2 and found[0].end is not None

        until(both, every=0.3)
        found = [each for each in driver.usage(begin, time.time()) if each.entry == str(job)]
    assert [each.gpus for each in found] == [2, 2]
    assert [each.team for each in found] == ["speech", "speech"]
    assert [each.card for each in found] == ["a100-40", "a100-40"]
    assert found[0].end is not None
    assert found[0].end <= found[1].start
    assert found[1].end is None


def test_a_spent_day_starts_no_job(empty: SlurmCluster, tmp_path: Path) -> None:
    """The limit is what is left of the day; at the next midnight it is a whole day again.

    An account that is not gpuwarden's keeps its limit until it is handed over, by what is told.
    """
    manage(empty, "modify", "account", "vision", "set", "GrpTRESMins=gres/gpu=77")
    budgets = [
        {
            "team": "vision",
            "per": "day",
            "limit": "10 GPU-hours",
            "kind": "hard",
            "running": "finish",
        }
    ]
    policy = box_policy(empty, budgets=budgets)

    def limit() -> int | None:
        said = empty.run(
            "sacctmgr", "-nP", "show", "assoc", "account=vision", "user=", "format=GrpTRESMins"
        ).strip()
        return int(said.partition("=")[2]) if said else None

    clock = WallClock()
    try:
        with a_driver(policy, tmp_path, clock) as driver:
            driver.tick(clock.wall())
            assert limit() == 77
            (problem,) = [p for p in driver.problems() if p.code == "budget_not_enforced"]
            program, *words = shlex.split(problem.words.split("`")[-2])
            assert program == "sacctmgr"
            manage(empty, *words)
            clock.ahead = 61.0
            driver.tick(clock.wall())
            assert "budget_not_enforced" not in {p.code for p in driver.problems()}
            first = limit()
            assert first is not None
            assert 590 <= first <= 600
            # A person who raises it is corrected at the next look.
            manage(empty, "modify", "account", "vision", "set", "GrpTRESMins=gres/gpu=9999")
            clock.ahead = 122.0
            driver.tick(clock.wall())
            assert limit() == first
        spent = [dict(budgets[0], limit="0.001 GPU-hours")]
        with a_driver(box_policy(empty, budgets=spent), tmp_path, clock) as driver:
            driver.tick(clock.wall())
            job = empty.submit("exec sleep 600", "--gres=gpu:1", "--account=vision", "--time=5")
            until(lambda: entry(driver, job).why == "AssocGrpGRESMinutes", every=0.3)
            assert entry(driver, job).state is EntryState.HELD
    finally:
        clear = ("GrpTRESMins=gres/gpu=-1", "description=vision")
        manage(empty, "modify", "account", "vision", "set", *clear)


def test_a_controller_that_is_away_is_not_an_empty_queue(
    empty: SlurmCluster, tmp_path: Path
) -> None:
    """Killed and started again: what was known stays, and the jobs are the same afterwards."""
    job = empty.submit("exec sleep 600", "--gres=gpu:1", "--account=vision", "--time=5")
    empty.wait_for_state(job, "RUNNING")
    policy = box_policy(empty)
    policy = policy.model_copy(update={"slurm": policy.slurm.model_copy(update={"timeout": 2.0})})
    with a_driver(policy, tmp_path) as driver:
        before = entry(driver, job)
        # The controller writes down what it knows every few seconds.
        until((empty.folder / "state" / "job_state").exists)
        empty.stop_daemon("slurmctld")
        with pytest.raises(ServiceUnavailable):
            driver.tick(time.time())
        assert before in driver.entries()
        empty.start("slurmctld")
        until(lambda: entry(driver, job).started is not None, every=0.3)
        after = entry(driver, job)
        # Slurm 22.05 gives the cards of such a job to nobody any more, until it counts them anew.
        empty.run("scancel", str(job))
        until(lambda: not empty.run("squeue", "--noheader").strip(), every=0.2)
        lost = "gpu:a100:1" in empty.run("scontrol", "--details", "show", "node")
        for later in (100.0, 200.0):
            driver.tick(time.time() + later)
        words = [each.words for each in driver.problems() if each.code == LEAK]
        assert [each.startswith("1 card in use by no job (") for each in words] == [True] * lost
        empty.run("scontrol", "reconfigure")
        driver.tick(time.time() + 300)
        assert LEAK not in {each.code for each in driver.problems()}
    assert (after.id, after.started, after.gpus) == (before.id, before.started, before.gpus)


def test_the_tasks_of_an_array_wait_for_their_window(
    empty: SlurmCluster, cluster: Cluster, tmp_path: Path
) -> None:
    """Slurm's commands take neither the step nor the limit that Slurm prints."""
    clock = dt.datetime.now(zoneinfo.ZoneInfo("Europe/Berlin"))
    opens, closes = ((clock + dt.timedelta(hours=n)).strftime("%H:00") for n in (3, 4))
    window = {"name": "later", "from": opens, "to": closes, "running": "finish"}
    wanted = ("--gres=gpu:1", "--account=vision", "--time=9", "--array=1-40:3%2")
    comment = "--comment=gpuwarden:token-of-a:window=later"
    job = empty.submit("exec sleep 600", *wanted, comment, "--begin=now+1hour")
    with a_driver(box_policy(empty, windows=[window]), tmp_path) as driver:

        def line() -> QueueEntry:
            driver.tick(time.time())
            (found,) = [each for each in driver.entries() if each.id.startswith(f"{job}_")]
            return found

        assert line().tasks == 14
        assert line().id == f"{job}_[1-40:3%2]"
        until(lambda: "waits for the window later" in line().words, every=0.3)
    (waits,) = [each for each in read_jobs(cluster) if each.job.job_id == job]
    assert waits.eligible is not None
    opening = dt.datetime.fromtimestamp(waits.eligible, clock.tzinfo)
    assert opening.strftime("%H:00") == opens


def test_a_training_leaves_as_its_window_closes_and_waits_for_the_next(
    empty: SlurmCluster, tmp_path: Path
) -> None:
    """By the signal that it asked for; a job of the same window that asked for none stays."""
    clock = dt.datetime.now(zoneinfo.ZoneInfo("Europe/Berlin"))
    opens, closes = ((clock + dt.timedelta(hours=n)).strftime("%H:00") for n in (3, 4))
    window = {"name": "later", "from": opens, "to": closes, "running": "leave"}
    policy = box_policy(empty, windows=[window])
    wanted = ("--gres=gpu:1", "--account=vision", "--time=9", "--requeue")
    script = "#SBATCH --signal=B:USR1@60\ntrap 'exit 75' USR1\n"
    script += f"touch '{tmp_path}/heeds'\nwhile :; do sleep 0.1; done"
    comment = "--comment=gpuwarden:token-of-w:run=w-1:window=later"
    training = empty.submit(script, *wanted, comment)
    deaf = empty.submit("exec sleep 600", *wanted, comment)
    for job in (training, deaf):
        empty.wait_for_state(job, "RUNNING")
    until((tmp_path / "heeds").exists)
    with a_driver(policy, tmp_path) as driver:
        driver.tick(time.time() + 61)  # who has just begun is left alone for a minute
        codes = {problem.code: problem.words for problem in driver.problems()}
        assert f"{deaf} (window)" in codes["jobs_cannot_be_asked"]
        (notice,) = [each for each in driver.preemptions() if each.cause is Cause.WINDOW]
        assert (notice.victim, notice.successor) == (str(training), "later")
        until(lambda: "waits for the window later" in entry(driver, training).words, every=0.3)
        assert entry(driver, training).requeues == 1
        assert entry(driver, deaf).state is EntryState.RUNNING
        (notice,) = [each for each in driver.preemptions() if each.cause is Cause.WINDOW]
        assert set(notice.steps) == {"notified", "left"}
