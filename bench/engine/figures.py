"""What is measured of the engine at one size of the fleet, and what it should be."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.engine.ticks import TICK_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1024 * 1024
TARGET_CARDS = 10_000
"""The targets are those of this size; at smaller ones more is not allowed either, except that a
tick there may be longer than a rule group: what it costs however small the fleet is weighs more."""
CPU_SHARE = 0.15
GROUP_RATIO = 1.3
WALL_SHARE = 0.5
RESIDENT_BYTES = 300 * MIB


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one size.

    Attributes:
        cards: of the fleet.
        series: written into Prometheus.
        queries: of a tick.
        jobs: that the engine saw.
        cases: that were open at the end.
        cpu: seconds of the engine's process, of each tick.
        wall: seconds of each tick.
        group: seconds of each evaluation of the same expressions as a rule group.
        resident: bytes of the engine's process, the most ever.
    """

    cards: int
    series: int
    queries: int
    jobs: float
    cases: float
    cpu: Sequence[float]
    wall: Sequence[float]
    group: Sequence[float]
    resident: float

    @property
    def ratio(self) -> float:
        """Wall time of a tick over that of the rule group, medians both; inf without a group's."""
        if not self.group:
            return math.inf
        return statistics.median(self.wall) / statistics.median(self.group)


def missed(figures: Figures) -> list[str]:
    """Each target that is missed, in words."""
    cpu, wall = statistics.median(figures.cpu), statistics.median(figures.wall)
    found = [
        (cpu, CPU_SHARE * TICK_SECONDS, "s of CPU per tick"),
        (wall, WALL_SHARE * TICK_SECONDS, "s of wall time per tick"),
        (figures.resident / MIB, RESIDENT_BYTES / MIB, "MiB of memory"),
    ]
    if figures.cards >= TARGET_CARDS:
        found.append((figures.ratio, GROUP_RATIO, "times the rule group"))
    return [
        f"MISSED at {figures.cards} cards: {value:.2f} {unit}, at most {limit:.2f} are wanted"
        for value, limit, unit in found
        if value > limit
    ]


def table(found: Sequence[Figures]) -> str:
    """All sizes side by side, as Markdown."""
    rows = [
        ("jobs seen", [f"{f.jobs:.0f}" for f in found], ""),
        ("series in Prometheus", [f"{f.series}" for f in found], ""),
        ("queries per tick", [f"{f.queries}" for f in found], ""),
        ("open cases", [f"{f.cases:.0f}" for f in found], ""),
        (
            "engine CPU per tick, median (s)",
            [f"{statistics.median(f.cpu):.2f}" for f in found],
            f"{CPU_SHARE * TICK_SECONDS:.2f}",
        ),
        (
            "the same per job (us)",
            [f"{1e6 * statistics.median(f.cpu) / f.cards:.0f}" for f in found],
            "",
        ),
        (
            "tick, median (s)",
            [f"{statistics.median(f.wall):.2f}" for f in found],
            f"{WALL_SHARE * TICK_SECONDS:.1f}",
        ),
        ("tick, slowest (s)", [f"{max(f.wall):.2f}" for f in found], ""),
        (
            "rule group, median (s)",
            [f"{statistics.median(f.group or [math.nan]):.2f}" for f in found],
            "",
        ),
        ("tick over rule group", [f"{f.ratio:.2f}" for f in found], f"{GROUP_RATIO}"),
        (
            "engine memory, most (MiB)",
            [f"{f.resident / MIB:.0f}" for f in found],
            f"{RESIDENT_BYTES / MIB:.0f}",
        ),
    ]
    head = ["cards", *(f"{f.cards}" for f in found), "target"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join([name, *values, target]) + " |" for name, values, target in rows]
    return "\n".join(lines)
