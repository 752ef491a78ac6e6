"""`gpuwarden policy`: write, check and compare policy files; render, apply and undo them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden.checked_files import show_checked
from gpuwarden.clock import SystemClock
from gpuwarden.consoles import printable
from gpuwarden.diagnostics import did_you_mean
from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.fields import known_zone
from gpuwarden.option_values import output_option
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.policy_apply_cli import apply, undo
from gpuwarden.scheduling.policy_checks import check_policy, load_policy
from gpuwarden.scheduling.policy_engine_cli import diff, drift, render
from gpuwarden.scheduling.policy_explanations import (
    explain_team,
    explanation_json,
    explanation_lines,
)
from gpuwarden.scheduling.policy_options import engine_option, policy_argument
from gpuwarden.scheduling.policy_people import people_here
from gpuwarden.scheduling.policy_references import policy_reference
from gpuwarden.scheduling.policy_schemas import policy_schema
from gpuwarden.scheduling.policy_templates import policy_template

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Engine, Policy

# In these, \b is the character by which click leaves the lines that follow as they are.
_EXAMPLES = """\b
Examples:
  gpuwarden policy init --engine slurm > policy.yaml
  gpuwarden policy check policy.yaml
  gpuwarden policy explain policy.yaml --user ana
  gpuwarden policy diff policy.yaml --against /etc/gpuwarden/policy.yaml
  gpuwarden policy render policy.yaml --out rendered
  gpuwarden policy apply policy.yaml --dry-run
  gpuwarden policy drift"""
_MODELINE = """\b
With yaml-language-server, put this at the top of a policy file:
  # yaml-language-server: $schema=policy.schema.json"""


@click.group(epilog=_EXAMPLES)
def policy() -> None:
    """Say who may use how many GPUs, whose task goes first, and who has to leave.

    A policy file is rendered into the objects of the engine that starts jobs: Slurm's accounts and
    QOS, Kueue's queues, or nothing but the file for a single host. Without FILE it is the one that
    GPUWARDEN_POLICY names, else /etc/gpuwarden/policy.yaml.
    """


@policy.command(short_help="Say every mistake, each at its line and column.")
@policy_argument
@engine_option
@click.option(
    "--here", is_flag=True, help="Warn also of users and groups that this machine does not know."
)
@output_option
@click.pass_context
def check(
    context: click.Context, file: Path, output: str, *, engine: Engine | None, here: bool
) -> None:
    """Say everything that is wrong with a policy file, and what is hardly meant.

    Exit status: 0 usable (warnings are allowed); 2 not usable.
    """
    people = people_here() if here else None
    checked = check_policy(file, now=SystemClock().wall(), engine=engine, people=people)
    if not show_checked(checked, output, counted=_counted):
        context.exit(2)


def _counted(found: Policy) -> str:
    cards = sum(card.count for card in found.cards)
    return f"{len(found.teams)} teams, {cards} cards, hash {policy_hash(found)}"


@policy.command(short_help="Say in words what a policy means for teams and people.")
@policy_argument
@click.option("--team", metavar="NAME", help="Only for this team.")
@click.option("--user", metavar="NAME", help="Only for the teams of this user.")
@output_option
def explain(file: Path, output: str, *, team: str | None, user: str | None) -> None:
    """Say in words what teams may use, whose jobs leave for whose, and what is open now.

    Exit status: 0 explained; 1 there is no such team, or the user is in none; 2 the file is not
    usable.
    """
    now = SystemClock().wall()
    found = load_policy(file, now=now)
    chosen = found.teams if user is None else found.teams_of(user)
    if team is not None:
        chosen = tuple(each for each in chosen if each.name == team)
    if not chosen:
        names = [each.name for each in found.teams]
        hint = did_you_mean(team or "", names) or f"there are {', '.join(names)}"
        who = f'user "{user}" in a team' if team is None else f'team "{team}"'
        who += f' of user "{user}"' if team is not None and user is not None else ""
        raise RefusedAction("unknown", printable(f"there is no {who}; {hint}"))
    explained = [(each, explain_team(found, each, now=now)) for each in chosen]
    if output == "json":
        click.echo(explanation_json(explained))
    else:
        click.echo(printable("\n".join(explanation_lines(explained))))


@policy.command(epilog=_MODELINE)
def schema() -> None:
    """Print the JSON schema of policy files, for editors and CI."""
    click.echo(policy_schema(), nl=False)


@policy.command()
def reference() -> None:
    """Print the reference page of policy files as Markdown."""
    click.echo(policy_reference(), nl=False)


@policy.command()
@click.option(
    "--engine",
    type=click.Choice(["slurm", "kueue", "local"]),
    required=True,
    help="What starts the jobs.",
)
@click.option(
    "--timezone",
    metavar="ZONE",
    help="IANA name, such as Europe/Berlin.  [default: this machine's]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file, which must not be there yet, and not to standard output.",
)
def init(engine: Engine, timezone: str | None, *, out: Path | None) -> None:
    """Print a policy to begin with: every part once, with a word on each.

    Exit status: 0 done; 2 the file is there already.
    """
    text = policy_template(engine, _zone(timezone))
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InvalidInput(f"{out} is there already: name another file by --out") from error
    except OSError as error:
        raise InvalidInput(f"{out} cannot be written: {error.strerror}") from error
    click.echo(f"{out}: now name your cards and teams in it; gpuwarden policy check {out}")


def _zone(name: str | None) -> str:
    """A zone that was asked for, or the machine's own, or UTC."""
    if name is not None:
        try:
            return known_zone(name)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--timezone") from error
    found = os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    try:
        zone = known_zone(found)
    except ValueError:
        return "UTC"
    return "UTC" if zone in ("Etc/UTC", "Etc/UCT", "Etc/Zulu", "Etc/Universal") else zone


for _command in (render, diff, apply, undo, drift):
    policy.add_command(_command)
