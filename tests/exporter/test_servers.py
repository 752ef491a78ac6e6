from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from gpuwarden.errors import InvalidInput, TemporaryError
from gpuwarden.exporter import servers
from gpuwarden.exporter.servers import (
    Bounded,
    QuietServer,
    end_by_signal,
    listening,
    parse_address,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9835", ("127.0.0.1", 9835)),
        (":9835", ("::", 9835)),
        ("[::1]:1", ("::1", 1)),
        ("gpu-1.example:80", ("gpu-1.example", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    """Addresses are written as everywhere in Prometheus' world."""
    assert parse_address(text, default_port=9835) == address


@pytest.mark.parametrize("text", ["9835", "::1:9835", "host:", "host:x", "host:70000", ""])
def test_wrong_addresses(text: str) -> None:
    """A wrong address is answered with right ones."""
    with pytest.raises(InvalidInput, match=r"127\.0\.0\.1:9835"):
        parse_address(text, default_port=9835)


def test_an_address_that_is_taken() -> None:
    """A taken address says which flag to change."""
    with (
        listening("127.0.0.1", 0) as server,
        pytest.raises(TemporaryError, match=r"--web\.listen-address"),
        listening("127.0.0.1", server.getsockname()[1]),
    ):
        pass


def test_every_address_is_both_kinds() -> None:
    """`:PORT` is reached by IPv4 as well as, where there is any, by IPv6."""
    with listening("::", 0) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the test's own signal handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_serves_is_not_lost(number: signal.Signals) -> None:
    """Told to end while it starts, a server ends; it does not begin to serve for ever."""
    program = uvicorn.Server(uvicorn.Config("nowhere:app", log_config=None))
    end_by_signal(program)
    os.kill(os.getpid(), number)
    assert program.should_exit


def test_a_server_that_sleeps_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal wakes a server that has nothing to do, long before it would look by itself."""
    monkeypatch.setattr(servers, "_DATED_TICK_SECONDS", 3600.0)
    monkeypatch.setattr(servers, "_TICK_SECONDS", 3600.0)

    async def nothing(_scope: Any, _receive: Any, _send: Any) -> None:
        raise NotImplementedError

    async def serve() -> None:
        config = uvicorn.Config(nothing, log_config=None, timeout_notify=7200)
        config.load()
        program = QuietServer(config)
        serving = asyncio.create_task(program.main_loop())
        # It looked once, and sleeps.
        await asyncio.sleep(0)
        program.handle_exit(signal.SIGTERM, None)
        await serving

    asyncio.run(serve())


def test_more_requests_than_the_limit_are_refused() -> None:
    """Requests beyond the limit are answered 503 at once, and room is made when one is done."""

    async def ask(application: Bounded) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            raise NotImplementedError

        async def send(message: Any) -> None:
            sent.append(message)

        await application({"type": "http"}, receive, send)
        return int(sent[0]["status"])

    async def all_of_it() -> list[int]:
        entered, release = asyncio.Event(), asyncio.Event()

        async def slow(_scope: Any, _receive: Any, send: Any) -> None:
            entered.set()
            await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        application = Bounded(slow, 1)
        first = asyncio.create_task(ask(application))
        await entered.wait()
        second = await ask(application)
        release.set()
        return [await first, second, await ask(application)]

    assert asyncio.run(all_of_it()) == [200, 503, 200]
