"""`gpuwarden directory`: check the operator's directory, and say who is told in a user's place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gpuwarden.checked_files import show_checked
from gpuwarden.clock import SystemClock
from gpuwarden.consoles import printable
from gpuwarden.diagnostics import did_you_mean
from gpuwarden.errors import RefusedAction
from gpuwarden.option_values import output_option
from gpuwarden.ruleengine.directories import CHANNELS, Directory
from gpuwarden.ruleengine.directory_checks import check_directory
from gpuwarden.ruleengine.recipients import recipients

SCHEMA = "gpuwarden.directory-user/v1"
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def directory() -> None:
    """Check the directory of users, teams and addresses, and see what it means.

    The engine reads the file that `directory` in engine.yaml names again when it changes: all of it
    or, with any mistake in it, nothing.
    """


@directory.command()
@click.argument("file", type=_FILE)
@output_option
@click.pass_context
def check(context: click.Context, file: Path, output: str) -> None:
    """Say every mistake in FILE, each at its line, and who could not be told.

    Exit status: 0 usable (warnings are allowed); 2 not usable.
    """
    checked = check_directory(file, now=SystemClock().wall())
    if not show_checked(checked, output, counted=lambda found: f"{len(found.users)} users"):
        context.exit(2)


@directory.command()
@click.argument("user")
@click.option(
    "--file",
    type=_FILE,
    required=True,
    help="directory.yaml.",
)
@output_option
@click.pass_context
def show(context: click.Context, user: str, *, file: Path, output: str) -> None:
    """Say what the directory means for USER: team, zone, and who is told of their jobs.

    Exit status: 0 known; 1 no such user; 2 the file is not usable.
    """
    checked = check_directory(file, now=SystemClock().wall())
    if checked.content is None:
        click.echo(checked.render(), err=True)
        context.exit(2)
    if user not in checked.content.users:
        hint = did_you_mean(user, checked.content.users)
        text = f'{file} has no user "{printable(user)}"' + (f"; {hint}" if hint else "")
        raise RefusedAction("unknown_user", text)
    document = user_document(checked.content, user, now=SystemClock().wall())
    if output == "json":
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    for line in _lines(document):
        click.echo(printable(line))


def user_document(known: Directory, name: str, *, now: float) -> dict[str, Any]:
    """What a directory means for one of its users; `now` is Unix time."""
    user = known.user(name)
    told = recipients(known, name, CHANNELS, now=now)
    return {
        "schema": SCHEMA,
        "user": name,
        "team": user.team,
        "member_of": list(user.member_of),
        "timezone": user.timezone,
        "sees_team": user.sees_team,
        "left": None if user.left is None else user.left.isoformat(),
        "deputy": user.deputy,
        "told": [{"channel": channel, "address": to} for channel, to in told.required],
        "stands_in": told.deputy,
        "informed": [{"channel": channel, "address": to} for channel, to in told.informed],
        "why_not": told.why_not,
    }


def _lines(document: dict[str, Any]) -> list[str]:
    teams = ", ".join(document["member_of"]) or "none"
    lines = [
        f"user       {document['user']}",
        f"teams      {teams}" + (" (sees their jobs)" if document["sees_team"] else ""),
        f"zone       {document['timezone'] or 'that of the rules'}",
    ]
    if document["left"]:
        lines.append(f"left       {document['left']}")
    if document["why_not"]:
        lines.append(f"not told   {document['why_not']}")
    who = f"{document['stands_in']} stands in: " if document["stands_in"] else ""
    told = ", ".join(f"{item['channel']} {item['address']}" for item in document["told"])
    lines.append(f"told       {who}{told or 'nobody: no job of theirs is ended'}")
    informed = ", ".join(f"{item['channel']} {item['address']}" for item in document["informed"])
    if informed:
        lines.append(f"as well    {informed} (the team's contact; proves nothing)")
    return lines
