"""Which card is which, while indices change and cards go, return, and do not say who they are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.exporter.nodes import eventually

from gpuwarden.errors import DriverUnavailable
from gpuwarden.exporter.simulated import Card, Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuwarden.exporter.devices import DeviceSnapshot
    from gpuwarden.exporter.nvml import Nvml

    Driver = Callable[[Scenario], Nvml]

INVALID_ARGUMENT, NO_PERMISSION, UNINITIALIZED, LOST, NOT_FOUND, UNKNOWN = 2, 4, 1, 15, 28, 999
A, B, C = (Card(at, uuid=f"GPU-{name}", utilization=10 * at + 10) for at, name in enumerate("abc"))
HANDLE, UUID = "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"


class Node:
    """A driver whose scenario changes."""

    def __init__(self, driver: Driver, file: Path, *cards: Card) -> None:
        self._file = file
        self._mark = 50
        self.nvml = driver(Scenario(cards))
        self.nvml.snapshot()

    def becomes(self, *cards: Card, faults: tuple[Fault, ...] = ()) -> DeviceSnapshot:
        """What is seen once the driver has the new cards."""
        self._mark += 1
        marked = [replace(card, temperature=self._mark) for card in cards]
        Scenario(marked, faults=faults).write(self._file)
        eventually(
            self.nvml.snapshot,
            until=lambda seen: (
                {gpu.temperature_celsius for gpu in seen.gpus if gpu.up} == {self._mark}
            ),
        )
        # That one may have begun before the change.
        return self.nvml.snapshot()


@pytest.fixture
def node(driver: Driver, scenario_file: Path) -> Callable[..., Node]:
    """Makes a node of cards."""

    def make(*cards: Card) -> Node:
        return Node(driver, scenario_file, *cards)

    return make


def _seen(snapshot: DeviceSnapshot) -> list[tuple[int, str, bool]]:
    return [(gpu.index, gpu.uuid, gpu.up) for gpu in snapshot.gpus]


def test_renumbered_with_one_lost(node: Callable[..., Node]) -> None:
    """After a hot reset that changes the order, the lost card is not taken for a living one."""
    lost = (Fault("*", LOST, card=1),)
    seen = node(A, B).becomes(replace(B, index=0), replace(A, index=1), faults=lost)
    assert _seen(seen) == [(0, "GPU-b", True), (1, "GPU-a", False)]


def test_two_lost_and_renumbered(node: Callable[..., Node]) -> None:
    """Of two lost cards whose indices changed each is known to be gone, and none is invented."""
    cards = [replace(C, index=0), replace(A, index=1), replace(B, index=2)]
    lost = (Fault(HANDLE, LOST, card=1), Fault(HANDLE, NOT_FOUND, card=2))
    seen = _seen(node(A, B, C).becomes(*cards, faults=lost))
    assert [(uuid, up) for _, uuid, up in sorted(seen, key=lambda item: item[1])] == [
        ("GPU-a", False),
        ("GPU-b", False),
        ("GPU-c", True),
    ]


def test_a_card_that_is_not_counted_any_more(node: Callable[..., Node]) -> None:
    """A card that vanished is down, without values; when it returns it is the same card."""
    two = node(A, B)
    gone = two.becomes(A)
    assert _seen(gone) == [(0, "GPU-a", True), (1, "GPU-b", False)]
    assert gone.complete
    assert (gone.gpus[1].utilization_ratio, gone.gpus[1].processes) == (None, None)
    back = two.becomes(A, B)
    assert [(gpu.uuid, gpu.utilization_ratio) for gpu in back.gpus] == [
        ("GPU-a", 0.1),
        ("GPU-b", 0.2),
    ]


def test_a_card_that_vanished_with_its_driver(node: Callable[..., Node]) -> None:
    """A driver that comes back with one card less has lost one."""
    two = node(A, B)
    two.nvml.close()
    two.nvml.open()
    assert _seen(two.becomes(A)) == [(0, "GPU-a", True), (1, "GPU-b", False)]


def test_a_card_that_an_operator_took_away(driver: Driver, scenario_file: Path) -> None:
    """What changes while the driver is released was changed on purpose."""
    nvml = driver(Scenario([A, B]))
    assert len(nvml.snapshot().gpus) == 2
    assert nvml.release()
    Scenario([A]).write(scenario_file)
    nvml.acquire()
    nvml.open()
    assert _seen(nvml.snapshot()) == [(0, "GPU-a", True)]


def test_a_card_that_does_not_say_who_it_is(node: Callable[..., Node]) -> None:
    """Without its UUID a known card is known by its place on the bus, and the node is not whole."""
    two = node(A, B)
    seen = two.becomes(A, B, faults=(Fault(UUID, UNKNOWN, card=1),))
    assert [(gpu.uuid, gpu.utilization_ratio) for gpu in seen.gpus] == [
        ("GPU-a", 0.1),
        ("GPU-b", 0.2),
    ]
    assert not seen.complete


def test_two_strangers_are_not_mixed_up(driver: Driver) -> None:
    """Of cards that never said who they are nothing is told: it would be told of the other too."""
    snapshot = driver(Scenario([A, B, C], faults=[Fault(UUID, UNKNOWN, card=at) for at in (0, 1)]))
    seen = snapshot.snapshot()
    assert sorted(_seen(seen)) == [(0, "", False), (1, "", False), (2, "GPU-c", True)]
    assert [gpu.utilization_ratio for gpu in seen.gpus if gpu.uuid == ""] == [None, None]
    assert (seen.complete, seen.dropped["enumeration"]) == (False, 2)


def test_more_cards_than_there_are(driver: Driver) -> None:
    """A driver that counts four thousand million cards has those that answer."""
    nvml = driver(Scenario([A, B], faults=[Fault("nvmlDeviceGetCount_v2", 0, count=2**32 - 1)]))
    seen = nvml.snapshot()
    assert _seen(seen) == [(0, "GPU-a", True), (1, "GPU-b", True)]
    assert not seen.complete


def test_cards_of_others(driver: Driver) -> None:
    """Cards that this container may not use are not ours to tell of."""
    seen = driver(Scenario([A, B], faults=[Fault(HANDLE, NO_PERMISSION, card=0)])).snapshot()
    assert (_seen(seen), seen.complete) == ([(1, "GPU-b", True)], True)


def test_a_name_that_comes_later(driver: Driver) -> None:
    """What could not be asked at first sight is asked again."""
    faults = [
        Fault("nvmlDeviceGetName", UNKNOWN, times=1),
        Fault("nvmlDeviceGetPciInfo_v3", UNKNOWN, times=1),
    ]
    nvml = driver(Scenario([A], faults=faults))
    seen = [nvml.snapshot().gpus[0] for _ in range(2)]
    assert [(gpu.name, gpu.pci_bus_id) for gpu in seen] == [
        ("", ""),
        ("NVIDIA A100-SXM4-40GB", "00000000:10:00.0"),
    ]


def test_one_call_cannot_declare_the_driver_dead(driver: Driver) -> None:
    """A call that says so, while the driver can be opened, is at fault itself from then on."""
    faults = [Fault("nvmlDeviceGetPowerUsage", UNINITIALIZED, card=1)]
    nvml = driver(Scenario([A, B], faults=faults))
    with pytest.raises(DriverUnavailable):
        nvml.snapshot()
    nvml.open()
    seen = nvml.snapshot()
    assert [gpu.utilization_ratio for gpu in seen.gpus] == [0.1, 0.2]
    assert [gpu.power_watts is None for gpu in seen.gpus] == [False, True]
    assert seen.dropped == {"nvml_error": 1}


def test_a_driver_that_is_gone_indeed_is_gone(driver: Driver, scenario_file: Path) -> None:
    """Where it cannot be opened again no call is blamed, and its return is found like the first."""
    nvml = driver(Scenario([A]))
    for _ in range(3):
        Scenario([A], faults=[Fault("nvml*", UNINITIALIZED)]).write(scenario_file)
        with pytest.raises(DriverUnavailable):
            eventually(nvml.snapshot, until=lambda _: False)
        with pytest.raises(DriverUnavailable):
            nvml.open()
        Scenario([A]).write(scenario_file)
        nvml.open()
        assert nvml.snapshot().gpus[0].utilization_ratio == 0.1
