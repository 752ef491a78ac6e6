"""What NVML says of a job's processes: which cards they hold, and that they have let go."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from gpuwarden.agent_api import Proof
from gpuwarden.errors import GpuwardenError, ServiceUnavailable
from gpuwarden.exporter.processes import PROC, read_process

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.agent.handles import Identity, Wake
    from gpuwarden.exporter.devices import GpuProcess

T = TypeVar("T")

CALL_SECONDS = 10.0
"""A driver call that takes longer has failed: a lost card can block it for ever."""
POLL_SECONDS = 0.2
DOUBTS = {
    "still_listed": "NVML still lists an ended process",
    "nvml": "the driver does not say whether the ended processes are gone",
}
"""Why a proof failed, in words."""


class Devices(Protocol):
    """What the agent asks of a driver.

    Every method raises a GpuwardenError where the driver cannot answer.
    """

    def process_list(self) -> Mapping[str, tuple[GpuProcess, ...]]:
        """Processes of each card by UUID; a card that does not tell is missing."""

    def memory_used(self) -> Mapping[str, int]:
        """Bytes used on each card by UUID; a card that does not tell is missing."""


class Driver(Devices, Protocol):
    """A driver that is to be opened first; `nvml.Nvml` is one."""

    def open(self) -> None:
        """Load and initialise; does nothing where that is done."""


class BoundedDevices:
    """A driver whose calls end in time, whatever it does.

    All calls are made by one thread. While one hangs, later ones fail at once. A driver that went
    away, such as for an upgrade, is opened again by the next call.
    """

    def __init__(self, driver: Driver, *, seconds: float = CALL_SECONDS) -> None:
        self._driver = driver
        self._seconds = seconds
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._hung: threading.Event | None = None
        # A daemon: a call that never returns must not keep the agent from ending.
        threading.Thread(target=self._work, name="nvml", daemon=True).start()

    def process_list(self) -> Mapping[str, tuple[GpuProcess, ...]]:
        """See `Devices.process_list`."""
        return self._call(self._driver.process_list)

    def memory_used(self) -> Mapping[str, int]:
        """See `Devices.memory_used`."""
        return self._call(self._driver.memory_used)

    def _work(self) -> None:
        while True:
            self._calls.get()()

    def _call(self, function: Callable[[], T]) -> T:
        results: list[T] = []
        errors: list[Exception] = []
        done = threading.Event()

        def call() -> None:
            try:
                self._driver.open()
                results.append(function())
            except Exception as error:  # noqa: BLE001 (raised again below, in the caller's thread)
                errors.append(error)
            done.set()

        with self._lock:
            if self._hung is not None and not self._hung.is_set():
                raise ServiceUnavailable("an earlier call of the driver still hangs")
            self._calls.put(call)
            if not done.wait(self._seconds):
                self._hung = done
                raise ServiceUnavailable(f"the driver did not answer within {self._seconds:g} s")
        if errors:
            raise errors[0]
        return results[0]


@dataclass(frozen=True, slots=True)
class Holding:
    """What NVML listed of one process on one card: bytes, or None where it does not tell."""

    uuid: str
    pid: int
    bytes: int | None


def holdings(devices: Devices) -> tuple[tuple[Holding, ...], frozenset[str]]:
    """What every process holds, and the UUIDs of the cards that told.

    A process that a card has in two of its lists (compute and graphics) holds its memory once.

    Raises:
        GpuwardenError: the driver cannot answer.
    """
    found: dict[tuple[str, int], int | None] = {}
    told = set()
    for uuid, processes in devices.process_list().items():
        told.add(uuid)
        for process in processes:
            known = found.get((uuid, process.pid))
            sizes = [size for size in (known, process.memory_bytes) if size is not None]
            found[uuid, process.pid] = max(sizes, default=None)
    return (
        tuple(Holding(uuid, pid, size) for (uuid, pid), size in found.items()),
        frozenset(told),
    )


def memory_of(held: Collection[Holding], pid: int) -> int | None:
    """Bytes that a process holds on all cards; None where it holds no card or none tells."""
    sizes = [item.bytes for item in held if item.pid == pid and item.bytes is not None]
    return sum(sizes) if sizes else None


def device_used(devices: Devices, cards: Collection[str]) -> dict[str, int]:
    """Bytes used on some cards by UUID; advisory, so that a driver's error gives nothing."""
    try:
        used = devices.memory_used()
    except GpuwardenError:
        return {}
    return {uuid: size for uuid, size in used.items() if uuid in cards}


@dataclass(frozen=True, slots=True)
class Before:
    """What the ended processes had when the ladder began.

    Attributes:
        identities: all that were signalled.
        holdings: what NVML listed of them.
        device_used: bytes used on their cards, by UUID.
    """

    identities: tuple[Identity, ...]
    holdings: tuple[Holding, ...]
    device_used: dict[str, int]


def prove(
    devices: Devices, before: Before, *, timeout: float, clock: Clock, wake: Wake, proc: Path = PROC
) -> tuple[Proof, str]:
    """Watch NVML's lists until none of the ended processes is in them, or time is up.

    Other processes do not matter: a successor may have taken the memory at once.

    Returns:
        The proof, and why it failed: an empty string, `still_listed` or `nvml`.
    """
    began = clock.monotonic()
    cards = {item.uuid for item in before.holdings}
    while True:
        left: tuple[Holding, ...] | None = None
        try:
            listed, told = holdings(devices)
        except GpuwardenError:
            pass
        else:
            # A card that does not tell cannot prove that it was left.
            if cards <= told:
                left = tuple(
                    item for item in listed if _is_one_of(item.pid, before.identities, proc)
                )
        waited = clock.monotonic() - began
        if left == () or waited >= timeout or wake.is_set:
            break
        wake.wait(min(POLL_SECONDS, timeout - waited))
    held = sum(item.bytes or 0 for item in before.holdings)
    if left:
        names = {(item.uuid, item.pid) for item in left}
        kept = sum(item.bytes or 0 for item in before.holdings if (item.uuid, item.pid) in names)
    else:
        kept = 0 if left == () else held
    proof = Proof(
        gone=left == (),
        memory_freed=held - kept,
        device_used_before=before.device_used,
        device_used_after=device_used(devices, cards),
        seconds=clock.monotonic() - began,
    )
    if proof.gone:
        return proof, ""
    return proof, "nvml" if left is None else "still_listed"


def _is_one_of(pid: int, identities: tuple[Identity, ...], proc: Path) -> bool:
    for identity in identities:
        if identity.pid == pid:
            now = read_process(pid, proc)
            # The driver's entry of a dead process has no process; another one with its pid now is
            # listed for itself.
            return now is None or now.start_ticks == identity.start_ticks
    return False
