"""`gpuwarden queue`: one list over the engine's jobs, why each waits, and when it will start."""

from __future__ import annotations

import importlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from zoneinfo import ZoneInfo

import click
from rich.live import Live
from rich.table import Table

from gpuwarden.consoles import open_console, print_table, printable
from gpuwarden.errors import GpuwardenError, RefusedAction, ServiceUnavailable
from gpuwarden.option_values import output_option
from gpuwarden.schedule_api import EntryState, ScheduleDocument
from gpuwarden.scheduling.callers import user_name
from gpuwarden.scheduling.daemon_clients import DaemonClient, daemon_options
from gpuwarden.scheduling.log_files import MAX_LINES, last_lines, opened_log, shown_line
from gpuwarden.scheduling.policy_checks import load_policy
from gpuwarden.scheduling.queue_texts import about_entry, age, commanded, found, row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuwarden.schedule_api import QueueEntry

DEFAULT_POLICY = Path("/etc/gpuwarden/policy.yaml")
_FOLLOW_SECONDS = 0.5
_OVER = (EntryState.DONE, EntryState.FAILED)
_HEADS = ("ID", "NAME", "USER", "TEAM", "PRIORITY", "STATE", "GPUS", "FOR", "EXPECTED", "WHY")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the queue is read: of the daemon or, without one, of the engine itself."""

    client: DaemonClient
    policy: Path

    def read(self) -> ScheduleDocument:
        """The schedule.

        Raises:
            ServiceUnavailable: neither answers.
        """
        try:
            return self.client.schedule()
        except ServiceUnavailable as error:
            if self.client.base is not None or not self.policy.exists():
                raise
            return self._of_the_engine(error)

    def _of_the_engine(self, why: ServiceUnavailable) -> ScheduleDocument:
        """The engine's own queue: without receipts, bookings and predictions."""
        now = time.time()
        policy = load_policy(self.policy, now=now)
        reader = _reader(policy.engine)
        if reader is None:
            raise why
        click.echo(f"no scheduler answers: this is {policy.engine}'s own queue", err=True)
        entries = tuple(reader(policy, now))
        return ScheduleDocument(policy.engine, "", now, entries=entries, timezone=policy.timezone)


def _reader(engine: str) -> Callable[[Any, float], Sequence[QueueEntry]] | None:
    """What reads an engine's queue and changes nothing, where it has that."""
    try:
        module = importlib.import_module(f"gpuwarden.scheduling.{engine}.driver")
    except ModuleNotFoundError:
        return None
    found: Callable[[Any, float], Sequence[QueueEntry]] | None = getattr(
        module, "read_entries", None
    )
    return found


@click.group(
    invoke_without_command=True,
    epilog="""
\b
Examples:
  gpuwarden queue --mine --all
  gpuwarden queue show 4711
  gpuwarden queue logs --follow 4711

\b
Exit status:
  0   told, or done
  1   the answer is no: there is no such job, or it is not yours
  2   wrong usage or input
  3   neither the scheduler nor the engine answers
""",
)
@click.option("-a", "--all", "over", is_flag=True, help="Also jobs that have ended.")
@click.option("-m", "--mine", is_flag=True, help="Only your own.")
@click.option("--team", help="Only of this team.")
@click.option("-w", "--watch", is_flag=True, help="Show it anew every few seconds, until Ctrl-C.")
@click.option(
    "--policy",
    envvar="GPUWARDEN_POLICY",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_POLICY,
    show_default=True,
    metavar="FILE",
    help="The cluster's policy, for the engine's own queue where no daemon answers.",
)
@output_option
@daemon_options
@click.pass_context
def queue(
    context: click.Context,
    over: bool,
    *,
    mine: bool,
    team: str | None,
    watch: bool,
    policy: Path,
    output: str,
    socket: Path,
    url: str | None,
    token_file: Path | None,
) -> None:
    """Show who waits for cards, who has them, and why.

    Jobs that wait stand in their order. EXPECTED is an interval with the number of past cases it
    rests on (n=12), or the engine's own plan; where nobody can tell, it is empty. What ends have
    come true is told by `gpuwarden queue calibration`.
    """
    source = _Source(DaemonClient(socket, url, token_file=token_file), policy)
    context.obj = source
    if context.invoked_subcommand is not None:
        return
    user = user_name(os.getuid()) if mine else None

    def chosen(document: ScheduleDocument) -> list[QueueEntry]:
        return [
            item
            for item in document.entries
            if (over or item.state not in _OVER)
            and user in (None, item.user)
            and team in (None, item.team)
        ]

    if output == "json":
        document = source.read()
        data = json.loads(document.encode())
        ids = {item.id for item in chosen(document)}
        data["entries"] = [item for item in data["entries"] if item["id"] in ids]
        click.echo(json.dumps(data, indent=2))
    elif watch:
        _watch(source, chosen)
    else:
        document = source.read()
        entries = chosen(document)
        if entries:
            now, zone = time.time(), ZoneInfo(document.timezone)
            print_table(_HEADS, [row(item, now=now, zone=zone) for item in entries])
        else:
            click.echo("nothing waits, and nothing runs" if not over else "there are no jobs")
        _remarks(document)


