"""`gpuwarden exporter`."""

from __future__ import annotations

from pathlib import Path

import click

from gpuwarden import durations, job_files, logs
from gpuwarden.exporter.servers import parse_address
from gpuwarden.exporter.settings import DEFAULT_PORT, ExporterSettings


def _duration(_context: click.Context, option: click.Parameter, value: str) -> float:
    try:
        return durations.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from error


_EXAMPLE = """\b
Try it without a GPU:
  echo card index=0 > /tmp/scenario
  gpuwarden exporter --gpus simulated:/tmp/scenario --jobs.directory /tmp/jobs --once
"""


@click.command("exporter", epilog=_EXAMPLE)
@click.option(
    "--web.listen-address",
    "listen_address",
    default=f"127.0.0.1:{DEFAULT_PORT}",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve. :9835 serves on every address.",
)
@click.option(
    "--jobs.directory",
    "jobs_directory",
    type=click.Path(path_type=Path),
    envvar=[job_files.DIRECTORY_VARIABLE],
    default=job_files.DEFAULT_DIRECTORY,
    show_default=True,
    help="Folder of the job files; jobs/ and requests/ are made in it if they are not there.",
)
@click.option(
    "--gpus",
    default="nvml",
    show_default=True,
    metavar="nvml|simulated:FILE",
    help="The NVIDIA driver, or gpuwarden's simulation of one by a scenario file.",
)
@click.option(
    "--collect.interval",
    "interval",
    callback=_duration,
    default="2s",
    metavar="DURATION",
    show_default=True,
    help="Time between two snapshots; keep it below the scrape interval.",
)
@click.option(
    "--collector.process/--no-collector.process",
    "processes",
    default=True,
    show_default=True,
    help="Export the gpu_process_* families, one series per process and card.",
)
@click.option(
    "--attribution.launcher",
    "launchers",
    multiple=True,
    metavar="COMM",
    help="A process name that starts jobs but is part of none, beside the usual ones (sshd, tmux, "
    "Jupyter servers, interactive shells, ...). May be repeated.",
)
@click.option(
    "--log.level",
    "log_level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
@click.option(
    "--log.format",
    "log_format",
    type=click.Choice(["auto", "console", "json"]),
    default="auto",
    show_default=True,
    help="auto: console on a terminal, JSON elsewhere.",
)
@click.option("--once", is_flag=True, help="Print the page once, in the text format, and exit.")
def exporter(
    *,
    listen_address: str,
    jobs_directory: Path,
    gpus: str,
    interval: float,
    processes: bool,
    launchers: tuple[str, ...],
    log_level: str,
    log_format: str,
    once: bool,
) -> None:
    """Serve a node's GPU metrics to Prometheus.

    Which user and job uses which GPU, what each job does with it, and what its training reports.
    The exporter only reads. To see processes of other users it needs CAP_SYS_PTRACE and
    CAP_DAC_READ_SEARCH, or root. Without a driver it says so (gpuwarden_nvml_up 0), keeps serving
    and tries again.
    """
    logs.configure(log_level, log_format)
    host, port = parse_address(listen_address, default_port=DEFAULT_PORT)
    settings = ExporterSettings(
        host=host,
        port=port,
        jobs_directory=jobs_directory.absolute(),
        gpus=gpus,
        interval=interval,
        launchers=launchers,
        processes=processes,
    )
    # Loaded here, so that --help and a wrong flag answer at once.
    from gpuwarden.exporter import daemon  # noqa: PLC0415

    if once:
        click.echo(daemon.once(settings), nl=False)
    else:
        daemon.run(settings)
