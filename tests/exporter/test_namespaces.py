"""Who is who: pids of another namespace, and names that pretend to be something else."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from tests.exporter.nodes import Children, ManualClock, own_launchers

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, ProcessKind
from gpuwarden.exporter.namespaces import sees_host_pids, without_names
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.sampler import Sampler
from gpuwarden.exporter.settings import ExporterSettings
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess, build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.exporter.jobs import NodeSnapshot

    Make = Callable[..., Sampler]


class RealDriver(Nvml):
    """The simulated driver, passing for a real one."""

    def snapshot(self) -> DeviceSnapshot:
        """What it sees."""
        return dataclasses.replace(super().snapshot(), simulated=False)


class Broken(Attribution):
    """Meets something that nobody thought of."""

    def observe(self, devices: DeviceSnapshot | None) -> NodeSnapshot:
        """Fail."""
        raise ZeroDivisionError(devices is None)


@pytest.fixture
def make(scenario_file: Path, jobs: Path, clock: ManualClock) -> Iterator[Make]:
    """Makes a sampler on a scenario."""
    made: list[Sampler] = []

    def start(scenario: Scenario, *, host_pids: bool, kind: type[Attribution]) -> Sampler:
        nvml = RealDriver(build(), scenario=scenario.write(scenario_file))
        attribution = kind(jobs, launchers=own_launchers(), clock=clock)
        settings = ExporterSettings(jobs_directory=jobs)
        made.append(Sampler(settings, nvml, attribution, clock=clock, host_pids=host_pids))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def _page(sampler: Sampler) -> dict[tuple[str, str], float]:
    """(name, reason or collector) -> value; of several series the last."""
    text = sampler.sample().body[Format.TEXT].decode()
    return {
        (sample.name, sample.labels.get("reason") or sample.labels.get("collector", "")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_pids_of_another_namespace_name_nobody(make: Make, children: Children) -> None:
    """In a PID namespace of its own nobody is named, though there is a process of that pid."""
    processes = [SimulatedProcess(0, children.start().pid, memory=GIB, sm=50)]
    scenario = Scenario([Card(0)], processes)
    seen = _page(make(scenario, host_pids=True, kind=Attribution))
    assert (seen["gpuwarden_host_pids", ""], seen["gpu_job_memory_bytes", ""]) == (1, GIB)
    blind = _page(make(scenario, host_pids=False, kind=Attribution))
    assert blind["gpuwarden_host_pids", ""] == 0
    assert blind["gpuwarden_collector_success", "jobs"] == 0
    assert blind["gpuwarden_dropped_values_total", "no_process"] == 1
    assert (blind["gpu_processes", ""], blind["gpu_memory_unattributed_bytes", ""]) == (1, GIB)
    names = {name for name, _ in blind}
    assert not any(name.startswith(("gpu_job_", "gpu_process_")) for name in names)
    assert "gpuwarden_snapshot_timestamp_seconds" not in names


def test_it_is_said_at_the_start(make: Make) -> None:
    """Whoever runs it in a container without the host's pids is told what to do."""
    sampler = make(Scenario([Card(0)]), host_pids=False, kind=Attribution)
    with capture_logs() as logs:
        sampler.start()
        assert sampler.wait(30)
    assert any("hostPID: true" in line["event"] for line in logs)


def test_the_hosts_namespace_is_known() -> None:
    """The kernel gives the first PID namespace a number of its own, and no other that."""
    code = "from gpuwarden.exporter.namespaces import sees_host_pids as s; print(s())"
    answer = subprocess.run(
        ["/usr/bin/unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout == "False\n"


def test_without_proc(tmp_path: Path) -> None:
    """Where it cannot be found out the pids are not trusted."""
    assert not sees_host_pids(tmp_path)


def test_every_process_is_another_nobody() -> None:
    """A process on two cards, two on one: without names they are as many as before."""
    listed = (GpuProcess(7, ProcessKind.COMPUTE), GpuProcess(8, ProcessKind.COMPUTE))
    gpus = (Gpu(0, "a", "x", processes=listed), Gpu(1, "b", "x", processes=None))
    seen = without_names(DeviceSnapshot(1.0, "1", simulated=False, gpus=gpus))
    assert seen.gpus[0].processes is not None
    assert len({item.pid for item in seen.gpus[0].processes}) == 2
    assert all(item.pid < 0 for item in seen.gpus[0].processes)
    assert seen.gpus[1].processes is None


def test_what_nobody_thought_of_hides_no_card(make: Make) -> None:
    """Whatever a process or file does to who reads it, the cards are on the page."""
    page = _page(make(Scenario([Card(0, utilization=50)]), host_pids=True, kind=Broken))
    assert page["gpu_utilization_ratio", ""] == 0.5
    assert page["gpuwarden_collector_success", "jobs"] == 0
    assert page["gpuwarden_collector_success", "nvml"] == 1
    assert ("gpuwarden_snapshot_timestamp_seconds", "") not in page
