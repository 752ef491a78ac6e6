"""Values that no card can have, and answers that contradict themselves: absent, and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import ManualClock

from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.simulated import GIB, Card, Fault, Scenario, SimulatedProcess, build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.exporter.devices import DeviceSnapshot, Gpu

    Driver = Callable[[Scenario], Nvml]

MIB = 2**20
NOT_SUPPORTED, UNKNOWN = 3, 999
COMPUTE, GRAPHICS = (f"nvmlDeviceGet{kind}RunningProcesses*" for kind in ("Compute", "Graphics"))
SAMPLES = "nvmlDeviceGetProcessUtilization"


def _only(snapshot: DeviceSnapshot) -> Gpu:
    (gpu,) = snapshot.gpus
    return gpu


def _process(pid: int, sm: int = 0, **changes: object) -> SimulatedProcess:
    values = {"card": 0, "pid": pid, "sm": sm, "memory": GIB, "ghost": 1, **changes}
    return SimulatedProcess(**values)  # type: ignore[arg-type]


def _ratios(snapshot: DeviceSnapshot) -> dict[int, float | None]:
    return {item.pid: item.utilization_ratio for item in _only(snapshot).processes or ()}


@pytest.mark.parametrize(
    ("card", "attribute"),
    [
        (Card(0, utilization=101), "utilization_ratio"),
        (Card(0, utilization=4294967295), "utilization_ratio"),
        (Card(0, activity=65535, utilization=0), "memory_activity_ratio"),
        (Card(0, told_used=41 * GIB), "memory_used_bytes"),
        (Card(0, memory=0), "memory_total_bytes"),
        (Card(0, temperature=250), "temperature_celsius"),
        (Card(0, temperature=2147483647), "temperature_celsius"),
        (Card(0, limit=0), "power_limit_watts"),
        (Card(0, power=2147484), "power_watts"),
        (Card(0, energy=2**60), "energy_joules"),
    ],
)
def test_beyond_reason(driver: Driver, card: Card, attribute: str) -> None:
    """What cannot be is absent, is counted, and takes no other value with it."""
    snapshot = driver(Scenario([card])).snapshot()
    gpu = _only(snapshot)
    assert getattr(gpu, attribute) is None
    assert snapshot.dropped == {"invalid_value": 1}
    assert (snapshot.complete, gpu.up, gpu.clocks_hertz["sm"]) == (True, True, 1.41e9)


def test_clocks_and_errors_beyond_reason(driver: Driver) -> None:
    """Clocks of a terahertz and errors without number are none."""
    card = Card(0, sm_clock=4294967295, ecc_corrected=2**60, ecc_uncorrected=5)
    snapshot = driver(Scenario([card])).snapshot()
    gpu = _only(snapshot)
    assert (gpu.clocks_hertz, gpu.ecc_errors) == ({"memory": 1.215e9}, {"uncorrected": 5})
    assert snapshot.dropped == {"invalid_value": 4}


@pytest.mark.parametrize("celsius", [-5, -40, 0, 95])
def test_below_zero(driver: Driver, celsius: int) -> None:
    """NVML's older call says temperatures without a sign; a card may be cold all the same."""
    card = Card(0, temperature=celsius % 2**32)
    assert _only(driver(Scenario([card])).snapshot()).temperature_celsius == celsius


def test_ecc_of_one_kind(driver: Driver) -> None:
    """A card that does not count corrected errors may count the others."""
    faults = [Fault("nvmlDeviceGetTotalEccErrors", NOT_SUPPORTED, times=1)]
    snapshot = driver(Scenario([Card(0, ecc_uncorrected=2)], faults=faults)).snapshot()
    assert (_only(snapshot).ecc_errors, snapshot.dropped) == ({"uncorrected": 2}, {})


def test_a_failed_temperature_is_counted(driver: Driver) -> None:
    """A failure is no older driver: it is counted, whatever the other version would say."""
    faults = [Fault("nvmlDeviceGetTemperature", UNKNOWN)]
    snapshot = driver(Scenario([Card(0)], faults=faults)).snapshot()
    assert _only(snapshot).temperature_celsius is None
    assert snapshot.dropped == {"nvml_error": 1}


def test_the_newer_temperature(driver: Driver) -> None:
    """Where the deprecated function is gone its successor is asked."""
    scenario = Scenario([Card(0, temperature=66)], missing=["nvmlDeviceGetTemperature"])
    assert _only(driver(scenario).snapshot()).temperature_celsius == 66


@pytest.mark.parametrize("code", [2, 3, 13, 25])
def test_memory_of_an_older_driver(driver: Driver, code: int) -> None:
    """The first version's sum of used memory has the reserve in it: it is not said to be without.

    H200 capture: 614 MiB reserved; as unattributed it would be nobody's guilt.
    """
    card = Card(0, memory=143771 * MIB, reserved=614 * MIB)
    processes = [_process(1, memory=2566 * MIB), _process(2, memory=1542 * MIB)]
    faults = [Fault("nvmlDeviceGetMemoryInfo_v2", code)]
    gpu = _only(driver(Scenario([card], processes, faults=faults)).snapshot())
    assert gpu.memory_total_bytes == 143771 * MIB
    assert (gpu.memory_used_bytes, gpu.memory_reserved_bytes) == (None, None)


