"""A small world for the engine: owned time, a fleet that answers its queries, real HTTP servers.

Nothing of the engine is replaced: Prometheus is a `Source` (the protocol that replay uses too),
agents, Alertmanager, Slack and the mail server are servers on the loopback.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from gpuwarden import agent_api
from gpuwarden.agent_api import (
    Action,
    ActionReport,
    ActionRequest,
    ActionState,
    NodeInfo,
    Outcome,
    Proof,
)
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.inventories import silent_query
from gpuwarden.ruleengine.needs import needed_keys
from gpuwarden.ruleengine.prometheus import Sample
from gpuwarden.ruleengine.reclaim.node import LIFETIME_SECONDS
from gpuwarden.ruleengine.signals import query as signal_query
from gpuwarden.ruleengine.unproven_cards import LEFT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from gpuwarden.ruleengine.model import RuleSet

GIB = 2.0**30
A100 = "NVIDIA A100-SXM4-40GB"
NODE = "127.0.0.1:9835"


class OwnedClock:
    """Time that moves only when a test says so."""

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self._wall = wall
        self._monotonic = 1000.0

    def wall(self) -> float:
        """Unix time."""
        return self._wall

    def monotonic(self) -> float:
        """Seconds since a moment of this world."""
        return self._monotonic

    def pass_(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self._wall += seconds
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock, as an administrator or NTP would."""
        self._wall += seconds


@dataclass
class Job:
    """A job on one card, as its node would export it."""

    job_id: str
    user: str = "alice"
    uuid: str = "GPU-1"
    utilization: float | None = 0.0
    memory: float | None = 30 * GIB
    started: float = 1_799_990_000.0
    activity: dict[str, float] = field(default_factory=dict)
    instance: str = NODE
    run: dict[str, str] = field(default_factory=dict)
    saved: float | None = None
    """When its trainer last saved a state, by its own word."""
    answered: dict[str, float] = field(default_factory=dict)
    """State of a request to leave -> when, by its trainer's word."""


