"""What commands show on a terminal: tables, and texts that it does not obey."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any, Final

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rich.text import Text

MANY_ROWS: Final = 500
"""A table of more is written plainly also for people: to fit thousands takes seconds."""
WIDEST: Final = 40
"""Of a column that is written plainly: one long name must not push all others off the screen."""


def printable(text: str) -> str:
    """A text without what a terminal would obey: names and reasons in it were chosen by users."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(mark) in ("Cc", "Cf", "Cs") and mark not in "\n\t"
        else mark
        for mark in text
    )


class _Screen(Console):
    """Shows no character that the terminal would obey."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def open_console(*, markup: bool = False) -> Console:
    """Where tables go: the terminal, or a wide page for what is piped on.

    Args:
        markup: whether `[bold]` is a style, for who escapes what is none; without it every text is
            shown as it is, also the `[a-z]` and `:key:` in it.
    """
    console = _Screen(highlight=False, markup=markup, emoji=False)
    if not console.is_terminal:
        console.width = 200  # what is piped on is not cut to the width of a terminal
    return console


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()
) -> None:
    """Print a table: fitted to a terminal, or a line for each row for whoever reads it on.

    Args:
        heads: of the columns; the first column is never cut.
        rows: their cells; what a terminal would obey in them is shown and not obeyed.
        right: numbers of the columns that are set to the right.
    """
    console = open_console()
    if not console.is_terminal or len(rows) > MANY_ROWS:
        for line in plain_lines(heads, rows, right=right):
            click.echo(line)
        return
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number in right else "left")
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    console.print(table)


def plain_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()
) -> Iterator[str]:
    """A table as lines of whole cells, each row on one; a cell beyond WIDEST moves its own row."""
    shown = [[" ".join(printable(cell).split()) for cell in row] for row in (heads, *rows)]
    widths = [
        min(WIDEST, max(cell_len(row[column]) for row in shown)) for column in range(len(heads))
    ]
    for row in shown:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            cells.append(f"{space}{cell}" if number in right else f"{cell}{space}")
        yield "  ".join(cells).rstrip()
