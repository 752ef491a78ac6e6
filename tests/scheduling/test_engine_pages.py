"""The rule engine's pages over a scheduler's daemon: one contract, both sides real."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.ruleengine.engines import World, world
from tests.ruleengine.engines import running as engine_running
from tests.ruleengine.test_schedules import words
from tests.scheduling.daemon_scenes import ME, POLICY, WAITS
from tests.scheduling.daemons import free_port, running
from tests.scheduling.policy_files import NOW

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.schedule_settings import SchedulerSettings
from gpuwarden.ruleengine.schedules import from_settings
from gpuwarden.schedule_api import Cause, Outcome, Preemption

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "a-token-for-the-engine"
BOOKING = {"gpus": 4, "card": "a100-40", "from": "+2h", "for": "4h", "words": "a demo"}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[World]:
    """The servers and files of an engine that is not yet running."""
    folder = tmp_path / "engine"
    folder.mkdir()
    with world(folder) as made:
        yield made


def test_what_the_daemon_tells_stands_on_the_engines_pages(servers: World, tmp_path: Path) -> None:
    """Queue, a booking that was just made, budgets of the policy and receipts; by a token."""
    port = free_port()
    (tmp_path / "engine.token").write_text(SECRET)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("version: 1\ntokens: [{name: engine, role: reader, file: engine.token}]\n")
    address = f"http://127.0.0.1:{port}"
    servers.web = f"scheduler: {{url: '{address}'}}\n"
    servers.clock.pass_(NOW - servers.clock.wall())

    async def read() -> dict[str, str]:
        settings = SchedulerSettings.model_validate({"url": address, "token_file": "engine.token"})
        async with engine_running(servers) as made:
            schedules = from_settings(settings, lambda name: tmp_path / name, servers.clock)
            app = EngineApp(
                made.engine,
                made.hop,
                notify_token=None,
                operator_token=None,
                ticket_key=b"k" * 32,
                schedules=schedules,
            )
            transport = httpx.ASGITransport(app=app.starlette())
            async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
                paths = ("/queue", "/calendar", "/receipts", "/budgets", "/calendar.ics")
                found = {path: (await client.get(path)).text for path in paths}
            await schedules.aclose()
            return found

    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port), tokens=tokens) as scheduler:
        scheduler.driver.rows = (WAITS,)
        scheduler.driver.asked_to_leave = (
            Preemption(
                "p-1",
                victim="7",
                successor="8",
                cause=Cause.PRIORITY,
                at="epoch",
                steps={"notified": NOW - 60, "acknowledged": NOW - 58},
                outcome=Outcome.OPEN,
            ),
        )
        scheduler.client.ask("POST", "/v1/bookings", body=BOOKING)
        scheduler.tick(1.0)
        found = asyncio.run(read())
    queue = words(found["/queue"])
    assert "1 job waits for 2 cards" in queue
    assert "night" in queue
    assert "as 6 like it" in queue
    assert "does not answer" not in queue
    calendar = words(found["/calendar"])
    assert "4 a100-40" in calendar
    assert ME in calendar
    assert "a100-40 free:" in calendar
    assert "BEGIN:VEVENT" in found["/calendar.ics"]
    receipts = words(found["/receipts"])
    assert "1 job was asked to leave for others." in receipts
    assert receipts.count("not yet") == 4
    assert "GPU-hours" in words(found["/budgets"])
