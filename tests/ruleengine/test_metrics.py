"""What the engine's page of metrics says about open cases and about how long ends took."""

from __future__ import annotations

import asyncio

import pytest
from tests.ruleengine.engines import TICK, World, running

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ledger_counters import WAIT_BOUNDS

CASE = 'job_id="proc-1",rule="idle-held"'
DUE = f'gpuwarden_violation_due_timestamp_seconds{{action="terminate",{CASE}}}'
DETECTED = f"gpuwarden_violation_detected_timestamp_seconds{{{CASE}}}"
WAIT = "gpuwarden_decision_wait_seconds"
ENDED = 'action="terminate",rule="idle-held"'


def test_the_page_says_when_a_job_is_due_and_how_long_its_end_took(servers: World) -> None:
    """The foretold moment is the decision's to a tick, and the wait between them is counted."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.DETECTED)
            detected = world.told()[DETECTED]
            assert detected == world.clock.wall()
            await world.until(CaseState.NOTIFIED)
            due = world.told()[DUE]
            assert due == detected + 480
            # there before it has happened: increase() does not see what a series is born with
            assert world.told()[f"{WAIT}_count{{{ENDED}}}"] == 0
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            (decision,) = world.engine.ledger.recent_decisions(0)
            assert decision.created_at - due == pytest.approx(0, abs=2 * TICK)
            waited = decision.created_at - detected
            told = world.told()
            assert DUE not in told  # nothing is left to do
            assert told[f"{WAIT}_sum{{{ENDED}}}"] == pytest.approx(waited)
            assert told[f"{WAIT}_count{{{ENDED}}}"] == 1
            below = [told[f'{WAIT}_bucket{{action="terminate",le="{b}.0",rule="idle-held"}}']
                     for b in WAIT_BOUNDS]  # fmt: skip
            assert below == [float(waited <= bound) for bound in WAIT_BOUNDS]

    asyncio.run(story())


def test_a_decision_that_was_not_carried_out_waited_for_nothing(servers: World) -> None:
    """What the agent refused is no end, and counts in no bucket."""
    servers.agent.refuse = (403, "kill_switch")

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            await world.settled()
            (decision,) = world.engine.ledger.recent_decisions(0)
            assert decision.state == "refused"
            told = world.told()
            assert told[f'{WAIT}_bucket{{action="terminate",le="+Inf",rule="idle-held"}}'] == 0
            decided = 'action="terminate",mode="enforce",outcome="{}",rule="idle-held"'
            for outcome, count in (("refused", 1), ("verified", 0), ("failed", 0)):
                assert told[f"gpuwarden_decisions_total{{{decided.format(outcome)}}}"] == count

    asyncio.run(story())


def test_a_keep_moves_the_foretold_moment_and_is_counted(servers: World) -> None:
    """By its length, to the second."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            before = world.told()[DUE]
            stored = world.engine.cases.get("idle-held", "proc-1")
            rule = world.engine.rulebook.rule("idle-held")
            assert stored is not None
            assert rule is not None
            world.engine.keep(
                stored, rule, role="owner", by="alice", reason="lunch", seconds=1800.0
            )
            await world.tick()
            told = world.told()
            assert told[DUE] == before + 1800
            assert told['gpuwarden_keeps_total{role="owner",rule="idle-held"}'] == 1

    asyncio.run(story())


def test_in_observe_nothing_is_foretold(servers: World) -> None:
    """A rule that may do nothing has no moment at which it does it."""
    servers.rules(mode="observe")

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.DETECTED)
            told = world.told()
            assert DETECTED in told
            assert DUE not in told
            # and the one thing that can be counted of its end is that it would have been
            ends = [name for name in told if name.startswith("gpuwarden_decisions_total")
                    and 'action="terminate"' in name]  # fmt: skip
            assert len(ends) == 1
            assert 'outcome="would"' in ends[0]
            assert f"{WAIT}_count{{{ENDED}}}" not in told

    asyncio.run(story())
