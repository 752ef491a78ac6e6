"""Whose job it is changes while its case is open: nobody's proof counts for anybody else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import TICK, World
from tests.ruleengine.test_invariants import due

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path

NOTICE_SECONDS = 5 * 60.0
STAGE = "moderate-notify:enforce"


def told(world: World) -> list[str]:
    """Whom Slack has brought a message, in order."""
    return [request.json()["channel"] for request in world.slack.received]


@pytest.mark.parametrize("moment", ["before the tick", "at the last look"])
def test_a_new_owner_has_the_notice_and_its_whole_time(servers: World, moment: str) -> None:
    """The former one's proof is worth nothing to them, however late the change is seen."""

    async def story() -> None:
        async with due(servers) as world:

            def change() -> None:
                world.agent.on_node = None
                world.fleet.jobs[0].user = "bob"

            if moment == "at the last look":
                world.agent.on_node = change
            else:
                change()
            await world.tick()
            assert world.agent.requests == []
            assert "notice_not_delivered" in world.why() or world.state() is CaseState.DETECTED
            since = world.clock.wall()
            while not world.agent.requests:
                await world.tick()
            assert world.clock.wall() - since >= NOTICE_SECONDS
            assert told(world)[:2] == ["U0ALICE01", "U0BOB0001"]
            assert world.kinds().count("notice_open") == 1
            assert world.engine.ledger.job_decisions("proc-1")[0].user == "bob"

    asyncio.run(story())


def test_a_former_owner_who_is_back_was_told_already(servers: World) -> None:
    """Labels that go to and fro send nobody the same twice, and hold nothing up for ever."""

    async def story() -> None:
        async with due(servers) as world:
            for user in ("bob", "alice", "bob", "alice"):
                world.fleet.jobs[0].user = user
                await world.tick(2)
                assert world.state() is CaseState.NOTIFIED
            assert told(world) == ["U0ALICE01", "U0BOB0001"]
            assert world.case().notice_age == 6 * TICK

    asyncio.run(story())


def test_an_owner_who_is_not_known_for_a_while_is_still_the_owner(servers: World) -> None:
    """A label that is missing names nobody else: what was told stays told."""

    async def story() -> None:
        async with due(servers) as world:
            world.fleet.jobs[0].user = ""
            await world.tick()
            assert world.agent.ended == ["proc-1"]
            assert told(world)[0] == "U0ALICE01"

    asyncio.run(story())


def test_an_address_of_two_owners_proves_it_to_the_one_who_was_asked_for_last(
    tmp_path: Path,
) -> None:
    """Both read the same channel: the row is the present owner's once they must be told."""
    address = [("slack", "#vision")]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        with ledger.transaction() as db:
            db.execute(
                "INSERT INTO cases (id, rule_id, job_id, state, body, opened_at) "
                "VALUES (1, 'r', 'j', 'detected', '{}', 1)"
            )
        ledger.require(1, STAGE, address, channels=["slack"], time=5.0, owner="alice")
        with ledger.transaction() as db:
            db.execute("UPDATE notices SET state='proven', proof='ok', time=6")
        assert ledger.delivery(1, [STAGE], "alice").complete
        assert not ledger.delivery(1, [STAGE], "bob").complete
        ledger.require(1, STAGE, address, channels=["slack"], time=7.0, owner="bob")
        assert ledger.delivery(1, [STAGE], "bob").complete
