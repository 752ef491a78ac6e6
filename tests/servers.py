"""Debian's Prometheus and Alertmanager as processes of a test, on free ports of the loopback.

Nothing here depends on pytest, so that the demo and the benchmark can use it too::

    with prometheus(config, tmp_path / "tsdb") as server:
        answer = server.json("/api/v1/query?query=up")

Every server is ready when its context begins, and is stopped by its own pid when it ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

READY_SECONDS = 60.0
"""How long a server may take to become ready; a busy machine needs some."""

PROMETHEUS = ("prometheus",)
ALERTMANAGER = ("prometheus-alertmanager", "alertmanager")
"""Debian's names first, then those of the projects' own releases."""

# The environment's proxy must not see what a test asks of a server on its own machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(AssertionError):
    """A server did not start, with the end of its log."""


def free_port() -> int:
    """A TCP port of the loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(
    probe: Callable[[], T | None], seconds: float = READY_SECONDS, *, every: float = 0.05
) -> T:
    """Ask `probe` until its answer is true, and return that answer.

    Args:
        probe: asked at least once; a connection error counts as "not yet".
        seconds: the deadline, on the monotonic clock.
        every: the pause between two tries, in seconds.

    Raises:
        TimeoutError: with the last error, if the deadline has passed.
    """
    deadline = time.monotonic() + seconds
    last: Exception | None = None
    while True:
        try:
            answer = probe()
        except OSError as error:  # urllib's URLError and HTTPError are OSErrors
            last, answer = error, None
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {seconds:g} s: {probe}") from last
        time.sleep(every)


def fetch(url: str, body: bytes | None = None, *, timeout: float = 30.0, **headers: str) -> bytes:
    """The body that `url` answers with; a POST if there is a `body`.

    Raises:
        urllib.error.HTTPError: for a status that is not 2xx.
    """
    request = urllib.request.Request(url, body)
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with _DIRECT.open(request, timeout=timeout) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        # Kept errors would keep their connections open: what they say moves into memory.
        with error:
            said = io.BytesIO(error.read())
        raise urllib.error.HTTPError(url, error.code, error.reason, error.headers, said) from None


def binary(names: Sequence[str]) -> str:
    """The path of the first of `names` that is installed.

    Raises:
        ServerFailed: if none is, with the command that installs them.
    """
    # Debian puts daemons where the PATH of a plain user may not look.
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/bin", "/usr/sbin", "/usr/local/bin"))
    for name in names:
        found = shutil.which(name, path=path)
        if found:
            return found
    raise ServerFailed(
        f"{names[0]} is not installed: apt-get install prometheus prometheus-alertmanager"
    )


@dataclass(slots=True)
class Server:
    """A process that listens on one port.

    Attributes:
        url: base address, without a trailing slash.
        log: file with the process's output.
        command: argument list, for `start` after `kill`.
        process: the running process, or the last one.
        ready_path: answers 200 once the server is ready.
    """

    url: str
    log: Path
    command: list[str]
    ready_path: str = "/-/ready"
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        """The process's id."""
        if self.process is None:
            raise ServerFailed(f"{self.command[0]} was never started")
        return self.process.pid

    def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            ServerFailed: if it ends or is not ready within `READY_SECONDS`.
        """
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            until(self._ready_or_ended)
        except TimeoutError as error:
            self.stop()
            raise ServerFailed(f"{self.command[0]} is not ready\n{self.tail()}") from error
        if self.process.poll() is not None:
            raise ServerFailed(f"{self.command[0]} ended\n{self.tail()}")

    def _ready_or_ended(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            return True
        fetch(self.url + self.ready_path, timeout=5)
        return True

    def stop(self) -> None:
        """Ask the process to leave, and end it if it has not left after ten seconds."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process as a crash would; `start` brings it back on the same port."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10)

    def reload(self) -> None:
        """Make the server read its configuration again (SIGHUP)."""
        os.kill(self.pid, signal.SIGHUP)

    def tail(self, lines: int = 20) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def json(self, path: str, body: object = None) -> Any:
        """The JSON that a GET of `path` answers, or a POST if there is a `body`."""
        if body is None:
            return json.loads(fetch(self.url + path) or b"null")
        content = json.dumps(body).encode()
        return json.loads(
            fetch(self.url + path, content, Content_Type="application/json") or "null"
        )

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """An instant query of Prometheus: `[{"metric": {...}, "value": [time, "text"]}]`.

        Raises:
            urllib.error.HTTPError: if the expression is refused; its body says why.
        """
        words = {"query": expression} | ({} if at is None else {"time": repr(at)})
        answer = self.json("/api/v1/query?" + urllib.parse.urlencode(words))
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """`server`, started; stopped at the end whatever happened."""
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _config_file(config: str | Path, folder: Path, name: str) -> Path:
    if isinstance(config, Path):
        return config
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(config)
    return path


