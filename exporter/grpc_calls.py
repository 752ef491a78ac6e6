"""One call of gRPC to a server on this host: little more than one request of HTTP/2.

A gRPC runtime would bring threads and tens of MiB for what a node asks every ten seconds.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import H2Error

from gpuwarden.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

CALL_SECONDS = 5.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Nodes with many pods and devices answer with more than gRPC's usual 4 MiB."""

_PREFIX_BYTES = 5
"""Before each message: whether it is compressed, and its length."""
_CHUNK = 65_536


def call(path: Path, method: str, *, seconds: float = CALL_SECONDS) -> bytes:
    """Call a method that takes an empty message and gives one.

    Args:
        path: the server's unix socket.
        method: such as /v1.PodResourcesLister/List.
        seconds: for all of it.

    Returns:
        The message that was answered.

    Raises:
        ServiceUnavailable: no answer, or one that says why not.
        PermissionError: this user may not call it.
    """
    deadline = time.monotonic() + seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(os.fspath(path))
            return _Call(connection, deadline).make(method)
    except PermissionError:
        raise
    except (OSError, H2Error) as error:
        raise ServiceUnavailable(f"no answer at {path}: {type(error).__name__} {error}") from error


class _Call:
    """A call on a connection of its own."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._peer = H2Connection(H2Configuration(header_encoding=None))
        self._content = bytearray()
        self._headers: dict[bytes, bytes] = {}

    def make(self, method: str) -> bytes:
        peer = self._peer
        peer.initiate_connection()
        stream = peer.get_next_available_stream_id()
        peer.send_headers(
            stream,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", method),
                (":authority", "localhost"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("grpc-timeout", f"{max(1, int(self._left() * 1000))}m"),
            ],
        )
        # An empty message: not compressed, no bytes.
        peer.send_data(stream, bytes(_PREFIX_BYTES), end_stream=True)
        ended = False
        while not ended:
            self._connection.sendall(peer.data_to_send())
            self._connection.settimeout(self._left())
            received = self._connection.recv(_CHUNK)
            if not received:
                raise ServiceUnavailable("the server hung up in the middle of its answer")
            ended = self._take(peer.receive_data(received), stream)
        return _message(bytes(self._content), self._headers)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ServiceUnavailable("no answer in time")
        return left

    def _take(self, received: Iterable[events.Event], stream: int) -> bool:
        """Take what came; says whether the answer has ended."""
        for event in received:
            match event:
                case events.ResponseReceived() | events.TrailersReceived():
                    self._headers.update(
                        (bytes(name), bytes(value)) for name, value in event.headers
                    )
                case events.DataReceived():
                    self._content += event.data
                    if len(self._content) > MAX_ANSWER_BYTES:
                        raise ServiceUnavailable(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
                    self._peer.acknowledge_received_data(event.flow_controlled_length or 0, stream)
                case events.StreamEnded():
                    return True
                case events.StreamReset() | events.ConnectionTerminated():
                    raise ServiceUnavailable(f"the server broke off: {event}")
        return False


def _message(content: bytes, headers: Mapping[bytes, bytes]) -> bytes:
    http, status = (headers.get(name, b"").decode() for name in (b":status", b"grpc-status"))
    if (http, status) != ("200", "0"):
        said = headers.get(b"grpc-message", b"").decode(errors="replace")[:200]
        raise ServiceUnavailable(f"refused: HTTP {http}, gRPC status {status} {said}")
    size = int.from_bytes(content[1:_PREFIX_BYTES], "big")
    if len(content) != _PREFIX_BYTES + size or content[0]:
        raise ServiceUnavailable("an answer that is no message of gRPC")
    return content[_PREFIX_BYTES:]
