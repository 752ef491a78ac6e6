from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gpuwarden.exporter.processes import CLOCK_TICKS, Process
from gpuwarden.exporter.resources import Growth, Usage, cgroup_pressures, measure, pressure

if TYPE_CHECKING:
    from pathlib import Path

ROOT = Process(20, 10, 20, 20, 0, "S", 20, 1000, "python", "/a", 100, 4, resident_bytes=4096)


def test_growth_only_grows() -> None:
    """What a member took away with it is not counted again, nor taken off."""
    growth = Growth()
    assert [growth.add(reading) for reading in (100, 130, 90, 100)] == [100, 30, 0, 10]
    assert growth.total == 140


def test_a_waited_for_child_changes_nothing() -> None:
    """CPU time that moves from a child to its parent is counted once."""
    usage = Usage()
    child = replace(ROOT, pid=21, ppid=20, cpu_ticks=50)
    measure(usage, [ROOT, child], holders={20}, now=0.0)
    found, share = measure(usage, [replace(ROOT, children_ticks=50)], holders={20}, now=2.0)
    assert (found.cpu_seconds, share) == (150 / CLOCK_TICKS, 0.0)


def test_a_tree_that_loses_members_is_not_idle() -> None:
    """What the others did counts, though a member that nobody waited for took its time away."""
    usage = Usage()
    lost = replace(ROOT, pid=21, ppid=1, cpu_ticks=10_000)
    measure(usage, [ROOT, lost], holders={20}, now=0.0)
    busy = replace(ROOT, cpu_ticks=100 + CLOCK_TICKS)
    found, share = measure(usage, [busy], holders={20}, now=2.0)
    assert share == pytest.approx(0.5)
    assert found.cpu_seconds == pytest.approx(10_100 / CLOCK_TICKS + 1)


def test_share_of_a_core() -> None:
    """The share of a core is that of the time since the last reading."""
    usage = Usage()
    assert measure(usage, [ROOT], holders={20}, now=0.0)[1] is None
    busy = replace(ROOT, cpu_ticks=100 + CLOCK_TICKS)
    assert measure(usage, [busy], holders={20}, now=4.0)[1] == pytest.approx(0.25)


def test_a_tree() -> None:
    """Threads, memory and states are those of the whole tree; workers are its loaders'."""
    worker = replace(ROOT, pid=21, ppid=20, comm="pt_data_worker", state="D")
    older = replace(ROOT, pid=22, ppid=20)
    helper = replace(ROOT, pid=23, ppid=20, comm="sh", state="Z")
    usage = Usage()
    measure(usage, [ROOT, worker, older, helper], holders={20}, now=0.0)
    found, _ = measure(usage, [ROOT, worker, older, helper], holders={20}, now=3.0)
    assert (found.threads, found.resident_bytes, found.loader_workers) == (16, 4 * 4096, 2)
    assert found.states == {"running": 0, "sleeping": 2, "blocked": 1, "stopped": 0, "zombie": 1}
    assert found.io_wait_seconds == 3.0


def test_bytes_read_by_this_process() -> None:
    """Bytes read come from /proc, and are not known of processes that are not there."""
    own = replace(ROOT, pid=os.getpid())
    assert measure(Usage(), [own], holders=(), now=0.0)[0].read_bytes is not None
    gone = replace(ROOT, pid=2**22 - 1)
    assert measure(Usage(), [gone], holders=(), now=0.0)[0].read_bytes is None


def test_pressure(tmp_path: Path) -> None:
    """Stall time comes in seconds; what the kernel does not account is absent."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x/io.pressure").write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 total=3\n"
    )
    (tmp_path / "x/cpu.pressure").write_text("nonsense\n")
    assert pressure(tmp_path / "x", ".pressure") == {"io": 1.5}
    assert cgroup_pressures(["/x", "/", "/../x", "/x"], tmp_path) == {"/x": {"io": 1.5}}
