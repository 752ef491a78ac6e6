"""The picture of `gpuwarden top` as lines of cells, for any size of a terminal. Pure.

Users choose the names that are shown here: of each character it is known how wide every terminal
draws it, and what a terminal would obey, join, or write from right to left is not shown.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Style(Enum):
    """How a part of a line is shown; the words say the same without it."""

    PLAIN = "plain"
    FAINT = "faint"
    STRONG = "strong"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    TITLE = "title"
    CHOSEN = "chosen"


Span = tuple[str, Style]
Line = tuple[Span, ...]
"""A line of the screen; its texts together are as wide as the screen, or narrower."""

_SHOWN = ("L", "N", "P", "S", "Z")
_RIGHT_TO_LEFT = frozenset({"R", "AL", "AN"})
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_PICTOGRAPHS = range(0x1F000, 0x20000)
"""Which of them are drawn as one, and how wide, differs between terminals."""


@functools.lru_cache(maxsize=4096)
def _character(mark: str) -> str:
    kind = unicodedata.category(mark)
    if kind[0] == "M":
        return ""  # what is left of these after composition has no width of its own
    if (
        kind[0] not in _SHOWN
        or ord(mark) in _PICTOGRAPHS
        or unicodedata.bidirectional(mark) in _RIGHT_TO_LEFT
    ):
        return " " if mark in "\n\r\t" else _UNKNOWN
    if kind[0] == "Z":
        return " "
    return mark if width_of(mark) else ""


def one_line(text: str, *, ascii_only: bool = False) -> str:
    """A text that every terminal draws in one line, from left to right, `width_of` cells wide."""
    shown = "".join(map(_character, unicodedata.normalize("NFC", text)))
    if not ascii_only:
        return shown
    return "".join(mark if mark.isascii() else _PLAIN.get(mark, "?") for mark in shown)


_PLAIN = {"…": "..", "·": "-", "↑": "^", "↓": "v"}
"""What stands for our own marks where there is only ASCII."""


def width_of(text: str) -> int:
    """How many cells a text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


@functools.lru_cache(maxsize=4096)
def _cells(mark: str) -> int:
    return cell_len(mark)


def fitted(
    text: str, width: int, *, right: bool = False, tail: bool = False, ascii_only: bool = False
) -> str:
    """A text of one line, cut or filled to exactly so many cells.

    Args:
        text: of `one_line`.
        width: cells.
        right: flush right.
        tail: where it must be cut, its end is kept.
        ascii_only: whether the terminal shows nothing else.
    """
    if width <= 0:
        return ""
    if width_of(text) > width:
        end = (".." if ascii_only else "…")[:width]
        left = width - len(end)
        text = end + _cut(text[::-1], left)[::-1] if tail else _cut(text, left) + end
    space = " " * (width - width_of(text))
    return space + text if right else text + space


def _cut(text: str, width: int) -> str:
    if text.isascii():
        return text[:width]
    used, kept = 0, []
    for mark in text:
        used += _cells(mark)
        if used > width:
            break
        kept.append(mark)
    return "".join(kept)


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a column.

    Attributes:
        forms: the same from the longest to the shortest; the first that fits is shown.
        style: how.
    """

    forms: tuple[str, ...]
    style: Style = Style.PLAIN

    def shown(self, width: int) -> str:
        """The longest form that fits, or the shortest."""
        return next((form for form in self.forms if width_of(form) <= width), self.forms[-1])


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
        key: which of a row's cells.
        title: above it.
        least, most: cells that it takes; `most` only where its content needs them.
        right: whether it is flush right.
        tail: whether the end of what it holds tells more than the beginning.
    """

    key: str
    title: str
    least: int
    most: int
    right: bool = False
    tail: bool = False


COLUMNS: Final = (
    Column("user", "USER", 6, 16),
    Column("place", "NODE:GPU", 8, 32),
    Column("job", "JOB", 16, 44, tail=True),
    Column("model", "MODEL", 7, 24),
    Column("phase", "PHASE", 5, 10),
    Column("epoch", "EPOCH", 6, 9, right=True),
    Column("left", "LEFT", 5, 7, right=True),
    Column("utilization", "UTIL", 5, 11, right=True),
    Column("memory", "MEM", 6, 16, right=True),
    Column("rate", "IMG/S", 5, 13, right=True),
    Column("team", "TEAM", 4, 12),
    Column("verdict", "VERDICT", 10, 200),
)
"""In their order on the screen."""

_IMPORTANCE: Final = (
    *("verdict", "user", "utilization", "place", "memory", "model", "phase", "epoch", "left"),
    *("job", "rate", "team"),
)
"""Which columns a narrow screen keeps, the most important first."""

