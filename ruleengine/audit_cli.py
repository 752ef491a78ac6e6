"""`gpuwarden audit`: one reclaim, from its first sample to the memory that came back."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
from rich.errors import ConsoleError
from rich.table import Table

from gpuwarden.consoles import open_console, printable
from gpuwarden.errors import GpuwardenError, InvalidInput, RefusedAction
from gpuwarden.option_values import output_option
from gpuwarden.ruleengine import audit_checks
from gpuwarden.ruleengine.audits import SCHEMA
from gpuwarden.ruleengine.clients import ask, token_headers, token_option, url_option
from gpuwarden.ruleengine.explain import cause_lines
from gpuwarden.ruleengine.losses import loss_lines
from gpuwarden.ruleengine.messages import about
from gpuwarden.ruleengine.why_cli import find_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

MAX_FILE_BYTES = 16 * 1024 * 1024


class NoDecision(GpuwardenError):
    """Nothing was ever decided about it."""

    exit_code = 3


@click.command()
@click.argument("what", metavar="DECISION|JOB", required=False)
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Read a document that was saved with --output json, and ask no engine.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Look for each invariant, here and not by the engine's word; exit 1 if one is broken.",
)
@token_option
@url_option
@output_option
@click.pass_context
def audit(
    context: click.Context,
    what: str | None,
    *,
    path: Path | None,
    verify: bool,
    token_file: Path | None,
    url: str,
    output: str,
) -> None:
    """Tell one reclaim whole: why the job was ended, in which steps, and that its memory came back.

    DECISION is an id as `gpuwarden jobs show` has it; JOB is a job_id, a run_id or the beginning of
    either, and means the last decision about it. What is not known is said, with the reason.

    --verify looks for every invariant that an audit can show (fresh facts, notice proven and long
    enough ago, one end, limits, promises, proof...), on the document alone: save one with
    `--output json > audit.json`, and anybody can check it later with `--file audit.json --verify`.

    Exit status: 0 told, and with --verify nothing broken; 1 an invariant is broken; 2 wrong usage
    or file; 3 there is no such decision, or the engine does not answer.
    """
    if (what is None) == (path is None):
        raise click.UsageError("name a DECISION or a JOB, or a --file, and not both")
    headers = token_headers(token_file)
    document = _asked(what, url, headers) if what is not None else _saved(path or Path())
    found = _verified(document)
    broken = bool(audit_checks.failed(found))
    with _whole():
        _tell(document, found, output=output, verify=verify)
    context.exit(1 if verify and broken else 0)


def _tell(
    document: dict[str, Any], found: list[audit_checks.Check], *, output: str, verify: bool
) -> None:
    if output == "json":
        shown = [check.record() for check in found] if verify else document
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    elif verify:
        for line in audit_checks.lines(found):
            click.echo(printable(line))
    else:
        _print(open_console(), document, found)


def _asked(word: str, url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The audit of a decision, or of the last one about a job."""
    try:
        return ask("GET", url, f"/v1/decisions/{quote(word, safe='')}/audit", headers=headers)
    except RefusedAction as error:
        if error.reason not in ("unknown_decision", "not_found"):
            raise
    decisions = find_job(word, url, headers)["decisions"]
    if not decisions:
        raise NoDecision(f"nothing was decided about {word}: `gpuwarden why {word}` says why not")
    newest = quote(decisions[-1]["id"], safe="")
    return ask("GET", url, f"/v1/decisions/{newest}/audit", headers=headers)


def _saved(path: Path) -> dict[str, Any]:
    """An audit that was saved.

    Raises:
        InvalidInput: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        document = json.loads(content) if len(content) <= MAX_FILE_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"--file: {path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InvalidInput(
            f"--file: {path} is no {SCHEMA}: save one with `gpuwarden audit ID --output json`"
        )
    return document


def _verified(document: dict[str, Any]) -> list[audit_checks.Check]:
    with _whole():
        return audit_checks.checks(document)


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Look into a document that others may have changed.

    Raises:
        InvalidInput: something is not where it belongs, or is of another kind.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, ConsoleError) as e:
        raise InvalidInput(
            f"the audit is not whole: {type(e).__name__}: {e}. It is of another version, or was "
            "changed"
        ) from e


def _print(console: Console, document: dict[str, Any], found: list[audit_checks.Check]) -> None:
    decision, job, result = document["decision"], document["job"], document["result"]
    console.print(document["answer"])
    of = f" of {job['user']}" if job["user"] else ""
    console.print(f"Decision {decision['id']}: {decision['action']} {job['job_id']}{of}")
    for line in cause_lines(job["cause"]) if job["cause"] else ():
        console.print(line)
    freed = result["memory_freed"]
    if freed is not None:
        console.print(f"Freed: {freed / 2**30:.1f} GiB")
    for line in loss_lines(result["loss"]) if result["loss"] else ():
        console.print(f"Work lost, {line}")
    table = Table("TIME", "AFTER", "WHO", "WHAT", "", box=None, pad_edge=False)
    for moment in document["timeline"]:
        after = f"+{about(moment['since_last'])}" if moment["since_last"] >= 0.5 else ""
        table.add_row(moment["at"], after, moment["who"], moment["what"], moment["sentence"])
    console.print()
    console.print(table)
    _print_nodes(console, document)
    if document["missing"]:
        console.print()
        for item in document["missing"]:
            console.print(f"Not known: {item['what']}: {item['why']}.")
    console.print()
    for line in audit_checks.lines(found):
        console.print(line)
    if document["rule"]["text"]:
        console.print()
        console.print(f"The rule as it read ({document['rule']['hash']}):")
        console.print(document["rule"]["text"])


def _print_nodes(console: Console, document: dict[str, Any]) -> None:
    for node in document["nodes"]:
        console.print()
        outcome = node["outcome"] or node["state"]
        said = node["message"] or node["reason"]
        console.print(f"Node {node['host']}: {outcome}" + (f" ({said})" if said else ""))
        request = node["request"]
        console.print(f"  order {request['sha256'][:16]}, signed by key {request['key_id']}")
        for process in node["processes"]:
            console.print(f"  process {process['pid']}: {process['ended_by'] or 'survived'}")
        for card in node["cards"]:
            before, after = _gib(card["used_before"]), _gib(card["used_after"])
            console.print(f"  {card['uuid']}: {before} used before, {after} after")


def _gib(value: int | None) -> str:
    return "?" if value is None else f"{value / 2**30:.1f} GiB"
