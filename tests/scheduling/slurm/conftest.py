"""One Slurm with accounting for all files of tests: it takes seven seconds to start."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.tasks import box_policy
from tests.servers import until
from tests.slurm_accounting import accounted_slurm, manage

from gpuwarden.scheduling.slurm.clusters import Cluster, open_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.slurm_servers import SlurmCluster


@pytest.fixture(scope="session")
def one_box() -> Iterator[SlurmCluster]:
    """A Slurm with four cards, accounts vision and speech, and the QOS high over normal."""
    with (
        # Every user has to reach munge's socket, and pytest's own folders are closed to others.
        tempfile.TemporaryDirectory(prefix="gw-slurm-") as folder,
        accounted_slurm(Path(folder), preemption="qos") as cluster,
    ):
        manage(cluster, "add", "qos", "high", "set", "priority=1000", "preempt=normal")
        manage(cluster, "modify", "user", "root", "set", "qos+=high")
        yield cluster


@pytest.fixture(scope="module")
def box(one_box: SlurmCluster) -> Iterator[SlurmCluster]:
    """That Slurm for one file of tests, which finds no other's jobs in it."""
    _clear(one_box)
    yield one_box
    _clear(one_box)


def _clear(box: SlurmCluster) -> None:
    """End all jobs, and wait until their cards are free."""
    if box.run("squeue", "--noheader"):
        box.run("scancel", "--full", "--user=root")
        until(lambda: not box.run("squeue", "--noheader"), 60)


@pytest.fixture
def cluster(box: SlurmCluster) -> Iterator[Cluster]:
    """The commands of that Slurm."""
    with open_cluster(box_policy(box)) as opened:
        yield opened
