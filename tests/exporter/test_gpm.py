"""GPM on the simulated driver: loads of MIG instances and tensor cores, from two samples each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import Children, ManualClock, eventually, own_launchers

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.simulated import (
    Card,
    Fault,
    Scenario,
    SimulatedInstance,
    SimulatedProcess,
    build,
    calls,
)
from gpuwarden.exporter.switches import DEFAULT_COLLECTORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, MigInstance

CARD = Card(0, mig=1, gpm=1)
SMALL = SimulatedInstance(0, 1, "MIG-small", tensor=20)
LARGE = SimulatedInstance(0, 2, "MIG-large", profile="3g.40gb")
PROCESSES = (
    SimulatedProcess(0, 1, sm=60, ghost=1, gi=1, ci=0),
    SimulatedProcess(0, 2, sm=7, ghost=1, gi=1, ci=0),
)
HOPPER = Scenario([CARD], PROCESSES, instances=[SMALL, LARGE])
TENSOR = DEFAULT_COLLECTORS | {"tensor"}


class Hopper:
    """A driver whose snapshots lie as far apart as the test says."""

    def __init__(self, nvml: Nvml, file: Path) -> None:
        self._nvml, self._file = nvml, file

    def put(self, scenario: Scenario) -> None:
        """Replace the cards."""
        scenario.write(self._file)

    def snapshot(self) -> DeviceSnapshot:
        """Read everything now."""
        return self._nvml.snapshot()

    def card(self) -> Gpu:
        """Its first card."""
        return self.snapshot().gpus[0]

    def instances(self) -> dict[str, MigInstance]:
        """Instances of the first card."""
        return {item.uuid: item for item in self.card().instances}

    def calls(self) -> int:
        """How many calls the driver has had."""
        return calls(self._file)

    def close(self) -> None:
        """Shut down, and come back."""
        self._nvml.close()
        self._nvml.open()


@pytest.fixture
def hopper(scenario_file: Path) -> Iterator[Callable[..., Hopper]]:
    """Opens a driver on a scenario."""
    opened: list[Nvml] = []

    def start(scenario: Scenario, *, collectors: frozenset[str] = DEFAULT_COLLECTORS) -> Hopper:
        nvml = Nvml(build(), scenario=scenario.write(scenario_file), collectors=collectors)
        nvml.open()
        opened.append(nvml)
        return Hopper(nvml, scenario_file)

    yield start
    for nvml in opened:
        nvml.close()


def _known(hopper: Hopper) -> dict[str, MigInstance]:
    """Instances once two samples lie far enough apart."""
    return eventually(
        hopper.instances,
        until=lambda seen: all(item.utilization_ratio is not None for item in seen.values()),
    )


class TestInstances:
    """What is known of an instance's load."""

    def test_the_load_of_an_instance(self, hopper: Callable[..., Hopper]) -> None:
        """The first snapshot knows nothing; then an instance has its own processes' load."""
        one = hopper(HOPPER)
        assert [item.utilization_ratio for item in one.instances().values()] == [None, None]
        seen = _known(one)
        assert {uuid: item.utilization_ratio for uuid, item in seen.items()} == {
            "MIG-small": 0.67,
            "MIG-large": 0.0,
        }
        assert [item.tensor_activity_ratio for item in seen.values()] == [None, None]
        snapshot = one.snapshot()
        assert snapshot.gpus[0].utilization_ratio is None
        # Of the two processes the load is still not known.
        assert snapshot.dropped == {"unsupported": 2}

    def test_snapshots_in_quick_succession(self, hopper: Callable[..., Hopper]) -> None:
        """Within 100 ms no new sample is taken, and the last value stands."""
        one = hopper(HOPPER)
        _known(one)
        quick = [one.instances()["MIG-small"].utilization_ratio for _ in range(20)]
        assert quick == [0.67] * 20

    @pytest.mark.parametrize(
        "scenario",
        [
            replace(HOPPER, cards=[replace(CARD, gpm=0)]),
            replace(HOPPER, missing=["nvmlGpm*"]),
            replace(HOPPER, faults=[Fault("nvmlGpmQueryDeviceSupport", 3)]),
            replace(HOPPER, faults=[Fault("nvmlGpmMigSampleGet", 3)]),
        ],
    )
    def test_a_card_without_gpm(self, hopper: Callable[..., Hopper], scenario: Scenario) -> None:
        """Before Hopper an instance has no load, which is no fault and costs nothing more."""
        one = hopper(scenario)
        for _ in range(3):
            snapshot = one.snapshot()
            assert [item.utilization_ratio for item in snapshot.gpus[0].instances] == [None, None]
            assert snapshot.dropped == {"unsupported": 2}
            assert snapshot.complete

    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            (Fault("nvmlGpmMigSampleGet", 4), "permission"),
            (Fault("nvmlGpmMetricsGet", 999), "nvml_error"),
            (Fault("nvmlGpmSampleAlloc", 20), "nvml_error"),
            (Fault("nvmlGpmQueryDeviceSupport", 999), "nvml_error"),
        ],
    )
    def test_what_fails_is_not_idle(
        self, hopper: Callable[..., Hopper], fault: Fault, reason: str
    ) -> None:
        """A failure leaves the load unknown, and is counted."""
        one = hopper(replace(HOPPER, faults=[fault]))
        eventually(one.snapshot, until=lambda seen: seen.dropped.get(reason, 0) > 0)
        assert all(item.utilization_ratio is None for item in one.instances().values())

    def test_after_a_failure_the_first_sample_is_the_first(
        self, hopper: Callable[..., Hopper]
    ) -> None:
        """What was sampled before a failure is compared with nothing."""
        one = hopper(HOPPER)
        _known(one)
        one.put(replace(HOPPER, faults=[Fault("nvmlGpmMigSampleGet", 999)]))
        eventually(lambda: one.instances()["MIG-small"].utilization_ratio is None)
        one.put(HOPPER)
        assert _known(one)["MIG-small"].utilization_ratio == 0.67

    def test_instances_that_are_made_anew(self, hopper: Callable[..., Hopper]) -> None:
        """Instances come and go; a new one begins without a value."""
        one = hopper(HOPPER)
        _known(one)
        other = SimulatedInstance(0, 5, "MIG-other")
        one.put(replace(HOPPER, processes=[], instances=[other]))
        eventually(one.instances, until=lambda seen: set(seen) == {"MIG-other"})
        assert _known(one)["MIG-other"].utilization_ratio == 0.0

    def test_a_card_that_is_lost(self, hopper: Callable[..., Hopper]) -> None:
        """A lost card's instances have no load, and one that is back begins anew."""
        one = hopper(HOPPER)
        _known(one)
        one.put(replace(HOPPER, faults=[Fault("nvmlGpmMigSampleGet", 15)]))
        lost = eventually(one.card, until=lambda card: not card.up)
        assert [item.utilization_ratio for item in lost.instances] == [None, None]
        one.put(HOPPER)
        eventually(one.card, until=lambda card: card.up)
        _known(one)

    def test_a_driver_that_was_closed(self, hopper: Callable[..., Hopper]) -> None:
        """Samples of a driver that was shut down are not used with the next."""
        one = hopper(HOPPER)
        _known(one)
        one.close()
        assert [item.utilization_ratio for item in one.instances().values()] == [None, None]
        _known(one)


