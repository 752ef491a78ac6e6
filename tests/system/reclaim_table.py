"""Print what became of each job: `python -m tests.system.reclaim_table [KIND:WAY ...]`.

The whole table takes some three minutes. Exit status 1: an audit shows a broken invariant.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
from tests.system.reclaims import KINDS, WAYS, Cell, cells, ground, platforms_here

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE = 8
_HEAD = (
    *("job", "how it goes", "ended by", "result", "freed", "work lost"),
    *("first sample to detected", "to told", "to decided", "to proof"),
)
_ASKED = {"request": "its run's request", "SIGUSR1": "its `--signal`"}


def table(found: list[Cell]) -> Iterator[str]:
    """The cells as Markdown."""
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{'---|' * len(_HEAD)}"
    for cell in found:
        yield f"| {' | '.join(_row(cell))} |"


def _row(cell: Cell) -> tuple[str, ...]:
    result = cell.audit["result"]
    proving = [n for n in cell.audit["nodes"] if n["request"]["action"] in ("terminate", "watch")]
    gone = all(node["gone"] for node in proving)
    times = result["seconds"]
    names = ("first_sample_to_detected", "detected_to_told", "told_to_decided")
    freed = (result["memory_freed"] or 0) / 2**30
    return (
        KINDS[cell.job.kind],
        WAYS[cell.job.way],
        _ASKED.get(cell.ended_by, cell.ended_by),
        result["state"],
        f"{freed:.0f} GiB",
        f"{cell.lost:.0f} s",
        *(f"{times[name]:.1f} s" for name in names),
        f"{times['decided_to_finished']:.1f} s{'' if gone else ', none'}",
    )


def main(chosen: list[tuple[str, str]]) -> int:
    """Run the cells, so many at a time, and print them."""
    found: list[Cell] = []
    only_processes = all(kind == "process" for kind, _ in chosen)
    with (
        tempfile.TemporaryDirectory(prefix="gw") as name,
        ground(Path(name), platforms=not only_processes) as here,
    ):
        for first in range(0, len(chosen), AT_ONCE):
            part = chosen[first : first + AT_ONCE]
            jobs = [here.start(*pair, first + place) for place, pair in enumerate(part)]
            found += cells(here, jobs)
        # What jobs wrote down goes with the folder.
        found.sort(
            key=lambda cell: (list(KINDS).index(cell.job.kind), list(WAYS).index(cell.job.way))
        )
        for line in table(found):
            click.echo(line)
    broken = [f"{cell.job.kind}:{cell.job.way}: {text}" for cell in found for text in cell.broken]
    for line in broken:
        click.echo(line, err=True)
    return 1 if broken else 0


if __name__ == "__main__":
    named = [(kind, way) for kind, _, way in (word.partition(":") for word in sys.argv[1:])]
    everything = [(kind, way) for way in WAYS for kind in KINDS]
    if not platforms_here() and not named:
        click.echo("Without cgroups of v1 there are no Slurm jobs and pods: only processes.")
        everything = [pair for pair in everything if pair[0] == "process"]
    sys.exit(main(named or everything))
