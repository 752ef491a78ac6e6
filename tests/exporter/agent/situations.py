"""What a job may be like when it has to end: the table of docs/operations.md, as real processes.

Each function sets one situation up and says what must come of it; its docstring is its row's name.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.exporter.agent.nodes import cgroup_v2
from tests.servers import until

from gpuwarden.exporter.processes import read_process
from gpuwarden.exporter.simulated import GIB
from gpuwarden.job_files import request_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.exporter.agent.nodes import AgentProcess, Cards, Job, Jobs, Node

    from gpuwarden.agent_api import Action, ActionReport

TERM, KILL = "SIGTERM", "SIGKILL"


@dataclass
class World:
    """What a situation is made of."""

    node: Node
    jobs: Jobs
    cards: Cards
    agent: AgentProcess
    cgroups: list[Path] = field(default_factory=list)

    def cgroup(self, name: str) -> Path:
        """A cgroup v2 of a name; it goes with the test."""
        mount = cgroup_v2()
        if mount is None:
            pytest.skip("needs a cgroup v2 that can be written")
        folder = mount / name
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self.cgroups += missing
        return folder

    def hold(self, *pids: int, **about: Any) -> None:
        """Put processes on a card."""
        for pid in pids:
            self.cards.hold(pid, 8 * GIB, **about)

    def reopen(self, **about: Any) -> None:
        """Start the agent anew with other settings."""
        self.node.close()
        for name, value in about.items():
            setattr(self.node, name, value)
        self.node.open()


@dataclass(frozen=True)
class Case:
    """One situation, set up.

    Attributes:
        job_id: what is to be ended.
        ends: how each process must end, by pid; empty where the agent must refuse.
        refused: the reason of the refusal.
        spared: pids that must be as they were afterwards.
        about: more of the request.
        open: whether further processes may turn up, which must end too.
        during: called once SIGTERM is sent.
        outcome: of the whole.
        ask: how it is asked for, where that is the situation.
    """

    job_id: str
    ends: dict[int, str] = field(default_factory=dict)
    refused: str = ""
    spared: tuple[int, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    open: bool = False
    during: Callable[[], None] | None = None
    outcome: str = "reclaimed"
    ask: Callable[[Action], ActionReport] | None = None


SITUATIONS: dict[str, Callable[[World], Case]] = {}
ONLY_ROOT: set[str] = set()
"""Situations that take other users, namespaces, cgroups or pids of one's choice."""


def situation(function: Callable[[World], Case]) -> Callable[[World], Case]:
    """Put a situation into the table."""
    SITUATIONS[function.__name__] = function
    return function


def roots_situation(function: Callable[[World], Case]) -> Callable[[World], Case]:
    """Put a situation that only root can set up into the table."""
    ONLY_ROOT.add(function.__name__)
    return situation(function)


def ends(job: Job, by: str, **about: Any) -> Case:
    """All processes of a job end, each by the same."""
    return Case(job.job_id, dict.fromkeys(job.pids, by), **about)


def write(path: Path, content: str) -> None:
    """Write a file of the kernel's."""
    path.write_text(content)


def identities(pids: tuple[int, ...]) -> dict[int, tuple[int, bool]]:
    """Start ticks of each process, and whether it is stopped; those that ended are left out."""
    found = {pid: read_process(pid) for pid in pids}
    return {
        pid: (item.start_ticks, item.state == "T")
        for pid, item in found.items()
        if item is not None and not item.ended
    }


# ---------------------------------------------------------------------------------------------
# What asks to leave is followed, or not


@situation
def leaves_on_notice(world: World) -> Case:
    """Leaves as the request file has it, when its step is over."""
    job = world.jobs.start("listener", request_path(world.node.jobs, "run-1"))
    world.hold(job.pid)
    return ends(job, TERM, about={"run_id": "run-1", "grace": 600.0})


@situation
def leaves_on_sigterm(world: World) -> Case:
    """Leaves on SIGTERM."""
    job = world.jobs.start("polite")
    world.hold(job.pid)
    return ends(job, TERM, about={"grace": 600.0})


@situation
def saves_on_sigterm(world: World) -> Case:
    """Saves on SIGTERM with the help of a new child."""
    job = world.jobs.start("saver")
    world.hold(job.pid)
    return ends(job, TERM, about={"grace": 600.0})


@situation
def ignores_sigterm(world: World) -> Case:
    """Ignores SIGTERM."""
    job = world.jobs.start("stubborn")
    world.hold(job.pid)
    return ends(job, KILL)


@situation
def stopped_with_a_handler(world: World) -> Case:
    """Stopped (Ctrl-Z), its handler has to run."""
    job = world.jobs.start("stopped")
    until(lambda: job.states().get(job.pid) == "T")
    world.hold(job.pid)
    return ends(job, TERM, about={"grace": 600.0})


@roots_situation
def traced(world: World) -> Case:
    """Held stopped by a debugger, which is another job."""
    job = world.jobs.start("stubborn")
    debugger = world.jobs.start("tracer", job.pid)
    world.hold(job.pid)
    return ends(job, KILL, spared=debugger.pids)


