"""An engine whose fleet is at work, and a scheduler as its client that asks jobs to leave."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.reclaim.scenes import JOB, Scene

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.sign_ins import Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKENS = (
    Token("root", Role.ADMIN, "admins-token-00001"),
    Token("olga", Role.OPERATOR, "operators-token-01"),
    Token("planner", Role.SCHEDULER, "planners-token-001"),
    Token("other", Role.SCHEDULER, "others-token-00001"),
    Token("alice", Role.OWNER, "alices-token-00001"),
    Token("bob", Role.OWNER, "bobs-token-0000001"),
)
AS = {token.name: {"Authorization": f"Bearer {token.secret}"} for token in TOKENS}
LIMITS = "leaves: {per_hour: 5, per_run_per_day: 2, share_of_running: 50%, longest: 30m}\n"
HOST = "127.0.0.1"


def body(**changes: Any) -> dict[str, Any]:
    """A request that nothing speaks against."""
    return {
        "job_id": JOB,
        "at": "epoch",
        "then": "requeue",
        "deadline_seconds": 600,
        "cause": "priority",
        "reason": "high-1 of team speech goes first",
        "successor": "slurm-4712",
        "key": "pre-1",
    } | changes


@contextlib.asynccontextmanager
async def asked(world: World) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an engine that has settled on a busy fleet."""
    app = EngineApp(
        world.engine,
        world.hop,
        notify_token="notify",
        operator_token=None,
        ticket_key=None,
        tokens=TOKENS,
    )
    await world.tick(4)
    transport = httpx.ASGITransport(app=app.starlette())
    async with httpx.AsyncClient(
        transport=transport, base_url="http://engine", headers=AS["planner"]
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def planning(scene: Scene, limits: str = LIMITS) -> AsyncIterator[httpx.AsyncClient]:
    """An engine whose fleet is at work, and a scheduler as its client."""
    scene.world.web = limits
    for job in scene.world.fleet.jobs:
        job.utilization = 0.9
    async with running(scene.world), asked(scene.world) as client:
        yield client


async def becomes(client: httpx.AsyncClient, name: str, *states: str) -> Any:
    """The leave once it is in one of these states."""
    found: dict[str, Any] = {}
    for _ in range(300):
        found = (await client.get(f"/v1/leaves/{name}")).json()
        if found["state"] in states:
            return found
        await asyncio.sleep(0.01)
    pytest.fail(f"still {found}")
