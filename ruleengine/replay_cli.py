"""`gpuwarden rules replay`: what rules would have done, over the history that Prometheus keeps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpuwarden.consoles import open_console
from gpuwarden.diagnostics import did_you_mean, render_json
from gpuwarden.errors import InvalidInput
from gpuwarden.option_values import (
    config_option,
    prometheus_option,
    read_positive_seconds,
    span_options,
)
from gpuwarden.ruleengine import made_up_weeks, replay_people, replay_policies
from gpuwarden.ruleengine.dry_runs import COOL_DOWN_SECONDS
from gpuwarden.ruleengine.inventories import Expectation
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.path_patterns import matching
from gpuwarden.ruleengine.prometheus_settings import client_of
from gpuwarden.ruleengine.rehearsals import enforced
from gpuwarden.ruleengine.replay_grids import variants
from gpuwarden.ruleengine.replay_reports import document
from gpuwarden.ruleengine.replay_runs import Plan, replay
from gpuwarden.ruleengine.replay_texts import blocks, markdown, print_report
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.replay_policies import Policy
    from gpuwarden.ruleengine.replay_runs import Replay

DEFAULT_URL = "http://127.0.0.1:9090"
DEFAULT_SCRAPE_SECONDS = 5.0
DEFAULT_STEP_SECONDS = 15.0
_EXAMPLES = """\b
Examples:
  gpuwarden rules replay rules.d/*.yaml --from now-7d
  gpuwarden rules replay new.yaml --against /etc/gpuwarden/rules --config /etc/gpuwarden/engine.yaml
  gpuwarden rules replay rules.yaml --from 2026-11-20 -o markdown --fail-on 'regret>5%,exempt,caps'
  gpuwarden rules replay rules.yaml --sensitivity idle-held:gpu_utilization=3%,5%,10%@3m,10m,30m
  gpuwarden rules replay rules.d/*.yaml --ledger /var/lib/gpuwarden/ledger.sqlite
  gpuwarden rules replay rules.yaml --made-up-week"""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line says."""

    files: tuple[Path, ...]
    begin: float
    end: float
    url: str | None
    config: Path | None
    step: float | None
    scrape_interval: float | None
    chunk: float
    horizon: float
    ledger: Path | None
    against: tuple[Path, ...]
    sensitivity: str | None
    wanted: tuple[str, ...]
    as_written: bool
    made_up_week: bool


@click.command(
    epilog=_EXAMPLES, short_help="Say what rules would have done over Prometheus' history."
)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILES..."
)
@span_options(
    default="now-7d",
    begin="First tick: now-7d, 2026-11-20, or a time with its zone.",
    end="Last tick.",
)
@prometheus_option(
    f"The server that keeps the history.  [default: of --config, else {DEFAULT_URL}]"
)
@config_option("engine.yaml: its server, scrape interval, tick, nodes, teams and cool-down count.")
@click.option(
    "--step",
    callback=read_positive_seconds,
    metavar="DURATION",
    help="Between two ticks.  [default: the tick of --config, else 15s]",
)
@click.option(
    "--scrape-interval",
    callback=read_positive_seconds,
    metavar="DURATION",
    help="How often the nodes were scraped.  [default: of --config, else 5s]",
)
@click.option(
    "--chunk",
    callback=read_positive_seconds,
    metavar="DURATION",
    default="6h",
    show_default=True,
    help="How much is fetched at once; less where memory would not do. It changes no result.",
)
@click.option(
    "--horizon",
    callback=read_positive_seconds,
    metavar="DURATION",
    default="24h",
    show_default=True,
    help="A job that is at work again so soon after its end would be regretted.",
)
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The engine's ledger or a backup of it: keeps and pauses count as of then. It is only "
    "read; the engine may run.",
)
@click.option(
    "--against",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Rules to compare with, a file or a folder; may be given several times.",
)
@click.option(
    "--sensitivity",
    metavar="GRID",
    help="Other limits and windows of one signal: RULE:SIGNAL=LIMIT,LIMIT@WINDOW,WINDOW; "
    "RULE/STAGE:... in the condition of a stage.",
)
@click.option(
    "--rule",
    "wanted",
    multiple=True,
    metavar="ID",
    help="Only this rule; may be given several times.",
)
@click.option(
    "--as-written",
    is_flag=True,
    help="Leave every rule in its mode. Otherwise all are taken as if in enforce.",
)
@click.option(
    "--made-up-week",
    is_flag=True,
    help="Try it out on a made-up week of a small team, in a temporary Prometheus.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "markdown"]),
    default="table",
    show_default=True,
    help="For people, for programs, or for a merge request.",
)
@click.option(
    "--fail-on",
    metavar="POLICIES",
    help="Exit with 1 if exceeded: regret>5%, unknown>5%, terminations>N, new-terminations>N, "
    "flapping>N, stale>N, exempt, kept, caps; several with commas.",
)
@click.pass_context
def replay_command(
    context: click.Context, /, output: str, fail_on: str | None, **given: Any
) -> None:
    """Say what rules would have done over the history that Prometheus keeps.

    History is judged tick by tick by the live engine's own code, as if every rule's mode were
    enforce, and every notice had arrived at once. Nothing real is told or ended. Hours and cold
    starts count as of then; so do keeps and pauses with --ledger, else nobody has kept a job.

    Exit status: 0 done; 1 a policy of --fail-on is exceeded; 2 the files or flags are not usable,
    or there is no history; 3 the server fails.
    """
    asked = _Asked(**given)
    if asked.made_up_week and asked.ledger is not None:
        raise InvalidInput("--made-up-week has people of its own: leave --ledger out")
    policies = _policies(fail_on, ledger=asked.ledger)
    sets, count = _sets(asked, output)
    try:
        result = asyncio.run(_until_told(asked, sets))
    except asyncio.CancelledError:
        context.exit(128 + signal.SIGTERM)
    report = document(result, against=bool(asked.against), variants=count)
    found = replay_policies.outcomes(report, policies)
    report["policies"] = [
        {"policy": str(item.policy), "value": item.value, "exceeded": item.exceeded}
        for item in found
    ]
    if output == "json":
        click.echo(json.dumps(report, indent=2))
    elif output == "markdown":
        click.echo(markdown(blocks(report, found)))
    else:
        print_report(open_console(markup=True), blocks(report, found))
    failed = [item.sentence for item in found if item.exceeded]
    # For people they stand in the report itself.
    for sentence in (*(report["cautions"] if output == "json" else ()), *failed):
        click.echo(sentence, err=True)
    if failed:
        context.exit(1)


def _policies(text: str | None, *, ledger: Path | None) -> list[Policy]:
    try:
        found = replay_policies.parse_policies(text or "")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--fail-on") from error
    if ledger is None and any(policy.name == "kept" for policy in found):
        why = "kept: only a ledger knows who kept what: give --ledger"
        raise click.BadParameter(why, param_hint="--fail-on")
    return found


def _sets(asked: _Asked, output: str) -> tuple[list[tuple[str, RuleSet]], int]:
    """Every rule set by name, and how many of the last ones are variants."""
    interval = _interval(asked)
    rules = _chosen(_usable(asked.files, output, interval), asked.wanted)
    sets = [("replayed", rules)]
    if asked.against:
        files = tuple(file for path in asked.against for file in _files(path))
        sets.append(("against", _chosen(_usable(files, output, interval), asked.wanted, old=True)))
    grid = variants(rules, asked.sensitivity) if asked.sensitivity else []
    sets += grid
    if not asked.as_written:
        sets = [
            (name, enforced(known, frozenset(rule.id for rule in known.rules)))
            for name, known in sets
        ]
    return sets, len(grid)


def _interval(asked: _Asked) -> float:
    if asked.made_up_week:
        return made_up_weeks.INTERVAL_SECONDS
    if asked.scrape_interval is None and asked.config is not None:
        return load_settings(asked.config).values.scrape_interval
    return asked.scrape_interval or DEFAULT_SCRAPE_SECONDS


def _files(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    files = matching(path / "*.yaml")
    if not files:
        raise click.BadParameter(f"{path} holds no *.yaml", param_hint="--against")
    return files


def _usable(files: tuple[Path, ...], output: str, interval: float) -> RuleSet:
    checked = check_rule_files(files, scrape_interval=interval)
    if checked.rules is None:
        click.echo(render_json(checked.diagnostics) if output == "json" else checked.render())
        raise click.exceptions.Exit(2)
    return checked.rules


def _chosen(rules: RuleSet, wanted: Sequence[str], *, old: bool = False) -> RuleSet:
    """Only these rules; those that are compared with may lack some."""
    known = [rule.id for rule in rules.rules]
    for rule_id in wanted:
        if rule_id not in known and not old:
            hint = did_you_mean(rule_id, known) or f"there are {', '.join(known)}"
            raise click.BadParameter(f'there is no rule "{rule_id}"; {hint}', param_hint="--rule")
    if not wanted:
        return rules
    return rules.model_copy(
        update={"rules": tuple(rule for rule in rules.rules if rule.id in wanted)}
    )


async def _until_told(asked: _Asked, sets: Sequence[tuple[str, RuleSet]]) -> Replay:
    """Replay, until it is done or SIGTERM."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with _where(asked) as plan, _client(asked, plan) as client:
        with _bar() as bar:
            work = bar.add_task("replay", total=plan.ticks.count)
            return await replay(
                plan, sets, client, progress=lambda done, _all: bar.update(work, completed=done)
            )


def _client(asked: _Asked, plan: Plan) -> httpx.AsyncClient:
    """With the credentials of engine.yaml, but not for a server that it does not name."""
    if asked.config is None or asked.url is not None or asked.made_up_week:
        return httpx.AsyncClient(timeout=plan.timeout, trust_env=False)
    settings = load_settings(asked.config)
    return client_of(settings.values.prometheus, settings.path)


def _bar() -> Progress:
    """On standard error, and only where somebody sees it."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ticks, about"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


@contextlib.asynccontextmanager
async def _where(asked: _Asked) -> AsyncIterator[Plan]:
    """The plan; for as long as a temporary Prometheus is needed for it."""
    if not asked.made_up_week:
        yield _plan(asked)
        return
    async with temporary_prometheus(made_up_weeks.made_up_week().bodies()) as url:
        yield Plan(
            url,
            made_up_weeks.BEGIN,
            made_up_weeks.BEGIN + made_up_weeks.SECONDS,
            step=asked.step or made_up_weeks.INTERVAL_SECONDS,
            scrape_interval=made_up_weeks.INTERVAL_SECONDS,
            stretch=made_up_weeks.SECONDS / 3,  # few jobs, few samples
            horizon=asked.horizon,
        )


def _plan(asked: _Asked) -> Plan:
    now = time.time()
    begin, end = asked.begin, min(asked.end, now)
    if begin > now:
        raise InvalidInput("--from is in the future")
    if end < begin:
        raise InvalidInput("--to is before --from")
    people = None if asked.ledger is None else replay_people.read(asked.ledger)
    if asked.config is None:
        step = asked.step or DEFAULT_STEP_SECONDS
        interval = asked.scrape_interval or DEFAULT_SCRAPE_SECONDS
        return Plan(
            asked.url or DEFAULT_URL,
            begin,
            end,
            step=step,
            scrape_interval=interval,
            stretch=asked.chunk,
            horizon=asked.horizon,
            cool_down=COOL_DOWN_SECONDS,
            settle_after=max(3 * interval, 2 * step),
            people=people,
        )
    settings = load_settings(asked.config)
    values, directory = settings.values, RuleBook(settings).directory
    nodes = values.nodes
    expected = (
        Expectation(number=values.expected_nodes)
        if nodes is None
        else Expectation(names=frozenset(nodes.names), query=nodes.promql)
    )
    shards = values.prometheus.groups
    if asked.url is None and len(shards) > 1:
        raise InvalidInput(
            f"{asked.config}: prometheus.shards: a replay asks one server: give one that sees all "
            "of them (Thanos, Mimir, ...) by --prometheus"
        )
    return Plan(
        asked.url or shards[0][0],
        begin,
        end,
        step=asked.step or values.tick,
        scrape_interval=asked.scrape_interval or values.scrape_interval,
        stretch=asked.chunk,
        horizon=asked.horizon,
        expected=expected,
        teams={name: user.team for name, user in directory.users.items()},
        cool_down=values.cool_down,
        settle_after=values.settle_after,
        people=people,
    )
