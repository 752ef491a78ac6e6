"""A fleet worth looking at, its pages served, and people with tokens; for suites and pictures."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.ruleengine.engines import World, running, serving
from tests.ruleengine.schedules import scheduler, schedules
from tests.ruleengine.worlds import GIB, Job

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.sign_ins import Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gpuwarden.ruleengine.job_histories import Point
    from gpuwarden.ruleengine.schedules import Schedules

KEY = b"k" * 32
ALICE, OLGA, ROOT = "alices-own-token-1", "olgas-own-token-01", "roots-own-token-01"
TOKENS = (
    Token("alice", Role.OWNER, ALICE),
    Token("olga", Role.OPERATOR, OLGA),
    Token("root", Role.ADMIN, ROOT),
)
WEB = """web:
  tokens:
  - {name: alice, role: owner, file: unread}
  - {name: olga, role: operator, file: unread}
  - {name: root, role: admin, file: unread}
"""
WHITELIST = """whitelist:
- {match: {user: ci}, rules: [idle-held], reason: nightly regression runs, approved_by: olga,
   expires: 2027-06-30T00:00:00+08:00}
- {match: {cgroup: /system.slice/tensorboard.service}, rules: [idle-held], reason: shared service,
   approved_by: olga, expires: 2026-12-31T00:00:00+08:00}
"""
RUN = {
    "run_id": "yolov8m-coco-14",
    "model": "yolov8m",
    "batch": "64",
    "imgsz": "640",
    "amp": "true",
}


@dataclass
class Series:
    """A `SeriesSource` whose curves look like a job that fell asleep."""

    queries: list[str] = field(default_factory=list)
    answers: bool = True

    async def series(self, query: str, *, start: float, end: float, step: float) -> list[Point]:
        """One curve for each signal; nothing of throughput in the last two hours."""
        self.queries.append(query)
        count = int((end - start) / step) + 1 if self.answers else 0
        points = []
        for number in range(count):
            share = number / count
            busy = share < 0.62
            wave = math.sin(number / 3.0) * 0.04 + math.sin(number / 11.0) * 0.05
            if "utilization" in query:
                value = 0.83 + wave if busy else 0.0
            elif "memory" in query:
                value = (30 + 14 * wave) * GIB if share > 0.03 else 4 * GIB
            elif busy and not 0.3 < share < 0.34:
                value = 165 * (1 + wave)
            else:
                continue
            points.append((start + number * step, value))
        return points


def populate(world: World, jobs: int = 24) -> None:
    """Give the world a fleet: some jobs sleep, most of them work."""
    users = ("alice", "bob", "carol", "dmitri", "ci")
    nodes = [f"gpu{number:02d}.example.org:9835" for number in range(1, 1 + max(1, jobs // 4))]
    world.fleet.nodes = {"127.0.0.1:9835": True} | dict.fromkeys(nodes, True)
    world.fleet.jobs[0].run = dict(RUN)
    for number in range(1, jobs):
        sleeps = number % 12 == 5
        user = users[number % len(users)]
        world.fleet.jobs.append(
            Job(
                f"proc-5f2e91ab-{40_000 + number * 37}-{8_812_000 + number * 911}",
                user=user,
                uuid=f"GPU-{number:04d}",
                utilization=0.0 if sleeps or user == "ci" else 0.71,
                memory=31 * GIB,
                activity={"cpu": 1_799_990_000.0},
                instance=nodes[number % len(nodes)],
                run={**RUN, "run_id": f"yolov8m-coco-{number + 14}"} if sleeps else {},
            )
        )


def application(
    world: World, series: Series | None = None, schedules: Schedules | None = None
) -> EngineApp:
    """The engine's HTTP side, with three people who have tokens."""
    return EngineApp(
        world.engine,
        world.hop,
        notify_token="notify",
        operator_token=None,
        ticket_key=KEY,
        tokens=TOKENS,
        series=series or Series(),
        schedules=schedules,
    )


@contextlib.asynccontextmanager
async def browsed(servers: World, port: int, *, jobs: int = 24) -> AsyncIterator[World]:
    """The pages of a fleet on the loopback, at the moment when an owner has been told."""
    with scheduler(servers.clock) as (_, sink):
        servers.web = f"{WEB}scheduler: {{url: {sink.url}}}\n"
        async with _browsed(servers, port, sink.url, jobs=jobs) as world:
            yield world


@contextlib.asynccontextmanager
async def _browsed(servers: World, port: int, url: str, *, jobs: int) -> AsyncIterator[World]:
    servers.external_url = f"http://127.0.0.1:{port}"
    servers.rules(whitelist=WHITELIST)
    populate(servers, jobs)
    async with running(servers) as world:
        await world.until(CaseState.NOTIFIED)
        await world.tick(3)
        told = schedules(url, world.clock)
        async with serving(application(world, schedules=told), port):
            yield world
        await told.aclose()
