"""Simulate a month of a fleet under several policies: `python -m bench.scheduling`.

Prints the tables of docs/scheduling-simulation.md; `--write` puts them, and the picture, there.
`--quick` takes three days of one seed and the three policies that the picture shows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.scheduling import reports
from bench.scheduling.arms import ARMS, run
from bench.scheduling.measures import Measures

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "scheduling-simulation.md"
PICTURE: Final = ROOT / "docs" / "pictures" / "scheduling-simulation.svg"
_MARKED: Final = re.compile(r"(<!-- begin: results -->\n).*(<!-- end: results -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, and print it."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduling", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="months measured there are not run again"
    )
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args(arguments)
    days, seeds = (3.0, 1) if asked.quick else (asked.days, asked.seeds)
    names = asked.arms or [
        arm.name for arm in ARMS if not asked.quick or arm.name in ("fcfs", "kill", "gpuwarden")
    ]
    results = simulate(
        names,
        range(1, seeds + 1),
        days=days,
        load=asked.load,
        processes=asked.processes,
        keep=asked.keep,
    )
    text = f"{days:g} days, load {asked.load:g}, seeds 1 to {seeds}.\n\n{reports.tables(results)}\n"
    print(text)
    if asked.json is not None:
        asked.json.write_text(reports.as_json(results), "utf-8")
    if asked.write:
        PICTURE.write_text(reports.picture(results), "utf-8")
        page = PAGE.read_text("utf-8")
        PAGE.write_text(_MARKED.sub(lambda found: f"{found[1]}{text}{found[2]}", page), "utf-8")
    return 0


def simulate(
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    days: float,
    load: float,
    processes: int,
    keep: Path | None = None,
) -> reports.Results:
    """Every arm with every seed, several at a time."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ProcessPoolExecutor(max_workers=processes) as pool:
        running = {
            (name, seed): pool.submit(_measured, name, seed, (days, load), keep)
            for name in names
            for seed in seeds
        }
        return {name: [running[name, seed].result() for seed in seeds] for name in names}


def _measured(name: str, seed: int, month: tuple[float, float], keep: Path | None) -> Measures:
    days, load = month
    kept = None if keep is None else keep / f"{name}-{seed}-{days:g}-{load:g}.json"
    if kept is not None and kept.exists():
        return Measures.read(kept.read_text("utf-8"))
    _world, found = run(name, seed, days=days, load=load)
    print(f"{name}, seed {seed}: {found.seconds:.0f} s", file=sys.stderr, flush=True)
    if kept is not None:
        kept.write_text(json.dumps(dataclasses.asdict(found)), "utf-8")
    return found


if __name__ == "__main__":
    sys.exit(main())
