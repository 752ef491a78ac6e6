"""`gpuwarden agent`: run a node's agent, and make the key pair by which the engine commands it."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from gpuwarden import logs
from gpuwarden.errors import InvalidInput
from gpuwarden.exporter.agent import settings
from gpuwarden.exporter.agent.guards import DEFAULT_KILL_SWITCH
from gpuwarden.exporter.releases import DEFAULT_RELEASE_FILE
from gpuwarden.exporter.servers import parse_address
from gpuwarden.job_files import DIRECTORY_VARIABLE, directory
from gpuwarden.option_values import log_format_option, log_level_option, read_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., None]")


def _run_options(command: F) -> F:
    """Add the options of a running agent; plain `agent` and `agent run` have the same."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


# Whether a file can be read shows when it is: click asks access(2), which knows no capabilities.
_FILE = click.Path(readable=False, path_type=Path)
_PRESENT_FILE = click.Path(exists=True, dir_okay=False, readable=False, path_type=Path)
_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--web.listen-address",
        "listen",
        metavar="HOST:PORT",
        default=f"127.0.0.1:{settings.DEFAULT_PORT}",
        show_default=True,
        help="Where the engine reaches this agent. :9836 serves on every address.",
    ),
    click.option(
        "--web.tls-cert-file",
        "tls_certificate",
        type=_PRESENT_FILE,
        help="Serve HTTPS with this certificate (PEM).",
    ),
    click.option(
        "--web.tls-key-file", "tls_key", type=_PRESENT_FILE, help="Its private key (PEM)."
    ),
    click.option(
        "--node",
        metavar="NAME",
        default=socket.gethostname,
        show_default="the host's name",
        help="This node's name, as requests must call it.",
    ),
    click.option(
        "--keys",
        type=_FILE,
        metavar="DIR",
        help="Folder of the engine's public keys (*.pub); read again when it changes.  [required]",
    ),
    click.option(
        "--journal",
        type=_FILE,
        default=settings.DEFAULT_JOURNAL,
        show_default=True,
        help="What was done; an attempt is ended once only because it stands here.",
    ),
    click.option(
        "--jobs.directory",
        "jobs",
        type=_FILE,
        show_default=f"${DIRECTORY_VARIABLE} or /run/gpuwarden",
        help="Leave requests are written to its folder requests/.",
    ),
    click.option(
        "--gpus",
        metavar="nvml|simulated:FILE",
        default="nvml",
        show_default=True,
        help="The driver, or a simulated one by a scenario file.",
    ),
    click.option(
        "--kill-switch",
        type=_FILE,
        default=DEFAULT_KILL_SWITCH,
        show_default=True,
        help="Nothing is signalled while this file exists.",
    ),
    click.option(
        "--release-file",
        type=_FILE,
        default=DEFAULT_RELEASE_FILE,
        show_default=True,
        help="Let go of the driver and refuse actions as `gpuwarden exporter release` orders here.",
    ),
    click.option(
        "--protect",
        multiple=True,
        metavar="NAME|PATH",
        help="Never signal processes of this name (which anybody can take) or executable; "
        "repeatable.",
    ),
    click.option(
        "--attribution.launcher",
        "launchers",
        multiple=True,
        metavar="COMM",
        help="A further process name that starts jobs but is part of none; repeatable. Must equal "
        "the exporter's.",
    ),
    click.option(
        "--proof-timeout",
        type=click.UNPROCESSED,  # `run` takes over what the group has read
        callback=read_seconds,
        metavar="DURATION",
        default="30s",
        show_default=True,
        help="How long NVML may go on listing an ended process.",
    ),
    click.option(
        "--limit.terminate-per-hour",
        "terminates_per_hour",
        type=click.IntRange(min=0),
        default=12,
        show_default=True,
        help="Jobs that may be ended within any hour; 0 ends none.",
    ),
    click.option(
        "--limit.restart-cooldown",
        "restart_cooldown",
        type=click.UNPROCESSED,  # `run` takes over what the group has read
        callback=read_seconds,
        metavar="DURATION",
        default="10m",
        show_default=True,
        help="How long a job that was ended and started again, the same command by the same "
        "process, is left alone; 0s: not at all.",
    ),
    log_level_option,
    log_format_option,
)


