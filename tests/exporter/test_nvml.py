"""NVML's kinds of answers, given by the simulated library under the real pynvml."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs
from tests.exporter.nodes import Children, eventually

from gpuwarden.errors import DriverUnavailable, InvalidInput
from gpuwarden.exporter.devices import ProcessKind
from gpuwarden.exporter.nvml import Nvml, open_gpus
from gpuwarden.exporter.simulated import (
    GIB,
    NOT_AVAILABLE,
    SONAME,
    Card,
    Fault,
    Scenario,
    SimulatedProcess,
    build,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Driver = Callable[[Scenario], Nvml]

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE, LOST, UNKNOWN = 3, 4, 6, 7, 15, 999
UTILIZATION = "nvmlDeviceGetProcessUtilization"


def _ghost(pid: int = 100, **changes: object) -> SimulatedProcess:
    values: dict[str, Any] = {"card": 0, "pid": pid, "memory": GIB, "ghost": 1}
    return SimulatedProcess(**{**values, **changes})


def _ratios(nvml: Nvml) -> dict[int, float | None]:
    processes = nvml.snapshot().gpus[0].processes
    assert processes is not None
    return {process.pid: process.utilization_ratio for process in processes}


def _mapped(library: Path) -> set[int]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if f" {library}" in line}


def _open_below(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = entry.readlink()
            if target.parent == folder:
                found.append(target.name)
    return sorted(found)


class TestCards:
    """What is said of a card, and what is not."""

    def test_a_healthy_card(self, driver: Driver) -> None:
        """Every value comes in base units, and memory without the driver's reserve."""
        card = Card(0, reserved=614 * 2**20, used=20 * 2**20, temperature=55, power=321)
        scenario = Scenario(cards=[card], processes=[_ghost(memory=2 * GIB)], driver="580.1")
        snapshot = driver(scenario).snapshot()
        gpu = snapshot.gpus[0]
        assert (snapshot.driver_version, snapshot.simulated) == ("580.1", True)
        assert (snapshot.complete, snapshot.dropped) == (True, {})
        assert (gpu.index, gpu.uuid, gpu.name) == (0, card.uuid, "NVIDIA A100-SXM4-40GB")
        assert gpu.memory_total_bytes == 40 * GIB
        assert gpu.memory_used_bytes == 2 * GIB + 20 * 2**20
        assert gpu.memory_reserved_bytes == 614 * 2**20
        assert (gpu.temperature_celsius, gpu.power_watts, gpu.power_limit_watts) == (55, 321, 400)
        assert gpu.clocks_hertz["sm"] == 1.41e9
        assert gpu.ecc_errors == {"corrected": 0, "uncorrected": 0}

    def test_a_lost_card_beside_a_healthy_one(self, driver: Driver, scenario_file: Path) -> None:
        """A card off the bus is down and has no values; the other one is not concerned."""
        healthy = Scenario(cards=[Card(0, utilization=50), Card(1, utilization=60)])
        nvml = driver(healthy)
        assert nvml.snapshot().gpus[1].utilization_ratio == 0.6
        replace(healthy, faults=[Fault("*", LOST, card=1)]).write(scenario_file)
        gpus = eventually(lambda: nvml.snapshot().gpus, until=lambda gpus: not gpus[1].up)
        assert (gpus[0].up, gpus[0].utilization_ratio) == (True, 0.5)
        lost = gpus[1]
        assert lost.uuid == Card(1).uuid
        assert (lost.utilization_ratio, lost.memory_used_bytes, lost.processes) == (None,) * 3

    def test_a_card_lost_from_the_start(self, driver: Driver) -> None:
        """A card that was never seen is down without an identity, and is no other card."""
        scenario = Scenario(cards=[Card(0), Card(1)], faults=[Fault("*", LOST, card=1)])
        lost = driver(scenario).snapshot().gpus[1]
        assert (lost.index, lost.uuid, lost.up) == (1, "", False)

    def test_what_is_not_supported_is_absent(self, driver: Driver) -> None:
        """A missing feature is no value and no fault."""
        missing = ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors"]
        faults = [Fault("nvmlDeviceGetUtilizationRates", NOT_SUPPORTED)]
        snapshot = driver(Scenario([Card(0)], faults=faults, missing=missing)).snapshot()
        gpu = snapshot.gpus[0]
        assert (gpu.power_watts, gpu.ecc_errors, gpu.utilization_ratio) == (None, {}, None)
        assert (snapshot.dropped, snapshot.complete) == ({}, True)

    def test_unified_memory(self, driver: Driver) -> None:
        """A card that has no memory of its own has no memory values, and all others."""
        faults = [Fault("nvmlDeviceGetMemoryInfo*", NOT_SUPPORTED)]
        gpu = driver(Scenario([Card(0, utilization=7)], faults=faults)).snapshot().gpus[0]
        assert (gpu.memory_total_bytes, gpu.memory_used_bytes) == (None, None)
        assert (gpu.memory_unified, gpu.utilization_ratio) == (True, 0.07)

    @pytest.mark.parametrize(
        ("scenario", "unified"),
        [
            (Scenario([Card(0, memory=0, reserved=0)]), True),
            (Scenario([Card(0)]), False),
            (Scenario([Card(0)], missing=["nvmlDeviceGetMemoryInfo*"]), None),
            (Scenario([Card(0)], faults=[Fault("nvmlDeviceGetMemoryInfo*", 999)]), None),
        ],
    )
    def test_what_is_known_of_unified_memory(
        self, driver: Driver, scenario: Scenario, unified: bool | None
    ) -> None:
        """No memory at all is the node's memory; what failed is not known."""
        gpu = driver(scenario).snapshot().gpus[0]
        assert gpu.memory_unified is unified
        assert (gpu.memory_total_bytes is None) == (unified is not False)

    def test_a_card_does_not_lose_its_memory(self, driver: Driver, scenario_file: Path) -> None:
        """A card that had memory and tells nothing now has failed; it does not use the node's."""
        nvml = driver(Scenario([Card(0)]))
        nvml.snapshot()
        faults = [Fault("nvmlDeviceGetMemoryInfo*", NOT_SUPPORTED)]
        Scenario([Card(0)], faults=faults).write(scenario_file)
        snapshot = eventually(
            nvml.snapshot, until=lambda seen: seen.gpus[0].memory_total_bytes is None
        )
        assert snapshot.gpus[0].memory_unified is None
        assert snapshot.dropped == {"invalid_value": 1}

    def test_a_driver_before_memory_v2(self, driver: Driver) -> None:
        """Without the second version nobody knows what is reserved."""
        scenario = Scenario([Card(0)], missing=["nvmlDeviceGetMemoryInfo_v2"])
        gpu = driver(scenario).snapshot().gpus[0]
        assert (gpu.memory_total_bytes, gpu.memory_reserved_bytes) == (40 * GIB, None)

    @pytest.mark.parametrize(
        ("code", "reason"), [(NO_PERMISSION, "permission"), (999, "nvml_error")]
    )
    def test_failures_are_counted(self, driver: Driver, code: int, reason: str) -> None:
        """A value that failed is absent, and counted by why."""
        faults = [Fault("nvmlDeviceGetTotalEnergyConsumption", code)]
        snapshot = driver(Scenario([Card(0)], faults=faults)).snapshot()
        assert snapshot.gpus[0].energy_joules is None
        assert snapshot.dropped == {reason: 1}

    def test_a_name_that_is_not_text(self, driver: Driver) -> None:
        """Garbage for a name leaves the card known by its UUID."""
        gpu = driver(Scenario([Card(0, name="\udcf8\udcff")])).snapshot().gpus[0]
        assert gpu.name == "\N{REPLACEMENT CHARACTER}" * 2
        assert gpu.uuid == Card(0).uuid

    def test_cards_come_and_change_their_index(self, driver: Driver, scenario_file: Path) -> None:
        """Cards are known by UUID, whatever index they have now."""
        first = Card(0, uuid="GPU-a", utilization=10)
        nvml = driver(Scenario([first]))
        assert [gpu.uuid for gpu in nvml.snapshot().gpus] == ["GPU-a"]
        second = Card(0, uuid="GPU-b", utilization=20)
        Scenario([second, replace(first, index=1)]).write(scenario_file)
        gpus = eventually(lambda: nvml.snapshot().gpus, until=lambda gpus: len(gpus) == 2)
        assert [(gpu.uuid, gpu.utilization_ratio) for gpu in gpus] == [
            ("GPU-b", 0.2),
            ("GPU-a", 0.1),
        ]

    def test_mig_has_no_utilization(self, driver: Driver) -> None:
        """On a MIG card neither the card nor a process has a utilization; memory is there."""
        snapshot = driver(Scenario([Card(0, mig=1)], processes=[_ghost(sm=50)])).snapshot()
        gpu = snapshot.gpus[0]
        assert gpu.mig_enabled
        assert gpu.utilization_ratio is None
        assert gpu.processes is not None
        assert gpu.processes[0].utilization_ratio is None
        assert gpu.processes[0].memory_bytes == GIB
        assert snapshot.dropped == {"unsupported": 1}

    def test_persistence_mode_off(self, driver: Driver) -> None:
        """A card that is shut down whenever nobody uses it is warned of, once."""
        nvml = driver(Scenario([Card(0), Card(1, persistence=0)]))
        with capture_logs() as logs:
            nvml.snapshot()
            nvml.snapshot()
        assert [line["uuid"] for line in logs if "persistence" in line["event"]] == [Card(1).uuid]

    def test_busy_without_a_process(self, driver: Driver) -> None:
        """A card that is stuck at 100 % without a process is shown so."""
        gpu = driver(Scenario([Card(0, utilization=100)])).snapshot().gpus[0]
        assert (gpu.utilization_ratio, gpu.processes) == (1.0, ())


