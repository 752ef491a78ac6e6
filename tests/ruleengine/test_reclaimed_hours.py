"""GPU time that came back: only what others hold, for a day, and once for each card."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import TICK, World, running
from tests.ruleengine.fleets import a_job, cards, fleet_of
from tests.ruleengine.worlds import Job

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.reclaimed_hours import ReclaimedHours, Taken
from gpuwarden.ruleengine.records import Decision

if TYPE_CHECKING:
    from gpuwarden.ruleengine.verdicts import FleetFacts

TEAMS = {"ana": "vision"}


def an_end(**fields: object) -> Decision:
    """A proven end of ana's job on two cards."""
    known: dict[str, object] = {
        "id": "d1", "epoch": 1, "case_id": 1, "rule_id": "idle", "job_id": "old", "user": "ana",
        "action": "terminate", "state": "verified", "host": "n1", "body": b"", "signature": "",
        "gpus": ("g0", "g1"), "evidence": "", "grace": 1.0, "expires": 1.0, "created_at": 1.0,
        "finished_at": 2.0,
    }  # fmt: skip
    return Decision(**(known | fields))  # type: ignore[arg-type]


def counted(
    *decisions: Decision, facts: FleetFacts, times: int = 2
) -> dict[tuple[str, ...], float]:
    """GPU seconds after so many ticks of ten seconds, by job and team."""
    hours = ReclaimedHours(30.0)
    for tick in range(times):
        hours.add(facts, decisions, teams=TEAMS, apart={"drill"}, now=10.0 * tick)
    return {(whose.job_id, whose.team): seconds for whose, seconds in hours.seconds().items()}


def test_only_what_others_hold_has_come_back() -> None:
    """Not what is free, and not what the same user took again."""
    bob = a_job(job_id="new", user="bob", gpus=cards("g0"))
    assert counted(an_end(), facts=fleet_of(bob)) == {("old", "vision"): 10.0}
    assert counted(an_end(), facts=fleet_of()) == {("old", "vision"): 0.0}
    for own in (replace(bob, user="ana"), replace(bob, user=""), replace(bob, fresh=False)):
        assert counted(an_end(), facts=fleet_of(own)) == {("old", "vision"): 0.0}


def test_a_shared_card_and_a_slice_count_as_their_share() -> None:
    """Two hold it, one of them another user: half of the time."""
    bob = a_job(job_id="new", user="bob", gpus=cards("g0", tenants=2))
    assert counted(an_end(), facts=fleet_of(bob)) == {("old", "vision"): 5.0}
    (whole,) = cards("g0")
    part = replace(bob, gpus=(replace(whole, name="NVIDIA A30 MIG 1g.6gb"),))
    assert counted(an_end(), facts=fleet_of(part)) == {("old", "vision"): 2.5}


@pytest.mark.parametrize(
    "fields",
    [{"state": "incomplete"}, {"action": "checkpoint", "state": "done"}, {"rule_id": "drill"}],
)
def test_what_freed_nothing_is_not_counted(fields: dict[str, object]) -> None:
    """An end without proof, a saved state, a drill."""
    bob = a_job(job_id="new", user="bob", gpus=cards("g0"))
    assert counted(an_end(**fields), facts=fleet_of(bob)) == {}


def test_a_card_that_was_reclaimed_twice_counts_once() -> None:
    """For the later end."""
    bob = a_job(job_id="new", user="bob", gpus=cards("g0"))
    later = an_end(id="d2", job_id="next", user="eve", gpus=("g0",))
    found = counted(an_end(), later, facts=fleet_of(bob))
    assert found == {("old", "vision"): 0.0, ("next", "none"): 10.0}


def test_an_outage_is_no_time_that_came_back() -> None:
    """As with what teams use: three ticks at most."""
    hours, bob = ReclaimedHours(30.0), a_job(job_id="new", user="bob", gpus=cards("g0"))
    for now in (0.0, 3600.0):
        hours.add(fleet_of(bob), [an_end()], teams=TEAMS, apart=(), now=now)
    assert hours.seconds() == {Taken("old", "ana", "vision", "idle"): 30.0}


def test_an_end_shows_on_the_engines_page(servers: World) -> None:
    """From the proof on; the card's next holder makes it grow."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.VERIFIED)
            world.fleet.jobs.clear()
            await world.tick()
            name = "gpuwarden_reclaimed_gpu_seconds_total"
            ((series, seconds),) = [(k, v) for k, v in world.told().items() if k.startswith(name)]
            assert 'job_id="proc-1"' in series
            assert 'team="vision"' in series
            assert seconds == 0.0
            world.fleet.jobs.append(Job("proc-next", user="bob", utilization=0.9))
            await world.tick(2)
            assert world.told()[series] == 2 * TICK

    asyncio.run(story())
