"""What the servers of exporter and agent have in common: their address, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import signal
import socket
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn

from gpuwarden.errors import InvalidInput, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from types import FrameType

    from starlette.types import ASGIApp, Receive, Scope, Send

_BACKLOG = 128
_OPEN_FILES = 65536
_TICK_SECONDS = 5.0
_DATED_TICK_SECONDS = 1.0
"""Where uvicorn itself dates the answers: it does so with each tick."""
_CONNECTIONS = 1024
_IDLE_SECONDS = 60.0
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|(?P<host>[^:\[\]\s]*)):(?P<port>[0-9]{1,5})"
)

_logger = structlog.get_logger(__name__)


def parse_address(text: str, *, default_port: int) -> tuple[str, int]:
    """Host and port of a `--web.listen-address`.

    Args:
        text: `HOST:PORT`, `[IPv6]:PORT`, or `:PORT` for every address.
        default_port: the program's own, for the examples of the error's message.

    Returns:
        The host, `::` for every address, and the port.

    Raises:
        InvalidInput: it is none of these.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise InvalidInput(
            f"--web.listen-address {text!r} is not an address HOST:PORT: write "
            f"127.0.0.1:{default_port}, [::1]:{default_port}, or :{default_port} for every address"
        )
    return match["v6"] or match["host"] or "::", int(match["port"])


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket.

    Args:
        host: address; `::` takes IPv4 too where the system has both.
        port: 0 for a free one.

    Raises:
        TemporaryError: the address is taken or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not both:
        family, host = socket.AF_INET, ""
    try:
        server = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise TemporaryError(
            f"{host or '*'} port {port} cannot be listened on: {error.strerror or error}; "
            "choose another --web.listen-address"
        ) from error
    with server:
        yield server


def end_by_signal(program: uvicorn.Server) -> None:
    """Let SIGTERM and SIGINT end a server in an orderly way, also before and after it serves.

    uvicorn takes these signals over while it serves, and raises the one that ended it once more;
    neither before nor after that may a signal be lost, or skip what is to be done at the end.
    """

    def end(_number: int, _frame: object) -> None:
        program.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


class QuietServer(uvicorn.Server):
    """A server that sleeps while nobody asks for anything.

    uvicorn's own looks ten times a second whether it should end, which is a third of what an idle
    node costs. This one is woken by the signal, and else looks every few seconds.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        """Prepare.

        Args:
            config: as for uvicorn's own.
        """
        super().__init__(config)
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._visitors = _Visitors()

    async def main_loop(self) -> None:
        """Serve until it should end."""
        self._loop = asyncio.get_running_loop()
        # A supervisor must hear of it within twice the time that it is told after.
        tick = min(_TICK_SECONDS, self.config.timeout_notify / 2)
        if self.config.date_header:
            tick = min(tick, _DATED_TICK_SECONDS)
        # Each tenth of uvicorn's ticks does what is to be done every second.
        while not await self.on_tick(0):
            self._visitors.see(self.server_state.connections, self._loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick):
                    await self._woken.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, and now."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)


class _Visitors:
    """Those who are connected and do not ask: uvicorn waits for them for ever."""

    def __init__(self) -> None:
        self._idle: dict[Any, tuple[Any, float]] = {}

    def see(self, connections: Collection[Any], now: float) -> None:
        """Close connections on which nothing was asked for a minute, and the oldest of too many.

        Args:
            connections: uvicorn's protocols; each has the cycle of its last request, and transport.
            now: the event loop's time.
        """
        idle: dict[Any, tuple[Any, float]] = {}
        for visitor in connections:
            cycle = visitor.cycle
            done = cycle is None or cycle.response_complete or visitor.transport.is_closing()
            if not done:
                continue
            last, since = self._idle.get(visitor, (cycle, now))
            # Another request since is another cycle.
            idle[visitor] = (cycle, since if last is cycle else now)
        self._idle = idle
        oldest = sorted(idle, key=lambda visitor: idle[visitor][1])
        too_many = max(0, len(connections) - _CONNECTIONS)
        for number, visitor in enumerate(oldest):
            if number < too_many or now - idle[visitor][1] > _IDLE_SECONDS:
                visitor.transport.abort()


class Bounded:
    """An application that answers so many requests at the same time, and 503 to more.

    uvicorn's own limit counts open connections, also those on which nobody asks for anything: with
    some dozens of them any user of the node could keep everybody else from being answered. Nor does
    anybody take part of the limit by asking and not reading the answer.
    """

    def __init__(self, application: ASGIApp, limit: int, *, seconds: float = 60.0) -> None:
        """Bound an application.

        Args:
            application: what answers.
            limit: requests at the same time.
            seconds: for which one may take, with the sending of its answer.
        """
        self._application = application
        self._limit = limit
        self._seconds = seconds
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass on what is none."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        if self._active >= self._limit:
            headers = [(b"content-type", b"text/plain"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": b"too many requests at a time\n"})
            return
        self._active += 1
        try:
            async with asyncio.timeout(self._seconds):
                await self._application(scope, receive, send)
        except TimeoutError:
            # What is left unanswered so is closed by the server.
            _logger.warning("request given up", path=scope.get("path"), seconds=self._seconds)
        finally:
            self._active -= 1


def raise_open_files() -> None:
    """Allow this process the open files that the system would give it.

    A connection needs one, and so does every process of a job that the agent holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
