"""Series as promtool's unit tests write them: `name{label="value"}` and `0+5x10 _ _x3 stale`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_VALUES = 1_000_000
"""Values that one series may have; `1x999999999` is a slip, and would fill the memory."""

_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+|[Ii]nf|[Nn]a[Nn])"
_STEP = re.compile(
    rf"(?P<first>{_NUMBER})(?:(?P<sign>[+-])(?P<step>[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?))?"
    r"(?:x(?P<times>[0-9]{1,9}))?"
)
_GAP = re.compile(r"_(?:x(?P<times>[0-9]{1,9}))?")
_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(?P<labels>.*)\})?", re.DOTALL)
_LABEL = re.compile(r'\s*(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?P<text>"(?:[^"\\]|\\.)*")\s*')


class Stale:
    """The mark that Prometheus writes where a series ends."""

    def __repr__(self) -> str:
        return "stale"


STALE = Stale()
Value = float | Stale | None
"""A number, the end of the series, or a scrape that is lost."""


class SeriesName(NamedTuple):
    """Name and labels of a series, sorted by label, so that two spellings are equal."""

    metric: str
    labels: tuple[tuple[str, str], ...]


class MalformedNotation(ValueError):
    """What was written is not promtool's notation."""


def parse_values(text: str) -> tuple[Value, ...]:
    """Read the values of a series.

    Args:
        text: words parted by blanks. `a+bxn` is a, a+b, ... a+n*b, which are n+1 values; `axn`
            repeats a in the same way; `_xn` is n lost scrapes.

    Raises:
        MalformedNotation: naming the word.
    """
    values: list[Value] = []
    for word in text.split():
        values += _word(word, MAX_VALUES - len(values))
    if not values:
        raise MalformedNotation("has no value: write it like '0+5x100', '3x20 _ _x3 stale'")
    return tuple(values)


def _word(word: str, room: int) -> list[Value]:
    if word == "stale":
        return [STALE]
    match = _GAP.fullmatch(word) or _STEP.fullmatch(word)
    if match is None:
        raise MalformedNotation(
            f"{word!r} is not a value: write it like 5, 0+5x100, 100-1x50, 3x20, _, _x3 or stale"
        )
    times = int(match["times"] or 0)
    if times >= room:
        raise MalformedNotation(f"{word!r} makes more than {MAX_VALUES} values")
    if word.startswith("_"):
        return [None] * (times if match["times"] else 1)
    first, by = float(match["first"]), float(match["step"] or 0)
    signed = -by if match["sign"] == "-" else by
    # Infinity plus nothing is infinity, infinity times nothing is not a number.
    return [first + (signed * count if signed else 0.0) for count in range(times + 1)]


def parse_selector(text: str) -> SeriesName:
    """Read a series' name and labels.

    Raises:
        MalformedNotation: saying how to write it.
    """
    match = _SELECTOR.fullmatch(text.strip())
    if match is None:
        raise MalformedNotation(
            f"""{text!r} is not a series: write it like up{{instance="n1:9835",job="gpuwarden"}}"""
        )
    labels: dict[str, str] = {}
    rest = (match["labels"] or "").strip()
    while rest:
        label = _LABEL.match(rest)
        after = "" if label is None else rest[label.end() :]
        if label is None or (after and not after.startswith(",")):
            raise MalformedNotation(
                f"""the labels {rest!r} cannot be read: write them like job_id="proc-1",gpu="0\""""
            )
        if label["name"] in labels or label["name"] == "__name__":
            raise MalformedNotation(f"the label {label['name']} is given twice")
        labels[label["name"]] = _unquoted(label["text"])
        rest = after[1:].strip()
    return SeriesName(match["name"], sorted_labels(labels))


def sorted_labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Labels in the order of their names; an empty one is no label, as Prometheus has it."""
    return tuple(sorted((name, text) for name, text in labels.items() if text))


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError as error:
        raise MalformedNotation(f"{text} cannot be read: {error}") from error
