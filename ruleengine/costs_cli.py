"""`gpuwarden costs`: who held how much GPU time, and what it costs."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, cast

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from gpuwarden.consoles import open_console, printable
from gpuwarden.errors import InvalidInput
from gpuwarden.option_values import config_option, prometheus_option, span_options
from gpuwarden.periods import Span
from gpuwarden.ruleengine.cost_sources import LONGEST_SECONDS, measured
from gpuwarden.ruleengine.costs import LABELS, Level
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.prometheus_settings import client_of
from gpuwarden.ruleengine.replicas import AnyReplica
from gpuwarden.ruleengine.reports.tables import safe
from gpuwarden.ruleengine.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpuwarden.ruleengine.costs import Costs, Line, Statement
    from gpuwarden.ruleengine.settings import Settings

QUESTION_SECONDS = 120.0
"""A day of a large fleet is some thousand rows; a tick's timeout would be too short for it."""
_EPILOG = """\b
Examples:
  gpuwarden costs --config engine.yaml --from 2026-11-01 --to 2026-12-01
  gpuwarden costs --config engine.yaml --from now-7d --by user -o csv
  gpuwarden costs --config engine.yaml --from now-1d --by job --team vision -o json"""


@click.command(epilog=_EPILOG, short_help="Say who held how much GPU time, and what it costs.")
@config_option("engine.yaml: its servers, prices and ledger count.", required=True)
@span_options(
    default="now-30d",
    begin="now-7d, 2026-11-01 (in UTC), or a time with its zone.",
    end="The moment before which it ends.",
)
@click.option(
    "--by",
    type=click.Choice(list(LABELS)),
    default="team",
    show_default=True,
    help="What a line is about.",
)
@click.option("--team", default="", metavar="NAME", help="Only this team.")
@prometheus_option("A server that keeps the history for longer, in the place of those of --config.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="For people, for programs, or for a spreadsheet.",
)
def costs(
    *,
    config: Path,
    begin: float,
    end: float,
    by: str,
    team: str,
    url: str | None,
    output: str,
) -> None:
    """Say who held how much GPU time, what it costs, how much was idle, lost and came back.

    Prices, tariffs and the unit of billing are those of `prices` in engine.yaml as they are now,
    also for times before it was changed. What Prometheus did not scrape counts as no use; a card
    that several jobs hold is shared out; amounts of different currencies stay apart. docs/money.md
    has every formula and its doubts.

    Exit status: 0 done; 2 wrong usage or input; 3 a server or the ledger does not answer, or
    nothing is recorded of this time.
    """
    span = Span(begin, min(end, time.time()))
    if span.seconds <= 0:
        raise InvalidInput("--from must lie before --to, and before now")
    if span.seconds > LONGEST_SECONDS:
        raise InvalidInput(f"more than {LONGEST_SECONDS / 86400:.0f} days: ask for parts of it")
    settings = load_settings(config)
    found = asyncio.run(_measured(settings, span, team=team, url=url))
    statement = found.statement(cast("Level", by))
    if output == "json":
        click.echo(json.dumps(statement.document(), indent=2, ensure_ascii=False))
    elif output == "csv":
        click.echo(_csv(statement), nl=False)
    else:
        console = open_console()
        console.print(_table(statement))
        for note in statement.notes:
            console.print(note)


async def _measured(settings: Settings, span: Span, *, team: str, url: str | None) -> Costs:
    servers = settings.values.prometheus
    groups = ((url,),) if url else servers.groups
    ledger = settings.path(settings.values.ledger)
    bar = Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(client_of(servers, settings.path))
        source = AnyReplica(
            [
                [PrometheusClient(each, timeout=QUESTION_SECONDS, client=client) for each in group]
                for group in groups
            ]
        )
        stack.enter_context(bar)
        task = bar.add_task("asking Prometheus", total=None)
        return await measured(
            source,
            settings.values.prices,
            span,
            team=team,
            ledger=ledger if os.access(ledger, os.R_OK) else None,
            shards=len(groups),
            progress=lambda done, whole: bar.update(task, completed=done, total=whole),
        )


# -- forms


def _figures(line: Line, currencies: Sequence[str]) -> dict[str, float | None]:
    """The columns of a line, in their order; None is not known."""
    found: dict[str, float | None] = {
        "jobs": line.jobs,
        "gpu_hours": line.gpu_seconds / 3600,
        "billed_gpu_hours": line.billed_gpu_seconds / 3600,
        "idle_gpu_hours": line.idle_gpu_seconds / 3600,
        "unpriced_gpu_hours": line.unpriced_gpu_seconds / 3600,
        "lost_gpu_hours": _hours(line.lost_gpu_seconds),
        "reclaimed_gpu_hours": _hours(line.reclaimed_gpu_seconds),
    }
    for currency in currencies:
        found[f"cost_{currency}"] = line.cost.get(currency, 0.0)
        found[f"idle_cost_{currency}"] = line.idle_cost.get(currency, 0.0)
        found[f"lost_cost_{currency}"] = line.lost_cost.get(currency, 0.0)
    return found


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


def _csv(statement: Statement) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = LABELS[statement.by]
    currencies = statement.currencies
    writer.writerow(["from", "to", *names, *_figures(statement.total, currencies)])
    document = statement.document()
    for line in statement.lines:
        figures = _figures(line, currencies).values()
        cells = ["" if value is None else f"{round(value, 6):.15g}" for value in figures]
        labels = [safe(line.labels[name]) for name in names]
        writer.writerow([document["from"], document["to"], *labels, *cells])
    return text.getvalue()


def _table(statement: Statement) -> Table:
    document = statement.document()
    covered = "" if statement.covered is None else f", {100 * statement.covered:.1f} % recorded"
    table = Table(title=f"{document['from']} to {document['to']}{covered}", show_footer=True)
    names, currencies = LABELS[statement.by], statement.currencies
    for index, name in enumerate(names):
        table.add_column(name, "total" if index == 0 else "")
    total = _row(statement.total, currencies)
    for title, foot in zip(_titles(currencies), total, strict=True):
        table.add_column(title, foot, justify="right")
    for line in statement.lines:
        table.add_row(*(printable(line.labels[name]) for name in names), *_row(line, currencies))
    return table


def _titles(currencies: Sequence[str]) -> list[str]:
    hours = ["jobs", "GPU-hours", "billed", "idle", "lost", "came back", "no price"]
    return [*hours, *(title for each in currencies for title in (each, f"idle {each}"))]


def _row(line: Line, currencies: Sequence[str]) -> list[str]:
    seconds = (
        line.gpu_seconds,
        line.billed_gpu_seconds,
        line.idle_gpu_seconds,
        line.lost_gpu_seconds,
        line.reclaimed_gpu_seconds,
        line.unpriced_gpu_seconds,
    )
    money = (line.cost, line.idle_cost)
    return [
        str(line.jobs),
        *("?" if value is None else f"{value / 3600:,.2f}" for value in seconds),
        *(f"{amounts.get(each, 0.0):,.2f}" for each in currencies for amounts in money),
    ]
