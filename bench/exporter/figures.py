"""What is measured of a program, and how two of them compare."""

from __future__ import annotations

import gzip
import statistics
import time
from dataclasses import dataclass
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
_PAUSE_SECONDS = 0.13
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


def measure(programs: Sequence[Program], *, seconds: float, scrapes: int) -> list[Figures]:
    """Measure programs side by side.

    Args:
        programs: running.
        seconds: how long CPU time is counted while each is scraped every 5 s.
        scrapes: how many more, in turn and in quick succession, for the latency.
    """
    latencies: dict[str, list[float]] = {program.name: [] for program in programs}
    resident = {program.name: 0 for program in programs}
    time.sleep(WARM_UP_SECONDS)
    for program in programs:
        program.scrape()
    began = time.monotonic()
    cpu = {program.name: program.cpu_seconds() for program in programs}
    called = {program.name: calls(program.scenario) for program in programs}
    rounds = max(1, round(seconds / SCRAPE_SECONDS))
    for number in range(1, rounds + 1):
        for program in programs:
            latencies[program.name].append(program.scrape()[0])
            resident[program.name] = max(resident[program.name], program.resident_bytes())
        time.sleep(max(0.0, began + number * SCRAPE_SECONDS - time.monotonic()))
    minutes = (time.monotonic() - began) / 60
    cpu = {item.name: (item.cpu_seconds() - cpu[item.name]) / minutes for item in programs}
    called = {item.name: calls(item.scenario) - called[item.name] for item in programs}
    for _ in range(scrapes):
        for program in programs:
            time.sleep(_PAUSE_SECONDS)
            latencies[program.name].append(program.scrape()[0])
    found = []
    for program in programs:
        taken = sorted(latencies[program.name])
        sent = program.scrape()[1]
        page = gzip.decompress(sent) if sent.startswith(b"\x1f\x8b") else sent
        found.append(
            Figures(
                name=program.name,
                median=statistics.median(taken),
                p99=taken[min(len(taken) - 1, round(0.99 * len(taken)))],
                cpu=cpu[program.name],
                resident=max(resident[program.name], program.resident_bytes()),
                page=len(page),
                sent=len(sent),
                series=sum(1 for line in page.splitlines() if line and not line.startswith(b"#")),
                calls=called[program.name] / minutes,
            )
        )
    return found


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