_FIRST_STEPS = """\b
First make the keys, then run it:
  gpuwarden agent keys --out /etc/gpuwarden/engine
  gpuwarden agent --keys /etc/gpuwarden/keys
"""


@click.group(invoke_without_command=True, epilog=_FIRST_STEPS)
@_run_options
@click.pass_context
def agent(context: click.Context, /, **options: Any) -> None:
    """End processes on this node when the engine, by its signature, says so.

    The agent finds a job's processes itself, asks them to leave, ends what stays, proves that NVML
    has let go of them, and refuses what is not safe. It needs the right to signal (CAP_KILL, or
    root) and the host's PID namespace.
    """
    if context.invoked_subcommand is None:
        _run(**options)
    # `agent --protect X run` must not forget to protect X.
    given = {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    context.default_map = {"run": given}


@agent.command()
@_run_options
def run(**options: Any) -> None:
    """Run the agent; the same as plain `gpuwarden agent`."""
    _run(**options)


@agent.command()
@click.option(
    "--out",
    type=_FILE,
    metavar="DIR",
    required=True,
    help="Folder for engine.key and engine.pub; made if it is missing.",
)
def keys(out: Path) -> None:
    """Make the key pair by which the engine commands its nodes.

    Nothing is overwritten. To change keys without a gap: make a new pair, add its engine.pub to
    every node under another name, give the engine the new engine.key, then remove the old .pub.
    """
    from gpuwarden.exporter.agent import keys as key_files  # noqa: PLC0415 (loads cryptography)

    pair = key_files.generate(out)
    click.echo(f"key id       {pair.key_id}")
    click.echo(f"private key  {pair.private}  stays with the engine; nobody else may read it")
    click.echo(f"public key   {pair.public}  goes into the folder --keys of every node's agent")


@agent.command()
@click.argument("job_id")
@click.option(
    "--url", required=True, metavar="URL", help="The node's agent, such as http://gpu-1:9836."
)
@click.option(
    "--key",
    type=_PRESENT_FILE,
    required=True,
    help="The engine's private key: only who commands the nodes may read this.",
)
@click.option("--ca-file", type=_PRESENT_FILE, help="Check the agent's certificate against these.")
def arguments(job_id: str, url: str, key: Path, *, ca_file: Path | None) -> None:
    """Show with which command lines a job's processes run.

    Run it where the engine's key is. What may be a secret (by its name, its place or its shape) is
    left out by the node already, and the node's journal keeps that it was asked.
    """
    from gpuwarden.exporter.agent.clients import Client  # noqa: PLC0415 (loads cryptography)

    found = Client(url, key, ca_file).command_lines(job_id)
    for process in found.processes:
        if process.arguments is None:
            line = "(could not be read in time)"
        else:
            line = shlex.join(process.arguments) + (" (cut)" if process.cut else "")
        shown = "".join(
            letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line
        )
        click.echo(f"{process.pid:>10}  {shown}")
    if found.cut:
        click.echo("further processes are not shown")


def _run(
    listen: str,
    keys: Path | None,
    jobs: Path | None,
    *,
    log_level: str,
    log_format: str,
    **rest: Any,
) -> None:
    if keys is None:
        raise click.UsageError(
            "--keys DIR is missing: the folder with the engine's public key. `gpuwarden agent keys "
            "--out DIR` makes a pair"
        )
    try:
        host, port = parse_address(listen, default_port=settings.DEFAULT_PORT)
    except InvalidInput as error:
        raise click.BadParameter(str(error), param_hint="--web.listen-address") from error
    if (rest["tls_certificate"] is None) != (rest["tls_key"] is None):
        raise click.UsageError("--web.tls-cert-file and --web.tls-key-file go together")
    logs.configure(log_level, log_format)
    from gpuwarden.exporter.agent import app  # noqa: PLC0415 (loads the server; --help does not)

    app.run(
        settings.AgentSettings(
            keys=keys,
            host=host,
            port=port,
            jobs=directory() if jobs is None else jobs,
            protect=frozenset(rest.pop("protect")),
            **rest,
        )
    )
