"""`gpuwarden exporter`."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden import job_files, logs
from gpuwarden.clock import SystemClock
from gpuwarden.exporter import releases
from gpuwarden.exporter.compat import COMPATIBILITIES, NEEDED_COLLECTORS
from gpuwarden.exporter.servers import parse_address
from gpuwarden.exporter.settings import DEFAULT_PORT, ExporterSettings
from gpuwarden.exporter.switches import SWITCHES
from gpuwarden.option_values import log_format_option, log_level_option, read_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.exporter.registration import EngineSettings


_LET_GO_SECONDS = 5.0

_EXAMPLE = """\b
Try it without a GPU:
  echo card index=0 > /tmp/scenario
  gpuwarden exporter --gpus simulated:/tmp/scenario --jobs.directory /tmp/jobs --once
"""


def _switches(command: Callable[..., None]) -> Callable[..., None]:
    """An option for each group of families, in the style of the ecosystem's exporters."""
    for name, switch in reversed(SWITCHES.items()):
        option = click.option(
            f"--collector.{name}/--no-collector.{name}",
            name,
            default=switch.default,
            show_default="on where found" if switch.default is None else True,
            help=switch.help,
        )
        command = option(command)
    return command


_ENGINE = (
    click.option(
        "--engine.url",
        "engine_url",
        metavar="URL",
        help="Register this node with the engine at URL, which tells Prometheus of it and expects "
        "it from then on, until SIGTERM. Takes --engine.token-file.",
    ),
    click.option(
        "--engine.token-file",
        "engine_token",
        type=click.Path(readable=False, path_type=Path, dir_okay=False),
        metavar="FILE",
        help="The nodes' bearer token (nodes.registration.token_file of the engine); read anew "
        "each time.",
    ),
    click.option(
        "--engine.advertise-address",
        "engine_advertise",
        metavar="HOST:PORT",
        help="Where Prometheus reaches this exporter. By default the listen address; where that is "
        "every address, the one from which the engine is reached.",
    ),
    click.option(
        "--engine.ca-file",
        "engine_ca",
        type=click.Path(readable=False, path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Certificates for the engine's TLS; the system's by default.",
    ),
)


def _engine(command: Callable[..., None]) -> Callable[..., None]:
    """The options of registration."""
    for option in reversed(_ENGINE):
        command = option(command)
    return command


def _compatible(name: str | None) -> frozenset[str]:
    return frozenset() if name is None else NEEDED_COLLECTORS[name] | {name}


def _engine_settings(
    url: str | None, token: Path | None, *, advertise: str | None, ca: Path | None, host: str
) -> EngineSettings | None:
    if url is None:
        if token is not None or advertise is not None or ca is not None:
            raise click.UsageError("the other --engine flags need --engine.url")
        return None
    if token is None:
        raise click.UsageError("--engine.url needs --engine.token-file")
    # Most nodes need no HTTP client.
    from gpuwarden.exporter import registration  # noqa: PLC0415

    settings = registration.EngineSettings(url.rstrip("/"), token.absolute(), advertise, ca)
    registration.check_reachable(settings, host)
    return settings


def _is_on(name: str, chosen: bool | None) -> bool:
    """What was chosen by a flag, or what is found where none was given."""
    if chosen is not None:
        return chosen
    from gpuwarden.exporter import kubelets, slurm  # noqa: PLC0415 (--help answers at once)

    return {"kubernetes": kubelets.detect, "slurm": slurm.detect}[name]()


_GPUS = click.option(
    "--gpus",
    default="nvml",
    show_default=True,
    metavar="nvml|simulated:FILE",
    help="The NVIDIA driver, or gpuwarden's simulation of one by a scenario file.",
)
_RELEASE_FILE = click.option(
    "--release-file",
    type=click.Path(readable=False, path_type=Path),
    default=releases.DEFAULT_RELEASE_FILE,
    show_default=True,
    help="By which `release` and `acquire` reach the node's exporter and agent; in a folder that "
    "only root may write.",
)


@click.group("exporter", epilog=_EXAMPLE, invoke_without_command=True)
@click.option(
    "--web.listen-address",
    "listen_address",
    default=f"127.0.0.1:{DEFAULT_PORT}",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve. :9835 serves on every address.",
)
@click.option(
    "--web.max-requests",
    "max_requests",
    type=int,
    default=40,
    metavar="N",
    show_default=True,
    help="Requests that are answered at the same time; more get a 503.",
)
@click.option(
    "--web.config.file",
    "web_config",
    type=click.Path(readable=False, path_type=Path),
    metavar="FILE",
    help="TLS, client certificates and basic authentication, in the exporter-toolkit's format "
    "(tls_server_config, basic_auth_users); followed when it changes. Takes gpuwarden[web].",
)
@click.option(
    "--textfile.directory",
    "textfile_directory",
    type=click.Path(readable=False, path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Write each page to gpuwarden.prom in it too, for node_exporter's textfile collector.",
)
@click.option(
    "--logs.targets-file",
    "log_targets",
    type=click.Path(readable=False, path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write to it where each job's output lies, with its job_id (a list for Alloy's "
    "discovery.file, see deploy/logs); in a folder that only this user may write. It is readable "
    "for the group.",
)
@click.option(
    "--jobs.directory",
    "jobs_directory",
    type=click.Path(readable=False, path_type=Path),
    envvar=[job_files.DIRECTORY_VARIABLE],
    default=job_files.DEFAULT_DIRECTORY,
    show_default=True,
    help="Folder of the job files; jobs/ and requests/ are made in it if they are not there.",
)
@click.option(
    "--state.path",
    "state_file",
    type=click.Path(readable=False, path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where what must outlive a restart is kept: each job's root and first use of a card, its "
    "activity and counters, lost GPU time. In a folder that only this user may write. Without it "
    "a restart gives every job a new cold start.",
)
@_GPUS
@_RELEASE_FILE
@click.option(
    "--collect.interval",
    "interval",
    callback=read_seconds,
    default="2s",
    metavar="DURATION",
    show_default=True,
    help="Time between two snapshots; keep it below the scrape interval.",
)
@_engine
@_switches
@click.option(
    "--compat",
    type=click.Choice(COMPATIBILITIES),
    help="dcgm: the six families of dcgm-exporter that Grafana's dashboard 12239 asks for, beside "
    "ours; switches --collector.clock and --collector.tensor on. Not beside a dcgm-exporter that "
    "is scraped too: every card would be counted twice.",
)
@click.option(
    "--collector.process.max",
    "max_processes",
    type=int,
    default=256,
    metavar="N",
    show_default=True,
    help="Processes per card in the gpu_process_* families: those with the most memory. What is "
    'left out is in gpuwarden_dropped_values_total{reason="process_limit"}; jobs are whole.',
)
@click.option(
    "--attribution.launcher",
    "launchers",
    multiple=True,
    metavar="COMM",
    help="A process name that starts jobs but is part of none, beside the usual ones (sshd, tmux, "
    "Jupyter servers, interactive shells, ...). May be repeated.",
)
@log_level_option
@log_format_option
@click.option("--once", is_flag=True, help="Print the page once, in the text format, and exit.")
@click.pass_context
def exporter(
    context: click.Context,
    /,
    *,
    listen_address: str,
    max_requests: int,
    web_config: Path | None,
    textfile_directory: Path | None,
    log_targets: Path | None,
    jobs_directory: Path,
    state_file: Path | None,
    gpus: str,
    interval: float,
    compat: str | None,
    engine_url: str | None,
    engine_token: Path | None,
    engine_advertise: str | None,
    engine_ca: Path | None,
    max_processes: int,
    launchers: tuple[str, ...],
    release_file: Path,
    log_level: str,
    log_format: str,
    once: bool,
    **switches: bool | None,
) -> None:
    """Serve a node's GPU metrics to Prometheus.

    Which user and job uses which GPU, what each job does with it, and what its training reports.
    The exporter only reads. To see processes of other users it needs CAP_SYS_PTRACE and
    CAP_DAC_READ_SEARCH, or root. Without a driver it says so (gpuwarden_nvml_up 0), keeps serving
    and tries again.
    """
    if context.invoked_subcommand is not None:
        # `exporter --release-file X release` means X.
        given = {"release_file": release_file, "gpus": gpus}
        context.default_map = {"release": given, "acquire": {"release_file": release_file}}
        return
    logs.configure(log_level, log_format)
    host, port = parse_address(listen_address, default_port=DEFAULT_PORT)
    settings = ExporterSettings(
        host=host,
        port=port,
        jobs_directory=jobs_directory.absolute(),
        state_file=None if state_file is None else state_file.absolute(),
        gpus=gpus,
        interval=interval,
        launchers=launchers,
        collectors=frozenset(name for name, on in switches.items() if _is_on(name, on))
        | _compatible(compat),
        max_processes=max_processes,
        release_file=release_file.absolute(),
        max_requests=max_requests,
        web_config=web_config,
        engine=_engine_settings(
            engine_url, engine_token, advertise=engine_advertise, ca=engine_ca, host=host
        ),
        textfile_directory=textfile_directory,
        log_targets=None if log_targets is None else log_targets.absolute(),
    )
    # Loaded here, so that --help and a wrong flag answer at once.
    from gpuwarden.exporter import daemon  # noqa: PLC0415

    if once:
        click.echo(daemon.once(settings), nl=False)
    else:
        daemon.run(settings)


@exporter.command()
@click.option(
    "--for",
    "seconds",
    callback=read_seconds,
    default="10m",
    metavar="DURATION",
    show_default=True,
    help="Exporter and agent take the driver back by themselves after this time; at most 1d.",
)
@_RELEASE_FILE
@_GPUS
def release(*, seconds: float, release_file: Path, gpus: str) -> None:
    """Have this node's exporter and agent let go of the driver.

    For the reset of a card, a change of MIG, or an upgrade of the driver. Meanwhile nothing is
    known of the cards, no job of this node is judged, and the agent refuses to act. Says who still
    has a card open, and exits with 1 if anybody has; jobs that hold a card are not touched.
    """
    if not 0 < seconds <= releases.LONGEST_SECONDS:
        raise click.BadParameter("at most 1d: a window must end", param_hint="--for")
    order = releases.order(release_file, seconds, clock=SystemClock())
    deadline = time.monotonic() + _LET_GO_SECONDS
    prefix = _device_prefix(gpus)
    while (left := releases.holders(prefix)) and time.monotonic() < deadline:
        time.sleep(0.1)
    click.echo(
        f"released until {datetime.fromtimestamp(order.until or 0).astimezone():%F %T %Z}; "
        "`gpuwarden exporter acquire` ends it before"
    )
    for holder in left:
        click.echo(f"still open: pid {holder.pid} ({holder.comm})")
    if left:
        raise click.exceptions.Exit(1)


@exporter.command()
@_RELEASE_FILE
def acquire(*, release_file: Path) -> None:
    """Have this node's exporter and agent take the driver back."""
    if releases.withdraw(release_file):
        click.echo("exporter and agent take the driver back now")
    else:
        click.echo(f"nothing was released: there is no {release_file}")


def _device_prefix(gpus: str) -> str:
    kind, _, scenario = gpus.partition(":")
    return f"{Path(scenario).resolve()}.devices/" if kind == "simulated" else "/dev/nvidia"
