"""A Prometheus for as long as it is needed, filled with given samples, stale markers included.

It is filled by its own remote-write receiver: what promtool makes of OpenMetrics knows no stale
marker, by which a real Prometheus sees at once that a series has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.ruleengine.histories import History
from gpuwarden.ruleengine.remote_writes import uncompressed, write_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence


READY_SECONDS = 60.0
STOP_SECONDS = 10.0
TRIES = 3
"""Another process may take the free port before Prometheus does."""
SLICE_SECONDS = 1200.0
"""One request must not span more: a head refuses what is an hour older than its newest sample."""
_PLACES = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/opt/prometheus")


def prometheus_binary(folders: Sequence[str | Path] | None = None) -> str:
    """The path of Prometheus.

    Args:
        folders: where to look; the PATH, and where packages put it, by default.

    Raises:
        ServiceUnavailable: it is not installed; says how to install it.
    """
    if folders is None:
        folders = (os.environ.get("PATH", ""), *_PLACES)
    found = shutil.which("prometheus", path=os.pathsep.join(str(item) for item in folders))
    if found is None:
        raise ServiceUnavailable(
            "Prometheus is not installed, and tests of rules run on one: apt-get install "
            "--no-install-recommends prometheus, or put the program `prometheus` (2.42 or later) "
            "of https://prometheus.io/download into the PATH"
        )
    return found


@contextlib.asynccontextmanager
async def temporary_prometheus(history: History | Iterable[bytes]) -> AsyncIterator[str]:
    """A Prometheus on a free port of the loopback that holds a history, until the context ends.

    Args:
        history: its series, or bodies of remote writes in the order of time.

    Yields:
        Its address.

    Raises:
        ServiceUnavailable: it is not installed, does not start, or refuses the history.
    """
    binary = prometheus_binary()
    with tempfile.TemporaryDirectory(prefix="gpuwarden-rules-", ignore_cleanup_errors=True) as name:
        process, url = await _started(binary, Path(name))
        try:
            await _fill(url, history)
            yield url
        finally:
            await _stop(process)


async def _started(binary: str, folder: Path) -> tuple[asyncio.subprocess.Process, str]:
    (folder / "prometheus.yml").write_text("global: {}\n", encoding="utf-8")
    log = folder / "prometheus.log"
    for _ in range(TRIES):
        port = _free_port()
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                binary,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                # Histories are of any age: nothing is retired.
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{port}",
                "--web.enable-remote-write-receiver",
                "--log.level=warn",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            if await _ready(process, url):
                return process, url
        except BaseException:
            await _stop(process)
            raise
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise ServiceUnavailable(f"the temporary Prometheus does not start: {tail.strip()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _direct() -> httpx.AsyncClient:
    """A client that no proxy of the environment comes between."""
    return httpx.AsyncClient(timeout=30.0, trust_env=False)


async def _ready(process: asyncio.subprocess.Process, url: str) -> bool:
    """Whether it has come up; False if it has ended."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + READY_SECONDS
    async with _direct() as client:
        while process.returncode is None:
            with contextlib.suppress(ServiceUnavailable):
                answer = await exchange(client, "GET", f"{url}/-/ready", seconds=5)
                if answer.status == httpx.codes.OK and process.returncode is None:
                    return True
            if loop.time() > deadline:
                raise ServiceUnavailable(
                    f"the temporary Prometheus is not ready after {READY_SECONDS:.0f} s"
                )
            await asyncio.sleep(0.05)
    return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End it: nothing of it is kept, so that it need not put anything away."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_SECONDS)


def _bodies(history: History | Iterable[bytes]) -> Iterable[bytes]:
    if not isinstance(history, History):
        return history
    return (write_request(part.items()) for part in history.slices(SLICE_SECONDS))


async def _fill(url: str, history: History | Iterable[bytes]) -> None:
    headers = {
        "Content-Type": "application/x-protobuf",
        "Content-Encoding": "snappy",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    }
    async with _direct() as client:
        for content in _bodies(history):
            body = uncompressed(content)
            answer = await exchange(
                client, "POST", f"{url}/api/v1/write", seconds=60, content=body, headers=headers
            )
            if answer.status // 100 != 2:
                raise ServiceUnavailable(
                    f"the temporary Prometheus refuses the series: {answer.status} "
                    f"{answer.excerpt()}"
                )