@dataclass
class Fleet:
    """A `Source`: rows for exactly the queries that facts are gathered by."""

    clock: OwnedClock
    rules: RuleSet | None = None
    scrape_interval: float = 5.0
    jobs: list[Job] = field(default_factory=list)
    nodes: dict[str, bool] = field(default_factory=lambda: {NODE: True})
    down: bool = False
    skew: float = 0.0
    waiting: float | None = None
    queries: int = 0
    before_answer: Callable[[], None] | None = None
    spare_cards: list[tuple[str, str, str]] = field(default_factory=list)
    """(node, UUID, name) of cards that no job holds."""
    unattributed: dict[str, float] = field(default_factory=dict)
    """UUID -> bytes in use that are no process's."""

    async def clock_skew(self) -> float:
        """The server's clock, as the test set it."""
        if self.down:
            raise ServiceUnavailable("Prometheus is down")
        return self.skew

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Rows of one query."""
        self.queries += 1
        if self.down:
            raise ServiceUnavailable("Prometheus is down")
        if self.before_answer is not None:
            self.before_answer()
        for key in needed_keys(self.rules) if self.rules is not None else ():
            for asked in (key, signals.amount(key)):
                if asked and signal_query(asked, scrape_interval=self.scrape_interval) == query:
                    return self._signal(asked.signal)
        return self._inventory(query, time)

    def _lit_jobs(self) -> list[Job]:
        return [job for job in self.jobs if self.nodes[job.instance]]

    def _signal(self, name: str) -> list[Sample]:
        if name == "waiting":
            return [] if self.waiting is None else [Sample({}, self.waiting)]
        rows = []
        for job in self._lit_jobs():
            labels = {"instance": job.instance, "job_id": job.job_id, "uuid": job.uuid}
            if name.startswith("card_"):
                del labels["job_id"]
            value = {
                "card_memory_share": None if job.memory is None else job.memory / (40 * GIB),
                "gpu_utilization": job.utilization,
                "gpu_memory": job.memory,
                "gpu_memory_share": None if job.memory is None else job.memory / (40 * GIB),
            }.get(name)
            if value is not None:
                rows.append(Sample(labels, value))
        return rows

    def _inventory(self, query: str, time: float) -> list[Sample]:
        lit = [node for node, up in self.nodes.items() if up]
        if query == silent_query(self.scrape_interval):
            return [Sample({"instance": node}, 1.0) for node in self.nodes if node not in lit]
        if query == "timestamp(gpuwarden_snapshot_timestamp_seconds)":
            return [Sample({"instance": node}, time - 1.0) for node in lit]
        if query == "gpuwarden_snapshot_timestamp_seconds":
            return [Sample({"instance": node}, time - 2.0) for node in lit]
        if query == LEFT:
            return [Sample({"uuid": uuid}, left) for uuid, left in self.unattributed.items()]
        if query.startswith("count(up"):
            return [Sample({}, float(len(self.nodes)))]
        metric = re.sub(r"^(timestamp|last_over_time)\(|\W.*", "", query, flags=re.DOTALL)
        # What silent nodes said last is asked apart, by their names.
        heard = [node for node in self.nodes if (node in lit) is not ("{instance=~" in query)]
        return self._said(metric, [job for job in self.jobs if job.instance in heard])

    def _said(self, metric: str, jobs: list[Job]) -> list[Sample]:
        rows = self._spare(metric)
        for job in jobs:
            base = {"instance": job.instance, "job_id": job.job_id}
            card = {"instance": job.instance, "uuid": job.uuid, "gpu": "0"}
            if metric == "gpu_job_holds_gpu":
                rows.append(Sample({**base, **card}, 1.0))
            elif metric == "gpu_job_info":
                info = {"user": job.user, "source": "proc", "framework": "jupyter"}
                rows.append(Sample({**base, **info, "interactive": "true"}, 1.0))
            elif metric == "gpu_info":
                rows.append(Sample({**card, "name": A100}, 1.0))
            else:
                rows += self._lit_inventory(metric, job, base, card)
        return rows

    def _spare(self, metric: str) -> list[Sample]:
        found = [
            Sample({"instance": node, "uuid": uuid, "gpu": "0", "name": name}, 1.0)
            for node, uuid, name in self.spare_cards
        ]
        return found if metric == "gpu_info" else []

    def _lit_inventory(
        self, metric: str, job: Job, base: dict[str, str], card: dict[str, str]
    ) -> list[Sample]:
        process = {**base, **card, "pid": "4711", "user": job.user}
        path = {"executable": "/usr/bin/python3.11", "cgroup": "/user.slice"}
        rows = {
            "gpu_memory_total_bytes": [Sample(card, 40 * GIB)],
            "gpu_job_start_time_seconds": [Sample(base, job.started)],
            "gpu_job_first_gpu_use_timestamp_seconds": [Sample(base, job.started)],
            "gpu_process_start_time_seconds": [Sample(process, job.started)],
            "gpu_job_executable": [Sample({**base, **path}, 1.0)],
            "yolo_info": [Sample({**base, **job.run}, 1.0)] if job.run else [],
            "yolo_checkpoint_durable_timestamp_seconds": (
                [] if job.saved is None else [Sample({**base, **job.run}, job.saved)]
            ),
            "yolo_leave_request_timestamp_seconds": [
                Sample({**base, **job.run, "state": name}, at) for name, at in job.answered.items()
            ],
            "gpu_job_activity_timestamp_seconds": [
                Sample({**base, "signal": name}, at) for name, at in job.activity.items()
            ],
        }
        return rows.get(metric, [])


# ---------------------------------------------------------------------------------------------
# Servers


@dataclass
class Received:
    """One request as a server got it."""

    path: str
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


Answer = tuple[int, bytes]


class Sink:
    """An HTTP server that keeps what it gets and answers as the test decides.

    Its header Date tells the machine's time, or that of the clock it is given.
    """

    def __init__(
        self, answer: Callable[[str, Received], Answer], clock: OwnedClock | None = None
    ) -> None:
        self.received: list[Received] = []
        self.headers: dict[str, str] = {}
        self._answer = answer
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                request = Received(
                    self.path,
                    self.rfile.read(length),
                    {name.lower(): value for name, value in self.headers.items()},
                )
                if self.command == "POST":
                    sink.received.append(request)
                status, body = sink._answer(self.command, request)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                for name, text in sink.headers.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(body)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string(clock.wall() if clock else timestamp)

            def do_GET(self) -> None:
                self._any()

            def do_POST(self) -> None:
                self._any()

            def log_message(self, *_: object) -> None:
                """Tests have their own words for what happens."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def slack() -> Iterator[tuple[Sink, dict[str, Any]]]:
    """A Slack; set `reply["status"]` and `reply["body"]` to make it refuse."""
    reply: dict[str, Any] = {"status": 200, "body": None}

    def answer(_method: str, request: Received) -> Answer:
        """What the agent answers."""
        body = reply["body"]
        if body is None:
            number = f"1800000000.{len(sink.received):06d}"
            body = {"ok": True, "channel": request.json()["channel"], "ts": number}
        return reply["status"], json.dumps(body).encode()

    with Sink(answer) as sink:
        yield sink, reply


@contextlib.contextmanager
def alertmanager_sink(
    clock: OwnedClock | None = None,
) -> Iterator[tuple[Sink, dict[str, int]]]:
    """An Alertmanager that only listens; set `reply["status"]` to make it refuse."""
    reply = {"status": 200}
    with Sink(lambda *_: (reply["status"], b"{}"), clock) as sink:
        yield sink, reply


