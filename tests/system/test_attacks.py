"""The tricks of `rules attack` as real processes: what they say delays a rule, and no longer."""

from __future__ import annotations

import contextlib
import getpass
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from demo.stack import CARDS, LAUNCHER, Stack, as_launcher
from tests.servers import Server, free_port, prometheus, running, until

from gpuwarden.exporter.processes import boot_id, proc_job_id, read_process
from gpuwarden.exporter.scenarios import GIB, Card, Scenario, SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.system

LIARS = Path(__file__).with_name("liars.py")
SLEEP = Path("/bin/sleep").resolve()
TRUST_SECONDS = 2.0
RULES = f"""
version: 1
whitelist:
- {{match: {{executable: {SLEEP}}}, rules: [idle], reason: a service, approved_by: ops,
   expires: 2100-01-01T00:00:00Z}}
rules:
- id: idle
  target: job
  match: {{}}
  cold_start: 1s
  ignore_phases: {{validate: 1h}}
  when:
    all:
    - {{signal: gpu_utilization, agg: max, window: 4s, at_most: 5%, gpus: all}}
    - {{signal: gpu_memory_share, agg: min, window: 4s, above: 5%, gpus: any}}
    - {{silent_for: 3s, signals: [log, heartbeat, cpu]}}
  for: 1s
  trust_for: {TRUST_SECONDS:g}s
  stages:
  - {{level: light, after: 0s, do: log}}
"""
ENFORCED = """
version: 1
limits:
  terminate: {per_tick: 4, per_hour: 20, per_user_per_day: 20, halt_above_share_of_running: 50%}
rules:
- id: idle
  description: It holds a card and does nothing.
  mode: enforce
  target: job
  match: {}
  cold_start: 5s
  ignore_phases: {validate: 1h}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 20s, at_most: 5%, gpus: all}
    - {signal: gpu_memory_share, agg: min, window: 20s, above: 5%, gpus: any}
    - {silent_for: 15s, signals: [log, heartbeat, cpu]}
  for: 5s
  clear_after: 20s
  trust_for: 20s
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 0s, do: notify}
  - {level: severe, after: 10s, do: terminate, notice_delivered_for: 5s, grace: 5s,
     max_work_lost: 24h}
"""
WORDS = ("touch-log", "fake-heartbeat", "frozen-phase", "future-times", "claim-run")
"""Tricks that rest on what a job says."""


def job_id(pid: int) -> str:
    """As the node names it."""
    process = read_process(pid)
    assert process is not None, f"{pid} has ended"
    return proc_job_id(process, boot_id())


