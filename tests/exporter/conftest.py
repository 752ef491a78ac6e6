from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import Children, ManualClock

from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.runs import prepare
from gpuwarden.exporter.simulated import Scenario, build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts real processes and ends them with the test."""
    started = Children()
    yield started
    started.close()


@pytest.fixture
def clock() -> ManualClock:
    """Time that the test moves."""
    return ManualClock()


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    """Where the test's scenario is."""
    return tmp_path / "scenario"


@pytest.fixture
def driver(scenario_file: Path) -> Iterator[Callable[[Scenario], Nvml]]:
    """Opens the simulated driver on a scenario."""
    opened: list[Nvml] = []

    def start(scenario: Scenario) -> Nvml:
        nvml = Nvml(build(), scenario=scenario.write(scenario_file))
        nvml.open()
        opened.append(nvml)
        return nvml

    yield start
    for nvml in opened:
        nvml.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """The folder of the job files, as the exporter makes it."""
    root = tmp_path / "gpuwarden"
    prepare(root)
    return root
