"""Connections of scrapers: requests parsed in C, and none larger than a request to read can be.

The parser (llhttp) bounds nothing by itself: neither a header that never ends, nor headers without
number, nor those that may follow a body. So what a connection sends for one request is counted.
"""

from __future__ import annotations

from email.utils import formatdate

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_REQUEST_BYTES = 16 * 1024
"""Of one request, whatever it consists of: nothing is uploaded to who is only read."""
MAX_WAITING = 8
"""Requests that wait on a connection until the one before is answered; each answer lets more in."""


class ReadersConnection(HttpToolsProtocol):
    """uvicorn's connection with httptools, bounded; dates its answers when they are made."""

    _left = MAX_REQUEST_BYTES
    _answered = False
    _refused = False

    def data_received(self, data: bytes) -> None:
        """Take what came; a request that is too large ends its connection."""
        if self._refused:
            return
        super().data_received(data)
        self._left -= len(data)
        if self._left < 0:
            self._refuse()

    def on_message_begin(self) -> None:
        """Count anew."""
        self._left = MAX_REQUEST_BYTES
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Answer, now or when those before are answered; who asks on and on is not waited upon."""
        if self._refused:
            return
        if len(self.pipeline) >= MAX_WAITING:
            self._refuse()
            return
        self._answered = True
        date = formatdate(usegmt=True).encode()
        self.server_state.default_headers = [(b"date", date)]
        super().on_headers_complete()

    def _refuse(self) -> None:
        self._refused = True
        if self._answered:
            # It may be in the middle of an answer, where there is nothing else to say.
            self.transport.close()
        else:
            self.send_400_response("The request is too large.")
