"""One HTTP request and its whole answer, within a time and a size.

httpx counts from the last byte: a server that lets its answer drip in would hold the engine for
ever, and one that never stops would fill its memory.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import httpx

from gpuwarden.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ANSWER_BYTES = 1024 * 1024
MAX_RETRY_SECONDS = 3600.0
"""No server keeps anybody away for longer with one answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered: status, headers (names in lower case) and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, decoded.

        Raises:
            ValueError: it is not JSON.
        """
        try:
            return json.loads(self.body)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error

    def retry_after(self, now: float) -> float | None:
        """Seconds for which the server asks to be left alone (Retry-After), or None.

        Args:
            now: Unix time, for a server that names a date (RFC 9110, 10.2.3).
        """
        text = self.headers.get("retry-after", "").strip()
        if text.isascii() and text.isdecimal():
            # Of many digits, float() would make infinity, and int() would refuse.
            return MAX_RETRY_SECONDS if len(text) > 6 else min(float(text), MAX_RETRY_SECONDS)
        try:
            moment = parsedate_to_datetime(text).timestamp()
        except (ValueError, TypeError, OverflowError):
            return None
        return min(max(0.0, moment - now), MAX_RETRY_SECONDS)

    def excerpt(self) -> str:
        """The beginning of the body in one line, for a message."""
        return " ".join(self.body[:200].decode(errors="replace").split())


async def exchange(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    seconds: float,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    limit: int = MAX_ANSWER_BYTES,
) -> Answer:
    """Send a request and read its whole answer.

    Args:
        client: with its own limits for each step.
        method: of HTTP.
        url: where to.
        seconds: for everything together.
        content: the body, or None.
        headers: beside the client's.
        limit: bytes that the answer may have.

    Raises:
        ServiceUnavailable: there is no whole answer; the text says why, and not where.
    """
    body = bytearray()
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(method, url, content=content, headers=headers) as response,
        ):
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > limit:
                    raise ServiceUnavailable(f"its answer is larger than {limit} bytes")
    except TimeoutError as error:
        raise ServiceUnavailable(f"no whole answer within {seconds:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceUnavailable(str(error) or type(error).__name__) from error
    return Answer(response.status_code, dict(response.headers), bytes(body))
