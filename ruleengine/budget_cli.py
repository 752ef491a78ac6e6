"""`gpuwarden budgets`: how the budgets of teams stand, and what is wrong with their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from gpuwarden.checked_files import show_checked
from gpuwarden.consoles import open_console, printable
from gpuwarden.option_values import config_option, output_option
from gpuwarden.ruleengine.budget_uses import standing_line
from gpuwarden.ruleengine.budgets import check_budgets
from gpuwarden.ruleengine.clients import ask, token_headers, token_option, url_option
from gpuwarden.ruleengine.directory_checks import load_directory
from gpuwarden.ruleengine.settings import load_settings

if TYPE_CHECKING:
    from gpuwarden.ruleengine.directories import Directory

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def budgets() -> None:
    """Say how the budgets of teams stand; check their file.

    The engine reads the file that `budgets` in engine.yaml names again when it changes: all of it
    or, with any mistake in it, nothing. To be over budget ends no job by itself: rules may ask for
    it (`over_budget`), beside what is measured.
    """


@budgets.command()
@token_option
@url_option
@output_option
def show(url: str, token_file: Path | None, *, output: str) -> None:
    """List the budgets of your teams, fullest first, with what their periods will end with.

    Exit status: 0 done; 1 the engine refuses; 3 it does not answer.
    """
    document = ask("GET", url, "/v1/budgets", headers=token_headers(token_file))
    if output == "json":
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    if not document["budgets"]:
        click.echo(
            "There is no budget that you may see: `budgets` in engine.yaml names their file, and "
            "whoever is no operator sees those of their own teams."
        )
        return
    table = Table("TEAM", "PERIOD", "KIND", "USED", "UNTIL", box=None, pad_edge=False)
    for row in document["budgets"]:
        line = standing_line(row)
        table.add_row(printable(row["team"]), row["period"], row["kind"], line, row["ends"])
    open_console().print(table)


@budgets.command()
@click.argument("file", type=_FILE)
@config_option("engine.yaml: teams of its directory and currencies of its prices are checked too.")
@output_option
@click.pass_context
def check(context: click.Context, file: Path, *, config: Path | None, output: str) -> None:
    """Say every mistake in FILE, each at its line.

    Exit status: 0 usable (warnings are allowed); 2 not usable.
    """
    known: Directory | None = None
    currencies: frozenset[str] | None = None
    if config is not None:
        settings = load_settings(config)
        prices, name = settings.values.prices, settings.values.directory
        currencies = frozenset() if prices is None else prices.currencies
        known = None if name is None else load_directory(settings.path(name))
    checked = check_budgets(file, known, currencies=currencies)
    if not show_checked(checked, output, counted=lambda found: f"{len(found.budgets)} budgets"):
        context.exit(2)
