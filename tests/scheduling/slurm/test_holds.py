"""A training that a rule had leave for good stays away, whatever Slurm makes of its status."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.tasks import box_policy
from tests.servers import until
from tests.slurm_accounting import manage

from gpuwarden import job_files
from gpuwarden.job_files import RunExit, RunStatus
from gpuwarden.schedule_api import EntryState
from gpuwarden.scheduling.drivers import LEAK, LOOP
from gpuwarden.scheduling.slurm.driver import SLOT_PROBLEMS, SlurmDriver
from gpuwarden.scheduling.slurm.hold_desks import DRIVEN_OUT, HoldDesk
from gpuwarden.scheduling.slurm.observations import Reader
from gpuwarden.scheduling.slurm.queues import entries_of
from gpuwarden.scheduling.slurm.receipts import signs_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.schedule_api import QueueEntry
    from gpuwarden.scheduling.slurm.clusters import Cluster


ROOT = Path(__file__).parents[3]


@pytest.fixture
def graced(box: SlurmCluster) -> Iterator[SlurmCluster]:
    """The box, whose jobs of the QOS `normal` get a grace when they have to leave."""
    manage(box, "modify", "qos", "normal", "set", "gracetime=60")
    yield box
    manage(box, "modify", "qos", "normal", "set", "gracetime=0")


@pytest.mark.sweep
def test_who_leaves_for_good_within_its_grace_is_held(
    graced: SlurmCluster, cluster: Cluster, tmp_path: Path
) -> None:
    """By Slurm 22.05 itself; from 23.11 on Slurm queues it again, and the scheduler holds it."""
    (tmp_path / "jobs").mkdir()
    exit_ = RunExit(76, "hold", time.time())
    status = RunStatus("stops", 1, "train", time.time(), time.time() + 60, exit=exit_)
    (tmp_path / "status").write_bytes(status.encode())
    heeds = tmp_path / "heeds"
    place = job_files.status_path(tmp_path, "stops")
    script = f"trap 'cp {tmp_path}/status {place}; exit 76' USR1\ntouch {heeds}\n"
    script += "while :; do sleep 0.1; done"
    comment = "--comment=gpuwarden:token-of-76:run=stops"
    wanted = ("--gres=gpu:4", "--account=vision", "--requeue", "--signal=B:USR1@60")
    job = graced.submit(script, *wanted, "--time=9", comment)
    until(heeds.exists)
    heeds.unlink()
    policy, reader = box_policy(graced), Reader(cluster)
    desk = HoldDesk(cluster, {}, epochs=None, signs=signs_in(tmp_path))

    def look() -> QueueEntry:
        now = time.time()
        reading = reader.read(now)
        desk.watch(reading, policy, now)
        return next(each for each in entries_of(reading, policy) if each.id == str(job))

    assert look().state is EntryState.RUNNING
    high = graced.submit("sleep 1", "--qos=high", "--gres=gpu:4", "--account=vision", "--time=1")
    until(lambda: look().state is EntryState.HELD, every=0.3)
    until(lambda: graced.states(high) == {"COMPLETED"}, every=0.3)
    # Its cards are free, and the pause of those who come back is over.
    until(lambda: look().state is EntryState.HELD and "BeginTime" not in look().why, every=0.3)
    by_slurm = "SPECIAL_EXIT" in graced.states(job)
    assert by_slurm is (graced.version < (23, 11))
    assert bool(desk.remarks) is not by_slurm
    assert not heeds.exists()
    graced.run("scontrol", "release", str(job))
    until(heeds.exists, 60)
    assert look().state is EntryState.RUNNING
    graced.run("scancel", str(job))


def test_every_problem_is_on_slurms_page() -> None:
    """Under its code, by which people look for it."""
    source = Path(inspect.getfile(SlurmDriver)).read_text()
    told = set(re.findall(r'self\._problem\(\s*"([a-z_]+)"', source))
    told |= {LOOP, LEAK, DRIVEN_OUT, *SLOT_PROBLEMS}
    page = (ROOT / "docs/scheduling-slurm.md").read_text()
    rows = set(
        re.findall(r"^\| `([a-z_]+)` \|", page.partition("tells operators")[2], re.MULTILINE)
    )
    assert rows == told
