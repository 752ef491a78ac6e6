from __future__ import annotations

from dataclasses import replace

from gpuwarden.exporter.lineages import Lineages
from gpuwarden.exporter.processes import Launchers, Process

SSHD = Process(10, 1, 10, 10, 0, "S", 10, 0, "sshd", "/s", 0, 1)
ROOT = Process(20, 10, 20, 20, 0, "S", 20, 1000, "python", "/a", 0, 1)
CHILD = replace(ROOT, pid=21, ppid=20, start_ticks=21)
GRANDCHILD = replace(ROOT, pid=22, ppid=21, start_ticks=22)


def _by_pid(*processes: Process) -> dict[int, Process]:
    return {process.pid: process for process in processes}


def test_a_daemonised_grandchild_keeps_its_job() -> None:
    """A process belongs to its first root after its parents ended, in whatever session."""
    lineages = Lineages(Launchers())
    lineages.update(_by_pid(SSHD, ROOT, CHILD, GRANDCHILD))
    orphan = replace(GRANDCHILD, ppid=1, session=22)
    now = _by_pid(SSHD, orphan)
    lineages.update(now)
    assert lineages.root(orphan, now).identity == ROOT.identity
    later = replace(orphan, pid=30, ppid=22, start_ticks=30)
    now = _by_pid(SSHD, orphan, later)
    lineages.update(now)
    assert lineages.root(later, now).identity == ROOT.identity


def test_a_recycled_pid_inherits_nothing() -> None:
    """A process that took over a pid belongs to its own parents."""
    lineages = Lineages(Launchers())
    lineages.update(_by_pid(SSHD, ROOT, CHILD))
    recycled = replace(CHILD, ppid=10, start_ticks=99)
    now = _by_pid(SSHD, ROOT, recycled)
    lineages.update(now)
    assert lineages.root(recycled, now).identity == recycled.identity


def test_a_process_that_was_given_to_somebody_else() -> None:
    """A child that a service set up for another user is no part of the service's job."""
    spawner = replace(ROOT, uid=0)
    lineages = Lineages(Launchers())
    lineages.update(_by_pid(SSHD, spawner, replace(CHILD, uid=0)))
    now = _by_pid(SSHD, spawner, CHILD)
    lineages.update(now)
    assert lineages.root(CHILD, now).identity == CHILD.identity


def test_a_tree_that_starts_while_pids_begin_anew() -> None:
    """A child with a lower pid than its parent's, started in the same tick, is its parent's."""
    parent = replace(ROOT, pid=32767)
    child = replace(ROOT, pid=301, ppid=32767)
    grandchild = replace(ROOT, pid=300, ppid=301)
    lineages = Lineages(Launchers())
    now = _by_pid(grandchild, child, parent, SSHD)
    lineages.update(now)
    assert {lineages.root(item, now).pid for item in (child, grandchild)} == {32767}


def test_a_loop_of_parents() -> None:
    """Processes that were read while pids changed hands may be each other's parents."""
    one, other = replace(ROOT, ppid=21), replace(ROOT, pid=21, ppid=20)
    lineages = Lineages(Launchers())
    now = _by_pid(one, other)
    lineages.update(now)
    assert {lineages.root(item, now).pid for item in (one, other)} <= {20, 21}


def test_the_same_roots_whenever_it_starts() -> None:
    """An exporter that starts late finds the same roots, however the pids are ordered."""
    lineages = Lineages(Launchers())
    now = _by_pid(GRANDCHILD, CHILD, ROOT, SSHD)
    lineages.update(now)
    assert {lineages.root(item, now).pid for item in (ROOT, CHILD, GRANDCHILD)} == {20}