_GAP = 1
_ROOM: Final = 28
"""Cells of a verdict before there is room for the columns that are seldom looked at."""


def widths(cells: Sequence[dict[str, Cell]], width: int) -> list[tuple[Column, int]]:
    """Which columns fit on a screen, and how wide each is; together at most `width`.

    Args:
        cells: of every row that is shown.
        width: cells of the screen.
    """
    known = {column.key: column for column in COLUMNS}
    chosen: dict[str, int] = {}
    left = width
    for key in _IMPORTANCE:
        if key == "job":
            more = min(left, max(0, _ROOM - chosen["verdict"]))
            chosen["verdict"] += more
            left -= more
        needs = known[key].least + (_GAP if chosen else 0)
        if needs <= left:
            chosen[key] = known[key].least
            left -= needs
        elif not chosen:
            chosen[key] = left = max(1, left)
            left = 0
    for key in _IMPORTANCE:
        if key not in chosen:
            continue
        column = known[key]
        wanted = max(
            [width_of(column.title), *(width_of(row[key].forms[0]) for row in cells)], default=0
        )
        if key == "verdict":
            wanted = min(wanted, max(column.least, width // 3))  # others are to be read as well
        more = max(0, min(wanted, column.most) - chosen[key])
        chosen[key] += min(more, left)
        left -= min(more, left)
    if "verdict" in chosen:
        chosen["verdict"] += left
    return [(column, chosen[column.key]) for column in COLUMNS if column.key in chosen]


def table(
    cells: Sequence[dict[str, Cell]], width: int, *, chosen: int | None, ascii_only: bool = False
) -> list[Line]:
    """The titles, and a line for each row.

    Args:
        cells: of every row.
        width: cells of the screen.
        chosen: index of the row that is marked, or None.
        ascii_only: whether the terminal shows nothing else.
    """
    columns = widths(cells, width)
    title = " ".join(
        fitted(column.title, size, right=column.right, ascii_only=ascii_only)
        for column, size in columns
    )
    lines: list[Line] = [((fitted(title, width, ascii_only=ascii_only), Style.TITLE),)]
    for number, row in enumerate(cells):
        spans: list[Span] = []
        for column, size in columns:
            cell = row[column.key]
            text = one_line(cell.shown(size), ascii_only=ascii_only)
            text = fitted(text, size, right=column.right, tail=column.tail, ascii_only=ascii_only)
            if spans:
                spans.append((" " * _GAP, Style.PLAIN))
            spans.append((text, cell.style))
        if number == chosen:
            whole = "".join(text for text, _ in spans)
            spans = [(fitted(whole, width, ascii_only=ascii_only), Style.CHOSEN)]
        lines.append(tuple(spans))
    return lines


def wrapped(text: str, width: int, *, ascii_only: bool = False) -> list[str]:
    """A text in lines of at most so many cells, broken between words where it can be."""
    lines: list[str] = []
    current = ""
    for word in one_line(text, ascii_only=ascii_only).split(" "):
        joined = f"{current} {word}" if current else word
        if width_of(joined) <= width:
            current = joined
            continue
        if current:
            lines.append(current)
        rest = word
        while width_of(rest) > width:
            part = _cut(rest, width) or rest[:1]
            lines.append(part)
            rest = rest[len(part) :]
        current = rest
    return [*lines, current]


def cropped(lines: Iterable[Line], width: int, height: int) -> list[Line]:
    """No more lines than there are, and none wider than the screen."""
    found = []
    for line in list(lines)[: max(0, height)]:
        left, spans = width, []
        for text, style in line:
            part = text if width_of(text) <= left else _cut(text, left)
            if part:
                spans.append((part, style))
            left -= width_of(part)
        found.append(tuple(spans))
    return found


def span_texts(lines: Iterable[Line]) -> list[str]:
    """The lines without styles and without space at their ends."""
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def short_time(seconds: float | None) -> str:
    """A duration in at most six letters: 45s, 5m45s, 2h13m, 3d4h; empty where it is not known."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    for unit, size, below, smaller in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // smaller
            large = whole // size
            if large > 999:
                return f">999{unit}"
            return f"{large}{unit}{rest}{below}" if rest and large < 100 else f"{large}{unit}"
    return f"{whole}s"


def band_text(band: dict[str, Any] | None, scale: float, places: int) -> str:
    """An expectation as a number, or as the ends of its band."""
    if band is None:
        return ""
    low, high = (f"{band[end] / scale:.{places}f}" for end in ("low", "high"))
    return low if low == high else f"{low}-{high}"
