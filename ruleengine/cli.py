"""`gpuwarden engine`, `jobs` and `keep`: run the engine, and ask it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from gpuwarden import logs
from gpuwarden.consoles import open_console, printable
from gpuwarden.option_values import (
    config_option,
    log_format_option,
    log_level_option,
    output_option,
)
from gpuwarden.ruleengine.alerting_cli import alerting
from gpuwarden.ruleengine.audit_cli import audit
from gpuwarden.ruleengine.clients import ask, read_token, token_headers, token_option, url_option
from gpuwarden.ruleengine.directory_cli import directory
from gpuwarden.ruleengine.enforcement_cli import enforcement
from gpuwarden.ruleengine.ledger_cli import ledger
from gpuwarden.ruleengine.name_cli import names
from gpuwarden.ruleengine.node_cli import nodes
from gpuwarden.ruleengine.notice_cli import notices
from gpuwarden.ruleengine.profile_cli import profiles
from gpuwarden.ruleengine.rule_cli import rules
from gpuwarden.ruleengine.serving import Service, check_files
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.ruleengine.trial_cli import appeal, regret
from gpuwarden.ruleengine.why_cli import show, why

if TYPE_CHECKING:
    from gpuwarden.ruleengine.settings import Settings

__all__ = [
    "alerting",
    "appeal",
    "audit",
    "directory",
    "enforcement",
    "engine",
    "jobs",
    "keep",
    "ledger",
    "names",
    "nodes",
    "notices",
    "profiles",
    "regret",
    "rules",
    "why",
]


@click.command()
@config_option("engine.yaml; deploy/examples/engine.yaml explains every field.", required=True)
@click.option(
    "--check",
    is_flag=True,
    help="Read the configuration, the rules, the directory and the secrets, say what is wrong, and "
    "exit: 0 if all can be used, 2 if not.",
)
@log_level_option
@log_format_option
def engine(config: Path, check: bool, *, log_level: str, log_format: str) -> None:
    """Judge jobs by rules, tell their owners, and end what must end.

    One engine runs per cluster; while it is down nothing is ended. Rule files and the directory are
    read again when they change (SIGHUP: at once); everything else needs a restart.
    """
    settings = load_settings(config)
    if check:
        book = check_files(settings)
        click.echo(
            f"{config}: ok: {len(book.rules.rules)} rules, {len(book.rules.profiles)} profiles, "
            f"{len(book.directory.users)} users"
        )
        return
    logs.configure(log_level, log_format)
    asyncio.run(_run(settings))


async def _run(settings: Settings) -> None:
    await Service(settings).run()


@click.group()
def jobs() -> None:
    """Say what became of a job, and why."""


@jobs.command("list")
@token_option
@url_option
@output_option
def list_jobs(url: str, token_file: Path | None, *, output: str) -> None:
    """List the running jobs with the rules that they break."""
    document = ask("GET", url, "/v1/jobs", headers=token_headers(token_file))
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    for block in document["halted"]:
        click.echo(f"No job is ended now: {printable(block['sentence'])}", err=True)
    table = Table("JOB", "USER", "TEAM", "NODE", "GPUS", "CASES", box=None, pad_edge=False)
    # `jobs show` and `keep` want the whole name: it is never cut nor wrapped.
    table.columns[0].no_wrap = True
    table.columns[0].min_width = max((len(job["job_id"]) for job in document["jobs"]), default=0)
    for job in document["jobs"]:
        cases = ", ".join(f"{rule}: {state}" for rule, state in job["cases"].items())
        table.add_row(
            job["job_id"], job["user"], job["team"], job["node"], ",".join(job["gpus"]), cases
        )
    open_console().print(table)


jobs.add_command(show)


@click.command()
@click.argument("job_id")
@click.option("--rule", required=True, metavar="ID", help="The rule, as the notice names it.")
@click.option(
    "--for", "seconds", required=True, metavar="DURATION", help="How long, such as 2h or 90m."
)
@click.option("--reason", required=True, help="Why; operators read it.")
@click.option("--ticket", help="As an owner: the word that stands in the notice.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Without a ticket: the file with your token (web.tokens or web.operator_token_file of the "
    "engine).",
)
@url_option
def keep(
    job_id: str,
    rule: str,
    *,
    seconds: str,
    reason: str,
    ticket: str | None,
    token_file: Path | None,
    url: str,
) -> None:
    """Move the end of JOB_ID that a rule has announced.

    Owners use the command that stands in their notice, as often as the rule allows; who has a token
    gives --token-file. Exit status: 0 kept; 1 the engine says no, and why.
    """
    if (ticket is None) == (token_file is None):
        raise click.UsageError("give either --ticket (owners) or --token-file (operators)")
    body = {"job_id": job_id, "rule": rule, "for": seconds, "reason": reason}
    headers: dict[str, str] = {}
    if ticket is not None:
        body["ticket"] = ticket
    if token_file is not None:
        body["by"] = os.environ.get("USER") or "operator"
        headers["Authorization"] = f"Bearer {read_token(token_file)}"
    granted = ask("POST", url, "/v1/keeps", body=body, headers=headers)
    click.echo(f"{job_id} is kept from the rule {rule} until {granted['until']}")
