"""Jobs, cards, an engine and agents for the agent's tests."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from tests.servers import fetch, free_port, until

from gpuwarden import agent_api
from gpuwarden.agent_api import Action, ActionReport, ActionRequest, ActionState, ProcessRef
from gpuwarden.clock import SystemClock
from gpuwarden.exporter.agent.actions import Actions
from gpuwarden.exporter.agent.guards import Guards
from gpuwarden.exporter.agent.handles import Wake
from gpuwarden.exporter.agent.journal import Journal
from gpuwarden.exporter.agent.ladder import Ladder
from gpuwarden.exporter.agent.proofs import BoundedDevices
from gpuwarden.exporter.agent.requests import LeaveRequests
from gpuwarden.exporter.agent.targets import Resolver
from gpuwarden.exporter.job_servers import JobServers
from gpuwarden.exporter.nvml import open_gpus
from gpuwarden.exporter.processes import Launchers, boot_id, proc_job_id, read_process
from gpuwarden.exporter.simulated import GIB, Card, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
PYTHON = (sys.executable, "-I", "-S")
LAUNCHER = "gw-launcher"


@dataclass
class Jobs:
    """Starts jobs below a launcher that is in nobody's tree, and ends all of them at last."""

    folder: Path
    token: str
    process: subprocess.Popen[str]
    count: int = 0

    def start(self, kind: str, *arguments: object) -> Job:
        """Start a workload and wait until its tree stands."""
        self.count += 1
        report = self.folder / f"{kind}-{self.count}.json"
        argv = [*PYTHON, str(HERE / "workloads.py"), kind, str(report)]
        argv += map(str, arguments)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(argv) + "\n")
        self.process.stdin.flush()
        return self.started(int(self.process.stdout.readline()), report)

    def started(self, pid: int, report: Path) -> Job:
        """A workload that was started, once its tree stands."""
        pids = until(lambda: json.loads(report.read_text()) if report.exists() else None)
        assert pids[0] == pid
        root = read_process(pid)
        assert root is not None
        return Job(tuple(pids), proc_job_id(root, boot_id()), report)

    def living(self) -> set[int]:
        """Pids of all that was started here and still runs."""
        mark, found = f"GPUWARDEN_TEST={self.token}".encode(), set()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdecimal() and mark in (folder / "environ").read_bytes():
                    found.add(int(folder.name))
        return found

    def close(self) -> None:
        """End everything."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)

        def none_left() -> bool:
            for pid in self.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not self.living()

        until(none_left)


@dataclass(frozen=True)
class Job:
    """A job that was started; `pids` has the root first."""

    pids: tuple[int, ...]
    job_id: str
    report: Path

    @property
    def pid(self) -> int:
        """The root's."""
        return self.pids[0]

    def part(self, pid: int) -> str:
        """The job that one of its processes would name as its root."""
        process = read_process(pid)
        assert process is not None
        return proc_job_id(process, boot_id())

    @property
    def seen(self) -> tuple[ProcessRef, ...]:
        """Its processes, as an engine knows them."""
        found = [read_process(pid) for pid in self.pids]
        return tuple(ProcessRef(item.pid, item.start_ticks) for item in found if item is not None)

    def states(self) -> dict[int, str]:
        """State of each process that still runs."""
        found = {pid: read_process(pid) for pid in self.pids}
        return {pid: item.state for pid, item in found.items() if item and item.state != "Z"}


@dataclass
class Cards:
    """The simulated cards of a test."""

    path: Path
    cards: tuple[Card, ...] = (Card(index=0), Card(index=1))
    processes: list[SimulatedProcess] = field(default_factory=list)

    def hold(self, pid: int, memory: int = 30 * GIB, **about: Any) -> None:
        """Put a process on a card."""
        self.processes.append(SimulatedProcess(about.pop("card", 0), pid, memory, **about))
        self.write()

    def write(self, **about: Any) -> None:
        """Write the scenario; more of it may be given."""
        Scenario(cards=self.cards, processes=self.processes, **about).write(self.path)


@dataclass
class Engine:
    """Makes and signs requests as the engine does."""

    private: Path
    key_id: str
    node: str = "node-1"
    count: int = 0

    def request(
        self, job_id: str, action: Action = Action.TERMINATE, **about: Any
    ) -> ActionRequest:
        """A request that expires in 30 s."""
        self.count += 1
        fields: dict[str, Any] = {
            "decision_id": f"d-{self.count}",
            "epoch": 1,
            "node": self.node,
            "boot_id": boot_id(),
            "grace": 30.0,
            "expires": SystemClock().wall() + 30,
            **about,
        }
        return ActionRequest(job_id=job_id, action=action, **fields)

    def sign(self, body: bytes) -> str:
        """The signature's header."""
        key: Any = load_pem_private_key(self.private.read_bytes(), None)
        made = key.sign(agent_api.signing_bytes(body))
        return agent_api.render_signature(self.key_id, base64.b64encode(made).decode())


