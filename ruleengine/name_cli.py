"""`gpuwarden names`: who uses what, and opening the names of users for a while."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gpuwarden.consoles import open_console, printable
from gpuwarden.option_values import output_option
from gpuwarden.ruleengine.clients import ask, token_headers, token_option, url_option

if TYPE_CHECKING:
    from pathlib import Path


@click.group()
def names() -> None:
    """Say who uses what; open the names of users for a while.

    Names are hidden from whoever is not of the team (web.names of engine.yaml): a pseudonym stands
    for the same user everywhere. With web.operator_names: opened also from operators, until they
    open them.
    """


@names.command()
@token_option
@url_option
@output_option
def shares(url: str, token_file: Path | None, *, output: str) -> None:
    """List each user's cards and jobs, with pseudonyms for hidden names."""
    document = ask("GET", url, "/v1/shares", headers=token_headers(token_file))
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(f"{document['free']} of {document['cards']} cards are free.")
    table = Table("USER", "TEAM", "CARDS", "JOBS", "MODELS", box=None, pad_edge=False)
    for row in document["users"]:
        models = ", ".join(f"{count} {name}" for name, count in row["models"].items())
        values = (row["user"] or "unknown", row["team"], models)
        user, team, listed = (printable(value) for value in values)
        table.add_row(user, team, str(row["cards"]), str(row["jobs"]), listed)
    open_console().print(table)


@names.command(name="open")
@click.option("--reason", required=True, help="Why; it stands in the audit.")
@click.option(
    "--for", "length", metavar="DURATION", help="An hour if left out, 8h at most; such as 30m."
)
@token_option
@url_option
@output_option
def open_names(
    reason: str, length: str | None, *, token_file: Path | None, url: str, output: str
) -> None:
    """Read every name for a while, with this token.

    Needs the token of an operator. Exit status: 0 open; 1 the engine says no, and why.
    """
    body = {"reason": reason} | ({} if length is None else {"for": length})
    headers = token_headers(token_file)
    _tell(ask("POST", url, "/v1/names/open", body=body, headers=headers), output)


@names.command()
@token_option
@url_option
@output_option
def close(url: str, token_file: Path | None, *, output: str) -> None:
    """Hide names from this token again before the time is over."""
    _tell(ask("POST", url, "/v1/names/close", headers=token_headers(token_file)), output)


@names.command()
@token_option
@url_option
@output_option
def show(url: str, token_file: Path | None, *, output: str) -> None:
    """Say whether names are hidden from this token, and until when they are open."""
    _tell(ask("GET", url, "/v1/names", headers=token_headers(token_file)), output)


def _tell(document: dict[str, Any], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    elif document["opened_until"]:
        click.echo(f"Names are open to you until {document['opened_until']}.")
    elif document["can_open"]:
        click.echo("Names are hidden from you; `gpuwarden names open --reason WHY` opens them.")
    elif document["hidden"]:
        click.echo("Names of other teams are hidden from you.")
    else:
        click.echo("You read every name.")
