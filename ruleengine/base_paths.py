"""The engine below a path of somebody else's host, such as https://host/gpuwarden/.

Handlers and templates know their own paths only. What comes in loses the base, if the proxy in
front has left it there; what goes out gets it: redirects here, links and forms where pages are
made.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from gpuwarden.ruleengine.prometheus_settings import Url

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LINK = re.compile(r'(?<=\s)(href|action|src)="/(?!/)')
"""An attribute that leads to a path of ours. Texts of others have no quotation mark: each is
escaped."""
_BASE = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
"""Without what would mean something in a page, a cookie or a redirect."""


def _external(url: str) -> str:
    if _BASE.fullmatch(urlsplit(url).path) is None:
        raise PydanticCustomError(
            "GW107",
            "the path of {url} must be of letters, digits, _ - and . alone, such as "
            "https://host/gpuwarden",
            {"url": repr(url)},
        )
    return url


ExternalUrl = Annotated[Url, AfterValidator(_external)]
"""Base address of the engine in people's browsers; it may have a path."""


def base_of(external_url: str) -> str:
    """The path below which people find the engine, without its end; empty: none."""
    return urlsplit(external_url).path.rstrip("/")


def linked(page: str, base: str) -> str:
    """A page whose links and forms lead below the base."""
    return _LINK.sub(rf'\1="{base}/', page) if base else page


class BasePath:
    """Middleware: takes the base off what is asked for, and puts it in front of redirects.

    A path without the base is served too: proxies may take it off, and supervisors and Prometheus
    ask the engine itself.

    Args:
        app: that knows of no base.
        base: as `base_of` gives it.
    """

    def __init__(self, app: ASGIApp, base: str) -> None:
        self._app = app
        self._base = base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = self._inner(scope["path"])
        raw = self._inner(scope.get("raw_path", b"").decode("latin-1"))

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, self._outer(name, text)) for name, text in message["headers"]]
                message = {**message, "headers": headers}
            await send(message)

        await self._app({**scope, "path": path, "raw_path": raw.encode("latin-1")}, receive, sent)

    def _inner(self, path: str) -> str:
        if path == self._base:
            return "/"
        return path.removeprefix(self._base) if path.startswith(f"{self._base}/") else path

    def _outer(self, name: bytes, value: bytes) -> bytes:
        ours = name.lower() == b"location" and value.startswith(b"/") and value[1:2] != b"/"
        return self._base.encode() + value if ours else value
