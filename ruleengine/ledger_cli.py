"""`gpuwarden ledger`: copies of what the engine knows, its health, and forgetting people."""

from __future__ import annotations

import datetime as dt
import getpass
import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden.clock import SystemClock
from gpuwarden.option_values import config_option, output_option
from gpuwarden.ruleengine import erasures, ledger_files
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.directories import EMPTY
from gpuwarden.ruleengine.directory_checks import load_directory
from gpuwarden.ruleengine.erasures import ERASED
from gpuwarden.ruleengine.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.ruleengine.directories import Directory
    from gpuwarden.ruleengine.ledger_files import Findings

SCHEMA = "gpuwarden.ledger/v1"
_PATH = click.Path(path_type=Path, dir_okay=False)


def _ledger_options(command: Callable[..., None]) -> Callable[..., None]:
    config = config_option("engine.yaml, which names the ledger.")
    ledger = click.option(
        "--ledger", "path", type=_PATH, metavar="FILE", help="The ledger itself, instead."
    )
    return config(ledger(command))


def _path(config: Path | None, path: Path | None) -> Path:
    if (config is None) == (path is None):
        raise click.UsageError("give either --config (engine.yaml) or --ledger")
    if path is not None:
        return path
    settings = load_settings(config or Path())
    return settings.path(settings.values.ledger)


@click.group()
def ledger() -> None:
    """Back up, check, restore and compact what the engine knows for certain; forget people.

    Run these as the engine's user: the ledger names people, and only its owner may read it.
    """


@ledger.command()
@click.argument("copy", type=_PATH, metavar="FILE")
@_ledger_options
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def backup(copy: Path, *, config: Path | None, path: Path | None, overwrite: bool) -> None:
    """Copy the ledger to FILE while the engine runs.

    The copy holds one moment, is read back in full before it gets its name, and is one file.
    Put it on another disk. Exit status: 0 done; 1 the ledger is damaged; 3 it cannot be copied.
    """
    source = _path(config, path)
    found = ledger_files.backup(source, copy, overwrite=overwrite)
    click.echo(f"{copy}: whole; {_summary(found)}")


@ledger.command()
@_ledger_options
@output_option
def check(*, config: Path | None, path: Path | None, output: str) -> None:
    """Read the whole ledger and say whether anything in it is damaged; the engine may run.

    Exit status: 0 it is whole; 1 it is damaged; 3 it cannot be read.
    """
    source = _path(config, path)
    found = ledger_files.check(source)
    if output == "json":
        click.echo(json.dumps({"schema": SCHEMA, "file": str(source), **asdict(found)}, indent=2))
    elif not found.problems:
        click.echo(f"{source}: whole; {_summary(found)}")
    for problem in found.problems if output == "text" else ():
        click.echo(f"{source}: {problem}", err=True)
    if found.problems:
        click.echo("Replace it by its newest backup: gpuwarden ledger restore", err=True)
        click.get_current_context().exit(1)


@ledger.command()
@click.argument("copy", type=_PATH, metavar="FILE")
@_ledger_options
def restore(copy: Path, *, config: Path | None, path: Path | None) -> None:
    """Put FILE, a backup, in the place of the ledger; stop the engine before.

    The former ledger is moved aside. What happened since the backup was made is not known
    afterwards: cases begin anew, owners are told anew, keeps granted since are gone, and ends made
    since do not count for limits. Agents still know which attempts were ended, and end none twice.
    Exit status: 0 done; 1 FILE is damaged; 3 an engine runs, or a file cannot be used.
    """
    target = _path(config, path)
    aside = f".before-{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}"
    found, former = ledger_files.restore(copy, target, aside=aside)
    click.echo(f"{target}: restored; {_summary(found)}")
    if former is not None:
        click.echo(f"The former ledger is {former}")


@ledger.command()
@_ledger_options
def compact(*, config: Path | None, path: Path | None) -> None:
    """Give space that old cases took back to the disk; stop the engine before.

    Rarely needed: the engine uses the space again by itself. A second copy must fit on the disk for
    a while. Exit status: 0 done; 3 an engine runs, or there is no room.
    """
    target = _path(config, path)
    before, after = ledger_files.compact(target)
    click.echo(f"{target}: {_mib(before)} before, {_mib(after)} now")


@ledger.command()
@click.option("--user", required=True, metavar="NAME", help="User name on the nodes.")
@click.option("--reason", required=True, help="Why; it stands in the audit, without the name.")
@click.option(
    "--by",
    default=getpass.getuser,
    metavar="NAME",
    help="Who erases, for the audit; you, if left out.",
)
@click.option(
    "--directory",
    "known",
    type=_PATH,
    metavar="FILE",
    help="directory.yaml, for the person's addresses; that of --config by default.",
)
@click.option(
    "--pseudonym",
    is_flag=True,
    help="Put one random word in the place of the name, so that it is still seen what belongs to "
    "one person; without it, every trace becomes `erased`.",
)
@click.option(
    "--everywhere",
    is_flag=True,
    help="Also where the name stands as a word in texts about others' jobs; take care with names "
    "that are words.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing, and say what would change.")
@_ledger_options
def erase(
    user: str,
    reason: str,
    *,
    by: str,
    known: Path | None,
    pseudonym: bool,
    everywhere: bool,
    dry_run: bool,
    config: Path | None,
    path: Path | None,
) -> None:
    """Take a person's name, addresses and words out of the ledger; the engine may run.

    Counters and limits stay. Refused while something of theirs is open or counts for a limit. The
    audit says that an erasure was made, by whom and why, and not of whom. Also take them out of the
    directory and the rule files; copies of the ledger, Prometheus and logs keep the name for their
    own time: docs/people.md.

    Exit status: 0 erased; 1 refused, and why; 3 the ledger cannot be changed.
    """
    target, now = _path(config, path), SystemClock().wall()
    directory = load_directory(known) if known is not None else _directory(config)
    mine = directory.user(user)
    alias = f"{ERASED}-{secrets.token_hex(4)}" if pseudonym else ERASED
    found = erasures.erase(
        target,
        erasures.Person(user, mine.addresses, alias),
        others={
            to for name, item in directory.users.items() if name != user for to in item.addresses
        },
        everywhere=everywhere,
        dry_run=dry_run,
        now=now,
        by=by,
        reason=reason,
    )
    rows = ", ".join(f"{count} of {table}" for table, count in sorted(found.rows.items())) or "none"
    click.echo(f"{target}: rows {'that would change' if dry_run else 'changed'}: {rows}")
    if found.mentions:
        click.echo(
            f"{found.mentions} rows about others hold the name as a word: --everywhere changes "
            "these, too"
        )
    if pseudonym and not dry_run:
        click.echo(f"In the place of the name stands {alias}")
    if not dry_run and not found.compacted:
        click.echo(
            "Earlier states of rows may be left in the file's free space: stop the engine once and "
            "run `gpuwarden ledger compact`"
        )


def _directory(config: Path | None) -> Directory:
    if config is None:
        return EMPTY
    settings = load_settings(config)
    name = settings.values.directory
    return EMPTY if name is None else load_directory(settings.path(name))


def _summary(found: Findings) -> str:
    newest = "no event" if found.newest is None else f"newest event {rfc3339(found.newest)}"
    whole = "" if found.audit_from is None else f", audit whole from {rfc3339(found.audit_from)}"
    return (
        f"version {found.version}, {found.rows.get('cases', 0)} cases ({found.open_cases} open), "
        f"{found.rows.get('decisions', 0)} decisions ({found.open_decisions} open), {newest}"
        f"{whole}, {_mib(found.bytes)} ({_mib(found.free_bytes)} free)"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
