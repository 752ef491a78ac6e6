"""Who is on a card, and with what load: NVML's process lists and utilization samples.

Both are tables that the driver writes into our memory, with rows of a size that no call tells: a
driver whose rows are not of the header's size gives one process the memory of another. So each
table is looked at before it is believed, and 0 is said only where the driver said it: see
`ProcessTables.with_utilization`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuwarden.exporter import drivers
from gpuwarden.exporter.devices import GpuProcess, ProcessKind

if TYPE_CHECKING:
    from gpuwarden.clock import Clock

MAX_PID = 2**22
"""Linux's largest pid; more in a list is the trace of a struct that was read at wrong offsets."""
SAMPLE_PERIOD_SECONDS = 1.0
"""Longest time between two samples of a process; a shorter window may hold none of a busy one."""
FIRST_WINDOW_SECONDS = 2.0
LONGEST_WINDOW_SECONDS = 10.0
"""After a driver that hung, what was busy long before is not busy now."""
CLOCK_TOLERANCE_SECONDS = 5.0
BUSY_RATIO = 0.1
"""A card busier than this, while its processes are said to be idle, cannot tell who is."""
UNACCOUNTED_RATIO = 0.5
"""Of a card so much busier than the samples of its processes add up to, some are missing."""

_MAX_TRIES = 4
_MAX_ROWS = 65536
_NO_INSTANCE = 0xFFFFFFFF
_UNTOUCHED = b"\xaa"
_ROW_BYTES = ctypes.sizeof(drivers.PROCESS_INFO)
_WIDEST_ROW_BYTES = 64
"""R535.54 wrote rows of 32 bytes where the functions' third version has 24 before and after it;
there is room for what others may come up with."""

_LISTS = (
    (ProcessKind.COMPUTE, "nvmlDeviceGetComputeRunningProcesses"),
    (ProcessKind.MPS, "nvmlDeviceGetMPSComputeRunningProcesses"),
    (ProcessKind.GRAPHICS, "nvmlDeviceGetGraphicsRunningProcesses"),
)


