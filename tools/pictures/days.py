"""A real engine that judges the end of the generated day, over a real Prometheus that holds it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import yaml
from tests.grafana.engines import TEAMS
from tests.grafana.fleets import JOBS
from tests.grafana.scenarios import HEALTHY
from tests.ruleengine.browsing import KEY, TOKENS, WEB
from tests.ruleengine.engines import running, serving, world
from tests.servers import free_port
from tools.pictures import boards

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.job_histories import PrometheusSeries
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.replicas import AnyReplica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.ruleengine.engines import World

RULES = Path(__file__).resolve().parents[2] / "ruleengine" / "rules" / "defaults.yaml"
JUDGED_BY = ("idle-held", "off-profile", "data-starved", "memory-hog")
"""Shipped rules, raised to enforce."""

JUDGED_SECONDS, STEP = 3300.0, 15.0
"""For so long the engine has judged at the end of the day: owners are told, nothing is ended."""


class Past(PrometheusClient):
    """A server that holds a past: its own clock shows today, and is not asked."""

    async def clock_skew(self) -> float:
        """As in a fleet whose clocks agree."""
        return 0.0


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[tuple[World, str]]:
    """The engine, and the address at which its pages and its API answer."""
    port = free_port()
    with (
        boards.past(CATALOGUE) as server,
        tempfile.TemporaryDirectory(prefix="gpuwarden-day-") as folder,
        world(Path(folder)) as made,
    ):
        made.clock.jump(HEALTHY.window.end - JUDGED_SECONDS - made.clock.wall())
        _write(made, port)
        async with Past(server.url) as client:
            made.source = client
            async with running(made), httpx.AsyncClient() as asking:
                await made.tick(int(JUDGED_SECONDS / STEP), STEP)
                app = EngineApp(
                    made.engine,
                    made.hop,
                    notify_token=None,
                    operator_token=None,
                    ticket_key=KEY,
                    tokens=TOKENS,
                    series=PrometheusSeries([server.url], asking),
                    figures=AnyReplica([[client]]),
                )
                async with serving(app, port):
                    yield made, f"http://127.0.0.1:{port}"


def _write(made: World, port: int) -> None:
    """Rules, and a directory of the day's users."""
    made.web = WEB
    made.external_url = f"http://127.0.0.1:{port}"
    shipped = yaml.safe_load(RULES.read_text())
    del shipped["tests"]  # also of the rules that are left out
    shipped["rules"] = [r | {"mode": "enforce"} for r in shipped["rules"] if r["id"] in JUDGED_BY]
    (made.folder / "rules.yaml").write_text(yaml.safe_dump(shipped, sort_keys=False))
    lines = ["version: 1", 'operators: {slack: "#gpu-ops"}', "users:"]
    for number, user in enumerate(sorted({job.user for job in JOBS})):
        team = f", team: {TEAMS[user]}" if user in TEAMS else ""
        lines.append(f"  {user}: {{slack: U0{number:07d}{team}}}")
    (made.folder / "directory.yaml").write_text("\n".join(lines) + "\n")
