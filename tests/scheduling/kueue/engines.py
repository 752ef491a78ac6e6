"""A rule engine of a few lines: takes leave requests, and says of them what a test wants."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "scheduler-token-0123456789abcdef"


@dataclass
class Engine:
    """What it was asked, and what it says.

    Attributes:
        url: of it.
        token_file: of who may ask.
        leaves: id -> leave, in the order in which they were taken on.
        orders: bodies of all requests.
        refuses: job id or run id -> the word of a refusal.
        down: whether it answers nothing but 503.
    """

    url: str
    token_file: Path
    leaves: dict[str, dict[str, Any]] = field(default_factory=dict)
    orders: list[dict[str, Any]] = field(default_factory=list)
    refuses: dict[str, str] = field(default_factory=dict)
    down: bool = False

    def see(self, steps: dict[str, float], *, job: str | None = None) -> None:
        """Have seen steps of all leaves, or of one job's."""
        for leave in self.leaves.values():
            if job in (None, leave["job_id"], leave["run_id"]):
                leave["steps"] |= steps
                leave["state"] = "waiting"

    @property
    def asked(self) -> list[str]:
        """Jobs that were asked, each once."""
        return [str(leave["job_id"] or leave["run_id"]) for leave in self.leaves.values()]

    def take(self, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Take a request on, or answer one that was."""
        self.orders.append(order)
        for leave in self.leaves.values():
            if leave["key"] == order["key"]:
                return 200, leave
        word = self.refuses.get(order["job_id"]) or self.refuses.get(order["run_id"])
        if word is not None:
            return 409, {"error": word, "message": f"not this one: {word}"}
        deadline = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=order["deadline_seconds"])
        leave = {
            **order,
            "id": f"leave-{len(self.leaves)}",
            "state": "asked",
            "why": "",
            "deadline": deadline.isoformat(),
            "steps": {},
        }
        self.leaves[leave["id"]] = leave
        return 202, leave


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """An engine on a free port of the loopback."""
    server = _Server(("127.0.0.1", 0), _Handler)
    token_file = folder / "scheduler.token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    server.engine = Engine(f"http://127.0.0.1:{server.server_address[1]}", token_file)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.engine
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    engine: Engine


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def do_POST(self) -> None:
        """Take a request on."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        down = self.server.engine.down
        self._answer(*((503, {}) if down else self.server.engine.take(json.loads(body))))

    def do_GET(self) -> None:
        """Tell of one."""
        self._one()

    def do_DELETE(self) -> None:
        """Take one back."""
        found = self.server.engine.leaves.get(self.path.rpartition("/")[2])
        if found is not None and not self.server.engine.down:
            found["state"] = "withdrawn"
        self._one()

    def _one(self) -> None:
        found = self.server.engine.leaves.get(self.path.rpartition("/")[2])
        if found is None:
            self._answer(404, {"error": "unknown_leave", "message": "no"})
        else:
            self._answer(200, found)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, body = 401, {"error": "unauthorized"}
        if self.server.engine.down:
            status, body = 503, {"error": "down"}
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
