"""`gpuwarden doctor engine`: everything that the engine needs, looked at from its machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gpuwarden.doctors import show_findings
from gpuwarden.errors import InvalidInput
from gpuwarden.files import read_secret
from gpuwarden.findings import Check, Finding, hidden
from gpuwarden.option_values import output_option, quiet_option
from gpuwarden.ruleengine import doctor_findings as known
from gpuwarden.ruleengine.clients import token_headers, token_option
from gpuwarden.ruleengine.doctor_centres import Centre
from gpuwarden.ruleengine.doctor_engine_checks import engine_checks
from gpuwarden.ruleengine.doctor_prometheus_checks import prometheus_checks
from gpuwarden.ruleengine.doctor_reach_checks import reach_checks
from gpuwarden.ruleengine.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEFAULT_CONFIG: Final = Path("/etc/gpuwarden/engine.yaml")
CONFIG_VARIABLE: Final = "GPUWARDEN_ENGINE_CONFIG"
_FILE = click.Path(path_type=Path, dir_okay=False)


def engine_config() -> Path | None:
    """The engine.yaml of this machine, or None."""
    given = os.environ.get(CONFIG_VARIABLE)
    path = Path(given) if given else DEFAULT_CONFIG
    return path if given or path.exists() else None


def centre_checks(
    config: Path,
    *,
    url: str | None = None,
    token_file: Path | None = None,
    grafana: str | None = None,
    grafana_token_file: Path | None = None,
    agents: int = 200,
) -> tuple[list[Check], Callable[[Sequence[Finding]], list[Finding]]]:
    """Every check at the centre, and what takes the secrets out of their findings.

    Args:
        config: engine.yaml.
        url: where the engine answers; where it listens by default.
        token_file: with a token for it, or None.
        grafana: Grafana's address, or None: it is not looked at.
        grafana_token_file: with a token for it, or None.
        agents: how many agents are asked at most.

    Raises:
        InvalidInput: a token file cannot be read.
    """
    headers = token_headers(token_file)
    try:
        settings = load_settings(config)
    except InvalidInput as error:
        said = str(error)  # the name of the error's variable ends here
        return [Check(known.CONFIG, lambda: [known.CONFIG.failed(said, str(config))])], list
    listen = settings.values.web.listen
    host, _, port = listen.rpartition(":")
    reachable = "127.0.0.1" if host in ("", "0.0.0.0", "[::]") else host
    centre = Centre(
        settings,
        url or f"http://{reachable}:{port}",
        headers,
        grafana=None if grafana is None else grafana.rstrip("/"),
        grafana_token=None
        if grafana_token_file is None
        else read_secret(grafana_token_file, "--grafana-token-file"),
        agents=agents,
    )
    checks = [*engine_checks(centre), *prometheus_checks(centre), *reach_checks(centre)]
    order = [item.id for item in known.KNOWN]
    checks.sort(key=lambda check: order.index(check.known.id))
    return checks, lambda findings: hidden(findings, centre.secrets())


@click.command()
@click.option(
    "--config",
    "--config.file",
    "config",
    type=_FILE,
    envvar=CONFIG_VARIABLE,
    default=DEFAULT_CONFIG,
    show_default=True,
    metavar="FILE",
    help=f"engine.yaml; also ${CONFIG_VARIABLE}.",
)
@click.option(
    "--engine.url",
    "url",
    envvar="GPUWARDEN_ENGINE_URL",
    metavar="URL",
    help="Where the engine answers; by default where web.listen says. Also $GPUWARDEN_ENGINE_URL.",
)
@token_option
@click.option("--grafana-url", "grafana", metavar="URL", help="Look at Grafana as well.")
@click.option(
    "--grafana-token-file", type=_FILE, help="A token of a service account that may view boards."
)
@click.option(
    "--agents",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    metavar="N",
    help="Agents that are asked at most; with more nodes, others each time.",
)
@quiet_option
@output_option
@click.pass_context
def engine(
    context: click.Context,
    config: Path,
    *,
    url: str | None,
    token_file: Path | None,
    grafana: str | None,
    grafana_token_file: Path | None,
    agents: int,
    quiet: bool,
    output: str,
) -> None:
    """Check the centre: files, engine, Prometheus, nodes, Alertmanager, agents, people, ledger.

    Run it as the engine's user, where the engine runs. It only reads, and sends no notice: to mail
    server and Slack it shows the credentials, nothing else. Secrets are never printed.

    Exit status: 0 healthy; 1 something is to be done; 2 wrong usage; 3 something could not be
    checked.
    """
    if not config.exists():
        raise click.UsageError(
            f"{config} is not there: give --config with the engine's engine.yaml"
        )
    checks, cover = centre_checks(
        config,
        url=url,
        token_file=token_file,
        grafana=grafana,
        grafana_token_file=grafana_token_file,
        agents=agents,
    )
    context.exit(show_findings(checks, cover, output=output, quiet=quiet))
