"""Files that the engine depends on: read with every mistake at its place, and watched."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

from gpuwarden.diagnostics import Severity, render_text
from gpuwarden.errors import InvalidInput
from gpuwarden.yaml_files import load_located, validate

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from gpuwarden.ruleengine.fields import Strict

_Model = TypeVar("_Model", bound="Strict")


def read_model(model: type[_Model], path: Path) -> _Model:
    """Read a YAML file into a model.

    Raises:
        InvalidInput: its text shows every finding with its line and a caret.
    """
    document = load_located(path)
    found = list(document.diagnostics)
    value: _Model | None = None
    if document.root is not None:
        value, complaints = validate(model, document.root)
        found += complaints
    if value is None or any(item.severity is Severity.ERROR for item in found):
        raise InvalidInput(render_text(found, {document.file: document.text}), found)
    return value


def read_secret(path: Path, setting: str) -> str:
    """The secret in a file, without the line break that editors add.

    Raises:
        InvalidInput: it cannot be read, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{setting}: {path} cannot be read: {error}") from error
    if not text:
        raise InvalidInput(f"{setting}: {path} is empty")
    return text


def fingerprint(paths: Iterable[Path]) -> str:
    """A hash over names and contents, to see a change; an unreadable file counts as such."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path).encode() + b"\0")
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            digest.update(f"unreadable {error.errno}".encode())
    return digest.hexdigest()
