"""What is told of jobs beside their processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.exporter.mirrors import ProcMirror
from tests.exporter.nodes import Children, ManualClock, eventually

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.collector import collect
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, ProcessKind
from gpuwarden.exporter.platforms import MAX_CONTAINERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.exporter.jobs import NodeSnapshot

POD = "0b9e4f0c-1111-2222-3333-444455556666"
UNSHARE = ("unshare", "--mount")


def _may_unshare() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0


@pytest.fixture
def proc(tmp_path: Path) -> ProcMirror:
    """Where the node's processes are seen."""
    return ProcMirror(tmp_path / "proc")


@pytest.fixture
def attribution(tmp_path: Path, clock: ManualClock, proc: ProcMirror) -> Iterator[Attribution]:
    """A node on which no platform is asked."""
    made = Attribution(tmp_path / "jobs", clock=clock, proc=proc.folder)
    yield made
    made.close()


def _on_card(attribution: Attribution, *pids: int) -> NodeSnapshot:
    processes = tuple(GpuProcess(pid, ProcessKind.COMPUTE, 1000, 0.5) for pid in pids)
    gpu = Gpu(index=0, uuid="GPU-0", name="x", processes=processes)
    return attribution.observe(DeviceSnapshot(0.0, "550", simulated=True, gpus=(gpu,)))


def _families(snapshot: NodeSnapshot) -> set[str]:
    families, _ = collect(snapshot, totals={})
    return {name for name, _ in families.written()}


def test_a_container_of_no_platform(
    attribution: Attribution, proc: ProcMirror, children: Children
) -> None:
    """A container that Docker started has an id, and no platform."""
    child = children.start()
    proc.put([child.pid], f"/system.slice/docker-{'ab' * 32}.scope")
    snapshot = _on_card(attribution, child.pid)
    (job,) = snapshot.jobs
    assert job.job_id.startswith("proc-")
    assert (job.platform.platform, job.platform.containers) == ("", ("ab" * 32,))
    assert "gpu_job_container_info" in _families(snapshot)
    assert "gpu_job_platform_info" not in _families(snapshot)


def test_a_plain_job(attribution: Attribution, proc: ProcMirror, children: Children) -> None:
    """A job of no platform and no container has neither on the page."""
    child = children.start()
    proc.put([child.pid], "/user.slice/user-1000.slice/session-1.scope")
    families = _families(_on_card(attribution, child.pid))
    assert not families & {"gpu_job_container_info", "gpu_job_platform_info"}


def test_a_pod_of_many_containers(
    attribution: Attribution, proc: ProcMirror, children: Children
) -> None:
    """A pod has one series for each of its first containers, and one for itself."""
    pids = [children.start("sleep", "600").pid for _ in range(MAX_CONTAINERS + 2)]
    for number, pid in enumerate(pids):
        proc.put([pid], f"/kubepods/pod{POD}/{number:064x}")
    snapshot = _on_card(attribution, *pids)
    (job,) = snapshot.jobs
    assert job.job_id == f"pod-{POD}"
    assert (job.platform.platform, job.platform.number) == ("kubernetes", POD)
    assert job.platform.containers == tuple(f"{number:064x}" for number in range(MAX_CONTAINERS))


def _namespace(pid: int | str) -> int:
    return Path(f"/proc/{pid}/ns/mnt").stat().st_ino


@pytest.mark.skipif(not _may_unshare(), reason="namespaces cannot be made here")
def test_a_private_cgroup_namespace(
    attribution: Attribution, proc: ProcMirror, children: Children
) -> None:
    """Where `0::/` is all there is to see of a container, that is said, and nothing made up."""
    inside = children.start(*UNSHARE, "sleep", "600")
    outside = children.start()
    own = _namespace("self")
    eventually(lambda: _namespace(inside.pid), until=lambda namespace: namespace != own)
    proc.put([inside.pid, outside.pid], "/")
    snapshot = _on_card(attribution, inside.pid, outside.pid)
    assert snapshot.dropped["private_cgroup"] == 1
    assert all(job.platform.containers == () for job in snapshot.jobs)
    assert len(snapshot.jobs) == 2