class TestJobs:
    """Whose load it is."""

    def test_alone_on_an_instance(
        self, hopper: Callable[..., Hopper], jobs: Path, clock: ManualClock, children: Children
    ) -> None:
        """A sole tenant of an instance has its load; on a shared one nobody has any."""
        pids = [children.start().pid for _ in range(3)]
        processes = [
            SimulatedProcess(0, pids[0], sm=40, gi=1, ci=0),
            SimulatedProcess(0, pids[1], sm=50, gi=2, ci=0),
            SimulatedProcess(0, pids[2], sm=10, gi=2, ci=0),
        ]
        one = hopper(replace(HOPPER, processes=processes))
        _known(one)
        attribution = Attribution(jobs, launchers=own_launchers(), clock=clock)
        found = {
            job.root.pid: job.holdings[0].utilization_ratio
            for job in attribution.observe(one.snapshot()).jobs
        }
        attribution.close()
        assert found == {pids[0]: 0.4, pids[1]: None, pids[2]: None}

    def test_two_compute_instances(
        self, hopper: Callable[..., Hopper], jobs: Path, clock: ManualClock, children: Children
    ) -> None:
        """The load of a GPU instance that two compute instances share is nobody's."""
        pid = children.start().pid
        parts = [replace(SMALL, uuid="MIG-a"), replace(SMALL, uuid="MIG-b", ci=1)]
        processes = [SimulatedProcess(0, pid, sm=40, gi=1, ci=1)]
        one = hopper(replace(HOPPER, processes=processes, instances=parts))
        _known(one)
        attribution = Attribution(jobs, launchers=own_launchers(), clock=clock)
        (job,) = attribution.observe(one.snapshot()).jobs
        attribution.close()
        assert (job.holdings[0].uuid, job.holdings[0].utilization_ratio) == ("MIG-b", None)


class TestTensorCores:
    """Opt-in, on whole cards and on instances."""

    def test_a_whole_card(self, hopper: Callable[..., Hopper]) -> None:
        """Where it is asked for, a card with GPM tells its tensor cores' activity."""
        scenario = Scenario([Card(0, gpm=1, tensor=35), Card(1, tensor=35)])
        one = hopper(scenario, collectors=TENSOR)
        assert one.card().tensor_activity_ratio is None
        assert eventually(lambda: one.card().tensor_activity_ratio) == 0.35
        assert one.snapshot().gpus[1].tensor_activity_ratio is None
        assert one.snapshot().dropped == {}

    def test_instances(self, hopper: Callable[..., Hopper]) -> None:
        """An instance tells its own."""
        one = hopper(HOPPER, collectors=TENSOR)
        seen = _known(one)
        assert seen["MIG-small"].tensor_activity_ratio == 0.2
        assert one.card().tensor_activity_ratio is None

    def test_not_asked_for(self, hopper: Callable[..., Hopper]) -> None:
        """By default a card without MIG is not sampled at all."""
        with_gpm = hopper(Scenario([Card(0, gpm=1, tensor=35)]))
        with_gpm.snapshot()
        before = with_gpm.calls()
        assert with_gpm.card().tensor_activity_ratio is None
        cost = with_gpm.calls() - before
        with_gpm.put(Scenario([Card(0)]))
        eventually(lambda: with_gpm.card().uuid)
        before = with_gpm.calls()
        with_gpm.snapshot()
        assert with_gpm.calls() - before == cost
