"""A scheduler's leave on real parts: engine, agent, exporter, Prometheus and a training of its own.

The scheduler's client asks; the training finishes its epoch, saves, leaves with 75, and comes back
at the step that it had saved.
"""

from __future__ import annotations

import asyncio
import getpass
from typing import TYPE_CHECKING

import pytest
from demo.jobs import Cards, Starter, cast, run_status
from demo.stack import Stack, as_launcher
from demo.story import Story
from tests.servers import until

from gpuwarden.errors import RefusedAction
from gpuwarden.job_files import EXIT_REQUEUE
from gpuwarden.schedule_api import STEPS
from gpuwarden.scheduling.leaves import EngineLeaves, Leave, LeaveOrder, LeaveState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.training, pytest.mark.sweep]

TOKEN = "a-planner-of-this-test"
RULES = "version: 1\nrules: []\n"
BATCHES = 20
"""Of an epoch: 160 images in batches of 8."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A node and a cluster whose engine takes a scheduler's word."""
    rules, token = tmp_path / "rules.yaml", tmp_path / "planner.token"
    rules.write_text(RULES)
    token.write_text(TOKEN)
    engine = {
        "leaves": {
            "per_hour": 3,
            "per_run_per_day": 3,
            "share_of_running": "100%",
            "longest": "5m",
        },
        "web": {"tokens": [{"name": "planner", "role": "scheduler", "file": str(token)}]},
    }
    with as_launcher(), Stack(tmp_path, rules, owner=getpass.getuser(), engine=engine) as running:
        yield running


def asked(stack: Stack, what: Callable[[EngineLeaves], Awaitable[Leave]]) -> Leave:
    """What the engine answers to the scheduler's client."""

    async def story() -> Leave:
        engine = EngineLeaves(stack.url("engine"), TOKEN)
        try:
            return await what(engine)
        finally:
            await engine.aclose()

    return asyncio.run(story())


@pytest.mark.timeout(300)
def test_a_training_is_asked_finishes_its_epoch_leaves_and_comes_back(stack: Stack) -> None:
    """Every step is seen with its time, in order; nothing is lost, and nobody is signalled."""
    job, starter, cards = cast()["fitting"], Starter(stack), Cards(stack)
    story = Story(stack, lambda _moment: None)
    story.jobs["fitting"] = job

    def trains() -> bool:
        status = run_status(stack, job)
        return status is not None and status.phase == "train" and status.exit is None

    try:
        starter.training(
            job, "batch=8", "epochs=8", environment={"GPUWARDEN_DEMO_LOADER_SECONDS": "0.4"}
        )
        until(trains, 120)
        cards.put(job)
        order = LeaveOrder(
            key="pre-1",
            cause="priority",
            reason="high-1 of another team goes first",
            deadline_seconds=120.0,
            run_id="fitting",
            successor="high-1",
        )
        taken: list[Leave] = []

        def takes() -> bool:
            try:
                taken.append(asked(stack, lambda engine: engine.ask(order)))
            except RefusedAction as refused:
                # until Prometheus has seen it, and the engine has looked for long enough
                passing = {"unknown_job", "settling", "no_run", "facts_incomplete", "stale_facts"}
                if refused.reason not in passing:
                    raise
            return bool(taken)

        until(takes, 90, every=0.5)
        until(lambda: job.ended, 120)
        assert job.status == EXIT_REQUEUE
        left = run_status(stack, job)
        assert left is not None
        assert left.checkpoint is not None
        assert left.step % BATCHES == 0
        assert left.checkpoint.step == left.step

        def look() -> Leave:
            return asked(stack, lambda engine: engine.look(taken[0].id))

        until(lambda: look().state is LeaveState.LEFT and "freed" in look().steps, 60)
        seen = look().steps
        assert {"notified", "left", "freed"} <= set(seen)
        times = [seen[name] for name in STEPS if name in seen]
        assert times == sorted(times)
        assert "acknowledged" in seen
        starter.training(
            job, "batch=8", "epochs=8", environment={"GPUWARDEN_DEMO_LOADER_SECONDS": "0"}
        )
        until(lambda: job.ended, 120)
        assert job.status == 0
        ended = run_status(stack, job)
        assert ended is not None
        assert ended.step == 8 * BATCHES
        journal = (stack.folder / "agent" / "agent.journal").read_text()
        assert '"sigterm"' not in journal
    finally:
        story.stop()
