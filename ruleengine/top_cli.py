"""`gpuwarden top`: the fleet in a terminal, live; once, or as JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import read_secret
from gpuwarden.option_values import output_option, read_positive_seconds
from gpuwarden.ruleengine.clients import token_headers, token_option, url_option
from gpuwarden.ruleengine.fleet_documents import MAX_ROWS, SORTS
from gpuwarden.ruleengine.top_fetches import Fetcher, Wanted
from gpuwarden.ruleengine.top_frames import frame, page, rows_of, scrolled
from gpuwarden.ruleengine.top_layouts import span_texts
from gpuwarden.ruleengine.top_pictures import Question
from gpuwarden.ruleengine.top_screens import Screen, painted
from gpuwarden.ruleengine.top_sources import EngineSource, ExporterSource
from gpuwarden.ruleengine.top_views import Mode, View, press, settled

if TYPE_CHECKING:
    from gpuwarden.ruleengine.top_pictures import Picture
    from gpuwarden.ruleengine.top_sources import Source

MOST_ROWS: Final = 10_000
"""Of one picture on paper."""
_PAPER_COLUMNS: Final = 200
_FILE = click.Path(path_type=Path, dir_okay=False)


_EXAMPLES = """\b
Examples:
  gpuwarden top --broken                    what breaks a rule, the gravest first
  gpuwarden top --exporter gpu-1            a machine without an engine
  gpuwarden top --team vision -o json       for a script
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--exporter",
    "exporters",
    multiple=True,
    metavar="URL",
    help="Ask this exporter instead of an engine; repeatable. Port 9835 and /metrics may be left "
    "out. For a machine without an engine: the same columns, and no verdicts.",
)
@click.option(
    "--exporter.username", "username", metavar="NAME", help="Of the exporters' basic_auth_users."
)
@click.option(
    "--exporter.password-file", "password_file", type=_FILE, help="Its password, in a file."
)
@click.option("--ca-file", type=_FILE, help="Certificates for the exporters' TLS.")
@click.option(
    "--user", default="", metavar="TEXT", help="Only jobs of users with this in the name."
)
@click.option("--team", default="", metavar="NAME", help="Only jobs of this team.")
@click.option(
    "--node", default="", metavar="TEXT", help="Only jobs on nodes with this in the name."
)
@click.option("--rule", default="", metavar="ID", help="Only jobs with an open case of this rule.")
@click.option("--broken", is_flag=True, help="Only jobs with an open case.")
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default=SORTS[0],
    show_default=True,
    help="What is in the first row: the gravest verdict, the least use, the most memory, ...",
)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option(
    "--limit",
    type=click.IntRange(1, MOST_ROWS),
    default=100,
    show_default=True,
    metavar="N",
    help="Rows at most, with --once and -o json; on a screen as many as it has.",
)
@click.option(
    "--interval",
    callback=read_positive_seconds,
    default="5s",
    show_default=True,
    metavar="DURATION",
    help="Time between two questions. The engine judges once per tick (15s by default).",
)
@click.option("--once", is_flag=True, help="Print one picture and leave.")
@click.option(
    "--ascii",
    "ascii_only",
    is_flag=True,
    help="Print nothing but ASCII; the default where the terminal's encoding is not UTF-8.",
)
@token_option
@url_option
@output_option
def top(
    exporters: tuple[str, ...],
    username: str | None,
    *,
    password_file: Path | None,
    ca_file: Path | None,
    user: str,
    team: str,
    node: str,
    rule: str,
    broken: bool,
    sort: str,
    reverse: bool,
    limit: int,
    interval: float,
    once: bool,
    ascii_only: bool,
    token_file: Path | None,
    url: str,
    output: str,
) -> None:
    """Watch the fleet: who uses which GPU, for what, how well, and what the rules say.

    On a terminal the picture renews itself, and ? explains its keys. Where the output is no
    terminal, with --once or with -o json, it is printed once. A picture that is old is marked so:
    the last one stays when the engine is away, and goes on when it is back. NO_COLOR is heeded.

    -o json prints gpuwarden.top/v1: source, places, age, stale, problem, and fleet, which is the
    answer of GET /v1/fleet (gpuwarden.fleet/v1, described in /v1/openapi.json).

    Exit status: 0 shown; 2 wrong usage; 3 the engine, or every exporter, does not answer (with
    --once and -o json: a screen waits for it).
    """
    if exporters:
        source: Source = ExporterSource(
            exporters, login=_login(username, password_file), ca_file=ca_file
        )
    elif username is not None or password_file is not None or ca_file is not None:
        raise click.UsageError(
            "--exporter.username, --exporter.password-file and --ca-file need --exporter"
        )
    else:
        source = EngineSource(url, token_headers(token_file))
    question = Question(
        user, team, node, rule=rule, broken=broken, sort=sort, reverse=reverse, limit=limit
    )
    plain = ascii_only or not _encoding().lower().replace("-", "").startswith("utf8")
    live = sys.stdin.isatty() and sys.stdout.isatty() and not once and output == "text"
    if live and os.environ.get("TERM", "dumb") != "dumb":
        watch(source, question, interval=interval, ascii_only=plain)
    elif live:
        _scroll(source, question, interval=interval, ascii_only=plain)
    else:
        picture = gathered(source, question)
        if output == "json":
            click.echo(json.dumps(picture.whole(time.monotonic()), indent=2))
        else:
            _print(picture, ascii_only=plain)


