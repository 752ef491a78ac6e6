"""What options have in common: durations, moments, addresses, the form of an answer.

Values are read by callbacks and not by types: `click.ParamType` takes a parameter only in newer
versions of click than the extras ask for.
"""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from gpuwarden import durations

if TYPE_CHECKING:
    from collections.abc import Callable

output_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Form of the answer.",
)
quiet_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "-q", "--quiet", is_flag=True, help="Show only what is to be done."
)

log_level_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--log.level",
    "log_level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severe lines that are written.",
)
log_format_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--log.format",
    "log_format",
    type=click.Choice(["auto", "json", "console"]),
    default="auto",
    show_default=True,
    help="auto: console on a terminal, JSON elsewhere.",
)


def config_option(
    help_text: str, *, required: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`--config FILE`, which is engine.yaml; or `--config.file`, as Prometheus spells it.

    Args:
        help_text: what of the file counts here.
        required: whether nothing can be done without it.
    """
    return click.option(
        "--config",
        "--config.file",
        "config",
        type=click.Path(path_type=Path, dir_okay=False),
        required=required,
        metavar="FILE",
        help=help_text,
    )


def span_options(
    *, default: str, begin: str, end: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`--from WHEN` and `--to WHEN`, as `begin` and `end` in Unix time.

    Args:
        default: of `--from`; `--to` is now.
        begin: help of `--from`.
        end: help of `--to`.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        for flag, name, value, text in (
            ("--to", "end", "now", end),
            ("--from", "begin", default, begin),
        ):
            command = click.option(
                flag,
                name,
                default=value,
                show_default=True,
                metavar="WHEN",
                callback=read_moment,
                help=text,
            )(command)
        return command

    return decorated


def prometheus_option(help_text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`--prometheus URL`, as `url`; None where it is not given.

    Args:
        help_text: what the server is for.
    """
    return click.option("--prometheus", "url", metavar="URL", callback=read_url, help=help_text)


def read_seconds(_context: click.Context, _option: click.Parameter, value: str | float) -> float:
    """Seconds of a duration such as `30s`; 0s is one."""
    # A number is what a group has read and hands on to its command.
    return value if isinstance(value, float) else _seconds(value)


def read_positive_seconds(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> float | None:
    """Seconds, more than 0, of a duration; None where the option is not given."""
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds <= 0:
        raise click.BadParameter("must be more than 0s")
    return seconds


def read_url(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """The address of a server; None where the option is not given."""
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise click.BadParameter(f"{value!r} is no address: write it like http://127.0.0.1:9090")
    return value


def _seconds(text: str) -> float:
    try:
        return durations.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def read_moment(_context: click.Context, _option: click.Parameter, value: str) -> float:
    """Unix time of what `parse_moment` reads."""
    try:
        return parse_moment(value, now=time.time())
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_moment(text: str, *, now: float, zone: dt.tzinfo = dt.UTC) -> float:
    """Read a moment: `now`, `now-7d`, or a date or time of ISO 8601.

    Args:
        text: as it was written.
        now: Unix time.
        zone: of a date or time that has none of its own.

    Returns:
        Unix time, not before 1970.

    Raises:
        ValueError: with a sentence that says how to write it.
    """
    if text == "now":
        return now
    try:
        if text.startswith("now-"):
            moment = now - durations.parse(text.removeprefix("now-"))
        else:
            date = dt.datetime.fromisoformat(text)
            moment = (date if date.tzinfo else date.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError) as error:
        why = f" ({error})" if text.startswith("now-") else ""
        raise ValueError(
            f"{text!r} is no moment{why}: write now, now-7d, 2026-11-20 or "
            "2026-11-20T08:00:00+01:00"
        ) from error
    if moment < 0:
        raise ValueError(f"{text!r} is before 1970")
    return moment
