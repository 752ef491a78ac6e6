"""What a connection may send: real bytes to a real server."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exporter.nodes import eventually

from gpuwarden.exporter.connections import (
    MAX_REQUEST_BYTES,
    MAX_WAITING,
    ReadersConnection,
)
from gpuwarden.exporter.servers import QuietServer, listening
from gpuwarden.exporter.sites import HTML, Answer, Headers, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 20


class _Server(QuietServer):
    def capture_signals(self) -> Any:
        # Only the main thread may.
        return _Nothing()


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


async def _page(headers: Headers) -> Answer:
    return Answer(f"accept: {headers.get('Accept')}\n".encode())


async def _other(_headers: Headers) -> Answer:
    return Answer(b"<p>", HTML, headers=(("x-other", "1"),))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of two pages, as the exporter's is set up."""
    config = uvicorn.Config(
        Site({"/": _other, "/page": _page}),
        access_log=False,
        date_header=False,
        http=ReadersConnection,
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    config.load()
    with listening("127.0.0.1", 0) as server:
        program = _Server(config)
        thread = threading.Thread(
            target=lambda: asyncio.run(program.serve(sockets=[server])), daemon=True
        )
        thread.start()
        eventually(lambda: program.started)
        yield server.getsockname()[1]
        program.handle_exit(signal.SIGTERM, None)
        thread.join(SECONDS)


def _say(port: int, *parts: bytes) -> bytes:
    """Everything that a connection is answered, to its end; what it cannot send it does not."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except TimeoutError:
            raise
        except OSError:
            # The server has closed it already.
            pass
    return answer


def _get(path: str, *lines: str, method: str = "GET") -> bytes:
    head = (f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *lines, "", "")
    return "\r\n".join(head).encode()


def _lives(port: int) -> bool:
    return _say(port, _get("/page")).startswith(b"HTTP/1.1 200 ")


def test_a_page(port: int) -> None:
    """A page is sent with its type, its length and the time; several headers are one list."""
    began = int(time.time())
    head, _, body = _say(port, _get("/page", "Accept: a", "ACCEPT: b")).partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "http/1.1 200 ok"
    assert body == b"accept: a, b\n"
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert headers["content-length"] == str(len(body))
    dated = email.utils.parsedate_to_datetime(headers["date"]).timestamp()
    assert began <= dated <= time.time()
    assert lines[1:] == [line for line in lines[1:] if not line.startswith("server")]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/page/", b"200"),
        ("GET", "/page?x=1", b"200"),
        ("GET", "/", b"200"),
        ("GET", "/nothing", b"404"),
        ("GET", "//", b"404"),
        ("POST", "/page", b"405"),
        ("DELETE", "/", b"405"),
        ("POST", "/nothing", b"404"),
    ],
)
def test_paths_and_methods(port: int, method: str, path: str, status: bytes) -> None:
    """Pages are read and nothing else; what there is not, is said not to be there."""
    answer = _say(port, _get(path, method=method))
    assert answer.split()[1] == status
    assert (b"allow: GET, HEAD" in answer) == (status == b"405")


def test_head(port: int) -> None:
    """HEAD has the length of the page and no page."""
    head, _, body = _say(port, _get("/page", method="HEAD")).partition(b"\r\n\r\n")
    assert (b"content-length: 9" in head, body) == (True, b"")


def test_a_connection_that_stays(port: int) -> None:
    """Requests of one connection are answered one after another, however many bytes they sum to."""
    one = b"GET /page HTTP/1.1\r\nHost: x\r\nAccept: " + b"x" * 10_000 + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        for _ in range(10):
            connection.sendall(one)
            answer = b""
            while not answer.endswith(b"x\n"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /page HTTP/1.1\r\nHost: x\r\nA: ", *[b"a" * 4096] * 100],
        [b"GET /page HTTP/1.1\r\n", *[b"A: a\r\n" * 1000] * 100],
        [b"GET /", *[b"a" * 4096] * 100],
        [b"a" * 1_000_000],
        [b"GET /page HTTP/1.1\r\nHost: x\r\n\r\nGET /" + b"a" * 10_000_000],
        [b"POST /page HTTP/1.1\r\nContent-Length: 10000000\r\n\r\n", *[b"a" * 65536] * 100],
        [
            b"POST /page HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            *[b"A: a\r\n" * 1000] * 100,
        ],
    ],
)
def test_requests_without_end(port: int, parts: list[bytes]) -> None:
    """A path, a header, headers, a body and what follows a body end with their connection."""
    answer = _say(port, *parts)
    assert answer == b"" or answer.split()[1] in (b"200", b"400", b"405")
    assert _lives(port)


def test_a_request_that_is_too_large_is_told_so(port: int) -> None:
    """A head of more than 16 KiB is answered before it is complete."""
    head = b"GET /page HTTP/1.1\r\nA: " + b"a" * (MAX_REQUEST_BYTES - 100)
    assert b"200 OK" in _say(port, head, b"\r\nConnection: close\r\n\r\n")
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        connection.sendall(head)
        connection.sendall(b"a" * 200)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=300)
    | st.tuples(
        st.sampled_from([b"GET", b"CONNECT", b"OPTIONS", b"PRI", b"get"]),
        st.sampled_from([b"/page", b"*", b"x:1", b"http://x/page", b"/%ff", b"/\xff", b""]),
        st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""]),
        st.lists(
            st.sampled_from(
                [
                    *(
                        b"Host: x",
                        b"Upgrade: websocket",
                        b"Connection: upgrade",
                        b"Expect: 100-continue",
                    ),
                    *(b"Content-Length: 1", b"Content-Length: -1", b"Transfer-Encoding: chunked"),
                    *(b": ", b"A", b" folded", b"A: \xff\x00"),
                ]
            ),
            max_size=4,
        ),
    ).map(lambda item: b"\r\n".join((b" ".join(item[:3]), *item[3], b"", b"")))
)
def test_whatever_is_sent(port: int, content: bytes) -> None:
    """Whatever bytes come, the next scrape is answered."""
    _say(port, content)
    assert _lives(port)


def test_requests_that_wait(port: int) -> None:
    """A few requests at once are answered in turn; who sends thousands is not waited upon."""
    request = b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as few:
        few.sendall(request * (MAX_WAITING + 1))
        seen = b""
        while seen.count(b"200 OK") <= MAX_WAITING:
            part = few.recv(65536)
            assert part
            seen += part
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as many:
        seen = b""
        with contextlib.suppress(ConnectionError):
            many.sendall(request * 1000)
            while part := many.recv(65536):
                seen += part
    assert seen.count(b"200 OK") <= MAX_WAITING + 1
