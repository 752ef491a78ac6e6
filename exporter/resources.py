"""What a job's process tree uses of the node: what tells a starved card from an idle one.

Counters of a tree are not the sum of its processes' counters: a process that ends takes its own
away, and its parent gains them when it waits for it. `Growth` turns the sums into what only grows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.exporter.jobs import Resources
from gpuwarden.exporter.processes import CLOCK_TICKS, PROC, arguments, read_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gpuwarden.exporter.processes import Process

MAX_TREE = 4096
"""Processes of one job whose I/O is read; a larger tree is a fork bomb."""
LONGEST_GAP_SECONDS = 600.0
"""Over a longer time without a reading, nothing is known of when a tree was at work in it."""
LONGEST_SAMPLE_SECONDS = 60.0
"""A state stands for no longer than this: snapshots lie no further apart."""
REREAD_SNAPSHOTS = 15
"""After so many readings the I/O of a process that does nothing is read all the same."""
PRESSURE_RESOURCES = ("cpu", "io", "memory")
CGROUPS = Path("/sys/fs/cgroup")
WORKER_COMM = "pt_data_worker"
"""What torch names its data loaders' workers since 2.6."""

_STATES = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "blocked",
    "T": "stopped",
    "t": "stopped",
    "Z": "zombie",
}
STATES = ("running", "sleeping", "blocked", "stopped", "zombie")
_SOME_TOTAL = re.compile(rb"^some .*\btotal=([0-9]{1,20})\b", re.MULTILINE)
_READ_BYTES = re.compile(rb"^read_bytes: ([0-9]{1,20})$", re.MULTILINE)
_TRACKERS = ("resource_tracker", "semaphore_tracker", "forkserver")


@dataclass(slots=True)
class Growth:
    """A counter over a tree whose members come and go; it begins with what they had by then."""

    total: int = 0
    last: int | None = None

    def add(self, reading: int, *, at_least: int = 0) -> int:
        """Take the tree's sum now; give how much it grew.

        A sum that fell lost a member that nobody waited for, and counting goes on from there.

        Args:
            reading: the sum.
            at_least: what it is known to have grown by, whatever left it.
        """
        grown = reading if self.last is None else max(0, reading - self.last, at_least)
        self.last = reading
        self.total += grown
        return grown


@dataclass(slots=True)
class Usage:
    """What is kept of a job's tree between two snapshots.

    Attributes:
        cpu: clock ticks.
        ticks: clock ticks of each process alone, by identity.
        read: bytes.
        io_wait: seconds.
        measured_at: monotonic time of the last reading; over a restart of the exporter too.
        trackers: processes found to be no loader worker, by identity.
        reads: pid -> the process as it was when its bytes were read, and how many these were.
        readings: how often the tree was read.
    """

    cpu: Growth = field(default_factory=Growth)
    ticks: dict[tuple[int, int], int] = field(default_factory=dict)
    read: Growth = field(default_factory=Growth)
    io_wait: float = 0.0
    measured_at: float | None = None
    trackers: dict[tuple[int, int], bool] = field(default_factory=dict)
    reads: dict[int, tuple[Process, int]] = field(default_factory=dict)
    readings: int = 0


