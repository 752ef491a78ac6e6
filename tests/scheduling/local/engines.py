"""A rule engine as a lab box sees it: takes leaves on, has them delivered, or refuses."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class PlayedEngine:
    """Answers of `/v1/leaves`.

    Attributes:
        jobs: the job files' folder, where the agent writes.
        refused: run -> (HTTP status, the engine's word).
        called_back: whether leaves are withdrawn by the engine as soon as they are looked at.
        delivers: whether its agent does.
        leaves: key -> the leave.
        asked: bodies of all requests for one.
        withdrawn: ids.
        url: of the server.
    """

    jobs: Path
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    called_back: bool = False
    delivers: bool = True
    leaves: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    url: str = ""

    def post(self, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Take one on, or refuse it; one key is one leave."""
        self.asked.append(order)
        if order["run_id"] in self.refused:
            status, word = self.refused[order["run_id"]]
            return status, {"error": word, "message": f"{word}: a whitelist names it"}
        name = f"leave-{len(self.leaves):016x}"
        leave = {
            "id": name,
            "job_id": order["job_id"],
            "run_id": order["run_id"],
            "state": "waiting",
            "why": "",
            "deadline": "2030-01-01T00:00:00Z",
            "steps": {},
        }
        leave = self.leaves.setdefault(order["key"], leave)
        if self.delivers and not leave["steps"]:
            leave["steps"]["notified"] = time.time()
            request = job_files.LeaveRequest(
                f"{leave['id']}#1", time.time() + 300, order["at"], order["then"], order["reason"]
            )
            path = job_files.request_path(self.jobs, order["run_id"])
            job_files.write(path, request.encode())
        return 202, leave

    def get(self, name: str) -> tuple[int, dict[str, Any]]:
        """How it stands."""
        leave = next(each for each in self.leaves.values() if each["id"] == name)
        if self.called_back:
            leave |= {"state": "withdrawn", "why": "enforcement is paused"}
        return 200, leave

    def delete(self, name: str) -> tuple[int, dict[str, Any]]:
        """Take it back."""
        self.withdrawn.append(name)
        leave = next(each for each in self.leaves.values() if each["id"] == name)
        leave["state"] = "withdrawn"
        job_files.request_path(self.jobs, leave["run_id"]).unlink(missing_ok=True)
        return 200, leave


@contextlib.contextmanager
def served(engine: PlayedEngine) -> Iterator[PlayedEngine]:
    """With its server on a free port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._answer(*engine.post(json.loads(self.rfile.read(length))))

        def do_GET(self) -> None:
            self._answer(*engine.get(self.path.rpartition("/")[2]))

        def do_DELETE(self) -> None:
            self._answer(*engine.delete(self.path.rpartition("/")[2]))

        def log_message(self, *_: object) -> None:
            """Tests have their own words for what happens."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield engine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
