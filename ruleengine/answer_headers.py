"""What every answer of the engine's HTTP side says to browsers and proxies in between.

Nearly every answer depends on who asks, by a header that a cache in between may not know of, and
holds words that jobs chose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DEFAULTS = {b"cache-control": b"no-store", b"x-content-type-options": b"nosniff"}


class AnswerHeaders:
    """Middleware: no answer is kept by a cache or taken for another type, unless it says so.

    Args:
        app: whose answers they are.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = {name.lower() for name, _ in message["headers"]}
                more = [(name, text) for name, text in _DEFAULTS.items() if name not in said]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._app(scope, receive, sent)
