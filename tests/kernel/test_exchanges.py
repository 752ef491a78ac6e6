"""Servers that do not end their answers: a request is over all the same."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.ruleengine.worlds import Sink
from tests.servers import free_port

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exchanges import MAX_ANSWER_BYTES, Answer, exchange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1000000000\r\n\r\n"


@contextlib.asynccontextmanager
async def endless(part: bytes, pause: float) -> AsyncIterator[str]:
    """A server whose answers never end."""
    serving: list[asyncio.Task[None] | None] = []
    over = asyncio.Event()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(OSError):  # the client has had enough
            writer.write(HEAD)
            while not over.is_set():
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()
        await asyncio.gather(*(task for task in serving if task is not None))


@pytest.mark.parametrize(
    ("part", "pause", "seconds", "reason"),
    [
        (b"x", 0.01, 0.5, "no whole answer within 0.5 s"),
        (b"x" * 65536, 0.0, 60.0, f"larger than {MAX_ANSWER_BYTES} bytes"),
    ],
)
def test_an_endless_answer_is_given_up(
    part: bytes, pause: float, seconds: float, reason: str
) -> None:
    """Each byte comes in time, or all of them at once: the whole counts."""

    async def story() -> None:
        async with endless(part, pause) as url, httpx.AsyncClient(timeout=30) as client:
            with pytest.raises(ServiceUnavailable, match=reason):
                await exchange(client, "GET", url, seconds=seconds)

    asyncio.run(story())


def test_nobody_there_is_unavailable() -> None:
    """Every error of the way there is one kind of error."""

    async def story() -> None:
        async with httpx.AsyncClient() as client:
            for url in (f"http://127.0.0.1:{free_port()}", "http://[::1:1", "gopher://x"):
                with pytest.raises(ServiceUnavailable):
                    await exchange(client, "GET", url, seconds=30)

    asyncio.run(story())


def test_an_answer_is_status_headers_and_body() -> None:
    """Whatever the status: what it means is the caller's to say."""

    async def story(url: str) -> Answer:
        async with httpx.AsyncClient() as client:
            return await exchange(
                client, "POST", url, seconds=30, content=b"{}", headers={"X-Word": "mine"}
            )

    with Sink(lambda *_: (418, b'{"a": [1]}')) as sink:
        answer = asyncio.run(story(sink.url))
        assert sink.received[0].headers["x-word"] == "mine"
    assert answer.status == 418
    assert answer.json() == {"a": [1]}
    assert "date" in answer.headers
    assert Answer(200, {}, b" <html>\n\xff ").excerpt() == "<html> \ufffd"
    with pytest.raises(ValueError, match="nested"):
        Answer(200, {}, b"[" * 100_000).json()
