"""One thread reads the node every two seconds; scrapes get its newest page.

A scrape never waits for the driver. While a call hangs, the last page grows old, and past three
intervals it is no longer served: then the exporter says that it knows nothing, because a card's
value of a minute ago would be taken for one of now.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from gpuwarden.clock import SystemClock
from gpuwarden.errors import DriverUnavailable
from gpuwarden.exporter.collector import COLLECTORS, collect, own
from gpuwarden.exporter.jobs import NodeSnapshot
from gpuwarden.exporter.namespaces import REMEDY, sees_host_pids, without_names
from gpuwarden.exporter.nvml import RELEASED
from gpuwarden.exporter.pages import Bodies, Families, Format
from gpuwarden.exporter.vocabularies import Vocabularies

if TYPE_CHECKING:
    from gpuwarden.clock import Clock
    from gpuwarden.exporter.attribution import Attribution
    from gpuwarden.exporter.devices import DeviceSnapshot
    from gpuwarden.exporter.nvml import Nvml
    from gpuwarden.exporter.recollections import Recollection
    from gpuwarden.exporter.settings import ExporterSettings
    from gpuwarden.exporter.state_files import StateFile

STALE_INTERVALS = 3
FIRST_RETRY_SECONDS = 2.0
LAST_RETRY_SECONDS = 60.0
_STOP_SECONDS = 0.5
_KEEP_SECONDS = 0.1
"""A driver that hangs must be let go within a second."""

REMEMBERED_PAGES = 30
"""Formats asked for of so many last pages are written before they are asked for again."""

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A page.

    Attributes:
        body: its content, by format.
        made_at: monotonic time at which its snapshot was begun.
        complete: whether nothing is missing from it.
    """

    body: Bodies
    made_at: float
    complete: bool