class ProcessTables:
    """The tables of one card, and what is kept of them between two snapshots."""

    def __init__(self, driver: drivers.Driver, clock: Clock) -> None:
        """Begin without having seen a process.

        Args:
            driver: whose calls are made; it counts what is dropped.
            clock: the driver stamps samples with wall time.
        """
        self._driver = driver
        self._clock = clock
        self._lists: dict[ProcessKind, _Rows] = {}
        self._samples: Any = None
        self._last_sample = 0

    def processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """Processes on the card, each once; None where a list cannot be read or believed.

        Args:
            handle: NVML's, of the card.

        Raises:
            Lost: the card is lost.
            DriverUnavailable: the driver is gone.
        """
        found: dict[int, GpuProcess] = {}
        refused = 0
        for kind, name in _LISTS:
            rows = self._rows(handle, kind, name)
            if rows is None:
                return None
            for row in rows:
                pid, memory = int(row.pid), _available(int(row.usedGpuMemory))
                if not 0 < pid <= MAX_PID:
                    refused += 1
                    continue
                known = found.get(pid)
                if known is None:
                    found[pid] = GpuProcess(
                        pid=pid,
                        kind=kind,
                        memory_bytes=memory,
                        gpu_instance_id=_instance(row.gpuInstanceId),
                        compute_instance_id=_instance(row.computeInstanceId),
                    )
                elif memory is not None and memory > (known.memory_bytes or 0):
                    found[pid] = replace(known, memory_bytes=memory)
        if refused:
            self._driver.dropped["pid"] += refused
        if refused > len(found):
            # Mostly nonsense: the rows have another size than we read them with.
            self._refuse()
            return None
        return tuple(found[pid] for pid in sorted(found))

    def _refuse(self) -> None:
        self._driver.dropped["process_table"] += 1
        self._driver.whole = False

    def _rows(self, handle: Any, kind: ProcessKind, name: str) -> Any | None:
        rows = self._lists.get(kind)
        if rows is None:
            rows = self._lists[kind] = _Rows(64)
        for _ in range(_MAX_TRIES):
            code, wide = self._ask(handle, name, rows)
            if code == drivers.SUCCESS and rows.count.value <= rows.size:
                return rows.filled()
            if code not in (drivers.SUCCESS, drivers.INSUFFICIENT_SIZE):
                break
            # Processes may start between two tries: ask for more than there were.
            rows = self._lists[kind] = _Rows(min(max(rows.count.value, rows.size) * 2, _MAX_ROWS))
        if code in drivers.FEATURE and wide:
            self._refuse()
            return None
        if code in drivers.FEATURE:
            # A card may have no list of graphics or MPS; without the first one it has none at all.
            return None if kind is ProcessKind.COMPUTE else ()
        if code in (drivers.SUCCESS, drivers.INSUFFICIENT_SIZE):
            # As many as never fit are none that can be: next time it begins small again.
            del self._lists[kind]
        self._driver.note(code, vital=True)
        return None

    def _ask(self, handle: Any, name: str, rows: _Rows) -> tuple[int, bool]:
        """Return code of a list that can be believed, and whether another one could not be.

        What one version writes too wide, or does not have, the one before it may have right.
        """
        wide = False
        code = drivers.FUNCTION_NOT_FOUND
        for version in ("_v3", "_v2"):
            rows.clear()
            asked = self._driver.call(
                f"{name}{version}", handle, ctypes.byref(rows.count), rows.table
            )
            if asked == drivers.SUCCESS and rows.too_wide():
                wide = True
                continue
            code = asked
            if code not in drivers.OTHER_VERSION:
                break
        return code, wide

    def with_utilization(
        self,
        handle: Any,
        processes: tuple[GpuProcess, ...],
        *,
        busy: float | None,
        mig: bool,
    ) -> tuple[GpuProcess, ...]:
        """The processes with what the driver says of their load.

        A listed process without a sample did nothing: NVML keeps samples of busy ones only, and
        says NOT_FOUND where it has none. That holds only where samples work, so: not with MIG, not
        after any other error, not for clients of MPS, whose load may be booked on their server, not
        for one whose sample could not be believed, and not on a card that is far busier than the
        samples add up to.

        Args:
            handle: NVML's, of the card.
            processes: those on the card.
            busy: the card's own utilization, if it is known.
            mig: whether the card is in MIG mode.

        Raises:
            Lost: the card is lost.
            DriverUnavailable: the driver is gone.
        """
        samples, supported = (None, False) if mig else self._newest(handle)
        if not supported:
            self._driver.dropped["unsupported"] += len(processes)
        if samples is None:
            return processes
        told = sum(samples.get(process.pid) or 0.0 for process in processes)
        if busy is not None and busy >= BUSY_RATIO and told == 0:
            self._driver.dropped["contradiction"] += len(processes)
            return processes
        missing = busy is not None and busy - told >= UNACCOUNTED_RATIO
        return tuple(
            replace(process, utilization_ratio=self._load(process, samples, missing=missing))
            for process in processes
        )

    def _load(
        self, process: GpuProcess, samples: dict[int, float | None], *, missing: bool
    ) -> float | None:
        """The load of a process; `missing`: whether samples of some are."""
        if process.pid in samples:
            return samples[process.pid]
        if process.kind is ProcessKind.MPS:
            return None
        if missing:
            self._driver.dropped["contradiction"] += 1
            return None
        return 0.0

    def _newest(self, handle: Any) -> tuple[dict[int, float | None] | None, bool]:
        """Utilization by pid since the last snapshot, None where that failed; whether it exists.

        Of a process whose samples cannot be believed it is not known.
        """
        now = self._clock.wall()
        since = self._last_sample or round((now - FIRST_WINDOW_SECONDS) * 1e6)
        # However short ago the last snapshot was: a window holds at least one sample period.
        since = min(since, round((now - SAMPLE_PERIOD_SECONDS) * 1e6))
        since = max(since, round((now - LONGEST_WINDOW_SECONDS) * 1e6))
        rows, code = self._sample_rows(handle, since)
        if rows is None:
            return None, code not in drivers.FEATURE
        newest: dict[int, tuple[int, float | None]] = {}
        latest = round((now + CLOCK_TOLERANCE_SECONDS) * 1e6)
        for row in rows:
            taken, percent = int(row.timeStamp), int(row.smUtil)
            if taken == 0 and row.pid == 0:
                continue  # room that was not used
            if taken <= since:
                self._driver.dropped["stale_sample"] += 1
            elif taken > latest or percent > 100 or not 0 < row.pid <= MAX_PID:
                self._driver.dropped["invalid_sample"] += 1
                newest.setdefault(int(row.pid), (0, None))
            else:
                self._last_sample = max(self._last_sample, taken)
                if taken >= newest.get(int(row.pid), (0, 0.0))[0]:
                    newest[int(row.pid)] = (taken, percent / 100)
        return {pid: ratio for pid, (_, ratio) in newest.items()}, True

    def _sample_rows(self, handle: Any, since: int) -> tuple[Any | None, int]:
        if self._samples is None:
            self._samples = (drivers.PROCESS_SAMPLE * 128)()
        for _ in range(_MAX_TRIES):
            count = ctypes.c_uint(len(self._samples))
            code = self._driver.call(
                "nvmlDeviceGetProcessUtilization",
                handle,
                self._samples,
                ctypes.byref(count),
                ctypes.c_ulonglong(since),
            )
            if code == drivers.SUCCESS and count.value <= len(self._samples):
                return self._samples[: count.value], code
            if code == drivers.NOT_FOUND:
                return (), code
            if code not in (drivers.SUCCESS, drivers.INSUFFICIENT_SIZE):
                break
            size = min(max(count.value, len(self._samples)) * 2, _MAX_ROWS)
            self._samples = (drivers.PROCESS_SAMPLE * size)()
        if code in (drivers.SUCCESS, drivers.INSUFFICIENT_SIZE):
            self._samples = None
        self._driver.note(code)
        return None, code


class _Rows:
    """Memory for a list: marked before the driver writes, and with room for rows too wide."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = ctypes.c_uint(size)
        self.table = (drivers.PROCESS_INFO * ((size + 1) * _WIDEST_ROW_BYTES // _ROW_BYTES + 1))()

    def clear(self) -> None:
        self.count.value = self.size
        ctypes.memset(self.table, _UNTOUCHED[0], ctypes.sizeof(self.table))

    def filled(self) -> Any:
        return self.table[: min(self.count.value, self.size)]

    def too_wide(self) -> bool:
        """Whether the driver wrote more than its rows take, and not all that it was given.

        A driver that clears all the memory that it was given is not meant: there the end is written
        as well.
        """
        rows = min(self.count.value, self.size)
        if rows == 0:
            return False
        written = memoryview(self.table).cast("B")
        after = written[rows * _ROW_BYTES : rows * _ROW_BYTES + 8]
        end = written[-_ROW_BYTES:]
        return bytes(after) != _UNTOUCHED * 8 and bytes(end) == _UNTOUCHED * _ROW_BYTES


def _available(memory: int) -> int | None:
    """NVML says all bits set (or, signed, their half) where it does not know."""
    return None if memory >= 2**63 - 1 else memory


def _instance(number: int) -> int | None:
    return None if number == _NO_INSTANCE else int(number)
