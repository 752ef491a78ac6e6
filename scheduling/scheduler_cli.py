"""`gpuwarden scheduler`: the daemon of a cluster's queue, bookings and budgets."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden import logs
from gpuwarden.option_values import (
    log_format_option,
    log_level_option,
    read_positive_seconds,
    read_url,
)
from gpuwarden.scheduling.daemon import Daemon, Settings
from gpuwarden.scheduling.daemon_clients import DEFAULT_SOCKET
from gpuwarden.scheduling.policy_checks import load_policy
from gpuwarden.scheduling.tokens import load_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_STATE = Path("/var/lib/gpuwarden-scheduler")
DEFAULT_LISTEN = "127.0.0.1:9839"
_LISTEN = re.compile(r"(?P<host>[A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def _read_listen(
    _context: click.Context, _option: click.Parameter, value: str
) -> tuple[str, int] | None:
    if value == "none":
        return None
    found = _LISTEN.fullmatch(value)
    if found is None or int(found["port"]) > 65535:
        raise click.BadParameter(
            f"{value!r} is no address to listen on: write {DEFAULT_LISTEN}, or none"
        )
    return found["host"].strip("[]"), int(found["port"])


def _file(name: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        name,
        name.removeprefix("--").replace("-", "_").replace(".", "_"),
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help=text,
    )


@click.command()
@click.option(
    "--policy",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="The policy; `gpuwarden policy check` says whether it can be used.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_STATE,
    show_default=True,
    metavar="DIR",
    help="Folder for bookings, receipts and accounts; one daemon has it at a time.",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_SOCKET,
    show_default=True,
    metavar="PATH",
    help="Where users of this machine ask; who they are, the kernel says.",
)
@click.option(
    "--listen",
    default=DEFAULT_LISTEN,
    show_default=True,
    metavar="HOST:PORT",
    callback=_read_listen,
    help="Where Prometheus, the engine's pages and remote users ask; none: nowhere.",
)
@_file("--tokens", "YAML that names who may ask over the network, and the files of their tokens.")
@_file("--tls-cert-file", "Certificate for --listen.")
@_file("--tls-key-file", "Its key.")
@click.option(
    "--tick",
    default="5s",
    show_default=True,
    metavar="DURATION",
    callback=read_positive_seconds,
    help="Between two looks at the engine.",
)
@click.option(
    "--engine.url",
    "engine_url",
    metavar="URL",
    callback=read_url,
    help="The rule engine, through which trainers are asked to leave.",
)
@_file("--engine.token-file", "File with the token for it (role scheduler in engine.yaml).")
@click.option(
    "--prometheus",
    metavar="URL",
    callback=read_url,
    help="Server with the series of alerting/rules/money.yml, for `gpuwarden usage`.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Read the policy and the tokens, say what is wrong, and exit: 0 if all can be used, 2 if "
    "not.",
)
@log_level_option
@log_format_option
def scheduler(
    policy: Path,
    state: Path,
    *,
    socket: Path,
    listen: tuple[str, int] | None,
    tokens: Path | None,
    tls_cert_file: Path | None,
    tls_key_file: Path | None,
    tick: float,
    engine_url: str | None,
    engine_token_file: Path | None,
    prometheus: str | None,
    check: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Run the queue, bookings and budgets of a cluster by one policy.

    One daemon runs per cluster. For `engine: local` it starts the jobs; for Slurm and Kueue it
    watches the engine, keeps cards for bookings, asks jobs to leave, and accounts. While it is down
    the engine's own objects go on by themselves, and running jobs are left alone.

    SIGHUP reads the policy and the tokens again: all of it or, with any mistake in it, nothing.
    Everything else needs a restart.
    """
    if (tls_cert_file is None) != (tls_key_file is None):
        raise click.UsageError("--tls-cert-file and --tls-key-file go together")
    if (engine_token_file is not None) and engine_url is None:
        raise click.UsageError("--engine.token-file is for --engine.url")
    if check:
        found = load_policy(policy, now=time.time())
        bearers = () if tokens is None else load_tokens(tokens)
        click.echo(
            f"{policy}: ok: engine {found.engine}, teams {len(found.teams)}, kinds of cards "
            f"{len(found.cards)}, tokens {len(bearers)}"
        )
        return
    logs.configure(log_level, log_format)
    settings = Settings(
        policy=policy,
        state=state,
        listen=listen,
        socket=socket,
        tokens=tokens,
        tick_seconds=tick,
        engine_url=engine_url,
        engine_token=engine_token_file,
        prometheus=prometheus,
        tls_cert=tls_cert_file,
        tls_key=tls_key_file,
    )
    asyncio.run(_run(settings))


async def _run(settings: Settings) -> None:
    await Daemon(settings).run()
