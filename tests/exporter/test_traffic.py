"""Traffic counters: they only grow, whatever the driver's own do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import eventually

from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.simulated import Card, Fault, Scenario, build
from gpuwarden.exporter.switches import DEFAULT_COLLECTORS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Driver = Callable[[Scenario], Nvml]

FIELDS = "nvmlDeviceGetFieldValues"


class Counted:
    """A card whose counters stand where the test puts them."""

    def __init__(self, driver: Driver, file: Path, card: Card) -> None:
        self._file, self._card = file, card
        self.nvml = driver(Scenario([card]))
        self.read()

    def read(self) -> tuple[int, int]:
        """(received, sent) over PCIe."""
        traffic = self.nvml.snapshot().gpus[0].traffic_bytes
        return traffic["pcie_receive"], traffic["pcie_transmit"]

    def stand(self, receive: int, transmit: int = 0) -> tuple[int, int]:
        """Put the driver's counters somewhere and read what has become of ours."""
        # Another temperature tells that the driver has read the file.
        marker = round(self.nvml.snapshot().gpus[0].temperature_celsius or 0) % 90 + 1
        self._card = replace(
            self._card, pcie_receive=receive, pcie_transmit=transmit, temperature=marker
        )
        Scenario([self._card]).write(self._file)
        eventually(lambda: self.nvml.snapshot().gpus[0].temperature_celsius == marker)
        return self.read()


@pytest.mark.parametrize("bits", [32, 64])
def test_bytes_since_the_card_was_seen(driver: Driver, scenario_file: Path, bits: int) -> None:
    """What was before is not counted; the two directions are not mixed up."""
    card = Card(0, pcie_receive=1000, pcie_transmit=5000, pcie_bits=bits)
    counted = Counted(driver, scenario_file, card)
    assert counted.read() == (0, 0)
    assert counted.stand(3000, 6000) == (2000, 1000)


def test_a_counter_of_32_bits_wraps(driver: Driver, scenario_file: Path) -> None:
    """A counter that went over its end goes on where it was."""
    counted = Counted(driver, scenario_file, Card(0, pcie_receive=2**32 - 10, pcie_bits=32))
    assert counted.stand(20)[0] == 30
    assert counted.stand(21)[0] == 31


def test_a_counter_of_64_bits_that_falls_began_anew(driver: Driver, scenario_file: Path) -> None:
    """After a reset of the card its counters begin at nothing; ours does not fall."""
    counted = Counted(driver, scenario_file, Card(0, pcie_receive=1000))
    assert counted.stand(5000)[0] == 4000
    assert counted.stand(7)[0] == 4007


def test_a_driver_that_was_reloaded(driver: Driver, scenario_file: Path) -> None:
    """What was counted with one driver is still there with the next."""
    counted = Counted(driver, scenario_file, Card(0))
    assert counted.stand(500)[0] == 500
    counted.nvml.close()
    counted.nvml.open()
    assert counted.stand(600)[0] == 600


@pytest.mark.parametrize(("bits", "after"), [(32, 500 + 7), (64, 500 + 7)])
def test_a_driver_that_began_anew(
    driver: Driver, scenario_file: Path, bits: int, after: int
) -> None:
    """A counter that is smaller with the next driver began at nothing; it did not wrap."""
    counted = Counted(driver, scenario_file, Card(0, pcie_bits=bits))
    assert counted.stand(500)[0] == 500
    counted.nvml.close()
    Scenario([Card(0, pcie_bits=bits, pcie_receive=7)]).write(scenario_file)
    counted.nvml.open()
    assert counted.read()[0] == after


@pytest.mark.parametrize(("code", "dropped"), [(3, {}), (13, {}), (999, {"nvml_error": 1})])
def test_a_driver_without_the_counters(driver: Driver, code: int, dropped: dict[str, int]) -> None:
    """Where there is no counter there is no value, and a failure is counted."""
    snapshot = driver(Scenario([Card(0)], faults=[Fault(FIELDS, code)])).snapshot()
    assert snapshot.gpus[0].traffic_bytes == {}
    assert snapshot.dropped == dropped


def test_nvlink_when_it_is_asked_for(scenario_file: Path) -> None:
    """The driver counts NVLink in KiB; it is read only where it is switched on."""
    scenario = Scenario([Card(0, nvlink_receive=2048, nvlink_transmit=4096)])
    nvml = Nvml(
        build(),
        scenario=scenario.write(scenario_file),
        collectors={*DEFAULT_COLLECTORS, "nvlink"},
    )
    nvml.open()
    nvml.snapshot()
    more = Card(0, nvlink_receive=6 * 1024, nvlink_transmit=1024 * 1024)
    Scenario([more]).write(scenario_file)
    wanted = {
        "pcie_receive": 0,
        "pcie_transmit": 0,
        "nvlink_receive": 4 * 1024,
        "nvlink_transmit": 1020 * 1024,
    }
    eventually(lambda: nvml.snapshot().gpus[0].traffic_bytes == wanted)
    nvml.close()


@pytest.mark.parametrize("name", ["clock", "ecc", "throttle", "pcie"])
def test_what_is_switched_off_is_not_asked_for(scenario_file: Path, name: str) -> None:
    """A family that is off costs nothing, and nothing of it is known."""
    nvml = Nvml(
        build(),
        scenario=Scenario([Card(0)]).write(scenario_file),
        collectors=DEFAULT_COLLECTORS - {name},
    )
    nvml.open()
    gpu = nvml.snapshot().gpus[0]
    known = {
        "clock": gpu.clocks_hertz,
        "ecc": gpu.ecc_errors,
        "throttle": gpu.throttle,
        "pcie": gpu.traffic_bytes,
    }
    assert {key for key, value in known.items() if not value} == {name}
    nvml.close()
