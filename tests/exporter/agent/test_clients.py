"""An operator's client of an agent, where no agent is."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.exporter.agent.clients import Client

if TYPE_CHECKING:
    from tests.exporter.agent.nodes import Engine


@pytest.mark.parametrize(
    "url", ["gpu-1:9836", "http://x:abc", "http://[::1", "http://a b", "http://:9836", "http://x:0"]
)
def test_an_address_that_is_none(engine: Engine, url: str) -> None:
    """What is no address is refused before anything is sent, with an example of one."""
    with pytest.raises(InvalidInput, match="is not an address such as"):
        Client(url, engine.private)


@pytest.mark.parametrize("said", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nhi"])
def test_another_server(engine: Engine, said: bytes) -> None:
    """What another server says is no answer, and it is told that no agent is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        client = Client(f"http://127.0.0.1:{server.getsockname()[1]}", engine.private)
        with pytest.raises(ServiceUnavailable, match="is no agent"):
            client.command_lines("proc-0badcafe-1-1")
        thread.join()
