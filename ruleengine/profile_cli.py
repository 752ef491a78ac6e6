"""`gpuwarden profiles`: learn what trainings need here, and compare it with what is written."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gpuwarden.consoles import open_console
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.option_values import (
    config_option,
    prometheus_option,
    read_positive_seconds,
    span_options,
)
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.profile_comparisons import (
    amounts,
    comparison_document,
    comparisons,
)
from gpuwarden.ruleengine.profile_fits import SIGNALS, Demands, fits
from gpuwarden.ruleengine.profile_histories import Period, collect
from gpuwarden.ruleengine.profile_texts import (
    difference,
    document,
    kind_words,
    merged,
    profile_fields,
    usable,
    yaml_text,
)
from gpuwarden.ruleengine.prometheus_settings import client_of
from gpuwarden.ruleengine.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuwarden.ruleengine.profile_fits import Fit, Run
    from gpuwarden.ruleengine.profile_histories import Collector

DEFAULT_URL = "http://127.0.0.1:9090"
MAX_WINDOWS = 500_000
"""Of 5 minutes, more than four years: a slip of the pen."""
SHIPPED = Path(__file__).parent / "rules" / "profiles.yaml"
_FILE = click.Path(path_type=Path, dir_okay=False)
_LEARN_EXAMPLES = """\b
Examples:
  gpuwarden profiles learn --from now-28d > learnt.yaml
  gpuwarden profiles learn --config engine.yaml --min-runs 5 --min-users 2 -o table
  gpuwarden profiles learn --config engine.yaml --merge rules/profiles.yaml --diff"""


def _history_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        span_options(
            default="now-28d",
            begin="Begin of the history: now-7d, 2026-11-20, or a time with its zone.",
            end="Its end.",
        ),
        config_option("engine.yaml: its servers, credentials and scrape interval."),
        click.option(
            "--window",
            metavar="DURATION",
            default="5m",
            show_default=True,
            callback=read_positive_seconds,
            help="Length over which a mean is taken; that of the rules that use the profiles.",
        ),
        click.option(
            "--scrape-interval",
            "interval",
            metavar="DURATION",
            callback=read_positive_seconds,
            help="How often the nodes were scraped.  [default: of --config, else 5s]",
        ),
        click.option(
            "--timeout",
            "seconds",
            metavar="DURATION",
            default="60s",
            show_default=True,
            callback=read_positive_seconds,
            help="For one query.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class _Asked:
    """Where the history is."""

    begin: float
    end: float
    config: Path | None
    window: float
    interval: float | None
    seconds: float

    def period(self, scrape_interval: float, **more: Any) -> Period:
        """What is looked at."""
        return Period(
            self.begin,
            self.end,
            window=self.window,
            scrape_interval=self.interval or scrape_interval,
            **more,
        )


@click.group()
def profiles() -> None:
    """Say what trainings need here: learn it from what ran, and compare.

    A profile in a rule file says how fast a model with its batch and image size trains on a card,
    and what memory and utilization that takes; rules with `profile:` compare jobs with it.
    """


@profiles.command(epilog=_LEARN_EXAMPLES)
@_history_options
@prometheus_option(f"The server.  [default: of --config, else {DEFAULT_URL}]")
@click.option(
    "--min-runs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Healthy runs of a kind that a profile needs.",
)
@click.option(
    "--min-users",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="By so many people: what one person's jobs say of themselves is then no profile.",
)
@click.option(
    "--min-days",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="On so many days.",
)
@click.option(
    "--min-trained",
    "trained",
    metavar="DURATION",
    default="30m",
    show_default=True,
    callback=read_positive_seconds,
    help="How long a run must have trained, warm-up left out.",
)
@click.option(
    "--warm-up",
    "warm_up",
    metavar="DURATION",
    default="5m",
    show_default=True,
    callback=read_positive_seconds,
    help="Of each attempt, left out.",
)
@click.option(
    "--allow-rule",
    "allowed",
    multiple=True,
    default=("off-profile",),
    show_default=True,
    metavar="ID",
    help="Learn from runs although they broke this rule; may be given several times.",
)
@click.option(
    "--merge",
    type=_FILE,
    metavar="FILE",
    help="Put the profiles into this rule file; everything else in it stays, comments too.",
)
@click.option(
    "--diff", is_flag=True, help="With --merge: show what would change, and change nothing."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["yaml", "table", "json"]),
    default="yaml",
    show_default=True,
    help="A rule file, a table for people, or JSON.",
)
@click.pass_context
def learn(
    context: click.Context,
    *,
    begin: float,
    end: float,
    config: Path | None,
    window: float,
    interval: float | None,
    seconds: float,
    url: str | None,
    min_runs: int,
    min_users: int,
    min_days: int,
    trained: float,
    warm_up: float,
    allowed: tuple[str, ...],
    merge: Path | None,
    diff: bool,
    output: str,
) -> None:
    """Fit profiles to the healthy runs in Prometheus' history.

    For every model, batch, image size, AMP, card and number of cards: the median over runs of
    throughput, memory and utilization, and how far healthy runs lie from it as tolerance. A run is
    healthy if it broke no rule, trained long enough, and its trainer told what it trains; windows
    in which it shared a card, was throttled or lacks samples do not count. Runs that differ from
    all others are left out and named. Too little is told, and is no profile.

    Look before you use them: a cluster on which all runs starve for data teaches that starving is
    healthy. `gpuwarden profiles show` puts each beside the estimate by formula.

    Exit status: 0 at least one profile was learnt; 1 none; 2 wrong usage; 3 the server fails.
    """
    if diff and merge is None:
        raise click.UsageError("--diff goes with --merge")
    asked = _Asked(begin, end, config, window, interval, seconds)
    runs, refused = _collected(asked, url, warm_up=warm_up, allowed=allowed)
    demands = Demands(min_runs, min_users, min_days, trained)
    found = fits(runs, demands)
    learnt = [fit for fit in found if not usable(fit)]
    if output == "json":
        click.echo(json.dumps(document(found, refused), indent=2))
    elif output == "table":
        _table(learnt)
    elif merge is None and learnt:
        told = f"Learnt by `gpuwarden profiles learn`, {_day(begin)} to {_day(end)}, UTC."
        click.echo(yaml_text(learnt, told=told), nl=False)
    if output != "json":
        _tell(found, refused)
    if merge is not None and learnt:
        _merge(merge, learnt, diff=diff)
    if not learnt:
        click.echo(
            f"No profile was learnt from {_day(begin)} to {_day(end)}: "
            f"{len(runs)} runs were seen, of {len(found)} kinds.",
            err=True,
        )
        context.exit(1)


@profiles.command()
@click.argument("files", nargs=-1, type=_FILE, metavar="[FILES]...")
@_history_options
@prometheus_option("The server, to compare with what runs measured.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def show(
    files: tuple[Path, ...],
    *,
    begin: float,
    end: float,
    config: Path | None,
    window: float,
    interval: float | None,
    seconds: float,
    url: str | None,
    output: str,
) -> None:
    """Show profiles beside the estimate by formula and, with a server, beside what runs measured.

    FILES are rule files; those of --config by default, else the profiles that gpuwarden ships.
    With --prometheus or --config each profile is compared with the runs since --from that it fits,
    and kinds of trainings that no profile fits are listed after them.
    """
    if not files:
        files = load_settings(config).rule_files() if config is not None else (SHIPPED,)
    rules = load_rule_files(files)
    runs: list[Run] = []
    if url is not None or config is not None:
        asked = _Asked(begin, end, config, window, interval, seconds)
        runs, _ = _collected(asked, url)
    found = comparisons(rules.profiles, runs)
    if output == "json":
        click.echo(json.dumps(comparison_document(found), indent=2))
        return
    heads = ["TRAINING", "SIGNAL", "PROFILE", "ESTIMATE"]
    heads += ["MEASURED", "RUNS", "OFF", ""] if runs else []
    table = Table(*heads, box=None, pad_edge=False)
    before = ""
    for item in found:
        profile, band, measured, deviation = amounts(item)
        words = "" if item.words == before else item.words
        seen = (measured, str(item.runs), deviation, item.remark) if runs else ()
        table.add_row(words, item.signal, profile, band, *seen)
        before = item.words
    open_console().print(table)


def _collected(asked: _Asked, url: str | None, **more: Any) -> tuple[list[Run], dict[str, str]]:
    """Runs of the history, and jobs that are none."""
    settings = None if asked.config is None else load_settings(asked.config)
    shards: Sequence[Sequence[str]] = ((url or DEFAULT_URL,),)
    scrape_interval = 5.0
    if settings is not None:
        scrape_interval = settings.values.scrape_interval
        shards = shards if url is not None else settings.values.prometheus.groups
    period = asked.period(scrape_interval, **more)
    count = (period.end - period.begin) / period.window
    if count < 1:
        raise click.UsageError("--from must be at least one --window before --to")
    if count > MAX_WINDOWS:
        raise click.UsageError(
            f"{count:.0f} windows are too many: at most {MAX_WINDOWS}, by a later --from"
        )

    async def all_shards() -> tuple[list[Run], dict[str, str]]:
        client = (
            httpx.AsyncClient(trust_env=False)
            if settings is None
            else client_of(settings.values.prometheus, settings.path)
        )
        client.timeout = httpx.Timeout(asked.seconds)
        runs: list[Run] = []
        refused: dict[str, str] = {}
        async with client:
            with Progress(console=Console(stderr=True), transient=True) as bar:
                for shard in shards:
                    collector = await _of_shard(shard, client, period, asked.seconds, bar)
                    runs += collector.runs()
                    refused |= collector.refused
        return runs, refused

    return asyncio.run(all_shards())


async def _of_shard(
    replicas: Sequence[str],
    client: httpx.AsyncClient,
    period: Period,
    seconds: float,
    bar: Progress,
) -> Collector:
    """Runs of a shard, all from one of its replicas: the first that answers to the end."""
    for url in replicas[:-1]:
        try:
            return await collect(url, client, period, seconds=seconds, told=_shown(bar, url))
        except ServiceUnavailable as error:
            click.echo(f"{url} fails ({error}): the next replica is asked", err=True)
    url = replicas[-1]
    try:
        return await collect(url, client, period, seconds=seconds, told=_shown(bar, url))
    except ServiceUnavailable as error:
        raise ServiceUnavailable(
            f"Prometheus at {url}: {error}: is it running, and is its address right?"
        ) from error


def _shown(bar: Progress, words: str) -> Callable[[float], None]:
    task = bar.add_task(words, total=1.0)

    def told(share: float) -> None:
        bar.update(task, completed=share)

    return told


def _table(learnt: Sequence[Fit]) -> None:
    table = Table(
        "TRAINING",
        "RUNS",
        "PEOPLE",
        *(name.upper() for name in SIGNALS),
        "TOLERANCE",
        box=None,
        pad_edge=False,
    )
    for fit in learnt:
        fields = profile_fields(fit)
        table.add_row(
            kind_words(fit.kind),
            str(len(fit.runs)),
            str(fit.users),
            *(str(fields.get(name, "")) for name in SIGNALS),
            fields["tolerance"],
        )
    open_console().print(table)


def _tell(found: Sequence[Fit], refused: dict[str, str]) -> None:
    """What was not learnt, and why, on the other stream."""
    for fit in found:
        why = usable(fit)
        if why:
            click.echo(f"No profile of {kind_words(fit.kind)}: {why}", err=True)
        for signal, what in fit.disagreed.items() if not why else ():
            click.echo(f"  no {signal} of {kind_words(fit.kind)}: {what}", err=True)
        for item in fit.left:
            jobs = ", ".join(item.run.jobs)
            click.echo(f"  left out: run {item.run.run_id} ({jobs}): {item.why}", err=True)
    for job_id, why in refused.items():
        click.echo(f"Not learnt from {job_id}: {why}", err=True)


def _merge(path: Path, learnt: Sequence[Fit], *, diff: bool) -> None:
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else "version: 1\n"
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}", param_hint="--merge") from error
    new = merged(path, old, learnt)
    click.echo(difference(old, new, path), nl=False)
    if diff or new == old:
        return
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as part:
            part.write(new)
        Path(part.name).chmod(mode)
        Path(part.name).replace(path)
    except OSError as error:
        message = f"{path} cannot be written: {error}"
        raise click.BadParameter(message, param_hint="--merge") from error


def _day(moment: float) -> str:
    return f"{dt.datetime.fromtimestamp(moment, tz=dt.UTC):%Y-%m-%d}"
