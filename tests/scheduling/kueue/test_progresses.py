"""Whose end would cost least is told by Prometheus, where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from tests.scheduling.kueue.clusters import kueue_policy
from tests.scheduling.kueue.lives import life

from gpuwarden.scheduling.kueue.progresses import Progresses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOW = 1_800_000_000.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    saved: dict[str, float]
    status = 200


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def do_POST(self) -> None:
        """Answer a query."""
        self.rfile.read(int(self.headers["Content-Length"]))
        rows = [
            {"metric": {"job_id": job}, "value": [NOW, str(moment)]}
            for job, moment in self.server.saved.items()
        ]
        body = json.dumps({"status": "success", "data": {"result": rows}}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def prometheus() -> Iterator[tuple[_Server, str]]:
    """A server that knows when jobs saved, and nothing else."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.saved = {}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_the_cheapest_is_asked(tmp_path: Path) -> None:
    """Kueue #477: the older one has just saved, so it loses less than the younger."""
    with prometheus() as (server, url), life(tmp_path, kueue_policy()) as found:
        found.prometheus = url
        one = found.run("one")
        found.scene.time.pass_(1000.0)
        two = found.run("two")
        found.scene.time.pass_(500.0)
        uid = found.pods(one)[0]["metadata"]["uid"]
        server.saved = {f"pod-{uid}": found.scene.time.now - 10.0, "pod-other": 1.0}
        found.submit("high", "high")
        found.tick(2, seconds=5.0)
        leaving = found.leaving(one)
        assert leaving is not None
        assert leaving.lost is not None
        assert leaving.lost < 40.0
        assert found.leaving(two) is None


def test_what_is_not_known_is_not_made_up() -> None:
    """A moment in the future is none; what was last known is forgotten after ten minutes."""
    with prometheus() as (server, url):
        known = Progresses(url)

        def ask(now: float) -> dict[str, float | None]:
            found = asyncio.run(known.known(now))
            return {job: each.saved for job, each in found.items()}

        server.saved = {"pod-a": NOW - 5.0, "pod-b": NOW + 3600.0, "pod-c": float("nan")}
        assert ask(NOW) == {}, "an answer with what is no number is none"
        server.saved = {"pod-a": NOW - 5.0, "pod-b": NOW + 3600.0}
        assert ask(NOW + 10.0) == {}, "it is asked every half a minute"
        assert ask(NOW + 40.0) == {"pod-a": NOW - 5.0}
        server.status = 500
        assert ask(NOW + 100.0) == {"pod-a": NOW - 5.0}
        assert ask(NOW + 1000.0) == {}
