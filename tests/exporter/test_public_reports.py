"""Faults of other exporters that were reported in public, with the inputs of the reports.

What is asserted is what the report should have seen. Each kind of fault has more tests where its
module is tested; here the very numbers stand.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.fixtures import scenarios
from tests.exporter.nodes import Children, ManualClock, eventually, own_launchers, process_of

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.exporter import drivers
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess, ProcessKind
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.process_tables import ProcessTables
from gpuwarden.exporter.processes import boot_id, proc_job_id
from gpuwarden.exporter.sampler import Sampler
from gpuwarden.exporter.settings import ExporterSettings
from gpuwarden.exporter.simulated import (
    GIB,
    Card,
    Fault,
    Scenario,
    SimulatedInstance,
    SimulatedProcess,
    build,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Page = Callable[[Scenario], "Samples"]

MIB = 2**20
A100 = "GPU-00000000-0000-4000-8000-000000000000"


class Samples:
    """A page's values by name and labels."""

    def __init__(self, text: str) -> None:
        self._found = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        self.names = {sample.name for sample in self._found}

    def values(self, name: str, **labels: str) -> list[float]:
        """Values of the series that have these labels."""
        return [
            sample.value
            for sample in self._found
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        """The only such value."""
        (found,) = self.values(name, **labels)
        return found

    def labels(self, name: str, label: str) -> set[str]:
        """What a label of a family has."""
        return {sample.labels[label] for sample in self._found if sample.name == name}


@pytest.fixture
def page(scenario_file: Path, jobs: Path) -> Iterator[Page]:
    """The page of a node, read anew with each scenario."""
    nvml = Nvml(build(), scenario=scenario_file)
    attribution = Attribution(jobs, launchers=own_launchers())
    sampler = Sampler(ExporterSettings(jobs_directory=jobs), nvml, attribution)

    def read(scenario: Scenario) -> Samples:
        scenario.write(scenario_file)
        # A driver that is opened anew reads its scenario anew.
        nvml.close()
        return Samples(sampler.sample().body[Format.TEXT].decode())

    yield read
    sampler.stop()


def _job(pid: int) -> str:
    return proc_job_id(process_of(pid), boot_id())


class TestUtilization:
    """Section A: samples of processes."""

    def test_an_idle_process_of_an_idle_card(self, page: Page, children: Children) -> None:
        """1 (nvml-wrapper #56): NOT_FOUND is idleness, not a failure; nothing is raised."""
        pid = children.start().pid
        seen = page(Scenario([Card(0)], [SimulatedProcess(0, pid, memory=1073741824)]))
        assert seen.value("gpu_process_memory_bytes", pid=str(pid)) == 1073741824
        assert seen.value("gpu_process_utilization_ratio", pid=str(pid)) == 0
        assert seen.value("gpuwarden_collector_success", collector="nvml") == 1

    def test_samples_of_nine_seconds_ago(self, page: Page, children: Children) -> None:
        """2, 3 (go-nvml #51, nvtop #91): at 56.19 a sample of 55.46 counts, one of 47.04 not."""
        now, then = children.start().pid, children.start().pid
        processes = [
            SimulatedProcess(0, now, memory=1, sm=5, sample_age=56.194 - 55.46),
            SimulatedProcess(0, then, memory=1, sm=3, sample_age=56.194 - 47.04),
        ]
        seen = page(Scenario([Card(0, utilization=5)], processes))
        assert seen.value("gpu_process_utilization_ratio", pid=str(now)) == 0.05
        assert seen.value("gpu_process_utilization_ratio", pid=str(then)) == 0

    def test_time_is_told_in_microseconds(self, clock: ManualClock) -> None:
        """6 (ray #56000): the driver is asked for samples since a time of its own unit."""
        asked: list[int] = []

        class Asked(drivers.Driver):
            def call(self, _name: str, *arguments: Any) -> int:
                asked.append(arguments[-1].value)
                return drivers.NOT_FOUND

        tables = ProcessTables(Asked(), clock)
        listed = (GpuProcess(7, ProcessKind.COMPUTE),)
        for _ in range(3):
            tables.with_utilization(None, listed, busy=0.0, mig=False)
            clock.advance(2)
        assert all(10**15 < since < 10**16 for since in asked)
        assert all(1e6 <= clock.wall() * 1e6 - since <= 10e6 for since in asked)

    def test_a_future_sample_hides_no_later_one(self, driver: Callable[..., Nvml]) -> None:
        """3: what was last seen is the latest sample that can be, not the latest number."""
        ahead = SimulatedProcess(0, 1, sm=90, memory=1, ghost=1, sample_age=-3600.0)
        sound = SimulatedProcess(0, 2, sm=30, memory=1, ghost=1)
        nvml = driver(Scenario([Card(0, utilization=30)], [ahead, sound]))
        for _ in range(3):
            (gpu,) = nvml.snapshot().gpus
            ratios = {item.pid: item.utilization_ratio for item in gpu.processes or ()}
            assert ratios == {1: None, 2: 0.3}

    def test_two_jobs_on_one_card(self, page: Page, children: Children) -> None:
        """9 (dcgm-exporter #587): each has its own share, not the card's; power is the card's."""
        a, b = children.start().pid, children.start().pid
        processes = [
            SimulatedProcess(0, a, memory=GIB, sm=60),
            SimulatedProcess(0, b, memory=GIB, sm=37),
        ]
        seen = page(Scenario([Card(0, utilization=97)], processes))
        assert seen.value("gpu_job_utilization_ratio", job_id=_job(a)) == 0.6
        assert seen.value("gpu_job_utilization_ratio", job_id=_job(b)) == 0.37
        assert seen.value("gpu_utilization_ratio") == 0.97
        for name in ("gpu_power_watts", "gpu_temperature_celsius", "gpu_energy_joules_total"):
            assert CATALOGUE[name].labels == ("gpu", "uuid")

    def test_no_job_is_busier_than_its_cards(self, page: Page, children: Children) -> None:
        """10 (HAMi #555): samples that add up to more than a card are one card."""
        job = children.script("sleep 600 & echo $!; wait")
        (inner,) = _children_of(job.pid)
        other = children.start().pid
        processes = [
            SimulatedProcess(0, job.pid, memory=1, sm=80),
            SimulatedProcess(0, inner, memory=1, sm=70),
            SimulatedProcess(0, other, memory=1, sm=1),
        ]
        seen = page(Scenario([Card(0, utilization=100)], processes))
        assert seen.value("gpu_job_utilization_ratio", job_id=_job(job.pid)) == 1


class TestProcesses:
    """Section B: who is on a card."""

    def test_a_pid_without_a_process(self, page: Page) -> None:
        """14 (nvitop #152): memory of nobody known is unattributed; nothing is named."""
        stranger = SimulatedProcess(0, 3999999, memory=28234000000, ghost=1)
        seen = page(Scenario([Card(0)], [stranger]))
        assert seen.value("gpu_memory_unattributed_bytes") == 28234000000
        assert seen.value("gpu_processes") == 1
        assert not any(name.startswith(("gpu_process_", "gpu_job_")) for name in seen.names)

    def test_a_zombie_that_holds_memory(self, page: Page, children: Children) -> None:
        """15 (pytorch #4293): nobody waited for it; its memory is nobody's to end."""
        child = children.start()
        child.kill()
        eventually(lambda: process_of(child.pid).ended)
        seen = page(Scenario([Card(0)], [SimulatedProcess(0, child.pid, memory=10 * GIB, ghost=1)]))
        assert seen.value("gpu_memory_unattributed_bytes") == 10 * GIB
        assert not any(name.startswith(("gpu_process_", "gpu_job_")) for name in seen.names)
        assert seen.value("gpuwarden_dropped_values_total", reason="no_process") == 1

    def test_a_pid_that_is_used_again(self, tmp_path: Path, clock: ManualClock) -> None:
        """17 (gpustat): pid 500 of user a ends, and pid 500 is user b's: nothing of a's stays."""
        for name, content in {
            "sys/kernel/random/boot_id": "01234567-89ab-cdef-0123-456789abcdef\n",
            "stat": "btime 1700000000\n",
            "self/ns/pid": "",
            "self/ns/mnt": "",
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        (tmp_path / "500").mkdir()

        def put(start: int, uid: int) -> None:
            rest = f"S 1 500 500 0 -1 0 0 0 0 0 3 4 5 6 20 0 1 0 {start} 0 9"
            (tmp_path / "500/stat").write_text(f"500 (python) {rest}\n")
            (tmp_path / "500/status").write_text(
                f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
            )
            (tmp_path / "500/cgroup").write_text("0::/user.slice/session-1.scope\n")

        gpu = Gpu(0, "GPU-1", "x", processes=(GpuProcess(500, ProcessKind.COMPUTE, GIB),))
        devices = DeviceSnapshot(clock.wall(), "550", simulated=True, gpus=(gpu,))
        attribution = Attribution(tmp_path / "jobs", clock=clock, proc=tmp_path)
        seen = []
        for start, uid in ((1000, 40001), (2000, 40002)):
            put(start, uid)
            snapshot = attribution.observe(devices)
            seen += [(row.user, row.job_id) for row in snapshot.processes]
            assert [job.job_id for job in snapshot.jobs] == [f"proc-01234567-500-{start}"]
        attribution.close()
        assert seen == [
            ("40001", "proc-01234567-500-1000"),
            ("40002", "proc-01234567-500-2000"),
        ]

    @pytest.mark.parametrize(
        "name",
        [b"train_\xff\xfe.py", b'a"b\\c\n', b"\t\r\x07\x1b[31m", b"x" * 100_000],
    )
    def test_a_hostile_command_line(self, page: Page, children: Children, name: bytes) -> None:
        """19 (client_python #564): whatever a user calls his program, the page is there."""
        pid = children.start(b"sh", b"-c", b"sleep 600; :", name, b"--api-key=S3CRET").pid
        seen = page(Scenario([Card(0)], [SimulatedProcess(0, pid, memory=GIB, sm=50)]))
        assert seen.value("gpu_process_memory_bytes", pid=str(pid)) == GIB
        texts = {text for each in seen.names for text in _texts(seen, each)}
        assert not any("S3CRET" in text or "train_" in text for text in texts)

    def test_dead_processes_have_no_series(self, page: Page, children: Children) -> None:
        """21 (nvitop #106): what ended is gone from the next page, though the driver lists it."""
        child = children.start()
        start = process_of(child.pid).start_ticks
        listed = SimulatedProcess(0, child.pid, start=start, memory=GIB, linger=600)
        scenario = Scenario([Card(0)], [listed])
        assert page(scenario).labels("gpu_process_memory_bytes", "pid") == {str(child.pid)}
        children.kill(child)
        seen = page(scenario)
        assert "gpu_process_memory_bytes" not in seen.names
        assert seen.value("gpu_memory_unattributed_bytes") == GIB


class TestCards:
    """Section D: cards and drivers."""

    def test_a_card_that_fell_off_the_bus(self, page: Page, children: Children) -> None:
        """31 (dcgm-exporter #348): it is down without values, the other whole, its job not idle."""
        first, second = children.start().pid, children.start().pid
        healthy = Scenario(
            [Card(0), Card(1)],
            [
                SimulatedProcess(0, first, memory=GIB, sm=50),
                SimulatedProcess(1, second, memory=GIB, sm=60),
            ],
        )
        assert page(healthy).value("gpu_job_utilization_ratio", gpu="1") == 0.6
        seen = page(replace(healthy, faults=[Fault("*", 15, card=1)]))
        assert (seen.value("gpu_up", gpu="0"), seen.value("gpu_up", gpu="1")) == (1, 0)
        assert seen.value("gpu_utilization_ratio", gpu="0") == 0.5
        assert seen.values("gpu_utilization_ratio", gpu="1") == []
        assert seen.value("gpu_job_holds_gpu", gpu="1") == 1
        assert seen.values("gpu_job_utilization_ratio", gpu="1") == []

    def test_what_an_h200_uses(self, page: Page, children: Children) -> None:
        """41 (gpustat #141): the reserve is not used, and not unattributed."""
        sizes = (2566, 1542, 28234)
        processes = [SimulatedProcess(0, children.start().pid, memory=mib * MIB) for mib in sizes]
        card = Card(0, memory=143771 * MIB, reserved=614 * MIB, used=20 * MIB, name="NVIDIA H200")
        seen = page(Scenario([card], processes))
        assert seen.value("gpu_memory_used_bytes") == 33934016512
        assert seen.value("gpu_memory_reserved_bytes") == 643825664
        assert sum(seen.values("gpu_process_memory_bytes")) == 33913044992
        assert seen.value("gpu_memory_unattributed_bytes") == 20971520

    def test_an_h200_in_parts(self, page: Page, children: Children) -> None:
        """42 (DCGM #58): memory per process and instance; no utilization, and it is said why."""
        sizes = {1: 2194, 2: 1170, 5: 13526}
        pids = {gi: children.start().pid for gi in sizes}
        processes = [
            SimulatedProcess(0, pids[gi], memory=mib * MIB, sm=100, gi=gi, ci=0)
            for gi, mib in sizes.items()
        ]
        instances = [
            SimulatedInstance(0, gi, f"MIG-{gi}", memory=18 * GIB, profile="1g.18gb")
            for gi in sizes
        ]
        faults = [Fault("nvmlGpm*", 3)]
        card = Card(0, mig=1, memory=143771 * MIB)
        seen = page(Scenario([card], processes, instances=instances, faults=faults))
        for gi, mib in sizes.items():
            assert seen.value("gpu_job_memory_bytes", uuid=f"MIG-{gi}") == mib * MIB
        assert not any(name.endswith("utilization_ratio") for name in seen.names)
        assert seen.value("gpuwarden_dropped_values_total", reason="unsupported") == 3

    def test_a_card_that_is_stuck_busy(self, page: Page) -> None:
        """48 (lium-io #1140): 100 % without a process is the card's, and no job's."""
        seen = page(Scenario([Card(0, utilization=100, power=70)]))
        assert (seen.value("gpu_utilization_ratio"), seen.value("gpu_processes")) == (1, 0)
        assert not any(name.startswith("gpu_job_") for name in seen.names)

    def test_memory_of_the_node(self, page: Page, children: Children) -> None:
        """39 (gpud #1170): load, heat and power are there, memory families are not."""
        processes = [SimulatedProcess(0, children.start().pid, memory=GIB, sm=42)]
        faults = [Fault("nvmlDeviceGetMemoryInfo*", 3)]
        seen = page(Scenario([Card(0, name="NVIDIA GB10")], processes, faults=faults))
        assert seen.value("gpu_memory_unified") == 1
        assert seen.value("gpu_utilization_ratio") == 0.42
        memory = {name for name in seen.names if name.startswith("gpu_memory_")}
        assert memory == {"gpu_memory_unified", "gpu_memory_activity_ratio"}


@pytest.mark.parametrize("kind", ["wsl", "tegra", "vgpu", "everything-fails", "no-permission"])
def test_drivers_that_tell_little(page: Page, children: Children, kind: str) -> None:
    """Where a driver tells next to nothing the node is on the page, and nothing on it is a 0."""
    scenario = scenarios([children.start().pid for _ in range(4)])[kind]
    seen = page(scenario)
    assert seen.value("gpuwarden_nvml_up") == 1
    idle = {
        name
        for name in seen.names
        if name.startswith("gpu_") and name not in ALLOWED and 0 in seen.values(name)
    }
    assert idle == set()


ALLOWED = {
    "gpu_up",
    # Said by the driver, or counted here.
    "gpu_memory_unattributed_bytes",
    "gpu_memory_unified",
    "gpu_ecc_errors_total",
    "gpu_energy_joules_total",
    "gpu_throttle_active",
    "gpu_pcie_receive_bytes_total",
    "gpu_pcie_transmit_bytes_total",
    *(name for name in CATALOGUE if name.startswith("gpu_job_") and name.endswith("_total")),
    "gpu_job_loader_workers",
    "gpu_job_processes",
}


def _children_of(pid: int) -> list[int]:
    answer = subprocess.run(
        ["/usr/bin/pgrep", "-P", str(pid)], check=True, capture_output=True, text=True, timeout=30
    )
    return [int(line) for line in answer.stdout.split()]


def _texts(seen: Samples, name: str) -> set[str]:
    return {text for label in CATALOGUE[name].labels for text in seen.labels(name, label)}
