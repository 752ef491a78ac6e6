"""How long a report takes: `python -m bench.report` asks a real Prometheus for 1 to 90 days.

The history of a 1,000-card fleet is made up as the recording rules would have written it (five
minutes; the fleet's own series every 15 s), with the nodes' `up` once a minute. What is not
recorded is there for the last six hours, once a minute, and reported on by itself. Real nodes are
scraped more often: what a report samples then costs more, what is recorded costs the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.servers import backfill, prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Server

DAY: Final = 86400
END: Final = 1_749_945_600
"""2025-06-15 00:00 UTC."""
CARDS_PER_NODE: Final = 8
USERS: Final = 60
IDLE_JOBS: Final = 50
RAW_HOURS: Final = 6
USER_SERIES: Final = (
    "gpu_hours:sum5m",
    "gpu_held_idle_hours:sum5m",
    "lost_gpu_hours:increase5m",
    "reclaimed_gpu_hours:increase5m",
)
MONEY_SERIES: Final = ("gpu_cost:sum5m", "gpu_held_idle_cost:sum5m", "lost_cost:increase5m")


def main() -> int:
    """Make the history, report on it, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--days", type=int, default=90)
    parser.add_argument("--cards", type=int, default=1000)
    arguments = parser.parse_args()
    nodes = arguments.cards // CARDS_PER_NODE
    with tempfile.TemporaryDirectory(prefix="bench-report-") as folder:
        storage = Path(folder) / "tsdb"
        begun = time.monotonic()
        for day in range(arguments.days, 0, -1):
            backfill(
                "\n".join([*_recorded(nodes, END - day * DAY), "# EOF\n"]), storage, block="54h"
            )
        backfill("\n".join([*_raw(nodes), "# EOF\n"]), storage, block="54h")
        print(f"history made in {time.monotonic() - begun:.0f} s")
        print("| Report | Queries | Samples | Received | Seconds | Prometheus, peak RSS |")
        print("|---|---|---|---|---|---|")
        with prometheus("global: {}\n", storage) as server:
            for days in (each for each in (1, 7, 30, 90) if each <= arguments.days):
                whole = "day" if days == 1 else "days"
                _measure(f"{days} {whole}, recorded", server, END - days * DAY, END)
            _measure(f"{RAW_HOURS} h, sampled", server, END - RAW_HOURS * 3600, END)
    return 0


def _lines(name: str, labels: list[str], value: float, span: tuple[int, int, int]) -> Iterator[str]:
    """One family; each series has the same value all the time."""
    yield f"# TYPE {name} gauge"
    for label in labels:
        head = f"{name}{{{label}}} {value:g} "
        yield from (f"{head}{at}" for at in range(*span))


def _recorded(nodes: int, begin: int) -> Iterator[str]:
    """A day as the rules would have written it."""
    span = (begin, begin + DAY, 300)
    for name, value in (
        ("fleet:gpus:count", nodes * CARDS_PER_NODE),
        ("fleet:gpu_utilization_ratio:avg", 0.6),
        ("fleet:gpu_utilization_ratio:p10", 0.1),
        ("fleet:gpu_utilization_ratio:p50", 0.7),
        ("fleet:gpu_utilization_ratio:p90", 0.95),
    ):
        yield from _lines(name, [""], value, (begin, begin + DAY, 15))
    yield from _lines("fleet:gpus_seen:count5m", [""], nodes * CARDS_PER_NODE, span)
    people = [f'user="user{number}",team="team{number % 8}"' for number in range(USERS)]
    for suffix in USER_SERIES:
        yield from _lines(f"user:{suffix}", people, 0.5, span)
    for suffix in MONEY_SERIES:
        priced = [f'{labels},currency="EUR"' for labels in people]
        yield from _lines(f"user:{suffix}", priced, 1.0, span)
    jobs = [f'job_id="slurm-c-{begin + number}-0",{people[number]}' for number in range(IDLE_JOBS)]
    yield from _lines("job:gpu_held_idle_hours:sum5m", jobs, 0.08, span)
    up = [f'job="gpuwarden",instance="n{number}:9835"' for number in range(nodes)]
    yield from _lines("up", up, 1, (begin, begin + DAY, 60))


def _raw(nodes: int) -> Iterator[str]:
    """The nodes' own series, of the last hours; a job for each card."""
    span = (END - RAW_HOURS * 3600, END, 60)
    cards = [(node, gpu) for node in range(nodes) for gpu in range(CARDS_PER_NODE)]
    job = 'job="gpuwarden",instance="n{0}:9835"'
    card = f'{job},gpu="{{1}}",uuid="GPU-{{0}}-{{1}}"'
    holder = ',job_id="slurm-c-{0}{1}-0"'
    for name, form, value in (
        ("gpu_up", card, 1.0),
        ("gpu_utilization_ratio", card, 0.6),
        ("gpu_job_holds_gpu", card + holder, 1.0),
        ("gpu_job_utilization_ratio", card + holder, 0.6),
        ("gpu_job_info", f'{job}{holder},user="user{{1}}"', 1.0),
    ):
        yield from _lines(name, [form.format(*each) for each in cards], value, span)


def _measure(what: str, server: Server, begin: int, end: int) -> None:
    """One report as a process of its own, and a row of the table."""
    span = ("--from", _when(begin), "--to", _when(end))
    command = [sys.executable, "-m", "gpuwarden", "report", "--prometheus", server.url, *span]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "--output", "json"], capture_output=True, check=True, timeout=3600
    )
    found: dict[str, Any] = json.loads(done.stdout)
    took = time.monotonic() - begun
    cost = found["cost"]
    peak = next(
        line.split()[1]
        for line in Path(f"/proc/{server.pid}/status").read_text(encoding="ascii").splitlines()
        if line.startswith("VmHWM")
    )
    print(
        f"| {what} | {cost['queries']} | {cost['samples']:,} | "
        f"{cost['received_bytes'] / 2**20:.1f} MiB | {took:.1f} | "
        f"{int(peak) / 1024:.0f} MiB |",
        flush=True,
    )


def _when(moment: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))


if __name__ == "__main__":
    sys.exit(main())