def _login(username: str | None, password_file: Path | None) -> tuple[str, str] | None:
    if (username is None) != (password_file is None):
        raise click.UsageError("--exporter.username and --exporter.password-file go together")
    if username is None or password_file is None:
        return None
    return username, read_secret(password_file, "--exporter.password-file")


def _encoding() -> str:
    return sys.stdout.encoding or "ascii"


def _colour() -> bool:
    return not os.environ.get("NO_COLOR")


def gathered(source: Source, question: Question) -> Picture:
    """A picture with as many rows as are asked for, in as many answers as that takes.

    Raises:
        ServiceUnavailable: nobody answers.
        RefusedAction: who asks may not.
    """
    part = replace(question, limit=min(question.limit, MAX_ROWS))
    picture = source.picture(part)
    rows = list(picture.document["jobs"])
    while len(rows) < min(question.limit, picture.document["total"]):
        left = min(MAX_ROWS, question.limit - len(rows))
        further = source.picture(replace(part, offset=len(rows), limit=left)).document["jobs"]
        if not further:
            break  # jobs ended meanwhile
        rows += further
    return replace(picture, document={**picture.document, "jobs": rows})


def _print(picture: Picture, *, ascii_only: bool) -> None:
    terminal = sys.stdout.isatty()
    # What is piped on is not cut to the width of a terminal, except to one that is named.
    columns = shutil.get_terminal_size((_PAPER_COLUMNS, 24)).columns
    lines = page(picture, width=max(20, columns), now=time.monotonic(), ascii_only=ascii_only)
    if terminal and os.environ.get("TERM", "dumb") != "dumb":
        for line in lines:
            click.echo(painted(line, colour=_colour()))
    else:
        for text in span_texts(lines):
            click.echo(text)


def _scroll(source: Source, question: Question, *, interval: float, ascii_only: bool) -> None:
    """For a terminal that cannot move its cursor: one picture after the other, until Ctrl-C."""
    asked: list[int] = []

    def leave(number: int, _: object) -> None:
        # What is raised while something is being collected is lost: the next round sees this.
        asked.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, leave)
    try:
        while not asked:
            try:
                _print(gathered(source, question), ascii_only=ascii_only)
            except GpuwardenError as error:
                click.echo(f"{time.strftime('%H:%M:%S')} {error}")
            click.echo()
            time.sleep(interval)
    finally:
        signal.signal(signal.SIGINT, before)
    raise KeyboardInterrupt


def watch(source: Source, question: Question, *, interval: float, ascii_only: bool) -> None:
    """Show the fleet until somebody leaves.

    Args:
        source: what is asked.
        question: which part of the fleet, at first.
        interval: seconds between two questions.
        ascii_only: whether the terminal shows nothing else.
    """
    with Screen(colour=_colour(), encoding=_encoding()) as screen:
        view = View(replace(question, limit=rows_of(screen.size[1])))
        fetcher = Fetcher(source, Wanted(view.question), interval=interval, told=screen.wake)
        fetcher.start()
        while not (view.left or screen.over):
            size, news = screen.size, fetcher.news
            rows = rows_of(size[1])
            if rows != view.question.limit:
                view = replace(view, question=replace(view.question, limit=rows))
            if news.picture is not None and news.picture.document["offset"] == view.question.offset:
                view = settled(view, news.picture)
            details = view.chosen_id if view.mode is Mode.DETAILS else ""
            fetcher.want(Wanted(view.question, details, view.paused))
            now = time.monotonic()
            view = scrolled(view, news.picture, size=size, now=now, details=news.details)
            lines = frame(
                view,
                news.picture,
                size=size,
                now=now,
                problem=news.problem,
                details=news.details,
                ascii_only=ascii_only,
            )
            screen.paint(lines)
            for key in screen.wait(1.0):
                view = press(view, key, news.picture)
