"""Mistakes of YAML's syntax, in the words of who wrote it: where, what, and what was meant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.look_alikes import look_alike

if TYPE_CHECKING:
    import yaml

_NO_COLON: Final = "could not find expected ':'"
_NO_MAPPING: Final = "mapping values are not allowed here"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake.

    Attributes:
        line, column: from 1.
        message: what is wrong.
        hint: what to write instead, or None.
    """

    line: int
    column: int
    message: str
    hint: str | None


def syntax_mistake(error: yaml.MarkedYAMLError, text: str) -> Mistake:
    """What a complaint of the parser comes to.

    Args:
        error: the complaint.
        text: of the file.
    """
    parts = [part for part in (error.problem, error.context) if part]
    message = ", ".join(parts) or "this is not YAML"
    mark = error.problem_mark or error.context_mark
    if error.problem == _NO_COLON:
        # It is missed at the next key, which is right.
        mark = error.context_mark or mark
    if mark is None:
        return Mistake(1, 1, message, None)
    hint = _hint(error.problem or "", text.splitlines(), mark.line, mark.column)
    return Mistake(mark.line + 1, mark.column + 1, message, hint)


def _hint(problem: str, lines: list[str], number: int, column: int) -> str | None:
    """What was probably meant, by how the line and the one before it read."""
    here = lines[number] if number < len(lines) else ""
    if "'\\t'" in problem:
        return "indent with spaces" if not here[:column].strip() else "write spaces, not tabs"
    found = _meant(here)
    if found is None and number and number <= len(lines):
        # What is wrong at the end of a line is missed on the next one.
        before = _meant(lines[number - 1])
        found = None if before is None else f"in the line before, {before}"
    if found is None and problem == _NO_MAPPING and here.count(": ") > 1:
        return "put a text that holds a colon and a space in quotes"
    return found


def _meant(line: str) -> str | None:
    """What was probably meant by a line that cannot be read."""
    if re.match(r"[\s-]*[\w.-]+:[^\s:/]", line):
        return "write a space after the colon"
    return look_alike(line)
