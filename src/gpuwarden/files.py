"""Files that the daemons depend on: secrets, and what shows that a file has changed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


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
