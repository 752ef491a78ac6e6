"""A node to measure on: eight simulated cards, and real sleeping processes that hold them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.exporter.scenarios import GIB, Card, Delay, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CARDS = 8

# A job as torchrun starts one: a parent that waits, and a rank for each card.
_JOB = 'for rank in $(seq "$1"); do sleep 86400 & echo $!; done; echo .; wait'


@dataclass(frozen=True, slots=True)
class Load:
    """What the node carries.

    Attributes:
        processes: on each card.
        delay: milliseconds that each call of the driver takes more.
    """

    processes: int
    delay: float = 0.0

    def __str__(self) -> str:
        slow = f", {self.delay:g} ms per driver call" if self.delay else ""
        return f"{CARDS} cards with {self.processes} processes each{slow}"


@contextlib.contextmanager
def sleepers(jobs: int) -> Iterator[list[list[int]]]:
    """Jobs of one sleeping rank per card; gives the ranks' pids, and ends them all.

    Args:
        jobs: how many.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        ranks = []
        for _ in range(jobs):
            job = subprocess.Popen(
                ["/bin/sh", "-c", _JOB, "job", str(CARDS)],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            started.append(job)
            if job.stdout is not None:
                ranks.append([int(line) for line in iter(job.stdout.readline, ".\n")])
        yield ranks
    finally:
        for job in started:
            # The ranks are in the session of their job.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, 9)
            job.wait()
            if job.stdout is not None:
                job.stdout.close()


def scenario(load: Load, ranks: list[list[int]]) -> Scenario:
    """The driver's view of the node.

    Args:
        load: what it carries.
        ranks: the pids of each job, one for each card.
    """
    return Scenario(
        cards=[Card(index) for index in range(CARDS)],
        processes=[
            # A ghost: listed unconditionally. Else the simulation would itself read /proc for each
            # process, and its cost would be taken for the exporters'.
            SimulatedProcess(card, pid, memory=GIB // 4, sm=number % 2, mem=1, ghost=1)
            for number, pids in enumerate(ranks)
            for card, pid in enumerate(pids)
        ],
        delays=[Delay("*", load.delay)] if load.delay else [],
    )


def write(folder: Path, name: str, content: Scenario) -> Path:
    """Write a scenario of its own for one program, so that its calls are counted alone."""
    return content.write(folder / f"{name}.scenario")
