"""Processes of this host by identity, not by number: pid, start ticks and boot."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PROC = Path("/proc")
_ROUNDS = 5
"""Rounds of killing: what forks meanwhile is found in the next."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that ever ran on this boot.

    Attributes:
        pid: its number.
        ticks: field 22 of its stat line.
    """

    pid: int
    ticks: int


@dataclass(frozen=True, slots=True)
class _Row:
    parent: int
    session: int
    ticks: int
    dead: bool


class ProcessTable:
    """Every process as of one moment.

    Args:
        rows: pid -> what its stat line says.
    """

    def __init__(self, rows: dict[int, _Row]) -> None:
        self._rows = rows

    @classmethod
    def read(cls) -> ProcessTable:
        """The processes of now."""
        rows = {}
        for path in PROC.iterdir():
            if path.name.isdigit() and (row := _row(int(path.name))) is not None:
                rows[int(path.name)] = row
        return cls(rows)

    def alive(self, process: ProcessId) -> bool:
        """Whether it runs still; one that waits to be reaped does not."""
        row = self._rows.get(process.pid)
        return row is not None and row.ticks == process.ticks and not row.dead

    def tree(self, roots: Iterable[ProcessId]) -> frozenset[ProcessId]:
        """Everything that descends from processes, or is in their sessions; they included."""
        living = {root.pid for root in roots if self._is(root)}
        found = set(living)
        children: dict[int, list[int]] = {}
        for pid, row in self._rows.items():
            children.setdefault(row.parent, []).append(pid)
            if row.session in living:
                found.add(pid)
        todo = list(found)
        while todo:
            for child in children.get(todo.pop(), ()):
                if child not in found:
                    found.add(child)
                    todo.append(child)
        return frozenset(ProcessId(pid, self._rows[pid].ticks) for pid in found)

    def _is(self, process: ProcessId) -> bool:
        row = self._rows.get(process.pid)
        return row is not None and row.ticks == process.ticks


def _row(pid: int) -> _Row | None:
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    # A program whose first thread has ended shows Z while others of its threads go on.
    dead = fields[0] in {"Z", "X"} and int(fields[17]) <= 1
    return _Row(int(fields[1]), int(fields[3]), int(fields[19]), dead)


def boot_id() -> str:
    """Of this boot of the kernel."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Signal a process through a descriptor of its own; returns whether it was there."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor is of whoever has the number now: compared before it is used.
        row = _row(process.pid)
        if row is None or row.ticks != process.ticks:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
            return True
        return False
    finally:
        os.close(handle)


def send_all(roots: Iterable[ProcessId], number: signal.Signals, *, spare: int) -> int:
    """Signal whole trees; returns how many processes were there.

    Args:
        roots: of the trees.
        number: the signal; SIGKILL is sent again until nothing is left, some rounds at most.
        spare: pid that is never signalled: the stub, which is to write how its job ended.
    """
    known = tuple(roots)
    reached = 0
    for _round in range(_ROUNDS if number is signal.SIGKILL else 1):
        tree = [each for each in ProcessTable.read().tree(known) if each.pid not in {spare, 1}]
        hit = sum(send(each, number) for each in tree)
        reached += hit
        if not hit:
            break
    return reached
