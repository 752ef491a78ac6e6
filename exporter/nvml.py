"""NVML, spoken in our nouns: from return codes to snapshots.

Each return code belongs to one of a few classes, and each class has one consequence:

- life cycle (uninitialised, driver not loaded, versions differ): nothing is known, and
  DriverUnavailable is raised
- lost (off the bus, needs a reset): this card is down, the others are not concerned
- feature (not supported, function missing): the value does not exist; absent, and no fault
- permission, and everything else: absent, and counted

0 is said only where the driver said it: see `process_tables.py`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from gpuwarden.clock import SystemClock
from gpuwarden.errors import DriverUnavailable, InvalidInput
from gpuwarden.exporter import drivers, instances
from gpuwarden.exporter.devices import DeviceSnapshot, Gpu
from gpuwarden.exporter.gpm import Gpm
from gpuwarden.exporter.recollections import CounterRecord
from gpuwarden.exporter.rosters import Roster
from gpuwarden.exporter.switches import DEFAULT_COLLECTORS
from gpuwarden.exporter.traffic import NVLINK, PCIE, Traffic
from gpuwarden.exporter.xids import XidWatcher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.devices import GpuProcess, MigInstance, XidErrors
    from gpuwarden.exporter.rosters import Card, Place

_logger = structlog.get_logger(__name__)

RELEASED = (
    "the driver is released for work on the cards: `gpuwarden exporter acquire` takes it back"
)

_CLOSE_SECONDS = 0.5

_CLOCKS = (("graphics", 0), ("sm", 1), ("memory", 2), ("video", 3))
# Bits of NVML's clocks event reasons; idleness (bit 0) lowers clocks, but it is no throttling.
_THROTTLE = (
    ("application_clocks", 0x2),
    ("sw_power_cap", 0x4),
    ("hw_slowdown", 0x8),
    ("sync_boost", 0x10),
    ("sw_thermal", 0x20),
    ("hw_thermal", 0x40),
    ("hw_power_brake", 0x80),
    ("display_clocks", 0x100),
)
_ECC = (("corrected", 0), ("uncorrected", 1))
_NO_TEMPERATURE = -1000
_TOO_MUCH = 2**60
"""Wide counters beyond this are the trace of a value that is not available."""


def open_gpus(specification: str, collectors: Collection[str] = DEFAULT_COLLECTORS) -> Nvml:
    """Prepare the driver that a `--gpus` flag names; nothing is loaded but a simulation.

    Args:
        specification: `nvml`, or `simulated:FILE` with a scenario file.
        collectors: as of `Nvml`.

    Raises:
        InvalidInput: the flag or the scenario is wrong.
        MissingExtra: the simulation's header is not installed.
        PermanentError: the simulation cannot be compiled.
    """
    if specification == "nvml":
        return Nvml(collectors=collectors)
    kind, _, file = specification.partition(":")
    if kind != "simulated" or not file:
        raise InvalidInput(
            f"--gpus {specification!r} is neither nvml nor simulated:FILE with a scenario file"
        )
    # Production nodes never need the simulation's module.
    from gpuwarden.exporter import simulated  # noqa: PLC0415

    scenario = Path(file).resolve()
    simulated.read(scenario)
    return Nvml(simulated.build(), scenario=scenario, collectors=collectors)


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int | None = None
    used: int | None = None
    free: int | None = None
    reserved: int | None = None
    unified: bool | None = None


class Nvml:
    """A driver. Its calls may hang for as long as the driver does: give it a thread of its own.

    One call is made at a time; `close` gives up on a driver that hangs.
    """

    def __init__(
        self,
        library: Path | None = None,
        *,
        scenario: Path | None = None,
        clock: Clock | None = None,
        collectors: Collection[str] = DEFAULT_COLLECTORS,
    ) -> None:
        """Prepare; nothing is loaded yet.

        Args:
            library: the driver's library; None: the system's.
            scenario: scenario file, for gpuwarden's simulated library.
            clock: the driver stamps samples with wall time.
            collectors: names of `switches.SWITCHES`; the driver is not asked for the others.
        """
        self._driver = drivers.Driver(library, scenario=scenario)
        # Events are waited for beside the other calls, by a user of the library of its own.
        self._listener = drivers.Driver(library, scenario=scenario)
        self._xids: XidWatcher | None = None
        self._collectors = frozenset(collectors)
        self._counters = (
            *(PCIE if "pcie" in self._collectors else ()),
            *(NVLINK if "nvlink" in self._collectors else ()),
        )
        self._traffic = Traffic()
        self._known_xids: tuple[XidErrors, ...] = ()
        self._gpm = Gpm(self._driver, clock=clock, tensor="tensor" in self._collectors)
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._lock = threading.Lock()
        self._released = False
        self._was_open = False
        self._stale = False
        self._roster = Roster(self._driver, self._clock)

    @property
    def simulated(self) -> bool:
        """Whether the driver is gpuwarden's simulation; known once it is open."""
        return self._driver.simulated

    @property
    def opened(self) -> bool:
        """Whether the driver is initialised."""
        return self._driver.opened

    def open(self) -> None:
        """Load and initialise the driver; does nothing where that is done.

        Raises:
            DriverUnavailable: it cannot be loaded or initialised.
        """
        with self._lock:
            if self._released:
                raise DriverUnavailable(RELEASED)
            if not self._driver.opened:
                try:
                    self._driver.open()
                except DriverUnavailable as error:
                    old = self._was_open and error.nvml_code == drivers.VERSIONS_DIFFER
                    self._stale = old and drivers.still_loaded()
                    raise
                self._was_open, self._stale = True, False
                self._traffic.begin_anew()

    def close(self) -> bool:
        """Shut the driver down and drop its library.

        Returns:
            False where a call hangs: such a driver is left to the end of the process.
        """
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            return False
        try:
            self._gpm.close()
            self._driver.close()
            return self._xids is None or self._xids.leave()
        finally:
            self._lock.release()

    @property
    def stale(self) -> bool:
        """Whether only a new process can load the driver's new library.

        After an upgrade under this process the old library is dropped, so that the new one is
        loaded; one that does not let itself be dropped says for ever that versions differ. A new
        process that finds the same is not so: then the upgrade itself is not finished.
        """
        return self._stale

    @property
    def released(self) -> bool:
        """Whether the driver must not be opened now."""
        return self._released

    def release(self) -> bool:
        """Close the driver, and refuse to open it until `acquire`.

        Returns:
            As `close`.
        """
        self._released = True
        if not self.close():
            return False
        self._roster.forget()
        return True

    def acquire(self) -> None:
        """Allow the driver to be opened again."""
        self._released = False

    def recollect(self) -> CounterRecord:
        """What a later exporter counts on from."""
        xids = self._xids.errors() if self._xids is not None else self._known_xids
        return CounterRecord(self._traffic.recollect(), xids)

    def recall(self, known: CounterRecord) -> None:
        """Count on from what an earlier exporter had; called before `watch_xids`.

        Args:
            known: of the same boot.
        """
        self._traffic.recall(known.traffic)
        self._known_xids = known.xids

    def watch_xids(self) -> None:
        """Listen to the cards' errors from the next snapshot on, where that is switched on."""
        if "xid" not in self._collectors:
            return
        self._xids = XidWatcher(self._listener, clock=self._clock, known=self._known_xids)

    # -----------------------------------------------------------------------------------------

    def snapshot(self) -> DeviceSnapshot:
        """Read every card.

        Raises:
            DriverUnavailable: the driver is gone; `open` it again.
        """
        with self._session():
            taken_at = self._clock.wall()
            gpus = [self._gpu(place) for place in self._roster.read()]
            self._gpm.follow(gpus)
            if self._xids is not None:
                self._xids.follow(gpus)
            return DeviceSnapshot(
                taken_at=taken_at,
                driver_version=self._driver.version,
                simulated=self._driver.simulated,
                gpus=tuple(gpus),
                dropped=dict(self._driver.dropped),
                complete=self._driver.whole,
                xids=self._xids.errors() if self._xids is not None else (),
                xids_heard=self._xids is None or self._xids.hears,
            )

    def process_list(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Processes on each card by UUID, without their utilization.

        A card whose list cannot be read is not in the answer: that nobody is known there is no
        proof that nobody is there.

        Raises:
            DriverUnavailable: the driver is gone.
        """
        with self._session():
            found = {}
            for place in self._roster.read():
                if place.handle is None:
                    continue
                try:
                    processes = place.card.tables.processes(place.handle)
                except drivers.Lost:
                    continue
                if processes is not None:
                    found[place.card.uuid] = processes
            return found

    def memory_used(self) -> dict[str, int]:
        """Bytes used on each card by UUID; cards that do not tell are not in the answer.

        Raises:
            DriverUnavailable: the driver is gone.
        """
        with self._session():
            found = {}
            for place in self._roster.read():
                if place.handle is None:
                    continue
                try:
                    used = self._memory(place.handle).used
                except drivers.Lost:
                    continue
                if used is not None:
                    found[place.card.uuid] = used
            return found

    @contextmanager
    def _session(self) -> Iterator[None]:
        with self._lock:
            if not self._driver.opened:
                raise DriverUnavailable("NVML is not open", 1)
            self._driver.dropped = Counter()
            self._driver.whole = True
            try:
                yield
            except DriverUnavailable:
                self._gpm.close()
                self._driver.close()
                # The driver is not gone while somebody is still in it.
                if self._xids is not None:
                    self._xids.leave()
                raise

    # -----------------------------------------------------------------------------------------
    # Cards

    def _gpu(self, place: Place) -> Gpu:
        index, card, handle = place.index, place.card, place.handle
        lost = Gpu(
            index=index,
            uuid=card.uuid,
            name=card.name,
            pci_bus_id=card.pci_bus_id,
            minor=card.minor,
            up=False,
            instances=card.instances,
        )
        if handle is None:
            return lost
        try:
            mig = card.mig = self._mig_enabled(card, handle)
            memory = self._memory_of(card, handle)
            parts = self._instances(card, handle, mig=mig)
            busy, activity = self._rates(handle)
            processes = card.tables.processes(handle)
            if processes:
                processes = self._plausible(processes, memory.total)
                processes = card.tables.with_utilization(handle, processes, busy=busy, mig=mig)
            return Gpu(
                index=index,
                uuid=card.uuid,
                name=card.name,
                pci_bus_id=card.pci_bus_id,
                minor=card.minor,
                utilization_ratio=busy,
                tensor_activity_ratio=None if mig else self._gpm.of_card(card.uuid, handle).tensor,
                memory_activity_ratio=activity,
                temperature_celsius=self._temperature(handle),
                power_watts=self._scaled("nvmlDeviceGetPowerUsage", handle),
                power_limit_watts=self._power_limit(handle),
                energy_joules=self._scaled(
                    "nvmlDeviceGetTotalEnergyConsumption", handle, wide=True
                ),
                clocks_hertz=self._clocks(handle),
                throttle=self._throttle(handle),
                ecc_errors=self._ecc_errors(handle),
                traffic_bytes=self._traffic.read(
                    self._driver, card.uuid, handle, counters=self._counters
                ),
                mig_enabled=mig,
                processes=processes,
                instances=parts,
                memory_total_bytes=memory.total,
                # The first version's sum has what the driver keeps for itself in it.
                memory_used_bytes=None if memory.reserved is None else memory.used,
                memory_free_bytes=memory.free,
                memory_reserved_bytes=memory.reserved,
                memory_unified=memory.unified,
            )
        except drivers.Lost:
            return lost

    def _mig_enabled(self, card: Card, handle: Any) -> bool:
        now, pending = ctypes.c_uint(drivers.ALL_BITS), ctypes.c_uint()
        code = self._driver.call(
            "nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(pending)
        )
        if code == drivers.SUCCESS and now.value in (0, 1):
            return now.value == 1
        # Whose the card is depends on it: what it was is likely, and nobody is judged by it.
        self._driver.note(code, vital=True)
        return card.mig and code not in drivers.FEATURE

    def _instances(self, card: Card, handle: Any, *, mig: bool) -> tuple[MigInstance, ...]:
        if not mig or "mig" not in self._collectors:
            card.instances = ()
            return ()

        def memory(part: Any) -> tuple[int | None, int | None]:
            found = self._memory(part)
            return found.total, found.used

        found = instances.read(self._driver, handle, memory)
        # As a lost card has them: without values.
        card.instances = tuple(
            replace(item, memory_total_bytes=None, memory_used_bytes=None) for item in found
        )
        return self._gpm.of_instances(card.uuid, handle, found)

    def _rates(self, handle: Any) -> tuple[float | None, float | None]:
        rates = drivers.UTILIZATION(drivers.ALL_BITS, drivers.ALL_BITS)
        if not self._driver.read("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates)):
            return None, None
        return self._ratio(rates.gpu), self._ratio(rates.memory)

    def _ratio(self, percent: int) -> float | None:
        return self._if_valid(percent / 100, valid=percent <= 100)

    def _memory_of(self, card: Card, handle: Any) -> _Memory:
        memory = self._memory(handle)
        card.has_memory = card.has_memory or memory.total is not None
        if memory.unified and card.has_memory:
            # What a card is does not change: this is a failure.
            self._driver.dropped["invalid_value"] += 1
            return _Memory()
        return memory

    def _memory(self, handle: Any) -> _Memory:
        info = drivers.MEMORY_V2()
        info.version = drivers.MEMORY_V2_VERSION
        code = self._driver.call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(info))
        reserved: int | None = int(info.reserved)
        if code in drivers.OTHER_VERSION:
            # Drivers before R510 have no second version; what they reserve is not known then.
            info = drivers.MEMORY_V1()
            code = self._driver.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(info))
            reserved = None
        if code == drivers.NOT_SUPPORTED:
            return _Memory(unified=True)
        if code != drivers.SUCCESS:
            self._driver.note(code)
            return _Memory()
        total, used, free = int(info.total), int(info.used), int(info.free)
        if total == used == free == 0:
            # So says a driver that has no word for it.
            return _Memory(unified=True)
        if total == 0 or used > total or free > total or (reserved or 0) > total:
            self._driver.dropped["invalid_value"] += 1
            return _Memory()
        return _Memory(total, used, free, reserved=reserved, unified=False)

    def _plausible(
        self, processes: tuple[GpuProcess, ...], total: int | None
    ) -> tuple[GpuProcess, ...]:
        """The processes without memory that is more than their card has."""
        if total is None or all((item.memory_bytes or 0) <= total for item in processes):
            return processes
        return tuple(
            item
            if item.memory_bytes is None
            or self._if_valid(item.memory_bytes, valid=item.memory_bytes <= total) is not None
            else replace(item, memory_bytes=None)
            for item in processes
        )

    def _temperature(self, handle: Any) -> float | None:
        celsius = ctypes.c_int(_NO_TEMPERATURE)
        # Deprecated since R580, but all older drivers have only this one.
        code = self._driver.call("nvmlDeviceGetTemperature", handle, 0, ctypes.byref(celsius))
        value = int(celsius.value)
        if code in drivers.OTHER_VERSION:
            reading = drivers.TEMPERATURE()
            reading.version = drivers.TEMPERATURE_VERSION
            reading.sensorType = 0
            reading.temperature = _NO_TEMPERATURE
            if not self._driver.read("nvmlDeviceGetTemperatureV", handle, ctypes.byref(reading)):
                return None
            value = int(reading.temperature)
        elif code != drivers.SUCCESS:
            self._driver.note(code)
            return None
        return self._if_valid(float(value), valid=-50 < value < 200)

    def _if_valid(self, value: float, *, valid: bool) -> float | None:
        """The value, or None for one that cannot be; that is counted."""
        if not valid:
            self._driver.dropped["invalid_value"] += 1
        return value if valid else None

    def _scaled(self, name: str, handle: Any, *, wide: bool = False) -> float | None:
        """A value that NVML gives in thousandths."""
        value = self._driver.number(name, handle, wide=wide)
        if value is None:
            return None
        return self._if_valid(value / 1000, valid=value < (_TOO_MUCH if wide else 2**31 - 16))

    def _power_limit(self, handle: Any) -> float | None:
        watts = self._scaled("nvmlDeviceGetEnforcedPowerLimit", handle)
        # A card that may use nothing has no limit that the driver knows.
        return None if watts is None else self._if_valid(watts, valid=watts > 0)

    def _clocks(self, handle: Any) -> dict[str, float]:
        if "clock" not in self._collectors:
            return {}
        found = {}
        for name, kind in _CLOCKS:
            megahertz = self._driver.number("nvmlDeviceGetClockInfo", handle, kind)
            if megahertz is None:
                continue
            hertz = self._if_valid(megahertz * 1e6, valid=megahertz < 100_000)
            if hertz is not None:
                found[name] = hertz
        return found

    def _throttle(self, handle: Any) -> dict[str, bool]:
        if "throttle" not in self._collectors:
            return {}
        reasons = self._driver.number("nvmlDeviceGetCurrentClocksEventReasons", handle, wide=True)
        if reasons is None:
            reasons = self._driver.number(
                "nvmlDeviceGetCurrentClocksThrottleReasons", handle, wide=True
            )
        return {} if reasons is None else {name: bool(reasons & bit) for name, bit in _THROTTLE}

    def _ecc_errors(self, handle: Any) -> dict[str, int]:
        if "ecc" not in self._collectors:
            return {}
        found = {}
        for name, kind in _ECC:
            # A card may count one kind and not the other.
            count = self._driver.number("nvmlDeviceGetTotalEccErrors", handle, kind, 0, wide=True)
            if count is not None and self._if_valid(count, valid=count < _TOO_MUCH) is not None:
                found[name] = count
        return found
