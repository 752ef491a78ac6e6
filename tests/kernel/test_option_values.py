"""Durations and moments as people write them on a command line."""

import ast
from pathlib import Path

import pytest

from gpuwarden.option_values import parse_moment

ROOT = Path(__file__).parents[2]
NOW = 1_772_400_000.0  # 2026-03-01T21:20:00Z


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", NOW),
        ("now-7d", NOW - 7 * 86400),
        ("2026-03-01", NOW - 21 * 3600 - 20 * 60),
        ("2026-03-01T22:20:00+01:00", NOW),
    ],
)
def test_moments_are_dates_times_or_so_long_ago(text: str, moment: float) -> None:
    """In UTC where no zone is given."""
    assert parse_moment(text, now=NOW) == moment


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("yesterday", "write now, now-7d"),
        ("", "write now, now-7d"),
        ("now-7", "lacks a unit"),
        ("now--7d", "is not a duration"),
        ("0001-01-01T00:00:00+23:00", "1970"),
        ("now-90y", "before 1970"),
        ("now-999999999y", "too long"),
    ],
)
def test_what_is_no_moment_is_told(text: str, why: str) -> None:
    """With how to write one."""
    with pytest.raises(ValueError, match=why):
        parse_moment(text, now=NOW)


def test_every_command_runs_on_the_oldest_click_that_the_extras_allow() -> None:
    """No class is made from a click type with a parameter: until 8.3 that ends the import."""
    files = [*(ROOT / "src" / "gpuwarden").glob("*.py")]
    for folder in ("exporter", "trainer", "ruleengine"):
        files += (ROOT / folder).rglob("*.py")
    assert len(files) > 100
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                assert not [base for base in bases if base.startswith("click.") and "[" in base]
