"""A server's side of a connection: bounded in number, and in how long a request may take to come.

uvicorn waits for ever for the rest of a request's head. Whoever opened many and sent nothing would
use up the server's files: an engine could then ask no Prometheus, and end nothing.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio


def _half_of_the_files() -> int:
    """Half of what the process may have open; the other half is for its own work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 65_536 if soft == resource.RLIM_INFINITY else max(32, soft // 2)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 by h11, which bounds every header, for so many connections and so long a head."""

    head_seconds: ClassVar[float] = 15.0
    """In which the head of a request must be there, from the connection or its first byte on."""
    most: ClassVar[int] = _half_of_the_files()
    """Connections at the same time; further ones are closed at once."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """A part of a request has come."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._calm()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Count while a head is not whole; not while a request is answered."""
        if self.conn.their_state is not h11.IDLE:
            self._calm()
        elif self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _calm(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
