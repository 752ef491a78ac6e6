"""What a Prometheus would hold, as OpenMetrics text: series, the times they are known at, windows.

A window is a stretch of time with a fleet of its own. Windows lie far enough apart in one database
that no query of one sees another: a day, and a brief one for each thing that can be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.catalogue import CATALOGUE, MetricType, metric_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BASE = 9002 * 194_400
"""A multiple of every size of block that promtool chooses: 2, 6, 18 and 54 hours."""
HOUR = 3600
COARSE, FINE = 60, 10
"""Seconds between samples: of the day, and of its last hour and the other windows."""

FINE_METRICS = ("gpu_utilization_ratio", "gpu_job_utilization_ratio")
"""Known at the finer step all day: recording rules want most of a window of five minutes."""

DIES_SECONDS = 900
"""How long before a window's end something dies, where something does."""


@dataclass(frozen=True)
class Window:
    """A stretch of time. Unix seconds.

    Attributes:
        name: for people.
        start, end: first and last sample.
        fine_from: from here on samples are `FINE` seconds apart.
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

    def times(self, *, fine: bool = False) -> list[int]:
        """When samples are taken."""
        if fine:
            return list(range(self.start, self.end + 1, FINE))
        coarse = range(self.start, self.fine_from, COARSE)
        return [*coarse, *range(self.fine_from, self.end + 1, FINE)]


def brief(name: str, place: int) -> Window:
    """A window of 40 minutes: the one at this place, each in a block of two hours of its own."""
    start = BASE + place * 2 * HOUR
    return Window(name, start, start + 2400, start)


DAY = Window("day", BASE + 24 * HOUR, BASE + 48 * HOUR, BASE + 47 * HOUR)


@dataclass
class History:
    """Series by metric; each is its labels and its value at a time, None while it is absent."""

    window: Window
    series: dict[str, list[tuple[dict[str, str], Callable[[int], float | None]]]] = field(
        default_factory=dict
    )

    def add(self, name: str, labels: dict[str, str], value: object) -> None:
        """Add a series; `value` is a number or a function of Unix time."""
        known = metric_of(name)
        if known is not None:
            wrong = set(labels) - {*known.labels, "job", "instance", "le"}
            assert not wrong, f"{name} has no labels {wrong}"
        given = value if callable(value) else lambda _time: value
        self.series.setdefault(name, []).append((labels, given))

    def text(self) -> str:
        """OpenMetrics text, families together and samples in order."""
        return "".join(self._lines()) + "# EOF\n"

    def _lines(self) -> Iterator[str]:
        coarse, fine = self.window.times(), self.window.times(fine=True)
        for name, entries in self.series.items():
            counter = name in CATALOGUE and CATALOGUE[name].type is MetricType.COUNTER
            family = name.removesuffix("_total") if counter else name
            yield f"# TYPE {family} {'counter' if counter else 'gauge'}\n"
            for labels, value in entries:
                words = ",".join(f'{key}="{word}"' for key, word in labels.items())
                head = f"{name}{{{words}}}"
                for time in fine if name in FINE_METRICS else coarse:
                    sample = value(time)
                    if sample is not None:
                        yield f"{head} {sample:.12g} {time}\n"
