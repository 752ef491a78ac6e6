"""What the engine's clients read before they ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.clients import read_token

if TYPE_CHECKING:
    from pathlib import Path


def test_a_token(tmp_path: Path) -> None:
    """The blanks around it are none of it."""
    file = tmp_path / "token"
    file.write_text(" abc\n")
    assert read_token(file) == "abc"


@pytest.mark.parametrize("content", [b"t\xc3\xb6k\n", b"a\nb\n", b"\xff"])
def test_a_file_that_holds_no_token(tmp_path: Path, content: bytes) -> None:
    """What no header can carry is refused, and not sent."""
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match="--token-file"):
        read_token(file)