@dataclass
class Node:
    """An agent in this process: real signals, real files, the simulated driver."""

    folder: Path
    cards: Cards
    engine: Engine
    proof_timeout: float = 30.0
    per_hour: int = 100
    protect: frozenset[str] = frozenset()
    cooldown: float = 600.0
    resolver: Callable[..., Resolver] = Resolver

    def __post_init__(self) -> None:
        self.jobs = self.folder / "jobs"
        self.kill_switch = self.folder / "halt"
        self.driver = open_gpus(f"simulated:{self.cards.path}")
        self.open()

    def open(self) -> None:
        """Start the agent; also again, after `close`."""
        clock = SystemClock()
        self.wake = Wake()
        resolver = self.resolver(
            Guards(protect=self.protect, kill_switch=self.kill_switch),
            Launchers.with_extra([LAUNCHER], JobServers(unknown=True).includes),
            BoundedDevices(self.driver),
        )
        requests = LeaveRequests(self.jobs, clock)
        self.ladder = Ladder(resolver, requests, clock, self.wake, self.proof_timeout)
        self.journal = Journal(self.folder / "journal")
        self.actions = Actions(
            self.journal,
            self.ladder,
            terminates_per_hour=self.per_hour,
            restart_cooldown=self.cooldown,
        )
        self.actions.recover()

    def close(self) -> None:
        """Stop the agent."""
        self.actions.close(timeout=30)
        self.journal.close()

    def ask(self, job_id: str, action: Action = Action.TERMINATE, **about: Any) -> ActionReport:
        """Have an action done, and wait for its outcome."""
        request = self.engine.request(job_id, action, **about)
        return self.outcome(self.actions.submit(request).decision_id)

    def ask_once(self, job_id: str, action: Action = Action.TERMINATE) -> ActionReport:
        """Ask for an action that is refused at once, and known to nobody afterwards."""
        return self.actions.submit(self.engine.request(job_id, action))

    def outcome(self, decision_id: str) -> ActionReport:
        """Wait for the outcome of an action."""

        def finished() -> ActionReport | None:
            report = self.actions.find(decision_id)
            return report if report and report.state is ActionState.FINISHED else None

        return until(finished)

    def reached(self, decision_id: str, step: str) -> ActionReport:
        """Wait until an action has come to a step."""

        def there() -> ActionReport | None:
            report = self.actions.find(decision_id)
            return report if report and step in report.steps else None

        return until(there)


def cgroup_v2() -> Path | None:
    """Where a cgroup v2 can be made, if anywhere."""
    for mount in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (mount / "cgroup.procs").exists() and os.access(mount, os.W_OK):
            return mount
    return None


@dataclass
class AgentProcess:
    """`gpuwarden agent` as a process."""

    arguments: list[str]
    url: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "gpuwarden", "agent"])

    def start(self) -> None:
        """Start it and wait until it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *self.arguments],
                stdout=log,
                stderr=log,
            )

        def ready() -> bytes | None:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            return fetch(f"{self.url}/-/ready")

        until(ready)

    @classmethod
    def beside(cls, folder: Path, cards: Cards, engine: Engine) -> AgentProcess:
        """An agent, not yet started, that obeys an engine and has its files in a folder."""
        port = free_port()
        arguments = {
            "--web.listen-address": f"127.0.0.1:{port}",
            "--node": engine.node,
            "--keys": engine.private.parent,
            "--journal": folder / "agent.journal",
            "--jobs.directory": folder / "jobs",
            "--gpus": f"simulated:{cards.path}",
            "--kill-switch": folder / "halt",
            "--release-file": folder / "release",
            "--attribution.launcher": LAUNCHER,
        }
        return cls(
            [f"{name}={value}" for name, value in arguments.items()],
            f"http://127.0.0.1:{port}",
            folder / "agent.log",
        )

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def post(self, engine: Engine, request: ActionRequest) -> ActionReport:
        """Sign and send a request."""
        body = request.encode()
        headers = {agent_api.SIGNATURE_HEADER: engine.sign(body)}
        return ActionReport.decode(fetch(f"{self.url}/v1/actions", body, **headers))

    def outcome(self, decision_id: str, step: str = "") -> ActionReport:
        """Wait until an action has come to a step, or to its end."""

        def there() -> ActionReport | None:
            report = ActionReport.decode(fetch(f"{self.url}/v1/actions/{decision_id}"))
            done = step in report.steps if step else report.state is ActionState.FINISHED
            return report if done else None

        return until(there)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it by a signal; gives its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)
