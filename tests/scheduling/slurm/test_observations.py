"""What a real Slurm hides from people is not hidden from the scheduler."""

from __future__ import annotations

import datetime as dt
import os
import pwd
import shlex
import time
import zoneinfo
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.scheduling.slurm.drivers import WallClock
from tests.scheduling.slurm.tasks import box_policy

from gpuwarden.scheduling.drivers import Context
from gpuwarden.scheduling.slurm.clusters import PROGRAMS, open_cluster
from gpuwarden.scheduling.slurm.driver import SlurmDriver
from gpuwarden.scheduling.slurm.observations import Reader, is_operator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.slurm_servers import SlurmCluster

    from gpuwarden.scheduling.slurm.clusters import Cluster

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="asks as another user")


@pytest.fixture
def as_games(box: SlurmCluster, tmp_path: Path) -> Iterator[Cluster]:
    """That Slurm's commands as an ordinary user runs them, who is no operator of it."""
    games = pwd.getpwnam("games")
    who = f"setpriv --reuid={games.pw_uid} --regid={games.pw_gid} --clear-groups"
    for name in PROGRAMS:
        own = box.program(name)
        text = f'#!/bin/sh\nexec {who} {shlex.quote(str(own))} "$@"\n'
        if box.root is not None:
            # Only root may enter another root; who one is inside is said as one enters.
            enters = f"/chroot --userspec={games.pw_uid}:{games.pw_gid} "
            text = own.read_text().replace("/chroot ", enters)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    policy = box_policy(box)
    terms = policy.slurm.model_copy(update={"programs": str(tmp_path)})
    with open_cluster(policy.model_copy(update={"slurm": terms})) as cluster:
        yield cluster
    box.run("scontrol", "update", "PartitionName=main", "Hidden=NO")


def test_a_hidden_partition_is_no_empty_queue(box: SlurmCluster, as_games: Cluster) -> None:
    """Slurm keeps silent about its jobs, its nodes and itself, unless it is told to tell all.

    vpenso/prometheus-slurm-exporter #20: a lab's own partition was missing from every figure.
    """
    job = box.submit("exec sleep 600", "--gres=gpu:1", "--account=vision", "--time=5")
    box.wait_for_state(job, "RUNNING")
    open_to_all = Reader(as_games).read(1.0)
    box.run("scontrol", "update", "PartitionName=main", "Hidden=YES")
    hidden = Reader(as_games).read(1.0)
    assert [each.job.job_id for each in hidden.jobs if each.job.holds] == [job]
    assert [replace(each, memory=0.0) for each in hidden.nodes] == [
        replace(each, memory=0.0) for each in open_to_all.nodes
    ]
    assert hidden.tiers == open_to_all.tiers == {"main": 1}
    box.run("scancel", str(job))


def test_who_is_an_operator_is_known(as_games: Cluster) -> None:
    """To others Slurm may tell less than all (PrivateData), and does not say so."""
    assert is_operator(as_games, "root")
    assert not is_operator(as_games, "games")
    assert not is_operator(as_games, "nobody-of-that-name")


def test_what_slurm_does_not_let_the_scheduler_do_is_told(
    box: SlurmCluster, as_games: Cluster, tmp_path: Path
) -> None:
    """One that is no operator cannot have another's job wait for its window."""
    clock = dt.datetime.now(zoneinfo.ZoneInfo("Europe/Berlin"))
    opens, closes = ((clock + dt.timedelta(hours=n)).strftime("%H:00") for n in (3, 4))
    window = {"name": "later", "from": opens, "to": closes, "running": "finish"}
    comment = "--comment=gpuwarden:token-of-r:window=later"
    words = ("--gres=gpu:1", "--account=vision", "--time=9", "--begin=now+1hour", comment)
    job = box.submit("exec sleep 600", *words)
    context = Context(state=tmp_path, clock=WallClock(), wake=lambda: None)
    driver = SlurmDriver(box_policy(box, windows=[window]), context, as_games)
    driver.start(time.time())
    driver.tick(time.time())
    told = {problem.code: problem.words for problem in driver.problems()}
    assert f"{job} (" in told["commands_refused"]
    assert "adminlevel=Operator" in told["commands_refused"]
    box.run("scancel", str(job))
    driver.tick(time.time())
    assert "commands_refused" not in {problem.code for problem in driver.problems()}
