"""`gpuwarden drill run` and `status`: rehearse a real end on a node, and say how drills stand."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gpuwarden import durations
from gpuwarden.consoles import open_console, printable
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.option_values import output_option, read_positive_seconds
from gpuwarden.ruleengine.clients import ask, token_headers, token_option, url_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_EXAMPLES = """\b
Examples:
  export GPUWARDEN_TOKEN_FILE=admin.token
  gpuwarden drill run --node n7 -- ssh gpuwarden-drill@n7 gpuwarden drill victim
  gpuwarden drill run --node n7 -- ./submit-victim.sh n7
"""
_POLL_SECONDS = 2.0
_UNHEARD_SECONDS = 60.0
"""How long an engine that does not answer is asked again."""
_STARTER_SECONDS = 10.0
"""How long the command that started the victim may outlive the drill, and then SIGTERM."""


@click.command(epilog=_EXAMPLES)
@click.option("--node", required=True, metavar="HOST", help="The node, as its target is named.")
@click.option("--reason", default="a drill", show_default=True, help="Why; it is in the audit.")
@click.option(
    "--within",
    metavar="DURATION",
    callback=read_positive_seconds,
    help="Give up after so long; by default when the engine does: twice all budgets.",
)
@click.argument("command", nargs=-1)
@click.option(
    "--token-file",
    envvar="GPUWARDEN_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="File with the token of an admin; also $GPUWARDEN_TOKEN_FILE.",
)
@url_option
def run(
    node: str,
    reason: str,
    *,
    within: float | None,
    command: Sequence[str],
    token_file: Path,
    url: str,
) -> None:
    """Rehearse a real end on a node, from the first sample to the proof, and show each step.

    The engine expects a victim on HOST from now on, ends it by the drill's rule as it would end any
    job, and times each step. It starts none: COMMAND does, after `--`, or you do. Not on that very
    node by your own user: what starts a victim there is of its job, and ends with it.

    Exit status: 0 passed; 1 slow, failed or silent, given up, or the engine says no; 3 the engine
    does not answer.
    """
    headers = token_headers(token_file)
    if command and shutil.which(command[0]) is None:
        raise click.UsageError(f"{command[0]} cannot be started: there is no such program")
    drill = ask("POST", url, "/v1/drills", body={"node": node, "reason": reason}, headers=headers)
    starter = _started(command)
    try:
        ended = _followed(url, headers, drill, starter, command=" ".join(command), within=within)
    finally:
        _finished(starter)
    if ended["result"] is None:
        click.echo("Given up waiting; the engine goes on following it: gpuwarden drill status")
    else:
        click.echo(printable(ended["sentence"]))
    if ended["result"] != "passed":
        raise click.exceptions.Exit(1)


def _started(command: Sequence[str]) -> subprocess.Popen[bytes] | None:
    if not command:
        click.echo("Waiting for a victim: run `gpuwarden drill victim` there.")
        return None
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise click.UsageError(f"{command[0]} cannot be started: {error.strerror}") from error


def _finished(starter: subprocess.Popen[bytes] | None) -> None:
    """Wait a little for what started the victim, and leave it where it hears no SIGTERM.

    It may be the victim itself, which stays on purpose (`--on-term ignore`) and ends by its bound.
    """
    if starter is None:
        return
    for ask_it in (None, starter.terminate):
        if ask_it is not None:
            ask_it()
        try:
            starter.wait(_STARTER_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return
    text = f"Process {starter.pid}, which was to start the victim, still runs: it is left alone"
    click.echo(text, err=True)


def _followed(
    url: str,
    headers: Mapping[str, str],
    drill: dict[str, Any],
    starter: subprocess.Popen[bytes] | None,
    *,
    command: str,
    within: float | None,
) -> dict[str, Any]:
    """The drill as it was last seen: ended, or given up; each step is told once it has ended."""
    begun = heard = time.monotonic()
    told, failed = 0, False
    limit = drill["longest"] + _UNHEARD_SECONDS if within is None else within
    while True:
        for step in drill["steps"][told:]:
            if not step["ended"]:
                break
            click.echo(_line(step))
            told += 1
        if starter is not None and not failed and starter.poll() not in (None, 0):
            failed = True
            click.echo(f"{command} ended with status {starter.returncode}", err=True)
        if drill["finished_at"] is not None or time.monotonic() - begun > limit:
            return drill
        time.sleep(_POLL_SECONDS)
        try:
            drill = ask("GET", url, f"/v1/drills/{drill['id']}", headers=headers)
        except ServiceUnavailable:
            if time.monotonic() - heard > _UNHEARD_SECONDS:
                raise
        else:
            heard = time.monotonic()


@click.command()
@token_option
@url_option
@output_option
def status(url: str, token_file: Path | None, *, output: str) -> None:
    """Say how drills stand on every node: the last success, the next one due, and slow steps.

    Exit status: 0 all is well; 1 a drill is overdue, its last one did not pass, or none can be
    ended.
    """
    document = ask("GET", url, "/v1/drills", headers=token_headers(token_file))
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    else:
        _tell(document)
    if not _well(document):
        raise click.exceptions.Exit(1)


def _well(document: dict[str, Any]) -> bool:
    last = [node["last"] for node in document["nodes"] if node["last"] is not None]
    return (
        document["configured"]
        and not document["problem"]
        and not any(node["overdue"] for node in document["nodes"])
        and all(drill["result"] in (None, "passed") for drill in last)
        and not any(step["slow"] for drill in last for step in drill["steps"])
    )


def _tell(document: dict[str, Any]) -> None:
    if not document["configured"]:
        click.echo("engine.yaml has no drill: nothing is rehearsed.")
        return
    if document["problem"]:
        click.echo(printable(f"No drill can be ended: {document['problem']}"), err=True)
    table = Table("NODE", "LAST SUCCESS", "DUE", "LAST DRILL", "STEPS", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for node in document["nodes"]:
        drill = node["last"]
        table.add_row(
            node["node"],
            node["last_success"] or "never",
            f"{node['due'] or 'not scheduled'}{' (overdue)' if node['overdue'] else ''}",
            "none" if drill is None else drill["result"] or "going on",
            "" if drill is None else ", ".join(_line(step) for step in drill["steps"]),
        )
    open_console().print(table)


def _line(step: dict[str, Any]) -> str:
    took = durations.render(float(round(step["seconds"])))
    slow = f" (slow: {durations.render(step['budget'])} allowed)" if step["slow"] else ""
    return f"{step['step']} {took}{slow}"