def _table(document: ScheduleDocument, entries: Sequence[QueueEntry], now: float) -> Table:
    table = Table(*_HEADS, box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    zone = ZoneInfo(document.timezone)
    for item in entries:
        table.add_row(*(printable(text) for text in row(item, now=now, zone=zone)))
    return table


def _remarks(document: ScheduleDocument) -> None:
    if old := age(document, time.time()):
        click.echo(old, err=True)
    for problem in document.problems:
        click.echo(f"problem: {printable(problem.words)} [{problem.code}]", err=True)
    if document.left_out:
        click.echo(f"{document.left_out} rows more do not fit", err=True)


def _watch(source: _Source, chosen: Callable[[ScheduleDocument], list[QueueEntry]]) -> None:
    console = open_console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            try:
                document = source.read()
                table = _table(document, chosen(document), time.time())
                table.caption = age(document, time.time()) or None
                live.update(table, refresh=True)
            except ServiceUnavailable as error:
                live.update(printable(str(error)), refresh=True)
            time.sleep(5)


@queue.command()
@click.argument("name", metavar="ID|NAME")
@output_option
@click.pass_obj
def show(source: _Source, name: str, *, output: str) -> None:
    """Show one job: why it waits, what would have to end, and the receipts of its preemptions."""
    document = source.read()
    entry = found(document, name)
    if entry is None:
        raise RefusedAction("unknown", f"there is no job {name}: see gpuwarden queue -a")
    if output == "json":
        data = json.loads(document.encode())
        shown = next(item for item in data["entries"] if item["id"] == entry.id)
        shown["preemptions"] = [
            item for item in data["preemptions"] if entry.id in (item["victim"], item["successor"])
        ]
        click.echo(json.dumps(shown, indent=2))
        return
    zone = ZoneInfo(document.timezone)
    for line in about_entry(entry, document, now=time.time(), zone=zone):
        click.echo(printable(line))
    if old := age(document, time.time()):
        click.echo(old, err=True)


@queue.command()
@click.argument("name", metavar="ID|NAME")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=1, max=MAX_LINES),
    default=100,
    show_default=True,
    help="The last so many.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until Ctrl-C.")
@click.pass_obj
def logs(source: _Source, name: str, *, lines: int, follow: bool) -> None:
    """Show what a job of the local queue has written: all its attempts are in one file.

    The file is opened by you, with your own rights.
    """
    entry = None if name.isdigit() else found(source.client.schedule(), name)
    job = name if entry is None else entry.id
    answer = source.client.ask("GET", f"/v1/jobs/{quote(job, safe='')}/log")
    with opened_log(Path(str(answer.get("path", "")))) as file:
        for line in last_lines(file, lines):
            click.echo(printable(line))
        while follow:
            for part in file:
                click.echo(printable(shown_line(part)))
            time.sleep(_FOLLOW_SECONDS)


@queue.command()
@click.option(
    "--from", "begin", default="now-90d", show_default=True, metavar="WHEN", help="Made since then."
)
@output_option
@click.pass_obj
def calibration(source: _Source, begin: str, *, output: str) -> None:
    """Say how often what was foretold came true.

    For each number of past cases that predictions rested on: how many of the moments lay in their
    intervals, with the interval of the true share (95 %). Jobs that were cancelled or asked to
    leave settle nothing.
    """
    document = source.client.ask("GET", "/v1/calibration", parameters={"from": begin})
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    if not document["bins"]:
        click.echo("nothing that was foretold has come to pass yet")
    else:
        table = Table("OF", "FROM CASES", box=None, pad_edge=False)
        for head in ("PREDICTIONS", "INSIDE", "TRUE SHARE", "EARLIER", "LATER"):
            table.add_column(head, justify="right")
        for item in document["bins"]:
            table.add_row(
                "starts" if item["kind"] == "start" else "ends",
                _cases(item),
                str(item["count"]),
                f"{100 * item['share']:.0f} %",
                f"{100 * item['low']:.0f} to {100 * item['high']:.0f} %",
                str(item["early"]),
                str(item["late"]),
            )
        open_console().print(table)
    click.echo(f"{document['open']} are open, {document['void']} became void")


def _cases(item: dict[str, Any]) -> str:
    if item["most"] == 0:
        return "the engine's plan"
    return (
        f"{item['least']} and more" if item["most"] is None else f"{item['least']}-{item['most']}"
    )


def _command(verb: str, text: str) -> None:
    @queue.command(verb, help=text)
    @click.argument("names", metavar="ID|NAME...", nargs=-1, required=True)
    @click.pass_context
    def command(context: click.Context, names: tuple[str, ...]) -> None:
        source: _Source = context.obj
        worst = 0
        for name in names:
            try:
                entry = found(source.client.schedule(), name, open_only=True)
                job = name if entry is None else entry.id
                source.client.ask("POST", f"/v1/jobs/{quote(job, safe='')}/{verb}", body={})
                click.echo(printable(commanded(verb, job, entry)))
            except GpuwardenError as error:
                click.echo(f"{name}: {error}", err=True)
                worst = max(worst, error.exit_code)
        context.exit(worst)


_command("cancel", "Take jobs of the local queue out; one that runs is asked to leave for good.")
_command("hold", "Have jobs of the local queue, or Kueue's, wait until they are released.")
_command("release", "Let held jobs of the local queue, or Kueue's, wait for their turn again.")
