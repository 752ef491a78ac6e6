"""Where the time of one snapshot goes: the driver, /proc, attribution, the page."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.exporter import nodes
from gpuwarden.exporter import processes
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.collector import collect
from gpuwarden.exporter.nvml import open_gpus
from gpuwarden.exporter.pages import Bodies, Families, Format
from gpuwarden.exporter.processes import Launchers
from gpuwarden.exporter.runs import prepare
from gpuwarden.exporter.simulated import calls

if TYPE_CHECKING:
    from collections.abc import Callable

SNAPSHOTS = 25


def table(load: nodes.Load, ranks: list[list[int]], folder: Path) -> str:
    """Median milliseconds of each part of a snapshot, in Markdown.

    Args:
        load: what the node carries.
        ranks: the pids of each job.
        folder: for the scenario and the job files.
    """
    scenario = nodes.write(folder, "budget", nodes.scenario(load, ranks))
    nvml = open_gpus(f"simulated:{scenario}")
    prepare(folder / "budget-jobs")
    comm = Path("/proc/self/comm").read_text().strip()
    attribution = Attribution(folder / "budget-jobs", launchers=Launchers.with_extra([comm]))
    spent: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        spent.setdefault(what, []).append(time.perf_counter() - began)

    families: Families | None = None
    nvml.open()
    try:
        attribution.observe(nvml.snapshot())
        before = calls(scenario)
        for _ in range(SNAPSHOTS):
            began = time.perf_counter()
            devices = nvml.snapshot()
            read = time.perf_counter()
            node = attribution.observe(devices)
            known = time.perf_counter()
            families, _ = collect(node, totals={}, previous=families)
            built = time.perf_counter()
            Bodies(families).prepare(Format.OPENMETRICS, compressed=True)
            for what, seconds in (
                ("driver (ctypes)", read - began),
                ("/proc, attribution, job files", known - read),
                ("families", built - known),
                ("page, compressed", time.perf_counter() - built),
                ("whole snapshot", time.perf_counter() - began),
            ):
                spent.setdefault(what, []).append(seconds)
            timed("of which: all processes, none known", processes.read_all)
        made = (calls(scenario) - before) / SNAPSHOTS
    finally:
        attribution.close()
        nvml.close()
    rows = [(f"one snapshot: {load}", "ms, median"), ("---", "---:")]
    rows += [(what, f"{statistics.median(taken) * 1e3:.2f}") for what, taken in spent.items()]
    rows.append(("driver calls (number)", f"{made:.0f}"))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
