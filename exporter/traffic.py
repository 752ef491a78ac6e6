"""Traffic over PCIe and NVLink, from counters that cost next to nothing.

NVML's throughput call measures for 20 ms each time; its field values are counters that run anyway,
but they wrap and begin anew with the driver. Here they become counters that only grow: bytes since
the exporter first saw the card.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuwarden.exporter import drivers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_ALL_LINKS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Counter:
    name: str
    field_id: int
    scope: int = 0
    scale: int = 1


PCIE = (_Counter("pcie_transmit", 197), _Counter("pcie_receive", 198))
NVLINK = (
    _Counter("nvlink_transmit", 138, _ALL_LINKS, 1024),
    _Counter("nvlink_receive", 139, _ALL_LINKS, 1024),
)
"""Data without the protocol's overhead, in KiB, over all links of the card."""

# NVML's value types -> member of the value, and how many bits a counter of that type has.
_WHOLE = {
    1: ("uiVal", 32),
    2: ("ulVal", 64),
    3: ("ullVal", 64),
    4: ("sllVal", 64),
    5: ("siVal", 32),
}


@dataclass(slots=True)
class _Reading:
    raw: int
    total: int = 0
    same_driver: bool = True


@dataclass(slots=True)
class Traffic:
    """The counters of all cards; totals outlive the driver, and a card that was gone."""

    _readings: dict[tuple[str, str], _Reading] = field(default_factory=dict)

    def recollect(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(card, counter) -> (the driver's last reading, bytes since the card was first seen)."""
        return {key: (known.raw, known.total) for key, known in self._readings.items()}

    def recall(self, known: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        """Count on from what an earlier exporter of this boot had.

        Args:
            known: what it recollected.
        """
        self._readings = {key: _Reading(raw, total) for key, (raw, total) in known.items()}

    def read(
        self,
        driver: drivers.Driver,
        uuid: str,
        handle: Any,
        *,
        counters: Collection[_Counter] = PCIE,
    ) -> dict[str, int]:
        """Name -> bytes since the card was first seen; what it does not count is absent.

        Args:
            driver: counts what could not be had.
            uuid: of the card.
            handle: NVML's, of the card.
            counters: which of them.

        Raises:
            Lost: the card is lost.
            DriverUnavailable: the driver is gone.
        """
        if not counters:
            return {}
        values = (drivers.FIELD_VALUE * len(counters))()
        for value, counter in zip(values, counters, strict=True):
            value.fieldId, value.scopeId = counter.field_id, counter.scope
        if not driver.read("nvmlDeviceGetFieldValues", handle, len(counters), values):
            return {}
        return dict(self._believed(driver, uuid, zip(counters, values, strict=True)))

    def _believed(
        self, driver: drivers.Driver, uuid: str, answers: Iterable[tuple[_Counter, Any]]
    ) -> Iterable[tuple[str, int]]:
        for counter, value in answers:
            code = int(value.nvmlReturn)
            if code in drivers.LOST:
                raise drivers.Lost
            if code != drivers.SUCCESS:
                # Which fields a card has is told by many codes: an unknown one is an argument.
                if code not in drivers.FEATURE and code != drivers.INVALID_ARGUMENT:
                    driver.count_failure(code)
                continue
            member, bits = _WHOLE.get(int(value.valueType), ("", 0))
            count = int(getattr(value.value, member)) if member else -1
            if count < 0:
                driver.dropped["invalid_value"] += 1
                continue
            yield counter.name, self._grown(uuid, counter, count * counter.scale, bits=bits)

    def begin_anew(self) -> None:
        """Expect counters that begin anew: the driver was opened again, and may be another."""
        for reading in self._readings.values():
            reading.same_driver = False

    def _grown(self, uuid: str, counter: _Counter, raw: int, *, bits: int) -> int:
        known = self._readings.get((uuid, counter.name))
        if known is None:
            known = self._readings[uuid, counter.name] = _Reading(raw)
        if raw >= known.raw:
            known.total += raw - known.raw
        elif bits == 32 and known.same_driver:
            # Wrapped, once at least: of a card that is faster than that it is a lower bound.
            known.total += raw - known.raw + counter.scale * 2**32
        else:
            # 64 bits do not wrap in a card's life: the driver began anew.
            known.total += raw
        known.raw, known.same_driver = raw, True
        return known.total
