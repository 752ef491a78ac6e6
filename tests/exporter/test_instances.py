"""MIG: an instance is a card of its own for a job, and nothing on it has a utilization."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.nodes import Children, ManualClock, eventually, own_launchers, process_of

from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.collector import collect
from gpuwarden.exporter.pages import Bodies, Format
from gpuwarden.exporter.processes import PROC, boot_id, proc_job_id, read_all
from gpuwarden.exporter.simulated import (
    GIB,
    Card,
    Fault,
    Scenario,
    SimulatedInstance,
    SimulatedProcess,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.exporter.jobs import NodeSnapshot
    from gpuwarden.exporter.nvml import Nvml

    Driver = Callable[[Scenario], Nvml]
    Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

LOST = 15
CARD = Card(0, mig=1, utilization=97)
SMALL = SimulatedInstance(0, 1, "MIG-small", memory=5 * GIB, used=GIB)
LARGE = SimulatedInstance(0, 2, "MIG-large", profile="3g.20gb", memory=20 * GIB)


def _ghost(pid: int, memory: int, gi: int | None, ci: int | None = 0) -> SimulatedProcess:
    return SimulatedProcess(0, pid, memory=memory, sm=50, ghost=1, gi=gi, ci=ci)


class TestDriver:
    """What the driver tells of instances."""

    def test_identity_and_memory(self, driver: Driver) -> None:
        """Each instance has its ids, its profile, and the memory of its own processes."""
        processes = [_ghost(1, 2 * GIB, gi=1), _ghost(2, 7 * GIB, gi=2)]
        scenario = Scenario([CARD, Card(1)], processes, instances=[SMALL, LARGE])
        gpus = driver(scenario).snapshot().gpus
        assert [
            (item.uuid, item.gpu_instance_id, item.compute_instance_id, item.profile)
            for item in gpus[0].instances
        ] == [("MIG-small", 1, 0, "1g.5gb"), ("MIG-large", 2, 0, "3g.20gb")]
        assert [
            (item.memory_used_bytes, item.memory_total_bytes) for item in gpus[0].instances
        ] == [(3 * GIB, 5 * GIB), (7 * GIB, 20 * GIB)]
        assert gpus[1].instances == ()

    def test_processes_name_their_instance(self, driver: Driver) -> None:
        """A process on an instance has its ids; one on the card has none, not 4294967295."""
        processes = [_ghost(1, GIB, gi=1), _ghost(2, GIB, gi=None, ci=None)]
        snapshot = driver(Scenario([CARD], processes, instances=[SMALL])).snapshot()
        assert [
            (item.pid, item.gpu_instance_id, item.compute_instance_id, item.utilization_ratio)
            for item in snapshot.gpus[0].processes or ()
        ] == [(1, 1, 0, None), (2, None, None, None)]
        assert snapshot.dropped == {"unsupported": 2}

    def test_an_instance_that_cannot_be_told_from_others(self, driver: Driver) -> None:
        """Without its ids nobody can be said to run on an instance; the failure is counted."""
        faults = [Fault("nvmlDeviceGetGpuInstanceId", 999)]
        snapshot = driver(Scenario([CARD], instances=[SMALL], faults=faults)).snapshot()
        assert snapshot.gpus[0].instances == ()
        assert snapshot.dropped == {"nvml_error": 1, "enumeration": 1}

    def test_instances_that_come_and_go(self, driver: Driver, scenario_file: Path) -> None:
        """Instances are looked for each time: operators make and unmake them."""
        nvml = driver(Scenario([CARD], instances=[SMALL]))
        Scenario([CARD], instances=[LARGE]).write(scenario_file)

        def seen() -> list[str]:
            return [item.uuid for item in nvml.snapshot().gpus[0].instances]

        eventually(seen, until=lambda uuids: uuids == ["MIG-large"])
        Scenario([replace(CARD, mig=0)]).write(scenario_file)
        eventually(seen, until=lambda uuids: uuids == [])


class Node:
    """A node with one card in MIG mode, and its page."""

    def __init__(self, driver: Driver, file: Path, attribution: Attribution) -> None:
        self._driver, self._file, self._attribution = driver, file, attribution
        self._nvml: Nvml | None = None

    def observe(self, scenario: Scenario) -> NodeSnapshot:
        """Read the node once it is as the scenario says."""
        if self._nvml is None:
            self._nvml = self._driver(scenario)
        else:
            scenario.write(self._file)
        return self._attribution.observe(self._nvml.snapshot())


@pytest.fixture
def node(driver: Driver, scenario_file: Path, jobs: Path, clock: ManualClock) -> Iterator[Node]:
    """A node whose processes are real."""
    attribution = Attribution(jobs, launchers=own_launchers(), clock=clock)
    yield Node(driver, scenario_file, attribution)
    attribution.close()


def _job_id(pid: int) -> str:
    return proc_job_id(process_of(pid), boot_id())


def _holdings(snapshot: NodeSnapshot) -> dict[str, list[tuple[int, str, int | None]]]:
    return {
        job.job_id: [(item.index, item.uuid, item.memory_bytes) for item in job.holdings]
        for job in snapshot.jobs
    }


def _page(snapshot: NodeSnapshot) -> Samples:
    families, _ = collect(snapshot, totals={})
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(Bodies(families)[Format.TEXT].decode())
        for sample in family.samples
    }


class TestJobs:
    """Whose an instance is."""

    def test_an_instance_is_a_card_of_its_own(self, node: Node, children: Children) -> None:
        """Jobs on two instances of a card do not share a card, and neither has a utilization."""
        first, second = children.start().pid, children.start().pid
        processes = [
            SimulatedProcess(0, first, memory=2 * GIB, sm=60, gi=1, ci=0),
            SimulatedProcess(0, second, memory=7 * GIB, gi=2, ci=0),
        ]
        snapshot = node.observe(Scenario([CARD], processes, instances=[SMALL, LARGE]))
        assert _holdings(snapshot) == {
            _job_id(first): [(0, "MIG-small", 2 * GIB)],
            _job_id(second): [(0, "MIG-large", 7 * GIB)],
        }
        assert [job.holdings[0].utilization_ratio for job in snapshot.jobs] == [None, None]
        assert {row.pid: row.uuid for row in snapshot.processes} == {
            first: "MIG-small",
            second: "MIG-large",
        }

    def test_a_job_on_two_instances(self, node: Node, children: Children) -> None:
        """A job that uses two instances of one card holds two cards."""
        child = children.script("sleep 600 & echo $!; wait")
        inner = next(iter(process_children(child.pid)))
        processes = [
            SimulatedProcess(0, child.pid, memory=GIB, gi=1, ci=0),
            SimulatedProcess(0, inner, memory=3 * GIB, gi=2, ci=0),
        ]
        snapshot = node.observe(Scenario([CARD], processes, instances=[SMALL, LARGE]))
        assert _holdings(snapshot) == {
            _job_id(child.pid): [(0, "MIG-small", GIB), (0, "MIG-large", 3 * GIB)]
        }

    def test_an_instance_of_a_card_that_is_lost(self, node: Node, children: Children) -> None:
        """While the card is lost the job goes on holding its instance, with unknown values."""
        child = children.start().pid
        processes = [SimulatedProcess(0, child, memory=2 * GIB, gi=1, ci=0)]
        healthy = Scenario([CARD], processes, instances=[SMALL])
        node.observe(healthy)
        broken = replace(healthy, faults=[Fault("*", LOST, card=0)])
        for _ in range(3):
            lost = eventually(
                lambda: node.observe(broken),
                until=lambda seen: seen.devices is not None and not seen.devices.gpus[0].up,
            )
            assert _holdings(lost) == {_job_id(child): [(0, "MIG-small", None)]}


class TestPage:
    """The families of instances."""

    def test_instances_on_the_page(self, node: Node, children: Children) -> None:
        """Instances have families of their own; sums over cards do not count them twice."""
        child = children.start().pid
        processes = [SimulatedProcess(0, child, memory=2 * GIB, gi=1, ci=0)]
        samples = _page(node.observe(Scenario([CARD], processes, instances=[SMALL, LARGE])))
        card = (("gpu", "0"), ("uuid", CARD.uuid))
        small = (("gpu", "0"), ("mig_uuid", "MIG-small"), ("uuid", CARD.uuid))
        info = {
            "gpu": "0",
            "uuid": CARD.uuid,
            "mig_uuid": "MIG-small",
            "gpu_instance_id": "1",
            "compute_instance_id": "0",
            "profile": "1g.5gb",
        }
        assert samples["gpu_mig_info", tuple(sorted(info.items()))] == 1
        assert samples["gpu_mig_memory_total_bytes", small] == 5 * GIB
        assert samples["gpu_mig_memory_used_bytes", small] == 3 * GIB
        assert [labels for name, labels in samples if name == "gpu_memory_total_bytes"] == [card]
        assert samples["gpu_processes", card] == 1
        assert ("gpu_utilization_ratio", card) not in samples
        assert not any(name == "gpu_process_utilization_ratio" for name, _ in samples)
        holds = (("gpu", "0"), ("job_id", _job_id(child)), ("uuid", "MIG-small"))
        assert samples["gpu_job_holds_gpu", holds] == 1
        assert samples["gpu_job_memory_bytes", holds] == 2 * GIB

    def test_memory_that_nobody_accounts_for(self, node: Node, children: Children) -> None:
        """What is used on instances by no known process is the card's unattributed memory."""
        child = children.start().pid
        processes = [
            SimulatedProcess(0, child, memory=2 * GIB, gi=1, ci=0),
            _ghost(3_999_999, GIB, gi=2),
        ]
        snapshot = node.observe(Scenario([CARD], processes, instances=[SMALL, LARGE]))
        # GIB of the small instance's own, and the process that /proc does not know. The card's sum
        # has only what processes use.
        assert snapshot.unattributed == {"MIG-small": GIB, "MIG-large": GIB, CARD.uuid: 0}
        card = (("gpu", "0"), ("uuid", CARD.uuid))
        assert _page(snapshot)["gpu_memory_unattributed_bytes", card] == 2 * GIB

    def test_two_compute_instances_share_memory(self, node: Node, children: Children) -> None:
        """Of memory that two instances share it is not known who uses what is left over."""
        child = children.start().pid
        both = [replace(SMALL, uuid="MIG-a"), replace(SMALL, uuid="MIG-b", ci=1)]
        processes = [SimulatedProcess(0, child, memory=2 * GIB, gi=1, ci=1)]
        snapshot = node.observe(Scenario([CARD], processes, instances=both))
        assert _holdings(snapshot) == {_job_id(child): [(0, "MIG-b", 2 * GIB)]}
        names = {name for name, _ in _page(snapshot)}
        assert "gpu_memory_unattributed_bytes" not in names


def process_children(pid: int) -> list[int]:
    """Children of a process, as the kernel lists them."""
    return eventually(lambda: [child.pid for child in read_all(PROC).values() if child.ppid == pid])
