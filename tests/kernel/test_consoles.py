"""Tables are read by people and by programs: whole, a line for each row, and never obeyed."""

from __future__ import annotations

from rich.cells import cell_len

from gpuwarden.consoles import WIDEST, plain_lines


def test_every_row_is_one_line_with_its_columns_in_place() -> None:
    """Wide characters count for two, and numbers stand to the right."""
    head, first, second = plain_lines(
        ("NAME", "HOURS", "WHY"), [("日本", "7", "none"), ("a", "1,234", "")], right={1}
    )
    assert head == "NAME  HOURS  WHY"
    assert first == "日本      7  none"
    assert second == "a     1,234"
    assert cell_len(first[: first.index("7") + 1]) == cell_len(head[: head.index("WHY") - 2])


def test_what_a_terminal_would_obey_is_shown() -> None:
    """Neither a line break nor an escape in somebody's job name makes a row of its own."""
    (_, line) = plain_lines(("A", "B"), [("x\ny", "\x1b[31mred\u202e")])
    assert line == "x y  \N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}"


def test_a_long_name_moves_its_own_row_only() -> None:
    """Others keep their columns, and nothing is cut."""
    _, long, short = plain_lines(("A", "B"), [("x" * 300, "1"), ("y", "2")])
    assert long == f"{'x' * 300}  1"
    assert short == f"y{' ' * (WIDEST - 1)}  2"
