"""Every call that the exporter makes of the driver, with every code that it may answer.

Whatever fails, the page is there; what it says is what it said while nothing failed, or is not
there at all; the other cards are not concerned; and what is missing is counted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.exporter.nodes import ManualClock, eventually, own_launchers

import gpuwarden.exporter
from gpuwarden.catalogue import CATALOGUE
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.sampler import LAST_RETRY_SECONDS, Sampler
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
from gpuwarden.exporter.switches import SWITCHES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.exporter.nodes import Children

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]

# A few of each kind with every run, the others with the sweeps.
CODES = [
    pytest.param((1, 2, 3, 4, 6, 7, 13, 15, 18, 28, 999), id="some"),
    pytest.param((8, 9, 10, 12, 16, 17, 19, 25, 26), id="others", marks=pytest.mark.sweep),
]
FEATURE, LOST, LIFE_CYCLE, NO_PERMISSION = {3, 13, 25, 26}, {15, 16, 28}, {1, 9, 18}, 4
# What says that something is not there, and takes nothing away that is.
NOT_THERE = {
    ("nvmlDeviceGetHandleByIndex_v2", NO_PERMISSION),
    ("nvmlDeviceGetMemoryInfo_v2", 2),
    ("nvmlDeviceGetMigDeviceHandleByIndex", 6),
}
VERSIONS = {
    "nvmlDeviceGetCurrentClocks",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetTemperature",
    "nvmlEventSetWait",
}
MIG_CARD = 2

# Energy grows by itself, identity is as far as it is known, the others tell what is not there.
CHANGING = {"gpu_energy_joules_total", "gpu_info", "gpu_memory_unified", "gpu_up"}

_NAME = re.compile(r'"(nvml(?:Device|System|Event|Gpm)\w+)"')


def _calls() -> list[str]:
    """Names of all functions of the driver in the exporter's sources; some by their beginning."""
    folder = Path(next(iter(gpuwarden.exporter.__path__)))
    found = {name for file in folder.glob("*.py") for name in _NAME.findall(file.read_text())}
    lists = {name for name in found if name.endswith("RunningProcesses")}
    versions = {f"{name}{version}" for name in lists for version in ("_v2", "_v3", "*")}
    return sorted((found - lists) | versions | {f"{name}*" for name in VERSIONS})


CALLS = _calls()
OF_EVENTS = {call for call in CALLS if re.search("EventSet|RegisterEvents|ByUUID", call)}
OF_INSTANCES = {
    "nvmlDeviceGetAttributes_v2",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
}
OF_NO_CARD = {"nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion"}


class Node:
    """A node with two cards and one in MIG mode, each with a job."""

    def __init__(self, folder: Path, children: Children) -> None:
        self._folder = folder
        pids = [children.start().pid for _ in range(3)]
        cards = [
            Card(0, used=GIB, ecc_corrected=3, ecc_uncorrected=2, throttle=4),
            Card(1, used=GIB, ecc_corrected=3, ecc_uncorrected=2, throttle=4),
            Card(MIG_CARD, mig=1, used=GIB, ecc_corrected=3, ecc_uncorrected=2, throttle=4),
        ]
        processes = [
            SimulatedProcess(0, pids[0], memory=2 * GIB, sm=70, mem=30),
            SimulatedProcess(1, pids[1], memory=3 * GIB, sm=60, mem=20),
            SimulatedProcess(MIG_CARD, pids[2], memory=GIB, sm=50, gi=1, ci=0),
        ]
        instances = [SimulatedInstance(MIG_CARD, 1, "MIG-1", used=GIB)]
        self.healthy = Scenario(cards, processes, instances=instances)

    def pages(self, *faults: Fault, count: int = 1) -> Iterator[Samples]:
        """The first pages of an exporter that starts while calls fail."""
        clock = ManualClock()
        scenario = Scenario(
            self.healthy.cards,
            self.healthy.processes,
            instances=self.healthy.instances,
            faults=faults,
        )
        nvml = Nvml(
            build(), scenario=scenario.write(self._folder / "scenario"), collectors=SWITCHES
        )
        attribution = Attribution(self._folder, launchers=own_launchers(), clock=clock)
        sampler = Sampler(
            ExporterSettings(collectors=frozenset(SWITCHES)), nvml, attribution, clock=clock
        )
        try:
            for _ in range(count):
                body = sampler.sample().body
                assert list(parse_openmetrics(body[Format.OPENMETRICS].decode()))
                yield _samples(body[Format.TEXT].decode())
                clock.advance(LAST_RETRY_SECONDS)
        finally:
            sampler.stop()