def measure(
    usage: Usage,
    tree: Collection[Process],
    *,
    holders: Collection[int],
    now: float,
    proc: Path = PROC,
) -> tuple[Resources, float | None]:
    """Read a tree and bring its counters forward.

    Args:
        usage: the job's counters.
        tree: its live processes.
        holders: pids of those that hold a card or run the training loop.
        now: monotonic time.
        proc: where procfs is mounted.

    Returns:
        What it uses, and the share of one core that it used since the last reading (None for the
        first, and where that is too long ago).
    """
    # A tree that keeps losing members would else look idle, however busy the others are.
    alone = sum(max(0, item.cpu_ticks - usage.ticks.get(item.identity, 0)) for item in tree)
    usage.ticks = {item.identity: item.cpu_ticks for item in tree}
    grown = usage.cpu.add(
        sum(item.cpu_ticks + item.children_ticks for item in tree), at_least=alone
    )
    elapsed = None if usage.measured_at is None else max(0.0, now - usage.measured_at)
    share = grown / CLOCK_TICKS / elapsed if elapsed and elapsed <= LONGEST_GAP_SECONDS else None
    if elapsed and elapsed <= LONGEST_SAMPLE_SECONDS:
        usage.io_wait += elapsed * sum(1 for item in tree if item.state == "D")
    usage.measured_at = now
    read = _read_bytes(usage, tree, proc)
    if read is not None:
        usage.read.add(read)
    states = dict.fromkeys(STATES, 0)
    for item in tree:
        if item.state in _STATES:
            states[_STATES[item.state]] += 1
    resources = Resources(
        cpu_seconds=usage.cpu.total / CLOCK_TICKS,
        read_bytes=None if read is None else usage.read.total,
        io_wait_seconds=usage.io_wait,
        threads=sum(item.threads for item in tree),
        loader_workers=_loader_workers(usage, tree, holders=holders, proc=proc),
        resident_bytes=sum(item.resident_bytes for item in tree),
        states=states,
    )
    return resources, share


def _read_bytes(usage: Usage, tree: Iterable[Process], proc: Path) -> int | None:
    """Bytes that a tree read from storage, ended and waited-for children included.

    Who has done nothing since the last reading has read nothing, or as little as is read within one
    clock tick; that is made up for every fifteenth time.
    """
    usage.readings += 1
    reads: dict[int, tuple[Process, int]] = {}
    for number, item in enumerate(tree):
        if number >= MAX_TREE:
            break
        before = usage.reads.get(item.pid)
        if (
            before is not None
            and before[0] is item
            and (usage.readings + item.pid) % REREAD_SNAPSHOTS
        ):
            reads[item.pid] = before
            continue
        try:
            content = read_record(f"{proc}/{item.pid}/io") or b""
        except OSError:
            continue
        match = _READ_BYTES.search(content)
        if match is not None:
            reads[item.pid] = (item, int(match[1]))
    usage.reads = reads
    return sum(value for _, value in reads.values()) if reads else None


def _loader_workers(
    usage: Usage, tree: Iterable[Process], *, holders: Collection[int], proc: Path
) -> int:
    """Processes that look like workers of a data loader.

    torch names them since 2.6; before, they are children of a training process under its name
    that hold no card themselves.
    """
    by_pid = {item.pid: item for item in tree}
    count = 0
    trackers: dict[tuple[int, int], bool] = {}
    for item in by_pid.values():
        if item.pid in holders or item.ended:
            continue
        if item.comm == WORKER_COMM:
            count += 1
            continue
        parent = by_pid.get(item.ppid)
        if parent is None or item.ppid not in holders or item.comm != parent.comm:
            continue
        tracker = usage.trackers.get(item.identity)
        if tracker is None:
            words = " ".join(arguments(item.pid, proc)[:4])
            tracker = any(word in words for word in _TRACKERS)
        trackers[item.identity] = tracker
        count += not tracker
    usage.trackers = trackers
    return count


def pressure(folder: Path, suffix: str = "") -> dict[str, float]:
    """Stall seconds by resource (PSI, some); resources that the kernel does not account are absent.

    Args:
        folder: /proc/pressure, or a cgroup's folder.
        suffix: `.pressure` for a cgroup.
    """
    found = {}
    for resource in PRESSURE_RESOURCES:
        try:
            content = read_record(f"{folder}/{resource}{suffix}") or b""
        except OSError:
            continue
        match = _SOME_TOTAL.search(content)
        if match is not None:
            found[resource] = int(match[1]) / 1e6
    return found


def cgroup_pressures(
    cgroups: Iterable[str], root: Path = CGROUPS
) -> Mapping[str, dict[str, float]]:
    """Pressure of each cgroup (v2), read once for all jobs in it; the root is the node's."""
    found = {}
    for cgroup in set(cgroups):
        path = cgroup.lstrip("/")
        if path and "\0" not in path and ".." not in path.split("/"):
            found[cgroup] = pressure(root / path, ".pressure")
    return found
