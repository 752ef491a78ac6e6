"""An engine cut off in the act, and two at once: one end, and everybody learns of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running

from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from gpuwarden.agent_api import ActionRequest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("moment", ["before the agent has it", "after the agent has it"])
def test_an_engine_told_to_stop_in_the_act_loses_nothing(servers: World, moment: str) -> None:
    """SIGTERM cuts the tick off while the agent is being asked: the next life asks how it went."""
    asked, go_on = threading.Event(), threading.Event()

    def hold(_action: ActionRequest) -> None:
        if not asked.is_set():
            asked.set()
            assert go_on.wait(30)

    if moment.startswith("before"):
        servers.agent.on_node = lambda: hold(None)  # type: ignore[arg-type]
    else:
        servers.agent.on_action = hold

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            cut = asyncio.create_task(_until_ended(world))
            await asyncio.to_thread(asked.wait, 30)
            cut.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cut
        go_on.set()
        async with running(servers) as world:
            for _ in range(20):
                await world.tick()
                if world.agent.ended and not world.engine.ledger.open_decisions():
                    break
                await asyncio.sleep(0.01)
            assert world.agent.ended == ["proc-1"]
            assert len(world.agent.requests) == 1
            assert world.state() is CaseState.VERIFIED
            assert world.kinds().count("authorised") == 1

    asyncio.run(story())


async def _until_ended(world: World) -> None:
    while not world.agent.ended:
        await world.tick()


def test_two_engines_with_a_ledger_each_end_a_job_once(servers: World, tmp_path: Path) -> None:
    """Started by mistake: the agent ends an attempt once, and both learn by whose decision."""
    other = tmp_path / "other"
    other.mkdir()
    for name in ("rules.yaml", "directory.yaml"):
        shutil.copy(tmp_path / name, other / name)
    mistaken = dataclasses.replace(servers, folder=other)

    async def story() -> None:
        async with running(servers) as first, running(mistaken) as second:
            for _ in range(60):
                await first.tick()
                second.fleet.rules = second.engine.rulebook.rules
                await second.engine.tick()
                await second.forward()
                await asyncio.sleep(0)
                states = {first.state(), second.state()}
                if states == {CaseState.VERIFIED}:
                    break
            assert states == {CaseState.VERIFIED}
            assert servers.agent.ended == ["proc-1"]
            decisions = {
                decision.id: decision.reason
                for world in (first, second)
                for decision in world.engine.ledger.job_decisions("proc-1")
            }
            (told,) = [reason for reason in decisions.values() if reason]
            (done,) = [name for name, reason in decisions.items() if not reason]
            assert told.startswith(f"already ended by decision {done}")

    asyncio.run(story())


def test_every_fault_of_the_handbook_has_its_test() -> None:
    """A row of the table in docs/operations.md that claims something names who holds it."""
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition("## Faults, and what follows")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    alerts = set(re.findall(r"alert: (\w+)", (ROOT / "alerting/rules/health.yml").read_text()))
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= known, row
        assert set(re.findall(r"\b(Gpuwarden\w+)", row)) <= alerts | {
            "GpuwardenNoticeUndeliverable",
            "GpuwardenNoticeWithdrawn",
            "GpuwardenReclaimUnproven",
        }, row
