"""What people write on the command line of `gpuwarden submit` instead of what it takes."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import click

from gpuwarden import durations, option_values
from gpuwarden.scheduling.yolo_words import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

_SLURMS = re.compile(r"(?:(?P<days>[0-9]{1,3})-)?(?P<hours>[0-9]{1,4}):(?P<minutes>[0-5][0-9])"
                     r"(?::(?P<seconds>[0-5][0-9]))?")  # fmt: skip


class SubmitCommand(click.Command):
    """A command whose unknown options are told where they belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            click.UsageError: with where an unknown option would have its place.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            hint = (
                f"words for ultralytics are written {name}=VALUE, without dashes"
                if name in SETTINGS
                else f"options of gpuwarden train go behind the words: -- {error.option_name}=VALUE"
            )
            raise click.UsageError(f"{error.format_message()} Or: {hint}", ctx) from error


def read_time_limit(
    context: click.Context, option: click.Parameter, value: str | None
) -> float | None:
    """Seconds of a time limit; Slurm's own notation is told in ours, for `4:00` is minutes there.

    Raises:
        click.BadParameter: it is no duration, with what to write.
    """
    found = None if value is None else _SLURMS.fullmatch(value.strip())
    if found is None or not (found["days"] or found["seconds"]):
        return option_values.read_positive_seconds(context, option, value)
    days, hours, minutes, seconds = (
        int(found[part] or 0) for part in ("days", "hours", "minutes", "seconds")
    )
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise click.BadParameter(f"{value} is written {durations.render(whole)} here")


def split_words(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Words of `yolo train`, and options of `gpuwarden train`.

    Raises:
        click.UsageError: an option's value stands alone.
    """
    options = tuple(word for word in words if word.startswith("-"))
    for before, after in itertools.pairwise(words):
        if before.startswith("--") and "=" not in before and not _is_word(after):
            raise click.UsageError(
                f"{before} {after}: options behind -- are written {before}={after}"
            )
    return [word for word in words if not word.startswith("-")], options


def _is_word(text: str) -> bool:
    return text.startswith("-") or "=" in text.partition("/")[0]
