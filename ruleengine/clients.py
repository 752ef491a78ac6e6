"""What the commands that ask the engine have in common: its address, tokens, and its answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import httpx

from gpuwarden.consoles import printable
from gpuwarden.errors import InvalidInput, RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.web_settings import DEFAULT_LISTEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_TIMEOUT = httpx.Timeout(15.0, connect=5.0)
_WHOLE_SECONDS: Final = 60.0
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024

url_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--engine.url",
    "url",
    envvar="GPUWARDEN_ENGINE_URL",
    default=f"http://{DEFAULT_LISTEN}",
    show_default=True,
    metavar="URL",
    help="Where the engine answers; also $GPUWARDEN_ENGINE_URL.",
)
token_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--token-file",
    envvar="GPUWARDEN_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with your token (web.tokens of the engine), where it asks for one; also "
    "$GPUWARDEN_TOKEN_FILE.",
)


def token_headers(path: Path | None) -> dict[str, str]:
    """The header that shows a token, or none without a file.

    Raises:
        InvalidInput: it cannot be read, or holds what no token can be.
    """
    return {} if path is None else {"Authorization": f"Bearer {read_token(path)}"}


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        InvalidInput: it cannot be read, or holds what no token can be.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--token-file: {path} cannot be read: {error}") from error
    if not token.isascii() or not token.isprintable():
        raise InvalidInput(f"--token-file: {path} holds no token: one line of ASCII")
    return token


def _answer(
    method: str, url: str, body: Mapping[str, str] | None, headers: Mapping[str, str] | None
) -> tuple[httpx.Response, bytes]:
    """Head and body of an answer, of a bounded size, within a bounded time."""
    began = time.monotonic()
    with httpx.stream(method, url, json=body, headers=headers, timeout=_TIMEOUT) as response:
        return response, whole_body(
            response, url, began=began, seconds=_WHOLE_SECONDS, limit=MAX_ANSWER_BYTES
        )


def whole_body(
    response: httpx.Response, url: str, *, began: float, seconds: float, limit: int
) -> bytes:
    """The body of an answer that is being read.

    Args:
        response: of a stream.
        url: what was asked, for messages.
        began: when, by the monotonic clock.
        seconds: after that, in which all of it must be there.
        limit: bytes that it may have.

    Raises:
        ServiceUnavailable: it is larger, or late.
    """
    content = bytearray()
    for part in response.iter_bytes():
        content += part
        if len(content) > limit:
            raise ServiceUnavailable(f"{url}: larger than {limit} bytes")
        if time.monotonic() > began + seconds:
            raise ServiceUnavailable(f"{url}: no whole answer in {seconds:g} s")
    return bytes(content)


def ask(
    method: str,
    url: str,
    path: str,
    *,
    body: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Ask the engine, and give its answer.

    Args:
        method: GET or POST.
        url: its base address.
        path: what is asked for.
        body: sent as JSON.
        headers: such as a token's.

    Raises:
        ServiceUnavailable: it does not answer, or not in JSON.
        RefusedAction: it says no, and why.
    """
    try:
        response, content = _answer(method, url.rstrip("/") + path, body, headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceUnavailable(
            f"the engine does not answer at {url} ({error}): is it running, and is --engine.url "
            "right? ($GPUWARDEN_ENGINE_URL sets it for good)"
        ) from error
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ServiceUnavailable(f"{url}: HTTP {response.status_code}, and no JSON") from error
    if not isinstance(document, dict):
        raise ServiceUnavailable(f"{url}: HTTP {response.status_code}, and no object")
    if response.is_error:
        reason, message = str(document.get("error")), str(document.get("message"))
        raise RefusedAction(reason, printable(f"{message} [{reason}]"))
    return document
