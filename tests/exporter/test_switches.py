"""The flags that switch families on and off, as an operator gives them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuwarden.exporter.simulated import Card, Scenario, SimulatedProcess
from gpuwarden.exporter.switches import SWITCHES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.exporter.nodes import Children

FAMILIES = {
    "clock": {"gpu_clock_hertz"},
    "ecc": {"gpu_ecc_errors_total"},
    "nvlink": {"gpu_nvlink_receive_bytes_total", "gpu_nvlink_transmit_bytes_total"},
    "pcie": {"gpu_pcie_receive_bytes_total", "gpu_pcie_transmit_bytes_total"},
    "process": {
        "gpu_process_memory_bytes",
        "gpu_process_start_time_seconds",
        "gpu_process_utilization_ratio",
    },
    "throttle": {"gpu_throttle_active"},
}
"""What each flag is about; XID errors are only there once one has happened."""


def _run(scenario: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuwarden", "exporter", "--once"]
    command += [f"--gpus=simulated:{scenario}", f"--jobs.directory={scenario.parent / 'jobs'}"]
    return subprocess.run(
        [*command, *flags], check=False, capture_output=True, text=True, timeout=60
    )


def _samples(scenario: Path, *flags: str) -> list[tuple[str, dict[str, str], float]]:
    answer = _run(scenario, *flags)
    assert answer.returncode == 0, answer.stderr
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(answer.stdout)
        for sample in family.samples
    ]


def test_the_usual_families_and_the_others(scenario_file: Path, children: Children) -> None:
    """Each flag turns its own families round, and nothing else."""
    Scenario([Card(0)], [SimulatedProcess(0, children.start().pid, memory=5)]).write(scenario_file)
    usual = {name for name, *_ in _samples(scenario_file)}
    flags = [f"--{'no-' * SWITCHES[name].default}collector.{name}" for name in FAMILIES]
    turned = {name for name, *_ in _samples(scenario_file, *flags)}
    on = set().union(*(FAMILIES[name] for name in FAMILIES if SWITCHES[name].default))
    assert usual - turned == on
    assert turned - usual == FAMILIES["nvlink"]


def test_the_largest_processes(scenario_file: Path, children: Children) -> None:
    """The cap of processes per card is a flag, and what it leaves out is counted."""
    pids = [children.start().pid for _ in range(3)]
    rows = [SimulatedProcess(0, pid, memory=1000 * rank) for rank, pid in enumerate(pids, 1)]
    Scenario([Card(0)], rows).write(scenario_file)
    found = _samples(scenario_file, "--collector.process.max=2")
    shown = [labels["pid"] for name, labels, _ in found if name == "gpu_process_memory_bytes"]
    assert sorted(shown) == sorted(map(str, pids[1:]))
    assert [value for name, _, value in found if name == "gpu_processes"] == [3]


@pytest.mark.parametrize("limit", ["-1", "10001", "x"])
def test_a_limit_that_cannot_be(scenario_file: Path, limit: str) -> None:
    """A wrong cap is refused at the start, by its flag."""
    Scenario([Card(0)]).write(scenario_file)
    answer = _run(scenario_file, f"--collector.process.max={limit}")
    assert answer.returncode != 0
    assert "--collector.process.max" in answer.stderr
