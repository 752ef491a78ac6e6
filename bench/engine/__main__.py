"""Measure the rule engine on a large fleet: `python -m bench.engine [--quick] [--cards N,N]`.

A fleet of nodes with eight cards each and a job on every card is written into a real Prometheus.
A real engine with a real ledger ticks on it in a process of its own; then the same Prometheus
evaluates the same expressions as a rule group, with nothing else to do. Exits with 1 where a target
is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.engine import fleets, servers
from bench.engine.figures import Figures, missed, table
from bench.engine.ticks import TICK_SECONDS, written_settings
from gpuwarden.ruleengine.facts import silent_nodes, value_queries
from gpuwarden.ruleengine.inventories import (
    Expectation,
    current_queries,
    remembered_queries,
    silent_query,
)
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.rulebooks import RuleBook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.engine.servers import Prometheus
    from gpuwarden.ruleengine.settings import Settings

    Advance = Callable[[], None]

WARM_UP_TICKS = 3
"""In the first ones cases are opened, detected and brought through their stages."""


def main() -> int:
    """Run the benchmark; 0 if every target is met."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="2,000 cards and fewer ticks; under three minutes"
    )
    parser.add_argument(
        "--cards",
        type=_sizes,
        metavar="N,N",
        help="sizes of the fleet; 1000,4000,10000 by default, multiples of eight",
    )
    parser.add_argument("--ticks", type=int, help="measured at each size; 6, or 3 with --quick")
    parser.add_argument(
        "--gogc",
        type=int,
        metavar="PERCENT",
        help="GOGC of Prometheus; its own default, 100, if not given",
    )
    arguments = parser.parse_args()
    sizes = arguments.cards or ((2000,) if arguments.quick else (1000, 4000, 10_000))
    ticks = arguments.ticks or (3 if arguments.quick else 6)
    found = [_measure(cards, ticks, arguments.gogc) for cards in sizes]
    print(_machine())
    print(f"Prometheus with GOGC={arguments.gogc or 100}; jobs: {fleets.MIX}\n")
    print(table(found))
    complaints = [text for figures in found for text in missed(figures)]
    print("\n".join(complaints) if complaints else "Every target is met.")
    return 1 if complaints else 0


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if any(size < 8 or size % fleets.CARDS_PER_NODE for size in sizes):
        raise argparse.ArgumentTypeError("each must be a multiple of eight cards")
    return sizes


def _machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load {load:.1f} at the end"
    )


def _measure(cards: int, ticks: int, gogc: int | None) -> Figures:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as name,
        servers.prometheus(Path(name) / "prometheus", gogc=gogc) as prometheus,
        Progress(*columns) as progress,
    ):
        folder = Path(name) / "engine"
        folder.mkdir()
        bar = progress.add_task(f"{cards} cards: written", total=1.0)
        series = fleets.write_fleet(
            prometheus.url, cards, progress=lambda share: progress.update(bar, completed=share)
        )
        bar = progress.add_task(f"{cards} cards: ticks", total=WARM_UP_TICKS + ticks)
        settings = written_settings(prometheus.url, folder)
        lines = _ticks(
            prometheus.url, folder, WARM_UP_TICKS + ticks, advance=lambda: progress.advance(bar)
        )
        bar = progress.add_task(f"{cards} cards: rule group", total=ticks)
        expressions = _expressions(settings, prometheus.url)
        seconds = _group(prometheus, expressions, ticks, advance=lambda: progress.advance(bar))
    measured = lines[WARM_UP_TICKS:]
    return Figures(
        cards=cards,
        series=series,
        queries=len(expressions),
        jobs=measured[-1]["jobs"],
        cases=measured[-1]["cases"],
        cpu=[line["cpu"] for line in measured],
        wall=[line["wall"] for line in measured],
        group=seconds,
        resident=max(line["peak"] for line in lines),
    )


def _expressions(settings: Settings, url: str) -> list[str]:
    """What a tick asks, as it is asked of this fleet."""
    rules, interval = RuleBook(settings).rules, settings.values.scrape_interval

    async def silent() -> list[str]:
        async with PrometheusClient(url, timeout=60.0) as client:
            return await silent_nodes(client, time=time.time(), scrape_interval=interval)

    return [
        silent_query(interval),
        *current_queries(interval, Expectation()).values(),
        *remembered_queries(interval, asyncio.run(silent())).values(),
        *value_queries(rules, interval),
    ]


def _ticks(url: str, folder: Path, count: int, *, advance: Advance) -> list[dict[str, Any]]:
    """What each tick of an engine in a process of its own took."""
    command = [sys.executable, "-m", "bench.engine.ticks", url, str(folder), "--ticks", str(count)]
    found: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            found.append(json.loads(line))
            advance()
    if process.returncode or len(found) != count:
        raise SystemExit("the engine did not come to its end: see above")
    if any(line["outcomes"].get("completed") != n for n, line in enumerate(found, start=1)):
        raise SystemExit(f"a tick was not completed: {found[-1]['outcomes']}")
    return found


def _group(
    prometheus: Prometheus, expressions: Sequence[str], count: int, *, advance: Advance
) -> list[float]:
    """How long each of some evaluations took as a rule group, the first one left out."""
    prometheus.load(expressions, TICK_SECONDS)
    seen: list[float] = []
    deadline = time.monotonic() + (count + 2) * 30
    while len(seen) <= count:
        if time.monotonic() > deadline:
            print(
                "Prometheus did not evaluate the rule group often enough in time", file=sys.stderr
            )
            break
        time.sleep(1.0)
        last = prometheus.group_seconds()
        if last is not None and last not in (0.0, *seen[-1:]):
            seen.append(last)
            advance()
    failures = prometheus.group_failures()
    prometheus.load((), TICK_SECONDS)
    if failures:
        raise SystemExit(f"{failures:.0f} evaluations of the rule group failed")
    return seen[1:]


if __name__ == "__main__":
    sys.exit(main())
