"""All processes of a node, of which only those that matter are read with each snapshot.

Whoever is on a card belongs to a tree, so every process must be known; but most of a node's
processes have nothing to do with its cards. Those are told from strangers by the inode of their
folder, which the listing of /proc gives for nothing: a process that takes over a pid gets another
one. What can be known of a process without reading it is that it is the same.

Read are, with each snapshot:

- strangers, whole, and their ancestors once more: a job's root is found by what they are now
- the members of jobs: what they do
- every 15th time everybody: owner and cgroup of whoever is in no job may be as old as that

Others can put a process on a card into another cgroup without a trace in what it does; that is
looked for every fifth time, and whenever it runs another program.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuwarden.exporter.processes import MAX_DEPTH, MAX_PROCESSES, PROC, read_again
from gpuwarden.exporter.shortages import is_shortage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from gpuwarden.exporter.processes import Process

REFRESH_CENSUSES = 15
"""After so many, owner and cgroup of every process are read anew."""
FRESH_CENSUSES = 5
"""After so many, owner and cgroup of each process on a card are read anew; at once if it is new
there, or execs."""


class Census:
    """Who is there; kept from one snapshot to the next."""

    def __init__(self, proc: Path = PROC) -> None:
        """Begin knowing nobody.

        Args:
            proc: where procfs is mounted.
        """
        self._proc = proc
        self._processes: dict[int, Process] = {}
        self._inodes: dict[int, int] = {}
        self._watched: frozenset[int] = frozenset()
        self._on_cards: frozenset[int] = frozenset()
        self._current: set[int] = set()
        self._taken = 0

    def take(self, on_cards: Collection[int]) -> dict[int, Process]:
        """Every process, by pid; those that may not be seen are left out.

        Args:
            on_cards: pids of processes on cards.

        Raises:
            OSError: /proc cannot be read, or there is no descriptor or memory left to read it all:
                whoever is left out would be gone to those who remember.
        """
        self._taken += 1
        if self._taken % REFRESH_CENSUSES == 0:
            return self._take_whole()
        known, inodes = self._processes, self._inodes
        matter = self._watched.union(on_cards)
        found: dict[int, Process] = {}
        seen: dict[int, int] = {}
        strangers: list[Process] = []
        self._current = set()
        for pid, inode in self._listed():
            process = known.get(pid)
            if process is not None and inodes[pid] != inode:
                process = None
            if process is None or pid in matter:
                fresh = pid in on_cards and (
                    pid not in self._on_cards or (self._taken + pid) % FRESH_CENSUSES == 0
                )
                now = self._read(pid, process, fresh=fresh)
                if now is None:
                    continue
                if process is None or now.identity != process.identity:
                    # The other one has come since the listing was made.
                    strangers.append(now)
                elif now.comm != process.comm and pid in on_cards:
                    now = self._read(pid, process, fresh=True) or now
                if process is not None and _moved(process, now):
                    # Jobs move as a whole: with its root's old cgroup a child would be a job of its
                    # own.
                    return self._take_whole()
                process = now
            found[pid] = process
            seen[pid] = inode
        self._processes, self._inodes, self._on_cards = found, seen, frozenset(on_cards)
        if any(self._renew_ancestors(stranger) for stranger in strangers):
            return self._take_whole()
        return found

    def watch(self, members: Iterable[int]) -> bool:
        """Have the members of jobs read with each census from now on, and those not yet read now.

        Args:
            members: their pids, of the last census.

        Returns:
            Whether any were read now: then what `take` gave has changed.

        Raises:
            OSError: as `take`.
        """
        self._watched = frozenset(members)
        late = self._watched - self._current
        for pid in late:
            known = self._processes.get(pid)
            now = self._read(pid, known, fresh=False) if known is not None else None
            if known is not None and now is not None and now.identity == known.identity:
                # One that has ended since the census is as it was then.
                self._processes[pid] = now
        return bool(late)

    # -----------------------------------------------------------------------------------------

    def _listed(self) -> list[tuple[int, int]]:
        """(pid, inode of its folder) of everybody."""
        with os.scandir(self._proc) as entries:
            listed = [
                (int(entry.name), entry.inode()) for entry in entries if entry.name.isdecimal()
            ]
        return listed[:MAX_PROCESSES]

    def _take_whole(self) -> dict[int, Process]:
        self._processes, self._inodes, self._current = {}, {}, set()
        for pid, inode in self._listed():
            process = self._read(pid, None, fresh=False)
            if process is not None:
                self._processes[pid] = process
                self._inodes[pid] = inode
        return self._processes

    def _read(self, pid: int, known: Process | None, *, fresh: bool) -> Process | None:
        try:
            process = read_again(f"{self._proc}/{pid}", known=known, fresh=fresh)
        except OSError as error:
            if is_shortage(error):
                raise
            return None
        if process is not None:
            self._current.add(pid)
        return process

    def _renew_ancestors(self, stranger: Process) -> bool:
        """Read a stranger's ancestors once more; whether a member of a job has moved."""
        pid = stranger.ppid
        for _ in range(MAX_DEPTH):
            known = self._processes.get(pid)
            # The first two are part of no job, whatever they are.
            if known is None or pid <= 2 or pid in self._current:
                break
            now = self._read(pid, known, fresh=True)
            if now is None:
                break
            if pid in self._watched and _moved(known, now):
                return True
            self._processes[pid] = now
            pid = now.ppid
        return False


def _moved(before: Process, now: Process) -> bool:
    """Whether a process has another owner or cgroup than before."""
    return before.identity == now.identity and (before.uid, before.cgroup) != (now.uid, now.cgroup)
