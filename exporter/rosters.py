"""Which cards there are, and which of them is which.

A card is its UUID: NVML's index changes with a reboot, a hot reset and a card that comes or goes.
So cards are counted anew each time, and one that does not answer is told from the others by who is
missing. A card that was there once and is counted no more has fallen off the bus, unless an
operator took it away: it is down, and not forgotten, until the driver is released for such work.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from gpuwarden.errors import DriverUnavailable
from gpuwarden.exporter import drivers
from gpuwarden.exporter.process_tables import ProcessTables

if TYPE_CHECKING:
    from gpuwarden.clock import Clock
    from gpuwarden.exporter.devices import MigInstance

MAX_CARDS = 1024
"""No node has more; a driver that names another number is not followed for ever."""

_NO_SUCH_CARD = frozenset({drivers.INVALID_ARGUMENT, drivers.NOT_FOUND})

_logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class Card:
    """What is kept of a card between two snapshots; without a UUID nobody knows which it is."""

    uuid: str
    tables: ProcessTables
    name: str = ""
    pci_bus_id: str = ""
    minor: int | None = None
    mig: bool = False
    has_memory: bool = False
    instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A card where it is now; `handle` is None for one that is lost."""

    index: int
    card: Card
    handle: Any = None


class Roster:
    """The node's cards."""

    def __init__(self, driver: drivers.Driver, clock: Clock) -> None:
        """Begin without having seen a card.

        Args:
            driver: whose calls are made; it counts what is dropped.
            clock: for the cards' process tables.
        """
        self._driver = driver
        self._clock = clock
        self._cards: dict[str, Card] = {}
        self._indices: dict[str, int] = {}

    def forget(self) -> None:
        """Know no card: those that are gone from now on were taken away."""
        self._cards = {}
        self._indices = {}

    def read(self) -> list[Place]:
        """Every card, by index; those that are gone come last.

        Raises:
            DriverUnavailable: the driver is gone, or does not count its cards.
        """
        count = ctypes.c_uint()
        code = self._driver.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        if code != drivers.SUCCESS:
            raise DriverUnavailable(drivers.remedy(code, "cards cannot be counted"), code)
        found: dict[str, Place] = {}
        silent: list[int] = []
        for index in range(min(count.value, MAX_CARDS)):
            try:
                place = self._place(index)
            except drivers.Lost:
                silent.append(index)
                continue
            if place is None:
                continue
            if not place.card.uuid:
                silent.append(index)
            elif place.card.uuid in found:
                # One of the two is another card; nobody can tell which.
                self._hidden()
            else:
                found[place.card.uuid] = place
        lost = self._told_apart(silent, found)
        self._indices.update((uuid, place.index) for uuid, place in found.items())
        return [*found.values(), *lost]

    def _place(self, index: int) -> Place | None:
        """A card, without a UUID where it cannot be identified; None where it is not ours."""
        handle = ctypes.c_void_p()
        code = self._driver.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        if code in drivers.PERMISSION:
            # The count includes cards that this container may not use; they are not ours.
            return None
        if code in drivers.LOST:
            raise drivers.Lost
        if code != drivers.SUCCESS:
            self._hidden()
            return None if code in _NO_SUCH_CARD else Place(index, self._unknown())
        return Place(index, self._card(handle), handle)

    def _hidden(self) -> None:
        self._driver.dropped["enumeration"] += 1
        self._driver.whole = False

    def _unknown(self) -> Card:
        return Card("", ProcessTables(self._driver, self._clock))

    def _card(self, handle: Any) -> Card:
        uuid = self._driver.text("nvmlDeviceGetUUID", handle, 96)
        if not uuid:
            self._hidden()
            pci = self._pci_bus_id(handle)
            same = [card for card in self._cards.values() if pci and card.pci_bus_id == pci]
            return same[0] if len(same) == 1 else self._unknown()
        card = self._cards.get(uuid)
        if card is None:
            card = self._cards[uuid] = Card(uuid, ProcessTables(self._driver, self._clock))
            self._warn_of(handle, card)
        # Asked for until it is told: a card that was busy when it was first seen has a name too.
        card.name = card.name or self._driver.text("nvmlDeviceGetName", handle, 96)
        card.pci_bus_id = card.pci_bus_id or self._pci_bus_id(handle)
        if card.minor is None:
            card.minor = self._driver.number("nvmlDeviceGetMinorNumber", handle)
        return card

    def _told_apart(self, silent: list[int], found: dict[str, Place]) -> list[Place]:
        """The cards that do not answer, or are not even counted any more, and where they were."""
        missing = {uuid: index for uuid, index in self._indices.items() if uuid not in found}
        lost = []
        unknown = []
        by_index = {index: uuid for uuid, index in missing.items()}
        for index in silent:
            uuid = by_index.get(index)
            if uuid is None:
                unknown.append(index)
            else:
                del missing[uuid]
                lost.append(Place(index, self._cards[uuid]))
        if len(missing) == len(unknown) == 1:
            # Its index changed as well, but there is only one that it can be.
            lost.append(Place(unknown.pop(), self._cards[missing.popitem()[0]]))
        if len(missing) < len(unknown):
            lost += [Place(index, self._unknown()) for index in unknown]
        # Each of the others is shown where it was last; what answers nothing has no second row.
        return lost + [Place(index, self._cards[uuid]) for uuid, index in missing.items()]

    def _warn_of(self, handle: Any, card: Card) -> None:
        mode = ctypes.c_uint()
        code = self._driver.call("nvmlDeviceGetPersistenceMode", handle, ctypes.byref(mode))
        if code == drivers.SUCCESS and mode.value == 0:
            _logger.warning(
                "persistence mode is off: whenever nobody uses the card it is shut down, its "
                "counters begin anew, and opening it takes seconds; run nvidia-persistenced",
                uuid=card.uuid,
            )

    def _pci_bus_id(self, handle: Any) -> str:
        info = drivers.PciInfo()
        if not self._driver.read("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(info)):
            return ""
        return drivers.printable(info.busId)