@situation
def another_program(world: World) -> Case:
    """Becomes another program (exec) in the grace."""
    job = world.jobs.start("changer")
    world.hold(job.pid)
    return ends(job, KILL)


@roots_situation
def another_owner(world: World) -> Case:
    """Changes its user in the grace."""
    job = world.jobs.start("turncoat")
    world.hold(job.pid)
    return ends(job, KILL)


@roots_situation
def another_cgroup(world: World) -> Case:
    """Is moved to another cgroup in the grace."""
    job = world.jobs.start("stubborn")
    world.hold(job.pid)
    folder = world.cgroup(f"elsewhere-{job.pid}.scope")
    return ends(job, KILL, during=lambda: write(folder / "cgroup.procs", str(job.pid)), open=False)


@roots_situation
def goes_on_elsewhere(world: World) -> Case:
    """Moves to another cgroup on SIGTERM, and begets children there."""
    folder = world.cgroup(f"abroad-{world.jobs.process.pid}.scope")
    job = world.jobs.start("emigrant", folder)
    world.hold(job.pid)
    return ends(job, KILL, open=True)


@situation
def a_new_context(world: World) -> Case:
    """Opens a context on another card after SIGTERM."""
    job = world.jobs.start("stubborn")
    world.hold(job.pid)
    return ends(job, KILL, during=lambda: world.hold(job.pid, card=1))


@situation
def a_new_context_that_stays(world: World) -> Case:
    """Opens a context after SIGTERM that the driver keeps when it is dead."""
    world.reopen(proof_timeout=0.5)
    job = world.jobs.start("stubborn")
    world.hold(job.pid)
    return ends(
        job,
        KILL,
        during=lambda: world.hold(job.pid, card=1, linger=300),
        outcome="incomplete",
    )


# ---------------------------------------------------------------------------------------------
# Trees


@situation
def own_sessions(world: World) -> Case:
    """Children, one in a session of its own."""
    job = world.jobs.start("family")
    world.hold(job.pids[2])
    return ends(job, KILL)


@situation
def root_leaves_first(world: World) -> Case:
    """The root follows SIGTERM, its children do not."""
    job = world.jobs.start("deserted")
    world.hold(*job.pids[1:])
    root, *children = job.pids
    return Case(job.job_id, {root: TERM, **dict.fromkeys(children, KILL)})


@situation
def daemonised(world: World) -> Case:
    """A daemonised grandchild (double fork), as the engine saw it."""
    job = world.jobs.start("daemoniser")
    world.hold(job.pids[1])
    return ends(job, KILL, about={"seen": job.seen})


@situation
def root_gone(world: World) -> Case:
    """The root is gone, what it left holds the card."""
    job = world.jobs.start("rootless")
    world.hold(job.pids[1])
    seen = job.seen
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: job.pid not in job.states())
    return Case(job.job_id, {job.pids[1]: KILL}, about={"seen": seen})


@situation
def zombie_parent(world: World) -> Case:
    """A grandchild whose parent is a zombie."""
    job = world.jobs.start("orphaned")
    world.hold(job.pids[1])
    return Case(job.job_id, {job.pid: TERM, job.pids[1]: KILL})


@situation
def first_thread_gone(world: World) -> Case:
    """The first thread has ended, others live."""
    job = world.jobs.start("headless")
    world.hold(job.pids[1])
    return ends(job, KILL)


@situation
def loader_workers(world: World) -> Case:
    """A training and the workers of its DataLoader."""
    job = world.jobs.start("loaders")
    world.hold(job.pid)
    root, *workers = job.pids
    return Case(job.job_id, {root: TERM, **dict.fromkeys(workers, KILL)})


@situation
def a_launcher_and_ranks(world: World) -> Case:
    """Torchrun and two ranks on two cards."""
    job = world.jobs.start("ranks")
    world.hold(job.pids[1])
    world.hold(job.pids[2], card=1)
    return ends(job, TERM, about={"grace": 600.0})


@situation
def forks_while_it_ends(world: World) -> Case:
    """Forks sessions of their own, 500 a second."""
    job = world.jobs.start("forker")
    world.hold(job.pid)
    return ends(job, KILL, open=True)


@situation
def forks_on_sigterm(world: World) -> Case:
    """Each process begets its successor on SIGTERM."""
    job = world.jobs.start("relay")
    world.hold(job.pid)
    return ends(job, TERM, open=True)


@roots_situation
def first_of_a_container(world: World) -> Case:
    """The first process of a PID and mount namespace, deaf as such."""
    job = world.jobs.start("container")
    world.hold(job.pids[1])
    root, *inside = job.pids
    return Case(job.job_id, {root: TERM, **dict.fromkeys(inside, KILL)})


@roots_situation
def own_cgroup(world: World) -> Case:
    """A cgroup of its own (v2), ended by cgroup.kill too."""
    job = world.jobs.start("daemoniser")
    folder = world.cgroup(f"gpuwarden-{job.pid}.scope")
    for pid in job.pids:
        write(folder / "cgroup.procs", str(pid))
    world.hold(job.pids[1])
    return ends(job, KILL)
