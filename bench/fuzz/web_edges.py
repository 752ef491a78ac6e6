"""Web requests to a real exporter, whose answers to others must not suffer."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.fuzz.edges import Attack, require
from bench.fuzz.mutations import Mutations
from bench.fuzz.results import Result

if TYPE_CHECKING:
    from collections.abc import Iterator

_ASKS_SECONDS = 0.25
_GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n"
REQUESTS = Attack(
    "web requests",
    lambda _folder, _stack: lambda _data: None,
    (
        _GET,
        _GET + _GET,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET /-/ready HTTP/1.0\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ),
    (
        *(b"\r\n", b"\n", b"\0", b": ", b"Content-Length: 99999999999\r\n", b"HTTP/2.0", b"%ff"),
        *(b"Transfer-Encoding: chunked\r\n", b"/../../etc/passwd", b"?" * 100, b"\xff", b"HEAD "),
        *(b"Expect: 100-continue\r\n", b"X-Prometheus-Scrape-Timeout-Seconds: 0.01\r\n"),
    ),
    pure=False,
)


@contextlib.contextmanager
def _exporter() -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="hostile-web-") as folder:
        scenario = Path(folder, "scenario")
        scenario.write_text("card index=0\n")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        command = [sys.executable, "-m", "gpuwarden", "exporter", "--log.level", "error"]
        command += ["--gpus", f"simulated:{scenario}", "--jobs.directory", f"{folder}/jobs"]
        command += ["--release-file", f"{folder}/release"]
        command += ["--web.listen-address", f"127.0.0.1:{port}"]
        program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while _scrape("127.0.0.1", port) != 200:
                require(holds=time.monotonic() < deadline, what="the exporter does not start")
                time.sleep(0.1)
            yield "127.0.0.1", port
            require(holds=program.poll() is None, what="the exporter ended")
        finally:
            program.terminate()
            program.wait()


def _scrape(host: str, port: int) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        whole = b"gpuwarden_nvml_up 1.0" in answer.read()
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return answer.status if whole else 0
    finally:
        connection.close()


def _ask(address: tuple[str, int], data: bytes) -> bytes:
    """What a server answers to bytes, or does within a moment."""
    found = b""
    with socket.create_connection(address, timeout=10) as connection:
        connection.settimeout(_ASKS_SECONDS)
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                found += part
    return found


def attack_web(seconds: float, seed: int) -> Result:
    """Try it for a while.

    Args:
        seconds: for how long.
        seed: of the mutations.
    """
    result = Result(REQUESTS.name, "mutated, one real server")
    mutations = Mutations(REQUESTS.seeds, REQUESTS.words, random.Random(seed))  # noqa: S311
    began = time.monotonic()
    with _exporter() as address:
        while (spent := time.monotonic() - began) < seconds:
            data = mutations.next()
            result.inputs += 1
            answer = _ask(address, data)
            if answer and not answer.startswith(b"HTTP/1."):
                result.faults[f"no answer of HTTP: {answer[:60]!r}"] += 1
            elif b"HTTP/1.1 500" in answer:
                result.faults["500"] += 1
                print(f"web requests: 500 by {data!r}", flush=True)
            if result.inputs % 50 == 0 and _scrape(*address) != 200:
                result.faults["a scrape beside it failed"] += 1
        result.seconds = spent
    return result
