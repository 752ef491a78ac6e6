"""`gpuwarden alerting`: check that Alertmanager's file lets through what precedes an action."""

from __future__ import annotations

from pathlib import Path

import click

from gpuwarden.diagnostics import Severity, render_json, render_text
from gpuwarden.option_values import config_option, output_option, read_positive_seconds
from gpuwarden.ruleengine.alert_route_checks import check_routes
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.yaml_files import load_located

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def alerting() -> None:
    """Check how notices reach people."""


@alerting.command()
@click.argument("file", type=_FILE)
@config_option("engine.yaml: its channels are compared with those that the receivers name.")
@click.option(
    "--longest",
    callback=read_positive_seconds,
    metavar="DURATION",
    default="5m",
    show_default=True,
    help="How long a notice that precedes an action may wait for its group.",
)
@output_option
@click.pass_context
def check(
    context: click.Context, file: Path, *, config: Path | None, longest: float, output: str
) -> None:
    """Walk the routes of FILE, an alertmanager.yml, with every alert that the engine makes.

    An error is what keeps a notice that precedes an action from its owner or from being proven: a
    time interval that mutes it, an inhibition, a group that waits too long, a receiver that makes
    no proof, a channel that the engine does not have. No job is ended without that proof, so that
    the mistake costs enforcement, and nobody is told why. `amtool check-config` checks the rest.

    Exit status: 0 nothing, or only warnings; 2 errors.
    """
    document = load_located(file)
    findings = list(document.diagnostics)
    if document.root is not None and not findings:
        known = None if config is None else load_settings(config).values
        findings = check_routes(
            document.root,
            channels=None if known is None else known.channels,
            reading_along=() if known is None else known.reading_along,
            longest=longest,
        )
    errors = [item for item in findings if item.severity is Severity.ERROR]
    if output == "json":
        click.echo(render_json(findings))
    else:
        if findings:
            click.echo(render_text(findings, {document.file: document.text}))
        warnings = len(findings) - len(errors)
        click.echo(f"{file}: {len(errors)} errors, {warnings} warnings")
    if errors:
        context.exit(2)
