"""`gpuwarden enforcement`: whether jobs are ended now, and the pause that an admin can set."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from gpuwarden.consoles import printable
from gpuwarden.option_values import output_option
from gpuwarden.ruleengine.clients import ask, token_headers, token_option, url_option

if TYPE_CHECKING:
    from pathlib import Path


@click.group()
def enforcement() -> None:
    """Say whether jobs are ended now; pause that, and resume it.

    While it is paused rules are judged and owners told as ever, and no job is ended. The pause is
    in the ledger, with who and why, and outlives restarts. What an agent has begun it finishes.
    """


@enforcement.command()
@token_option
@url_option
@output_option
def show(url: str, token_file: Path | None, *, output: str) -> None:
    """Say whether jobs are ended now, and what holds it back.

    Exit status: 0 either way.
    """
    _tell(ask("GET", url, "/v1/enforcement", headers=token_headers(token_file)), output)


@enforcement.command()
@click.option("--reason", required=True, help="Why; it stands on every page and in the audit.")
@click.option(
    "--for",
    "length",
    metavar="DURATION",
    help="After which it ends by itself, such as 2h; without it, until `resume`.",
)
@token_option
@url_option
@output_option
def pause(
    reason: str, length: str | None, *, token_file: Path | None, url: str, output: str
) -> None:
    """End no job from now on.

    Needs the token of an admin (web.tokens of engine.yaml). Where there is none, touch the engine's
    kill_switch file. Exit status: 0 paused; 1 the engine says no, and why.
    """
    body = {"reason": reason} | ({} if length is None else {"for": length})
    headers = token_headers(token_file)
    _tell(ask("POST", url, "/v1/enforcement/pause", body=body, headers=headers), output)


@enforcement.command()
@click.option("--reason", required=True, help="Why it is safe again; it stands in the audit.")
@click.option(
    "--rule",
    metavar="ID",
    help="Let this rule enforce again, which had fallen back to warn (canary); the pause stays.",
)
@token_option
@url_option
@output_option
def resume(
    reason: str, rule: str | None, *, token_file: Path | None, url: str, output: str
) -> None:
    """End jobs again, within the limits, from the next tick on.

    Without --rule it ends the pause; with it, what a rule on trial had against it until now counts
    no more. Needs the token of an admin. Exit status: 0 resumed; 1 it was not paused or had not
    fallen back, or the engine says no.
    """
    headers = token_headers(token_file)
    body = {"reason": reason} | ({} if rule is None else {"rule": rule})
    document = ask("POST", url, "/v1/enforcement/resume", body=body, headers=headers)
    _tell(document, output)


def _tell(document: dict[str, Any], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    paused = document["paused"]
    if paused is None:
        click.echo("Enforcement is not paused.")
    else:
        until = paused["until"] or "somebody resumes"
        text = f"Enforcement is paused by {paused['by']} until {until}: {paused['reason']}"
        click.echo(printable(text))
    for held in document["held_back"]:
        click.echo(printable(f"{held['rule']} only warns: {held['sentence']}"))
    for block in document["halted"]:
        if block["reason"] != "paused":
            click.echo(f"No job is ended now: {printable(block['sentence'])}")
