from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any, Self

import pytest
import uvicorn
from tests.exporter.nodes import eventually

from gpuwarden.errors import InvalidInput, TemporaryError
from gpuwarden.exporter import servers
from gpuwarden.exporter.connections import ReadersConnection
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


class Serving:
    """A server on a thread of its own whose answers are as large as the test says."""

    def __init__(self, application: Any, http: Any = ReadersConnection) -> None:
        config = uvicorn.Config(application, http=http, lifespan="off", log_config=None, ws="none")
        config.load()
        self._program = QuietServer(config)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._thread = threading.Thread(target=self._program.run, args=([self._server],))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._program.should_exit = True
        self._thread.join()
        self._server.close()

    def connect(self, request: bytes = b"") -> socket.socket:
        """A connection on which something was sent."""
        connection = socket.create_connection(self.address, timeout=30)
        connection.sendall(request)
        return connection


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _large(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(64):
        await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _small(_scope: Any, _receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("http", [ReadersConnection, "h11"])
def test_who_does_not_read_gives_up_his_place(http: Any) -> None:
    """Whoever asks for a page and does not read it is not waited for longer than a request may."""
    with Serving(Bounded(_large, 1, seconds=0.3), http) as serving:
        stuck = serving.connect(GET)
        first = stuck.recv(12)
        assert first == b"HTTP/1.1 200"

        def status() -> bytes:
            with serving.connect(GET) as another:
                return another.recv(12)

        assert status() == b"HTTP/1.1 503"
        assert eventually(status, until=lambda seen: seen == first)
        stuck.close()


@pytest.mark.parametrize("http", [ReadersConnection, "h11"])
@pytest.mark.parametrize("request_", [b"", b"GET / HT", GET, GET + b"GET "])
def test_who_does_not_ask_is_shown_out(
    monkeypatch: pytest.MonkeyPatch, request_: bytes, http: Any
) -> None:
    """A connection on which nothing is asked, or half a request, does not stay for ever."""
    monkeypatch.setattr(servers, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(servers, "_IDLE_SECONDS", 0.2)
    with Serving(Bounded(_small, 1), http) as serving, serving.connect(request_) as idle:
        seen = b""
        with contextlib.suppress(ConnectionResetError):
            while part := idle.recv(4096):
                seen += part
        assert seen.count(b"200 OK") == request_.count(b"\r\n\r\n")


def test_who_asks_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scraper that keeps its connection keeps it, however long it lasts."""
    monkeypatch.setattr(servers, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(servers, "_IDLE_SECONDS", 1.0)
    with Serving(Bounded(_small, 1)) as serving, serving.connect() as scraper:
        for _ in range(30):
            scraper.sendall(GET)
            seen = scraper.recv(4096)
            while not seen.endswith(b"ok") and (part := scraper.recv(4096)):
                seen += part
            assert b"200 OK" in seen
            threading.Event().wait(0.1)


def test_the_oldest_of_too_many_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of connections do not take all the memory: those that idle longest go first."""
    monkeypatch.setattr(servers, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(servers, "_CONNECTIONS", 20)
    with Serving(Bounded(_small, 1)) as serving, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(serving.connect()) for _ in range(60)]

        def gone() -> int:
            readable, _, _ = select.select(crowd, [], [], 0)
            return len(readable)

        eventually(gone, until=lambda count: count == 40)
        with serving.connect(GET) as scraper:
            assert b"200 OK" in scraper.recv(4096)
