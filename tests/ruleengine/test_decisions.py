"""Decisions on owned time: what a crash, a lost answer, a refusal or an unproven end lead to."""

from __future__ import annotations

import asyncio

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.worlds import Job

from gpuwarden.agent_api import Outcome
from gpuwarden.ruleengine.cases import CaseState


def test_a_decision_left_open_by_a_crash_is_asked_for_and_never_sent_again(
    servers: World,
) -> None:
    """The agent has it: the new engine reads the result. One request, one end."""
    servers.agent.finish = False

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            assert world.state() is CaseState.ACTING
        servers.agent.finish = True
        async with running(servers) as world:
            assert world.state() is CaseState.ACTING
            await world.settled()
            assert world.state() is CaseState.VERIFIED
            await world.tick(4)
            assert len(world.agent.requests) == 1

    asyncio.run(story())


def test_a_decision_that_never_arrived_lapses_and_the_case_may_be_tried_again(
    servers: World,
) -> None:
    """404 after the expiry: not in flight any more, and nothing was ended."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            world.agent.refuse = (503, "restarting")
            while not world.agent.requests:
                await world.tick()
            sent = len(world.agent.requests)
            (decision,) = world.engine.ledger.open_decisions()
            assert decision.state == "authorised"
            world.clock.pass_(40)
            await world.settled()
            again = world.engine.ledger.decision(decision.id)
            assert again is not None
            assert again.state == "lapsed"
            assert world.state() is CaseState.NOTIFIED
            assert {r.encode() for r in world.agent.requests[:sent]} == {decision.body}
            world.agent.refuse = None
            while len(world.agent.requests) == sent:
                await world.tick()
            await world.settled()
            assert world.agent.ended == ["proc-1"]

    asyncio.run(story())


def test_a_lost_answer_leads_to_no_second_end(servers: World) -> None:
    """The same signed bytes are sent again within their life; the agent acts once."""
    servers.agent.lose_answers = 1

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            assert len({request.decision_id for request in world.agent.requests}) == 1
            assert world.agent.ended == ["proc-1"]

    asyncio.run(story())


def test_a_refusal_waits_before_it_is_tried_again(servers: World) -> None:
    """The agent cannot be forced: the attempt is not consumed, and not hammered either."""
    servers.agent.refuse = (403, "kill_switch")

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            assert world.state() is CaseState.REFUSED
            await world.tick(10)
            assert len(world.agent.requests) == 1
            world.agent.refuse = None
            await world.tick(40)
            assert world.agent.ended == ["proc-1"]

    asyncio.run(story())


@pytest.mark.parametrize("outcome", [Outcome.INCOMPLETE, Outcome.FAILED])
def test_an_unproven_end_is_counted_as_such_and_operators_are_told(
    servers: World, outcome: Outcome
) -> None:
    """No success is claimed, no second try is made on the attempt."""
    servers.agent.outcome = outcome
    servers.agent.reason = "survivor"

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            await world.tick(10)
            assert world.state() is CaseState(outcome.value)
            assert len(world.agent.requests) == 1
            levels = {alert["labels"]["level"] for alert in world.alerts.received[-1].json()}
            assert {"ended", "page"} <= levels

    asyncio.run(story())


def test_no_second_victim_on_the_card_of_an_unproven_reclaim(servers: World) -> None:
    """Until the card is seen free of the first job, another job on it is left alone."""
    servers.agent.outcome = Outcome.INCOMPLETE

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            world.fleet.jobs.append(Job("proc-2", user="bob", activity={"cpu": 1_799_990_000.0}))
            world.fleet.jobs[0].utilization = None
            # Two tenants: per-process values decide, and both jobs report theirs.
            await world.tick(60)
            assert world.state("proc-2") is CaseState.DUE
            assert "incomplete_reclaim" in world.why("proc-2")
            world.fleet.jobs.pop(0)
            await world.tick(8)
            assert world.agent.requests[-1].job_id == "proc-2"

    asyncio.run(story())


def test_no_second_victim_while_an_ended_process_keeps_its_memory(servers: World) -> None:
    """NVML goes on listing what has ended: no job holds the card, and its memory is nobody's."""
    servers.agent.outcome = Outcome.INCOMPLETE

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            uuid = world.fleet.jobs[0].uuid
            world.fleet.unattributed = {uuid: 30.0 * 2**30}
            world.fleet.jobs[:] = [Job("proc-2", user="bob", activity={"cpu": 1_799_990_000.0})]
            await world.tick(60)
            assert world.state("proc-2") is CaseState.DUE
            assert world.why("proc-2") == {"incomplete_reclaim"}
            world.fleet.unattributed = {uuid: 0.0}
            world.agent.outcome = Outcome.RECLAIMED
            await world.tick()
            assert world.why("proc-2") == {"incomplete_reclaim"}
            await world.tick(3)
            assert world.agent.requests[-1].job_id == "proc-2"
            await world.settled()
            # What is nobody's there from now on is none of the first one's.
            world.fleet.unattributed = {uuid: 30.0 * 2**30}
            await world.tick()
            facts = world.engine.view.facts
            assert facts is not None
            assert world.engine.unproven_cards(facts) == set()

    asyncio.run(story())
