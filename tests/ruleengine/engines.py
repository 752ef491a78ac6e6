"""One engine on owned time with everything around it, for the suites that need it whole."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from tests.ruleengine.worlds import (
    Agent,
    Fleet,
    Job,
    Keys,
    OwnedClock,
    Sink,
    agent,
    alertmanager_sink,
    slack,
    webhook,
)
from tests.servers import until

from gpuwarden.ruleengine.alertmanager import AlertmanagerClient, rfc3339
from gpuwarden.ruleengine.channels import SlackChannel
from gpuwarden.ruleengine.deliveries import LastHop
from gpuwarden.ruleengine.engine import Engine
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.metrics import EngineCollector, render
from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.settings import SlackSettings, load_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from gpuwarden.ruleengine.app import EngineApp
    from gpuwarden.ruleengine.cases import Case, CaseState
    from gpuwarden.ruleengine.demand_sources import DemandSource
    from gpuwarden.ruleengine.prometheus import Source
    from gpuwarden.ruleengine.reclaim.ports import Platform

TICK = 15.0
RULES = """
version: 1
limits: {terminate: {per_tick: 1, per_hour: 3, per_user_per_day: 2,
  halt_above_share_of_running: 10%}}
rules:
- id: idle-held
  description: Memory held and nothing happening
  mode: MODE
  target: job
  match: {}
  cold_start: 60s
  ignore_phases: {}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 60s, at_most: 5%, gpus: all}
    - {silent_for: 5m, signals: [cpu, heartbeat]}
  for: 1m
  clear_after: 30s
  trust_for: 30m
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 2m, do: notify, owner_may: {keep: 1h, times: 1}}
  - {level: severe, after: 8m, do: terminate, notice_delivered_for: 5m, grace: 60s,
     max_work_lost: 12h}
WHITELIST
"""
DIRECTORY = """
version: 1
operators: {slack: "#gpu-ops"}
users:
  alice: {slack: U0ALICE01, team: vision, timezone: Europe/Berlin}
  bob: {slack: U0BOB0001, team: speech}
