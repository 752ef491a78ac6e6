from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from gpuwarden.errors import DriverUnavailable, ServiceUnavailable
from gpuwarden.exporter.agent.proofs import BoundedDevices, holdings, memory_of
from gpuwarden.exporter.devices import GpuProcess, ProcessKind


@dataclass
class Driver:
    """A driver whose calls wait until they may go on."""

    go: threading.Event = field(default_factory=threading.Event)
    opened: int = 0
    error: Exception | None = None
    processes: tuple[GpuProcess, ...] = ()

    def open(self) -> None:
        """Count, or fail."""
        self.opened += 1
        if self.error is not None:
            raise self.error

    def process_list(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Wait, then answer."""
        self.go.wait()
        return {"GPU-1": self.processes, "GPU-2": ()}

    def memory_used(self) -> dict[str, int]:
        """Nothing is used."""
        return {}


def test_a_driver_that_hangs_fails_in_time() -> None:
    """A call that does not return fails, the next one at once, and it works again afterwards."""
    driver = Driver()
    devices = BoundedDevices(driver, seconds=0.05)
    with pytest.raises(ServiceUnavailable, match="did not answer"):
        devices.process_list()
    with pytest.raises(ServiceUnavailable, match="still hangs"):
        devices.memory_used()
    driver.go.set()
    patient = BoundedDevices(driver)
    assert set(patient.process_list()) == {"GPU-1", "GPU-2"}


def test_a_driver_that_went_away_is_opened_again() -> None:
    """Every call opens the driver, which does nothing where it is open."""
    driver = Driver(error=DriverUnavailable("not loaded"))
    driver.go.set()
    devices = BoundedDevices(driver)
    with pytest.raises(DriverUnavailable):
        devices.process_list()
    driver.error = None
    assert devices.process_list()
    assert driver.opened == 2


def test_memory_counts_once_per_card() -> None:
    """A process in two lists of a card holds its memory once; a value not told is none."""
    driver = Driver(
        processes=(
            GpuProcess(7, ProcessKind.COMPUTE, 100),
            GpuProcess(7, ProcessKind.GRAPHICS, 100),
            GpuProcess(8, ProcessKind.COMPUTE, None),
        )
    )
    driver.go.set()
    held, told = holdings(BoundedDevices(driver))
    assert told == {"GPU-1", "GPU-2"}
    assert [memory_of(held, pid) for pid in (7, 8, 9)] == [100, None, None]
