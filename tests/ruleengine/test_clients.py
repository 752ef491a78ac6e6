"""What the engine's clients read before they ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench.fuzz.answer_edges import Server

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.ruleengine.clients import MAX_ANSWER_BYTES, ask, read_token

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


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "no JSON"),
        (b"[1]", "no object"),
        (b" " * (MAX_ANSWER_BYTES + 1), "larger than"),
    ],
    ids=["nested", "list", "endless"],
)
def test_an_answer_that_is_none(body: bytes, said: str) -> None:
    """Whatever answers in an engine's place is told in a sentence, in bounded memory."""
    server = Server()
    server.answer = b"HTTP/1.1 200 OK\r\n\r\n" + body
    try:
        with pytest.raises(ServiceUnavailable, match=said):
            ask("GET", f"http://127.0.0.1:{server.port}", "/v1/fleet")
    finally:
        server.close()