class TestProcesses:
    """Tables of processes that cannot be right."""

    def test_more_memory_than_the_card_has(self, driver: Driver) -> None:
        """Of a process with more memory than there is, the memory is not known."""
        processes = [_process(1, memory=2**50), _process(2, memory=3 * GIB)]
        snapshot = driver(Scenario([Card(0)], processes)).snapshot()
        memory = {item.pid: item.memory_bytes for item in _only(snapshot).processes or ()}
        assert memory == {1: None, 2: 3 * GIB}
        assert snapshot.dropped == {"invalid_value": 1}

    @pytest.mark.parametrize("call", [COMPUTE, GRAPHICS])
    @pytest.mark.parametrize("count", [65, 70_000, 2**32 - 1])
    def test_more_rows_than_were_written(self, driver: Driver, call: str, count: int) -> None:
        """A list that says it is longer than it had room for is no list."""
        faults = [Fault(call, 0, count=count)]
        snapshot = driver(Scenario([Card(0)], [_process(1)], faults=faults)).snapshot()
        assert (_only(snapshot).processes, snapshot.complete) == (None, False)
        assert sum(snapshot.dropped.values()) >= 1

    def test_a_list_that_was_wrong_once(self, driver: Driver) -> None:
        """The next snapshot is right again, and is not asked for with memory for thousands."""
        faults = [Fault(COMPUTE, 0, count=2**32 - 1, times=4)]
        nvml = driver(Scenario([Card(0)], [_process(1)], faults=faults))
        assert _only(nvml.snapshot()).processes is None
        assert [item.pid for item in _only(nvml.snapshot()).processes or ()] == [1]

    def test_a_pid_in_several_lists(self, driver: Driver) -> None:
        """A process that computes, draws and uses MPS is one, with the most memory told of it."""
        rows = [
            _process(1, memory=GIB),
            _process(1, memory=3 * GIB, kind="graphics"),
            _process(1, memory=2 * GIB, kind="mps"),
        ]
        processes = _only(driver(Scenario([Card(0)], rows)).snapshot()).processes or ()
        assert [(item.pid, item.memory_bytes) for item in processes] == [(1, 3 * GIB)]


class TestSamples:
    """0 only where the driver said so."""

    def test_a_sample_of_the_future(self, driver: Driver) -> None:
        """A sample of next minute tells nothing of now: neither its value nor idleness."""
        rows = [_process(1, sm=60, sample_age=-60.0), _process(2, sm=30)]
        snapshot = driver(Scenario([Card(0, utilization=35)], rows)).snapshot()
        assert _ratios(snapshot) == {1: None, 2: 0.3}
        assert snapshot.dropped == {"invalid_sample": 1}

    def test_a_sample_beyond_reason(self, driver: Driver) -> None:
        """A process whose sample cannot be believed is not idle."""
        rows = [_process(1, sm=300), _process(2, sm=1), _process(3)]
        snapshot = driver(Scenario([Card(0, utilization=5)], rows)).snapshot()
        assert _ratios(snapshot) == {1: None, 2: 0.01, 3: 0.0}

    def test_samples_that_are_missing(self, driver: Driver) -> None:
        """On a card far busier than its samples add up to, who has none is not known to be idle."""
        rows = [_process(1, sm=2), _process(2)]
        snapshot = driver(Scenario([Card(0, utilization=97)], rows)).snapshot()
        assert _ratios(snapshot) == {1: 0.02, 2: None}
        assert snapshot.dropped == {"contradiction": 1}

    def test_samples_that_add_up(self, driver: Driver) -> None:
        """Where they do add up, who has none did nothing."""
        rows = [_process(1, sm=60), _process(2, sm=37), _process(3)]
        snapshot = driver(Scenario([Card(0, utilization=97)], rows)).snapshot()
        assert _ratios(snapshot) == {1: 0.6, 2: 0.37, 3: 0.0}

    @pytest.mark.parametrize(("count", "reason"), [(100, "contradiction"), (10**9, "nvml_error")])
    def test_samples_that_were_not_written(self, driver: Driver, count: int, reason: str) -> None:
        """Rows without pid and time are room that was not used; they make nobody idle."""
        faults = [Fault(SAMPLES, 0, count=count)]
        snapshot = driver(Scenario([Card(0)], [_process(1, sm=50)], faults=faults)).snapshot()
        assert (_ratios(snapshot), snapshot.dropped) == ({1: None}, {reason: 1})

    def test_after_the_driver_hung(self, scenario_file: Path) -> None:
        """However long ago the last snapshot was: what was busy a minute ago is not busy now."""
        clock = ManualClock()
        rows = [_process(1, sm=50, sample_age=60.0), _process(2, sm=5)]
        scenario = Scenario([Card(0, utilization=5)], rows).write(scenario_file)
        early = ManualClock(clock.wall() - 300)
        nvml = Nvml(build(), scenario=scenario, clock=early)
        nvml.open()
        nvml.snapshot()
        early.advance(300)
        assert _ratios(nvml.snapshot()) == {1: 0.0, 2: 0.05}
        nvml.close()
