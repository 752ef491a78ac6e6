"""XID errors: what the driver tells only to those who wait for it.

Errors come as events, so a thread of its own waits for them, with a driver handle of its own: the
sampler's calls are not kept waiting. An error is kept for as long as the exporter runs, under the
card's UUID, also when the card that had it is gone from the bus: that is when it matters.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from gpuwarden.clock import SystemClock
from gpuwarden.errors import DriverUnavailable
from gpuwarden.exporter import drivers
from gpuwarden.exporter.devices import XidErrors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.devices import Gpu

WAIT_MILLISECONDS = 500
"""How long one call waits for an event, which ends it at once; `leave` must not take longer than an
operator waits, and each call costs a tenth of a millisecond of CPU."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
FLOOD = 100
"""Events one after another, after which the thread rests as long as one wait may last."""
MAX_CODES = 64
"""Different errors that are kept of one card; NVIDIA lists some 150, a card has a handful."""

_TIMEOUT = 10
_NOT_HEARD = drivers.FEATURE | drivers.LOST | {drivers.NOT_FOUND}
"""Codes of a card that has no events, or is gone; the others are listened to all the same."""
_CRITICAL = 0x8
_LEAVE_SECONDS = 0.8

_logger = structlog.get_logger(__name__)


class _Event(ctypes.Structure):
    """nvmlEventData_t; the handle is kept as the number that it was registered with."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class XidWatcher:
    """Counts XID errors while it is told that there is a driver.

    `follow` and `leave` may be called by any thread, but not at the same time.
    """

    def __init__(
        self,
        driver: drivers.Driver,
        *,
        clock: Clock | None = None,
        known: Iterable[XidErrors] = (),
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            driver: a driver of its own, not yet open.
            clock: for the time of an error.
            known: what an earlier exporter of this boot had heard.
        """
        self._driver = driver
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._lock = threading.Lock()
        self._found = {(errors.uuid, errors.code): errors for errors in known}
        self._cards: dict[str, int] = {}
        self._wanted = threading.Event()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._set: ctypes.c_void_p | None = None
        self._retry = FIRST_RETRY_SECONDS
        self._working = True

    @property
    def hears(self) -> bool:
        """Whether every card that has events is listened to now."""
        return self._working

    def errors(self) -> tuple[XidErrors, ...]:
        """What was heard since the start, by card and code; also of cards that are gone."""
        with self._lock:
            return tuple(self._found[key] for key in sorted(self._found))

    def follow(self, gpus: Iterable[Gpu]) -> None:
        """Listen to these cards; to be called after each snapshot.

        Args:
            gpus: the node's cards; those that are lost stay known.
        """
        gpus = tuple(gpus)
        up = {gpu.uuid: gpu.index for gpu in gpus if gpu.up and gpu.uuid}
        with self._lock:
            for (uuid, code), errors in self._found.items():
                index = next((gpu.index for gpu in gpus if gpu.uuid == uuid), errors.index)
                self._found[uuid, code] = XidErrors(
                    index, uuid, code, count=errors.count, last_seen=errors.last_seen
                )
            if up != self._cards:
                self._cards = up
                self._changed.set()
        self._wanted.set()
        if self._thread is None or not self._thread.is_alive():
            # A daemon: a driver that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._listen, name="xids", daemon=True)
            self._thread.start()

    def leave(self) -> bool:
        """Let go of the driver; errors that come meanwhile are not heard. `follow` comes back.

        Returns:
            False where a call hangs.
        """
        self._wanted.clear()
        self._changed.set()
        thread = self._thread
        if thread is None:
            return True
        thread.join(_LEAVE_SECONDS)
        return not thread.is_alive()

    # -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while self._wanted.is_set():
            problem = None
            try:
                self._driver.open()
                self._hear()
            except DriverUnavailable as error:
                problem = str(error)
            finally:
                self._close()
            if problem is not None:
                self._rest(problem)

    def _rest(self, problem: str) -> None:
        """Wait before another try, ever longer; `leave`, and another set of cards, end it."""
        self._working = False
        _logger.warning("XID errors are not heard", error=problem, retry_seconds=self._retry)
        self._changed.clear()
        if self._wanted.is_set():
            self._changed.wait(self._retry)
        self._retry = min(LAST_RETRY_SECONDS, 2 * self._retry)

    def _hear(self) -> None:
        """Listen until there is something else to listen to, or nothing any more.

        Raises:
            DriverUnavailable: the driver is gone, or does not let itself be listened to.
        """
        self._changed.clear()
        cards, deaf = self._register()
        self._working = not deaf
        again = self._clock.monotonic() + LAST_RETRY_SECONDS if deaf else math.inf
        heard = 0
        while self._wanted.is_set() and not self._changed.is_set():
            if self._clock.monotonic() >= again:
                return
            if not cards:
                self._changed.wait(WAIT_MILLISECONDS / 1000)
                continue
            event, began = _Event(), self._clock.monotonic()
            code = self._wait(event)
            if code in drivers.FEATURE:
                cards = {}
            elif code == drivers.SUCCESS:
                self._note(cards, event)
                heard += 1
            elif code != _TIMEOUT:
                # A card may have left while it was waited for: what is left gets a new set.
                raise DriverUnavailable(drivers.remedy(code, "events cannot be waited for"), code)
            self._retry = FIRST_RETRY_SECONDS
            waited = self._clock.monotonic() - began
            if heard >= FLOOD or (code == _TIMEOUT and waited < WAIT_MILLISECONDS / 2000):
                # Neither a flood nor a driver that does not wait takes a core of the node.
                heard = 0
                self._changed.wait(WAIT_MILLISECONDS / 1000)

    def _wait(self, event: _Event) -> int:
        arguments = (self._set, ctypes.byref(event), ctypes.c_uint(WAIT_MILLISECONDS))
        code = self._driver.call("nvmlEventSetWait_v2", *arguments)
        if code not in drivers.FEATURE:
            return code
        # Drivers before R450 have only this one; it does not tell of MIG instances.
        return self._driver.call("nvmlEventSetWait", *arguments)

    def _register(self) -> tuple[dict[int, str], bool]:
        """Make a set of all cards that have events.

        Returns:
            Handle -> UUID, and whether there is a card that should be heard and is not.
        """
        created = ctypes.c_void_p()
        code = self._driver.call("nvmlEventSetCreate", ctypes.byref(created))
        if code in drivers.FEATURE:
            return {}, False
        if code != drivers.SUCCESS:
            raise DriverUnavailable(drivers.remedy(code, "no set of events can be made"), code)
        self._set = created
        with self._lock:
            wanted = dict(self._cards)
        found: dict[int, str] = {}
        deaf = False
        for uuid in wanted:
            handle = ctypes.c_void_p()
            code = self._driver.call(
                "nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle)
            )
            if code == drivers.SUCCESS:
                code = self._driver.call(
                    "nvmlDeviceRegisterEvents", handle, ctypes.c_ulonglong(_CRITICAL), created
                )
            if code == drivers.SUCCESS and handle.value is not None:
                found[handle.value] = uuid
            elif code not in _NOT_HEARD:
                deaf = True
                message = drivers.remedy(code, "it cannot be listened to")
                _logger.warning("XID errors of a card are not heard", uuid=uuid, error=message)
        return found, deaf

    def _note(self, cards: dict[int, str], event: _Event) -> None:
        uuid = cards.get(event.device or 0)
        if uuid is None or not event.kind & _CRITICAL:
            return
        code, now = int(event.data), self._clock.wall()
        with self._lock:
            known = self._found.get((uuid, code))
            of_card = Counter(card for card, _ in self._found)
            if known is None and of_card[uuid] >= MAX_CODES:
                return
            count = known.count + 1 if known is not None else 1
            index = self._cards.get(uuid, known.index if known is not None else 0)
            self._found[uuid, code] = XidErrors(index, uuid, code, count=count, last_seen=now)
        if known is None:
            # Some errors come in thousands; how many is the metric's to tell.
            _logger.warning("XID error", uuid=uuid, xid=code)

    def _close(self) -> None:
        held, self._set = self._set, None
        try:
            if held is not None:
                self._driver.call("nvmlEventSetFree", held)
        except DriverUnavailable:
            pass  # gone with the driver
        finally:
            self._driver.close()