@contextlib.contextmanager
def _daemon(
    names: Sequence[str],
    config: str | Path,
    storage: Path,
    *,
    port: int | None,
    flags: Sequence[str],
) -> Iterator[Server]:
    """What Prometheus and Alertmanager have in common; the last name is that of the files."""
    port = free_port() if port is None else port
    storage.mkdir(parents=True, exist_ok=True)
    beside = storage.with_name(storage.name + ".run")
    beside.mkdir(exist_ok=True)
    command = [
        binary(names),
        f"--config.file={_config_file(config, beside, f'{names[-1]}.yml')}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
        *flags,
    ]
    log = beside / f"{names[-1]}.log"
    with running(Server(f"http://127.0.0.1:{port}", log, command)) as server:
        yield server


@contextlib.contextmanager
def prometheus(
    config: str | Path, storage: Path, *, port: int | None = None, flags: Sequence[str] = ()
) -> Iterator[Server]:
    """A Prometheus.

    Args:
        config: prometheus.yml, as a path or as its text.
        storage: folder of its database, which may hold blocks already (`backfill`).
        port: the port to listen on; a free one if not given.
        flags: further command line flags.
    """
    own = [
        f"--storage.tsdb.path={storage}",
        # Back-filled history may be of any age: nothing is retired during a test.
        "--storage.tsdb.retention.time=100y",
    ]
    with _daemon(PROMETHEUS, config, storage, port=port, flags=[*own, *flags]) as server:
        yield server


@contextlib.contextmanager
def alertmanager(
    config: str | Path,
    storage: Path,
    *,
    port: int | None = None,
    flags: Sequence[str] = (),
    cluster: str = "",
) -> Iterator[Server]:
    """An Alertmanager, by default without a cluster.

    Args:
        config: alertmanager.yml, as a path or as its text.
        storage: folder of its state.
        port: the port to listen on; a free one if not given.
        flags: further command line flags.
        cluster: address on which it listens to its peers.
    """
    own = [
        f"--storage.path={storage}",
        # Empty means: no gossip. Otherwise it looks for peers on every interface.
        f"--cluster.listen-address={cluster}",
    ]
    with _daemon(ALERTMANAGER, config, storage, port=port, flags=[*own, *flags]) as server:
        yield server


def backfill(openmetrics: str | Path, storage: Path, *, block: str = "2h") -> None:
    """Write history into a Prometheus database that no server has open.

    Args:
        openmetrics: samples with timestamps in OpenMetrics text, ended by `# EOF`; text or file.
        storage: folder of the database.
        block: longest span of a block. promtool reads everything once for each block, and takes
            2h times a power of three.

    Raises:
        ServerFailed: if promtool refuses the samples, with what it said.
    """
    storage.mkdir(parents=True, exist_ok=True)
    beside = storage.with_name(storage.name + ".run")
    beside.mkdir(exist_ok=True)
    path = _config_file(openmetrics, beside, "history.txt")
    done = subprocess.run(
        [
            binary(("promtool",)),
            "tsdb",
            "create-blocks-from",
            f"--max-block-duration={block}",
            "openmetrics",
            "--quiet",
            str(path),
            str(storage),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=READY_SECONDS,
    )
    if done.returncode:
        raise ServerFailed(f"promtool: {done.stderr or done.stdout}")
