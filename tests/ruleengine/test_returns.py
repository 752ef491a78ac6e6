"""Jobs that come back after they were ended: told, and left alone for longer each time."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ruleengine.engines import World, running
from tests.ruleengine.reclaim.scenes import HURRY, IDLE, RUN
from tests.ruleengine.worlds import Job

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.reclaim.ports import Claim
from gpuwarden.ruleengine.returns import DAY_SECONDS, wait_after, works_of
from gpuwarden.ruleengine.verdicts import JobFacts, RunFacts

NOW = 1_800_000_000.0
COMEBACK = 600.0


def job(job_id: str = "proc-1", run: RunFacts | None = None) -> JobFacts:
    """A job's facts."""
    return JobFacts(job_id, "n1:9835", run=run)


def test_the_first_return_waits_an_hour_the_second_two_and_then_a_day() -> None:
    """Doubled from one end to the next, until it is left alone."""
    waits = []
    for times in (1, 2, 3, 4):
        ends = [NOW - 100.0 * n for n in reversed(range(times))]
        until = wait_after(ends, started=NOW, now=NOW, comeback=COMEBACK)
        assert until is not None
        waits.append(until - NOW)
    assert waits == [3600.0, 7200.0, DAY_SECONDS, DAY_SECONDS]


def test_who_begins_again_by_hand_later_is_judged_like_anybody() -> None:
    """An attempt that began longer after the end did not come back by itself."""
    late = NOW - 100.0
    assert wait_after([late - 601], started=late, now=NOW, comeback=COMEBACK) is None
    assert wait_after([late - 599], started=late, now=NOW, comeback=COMEBACK) is not None
    assert wait_after([], started=late, now=NOW, comeback=COMEBACK) is None


def test_an_attempt_whose_start_is_not_known_may_have_come_back() -> None:
    """Whoever is unsure ends nobody."""
    assert wait_after([NOW - 700], started=None, now=NOW, comeback=COMEBACK) is not None


@given(
    ends=st.lists(st.floats(NOW - DAY_SECONDS, NOW), min_size=1, max_size=6).map(sorted),
    started=st.floats(NOW - DAY_SECONDS, NOW),
    comeback=st.floats(1.0, 3600.0),
)
def test_no_end_follows_an_end_within_six_lengths_of_a_return(
    ends: list[float], started: float, comeback: float
) -> None:
    """Whatever the history: what came back by itself waits at least that long, and at most ends."""
    until = wait_after(ends, started=started, now=NOW, comeback=comeback)
    came_back = started - ends[-1] <= comeback
    if came_back and ends[-1] + 6 * comeback > NOW and len(ends) < 3:
        assert until is not None
        assert until >= ends[-1] + 6 * comeback
    if until is not None:
        assert NOW < until <= ends[-1] + max(DAY_SECONDS, 12 * comeback)


def test_work_is_known_by_run_by_platform_job_and_by_controller() -> None:
    """Attempts have names of their own; what they do has another."""
    run = RunFacts("run-1")
    claim = Claim("kubernetes", {"target_uid": "u1", "target_kind": "Job", "target_name": "train"})
    assert set(works_of(job(run=run), None)) == {"run run-1"}
    assert works_of(job("slurm-c1-4711_3-0"), None) == {"slurm c1-4711_3": "Slurm's job c1-4711_3"}
    assert works_of(job("slurm-c1-4711_3-1"), None) == works_of(job("slurm-c1-4711_3-0"), None)
    assert works_of(job("pod-u2"), claim) == {"controller u1": "a pod of Job train"}
    assert works_of(job(), None) == {}
    assert works_of(job(run=dataclasses.replace(run, conflict=True)), None) == {}


@pytest.mark.parametrize("same_owner", [True, False])
def test_a_job_that_comes_back_is_told_and_not_ended_in_a_loop(
    servers: World, same_owner: bool
) -> None:
    """Owner and operators hear of it once it would be ended again; an hour later it may be."""
    servers.fleet.jobs = [Job("proc-1", activity=dict(IDLE), run=dict(RUN))]

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.ended:
                await world.tick(seconds=HURRY)
            await world.settled()
            ended_at = world.clock.wall()
            user = "alice" if same_owner else "bob"
            world.fleet.jobs = [
                Job("proc-2", user, activity=dict(IDLE), run=dict(RUN), started=ended_at + 30)
            ]
            while world.clock.wall() < ended_at + 3500 and len(world.agent.ended) == 1:
                await world.tick(seconds=HURRY)
            if not same_owner:
                assert world.agent.ended == ["proc-1", "proc-2"]
                return
            assert world.state("proc-2") is CaseState.DUE
            assert world.why("proc-2") == {"came_back"}
            assert world.kinds("proc-2").count("came_back") == 1
            labels = [alert["labels"] for alert in world.alerts.received[-1].json()]
            told = [item for item in labels if item["alertname"] == "GpuwardenJobCameBack"]
            assert {item["level"] for item in told} == {"moderate", "page"}
            assert {item["user"] for item in told} == {"alice"}
            (block,) = world.engine.view.blocks["idle-held", "proc-2"]
            assert block.sentence.startswith("run run-1 was ended once within a day")
            assert world.told()['gpuwarden_jobs_came_back_total{rule="idle-held"}'] == 1
            while len(world.agent.ended) == 1 and world.clock.wall() < ended_at + 3700:
                await world.tick(seconds=HURRY)
            assert world.agent.ended == ["proc-1", "proc-2"]

    asyncio.run(story())


def test_what_its_parent_starts_again_is_told_by_the_word_of_its_node(servers: World) -> None:
    """Only the agent knows who starts a bare process; it refuses, and that is no secret."""
    servers.agent.refuse = (403, "cooldown")

    async def story() -> None:
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick(seconds=HURRY)
            await world.tick()
            assert world.state() is CaseState.REFUSED
            labels = [alert["labels"] for alert in world.alerts.received[-1].json()]
            told = {item["level"] for item in labels if item["alertname"] == "GpuwardenJobCameBack"}
            assert told == {"moderate", "page"}
            await world.tick(25, seconds=HURRY)
            assert len(world.agent.requests) >= 2
            assert world.agent.ended == []

    asyncio.run(story())
