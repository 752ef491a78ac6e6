"""Whatever is sent or written to the exporter's outer edges, it answers and goes on."""

from __future__ import annotations

import asyncio
import base64
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.errors import InvalidInput
from gpuwarden.exporter import releases, web_configs
from gpuwarden.exporter.app import patience_of, takes_gzip, wanted_format
from gpuwarden.exporter.servers import parse_address
from gpuwarden.exporter.web_configs import Guarded

if TYPE_CHECKING:
    from pathlib import Path

HASH = "$2b$04$lvWxGMI6mZHMqFa8nTdcF.59v0VehtDhjzl7piJBOwCi79PIbu0pW"
MANY = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(st.text())
def test_headers_are_read_or_ignored(text: str) -> None:
    """No header keeps a scrape from being answered, or keeps it waiting for ever."""
    wanted_format(text)
    takes_gzip(text)
    assert 0 <= patience_of(text) <= 30


@MANY
@given(st.floats())
def test_any_deadline(seconds: float) -> None:
    """Whoever names a deadline is answered before it."""
    patience = patience_of(str(seconds))
    assert patience == 0 or patience <= seconds
    assert math.isfinite(patience)


@MANY
@given(st.text())
def test_addresses_are_taken_or_refused(text: str) -> None:
    """An address is one, or the answer says how one is written."""
    try:
        _host, port = parse_address(text, default_port=9835)
    except InvalidInput:
        return
    assert 0 <= port <= 65535


@MANY
@given(st.binary(max_size=5000))
def test_release_files(tmp_path: Path, content: bytes) -> None:
    """Whatever root wrote is an order, with an end or without."""
    file = tmp_path / "release"
    file.write_bytes(content)
    assert isinstance(releases.read(file), releases.Release)


@MANY
@given(st.text(max_size=500) | st.binary(max_size=500))
def test_web_configurations(tmp_path: Path, content: str | bytes) -> None:
    """A web configuration is taken, or refused with its mistakes."""
    file = tmp_path / "web.yml"
    file.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
    with suppress(InvalidInput):
        assert isinstance(web_configs.read(file), web_configs.WebConfig)


_KEYS = st.sampled_from(
    [
        *("tls_server_config", "basic_auth_users", "cert_file", "key_file", "client_auth_type"),
        *("client_ca_file", "min_version", "other"),
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["a", "TLS13", "NoClientCert"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@MANY
@given(st.dictionaries(_KEYS, _VALUES, max_size=4))
def test_web_configurations_of_the_right_words(tmp_path: Path, content: dict[str, Any]) -> None:
    """Known keys in wrong places are refused with their places, whatever stands there."""
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "web.yml"
    file.write_text(yaml.safe_dump(content))
    with suppress(InvalidInput):
        assert isinstance(web_configs.read(file), web_configs.WebConfig)


async def _answer(web: web_configs.Web, headers: list[tuple[bytes, bytes]]) -> int:
    sent: list[Any] = []

    async def inside(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        raise NotImplementedError

    async def send(message: Any) -> None:
        sent.append(message)

    await Guarded(inside, web)({"type": "http", "headers": headers}, receive, send)
    return int(sent[0]["status"])


_CREDENTIALS = st.binary(max_size=200).map(base64.b64encode).map(lambda text: b"Basic " + text)


@settings(MANY, max_examples=150)
@given(st.lists(_CREDENTIALS | st.binary(max_size=200), max_size=3))
def test_nobody_guesses_in(tmp_path: Path, values: list[bytes]) -> None:
    """Whatever stands in the header, who does not know the password is refused."""
    pytest.importorskip("bcrypt")
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{a: '{HASH}'}}")
    web = web_configs.Web(file)
    headers = [(b"authorization", value) for value in values]
    assert asyncio.run(_answer(web, headers)) == 401
