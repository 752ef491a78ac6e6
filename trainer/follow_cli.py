"""`gpuwarden follow`: how a training goes, in a terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden import job_files
from gpuwarden.clock import SystemClock
from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import following

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_SECONDS = 1.0
PLAIN_SECONDS = 30.0
"""Between two lines where nobody sees them redrawn."""


@click.command("follow", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_id", required=False, metavar="[RUN]")
@click.option(
    "--jobs-directory",
    envvar=job_files.DIRECTORY_VARIABLE,
    type=click.Path(path_type=Path, file_okay=False),
    default=job_files.DEFAULT_DIRECTORY,
    show_default=True,
    help="Where the run publishes its progress; on the node, or in the container, that trains it.",
)
@click.option(
    "--engine.url",
    "engine_url",
    envvar="GPUWARDEN_ENGINE_URL",
    metavar="URL",
    help="Also show what the engine makes of this job: the rules that it breaks, and what comes.",
)
@click.option("--once", is_flag=True, help="Say how it stands, and end.")
def follow(run_id: str | None, jobs_directory: Path, *, engine_url: str | None, once: bool) -> None:
    """Follow the training RUN until this attempt of it ends: progress, pace, states, time left.

    Without RUN the one that moved last. Only reads, and may be ended and started at any time.

    \u0008
      gpuwarden follow exp1 --engine.url http://engine:9837
      gpuwarden train --follow exp1
    """
    watch(run_id, jobs_directory, engine_url=engine_url, once=once)


def watch(
    run_id: str | None, root: Path, *, engine_url: str | None = None, once: bool = False
) -> None:
    """Show a run until its attempt ends.

    Args:
        run_id: of the run; None or empty: the one that moved last.
        root: of the job files.
        engine_url: of the engine, or None.
        once: show it once.

    Raises:
        InvalidInput: there is no such run.
    """
    from rich.console import Console
    from rich.live import Live

    if not run_id:
        known = following.runs(root)
        if not known:
            raise InvalidInput(f"{root}/jobs has no run to follow")
        run_id = known[0]
    clock = SystemClock()
    engine = following.EngineView(engine_url, run_id, clock=clock)

    def look() -> following.Sight:
        return following.look(root, run_id, now=clock.wall(), engine=engine.lines())

    console = Console()
    sight = look()
    try:
        if once or not console.is_terminal:
            click.echo("\n".join(following.lines(sight)))
            told = sight.now
            while not once and not sight.ended:
                time.sleep(REFRESH_SECONDS)
                sight = look()
                if sight.ended or sight.now - told >= PLAIN_SECONDS:
                    told = sight.now
                    click.echo("; ".join(following.lines(sight)[:3]))
            return
        with Live(_drawn(sight), console=console, refresh_per_second=4) as live:
            while not sight.ended:
                time.sleep(REFRESH_SECONDS)
                sight = look()
                live.update(_drawn(sight))
    except KeyboardInterrupt:
        click.echo("the training goes on")


def _drawn(sight: following.Sight) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    first, *rest = following.lines(sight)
    parts: list[RenderableType] = [Text(first, style="bold")]
    if sight.share is not None:
        parts.append(ProgressBar(total=1.0, completed=sight.share, width=60))
    parts += [Text(line) for line in rest]
    return Group(*parts)
