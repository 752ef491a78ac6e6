"""What the scheduler's daemon takes: bookings and jobs of local users, addresses, Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
from typing import TYPE_CHECKING, Any, Final

from tests.scheduling.daemons import Clock, PlayedQueue
from tests.scheduling.policy_files import NOW, TEXT

from bench.fuzz.edges import JSON_WORDS, SPLIT, Attack, require
from gpuwarden.exchanges import Answer
from gpuwarden.scheduling.callers import Peer
from gpuwarden.scheduling.daemon import Daemon, Settings
from gpuwarden.scheduling.prometheus_queries import read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from contextlib import ExitStack
    from pathlib import Path

_TASK: Final = {
    "schema": "gpuwarden.task/v1",
    "name": "night",
    "run_id": "night",
    "words": ["model=yolov8m", "data=coco.yaml"],
    "user": "root",
    "team": "vision",
    "priority": "high",
    "gpus": 2,
    "directory": "/home",
}
_BOOKING: Final = {"team": "vision", "gpus": 4, "card": "a100-40", "from": "+2h", "for": "4h"}
_VECTOR: Final = (
    b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{"team":"a"},'
    b'"value":[1,"2.5"]}]}}'
)
_USUAL: Final = (200, 201, 204, 307, 400, 403, 404, 405, 409, 413)
"""A status beyond these is a fault: 500 of ours, 503 of an engine that answers here."""


def _daemon(folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    """An input is a method, a path with its query, and a body."""
    policy = folder / "policy.yaml"
    policy.write_text(TEXT.replace("engine: slurm", "engine: local"))
    settings = Settings(policy, folder / "state", None, folder / "s.sock")
    daemon = Daemon(
        settings, clock=Clock(NOW), opening=lambda _engine, read, _context: PlayedQueue(read)
    )
    stack.callback(daemon.scheduler.store.close)
    stack.callback(daemon.worker.close)
    daemon.worker.call(daemon.scheduler.tick)
    loop = stack.enter_context(contextlib.closing(asyncio.new_event_loop()))
    stack.callback(lambda: loop.run_until_complete(loop.shutdown_default_executor()))

    def attack(data: bytes) -> None:
        method, path, body = (*data.split(SPLIT), b"", b"")[:3]
        status = loop.run_until_complete(_asked(daemon.app, method, path, body))
        require(holds=status in _USUAL, what=f"status {status}")
        # Whatever came in: the schedule can be read by others.
        daemon.worker.call(daemon.scheduler.tick)
        require(holds="failed" not in daemon.scheduler.outcomes, what="a tick failed")
        json.loads(daemon.scheduler.document.encode())

    return attack


async def _asked(app: Any, method: bytes, path: bytes, body: bytes) -> int:
    """The status of an answer to a local user."""
    where, _, query = path.partition(b"?")
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        # What h11 lets through: letters, and no control characters.
        "method": method.decode("ascii", "ignore") or "GET",
        "path": where.decode("utf-8", "replace"),
        "raw_path": where,
        "query_string": query,
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "gpuwarden.peer": Peer.of(os.getuid(), os.getgid()),
    }
    statuses: list[int] = []
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    return statuses[0]


def _accounts(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            for labels, value in read_rows(Answer(200, {}, data)):
                require(holds=math.isfinite(value) and "" not in labels.values(), what="a row")

    return attack


def _request(method: str, path: str, body: object = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    return SPLIT.join((method.encode(), path.encode(), content))


ATTACKS: Final = (
    Attack(
        "requests to the scheduler",
        _daemon,
        (
            _request("POST", "/v1/bookings", _BOOKING),
            _request("POST", "/v1/bookings", {**_BOOKING, "repeat": "weekly", "until": "+60d"}),
            _request("POST", "/v1/bookings", {**_BOOKING, "key": "k", "dry_run": True}),
            _request("GET", "/v1/bookings?from=now-1d&to=%2B9d&team=vision&all=true"),
            _request("POST", "/v1/bookings/b2/end", {"by": "1h"}),
            _request("DELETE", "/v1/bookings/b2"),
            _request("GET", "/v1/calendar.ics?team=vision&key=0"),
            _request("GET", "/v1/calendar.ics"),
            _request("POST", "/v1/jobs", {"task": _TASK, "token": "t"}),
            _request("POST", "/v1/jobs/1/cancel", {}),
            _request("GET", "/v1/usage?by=user&from=2027-01-01&to=now"),
            _request("GET", "/v1/calibration?from=now-9d"),
            _request("GET", "/v1/schedule"),
        ),
        (
            *JSON_WORDS,
            *(b"+2h", b"9999-12-31", b"2027-03-28 02:30", b"100y", b"daily", b"weekdays", b"%00"),
            *(b'"gpus":', b'"from":', b'"until":', b"?from=", b"&to=", b"../", b"\\u202e", b"%ff"),
        ),
        pure=False,
        of="scheduler",
    ),
    Attack(
        "accounts of Prometheus",
        _accounts,
        (_VECTOR,),
        (*JSON_WORDS, b'"warnings":["x"]', b'"isPartial":true', b'"NaN"', b'"1e999"'),
        of="scheduler",
    ),
)
