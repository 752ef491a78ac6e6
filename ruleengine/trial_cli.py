"""`gpuwarden appeal` and `gpuwarden regret`: object to an end that was announced or done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuwarden.consoles import printable
from gpuwarden.ruleengine.clients import ask, read_token, token_headers, url_option

if TYPE_CHECKING:
    from collections.abc import Mapping


@click.command()
@click.argument("job_id")
@click.option("--rule", required=True, metavar="ID", help="The rule, as the notice names it.")
@click.option("--reason", required=True, help="Why the end is wrong; operators read it.")
@click.option("--ticket", help="As an owner: the word that stands in the notice.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Without a ticket: the file with your token (web.tokens of the engine).",
)
@url_option
def appeal(
    job_id: str, rule: str, *, reason: str, ticket: str | None, token_file: Path | None, url: str
) -> None:
    """Object to the end of JOB_ID that a rule has announced or done.

    It moves no deadline: `gpuwarden keep` does. A rule that enforces on trial (canary) falls back
    to warn by itself once as many owners object as its canary says. Exit status: 0 written down;
    1 the engine says no, and why; 3 it does not answer.
    """
    if (ticket is None) == (token_file is None):
        raise click.UsageError("give either --ticket (owners) or --token-file")
    body = {"job_id": job_id, "rule": rule, "reason": reason}
    headers: Mapping[str, str] = {}
    if ticket is not None:
        body["ticket"] = ticket
    if token_file is not None:
        headers = {"Authorization": f"Bearer {read_token(token_file)}"}
    _tell(ask("POST", url, "/v1/appeals", body=body, headers=headers))


@click.command()
@click.argument("decision_id")
@click.option("--reason", required=True, help="Why the end was wrong; it stands in the audit.")
@click.option(
    "--token-file",
    envvar="GPUWARDEN_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    required=True,
    help="File with the token of an operator; also $GPUWARDEN_TOKEN_FILE.",
)
@url_option
def regret(decision_id: str, *, reason: str, token_file: Path, url: str) -> None:
    """Say that the end by DECISION_ID was wrong.

    A rule that enforces on trial (canary) falls back to warn by itself once as many ends are
    regretted as its canary says. `gpuwarden jobs show JOB` names a job's decisions. Exit status: 0
    written down; 1 the engine says no, and why; 3 it does not answer.
    """
    body = {"decision_id": decision_id, "reason": reason}
    _tell(ask("POST", url, "/v1/regrets", body=body, headers=token_headers(token_file)))


def _tell(document: dict[str, Any]) -> None:
    kind, rule = document["kind"], document["rule"]
    again = "" if document["first"] else " It had been written down before, and counts once."
    click.echo(printable(f"The {kind} about {document['job_id']} is written down.{again}"))
    if document["held_back"]:
        click.echo(printable(f"{rule}: {document['held_back']}"))
