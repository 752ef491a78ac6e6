"""A day of 1,000 cards, replayed: `python -m bench.engine.replay [--quick]`.

A real Prometheus is filled with made-up history (its own remote write, scraped every 15 s, a job on
every card, others after it), and the shipped rules are replayed over it at a tick of 15 s, each as
if its mode were enforce. Filling is not counted. Prints a table, and exits with 1 if the target is
missed: 24 h of 1,000 cards in ten minutes, in proportion for less.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import gpuwarden.ruleengine
from bench.engine.servers import prometheus
from gpuwarden.catalogue import CATALOGUE
from gpuwarden.ruleengine.bulk_histories import BulkHistory, BulkJob, Dark, Stretch, metric_names
from gpuwarden.ruleengine.facts import value_queries
from gpuwarden.ruleengine.inventories import Expectation, inventory_queries
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.rehearsals import enforced
from gpuwarden.ruleengine.remote_writes import uncompressed
from gpuwarden.ruleengine.replay_reports import totals
from gpuwarden.ruleengine.replay_runs import Plan, replay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.replay_runs import Replay

RULES = Path(gpuwarden.ruleengine.__file__).parent / "rules"
SCRAPE_SECONDS = 15.0
TICK_SECONDS = 15.0
CARDS_PER_NODE = 8
TARGET_SECONDS = 600.0
"""For 24 h of 1,000 cards."""
MIX = (
    "70 % healthy YOLO, 10 % not YOLO, 5 % idle after a while, 5 % starved, 5 % hogs, 5 % spinning"
)
_KINDS = ("healthy",) * 14 + ("other",) * 2 + ("idle", "starved", "hog", "spinning")


def _jobs(cards: int, hours: float) -> Iterable[BulkJob]:
    """One job after the other on every card, each for two to ten hours."""
    dice = random.Random(1)  # noqa: S311 - a bench is not to be guessed at
    for number in range(cards):
        begin, attempt = -dice.uniform(0, 4), 0
        while begin < hours:
            kind, length = dice.choice(_KINDS), dice.uniform(2, 10)
            like = "healthy" if kind in ("other", "idle") else kind
            stretches: tuple[Stretch, ...] = (Stretch(length, like),)
            if kind == "idle":
                stretches = (Stretch(length / 4), Stretch(length * 3 / 4, "idle"))
            yield BulkJob(
                f"proc-{number:05d}-{attempt}",
                f"user{number % 100:03d}",
                f"gpu-{number // CARDS_PER_NODE:04d}:9835",
                begin,
                stretches,
                (f"GPU-{number:08x}",),
                model="" if kind == "other" else dice.choice(("yolov8s", "yolov8m", "yolo11m")),
            )
            begin, attempt = begin + length + dice.uniform(0, 0.2), attempt + 1


def _history(rules: RuleSet, cards: int, hours: float) -> BulkHistory:
    begin = (time.time() - hours * 3600) // SCRAPE_SECONDS * SCRAPE_SECONDS
    texts = [*value_queries(rules, SCRAPE_SECONDS), *inventory_queries(5, Expectation()).values()]
    dark = [
        Dark(f"gpu-{node:04d}:9835", hours / 2, hours / 2 + 0.2)
        for node in range(0, cards // CARDS_PER_NODE, 50)
    ]
    return BulkHistory(
        begin,
        hours * 3600,
        SCRAPE_SECONDS,
        list(_jobs(cards, hours)),
        dark=dark,
        wanted=metric_names(texts, [*CATALOGUE, "up"]),
    )


def _fill(url: str, history: BulkHistory, bar: Progress) -> int:
    """Write it; returns its bytes."""
    headers = {
        "Content-Type": "application/x-protobuf",
        "Content-Encoding": "snappy",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    }
    work, size = bar.add_task("fill", total=history.seconds), 0
    with httpx.Client(timeout=300, trust_env=False) as client:
        for body in history.bodies():
            content = uncompressed(body)
            client.post(f"{url}/api/v1/write", content=content, headers=headers).raise_for_status()
            size += len(body)
            bar.advance(work, 1800)
    return size


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _replayed(url: str, history: BulkHistory, rules: RuleSet, bar: Progress) -> Replay:
    plan = Plan(
        url,
        history.begin,
        history.begin + history.seconds,
        step=TICK_SECONDS,
        scrape_interval=SCRAPE_SECONDS,
    )
    work = bar.add_task("replay", total=plan.ticks.count)
    async with httpx.AsyncClient(timeout=plan.timeout, trust_env=False) as client:
        return await replay(
            plan,
            [("shipped", rules)],
            client,
            progress=lambda done, _all: bar.update(work, completed=done),
        )


def main() -> int:
    """Run the bench; 0 if the target is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 h in the place of 24 h")
    parser.add_argument("--cards", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24.0)
    words = parser.parse_args()
    hours = 2.0 if words.quick else words.hours
    loaded = load_rule_files(sorted(RULES.glob("*.yaml")), scrape_interval=SCRAPE_SECONDS)
    rules = enforced(loaded, frozenset(rule.id for rule in loaded.rules))
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder,
        prometheus(Path(folder)) as server,
        Progress(console=console, transient=True) as bar,
    ):
        history = _history(rules, words.cards, hours)
        _fill(server.url, history, bar)
        peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        theirs, ours = _cpu(server.pid), _own_cpu()
        begun = time.monotonic()
        result = asyncio.run(_replayed(server.url, history, rules, bar))
        seconds = time.monotonic() - begun
        theirs, ours = _cpu(server.pid) - theirs, _own_cpu() - ours
    target = TARGET_SECONDS * hours / 24 * words.cards / 1000
    console.print(_table(result, seconds=seconds, ours=ours, theirs=theirs, rules=len(rules.rules)))
    console.print(f"jobs: {MIX}; peak memory with the made-up history {peak_before / 1024:.0f} MiB")
    met = seconds <= target
    console.print(f"target {target:.0f} s: {'met' if met else 'MISSED'}")
    return 0 if met else 1


def _table(result: Replay, *, seconds: float, ours: float, theirs: float, rules: int) -> Table:
    found, plan = totals(result.arms[0]), result.plan
    table = Table(box=None)
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows = {
        "history": f"{(plan.end - plan.begin) / 3600:g} h",
        "ticks": f"{plan.ticks.count:,}",
        "rules": f"{rules}",
        "jobs": f"{result.jobs:,}",
        "verdicts": f"{found['verdicts']:,}",
        "evaluated by the live code": f"{result.arms[0].evaluations:,}",
        "incidents": f"{found['incidents']:,}",
        "would have been ended": f"{found['terminations']:,}",
        "queries": f"{result.cost.queries:,}",
        "samples received": f"{result.cost.samples:,}",
        "stretches": f"{result.stretches}",
        "wall": f"{seconds:.1f} s",
        "CPU of the replay": f"{ours:.1f} s",
        "CPU of Prometheus": f"{theirs:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    sys.exit(main())