class Keys:
    """A pair as `gpuwarden agent keys` makes it."""

    def __init__(self, folder: Path) -> None:
        self.private = Ed25519PrivateKey.generate()
        self.file = folder / "engine.key"
        self.file.write_bytes(
            self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        public = self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.id = agent_api.key_id(public)


@dataclass
class Agent:
    """A node's agent by the contract of `agent_api`, with the outcome that a test wants."""

    keys: Keys
    outcome: Outcome = Outcome.RECLAIMED
    reason: str = ""
    finish: bool = True
    proves: bool = True
    """Whether NVML shows what it says."""
    refuse: tuple[int, str] | None = None
    refuse_repeats: bool = False
    on_node: Callable[[], None] | None = None
    on_action: Callable[[ActionRequest], None] | None = None
    silent: bool = False
    silent_hosts: set[str] = field(default_factory=set)
    lose_answers: int = 0
    reports: dict[str, ActionReport] = field(default_factory=dict)
    requests: list[ActionRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    first_end: dict[str, str] = field(default_factory=dict)
    steps: Callable[[str, ActionRequest | str], Answer] | None = None
    """Answers a host's actions other than `terminate`, and questions for their reports by id."""

    def answer(self, method: str, request: Received) -> Answer:
        """Answer as `GET /v1/node`, `POST /v1/actions` and `GET /v1/actions/{id}` do."""
        host = request.headers["host"].rpartition(":")[0]
        if self.silent or host in self.silent_hosts:
            return 503, b"{}"
        if request.path == "/v1/node":
            if self.on_node is not None:
                self.on_node()
            return 200, NodeInfo("node-1", "boot-1", (self.keys.id,)).encode()
        if method == "GET":
            name = request.path.rsplit("/", 1)[1]
            if self.steps is not None and name not in self.reports:
                return self.steps(request.headers["host"].rpartition(":")[0], name)
            report = self.reports.get(name)
            return (404, b"{}") if report is None else (200, self.now(report).encode())
        return self._act(request)

    def _act(self, request: Received) -> Answer:
        name, signature = agent_api.parse_signature(
            request.headers[agent_api.SIGNATURE_HEADER.lower()]
        )
        assert name == self.keys.id
        public = self.keys.private.public_key()
        public.verify(base64.b64decode(signature), agent_api.signing_bytes(request.body))
        action = ActionRequest.decode(request.body)
        self.requests.append(action)
        if self.on_action is not None:
            self.on_action(action)
        if self.steps is not None and action.action is not Action.TERMINATE:
            return self.steps(request.headers["host"].rpartition(":")[0], action)
        refuse = self.refuse
        if self.refuse_repeats and action.decision_id in self.reports:
            refuse = (403, "expired")
        if refuse is not None:
            status, word = refuse
            return status, json.dumps({"error": word, "message": f"no: {word}"}).encode()
        first = self.first_end.setdefault(action.job_id, action.decision_id)
        if first == action.decision_id and action.decision_id not in self.reports:
            self.ended.append(action.job_id)
            self.reports[first] = ActionReport(
                first, action.job_id, action.action, ActionState.ACTING
            )
        if self.lose_answers:
            self.lose_answers -= 1
            return 503, b"{}"
        return 202, self.now(self.reports[first]).encode()

    def _taken(self, report: ActionReport) -> float:
        """When an action was taken on, by its expiry."""
        known = (a.expires for a in self.requests if a.decision_id == report.decision_id)
        return next(known, 1_800_000_000.0) - LIFETIME_SECONDS

    def now(self, report: ActionReport) -> ActionReport:
        """How far an action has come."""
        if not self.finish:
            return report
        return ActionReport(
            report.decision_id,
            report.job_id,
            report.action,
            ActionState.FINISHED,
            outcome=self.outcome,
            reason=self.reason,
            steps={"sigterm": self._taken(report), "proven": self._taken(report) + 1.0},
            proof=Proof(
                gone=self.proves and self.outcome is Outcome.RECLAIMED, memory_freed=int(30 * GIB)
            ),
        )


@contextlib.contextmanager
def agent(keys: Keys) -> Iterator[tuple[Sink, Agent]]:
    """A node's agent on the loopback."""
    state = Agent(keys)
    with Sink(state.answer) as sink:
        yield sink, state


def webhook(alerts: Sequence[dict[str, Any]], status: str = "firing") -> dict[str, Any]:
    """What Alertmanager would send on for alerts that were posted to it."""
    return {
        "version": "4",
        "status": status,
        "alerts": [
            {
                **alert,
                "status": status,
                "fingerprint": hashlib.sha256(
                    json.dumps(alert["labels"], sort_keys=True).encode()
                ).hexdigest()[:16],
            }
            for alert in alerts
        ],
    }
