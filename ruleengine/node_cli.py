"""`gpuwarden nodes`: which nodes there are, and which will not come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from gpuwarden import node_api
from gpuwarden.consoles import open_console
from gpuwarden.option_values import output_option
from gpuwarden.ruleengine.clients import ask, read_token, token_headers, token_option, url_option

__all__ = ["nodes"]


@click.group()
def nodes() -> None:
    """Say which nodes there are, and which should be."""


@nodes.command("list")
@token_option
@url_option
@output_option
def list_nodes(url: str, token_file: Path | None, *, output: str) -> None:
    """List every node that registered, is scraped, or is expected.

    A node that fell silent stays expected, and dark: with more than a tenth of the nodes dark no
    job is ended anywhere. `gpuwarden nodes forget` tells the engine that it is gone for good.
    """
    document = ask("GET", url, node_api.REGISTER_PATH, headers=token_headers(token_file))
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    table = Table("NODE", "STATE", "LIT", "EXPECTED", "LAST HEARD", "EXPORTER", box=None)
    table.pad_edge = False
    table.columns[0].no_wrap = True
    for node in document["nodes"]:
        table.add_row(
            node["address"],
            node["state"],
            "yes" if node["lit"] else "no",
            "yes" if node["expected"] else "no",
            node["left_at"] or node["seen_at"] or "",
            node["exporter"] or "",
        )
    open_console().print(table)
    click.echo(_summary(document), err=True)


def _summary(document: dict[str, Any]) -> str:
    if document["expected"] is None:
        return "The engine has not completed a tick: which nodes are lit is not known yet."
    return f"{document['lit']} of {document['expected']} expected nodes are lit."


@nodes.command()
@click.argument("address")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The file with the operators' token (web.operator_token_file of the engine).",
)
@click.option("--reason", default="", help="Why; it stands in the audit, with your name.")
@url_option
def forget(address: str, token_file: Path, *, reason: str, url: str) -> None:
    """Tell the engine that the node at ADDRESS will not come back.

    It is not expected any more, and Prometheus drops it. A node that is still there registers
    again. ADDRESS is as `gpuwarden nodes list` shows it.
    """
    headers = {"Authorization": f"Bearer {read_token(token_file)}"}
    body = {"address": address, **({"reason": reason} if reason else {})}
    ask("POST", url, node_api.FORGET_PATH, body=body, headers=headers)
    click.echo(f"{address} is not expected any more")
