"""`gpuwarden usage`: who held how much, by the engine and by Prometheus side by side."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gpuwarden.consoles import open_console, print_table, printable
from gpuwarden.schedule_api import BudgetEntry
from gpuwarden.scheduling.daemon_clients import DaemonClient, daemon_options

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.schedule_api import ScheduleDocument

_COLUMNS = (
    "name", "team", "user", "gpu_hours", "jobs", "attempts", "prometheus_gpu_hours",
    "difference_gpu_hours", "apart",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@click.command(
    epilog="""
\b
Examples:
  gpuwarden usage --from 2026-11-01 --to 2026-12-01
  gpuwarden usage --by job --team vision --from now-1d
  gpuwarden usage --budgets --check

\b
Exit status:
  0   told; the two accounts agree, or only one is there
  1   with --check: they differ by more than 2 %; with --budgets: a hard budget is spent
  2   wrong usage or input
  3   the scheduler does not answer
"""
)
@click.option(
    "--by",
    type=click.Choice(["team", "project", "job", "user"]),
    default="team",
    show_default=True,
    help="What a line is about.",
)
@click.option(
    "--from",
    "begin",
    default="now-7d",
    show_default=True,
    metavar="WHEN",
    help="From then on, by the clocks of the policy's zone: 2026-11-01, now-30d.",
)
@click.option("--to", "end", default="now", show_default=True, metavar="WHEN", help="Until then.")
@click.option("--team", default="", help="Only of this team.")
@click.option(
    "--budgets", is_flag=True, help="How budgets stand, and will stand, in the period that runs."
)
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 1 where the two accounts differ; with --budgets: where a hard one is spent.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", "csv"]),
    default="text",
    show_default=True,
    help="Form of the answer.",
)
@daemon_options
@click.pass_context
def usage(
    context: click.Context,
    by: str,
    *,
    begin: str,
    end: str,
    team: str,
    budgets: bool,
    check: bool,
    output: str,
    socket: Path,
    url: str | None,
    token_file: Path | None,
) -> None:
    """Say who held how many GPU-hours, and what they cost.

    Time is counted from starts to ends, each attempt once: a job that came back is one job with
    several attempts. Where the daemon knows a Prometheus (--prometheus), what the nodes saw stands
    beside it; a `!` marks lines that differ by more than 2 % (and ten minutes, and five of each
    card that was held across an end of the time), and the reasons are told.
    """
    client = DaemonClient(socket, url, token_file=token_file)
    if budgets:
        spent = _budgets(client.schedule(), team, output)
        context.exit(int(check and spent))
    parameters = {"by": by, "from": begin, "to": end} | ({"team": team} if team else {})
    document = client.ask("GET", "/v1/usage", parameters=parameters)
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    elif output == "csv":
        _write_csv(document)
    else:
        _show(document)
    if check and any(line["apart"] for line in document["lines"]):
        context.exit(1)


def _budgets(document: ScheduleDocument, team: str, output: str) -> bool:
    """Print how budgets stand; whether a hard one is spent."""
    rows = [item for item in document.budgets if team in ("", item.team)]
    if output == "json":
        data = [dataclasses.asdict(item) for item in rows]
        click.echo(json.dumps({"schema": "gpuwarden.usage-budgets/v1", "budgets": data}, indent=2))
    elif output == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([field.name for field in dataclasses.fields(BudgetEntry)])
        writer.writerows([_plain(value) for value in dataclasses.astuple(item)] for item in rows)
    elif not rows:
        click.echo("the policy has no budgets in GPU-hours")
    else:
        table = Table("TEAM", "PER", "KIND", box=None, pad_edge=False)
        for head in ("GPU-HOURS USED", "OF", "SHARE", "FORECAST"):
            table.add_column(head, justify="right")
        for item in rows:
            table.add_row(item.team, item.per, item.kind, *_standing(item))
        open_console().print(table)
    return any(
        item.kind == "hard" and item.used is not None and item.used >= item.limit_gpu_hours
        for item in rows
    )


def _standing(item: BudgetEntry) -> tuple[str, str, str, str]:
    unknown = "not known"
    used = unknown if item.used is None else f"{item.used:,.1f}"
    share = "" if item.used is None else f"{100 * item.used / item.limit_gpu_hours:.0f} %"
    ahead = "too early" if item.forecast is None else f"{item.forecast:,.1f}"
    if item.forecast is not None and item.forecast > item.limit_gpu_hours:
        ahead = f"{ahead} !"
    return used, f"{item.limit_gpu_hours:,.1f}", share, ahead


def _show(document: dict[str, Any]) -> None:
    both = document["total"]["prometheus_gpu_hours"] is not None
    whose = {"team": (), "job": ("team", "user")}.get(document["by"], ("team",))
    heads: tuple[str, ...] = (document["by"], *whose)
    seen = ("PROMETHEUS", "DIFFERENCE") if both else ()
    heads += (f"GPU-HOURS BY {document['engine'].upper()}", *seen, "JOBS", "STARTS", "COST")
    rows = []
    for line in (*document["lines"], document["total"]):
        row = [line[name] for name in ("name", *whose)]
        row.append(f"{line['gpu_hours']:,.1f}")
        if both:
            mark = " !" if line["apart"] else ""
            row += [
                f"{line['prometheus_gpu_hours']:,.1f}",
                f"{line['difference_gpu_hours']:+,.1f}{mark}",
            ]
        row += [str(line["jobs"]), str(line["attempts"])]
        row.append(", ".join(f"{amount:,.2f} {unit}" for unit, amount in line["cost"].items()))
        rows.append(row)
    heads = tuple(head.upper() for head in heads)
    print_table(heads, rows, right=range(1 + len(whose), len(heads)))
    for team, hours in document["booked_idle_gpu_hours"].items():
        if hours >= 0.05:
            click.echo(f"{printable(team)} booked {hours:,.1f} GPU-hours that it did not use")
    for note in document["notes"]:
        click.echo(f"note: {printable(note)}", err=True)


def _write_csv(document: dict[str, Any]) -> None:
    currencies = sorted(document["total"]["cost"])
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*_COLUMNS, *(f"cost_{unit}" for unit in currencies)])
    for line in document["lines"]:
        values = [line[name] for name in _COLUMNS]
        cost = [line["cost"].get(unit, "") for unit in currencies]
        writer.writerow([_plain(value) for value in (*values, *cost)])


def _plain(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value.lstrip().startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value