@dataclass
class Node:
    """Simulated cards with an exporter, and the liars on them."""

    folder: Path
    cards: int
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def scenario(self) -> Path:
        """The file that the driver reads."""
        return self.folder / "gpus.scenario"

    @property
    def command(self) -> list[str]:
        """The exporter's."""
        words = [sys.executable, "-m", "gpuwarden", "exporter", "--collect.interval", "500ms"]
        words += ["--web.listen-address", f"127.0.0.1:{self.port}"]
        words += [f"--gpus=simulated:{self.scenario}", f"--jobs.directory={self.folder / 'run'}"]
        return [*words, f"--attribution.launcher={LAUNCHER}"]

    def start(self, trick: str, command: list[str], *, executable: str | None = None) -> None:
        """Start a process of this name and put it on the next card."""
        self.processes[trick] = subprocess.Popen(
            command,
            executable=executable,
            env={**os.environ, "GPUWARDEN_JOBS": str(self.folder / "run")},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def write(self) -> None:
        """Say who is on which card."""
        Scenario(
            cards=[Card(index=n, uuid=f"GPU-{self.folder.name}-{n}") for n in range(self.cards)],
            processes=[
                SimulatedProcess(card=card, pid=process.pid, memory=20 * GIB, sm=0)
                for card, process in enumerate(self.processes.values())
            ],
        ).write(self.scenario)

    def liar(self, trick: str) -> None:
        """Start a job that plays a trick."""
        words = [str(LIARS), trick, f"run-{trick}", str(self.folder)]
        self.start(trick, [sys.executable, *words])


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator[list[Node]]:
    """Two nodes that are up, with every liar on a card; all ended afterwards."""
    found = [Node(folder / "one", 7), Node(folder / "two", 1)]
    with contextlib.ExitStack() as stack, as_launcher():
        for node in found:
            (node.folder / "run" / "jobs").mkdir(parents=True)
        one, two = found
        for trick in ("idle", "touch-log", "fake-heartbeat", "frozen-phase", "future-times"):
            one.liar(trick)
        # As by `exec -a`: the name is the protected service's, the program is another.
        one.start("disguise", [str(SLEEP), "-e", "sleep 900"], executable="/usr/bin/perl")
        one.start("protected", [str(SLEEP), "900"])
        # Another node's job claims the run whose phase is frozen.
        two.start(
            "claim-run",
            [sys.executable, str(LIARS), "frozen-phase", "run-frozen-phase", str(two.folder)],
        )
        for node in found:
            node.write()
            for process in node.processes.values():
                stack.callback(process.wait)
                stack.callback(process.kill)
            url = f"http://127.0.0.1:{node.port}"
            log = node.folder / "exporter.log"
            stack.enter_context(running(Server(url, log, node.command)))
        yield found


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Where the engine writes."""
    return tmp_path / "ledger.sqlite"


@contextlib.contextmanager
def judged(folder: Path, found: list[Node]) -> Iterator[None]:
    """A Prometheus and an engine that look at the nodes."""
    targets = [f"127.0.0.1:{node.port}" for node in found]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "gpuwarden", "static_configs": [{"targets": targets}]}],
    }
    port = free_port()
    (folder / "rules.yaml").write_text(RULES)
    with prometheus(yaml.safe_dump(config), folder / "tsdb") as server:
        settings = {
            "version": 1,
            "prometheus": {"url": server.url},
            "scrape_interval": "1s",
            "tick": "1s",
            "expected_nodes": 2,
            "rules": ["rules.yaml"],
            "ledger": "ledger.sqlite",
            "kill_switch": "halt",
            "web": {"listen": f"127.0.0.1:{port}"},
        }
        (folder / "engine.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "gpuwarden", "engine"]
        command += ["--config", str(folder / "engine.yaml")]
        url, log = f"http://127.0.0.1:{port}", folder / "engine.log"
        with running(Server(url, log, command, ready_path="/-/healthy")):
            yield


def rows(ledger: Path, query: str) -> list[tuple[str, Any]]:
    """What the engine's ledger answers; nothing while it is not there yet."""
    with contextlib.closing(sqlite3.connect(f"{ledger.as_uri()}?mode=ro", uri=True)) as db:
        return list(db.execute(query))


def test_no_liar_is_spared_for_longer_than_its_word_is_trusted(
    tmp_path: Path, ledger: Path
) -> None:
    """Log, heartbeat, phase, future times, a claimed run: each is found once its budget is used.

    A false name buys nothing; the service whose name it is stays protected.
    """
    with nodes(tmp_path) as found, judged(tmp_path, found):
        jobs = {
            trick: job_id(process.pid)
            for node in found
            for trick, process in node.processes.items()
        }
        names = {job: trick for trick, job in jobs.items()}

        def detected() -> set[str]:
            events = rows(ledger, "SELECT job_id, time FROM events WHERE kind='detected'")
            return {names.get(job, job) for job, _ in events}

        until(lambda: detected() >= jobs.keys() - {"protected"}, 90)
        spent = {
            names[job]: seconds for job, seconds in rows(ledger, "SELECT job_id, spent FROM trust")
        }
        assert spent.keys() == set(WORDS)
        assert min(spent.values()) >= TRUST_SECONDS
        assert detected() == jobs.keys() - {"protected"}


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_liars_are_ended_by_the_agent_and_each_of_them_once(tmp_path: Path) -> None:
    """Through notice, deadline, signature and proof, like an honest offender."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(ENFORCED)
    tricks = ("idle", "touch-log", "fake-heartbeat", "frozen-phase", "last-words", "last-step")
    cards = [Card(index=card, name=CARDS[0].name) for card in range(len(tricks))]
    with as_launcher(), Stack(tmp_path, rules, owner=getpass.getuser()) as stack:
        liars = {
            trick: stack.launch(
                trick, [sys.executable, str(LIARS), trick, f"run-{trick}", str(tmp_path)]
            )
            for trick in tricks
        }
        try:
            names = {job_id(liar.pid): trick for trick, liar in liars.items()}
            on_cards = [
                SimulatedProcess(card=card, pid=liar.pid, memory=20 * GIB, sm=0)
                for card, liar in enumerate(liars.values())
            ]
            Scenario(cards=cards, processes=on_cards).write(stack.scenario)
            until(lambda: all(liar.poll() is not None for liar in liars.values()), 300)
            query = "SELECT job_id, state FROM decisions"
            until(
                lambda: (
                    [state for _, state in rows(stack.ledger, query)] == ["verified"] * len(tricks)
                )
            )
            assert len({job for job, _ in rows(stack.ledger, query)}) == len(tricks)
            spent = rows(stack.ledger, "SELECT job_id, spent FROM trust")
            trusted = {names[job]: seconds for job, seconds in spent}
            # Who speaks up before each deadline spends less of it, and gets no further.
            assert trusted.keys() == set(tricks) - {"idle", "last-step"}
            assert min(trusted[trick] for trick in tricks if trick in WORDS) >= 20
        finally:
            for liar in liars.values():
                liar.kill()
                liar.wait()
