"""Which root each process belongs to, from its first sight to its end.

A tree as it is now forgets: a process whose parent ends is handed to another, and would become a
job of its own. So the root of a process is fixed when it is first seen, by its parent then, and
kept while it lives, in whatever session and under whatever parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.exporter.processes import Process, job_root

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.exporter.processes import Launchers

Identity = tuple[int, int]


class Lineages:
    """The roots of all processes of a node."""

    def __init__(self, launchers: Launchers) -> None:
        """Begin knowing nobody.

        Args:
            launchers: what starts jobs on this node.
        """
        self._launchers = launchers
        self._roots: dict[Identity, Process] = {}

    def recollect(self) -> dict[Identity, Process]:
        """Process -> its root, of all that are known."""
        return dict(self._roots)

    def recall(self, roots: Mapping[Identity, Process]) -> None:
        """Take over what an earlier exporter had seen first.

        Args:
            roots: process -> its root.
        """
        self._roots = dict(roots)

    def update(self, processes: Mapping[int, Process]) -> None:
        """Learn of new processes and forget dead ones.

        Args:
            processes: all processes, by pid.
        """
        known = self._roots
        roots: dict[Identity, Process] = {}
        fresh = []
        for process in processes.values():
            root = known.get(process.identity)
            if root is None:
                fresh.append(process)
            else:
                roots[process.identity] = root
        for process in fresh:
            # Parents first, so that a whole new tree inherits. Neither times nor pids tell who they
            # are: a tree may start within one tick, while the pids begin anew.
            for item in reversed(_unrooted(process, processes, roots)):
                parent = processes.get(item.ppid)
                inherited = roots.get(parent.identity) if parent is not None else None
                if parent is None or inherited is None or not self._inherits(item, parent):
                    roots[item.identity] = item
                else:
                    roots[item.identity] = inherited
        self._roots = roots

    def _inherits(self, process: Process, parent: Process) -> bool:
        return (
            parent.uid == process.uid
            and parent.cgroup == process.cgroup
            and parent.start_ticks <= process.start_ticks
            and not self._launchers.includes(parent)
        )

    def root(self, process: Process, processes: Mapping[int, Process]) -> Process:
        """The root that a process belongs to.

        A process that changed its owner or its cgroup since it was first seen (set up by a service
        for somebody else) is no longer part of what started it: its root is found anew, and kept.

        Args:
            process: a process of the last `update`.
            processes: all processes, by pid.
        """
        root = self._roots.get(process.identity, process)
        if (root.uid, root.cgroup) == (process.uid, process.cgroup):
            return root
        if root.identity == process.identity or process.pid not in processes:
            root = process
        else:
            root = job_root(processes, process.pid, launchers=self._launchers)
        self._roots[process.identity] = root
        return root


def _unrooted(
    process: Process, processes: Mapping[int, Process], roots: Mapping[Identity, Process]
) -> list[Process]:
    """A process and its ancestors, up to the first whose root is known."""
    found: list[Process] = []
    seen: set[int] = set()
    at: Process | None = process
    # A race can show a loop.
    while at is not None and at.identity not in roots and at.pid not in seen:
        found.append(at)
        seen.add(at.pid)
        at = processes.get(at.ppid)
    return found