class TestProcessUtilization:
    """0 only where the driver said so."""

    def test_not_found_means_zero_for_a_listed_process(self, driver: Driver) -> None:
        """A listed process without a sample did nothing, where samples work."""
        snapshot = driver(Scenario([Card(0)], processes=[_ghost()])).snapshot()
        processes = snapshot.gpus[0].processes
        assert processes is not None
        assert (processes[0].memory_bytes, processes[0].utilization_ratio) == (GIB, 0.0)
        assert snapshot.dropped == {}

    @pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN])
    def test_an_error_is_not_idleness(self, driver: Driver, code: int) -> None:
        """Where samples fail, a busy process is not known to be idle."""
        scenario = Scenario([Card(0)], [_ghost(sm=97)], faults=[Fault(UTILIZATION, code)])
        assert _ratios(driver(scenario)) == {100: None}

    def test_a_missing_function_is_not_idleness(self, driver: Driver) -> None:
        """A driver without samples tells of nobody's load."""
        assert _ratios(driver(Scenario([Card(0)], [_ghost(sm=97)], missing=[UTILIZATION]))) == {
            100: None
        }

    def test_success_with_nothing(self, driver: Driver) -> None:
        """Success with no samples is the same as none found."""
        scenario = Scenario([Card(0, utilization=0)], [_ghost()], faults=[Fault(UTILIZATION, 0)])
        assert _ratios(driver(scenario)) == {100: 0.0}

    def test_a_busy_card_without_samples(self, driver: Driver) -> None:
        """A card busy by nobody's samples cannot tell who is idle."""
        scenario = Scenario([Card(0, utilization=97)], [_ghost()])
        nvml = driver(scenario)
        assert _ratios(nvml) == {100: None}
        assert nvml.snapshot().dropped == {"contradiction": 1}

    def test_a_busy_card_whose_samples_say_idle(self, driver: Driver) -> None:
        """Samples that account for none of a card's load prove nobody's idleness."""
        nvml = driver(Scenario([Card(0, utilization=97)], [_ghost(1, mem=5), _ghost(2)]))
        assert _ratios(nvml) == {1: None, 2: None}
        assert nvml.snapshot().dropped == {"contradiction": 2}

    def test_a_client_of_mps_without_samples(self, driver: Driver) -> None:
        """Load may be booked on the MPS server: its client without a sample is not known."""
        rows = [_ghost(7, sm=60), _ghost(8, kind="mps"), _ghost(9, kind="mps", sm=5)]
        assert _ratios(driver(Scenario([Card(0)], rows))) == {7: 0.6, 8: None, 9: 0.05}

    def test_shares_of_two(self, driver: Driver) -> None:
        """Two processes on one card each have their own share."""
        assert _ratios(driver(Scenario([Card(0)], [_ghost(1, sm=60), _ghost(2, sm=37)]))) == {
            1: 0.6,
            2: 0.37,
        }

    def test_stale_samples_are_dropped(self, driver: Driver) -> None:
        """A sample of nine seconds ago says nothing about now."""
        scenario = Scenario([Card(0)], [_ghost(1, sm=5), _ghost(2, sm=3, sample_age=9.0)])
        assert _ratios(driver(scenario)) == {1: 0.05, 2: 0.0}

    def test_a_short_time_between_two_looks(self, driver: Driver) -> None:
        """Looking again at once does not turn a busy process into an idle one."""
        nvml = driver(Scenario([Card(0)], [_ghost(sm=97)]))
        assert [_ratios(nvml) for _ in range(5)] == [{100: 0.97}] * 5

    def test_a_sample_beyond_reason(self, driver: Driver) -> None:
        """More than 100 % is no value."""
        nvml = driver(Scenario([Card(0, utilization=0)], [_ghost(1, sm=300), _ghost(2, sm=1)]))
        snapshot = nvml.snapshot()
        assert snapshot.dropped == {"invalid_sample": 1}

    def test_more_processes_than_expected(self, driver: Driver) -> None:
        """Lists longer than any guess are read whole."""
        many = [_ghost(pid, sm=1, memory=1) for pid in range(1, 1001)]
        assert _ratios(driver(Scenario([Card(0)], many))) == dict.fromkeys(range(1, 1001), 0.01)

    def test_a_list_that_grows_while_it_is_read(self, driver: Driver) -> None:
        """An answer that did not fit is asked for again with more room."""
        faults = [Fault(UTILIZATION, INSUFFICIENT_SIZE, times=2)]
        assert _ratios(driver(Scenario([Card(0)], [_ghost(sm=9)], faults=faults))) == {100: 0.09}


