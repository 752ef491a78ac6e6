"""What a Prometheus would hold, as OpenMetrics text: series, the times they are known at, windows.

A window is a stretch of time with a fleet of its own. Windows lie far enough apart in one database
that no query of one sees another: a day, and a brief one for each thing that can be wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.catalogue import CATALOGUE, MetricType, metric_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

BASE = 9002 * 194_400
"""A multiple of every size of block that promtool chooses: 2, 6, 18 and 54 hours."""
HOUR = 3600
COARSE, FINE = 60, 5
"""Seconds between samples: of most series, and of what recording rules look at in the last hour."""

OFTEN, OFTEN_METRICS = 10, ("gpu_utilization_ratio", "gpu_job_utilization_ratio")
"""Seconds between samples of these all day: rules want most of a window of five minutes."""

DIES_SECONDS = 900
"""How long before a window's end something dies, where something does."""


@dataclass(frozen=True)
class Window:
    """A stretch of time. Unix seconds.

    Attributes:
        name: for people.
        start, end: first and last sample.
        fine_from: from here on what recording rules look at is `FINE` seconds apart.
    """

    name: str
    start: int
    end: int
    fine_from: int

    @property
    def dies(self) -> int:
        """When something dies, where something does."""
        return self.end - DIES_SECONDS

    @property
    def middle(self) -> int:
        """When things happen that happen once."""
        return self.end - HOUR // 2

    def times(self, coarse: int, fine: int) -> list[int]:
        """When samples are taken, by the seconds between them before and from `fine_from`."""
        return [
            *range(self.start, self.fine_from, coarse),
            *range(self.fine_from, self.end + 1, fine),
        ]


def brief(name: str, place: int) -> Window:
    """A window of 40 minutes: the one at this place, each in a block of two hours of its own."""
    start = BASE + place * 2 * HOUR
    return Window(name, start, start + 2400, start)


DAY = Window("day", BASE + 24 * HOUR, BASE + 48 * HOUR, BASE + 47 * HOUR)


@dataclass(frozen=True)
class Series:
    """A series: its labels, its value, and when it is there."""

    labels: dict[str, str]
    value: float | Callable[[int], float | None]
    since: float
    until: float

    def lines(self, name: str, times: list[int]) -> Iterator[str]:
        """Its samples in OpenMetrics text."""
        words = ",".join(f'{key}="{word}"' for key, word in self.labels.items())
        head = f"{name}{{{words}}}"
        if self.since > times[0] or self.until <= times[-1]:
            times = [time for time in times if self.since <= time < self.until]
        if not callable(self.value):
            same = f"{head} {self.value:.12g} "
            yield from (f"{same}{time}\n" for time in times)
            return
        for time in times:
            sample = self.value(time)
            if sample is not None:
                yield f"{head} {sample:.12g} {time}\n"


@dataclass
class History:
    """Series by metric; each is its labels and its value, or a function of time that gives it.

    A function gives None while the series is absent.
    """

    window: Window
    series: dict[str, list[Series]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        labels: dict[str, str],
        value: float | Callable[[int], float | None],
        *,
        since: float = -math.inf,
        until: float = math.inf,
    ) -> None:
        """Add a series that is there from `since` on and no more at `until` (Unix time)."""
        known = metric_of(name)
        if known is not None:
            wrong = set(labels) - {*known.labels, "job", "instance", "le"}
            assert not wrong, f"{name} has no labels {wrong}"
        self.series.setdefault(name, []).append(Series(labels, value, since, until))

    def text(self, fine: Collection[str]) -> str:
        """OpenMetrics text, families together and samples in order; `fine` names what is finer."""
        return "".join(self._lines(fine)) + "# EOF\n"

    def _lines(self, fine: Collection[str]) -> Iterator[str]:
        steps = {
            True: self.window.times(COARSE, FINE),
            False: self.window.times(COARSE, COARSE),
        } | {name: self.window.times(OFTEN, FINE) for name in OFTEN_METRICS}
        for name, entries in self.series.items():
            counter = name in CATALOGUE and CATALOGUE[name].type is MetricType.COUNTER
            family = name.removesuffix("_total") if counter else name
            yield f"# TYPE {family} {'counter' if counter else 'gauge'}\n"
            times = steps.get(name, steps[name in fine])
            for series in entries:
                yield from series.lines(name, times)
