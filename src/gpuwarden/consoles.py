"""What commands show on a terminal: tables, and texts that it does not obey."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.text import Text


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
