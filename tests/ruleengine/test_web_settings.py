"""The `web` part of engine.yaml, and the tokens that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.test_settings import MINIMAL, write

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.serving import read_tokens
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.ruleengine.web_settings import WebSettings

if TYPE_CHECKING:
    from pathlib import Path

GOOD = "0123456789abcdef0123456789abcdef"


def tokens(folder: Path, text: str) -> str:
    """Roles of the tokens of an engine.yaml by name, or why it cannot be used."""
    path = write(folder, MINIMAL + text)
    try:
        found = read_tokens(load_settings(path))
    except InvalidInput as error:
        return str(error)
    return ", ".join(f"{token.name}: {token.role}" for token in found)


def test_each_token_has_a_name_a_role_and_a_file(tmp_path: Path) -> None:
    """A line break that an editor adds is not part of it."""
    (tmp_path / "olga").write_text(GOOD + "\n")
    assert tokens(tmp_path, "web: {tokens: [{name: olga, role: admin, file: olga}]}\n") == (
        f"olga: {Role.ADMIN}"
    )


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        ("short", "{name: a, role: admin, file: t}", "at least 16"),
        ("zażółć gęślą jaźń", "{name: a, role: admin, file: t}", "ASCII"),
        ("", "{name: a, role: admin, file: t}", "is empty"),
        (GOOD, "{name: a, role: admin, file: gone}", "cannot be read"),
        (
            GOOD,
            "{name: a, role: owner, file: t}, {name: b, role: owner, file: t}",
            "same token as a",
        ),
        (GOOD, "{name: a, role: owner, file: t}, {name: a, role: admin, file: t}", "named twice"),
        (GOOD, "{name: a, role: god, file: t}", "owner, scheduler, operator, admin"),
        (GOOD, "{name: a, role: admin}", "file"),
    ],
)
def test_a_token_that_cannot_be_used_is_told_before_the_start(
    tmp_path: Path, content: str, settings: str, words: str
) -> None:
    """And which one it is."""
    (tmp_path / "t").write_text(content)
    assert words in tokens(tmp_path, f"web: {{tokens: [{settings}]}}\n")


def test_a_proxy_is_believed_from_nowhere_by_default(tmp_path: Path) -> None:
    """Its addresses must be named; a host name is none, since who answers to it can change."""
    assert "peers" in tokens(tmp_path, "web: {proxy: {user_header: X-Forwarded-User}}\n")
    assert "network" in tokens(tmp_path, "web: {proxy: {peers: [proxy.example.org]}}\n")
    assert "empty" in tokens(tmp_path, "web: {proxy: {peers: []}}\n")


@pytest.mark.parametrize(
    ("values", "open_to_all"),
    [
        ({}, True),
        ({"operator_token_file": "t"}, True),
        ({"tokens": [{"name": "a", "role": "owner", "file": "t"}]}, False),
        ({"proxy": {"peers": ["10.0.0.1"]}}, False),
        ({"proxy": {"peers": ["10.0.0.1"]}, "read": "everyone"}, True),
        ({"read": "signed-in"}, False),
    ],
)
def test_pages_are_open_until_it_is_known_who_people_are(
    values: dict[str, object], open_to_all: bool
) -> None:
    """And whenever the operator says so."""
    assert WebSettings.model_validate(values).readable_by_all is open_to_all
