"""The preview of boards: a page that draws a committed board over a Prometheus.

tools/preview holds its sources; npm brings Grafana's libraries. Here it is built when its sources
have changed, and served on the loopback beside the boards and the Prometheus that it asks.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import shutil
import subprocess
import threading
import urllib.error
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from grafana import build
from tests.servers import fetch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Server

SOURCES = Path(__file__).resolve().parents[1] / "preview"
DIST = SOURCES / "dist"
STAMP = DIST / "sources.sha256"
NPM_SECONDS = 600
BUILD_SECONDS = 300


class PreviewFailedError(RuntimeError):
    """The preview could not be built."""


def built() -> Path:
    """The folder of the built page; built first if its sources have changed.

    Raises:
        PreviewFailedError: with what npm or the build said, if it cannot be built.
    """
    lock = SOURCES / "package-lock.json"
    files = [lock, SOURCES / "build.mjs", *sorted((SOURCES / "src").rglob("*.*"))]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return DIST
    installed = SOURCES / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        # no package's own scripts are run; peers are resolved as the lock file has them
        words = (
            "ci",
            "--omit=dev",
            "--ignore-scripts",
            "--legacy-peer-deps",
            "--no-audit",
            "--no-fund",
        )
        _run("npm", *words, seconds=NPM_SECONDS)
    _run("node", "build.mjs", seconds=BUILD_SECONDS)
    STAMP.write_text(wanted)
    return DIST


def _run(program: str, *words: str, seconds: float) -> None:
    path = shutil.which(program)
    if path is None:
        raise PreviewFailedError(
            f"{program} is not installed; boards are drawn by Grafana's libraries, which need "
            "Node.js 20 or later with npm (nodejs.org, or your system's packages)"
        )
    done = subprocess.run(
        [path, *words], cwd=SOURCES, capture_output=True, text=True, check=False, timeout=seconds
    )
    if done.returncode:
        raise PreviewFailedError(f"{program} {' '.join(words)} failed:\n{done.stderr[-2000:]}")


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the page, the boards, and answers of the Prometheus that it may only read."""

    def __init__(self, *args: object, prometheus: str, **words: object) -> None:
        self.prometheus = prometheus
        super().__init__(*args, directory=str(DIST), **words)  # type: ignore[arg-type]

    def log_message(self, *_words: object) -> None:
        """Nothing: the program that serves says what it does."""

    def do_GET(self) -> None:
        """A file of the page, a board, or an answer."""
        path = self.path.partition("?")[0]
        if path.startswith("/prometheus/api/v1/"):
            self._answer(self.path.removeprefix("/prometheus"))
        elif path.startswith("/boards/"):
            known = {board.name: board for board in build.FOLDER.glob("*.json")}
            board = known.get(path.removeprefix("/boards/"))
            if board is None:
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._send(HTTPStatus.OK, board.read_bytes())
        else:
            super().do_GET()

    def _answer(self, path: str) -> None:
        try:
            self._send(HTTPStatus.OK, fetch(self.prometheus + path))
        except urllib.error.HTTPError as error:
            self._send(HTTPStatus(error.code), error.read())

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def served(prometheus: Server, port: int = 0) -> Iterator[str]:
    """The address of the page over this Prometheus, while the context lasts."""
    built()
    handler = partial(_Handler, prometheus=prometheus.url)
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