class Sampler:
    """Reads the node and keeps the page; `start` gives it its thread."""

    def __init__(
        self,
        settings: ExporterSettings,
        nvml: Nvml,
        attribution: Attribution,
        *,
        clock: Clock | None = None,
        state: StateFile | None = None,
        host_pids: bool | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            settings: interval and families.
            nvml: the driver, not yet open.
            attribution: from cards to jobs.
            clock: for ages and retries.
            state: where what must outlive this process is kept, or None: nowhere.
            host_pids: whether pids are the host's; None: as it is. A simulated driver speaks of
                the processes that are here.
        """
        self._state = state
        self._settings = settings
        self._nvml = nvml
        self._attribution = attribution
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None
        self._page: Rendered | None = None
        self._snapshot: NodeSnapshot | None = None
        self._families: Families | None = None
        self._vocabularies = Vocabularies()
        self._asked: deque[set[tuple[Format, bool]]] = deque(maxlen=REMEMBERED_PAGES)
        self._totals: Counter[str] = Counter()
        self._retry = FIRST_RETRY_SECONDS
        self._retry_at = 0.0
        self._was_complete = False
        self._problem: str | None = None
        self._let_go_at = float("-inf")
        self._complaint = ""
        self._host_pids = sees_host_pids() if host_pids is None else host_pids

    @property
    def ready(self) -> bool:
        """Whether there has been a complete snapshot."""
        return self._was_complete

    @property
    def begun(self) -> bool:
        """Whether there has been a snapshot, complete or not."""
        return self._begun.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the first snapshot, at most so long; says whether there has been one."""
        return self._begun.wait(seconds)

    @property
    def problem(self) -> str | None:
        """Why the driver cannot be read, in words, or None."""
        return self._problem

    @property
    def released(self) -> bool:
        """Whether an operator has the driver released."""
        return self._nvml.released

    @property
    def stale(self) -> bool:
        """See `Nvml.stale`."""
        return self._nvml.stale

    def release(self) -> bool:
        """Let go of the driver at once; see `Nvml.release`."""
        # Whatever is being read now comes too late: its cards may be reset before it is served.
        self._let_go_at = self._clock.monotonic()
        self._problem = RELEASED
        return self._nvml.release()

    def acquire(self) -> None:
        """Take the driver back with the next snapshot."""
        self._nvml.acquire()
        self._problem = None
        self._retry_at = 0.0

    def start(self) -> None:
        """Begin to read, and to listen to the cards' errors."""
        if not self._host_pids:
            _logger.warning(REMEDY)
        if self._state is not None:
            self._state.start()
        self._nvml.watch_xids()
        # A daemon: a driver that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End reading and shut the driver down, unless it hangs."""
        self._keep(_STOP_SECONDS)
        self._attribution.close()
        self._nvml.close()

    def keep(self) -> None:
        """Read no more, and have the state written: this process is about to be replaced."""
        self._keep(_KEEP_SECONDS)

    def _keep(self, seconds: float) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)
        if self._state is not None:
            # While the driver hangs, what was offered last is what there is.
            if self._thread is not None and not self._thread.is_alive():
                self._state.offer(self)
            self._state.stop()

    def recollect(self) -> Recollection:
        """All that a later exporter of this boot must know; called between two snapshots."""
        counters = replace(self._nvml.recollect(), dropped=dict(self._totals))
        return replace(self._attribution.recollect(), counters=counters)

    def recall(self, known: Recollection) -> None:
        """Take over what an earlier exporter knew; called before `start`.

        Args:
            known: its recollection.
        """
        self._attribution.recall(known)
        self._nvml.recall(known.counters)
        self._totals.update(known.counters.dropped)

    def ask_platforms(self, seconds: float) -> None:
        """Have the node's platforms asked, and wait for the answers, at most so long for each."""
        self._attribution.wait(seconds)

    @property
    def snapshot(self) -> NodeSnapshot | None:
        """The newest snapshot, or None before the first."""
        return self._snapshot

    def page(self) -> Rendered:
        """The newest page, or one that says that there is none."""
        page, now = self._page, self._clock.monotonic()
        if page is not None and page.made_at <= self._let_go_at:
            page = None
        if page is not None and now - page.made_at <= STALE_INTERVALS * self._settings.interval:
            return page
        families = Families()
        own(
            families,
            up=False,
            failed=COLLECTORS,
            totals=dict(self._totals),
            collectors=self._settings.collectors,
        )
        return Rendered(Bodies(families), now, complete=False)

    def _work(self) -> None:
        while not self._stop.is_set():
            began = self._clock.monotonic()
            try:
                self.sample()
            except Exception:
                # Whatever it was, the next snapshot may succeed; until then the page grows old.
                _logger.exception("snapshot failed")
            spent = self._clock.monotonic() - began
            self._stop.wait(max(0.0, self._settings.interval - spent))

    def sample(self) -> Rendered:
        """Read the node once and keep the page."""
        made_at = self._clock.monotonic()
        devices = self._devices()
        snapshot = self._observe(devices)
        self._totals.update(snapshot.dropped)
        if devices is not None:
            self._totals.update(devices.dropped)
        families, dropped = collect(
            snapshot,
            totals=dict(self._totals),
            collectors=self._settings.collectors,
            max_processes=self._settings.max_processes,
            previous=self._families,
            vocabularies=self._vocabularies,
        )
        self._families = families
        self._totals.update(dropped)
        complete = devices is not None and devices.complete and not snapshot.failed
        page = Rendered(self._bodies(families), made_at, complete=complete)
        self._page, self._snapshot = page, snapshot
        self._begun.set()
        self._was_complete = self._was_complete or complete
        if self._state is not None and not snapshot.failed:
            self._state.offer(self, snapshot)
        return page

    def _observe(self, devices: DeviceSnapshot | None) -> NodeSnapshot:
        """Who is on the cards; where that fails, the cards alone."""
        host_pids = self._host_pids or devices is None or devices.simulated
        if devices is not None and not host_pids:
            devices = without_names(devices)
        try:
            snapshot = self._attribution.observe(devices)
        except Exception as error:  # noqa: BLE001 (told, and counted as a failed collector)
            # Whatever a process or a file did to be read so: the cards are shown all the same.
            self._complain(error)
        else:
            self._complaint = ""
            if host_pids:
                return snapshot
            return replace(snapshot, failed=snapshot.failed | {"jobs"}, host_pids=False)
        return NodeSnapshot(
            taken_at=self._clock.wall(),
            devices=devices,
            failed=frozenset({"jobs"}),
            host_pids=host_pids,
        )

    def _complain(self, error: Exception) -> None:
        """Log why there are no jobs, once for each reason; with its place where it is not known."""
        complaint = f"{type(error).__name__}: {error}"
        if complaint != self._complaint:
            self._complaint = complaint
            known = isinstance(error, OSError)
            _logger.warning(
                "processes or job files cannot be read",
                error=complaint,
                exc_info=None if known else error,
            )

    def _bodies(self, families: Families) -> Bodies:
        """A new page, written already in the formats that have been asked for of late."""
        if self._page is not None:
            self._asked.append(self._page.body.asked)
        bodies = Bodies(families)
        # A copy each: a scrape may add to the newest of them meanwhile.
        for form, compressed in {item for asked in self._asked for item in tuple(asked)}:
            bodies.prepare(form, compressed=compressed)
        return bodies

    def _devices(self) -> DeviceSnapshot | None:
        """The cards, or None without a driver; a missing driver is tried again, ever less often."""
        now = self._clock.monotonic()
        if self._nvml.released:
            return None
        try:
            if not self._nvml.opened:
                if now < self._retry_at:
                    return None
                self._nvml.open()
                _logger.info("driver opened", simulated=self._nvml.simulated)
            devices = self._nvml.snapshot()
        except DriverUnavailable as error:
            self._retry_at = now + self._retry
            _logger.warning("no driver", error=str(error), retry_seconds=self._retry)
            self._retry = min(LAST_RETRY_SECONDS, 2 * self._retry)
            self._problem = str(error)
            return None
        self._retry = FIRST_RETRY_SECONDS
        self._problem = None
        return devices
