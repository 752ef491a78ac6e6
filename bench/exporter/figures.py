"""What is measured of a program, and how two of them compare."""

from __future__ import annotations

import gzip
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.exporter.simulated import calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.exporter.nodes import Load
    from bench.exporter.programs import Program

SCRAPE_SECONDS = 5.0
WARM_UP_SECONDS = 10.0
"""What a program does once for each process is not what it does all the time."""
MIB = 1024 * 1024
ROUNDS = 3
"""Both measurements are made by turns, so that what disturbs the machine disturbs both."""
_PAUSE_SECONDS = 0.073
"""Between two scrapes of the latency's measurement; no divisor of any program's own interval."""

LATENCY_TARGET = 0.1
CPU_TARGET = 0.2
RSS_TARGET_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one program under one load.

    Attributes:
        name: of the program.
        median, p99: seconds of a scrape.
        cpu: CPU seconds per minute, scraped every 5 s.
        resident: bytes, the most that were seen.
        page: bytes of the page, and as it was sent.
        sent: bytes of the page as it was sent.
        series: on the page.
        calls: of the driver, per minute.
    """

    name: str
    median: float
    p99: float
    cpu: float
    resident: int
    page: int
    sent: int
    series: int
    calls: float


@dataclass(slots=True)
class _Counts:
    """What is counted of a program while it is measured."""

    latencies: list[float] = field(default_factory=list)
    cpu: float = 0.0
    calls: int = 0
    resident: int = 0

    def see(self, program: Program) -> None:
        """Scrape a program once."""
        self.latencies.append(program.scrape()[0])
        self.resident = max(self.resident, program.resident_bytes())


def measure(programs: Sequence[Program], *, seconds: float, scrapes: int) -> list[Figures]:
    """Measure programs side by side.

    Args:
        programs: running.
        seconds: how long CPU time is counted while each is scraped every 5 s.
        scrapes: how many more, in turn and in quick succession, for the latency.
    """
    counts = {program.name: _Counts() for program in programs}
    time.sleep(WARM_UP_SECONDS)
    for program in programs:
        program.scrape()
    minutes = 0.0
    for number in range(ROUNDS):
        # Nobody is always the first, which finds the machine's caches as the pause left them.
        turn = programs if number % 2 else programs[::-1]
        minutes += _count(turn, counts, seconds / ROUNDS)
        for _ in range(scrapes // ROUNDS):
            for program in turn:
                time.sleep(_PAUSE_SECONDS)
                counts[program.name].see(program)
    return [_figures(program, counts[program.name], minutes) for program in programs]


def _count(programs: Sequence[Program], counts: dict[str, _Counts], seconds: float) -> float:
    """Count CPU time and driver calls while everybody is scraped every 5 s; minutes it took."""
    began = time.monotonic()
    for program in programs:
        counts[program.name].cpu -= program.cpu_seconds()
        counts[program.name].calls -= calls(program.scenario)
    for number in range(1, max(1, round(seconds / SCRAPE_SECONDS)) + 1):
        for program in programs:
            counts[program.name].see(program)
        time.sleep(max(0.0, began + number * SCRAPE_SECONDS - time.monotonic()))
    for program in programs:
        counts[program.name].cpu += program.cpu_seconds()
        counts[program.name].calls += calls(program.scenario)
    return (time.monotonic() - began) / 60


def _figures(program: Program, counted: _Counts, minutes: float) -> Figures:
    taken = sorted(counted.latencies)
    sent = program.scrape()[1]
    page = gzip.decompress(sent) if sent.startswith(b"\x1f\x8b") else sent
    return Figures(
        name=program.name,
        median=statistics.median(taken),
        p99=taken[math.ceil(0.99 * len(taken)) - 1],
        cpu=counted.cpu / minutes,
        resident=max(counted.resident, program.resident_bytes()),
        page=len(page),
        sent=len(sent),
        series=sum(1 for line in page.splitlines() if line and not line.startswith(b"#")),
        calls=counted.calls / minutes,
    )


def missed(own: Figures, peer: Figures) -> list[str]:
    """Targets that are missed, in words."""
    found = []
    for what, ratio, target in (
        ("median latency", own.median / peer.median, LATENCY_TARGET),
        ("p99 latency", own.p99 / peer.p99, LATENCY_TARGET),
        ("CPU", own.cpu / peer.cpu, CPU_TARGET),
    ):
        if ratio > target:
            found.append(f"{what} is {ratio:.2f} of {peer.name}'s, more than {target:g}")
    if own.resident > peer.resident + RSS_TARGET_BYTES:
        more = (own.resident - peer.resident) / MIB
        found.append(f"resident memory is {more:.0f} MiB more than {peer.name}'s, not at most 16")
    return found


def table(load: Load, own: Figures, peer: Figures) -> str:
    """A table in Markdown.

    Args:
        load: under which both were measured.
        own: gpuwarden's.
        peer: the other's.
    """
    rows = [
        (f"{load}", own.name, peer.name, "ratio", "target"),
        ("---", "---:", "---:", "---:", "---:"),
        _row("scrape, median (ms)", own.median * 1e3, peer.median * 1e3, digits=1, target="0.1"),
        _row("scrape, p99 (ms)", own.p99 * 1e3, peer.p99 * 1e3, digits=1, target="0.1"),
        _row("CPU (s per minute)", own.cpu, peer.cpu, digits=2, target="0.2"),
        (
            "resident memory (MiB)",
            f"{own.resident / MIB:.1f}",
            f"{peer.resident / MIB:.1f}",
            f"{(own.resident - peer.resident) / MIB:+.1f}",
            "+16",
        ),
        _row("page (bytes)", own.page, peer.page),
        _row("page as sent (bytes)", own.sent, peer.sent),
        _row("series", own.series, peer.series),
        _row("driver calls (per minute)", own.calls, peer.calls),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(
    what: str, own: float, peer: float, *, digits: int = 0, target: str = ""
) -> tuple[str, ...]:
    ratio = f"{own / peer:.3f}" if peer else ""
    return what, f"{own:.{digits}f}", f"{peer:.{digits}f}", ratio, target
