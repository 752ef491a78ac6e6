"""GPM: what a card, or a MIG instance of it, did between two samples. Hopper and later have it.

A sample is a set of counters; a value is the difference of two that lie more than 100 ms apart. So
the last sample is kept from snapshot to snapshot, and nobody sleeps. It is the only way to know the
load of a MIG instance, and that of tensor cores; elsewhere both stay absent.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from gpuwarden.clock import SystemClock
from gpuwarden.errors import DriverUnavailable
from gpuwarden.exporter import drivers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.devices import Gpu, MigInstance

SHORTEST_SECONDS = 0.1
"""Samples that lie closer together tell nothing (nvml.h)."""
LONGEST_SECONDS = 90.0
"""Snapshots lie at most a minute apart; over a longer time a mean says nothing of now."""

_VERSION = 1
_MOST_METRICS = 1024
"""More than any header has: whatever a driver writes stays inside."""
_GRAPHICS, _TENSOR = 1, 5

_logger = structlog.get_logger(__name__)


class _Support(ctypes.Structure):
    """nvmlGpmSupport_t."""

    _fields_ = (("version", ctypes.c_uint), ("isSupportedDevice", ctypes.c_uint))


class _Metric(ctypes.Structure):
    """nvmlGpmMetric_t, with the texts of what it is at its end."""

    _fields_ = (
        ("metricId", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", ctypes.c_double),
        ("texts", ctypes.c_void_p * 3),
    )


class _Metrics(ctypes.Structure):
    """nvmlGpmMetricsGet_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("numMetrics", ctypes.c_uint),
        ("sample1", ctypes.c_void_p),
        ("sample2", ctypes.c_void_p),
        ("metrics", _Metric * _MOST_METRICS),
    )


@dataclass(frozen=True, slots=True)
class Activity:
    """Shares of time, 0 to 1; None where they are not known.

    Attributes:
        graphics: in which anything ran.
        tensor: in which tensor cores worked.
    """

    graphics: float | None = None
    tensor: float | None = None


@dataclass(slots=True)
class _Kept:
    """The last sample of a card or an instance, the buffer for its next, and what both told."""

    sample: Any
    spare: Any
    taken_at: float = -math.inf
    activity: Activity = Activity()


