"""`gpuwarden report`: what the fleet did over days, for people, programs and papers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gpuwarden.clock import SystemClock
from gpuwarden.consoles import open_console, printable
from gpuwarden.errors import InvalidInput
from gpuwarden.fields import known_zone
from gpuwarden.option_values import (
    config_option,
    prometheus_option,
    read_positive_seconds,
    read_url,
)
from gpuwarden.ruleengine.prometheus_settings import client_of
from gpuwarden.ruleengine.reports import plans, runs
from gpuwarden.ruleengine.reports.pages import page
from gpuwarden.ruleengine.reports.pdfs import pdf
from gpuwarden.ruleengine.reports.periods import last_week, moment_in, period_of
from gpuwarden.ruleengine.reports.sendings import Order, send_due
from gpuwarden.ruleengine.reports.tables import table
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from gpuwarden.ruleengine.reports.periods import Period
    from gpuwarden.ruleengine.settings import Settings

_T = TypeVar("_T")

DEFAULT_URL: Final = "http://127.0.0.1:9090"
FORMATS: Final = ("html", "json", "csv", "pdf")
_EXAMPLES = """\b
Examples:
  gpuwarden report --config /etc/gpuwarden/engine.yaml -o week.html
  gpuwarden report --config engine.yaml --team vision --compare previous -o vision.html
  gpuwarden report --prometheus http://prometheus:9090 --from 2026-09-01 --to 2026-12-01 --plan
  gpuwarden report --config engine.yaml --from now-30d --output csv -o - | column -s, -t"""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line says."""

    begin: str | None
    end: str | None
    team: str | None
    compare: str | None
    compare_begin: str | None
    compare_end: str | None
    zone: str | None
    config: Path | None
    url: str | None
    ledger: Path | None
    chunk: float | None
    engine: str | None


