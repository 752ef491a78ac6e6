"""XID errors: heard once each, remembered, and never a reason to hold on to a driver."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import eventually

from gpuwarden.exporter.simulated import Card, Fault, Scenario, SimulatedXid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.exporter.devices import XidErrors
    from gpuwarden.exporter.nvml import Nvml

    Driver = Callable[[Scenario], Nvml]

QUIET = Scenario([Card(0), Card(1)])
NOT_SUPPORTED, LOST, UNKNOWN = 3, 15, 999
WAIT = "nvmlEventSetWait_v2"


@pytest.fixture
def listening(driver: Driver) -> Callable[[Scenario], Nvml]:
    """Opens a driver and listens to its cards."""

    def start(scenario: Scenario) -> Nvml:
        nvml = driver(scenario)
        nvml.watch_xids()
        nvml.snapshot()
        return nvml

    return start


def _errors(nvml: Nvml) -> list[tuple[int, int, int]]:
    """(index, code, count) of each error; nothing while nothing is heard."""
    return [(one.index, one.code, one.count) for one in _all(nvml) or ()]


def _all(nvml: Nvml) -> tuple[XidErrors, ...] | None:
    return nvml.snapshot().xids


def _tell(nvml: Nvml, scenario: Scenario, file: Path, code: int) -> SimulatedXid:
    """Let an error happen until it is heard: what was before a card is listened to is nobody's."""
    happened = 0

    def again() -> bool:
        nonlocal happened
        happened += 1
        xids = [*scenario.xids, SimulatedXid(1, code, count=happened)]
        replace(scenario, xids=xids).write(file)
        return code in {heard for _, heard, _ in _errors(nvml)}

    eventually(again)
    return SimulatedXid(1, code, count=happened)


def test_errors_are_counted_by_card_and_code(
    listening: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """Each error is counted once, under its card and number, with the time it came."""
    nvml = listening(QUIET)
    heard = _tell(nvml, QUIET, scenario_file, 31)
    replace(QUIET, xids=[heard, SimulatedXid(1, 79, count=3)]).write(scenario_file)
    eventually(lambda: (1, 79, 3) in _errors(nvml))
    replace(QUIET, xids=[heard, SimulatedXid(1, 79, count=4)]).write(scenario_file)
    eventually(lambda: (1, 79, 4) in _errors(nvml))
    found = _all(nvml)
    assert found is not None
    assert {one.uuid for one in found} == {Card(1).uuid}
    assert all(abs(one.last_seen - nvml.snapshot().taken_at) < 60 for one in found)


def test_what_happened_before_is_not_counted(
    listening: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """An error that was there before anybody listened is not told, and not made up."""
    old = replace(QUIET, xids=[SimulatedXid(0, 48, count=7)])
    nvml = listening(old)
    _tell(nvml, old, scenario_file, 79)
    assert [code for _, code, _ in _errors(nvml)] == [79]


def test_a_card_that_falls_off_the_bus(
    listening: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """The error of a card that is lost by it stays on the page."""
    nvml = listening(QUIET)
    _tell(nvml, QUIET, scenario_file, 79)
    replace(QUIET, faults=[Fault("*", LOST, card=1)]).write(scenario_file)
    eventually(lambda: not nvml.snapshot().gpus[1].up)
    Scenario([Card(0)]).write(scenario_file)
    eventually(lambda: len(nvml.snapshot().gpus) == 1)
    assert [(index, code) for index, code, _ in _errors(nvml)] == [(1, 79)]


def test_a_card_keeps_its_errors_when_its_index_changes(
    listening: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """Errors belong to a UUID, and carry the index that the card has now."""
    nvml = listening(QUIET)
    _tell(nvml, QUIET, scenario_file, 79)
    Scenario([Card(0, uuid=Card(1).uuid)]).write(scenario_file)
    eventually(lambda: [index for index, _, _ in _errors(nvml)], until=lambda seen: seen == [0])


def test_a_wait_that_fails_is_tried_again(
    listening: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """While nothing can be heard it is said so; then everything is set up anew."""
    broken = replace(QUIET, faults=[Fault(WAIT, UNKNOWN)])
    nvml = listening(broken)
    eventually(lambda: _all(nvml) is None)
    assert nvml.snapshot().complete
    QUIET.write(scenario_file)
    eventually(lambda: _all(nvml) is not None)
    _tell(nvml, QUIET, scenario_file, 63)


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_a_driver_without_events(listening: Callable[[Scenario], Nvml], call: str) -> None:
    """A driver that has no events is no fault: it has nothing to tell."""
    nvml = listening(replace(QUIET, faults=[Fault(call, NOT_SUPPORTED)]))
    assert _all(nvml) == ()
    assert nvml.close()


def test_closing_lets_go(listening: Callable[[Scenario], Nvml]) -> None:
    """Nobody waits for errors of a driver that is closed."""
    nvml = listening(QUIET)
    assert nvml.close()
    assert "xids" not in {thread.name for thread in threading.enumerate()}


def test_a_driver_that_comes_back_is_heard_again(
    listening: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """What was counted survives the driver, and counting goes on with the next one."""
    nvml = listening(QUIET)
    _tell(nvml, QUIET, scenario_file, 31)
    nvml.close()
    QUIET.write(scenario_file)
    nvml.open()
    assert [code for _, code, _ in _errors(nvml)] == [31]
    _tell(nvml, QUIET, scenario_file, 79)
    assert [code for _, code, _ in _errors(nvml)] == [31, 79]
