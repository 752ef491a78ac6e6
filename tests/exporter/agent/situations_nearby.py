"""Situations of the table in which others are nearby, or that lie in how it is asked for."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.exporter.agent.nodes import HERE, PYTHON
from tests.exporter.agent.situations import (
    KILL,
    TERM,
    Case,
    World,
    ends,
    identities,
    roots_situation,
    situation,
    write,
)
from tests.servers import until

from gpuwarden.agent_api import Action, ActionReport
from gpuwarden.exporter.processes import read_process

if TYPE_CHECKING:
    from pathlib import Path

# ---------------------------------------------------------------------------------------------
# Others nearby


@situation
def two_on_a_card(world: World) -> Case:
    """Two jobs of one user on one card."""
    job, other = world.jobs.start("family"), world.jobs.start("family")
    world.hold(job.pid, other.pid)
    return ends(job, KILL, spared=other.pids)


@roots_situation
def another_users_child(world: World) -> Case:
    """A child that runs as another user is spared."""
    job = world.jobs.start("other_user")
    world.hold(job.pid)
    return Case(job.job_id, {job.pid: TERM}, spared=job.pids[1:])


@situation
def below_sudo(world: World) -> Case:
    """What sudo started; sudo itself stays."""
    return _hosted(world, "sudo")


@situation
def notebook_kernel(world: World) -> Case:
    """A notebook's kernel; server and other kernel stay."""
    return _hosted(world, "jupyter-lab")


@situation
def kernel_of_a_module(world: World) -> Case:
    """A kernel of `python -m jupyterlab`, which has no name of its own."""
    host = world.jobs.start("notebooks")
    server, pid, other = host.pids
    world.hold(pid, other)
    return Case(host.part(pid), {pid: TERM}, spared=(server, other))


@situation
def below_tmux(world: World) -> Case:
    """A window of tmux; tmux and the other window stay."""
    return _hosted(world, "tmux: server")


@situation
def below_a_real_tmux(world: World) -> Case:
    """A window of a running tmux, on a terminal of its own."""
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("needs tmux")
    folder = world.jobs.folder
    reports = [folder / f"window-{number}" for number in range(2)]
    about = {
        **os.environ,
        "GPUWARDEN_TEST": world.jobs.token,
        "TMUX_TMPDIR": str(folder),
        "TERM": "xterm",
    }
    about.pop("TMUX", None)
    for words, report in zip((["new-session", "-d"], ["new-window", "-d"]), reports, strict=True):
        line = shlex.join([*PYTHON, str(HERE / "workloads.py"), "polite", str(report)])
        subprocess.run(
            [tmux, "-f", "/dev/null", *words, f"exec {line}"], env=about, check=True, timeout=30
        )
    first, other = (
        world.jobs.started(int(until(lambda path=path: _first(path))), path) for path in reports
    )
    world.hold(first.pid, other.pid)
    server = read_process(first.pid)
    assert server is not None
    return Case(first.job_id, {first.pid: TERM}, spared=(server.ppid, other.pid))


def _first(report: Path) -> int:
    return int(json.loads(report.read_text())[0]) if report.exists() else 0


@situation
def below_screen(world: World) -> Case:
    """A window of screen; screen and the other window stay."""
    return _hosted(world, "SCREEN")


@situation
def below_sshd(world: World) -> Case:
    """A session of sshd; sshd and the other session stay."""
    return _hosted(world, "sshd")


def _hosted(world: World, name: str) -> Case:
    host = world.jobs.start("hosted", name)
    server, pid, other = host.pids
    world.hold(pid, other)
    return Case(host.part(pid), {pid: TERM}, spared=(server, other))


@situation
def a_protected_child(world: World) -> Case:
    """A child on the node's protect list is spared."""
    world.reopen(protect=frozenset({"gw-service"}))
    job = world.jobs.start("service")
    world.hold(job.pids[2])
    return Case(job.job_id, {job.pid: TERM, job.pids[2]: KILL}, spared=(job.pids[1],))


@roots_situation
def moved_before(world: World) -> Case:
    """A child that its owner moved to another cgroup before is spared."""
    job = world.jobs.start("family")
    write(world.cgroup(f"moved-{job.pid}.scope") / "cgroup.procs", str(job.pids[1]))
    world.hold(job.pid)
    return Case(job.job_id, {job.pid: KILL, job.pids[2]: KILL}, spared=(job.pids[1],))


# ---------------------------------------------------------------------------------------------
# How it is asked for


@situation
def two_requests_at_once(world: World) -> Case:
    """Two decisions at the same moment are one ladder."""
    job = world.jobs.start("stubborn")
    world.hold(job.pid)

    def ask(action: Action) -> ActionReport:
        requests = [world.node.engine.request(job.job_id, action, grace=1.0) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            taken = list(pool.map(world.node.actions.submit, requests))
        first, second = (world.node.outcome(report.decision_id) for report in taken)
        if action is Action.TERMINATE:
            assert first == second
        return first

    return ends(job, KILL, ask=ask)


@situation
def the_agent_is_killed(world: World) -> Case:
    """The agent is killed between SIGTERM and SIGKILL, and started anew."""
    job = world.jobs.start("family")
    world.hold(job.pid)
    agent, engine = world.agent, world.node.engine

    def ask(action: Action) -> ActionReport:
        # Longer than a start of the agent: its grace goes on meanwhile.
        request = engine.request(job.job_id, action, grace=2.5)
        agent.post(engine, request)
        if action is Action.TERMINATE:
            agent.outcome(request.decision_id, "sigterm")
            agent.stop(signal.SIGKILL)
            assert set(identities(job.pids)) == set(job.pids)
            agent.start()
        return agent.outcome(request.decision_id)

    agent.start()
    return ends(job, KILL, ask=ask)
