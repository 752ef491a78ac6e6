"""What handlers of every HTTP server have in common: bounded bodies, tokens, and saying no."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

if TYPE_CHECKING:
    from starlette.requests import Request


BODY_SECONDS = 30.0
"""In which the whole body of a request must come."""


class Refusal(Exception):
    """An answer with a reason instead of a result."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = error


async def refused(_request: Request, error: Exception) -> Response:
    """The answer to a request that was refused."""
    if not isinstance(error, Refusal):
        raise error
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}.get(error.status)
    return JSONResponse(
        {"error": error.error, "message": str(error)}, status_code=error.status, headers=headers
    )


def authorise(request: Request, token: str | None, setting: str) -> None:
    """Refuse who does not bear a token; compared in constant time.

    Args:
        request: from anybody.
        token: what it must bear, or None where the engine has none.
        setting: of engine.yaml, which names the token's file.

    Raises:
        Refusal: 403 where there is no such token, 401 where it is another.
    """
    if token is None:
        raise Refusal(403, "closed", f"closed until engine.yaml says {setting}")
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Refusal(401, "unauthorised", f"this takes the bearer token of {setting}")


async def read_json(request: Request, limit: int) -> object:
    """The body as JSON, of at most so many bytes.

    Raises:
        Refusal: it is too large, or not JSON.
    """
    try:
        return json.loads(await read_body(request, limit))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "malformed", "the body is not JSON") from error


async def read_body(request: Request, limit: int, *, seconds: float = BODY_SECONDS) -> bytes:
    """The body, of at most so many bytes.

    Raises:
        Refusal: it is too large, or does not come within so many seconds.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    raise Refusal(413, "too_large", f"the body is larger than {limit} bytes")
    except TimeoutError as error:
        text = f"the body was not there within {seconds:g} s"
        raise Refusal(408, "too_slow", text) from error
    return bytes(content)