def _samples(page: str) -> Samples:
    found: Samples = {}
    for family in parse_text(page):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def _of_cards(samples: Samples) -> Samples:
    """Those of cards and of what is on them, but for those that are to change."""
    return {
        (name, labels): value
        for (name, labels), value in samples.items()
        if "uuid" in CATALOGUE[name].labels and name not in CHANGING
    }


def _on(samples: Samples, *cards: int) -> Samples:
    """Those of some cards."""
    names = {str(card) for card in cards}
    return {key: value for key, value in samples.items() if dict(key[1])["gpu"] in names}


def _dropped(samples: Samples) -> float:
    return sum(
        value for (name, _), value in samples.items() if name == "gpuwarden_dropped_values_total"
    )


@pytest.fixture
def node(tmp_path: Path, children: Children) -> Node:
    """A node whose jobs are real."""
    return Node(tmp_path, children)


def test_all_calls_are_known() -> None:
    """Calls on a card, on an instance, for events and of the driver are tried as what they are."""
    assert len(CALLS) > 30
    assert set(CALLS) >= OF_INSTANCES | OF_NO_CARD | OF_EVENTS


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("call", sorted(set(CALLS) - OF_EVENTS - OF_NO_CARD))
def test_a_card_whose_call_fails(node: Node, call: str, codes: tuple[int, ...]) -> None:
    """Nothing is said that was not so before, no neighbour misses anything, and it is counted."""
    (healthy,) = node.pages()
    known, up = _of_cards(healthy), healthy["gpuwarden_nvml_up", ()]
    assert (up, _dropped(healthy)) == (1, 1)  # a process on an instance has no utilization
    broken = MIG_CARD if call in OF_INSTANCES else 0
    neighbours = {0, 1, MIG_CARD} - {broken}
    for code in codes:
        fault = Fault(call, code, card=broken)
        *_, page = node.pages(fault, count=3 if code in LIFE_CYCLE else 1)
        seen = _of_cards(page)
        assert page["gpuwarden_nvml_up", ()] == 1, code
        assert _on(seen, *neighbours) == _on(known, *neighbours), code
        if call not in OF_INSTANCES and call != "nvmlDeviceGetMigMode":
            assert seen.items() <= known.items(), code
        else:
            # Whom the instance belongs to is not known: what runs on it is on the card then.
            assert all(value for key, value in seen.items() if known.get(key) != 0), code
        missing = known.keys() - seen.keys()
        told = code in FEATURE | LOST or (call, code) in NOT_THERE
        assert not missing or told or _dropped(page) > 1, code


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("call", [*sorted(OF_NO_CARD), "nvmlInit*"])
def test_a_driver_whose_call_fails(node: Node, call: str, codes: tuple[int, ...]) -> None:
    """What concerns the whole driver leaves a page that says so, or one that lacks nothing else."""
    (healthy,) = node.pages()
    known = _of_cards(healthy)
    for code in codes:
        (page,) = node.pages(Fault(call, code))
        seen = _of_cards(page)
        assert seen.items() <= known.items(), code
        assert bool(seen) == (page["gpuwarden_nvml_up", ()] == 1), code


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("call", sorted(OF_EVENTS - {"nvmlEventSetFree", "nvmlEventSetWait"}))
def test_events_that_fail(node: Node, tmp_path: Path, call: str, codes: tuple[int, ...]) -> None:
    """Errors that cannot be heard are told of, and take nothing else from the page."""
    node.healthy.write(tmp_path / "scenario")
    for code in codes:
        scenario = Scenario(node.healthy.cards, faults=[Fault(call, code)])
        nvml = Nvml(build(), scenario=scenario.write(tmp_path / "scenario"))
        nvml.watch_xids()
        nvml.open()
        for _ in range(3):
            snapshot = nvml.snapshot()
            assert all(gpu.up for gpu in snapshot.gpus), code
            assert snapshot.complete, code
        if code in {2, 999, NO_PERMISSION}:
            eventually(nvml.snapshot, until=lambda snapshot: not snapshot.xids_heard)
        assert nvml.close(), code


@pytest.mark.parametrize("call", sorted(set(CALLS) - OF_EVENTS - OF_NO_CARD))
def test_success_without_a_value(node: Node, call: str) -> None:
    """A driver that says success and writes nothing has told nothing, not 0."""
    (healthy,) = node.pages()
    broken = MIG_CARD if call in OF_INSTANCES else 0
    *_, page = node.pages(Fault(call, 0, card=broken), count=2)
    known, seen = _of_cards(healthy), _of_cards(page)
    assert _on(seen, 1) == _on(known, 1)
    said_zero = {key for key, value in seen.items() if value == 0 and known.get(key) != 0}
    assert {name for name, _ in said_zero} <= {"gpu_processes"}
