"""Measure the exporter beside nvitop-exporter: `python -m bench.exporter [--quick]`.

Both run at the same time on the same simulated driver and are scraped as Prometheus does, each in a
virtual environment of its own, which the first run makes in .bench/. Exits with 1 where a target is
missed.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.exporter import budgets, nodes, programs
from bench.exporter.figures import Figures, measure, missed, table

LOADS = (
    nodes.Load(8),
    nodes.Load(64),
    nodes.Load(8, delay=0.3),
    nodes.Load(64, delay=0.3),
)


@dataclass(frozen=True, slots=True)
class _Length:
    seconds: float
    scrapes: int


@dataclass(frozen=True, slots=True)
class _Pythons:
    own: Path
    peer: Path


_QUICK = _Length(seconds=15, scrapes=60)
_FULL = _Length(seconds=60, scrapes=300)


def main() -> int:
    """Run the benchmark; 0 if every target is met."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.exporter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="about three minutes instead of ten")
    parser.add_argument(
        "--environments",
        type=Path,
        default=programs.ROOT / ".bench",
        metavar="FOLDER",
        help="where the two virtual environments are; made if they are not there",
    )
    arguments = parser.parse_args()
    length = _QUICK if arguments.quick else _FULL
    folder = arguments.environments.absolute()
    pythons = _Pythons(
        own=programs.install(folder / "gpuwarden", "--editable", programs.OWN),
        peer=programs.install(folder / "nvitop-exporter", programs.PEER),
    )
    print(f"{programs.PEER} and this gpuwarden, each with its defaults, at the same time;")
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}\n")
    faults = []
    for load in LOADS:
        with nodes.sleepers(load.processes) as ranks, tempfile.TemporaryDirectory() as folder:
            own, peer = _compare(load, ranks, Path(folder), pythons=pythons, length=length)
            print(table(load, own, peer), flush=True)
            faults += [f"{load}: {fault}" for fault in missed(own, peer)]
            if not load.delay:
                print(budgets.table(load, ranks, Path(folder)), flush=True)
    for fault in faults:
        print(f"missed: {fault}")
    return 1 if faults else 0


def _compare(
    load: nodes.Load, ranks: list[list[int]], folder: Path, *, pythons: _Pythons, length: _Length
) -> tuple[Figures, Figures]:
    content = nodes.scenario(load, ranks)
    with (
        programs.gpuwarden(pythons.own, folder, nodes.write(folder, "gpuwarden", content)) as own,
        programs.nvitop(pythons.peer, nodes.write(folder, "nvitop", content)) as peer,
    ):
        first, second = measure([own, peer], seconds=length.seconds, scrapes=length.scrapes)
        return first, second


if __name__ == "__main__":
    sys.exit(main())
