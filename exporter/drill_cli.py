"""`gpuwarden drill victim`: a small process on a node that waits to be ended."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden import job_files
from gpuwarden.exporter.drill_victims import (
    CudaCard,
    Ending,
    OnTerm,
    SimulatedCard,
    new_run_id,
    wait_to_be_ended,
)
from gpuwarden.option_values import read_seconds

if TYPE_CHECKING:
    from gpuwarden.exporter.drill_victims import Card

_SIMULATED = "simulated:"


@click.command()
@click.option(
    "--gpus",
    default="driver",
    show_default=True,
    metavar="driver|simulated:FILE",
    help="Hold memory of a real card by the driver's libcuda, or of a simulated one by a line in "
    "its scenario.",
)
@click.option(
    "--card",
    type=click.IntRange(0, 255),
    default=0,
    show_default=True,
    help="Index of the card.",
)
@click.option(
    "--memory",
    type=click.IntRange(1, 1024 * 1024),
    default=256,
    show_default=True,
    metavar="MIB",
    help="How much of it is held; the driver's own context comes on top.",
)
@click.option(
    "--on-term",
    type=click.Choice([item.value for item in OnTerm]),
    default=OnTerm.LEAVE.value,
    show_default=True,
    help="leave: end on SIGTERM. ignore: stay, so that SIGKILL has to end it.",
)
@click.option(
    "--for",
    "seconds",
    default="30m",
    show_default=True,
    metavar="DURATION",
    callback=read_seconds,
    help="Ends by itself after so long, with status 1: nobody ended it.",
)
@click.option("--run-id", help="Of the drill; drill-<host>-<time> by default.")
@click.option(
    "--jobs.directory",
    "jobs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where trainings declare themselves; $GPUWARDEN_JOBS or /run/gpuwarden by default.",
)
def victim(
    gpus: str,
    card: int,
    *,
    memory: int,
    on_term: str,
    seconds: float,
    run_id: str | None,
    jobs: Path | None,
) -> None:
    """Hold a little GPU memory, say that it is a drill, and wait to be ended.

    Run it as the user that `drill.user` of engine.yaml names, by a timer
    (deploy/systemd/gpuwarden-drill.timer), cron, ssh or Slurm; never as root. The engine sees it,
    ends it by the drill's rule as it would end any job, and times each step: `gpuwarden drill
    status`. Exit status: 0 it left when asked; 1 nobody ended it; 3 no card can be had; 130
    interrupted. SIGKILL ends it with --on-term ignore.
    """
    found = wait_to_be_ended(
        _card(gpus, card, memory * 1024 * 1024),
        run_id=run_id or new_run_id(socket.gethostname()),
        jobs=jobs or job_files.directory(),
        on_term=OnTerm(on_term),
        seconds=seconds,
    )
    if found is Ending.INTERRUPT:
        raise click.Abort
    if found is Ending.BOUND:
        click.echo("nobody ended this drill: gpuwarden drill status says how far it came", err=True)
        raise click.exceptions.Exit(1)


def _card(gpus: str, index: int, size: int) -> Card:
    if gpus == "driver":
        return CudaCard(index, size)
    if gpus.startswith(_SIMULATED) and gpus != _SIMULATED:
        return SimulatedCard(Path(gpus.removeprefix(_SIMULATED)), index, size)
    raise click.BadParameter(f"{gpus!r} is neither driver nor simulated:FILE", param_hint="--gpus")