class TestProcessList:
    """Who is on a card."""

    def test_nobody(self, driver: Driver) -> None:
        """An empty list is said; it is not the same as none."""
        assert driver(Scenario([Card(0)])).snapshot().gpus[0].processes == ()

    def test_a_list_that_cannot_be_read(self, driver: Driver) -> None:
        """Without its list a card tells of nobody, and the node is not whole."""
        faults = [Fault("nvmlDeviceGetComputeRunningProcesses*", UNKNOWN)]
        nvml = driver(Scenario([Card(0)], [_ghost()], faults=faults))
        snapshot = nvml.snapshot()
        assert (snapshot.gpus[0].processes, snapshot.complete) == (None, False)
        assert nvml.process_list() == {}

    def test_pids_that_cannot_be(self, driver: Driver) -> None:
        """A table with mostly impossible pids was read at wrong offsets, and is refused."""
        rows = [_ghost(7), _ghost(0), _ghost(4294967295)]
        snapshot = driver(Scenario([Card(0)], rows)).snapshot()
        assert snapshot.gpus[0].processes is None
        assert snapshot.dropped == {"pid": 2, "process_table": 1}
        assert not snapshot.complete

    def test_memory_that_is_not_told(self, driver: Driver) -> None:
        """Memory that the driver does not tell is not known, not huge."""
        processes = driver(Scenario([Card(0)], [_ghost(memory=NOT_AVAILABLE)])).process_list()
        assert processes[Card(0).uuid][0].memory_bytes is None

    @pytest.mark.parametrize("size", [32, 40, 48, 56, 64])
    def test_rows_of_another_size(self, driver: Driver, size: int) -> None:
        """Rows wider than the header's are noticed, and the older list is read instead."""
        rows = [_ghost(1, memory=5), _ghost(2, memory=6), _ghost(3, memory=7)]
        nvml = driver(Scenario([Card(0)], rows, row_bytes=size, driver="535.54.03"))
        snapshot = nvml.snapshot()
        assert snapshot.gpus[0].processes is not None
        assert {item.pid: item.memory_bytes for item in snapshot.gpus[0].processes} == {
            1: 5,
            2: 6,
            3: 7,
        }
        assert (snapshot.complete, snapshot.dropped) == (True, {})

    @pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 1000])
    @pytest.mark.parametrize("size", [32, 40, 64])
    def test_rows_of_another_size_and_no_older_list(
        self, driver: Driver, count: int, size: int
    ) -> None:
        """A table with rows of another size is refused, however long: it would mix up memory."""
        rows = [_ghost(pid, memory=5) for pid in range(1, count + 1)]
        missing = ["nvmlDeviceGetComputeRunningProcesses_v2"]
        snapshot = driver(Scenario([Card(0)], rows, missing=missing, row_bytes=size)).snapshot()
        assert snapshot.gpus[0].processes is None
        assert (snapshot.complete, snapshot.dropped) == (False, {"process_table": 1})

    def test_each_process_once(self, driver: Driver) -> None:
        """A process that computes and draws is one process; MPS clients are there."""
        rows = [
            _ghost(1, memory=5),
            _ghost(1, memory=5, kind="graphics"),
            _ghost(2, kind="mps"),
            _ghost(3, kind="graphics"),
        ]
        processes = driver(Scenario([Card(0)], rows)).process_list()[Card(0).uuid]
        assert [(process.pid, process.kind) for process in processes] == [
            (1, ProcessKind.COMPUTE),
            (2, ProcessKind.MPS),
            (3, ProcessKind.GRAPHICS),
        ]

    def test_memory_lingers_and_a_successor_moves_in(
        self, driver: Driver, children: Children
    ) -> None:
        """The dead stay on the list for a moment, and somebody else may take their place."""
        first, second = children.start(), children.start()
        nvml = driver(
            Scenario(
                [Card(0)],
                [
                    SimulatedProcess(0, first.pid, memory=30 * GIB, linger=0.5),
                    SimulatedProcess(0, second.pid, memory=8 * GIB, after=first.pid),
                ],
            )
        )

        def listed() -> list[int]:
            return [process.pid for process in nvml.process_list()[Card(0).uuid]]

        assert listed() == [first.pid]
        children.kill(first)
        gone = time.monotonic()
        assert listed() == [first.pid]
        assert eventually(listed, until=lambda pids: first.pid not in pids) == [second.pid]
        assert time.monotonic() - gone >= 0.5
        assert nvml.memory_used() == {Card(0).uuid: 8 * GIB}

    def test_two_users_of_a_scenario_agree(
        self, driver: Driver, children: Children, scenario_file: Path
    ) -> None:
        """Who died before a program opened the driver is dead for it too."""
        child = children.start()
        scenario = Scenario([Card(0)], [SimulatedProcess(0, child.pid, memory=GIB, linger=600)])
        first = driver(scenario)
        assert first.memory_used() == {Card(0).uuid: GIB}
        children.kill(child)
        first.close()
        second = Nvml(build(), scenario=scenario_file)
        second.open()
        assert second.memory_used() == {Card(0).uuid: GIB}
        assert second.snapshot().gpus[0].utilization_ratio == 0.0
        second.close()


