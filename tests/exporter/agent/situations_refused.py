"""Situations of the table in which nobody may be ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.exporter.agent.situations import (
    Case,
    World,
    roots_situation,
    situation,
    write,
)
from tests.servers import until

from gpuwarden.exporter.processes import boot_id

if TYPE_CHECKING:
    from tests.exporter.agent.nodes import Job

# ---------------------------------------------------------------------------------------------
# What is refused


def _refused(job: Job, reason: str, **about: Any) -> Case:
    return Case(about.pop("job_id", job.job_id), refused=reason, spared=job.pids, **about)


@roots_situation
def a_recycled_pid(world: World) -> Case:
    """The root's pid is another process's by now."""
    job = world.jobs.start("polite")
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{job.pid}").exists())
    new = world.jobs.start("impostor", job.pid)
    assert new.pids[1] == job.pid
    world.hold(job.pid)
    return Case(job.job_id, refused="identity", spared=new.pids)


@situation
def gone_already(world: World) -> Case:
    """It has left by itself."""
    job = world.jobs.start("polite")
    world.hold(job.pid)
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{job.pid}").exists())
    return Case(job.job_id, refused="gone")


@situation
def a_holder_without_a_process(world: World) -> Case:
    """The card is held by a pid that /proc does not show."""
    job = world.jobs.start("polite")
    world.hold(4_100_000, ghost=1)
    return _refused(job, "no_gpu")


@roots_situation
def an_mps_server(world: World) -> Case:
    """The holder is the MPS server."""
    job = world.jobs.start("posing", "nvidia-cuda-mps-server"[:15])
    world.hold(job.pid)
    return _refused(job, "protected")


@roots_situation
def a_service_of_roots(world: World) -> Case:
    """A systemd service of root's."""
    job = world.jobs.start("polite")
    folder = world.cgroup(f"gpuwarden-{job.pid}.service")
    write(folder / "cgroup.procs", str(job.pid))
    world.hold(job.pid)
    return _refused(job, "protected")


@situation
def on_the_protect_list(world: World) -> Case:
    """It is on the node's protect list."""
    world.reopen(protect=frozenset({"tensorboard"}))
    job = world.jobs.start("posing", "tensorboard")
    world.hold(job.pid)
    return _refused(job, "protected")


@situation
def a_part_of_a_job(world: World) -> Case:
    """The request names a child, not the root."""
    job = world.jobs.start("family")
    world.hold(job.pids[1])
    return _refused(job, "not_root", job_id=job.part(job.pids[1]))


@situation
def it_carries_others(world: World) -> Case:
    """A server below it started another job."""
    job = world.jobs.start("carrier")
    world.hold(job.pid)
    return _refused(job, "carries_others")


@situation
def the_kill_switch(world: World) -> Case:
    """The kill switch is thrown."""
    job = world.jobs.start("polite")
    world.hold(job.pid)
    world.node.kill_switch.touch()
    return _refused(job, "kill_switch")


@roots_situation
def of_a_pod(world: World) -> Case:
    """It runs in a pod's cgroup."""
    job = world.jobs.start("polite")
    name = f"kubepods-pod8f4f5a0c_0000_4000_8000_{job.pid:012d}.slice"
    write(world.cgroup(name) / "cgroup.procs", str(job.pid))
    world.hold(job.pid)
    return _refused(job, "not_mine")


@situation
def of_another_boot(world: World) -> Case:
    """The same pid and start, of another boot."""
    job = world.jobs.start("polite")
    world.hold(job.pid)
    return _refused(job, "gone", job_id=job.job_id.replace(boot_id()[:8], "00000000"))