"""


@dataclass
class World:
    """One engine and everything around it."""

    folder: Path
    clock: OwnedClock
    fleet: Fleet
    keys: Keys
    agent: Agent
    agent_url: str
    alerts: Sink
    alerts_reply: dict[str, int]
    slack: Sink
    slack_reply: dict[str, Any]
    engine: Engine
    hop: LastHop
    close: Callable[[], Any]
    replicas: tuple[str, ...] = ()
    """Of Alertmanager, beside the first."""
    forwarding: bool = True
    source: Source | None = None
    """What the engine asks instead of the fleet itself, such as a client of a server before it."""
    open_ledger: Callable[[Path], Ledger] = Ledger
    rule_files: str = "[rules.yaml]"
    demands: dict[str, DemandSource] = field(default_factory=dict)
    platforms: Sequence[Platform] = ()
    """What owns jobs and can be told to end them."""
    web: str = ""
    external_url: str = "http://engine:9837"

    def rules(self, mode: str = "enforce", whitelist: str = "") -> None:
        """Write the rule file."""
        text = RULES.replace("MODE", mode).replace("WHITELIST", whitelist)
        (self.folder / "rules.yaml").write_text(text)

    async def tick(self, count: int = 1, seconds: float = TICK) -> None:
        """Let time pass and the engine tick; Alertmanager passes on what it was told."""
        for _ in range(count):
            self.clock.pass_(seconds)
            self.fleet.rules = self.engine.rulebook.rules
            await self.engine.tick()
            await self._handed_over()
            await self.forward()

    async def _handed_over(self) -> None:
        """Wait until agents have what was decided, unless one of them hangs."""
        for _ in range(100):
            if not self.engine.reclaimer.sending:
                return
            await asyncio.sleep(0.01)

    async def forward(self) -> None:
        """Do what Alertmanager would: hand firing job notices to the last hop."""
        if not self.forwarding or not self.alerts.received:
            return
        newest = self.alerts.received[-1].json()
        firing = [
            alert
            for alert in newest
            if alert["endsAt"] > alert["startsAt"]
            and alert["labels"]["level"] != "page"
            and alert["endsAt"] > rfc3339(self.clock.wall())
        ]
        if firing:
            await self.hop.receive(webhook(firing), ["slack"])

    async def until(self, state: CaseState | None, limit: int = 80) -> None:
        """Tick until the case of job-1 is in a state, or closed for None."""
        for _ in range(limit):
            if self.state() == state:
                return
            await self.tick()
        pytest.fail(f"still {self.state()}, not {state}: {self.why()}")

    async def settled(self) -> None:
        """Let decisions that are being followed come to their result."""
        for _ in range(200):
            if not self.engine.ledger.open_decisions():
                return
            self.engine.reclaimer.follow()
            await asyncio.sleep(0.01)
        pytest.fail("a decision stays open")

    def state(self, job: str = "proc-1") -> CaseState | None:
        """State of a job's case, or None."""
        stored = self.engine.cases.get("idle-held", job)
        return None if stored is None else stored.case.state

    def why(self, job: str = "proc-1") -> set[str]:
        """Why a due job was not ended, in words of the guards."""
        blocks = self.engine.view.blocks.get(("idle-held", job), ())
        return {block.reason for block in blocks}

    def case(self, job: str = "proc-1") -> Case:
        """A job's case, which must be open."""
        stored = self.engine.cases.get("idle-held", job)
        assert stored is not None
        return stored.case

    def told(self) -> dict[str, float]:
        """What the engine's page of metrics says: series -> value."""
        body, _ = render(EngineCollector(self.engine), "")
        lines = (line for line in body.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def kinds(self, job: str = "proc-1") -> list[str]:
        """The audit of a job."""
        return [str(event["kind"]) for event in self.engine.ledger.events(job)]


def _build(world: World) -> None:
    (world.folder / "engine.yaml").write_text(
        "version: 1\nprometheus: {url: http://127.0.0.1:1}\n"
        f"rules: {world.rule_files}\n"
        f"directory: directory.yaml\nledger: ledger.sqlite\ntick: {TICK:.0f}s\n"
        "alertmanagers: [http://127.0.0.1:1]\nkill_switch: halt\n"
        f"external_url: {world.external_url}\n{world.web}"
    )
    settings = load_settings(world.folder / "engine.yaml")
    book = RuleBook(settings)
    ledger = world.open_ledger(settings.path(settings.values.ledger))
    poster = AlertmanagerClient([world.alerts.url, *world.replicas], world.clock)
    agents = AgentClient(world.agent_url)
    world.engine = Engine(
        settings.values,
        settings.path("halt"),
        rulebook=book,
        ledger=ledger,
        source=world.source or world.fleet,
        alertmanager=poster,
        agents=agents,
        signer=Signer.load(world.keys.file),
        clock=world.clock,
        ticket_key=b"k" * 32,
        demands=world.demands,
        platforms=world.platforms,
        poll=0.01,
    )
    settings_of_slack = SlackSettings(url=world.slack.url, token_file="t")
    channel = SlackChannel(settings_of_slack, "xoxb-test", clock=world.clock)
    world.hop = LastHop(
        ledger, {"slack": channel}, directory=lambda: book.directory, clock=world.clock
    )
    world.fleet.rules = book.rules

    async def close() -> None:
        await asyncio.gather(world.engine.reclaimer.aclose(), world.engine.leaves.aclose())
        await poster.aclose()
        await agents.aclose()
        await channel.aclose()
        ledger.close()

    world.close = close


@contextlib.contextmanager
def world(tmp_path: Path) -> Iterator[World]:
    """The servers and files of a world whose engine is not yet running."""
    clock, keys = OwnedClock(), Keys(tmp_path)
    fleet = Fleet(clock, jobs=[Job("proc-1", activity={"cpu": 1_799_990_000.0})])
    with contextlib.ExitStack() as stack:
        agent_sink, state = stack.enter_context(agent(keys))
        alerts, alerts_reply = stack.enter_context(alertmanager_sink(clock))
        slack_sink, slack_reply = stack.enter_context(slack())
        made = World(
            folder=tmp_path,
            clock=clock,
            fleet=fleet,
            keys=keys,
            agent=state,
            agent_url=f"http://{{host}}:{agent_sink.port}",
            alerts=alerts,
            alerts_reply=alerts_reply,
            slack=slack_sink,
            slack_reply=slack_reply,
            engine=None,  # type: ignore[arg-type]
            hop=None,  # type: ignore[arg-type]
            close=lambda: None,
        )
        made.rules()
        (tmp_path / "directory.yaml").write_text(DIRECTORY)
        yield made


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    """The world with its engine; call again for a restart."""
    _build(world)
    try:
        yield world
    finally:
        await world.close()


@contextlib.asynccontextmanager
async def serving(app: EngineApp, port: int) -> AsyncIterator[None]:
    """The engine's HTTP side on the loopback, in this loop."""
    server = uvicorn.Server(
        uvicorn.Config(
            app.starlette(),
            host="127.0.0.1",
            port=port,
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(asyncio.CancelledError))
        task = asyncio.create_task(server.serve())
        await eventually(lambda: server.started)
        try:
            yield
        finally:
            server.should_exit = True
            await task


async def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what other processes do."""
    await asyncio.to_thread(until, holds, seconds)