class Gpm:
    """GPM of all cards of one driver; used by one thread at a time."""

    def __init__(
        self, driver: drivers.Driver, *, clock: Clock | None = None, tensor: bool = False
    ) -> None:
        """Begin without a sample.

        Args:
            driver: whose calls are made; it counts what failed.
            clock: for the time between samples.
            tensor: whether the activity of tensor cores is asked for.
        """
        self._driver = driver
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._tensor = tensor
        self._supported: dict[str, bool] = {}
        self._kept: dict[str, _Kept] = {}
        self._metrics: Any = None

    def of_card(self, uuid: str, handle: Any) -> Activity:
        """What a card without MIG did; nothing is asked unless tensor cores are asked for.

        Args:
            uuid: of the card.
            handle: NVML's.

        Raises:
            Lost: the card is lost.
            DriverUnavailable: the driver is gone.
        """
        if not self._tensor or not self._has(uuid, handle):
            return Activity()
        return self._read(uuid, (_TENSOR,), "nvmlGpmSampleGet", handle)

    def of_instances(
        self, uuid: str, handle: Any, instances: Iterable[MigInstance]
    ) -> tuple[MigInstance, ...]:
        """The MIG instances of a card, with what their GPU instances did.

        Args:
            uuid: of the card.
            handle: NVML's, of the card.
            instances: as they are known by then.

        Raises:
            Lost: the card is lost.
            DriverUnavailable: the driver is gone.
        """
        instances = tuple(instances)
        if not instances or not self._has(uuid, handle):
            return instances
        wanted = (_GRAPHICS, _TENSOR) if self._tensor else (_GRAPHICS,)
        found = []
        for item in instances:
            activity = self._read(
                item.uuid, wanted, "nvmlGpmMigSampleGet", handle, item.gpu_instance_id
            )
            found.append(
                replace(
                    item,
                    utilization_ratio=activity.graphics,
                    tensor_activity_ratio=activity.tensor,
                )
            )
        return tuple(found)

    def follow(self, gpus: Iterable[Gpu]) -> None:
        """Forget the samples of what is gone, or lost.

        Args:
            gpus: the cards of this snapshot.
        """
        alive = [gpu for gpu in gpus if gpu.up]
        there = {gpu.uuid for gpu in alive} | {item.uuid for gpu in alive for item in gpu.instances}
        for uuid in self._kept.keys() - there:
            self._drop(uuid)

    def close(self) -> None:
        """Forget everything; called before the driver is shut down."""
        for uuid in tuple(self._kept):
            self._drop(uuid)
        self._supported = {}

    # -----------------------------------------------------------------------------------------

    def _has(self, uuid: str, handle: Any) -> bool:
        known = self._supported.get(uuid)
        if known is not None:
            return known
        support = _Support(version=_VERSION)
        name = "nvmlGpmQueryDeviceSupport"
        code = self._driver.call(name, handle, ctypes.byref(support))
        if code in drivers.LOST:
            raise drivers.Lost
        if code != drivers.SUCCESS and code not in drivers.FEATURE:
            # It may be another answer next time.
            self._driver.count_failure(code)
            return False
        found = code == drivers.SUCCESS and bool(support.isSupportedDevice)
        self._supported[uuid] = found
        if not found:
            _logger.info(
                "the card has no GPM: of its MIG instances and tensor cores no load is known",
                uuid=uuid,
            )
        return found

    def _read(self, uuid: str, wanted: tuple[int, ...], name: str, *target: Any) -> Activity:
        """What happened since the last sample; takes a new one unless that is too young."""
        kept, now = self._kept.get(uuid), self._clock.monotonic()
        if kept is not None and now - kept.taken_at < SHORTEST_SECONDS:
            return kept.activity
        if kept is None:
            sample = self._buffer()
            if sample is None:
                return Activity()
            spare = self._buffer()
            if spare is None:
                self._free(sample)
                return Activity()
            kept = self._kept[uuid] = _Kept(sample, spare)
        if not self._driver.read(name, *target, kept.spare):
            # What was before a failure is compared with nothing.
            kept.taken_at, kept.activity = -math.inf, Activity()
            return kept.activity
        fits = now - kept.taken_at <= LONGEST_SECONDS
        kept.activity = self._compare(kept.sample, kept.spare, wanted) if fits else Activity()
        kept.sample, kept.spare, kept.taken_at = kept.spare, kept.sample, now
        return kept.activity

    def _buffer(self) -> Any:
        sample = ctypes.c_void_p()
        if not self._driver.read("nvmlGpmSampleAlloc", ctypes.byref(sample)):
            return None
        return sample

    def _compare(self, first: Any, second: Any, wanted: tuple[int, ...]) -> Activity:
        if self._metrics is None:
            self._metrics = _Metrics()
        metrics = self._metrics
        metrics.version, metrics.numMetrics = _VERSION, len(wanted)
        metrics.sample1, metrics.sample2 = first, second
        for number, metric in enumerate(wanted):
            metrics.metrics[number].metricId = metric
            metrics.metrics[number].value = math.nan
        if not self._driver.read("nvmlGpmMetricsGet", ctypes.byref(metrics)):
            return Activity()
        found = {metric: self._ratio(metrics.metrics[i]) for i, metric in enumerate(wanted)}
        return Activity(found.get(_GRAPHICS), found.get(_TENSOR))

    def _ratio(self, metric: Any) -> float | None:
        code, value = int(metric.nvmlReturn), float(metric.value)
        if code in drivers.FEATURE or code == drivers.NO_DATA:
            return None
        if code != drivers.SUCCESS:
            self._driver.count_failure(code)
            return None
        if not 0 <= value <= 100:
            self._driver.dropped["invalid_value"] += 1
            return None
        return value / 100

    def _drop(self, uuid: str) -> None:
        kept = self._kept.pop(uuid)
        self._free(kept.sample)
        self._free(kept.spare)

    def _free(self, sample: Any) -> None:
        # Of a driver that is gone the samples are gone, too.
        if self._driver.opened:
            with suppress(DriverUnavailable):
                self._driver.call("nvmlGpmSampleFree", sample)
