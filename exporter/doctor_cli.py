"""`gpuwarden doctor node`: everything that exporter and agent need on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuwarden.doctors import show_findings
from gpuwarden.exporter import doctor_findings as known
from gpuwarden.exporter.doctor_checks import Machine, machine_checks
from gpuwarden.exporter.doctor_places import DEFAULT_KEYS, daemon, places
from gpuwarden.exporter.doctor_services import service_checks
from gpuwarden.option_values import output_option, quiet_option

if TYPE_CHECKING:
    from gpuwarden.findings import Check

_PATH = click.Path(readable=False, path_type=Path)


def is_node() -> bool:
    """Whether this machine looks like one with an exporter or an agent."""
    return (
        Path("/proc/driver/nvidia").exists()
        or DEFAULT_KEYS.exists()
        or daemon("exporter") is not None
        or daemon("agent") is not None
    )


def node_checks(**given: Any) -> list[Check]:
    """Every check of this node.

    Args:
        given: attributes of `doctor_places.Places`; what is None is found out.
    """
    found = places(given, exporter=daemon("exporter"), agent=daemon("agent"))
    checks = [*machine_checks(found, Machine()), *service_checks(found)]
    order = [item.id for item in known.KNOWN]
    return sorted(checks, key=lambda check: order.index(check.known.id))


@click.command()
@click.option("--exporter.url", "exporter_url", metavar="URL", help="Where the exporter answers.")
@click.option("--agent.url", "agent_url", metavar="URL", help="Where the agent answers.")
@click.option("--jobs.directory", "jobs", type=_PATH, help="Folder of the job files.")
@click.option("--keys", type=_PATH, metavar="DIR", help="Folder of the engine's public keys.")
@click.option("--journal", type=_PATH, help="The agent's journal.")
@click.option("--kill-switch", type=_PATH, help="The agent's kill switch.")
@click.option("--release-file", type=_PATH, help="By which the driver is released.")
@click.option("--gpus", metavar="nvml|simulated:FILE", help="The driver, or a simulated one.")
@click.option("--engine.url", "engine_url", metavar="URL", help="Compare clocks with this engine.")
@click.option(
    "--prometheus.url", "prometheus_url", metavar="URL", help="Compare clocks with this Prometheus."
)
@click.option("--ca-file", type=_PATH, help="Certificates for the TLS of exporter and agent.")
@quiet_option
@output_option
@click.pass_context
def node(context: click.Context, /, quiet: bool, output: str, **given: Any) -> None:
    """Check this node: driver, cards, rights, folders, keys, exporter, agent, clock, platforms.

    Run it as root on the node: what the running exporter and agent were started with is read from
    their command lines, and only what differs is to be given. It only reads.

    Exit status: 0 healthy; 1 something is to be done; 2 wrong usage; 3 something could not be
    checked.
    """
    context.exit(show_findings(node_checks(**given), output=output, quiet=quiet))
