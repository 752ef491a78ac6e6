"""A YAML file of one model, and every mistake in it at its place: form first, then its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import click
from pydantic import BaseModel

from gpuwarden.diagnostics import Diagnostic, Severity, render_json, render_text
from gpuwarden.errors import InvalidInput
from gpuwarden.yaml_files import load_located, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from gpuwarden.yaml_files import Node

Content = TypeVar("Content", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class CheckedFile(Generic[Content]):
    """What a look at a file found.

    Attributes:
        path: of the file.
        content: None if it cannot be used.
        diagnostics: errors and warnings.
        text: of the file, for the lines under them.
    """

    path: Path
    content: Content | None
    diagnostics: tuple[Diagnostic, ...]
    text: str

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """What makes it unusable."""
        return tuple(item for item in self.diagnostics if item.severity is Severity.ERROR)

    def render(self) -> str:
        """The findings for people, each with its line."""
        return render_text(self.diagnostics, {str(self.path): self.text})

    def usable(self) -> Content:
        """What the file says.

        Raises:
            InvalidInput: its text shows every mistake with its line.
        """
        if self.content is None:
            errors = list(self.errors)
            raise InvalidInput(render_text(errors, {str(self.path): self.text}), errors)
        return self.content


def check_file(
    path: Path,
    model: type[Content],
    look: Callable[[Content, Node], Iterable[Diagnostic]],
) -> CheckedFile[Content]:
    """Say everything that is wrong with a file.

    Args:
        path: the file.
        model: its form; one that refuses unknown keys.
        look: what its meaning is checked by, once the form is right.
    """
    document = load_located(path)
    found, content = list(document.diagnostics), None
    if document.root is not None:
        content, complaints = validate(model, document.root)
        found += complaints
        if content is not None:
            found += look(content, document.root)
    if any(item.severity is Severity.ERROR for item in found):
        content = None
    return CheckedFile(path, content, tuple(found), document.text)


def show_checked(
    checked: CheckedFile[Content], output: str, *, counted: Callable[[Content], str]
) -> bool:
    """Print what was found; the answer is whether the file can be used.

    Args:
        checked: what was found.
        output: text or json.
        counted: says how much a usable file holds, such as `3 users`.
    """
    if output == "json":
        click.echo(render_json(checked.diagnostics))
        return checked.content is not None
    if checked.diagnostics:
        click.echo(checked.render())
    errors = len(checked.errors)
    summary = f"{checked.path}: {errors} errors, {len(checked.diagnostics) - errors} warnings"
    if checked.content is not None:
        summary += f"; {counted(checked.content)}"
    click.echo(summary)
    return checked.content is not None