class TestLifeCycle:
    """Drivers that are not there, go, and come back."""

    def test_no_library(self, tmp_path: Path) -> None:
        """A library that is not there says so."""
        with pytest.raises(DriverUnavailable, match="cannot be loaded"):
            Nvml(tmp_path / "libnvidia-ml.so.1").open()

    def test_not_loaded(self, driver: Driver) -> None:
        """A driver that is not loaded names its code and what to do."""
        with pytest.raises(DriverUnavailable, match="modprobe") as caught:
            driver(Scenario([Card(0)], faults=[Fault("nvmlInit*", 9)]))
        assert caught.value.nvml_code == 9

    def test_reloaded_while_in_use(self, driver: Driver, scenario_file: Path) -> None:
        """A driver that goes is reported once, and opened again when it is back."""
        scenario = Scenario([Card(0)])
        nvml = driver(scenario)
        nvml.snapshot()
        replace(scenario, faults=[Fault("nvmlDeviceGetCount_v2", 1)]).write(scenario_file)

        def gone() -> bool:
            try:
                nvml.snapshot()
            except DriverUnavailable:
                return True
            return False

        assert eventually(gone)
        assert not nvml.opened
        scenario.write(scenario_file)
        nvml.open()
        assert eventually(lambda: len(nvml.snapshot().gpus)) == 1

    def test_an_upgrade_brings_the_new_library(self, scenario_file: Path, tmp_path: Path) -> None:
        """After an upgrade under the running process the new library is loaded, not the old one."""
        scenario = Scenario([Card(0)])
        library = tmp_path / "lib" / SONAME
        library.parent.mkdir()
        shutil.copy(build(), library)
        nvml = Nvml(library, scenario=scenario.write(scenario_file))
        nvml.open()
        assert _mapped(library) == {library.stat().st_ino}
        replace(scenario, faults=[Fault("nvml*", 18)]).write(scenario_file)
        newer = tmp_path / "newer"
        shutil.copy(library, newer)
        newer.replace(library)

        def differ() -> bool:
            try:
                nvml.snapshot()
            except DriverUnavailable as error:
                return error.nvml_code == 18
            return False

        assert eventually(differ)
        assert not _mapped(library)
        with pytest.raises(DriverUnavailable, match="finish its upgrade"):
            nvml.open()
        assert not _mapped(library)
        scenario.write(scenario_file)
        nvml.open()
        assert len(nvml.snapshot().gpus) == 1
        assert _mapped(library) == {library.stat().st_ino}
        nvml.close()
        assert not _mapped(library)

    def test_a_library_that_cannot_be_dropped(self, scenario_file: Path, tmp_path: Path) -> None:
        """Only who had the driver before the upgrade, and cannot drop its library, is stale."""
        library = tmp_path / SONAME
        shutil.copy(build(), library)
        scenario = Scenario([Card(0)])
        upgraded = replace(scenario, faults=[Fault("nvml*", 18)])

        def versions_differ(nvml: Nvml) -> None:
            with pytest.raises(DriverUnavailable) as caught:
                nvml.open()
            assert caught.value.nvml_code == 18

        nvml = Nvml(library, scenario=scenario.write(scenario_file))
        nvml.open()
        nvml.close()
        upgraded.write(scenario_file)
        versions_differ(nvml)
        assert not nvml.stale
        # Stands for a library that was linked to stay.
        kept = _ctypes.dlopen(str(library), ctypes.DEFAULT_MODE)
        versions_differ(nvml)
        assert nvml.stale
        later = Nvml(library, scenario=scenario_file)
        versions_differ(later)
        assert not later.stale
        _ctypes.dlclose(kept)
        scenario.write(scenario_file)
        nvml.open()
        assert not nvml.stale
        nvml.close()

    def test_released(self, scenario_file: Path, tmp_path: Path) -> None:
        """A released driver has no device file open, and is not opened before it is acquired."""
        scenario = Scenario([Card(0), Card(1)])
        folder = tmp_path / "scenario.devices"
        folder.mkdir()
        nvml = Nvml(build(), scenario=scenario.write(scenario_file))
        nvml.open()
        assert _open_below(folder) == ["nvidia0", "nvidia1"]
        assert nvml.release()
        assert _open_below(folder) == []
        with pytest.raises(DriverUnavailable, match="gpuwarden exporter acquire"):
            nvml.open()
        nvml.acquire()
        nvml.open()
        assert len(nvml.snapshot().gpus) == 2
        nvml.close()

    def test_failed_openings_leave_nothing(self, scenario_file: Path) -> None:
        """However often a driver is tried in vain, no open file stays."""
        scenario = Scenario([Card(0)], faults=[Fault("nvmlInit*", 9)]).write(scenario_file)
        nvml = Nvml(build(), scenario=scenario)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(20):
            with pytest.raises(DriverUnavailable):
                nvml.open()
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_two_users_come_and_go(self, scenario_file: Path) -> None:
        """Drivers that are opened and closed on many threads keep nobody's library from him."""
        scenario = Scenario([Card(0)]).write(scenario_file)
        library = build()

        def work(_: int) -> list[str]:
            nvml = Nvml(library, scenario=scenario)
            seen = []
            for _ in range(20):
                nvml.open()
                seen.append(nvml.snapshot().gpus[0].uuid)
                nvml.close()
            return seen

        with ThreadPoolExecutor(4) as pool:
            for seen in pool.map(work, range(4)):
                assert seen == [Card(0).uuid] * 20

    def test_closed(self, driver: Driver) -> None:
        """A driver that is shut down answers no more."""
        nvml = driver(Scenario([Card(0)]))
        nvml.close()
        with pytest.raises(DriverUnavailable):
            nvml.snapshot()

    @pytest.mark.parametrize("flag", ["nvidia", "simulated", "simulated:"])
    def test_flags_that_name_no_driver(self, flag: str) -> None:
        """A wrong flag says what may be written."""
        with pytest.raises(InvalidInput, match="simulated:FILE"):
            open_gpus(flag)

    def test_a_scenario_with_mistakes(self, scenario_file: Path) -> None:
        """A wrong scenario is refused at the start, with every mistake at its place."""
        scenario_file.write_text("card indx=0\nprocess card=0 pid=1\n")
        with pytest.raises(InvalidInput) as caught:
            open_gpus(f"simulated:{scenario_file}")
        assert [(item.span.line, item.span.column) for item in caught.value.diagnostics] == [
            (1, 6),
            (2, 1),
        ]
