"""Pods that are processes: a fake kubelet's, ended through the API and seen by the exporter."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.kubernetes_pods import Kubelet, RunningPod, cgroup_mount, node
from tests.servers import until

from gpuwarden.exporter.cgroups import PlatformKind, platform_of
from gpuwarden.exporter.processes import read_process
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess
from gpuwarden.ruleengine.reclaim.kubernetes import Kubernetes
from gpuwarden.ruleengine.reclaim.ports import Claim, Deed, Order, Standing, State
from gpuwarden.ruleengine.verdicts import JobFacts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PYTHON = (sys.executable, "-I", "-S", "-c")
LEAVES = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)
DEAF = (
    "import os, signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "os.fork() or os.setsid()\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)

needs_cgroups = pytest.mark.skipif(cgroup_mount() is None, reason="needs cgroups of its own")


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    """A node."""
    with node(tmp_path) as found:
        yield found


def ready(pod: RunningPod) -> RunningPod:
    """A pod whose program has begun."""
    until(lambda: "ready" in pod.log.read_text())
    return pod


def gone(pids: tuple[int, ...]) -> bool:
    """Whether processes have ended."""
    found = [read_process(pid) for pid in pids]
    return all(process is None or process.ended for process in found)


def ended(kubelet: Kubelet, pod: RunningPod, deed: Deed, grace: float) -> State:
    """End a pod through the API; gives what is said of it in the end."""

    async def run() -> Order:
        platform = Kubernetes.from_settings(kubelet.cluster.settings(), kubelet.folder)
        claim = await platform.find(JobFacts(pod.job_id, "node1:9835"), deed)
        assert isinstance(claim, Claim), claim
        order = Order("d", claim, deed, grace=grace)
        await platform.end(order)
        await platform.aclose()
        return order

    async def look(order: Order) -> State | None:
        platform = Kubernetes.from_settings(kubelet.cluster.settings(), kubelet.folder)
        state = await platform.state(order)
        await platform.aclose()
        return None if state.standing is Standing.ENDING else state

    order = asyncio.run(run())
    return until(lambda: asyncio.run(look(order)))


def test_one_that_leaves(kubelet: Kubelet) -> None:
    """SIGTERM is enough, and long before the grace is over it has ended."""
    pod = ready(kubelet.start_pod("lab", "train", [*PYTHON, LEAVES], grace=600))
    state = ended(kubelet, pod, Deed.TERMINATE, 600)
    assert state.standing is Standing.ENDED
    assert pod.process.wait(10) == 75
    assert not pod.killed


@needs_cgroups
def test_one_that_is_deaf(kubelet: Kubelet) -> None:
    """After the grace all its processes are killed, also one in a session of its own."""
    pod = ready(kubelet.start_pod("lab", "train", [*PYTHON, DEAF], grace=600))
    pids = until(lambda: pod.pids() if len(pod.pids()) == 2 else None)
    assert ended(kubelet, pod, Deed.TERMINATE, 1).standing is Standing.ENDED
    assert gone(pids)


def test_a_job_is_suspended(kubelet: Kubelet) -> None:
    """Its process ends by the pod's own grace, and no other one begins."""
    pod = ready(kubelet.start_job("lab", "train", [*PYTHON, LEAVES], grace=20))
    assert ended(kubelet, pod, Deed.TERMINATE, 600).standing is Standing.ENDED
    assert gone((pod.pid,))
    assert list(kubelet.pods) == [pod.uid]


def test_a_job_comes_back(kubelet: Kubelet) -> None:
    """Its controller starts a new process, in a new pod."""
    pod = ready(kubelet.start_job("lab", "train", [*PYTHON, LEAVES], grace=20))
    state = ended(kubelet, pod, Deed.REQUEUE, 20)
    assert state.standing is Standing.RETURNED
    (new,) = kubelet.pods_of(kubelet.cluster.get("Job", "train"))
    assert new.uid in state.successor
    assert new.pid != pod.pid


@needs_cgroups
def test_the_exporter_sees_it(kubelet: Kubelet, tmp_path: Path) -> None:
    """The page names the pod's job, for its process is in the cgroup of a pod."""
    pod = ready(kubelet.start_pod("lab", "train", [*PYTHON, LEAVES]))
    process = read_process(pod.pid)
    assert process is not None
    assert platform_of(process.cgroup).kind is PlatformKind.KUBERNETES
    busy = [SimulatedProcess(0, pod.pid, memory=GIB, sm=30)]
    scenario = Scenario([Card(0)], busy).write(tmp_path / "scenario")
    command = [sys.executable, "-m", "gpuwarden", "exporter", f"--gpus=simulated:{scenario}"]
    command += [f"--jobs.directory={tmp_path / 'jobs'}", "--once"]
    page = subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    held = [line for line in page.splitlines() if line.startswith("gpu_job_holds_gpu{")]
    assert len(held) == 1
    assert f'job_id="{pod.job_id}"' in held[0]