def _read_zone(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        return known_zone(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(epilog=_EXAMPLES, short_help="Say what the fleet did over days.")
@click.option(
    "--from",
    "begin",
    metavar="WHEN",
    help="First moment: 2026-11-20 (midnight in --zone), now-30d, or a time with its zone.  "
    "[default: seven whole days before --to]",
)
@click.option(
    "--to",
    "end",
    metavar="WHEN",
    help="First moment that does not count.  [default: last midnight]",
)
@click.option("--team", metavar="NAME", help="Only this team's jobs; others' names are pseudonyms.")
@click.option(
    "--compare",
    type=click.Choice(["previous"]),
    help="Compare with the time of the same length just before.",
)
@click.option(
    "--compare-from", "compare_begin", metavar="WHEN", help="Compare with a time from ..."
)
@click.option("--compare-to", "compare_end", metavar="WHEN", help="... to.")
@click.option(
    "--output",
    "form",
    type=click.Choice(FORMATS),
    help="Form of the report.  [default: by the ending of FILE, else html]",
)
@click.option(
    "-o",
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=Path("-"),
    metavar="FILE",
    help="Where to; it is replaced as a whole.  [default: standard output]",
)
@config_option("engine.yaml: its Prometheus, ledger, directory, zone and Slurm.")
@prometheus_option(
    f"The server that keeps the history.  [default: of --config, else {DEFAULT_URL}]"
)
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The engine's ledger or a backup of it; only read.  [default: of --config]",
)
@click.option(
    "--zone",
    callback=_read_zone,
    metavar="NAME",
    help="Whose days and hours, such as Europe/Berlin.  [default: of the rules, else UTC]",
)
@click.option(
    "--chunk",
    callback=read_positive_seconds,
    metavar="DURATION",
    help="Longest time that one query covers, where the server needs it shorter. It changes no "
    "figure.",
)
@click.option(
    "--engine.url",
    "engine",
    callback=read_url,
    metavar="URL",
    help="Base address for links to the engine's pages.  [default: external_url of --config]",
)
@click.option(
    "--plan", "plan_only", is_flag=True, help="Only say what would be asked of Prometheus."
)
@click.option(
    "--send",
    is_flag=True,
    help="Mail the weekly reports that are due (`reports` of engine.yaml), each once to each "
    "address. A timer runs it every hour.",
)
@click.option("--again", is_flag=True, help="With --send: also what was sent before.")
@click.option(
    "--dry-run", "dry", is_flag=True, help="With --send: only say what is due, and to whom."
)
@click.pass_context
def report(
    context: click.Context,
    /,
    form: str | None,
    file: Path,
    *,
    plan_only: bool,
    send: bool,
    again: bool,
    dry: bool,
    **given: Any,
) -> None:
    """Say what the fleet did, what was wasted, and what changed, over days of history.

    Exit status: 0 done; 1 a report could not be sent; 2 the flags are not usable, or there is no
    history; 3 Prometheus fails or answers in part: then there is no report.
    """
    asked = _Asked(**given)
    if send:
        context.exit(asyncio.run(_sent(asked, Order(asked.team, again, dry))))
    if again or dry:
        raise click.UsageError("--again and --dry-run belong to --send")
    if str(file) in FORMATS:
        raise click.UsageError(f"-o names a file: `-o report.{file}`, or `--output {file} | ...`")
    chosen = form or _form_of(file)
    if str(file) == "-" and not plan_only and chosen in ("html", "pdf") and sys.stdout.isatty():
        raise click.UsageError(f"{chosen} is not for a terminal: give -o FILE, or `-o - | ...`")
    try:
        if plan_only:
            asyncio.run(_until_told(_plan(asked, chosen)))
            return
        found, engine = asyncio.run(_until_told(_made(asked)))
    except asyncio.CancelledError:
        context.exit(128 + signal.SIGTERM)
    write(file, rendered(found, chosen, engine=engine))
    if str(file) != "-":
        click.echo("\n".join(found["answer"]))
        for caution in found["cautions"]:
            click.echo(caution, err=True)
        click.echo(f"{file}")


def rendered(found: dict[str, Any], form: str, *, engine: str = "") -> bytes:
    """The document in one of `FORMATS`.

    Raises:
        MissingExtra: PDF needs a library that is not there.
    """
    if form == "json":
        return f"{json.dumps(found, indent=2, ensure_ascii=False)}\n".encode()
    if form == "csv":
        return table(found).encode()
    text = page(found, engine=engine)
    return pdf(text) if form == "pdf" else text.encode()


def write(file: Path, content: bytes) -> None:
    """Put a report into its place: whole, or not at all.

    Raises:
        InvalidInput: it cannot be written there.
    """
    if str(file) == "-":
        click.echo(content, nl=False)
        return
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InvalidInput(f"-o: {file} cannot be written: {error.strerror}") from error


def _form_of(file: Path) -> str:
    ending = file.suffix.removeprefix(".").lower()
    return ending if ending in FORMATS else "html"


async def _until_told(work: Awaitable[_T]) -> _T:
    """Until it is done or SIGTERM."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


async def _made(asked: _Asked) -> tuple[dict[str, Any], str]:
    settings = None if asked.config is None else load_settings(asked.config)
    now = time.time()
    period, earlier = periods(asked, zone_of(asked.zone, settings), now)
    async with _sources(asked, settings) as given:
        sources = await given.answering()
        reader = await sources.reader(asked.team, min(period.end, now))
        with _bar() as told:
            found = await runs.report(
                sources, period, reader, earlier=earlier, now=now, progress=told
            )
    engine = asked.engine or ("" if settings is None else settings.values.external_url)
    return found, engine


async def _sent(asked: _Asked, order: Order) -> int:
    """Send what is due; the exit status."""
    if asked.config is None:
        raise click.UsageError("--send needs --config: engine.yaml says who gets a report")
    settings = load_settings(asked.config)
    async with _sources(asked, settings) as sources:
        results = await send_due(settings, sources, SystemClock(), order)
    for result in results:
        click.echo(printable(result.line), err=result.failed)
    return 1 if any(result.failed for result in results) else 0


async def _plan(asked: _Asked, form: str) -> None:
    settings = None if asked.config is None else load_settings(asked.config)
    now = time.time()
    period, earlier = periods(asked, zone_of(asked.zone, settings), now)
    rows: list[dict[str, object]] = []
    async with _sources(asked, settings) as given:
        sources = await given.answering()
        reader = await sources.reader(asked.team, min(period.end, now))
        for which, each in (("now", period), ("before", earlier)):
            if each is not None:
                _, outlook = await runs.look(sources, each, reader)
                rows += [{"period": which, **row} for row in plans.rows(outlook.plan, each)]
                rows.append({"period": which, **plans.card_row(outlook)})
    if form == "json":
        click.echo(json.dumps(rows, indent=2))
        return
    shown = Table("PERIOD", "MEASURE", "FROM", "QUERIES", "STEP", "HOURS", "POINTS", box=None)
    for row in rows:
        shown.add_row(
            *(str(row[name]) for name in ("period", "measure", "source", "queries")),
            f"{row['step_seconds']:g} s",
            str(row["hours"]),
            f"{row['points']:,}",
        )
    open_console().print(shown)
    queries = sum(int(str(row["queries"])) for row in rows)
    points = sum(int(str(row["points"])) for row in rows)
    click.echo(
        f"{queries} queries, at most {plans.BUDGET_POINTS:,} points held at once of {points:,} in "
        f"all; {runs.QUERY_SECONDS:g} s for each."
    )


def zone_of(zone: str | None, settings: Settings | None) -> str:
    """Whose days are told: as asked for, else the rules', else UTC."""
    if zone is not None:
        return zone
    return "UTC" if settings is None else RuleBook(settings).rules.timezone


def periods(asked: _Asked, zone: str, now: float) -> tuple[Period, Period | None]:
    """What the report is about, and what it is compared with.

    Raises:
        InvalidInput: they cannot be.
    """
    today = moment_in("now", zone, now=now)
    begin, end, _ = last_week(today, zone, weekday=_weekday(today, zone), minute=0)
    if asked.end is not None:
        end = min(moment_in(asked.end, zone, now=now), now)
        begin = end - 7 * 86400
    if asked.begin is not None:
        begin = moment_in(asked.begin, zone, now=now)
        if asked.end is None and begin >= end:
            end = now
    if begin > now:
        raise InvalidInput("--from is in the future")
    period = period_of(begin, end, zone)
    if asked.compare_begin is None and asked.compare_end is None:
        return period, period.before() if asked.compare else None
    if asked.compare or asked.compare_begin is None or asked.compare_end is None:
        raise InvalidInput("give --compare previous, or both --compare-from and --compare-to")
    other = [moment_in(text, zone, now=now) for text in (asked.compare_begin, asked.compare_end)]
    return period, period_of(other[0], min(other[1], now), zone, bins=period.bin)


def _weekday(now: float, zone: str) -> int:
    return period_of(now - 86400, now, zone).local(now).weekday()


@contextlib.asynccontextmanager
async def _sources(asked: _Asked, settings: Settings | None) -> AsyncIterator[runs.Sources]:
    if settings is None:
        async with httpx.AsyncClient(trust_env=False) as client:
            yield runs.Sources(
                asked.url or DEFAULT_URL, client, ledger=asked.ledger, chunk=asked.chunk
            )
        return
    # The credentials of engine.yaml are for its own server alone.
    client = (
        client_of(settings.values.prometheus, settings.path)
        if asked.url is None
        else httpx.AsyncClient(trust_env=False)
    )
    async with client:
        yield runs.Sources.of(
            settings, client, url=asked.url, ledger=asked.ledger, chunk=asked.chunk
        )


@contextlib.contextmanager
def _bar() -> Iterator[Any]:
    """A progress bar on standard error, and only where somebody sees it."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("queries, about"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def told(what: str, done: int, whole: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=whole)
        bar.update(tasks[what], completed=done, total=whole)

    with bar:
        yield told
