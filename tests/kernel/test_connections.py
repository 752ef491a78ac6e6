"""Clients that open connections and send little: they cost themselves, and not the engine."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tests.ruleengine.engines import eventually
from tests.servers import free_port

from gpuwarden.connections import BoundedProtocol
from gpuwarden.refusals import Refusal, read_body, refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response


class Hasty(BoundedProtocol):
    """Waits for nobody."""

    head_seconds = 0.05


class Narrow(BoundedProtocol):
    """For two clients."""

    most = 2


async def echo(request: Request) -> Response:
    """The length of the body."""
    body = await read_body(request, 1024, seconds=0.05)
    return PlainTextResponse(f"{len(body)} bytes\n")


@contextlib.asynccontextmanager
async def served(protocol: type[BoundedProtocol]) -> AsyncIterator[tuple[int, set[Any]]]:
    """The port and the connections of a server that speaks it."""
    port = free_port()
    app = Starlette(
        routes=[Route("/", echo, methods=["GET", "POST"])], exception_handlers={Refusal: refused}
    )
    server = uvicorn.Server(
        uvicorn.Config(app, "127.0.0.1", port, http=protocol, log_config=None, access_log=False)
    )
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    try:
        yield port, server.server_state.connections
    finally:
        server.should_exit = True
        await task


async def sent(port: int, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which this was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    return reader, writer


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Everything that comes until the other side ends the connection."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_who_sends_no_whole_head_is_let_go(begun: bytes) -> None:
    """Also after a request that was answered."""

    async def story() -> None:
        async with served(Hasty) as (port, _):
            reader, writer = await sent(port, begun)
            assert await rest(reader) == b""
            writer.close()
            reader, writer = await sent(port, WHOLE)
            assert await reader.readuntil(b"bytes\n")
            writer.write(b"GET / HT")
            assert await rest(reader) == b""
            writer.close()

    asyncio.run(story())


def test_who_sends_a_head_and_no_body_is_told_so() -> None:
    """And the answer to a whole request is not cut off."""

    async def story() -> None:
        async with served(Hasty) as (port, _):
            head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close\r\n\r\n"
            reader, writer = await sent(port, head, b"ab")
            assert b"408" in (await rest(reader)).splitlines()[0]
            writer.close()
            reader, writer = await sent(port, head, b"abcde")
            assert b"5 bytes" in await rest(reader)
            writer.close()

    asyncio.run(story())


def test_one_connection_too_many_is_closed_and_the_others_are_served() -> None:
    """A place that is given back can be had again."""

    async def story() -> None:
        async with served(Narrow) as (port, connections):
            first, second = await sent(port, WHOLE), await sent(port, WHOLE)
            for reader, _ in (first, second):
                assert await reader.readuntil(b"bytes\n")
            third, writer = await sent(port)
            assert await rest(third) == b""
            writer.close()
            first[1].write(WHOLE)
            assert await first[0].readuntil(b"bytes\n")
            for _, open_ in (first, second):
                open_.close()
                await open_.wait_closed()
            await eventually(lambda: not connections)
            reader, writer = await sent(port, WHOLE)
            assert await reader.readuntil(b"bytes\n")
            writer.close()

    asyncio.run(story())
