"""XID errors: heard once each, remembered, and never a reason to hold on to a driver."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import eventually

from gpuwarden.exporter.simulated import Card, Fault, Scenario, SimulatedXid, calls
from gpuwarden.exporter.xids import FLOOD

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
    """(index, code, count) of each error."""
    return [(one.index, one.code, one.count) for one in _all(nvml)]


def _all(nvml: Nvml) -> tuple[XidErrors, ...]:
    return nvml.snapshot().xids


def _hears(nvml: Nvml) -> bool:
    return nvml.snapshot().xids_heard


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
    Scenario([Card(0, temperature=77)]).write(scenario_file)
    eventually(lambda: nvml.snapshot().gpus[0].temperature_celsius == 77)
    assert [(gpu.uuid, gpu.up) for gpu in nvml.snapshot().gpus[1:]] == [(Card(1).uuid, False)]
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
    eventually(lambda: not _hears(nvml))
    assert nvml.snapshot().complete
    QUIET.write(scenario_file)
    eventually(lambda: _hears(nvml))
    _tell(nvml, QUIET, scenario_file, 63)


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_a_driver_without_events(listening: Callable[[Scenario], Nvml], call: str) -> None:
    """A driver that has no events is no fault: it has nothing to tell."""
    nvml = listening(replace(QUIET, faults=[Fault(call, NOT_SUPPORTED)]))
    assert (_all(nvml), _hears(nvml)) == ((), True)
    assert nvml.close()


@pytest.mark.parametrize("code", [4, 12, 17, UNKNOWN])
def test_a_card_that_cannot_be_listened_to(
    listening: Callable[[Scenario], Nvml], scenario_file: Path, code: int
) -> None:
    """One card that refuses is told of, and the errors of the others are heard."""
    scenario = replace(QUIET, faults=[Fault("nvmlDeviceRegisterEvents", code, card=0)])
    nvml = listening(scenario)
    eventually(lambda: not _hears(nvml))
    _tell(nvml, scenario, scenario_file, 79)
    assert not _hears(nvml)


def test_errors_stay_while_nothing_is_heard(
    listening: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """What was heard is on the page while waiting fails: that is when it matters."""
    nvml = listening(QUIET)
    heard = _tell(nvml, QUIET, scenario_file, 79)
    replace(QUIET, xids=[heard], faults=[Fault(WAIT, LOST)]).write(scenario_file)
    eventually(lambda: not _hears(nvml))
    assert [code for _, code, _ in _errors(nvml)] == [79]


def test_an_old_driver_waits_by_the_older_function(
    listening: Callable[[Scenario], Nvml], scenario_file: Path
) -> None:
    """Before R450 there is no second version of the wait."""
    scenario = replace(QUIET, missing=[WAIT])
    nvml = listening(scenario)
    _tell(nvml, scenario, scenario_file, 79)
    assert _hears(nvml)


@pytest.mark.parametrize("code", [0, 10])
def test_a_wait_that_does_not_wait(
    listening: Callable[[Scenario], Nvml], scenario_file: Path, code: int
) -> None:
    """A driver that answers a wait at once, with nothing, is not asked without end."""
    nvml = listening(QUIET)
    before = calls(scenario_file)
    replace(QUIET, faults=[Fault("nvmlEventSetWait*", code)]).write(scenario_file)
    ended = time.monotonic() + 1.0
    while time.monotonic() < ended:
        nvml.snapshot()
        threading.Event().wait(0.1)
    own = 12 * 60
    assert calls(scenario_file) - before < own + 5 * FLOOD


def test_a_flood(listening: Callable[[Scenario], Nvml], scenario_file: Path) -> None:
    """Thousands of errors are counted, none of them twice."""
    nvml = listening(QUIET)
    heard = _tell(nvml, QUIET, scenario_file, 31)
    replace(QUIET, xids=[heard, SimulatedXid(0, 13, count=1000)]).write(scenario_file)
    eventually(lambda: (0, 13, 1000) in _errors(nvml))


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
