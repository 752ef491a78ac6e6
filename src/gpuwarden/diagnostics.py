"""Findings about what a person wrote: code, place, message, remedy; as text or as JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a file; lines and columns count from 1, the end is exclusive."""

    file: str
    line: int
    column: int
    end_column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding.

    Attributes:
        code: stable identifier, such as GW104; documented in docs/rules.md.
        severity: an error makes the file unusable, a warning does not.
        span: where.
        message: what is wrong, naming the field.
        hint: what to write instead, or None.
    """

    code: str
    severity: Severity
    span: Span
    message: str
    hint: str | None = None


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Suggest the known word that is closest to a misspelt one, or None."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else None


def render_text(diagnostics: Iterable[Diagnostic], sources: Mapping[str, str]) -> str:
    """Render findings for people: position, code, message, the line itself and a caret.

    Args:
        diagnostics: in any order; rendered by file and position.
        sources: text of each file by name; a file that is missing is shown without its line.
    """
    return "\n".join(
        _block(item, sources.get(item.span.file)) for item in sorted(diagnostics, key=_position)
    )


def _position(item: Diagnostic) -> tuple[str, int, int, str]:
    return (item.span.file, item.span.line, item.span.column, item.code)


def _block(item: Diagnostic, source: str | None) -> str:
    head = f"{item.span}: {item.severity}[{item.code}]: {item.message}"
    if item.hint:
        head += f"; {item.hint}"
    if source is None:
        return head
    lines = source.splitlines()
    if not 1 <= item.span.line <= len(lines):
        return head
    line = lines[item.span.line - 1]
    width = max(1, (item.span.end_column or item.span.column + 1) - item.span.column)
    width = min(width, max(1, len(line) - item.span.column + 1))
    # A tab before the caret is repeated as a tab, so that both lines align in any terminal.
    lead = "".join("\t" if char == "\t" else " " for char in line[: item.span.column - 1])
    gutter = str(item.span.line)
    return f"{head}\n  {gutter} | {line}\n  {' ' * len(gutter)} | {lead}{'^' * width}"


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """Render findings as one versioned JSON document, sorted by position."""
    return json.dumps(
        {
            "schema": "gpuwarden.diagnostics/v1",
            "diagnostics": [dataclasses.asdict(d) for d in sorted(diagnostics, key=_position)],
        },
        indent=2,
    )
