"""What every job measures just now, for people who watch the fleet: a few queries, asked seldom.

Only for people to look at: no verdict rests on it. However many watch, and however often, one set
of queries is asked within `FRESH_SECONDS`; when Prometheus does not answer in time the figures are
missing, and the picture says why.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from gpuwarden.errors import GpuwardenError
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.verdicts import SignalKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.prometheus import Sample

FRESH_SECONDS: Final = 5.0
"""Figures are not asked for again within this long."""
TIMEOUT_SECONDS: Final = 4.0
"""For all of them: who watches sees what the engine knows by itself meanwhile."""

_LOOK_BACKS = (("30m", 1800.0, 3), ("5m", 300.0, 3), ("4h", 14400.0, 1))
"""(offset, seconds, epochs that must have passed in it): the first that knows enough counts."""


class FigureSource(Protocol):
    """Where figures come from."""

    async def instant(self, query: str, time: float) -> list[Sample]:
        """The rows of a query at one moment (Unix time)."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured.

    Attributes:
        time: Unix time of the queries, or None: nothing was asked.
        problem: why a figure is missing, or an empty string.
        values: figure (a key of `figure_queries`) -> job_id -> value.
    """

    time: float | None = None
    problem: str = ""
    values: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, figure: str, job_id: str) -> float | None:
        """A job's figure, or None where it is not known."""
        return self.values.get(figure, {}).get(job_id)


def figure_queries(scrape_interval: float) -> dict[str, str]:
    """Figure -> its PromQL for the whole fleet; each row has the label `job_id` alone.

    A job is one row, however many cards and nodes it has: utilisation (0 to 1) is the mean of its
    cards, memory (bytes) that of its fullest card. The time left of a training (seconds) is what
    its last half hour of epochs, or what is known of them, says of those to come.

    Args:
        scrape_interval: of the nodes, in seconds.
    """
    fresh = f"{signals.FRESH_SCRAPES * scrape_interval:g}"
    on = "on (instance, job_id, run_id)"

    def last(signal: str) -> str:
        return signals.query(SignalKey(signal, "last"), scrape_interval=scrape_interval)

    def current(metric: str) -> str:
        return f"{metric} and {on} timestamp({metric}) >= time() - {fresh}"

    pace = " or ".join(
        f"(yolo_epoch - yolo_epoch offset {offset} >= {least}) / {seconds:g}"
        for offset, seconds, least in _LOOK_BACKS
    )
    return {
        "utilization": f"avg by (job_id) ({last('gpu_utilization')})",
        "memory": f"max by (job_id) ({last('gpu_memory')})",
        "epoch": f"max by (job_id) ({current('yolo_epoch')})",
        "epochs": f"max by (job_id) ({current('yolo_epochs_planned')})",
        "time_left": (
            f"max by (job_id) ((({current('yolo_epochs_planned')}) - {on} yolo_epoch) "
            f"/ {on} ({pace}))"
        ),
    }


class FleetFigures:
    """The figures of a fleet, each set kept for a moment.

    Args:
        source: where they come from, or None: from nowhere.
        clock: wall time.
        scrape_interval: of the nodes, in seconds.
    """

    def __init__(
        self, source: FigureSource | None, clock: Clock, *, scrape_interval: float
    ) -> None:
        self._source = source
        self._clock = clock
        self._queries = figure_queries(scrape_interval)
        self._kept: Figures | None = None
        self._asking: asyncio.Task[Figures] | None = None

    async def now(self) -> Figures:
        """What every job measures; never an error."""
        if self._source is None:
            return Figures(problem="this engine asks for no figures")
        now = self._clock.wall()
        kept = self._kept
        if kept is not None and kept.time is not None and 0 <= now - kept.time < FRESH_SECONDS:
            return kept
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(self._source, now))
            self._asking.add_done_callback(self._asked)
        # Who goes away takes the answer from nobody else.
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[Figures]) -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is None:
            self._kept = task.result()

    async def _ask(self, source: FigureSource, now: float) -> Figures:
        values: dict[str, Mapping[str, float]] = {}

        async def one(figure: str, query: str) -> None:
            rows = await source.instant(query, now)
            values[figure] = {
                row.labels.get("job_id", ""): row.value for row in rows if math.isfinite(row.value)
            }

        problem = ""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                for figure, query in self._queries.items():
                    # One after the other: the rules' own queries go before those of who looks on.
                    await one(figure, query)
        except TimeoutError:
            problem = f"Prometheus gave no figures within {TIMEOUT_SECONDS:g} s"
        except GpuwardenError as error:
            problem = f"Prometheus gave no figures: {error}"
        return Figures(now, problem, MappingProxyType(values))
