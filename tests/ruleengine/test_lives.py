"""Whatever happens to an engine and the world around it, its promises and limits hold.

Random lives: ticks, restarts, outages, clock steps, reloads, accidents of every port, in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.ruleengine.lives import SOFTER, WHITELIST, Lives, rule_text
from tests.ruleengine.worlds import Job

from gpuwarden.ruleengine import dossiers
from gpuwarden.ruleengine.api_audit_models import ReclaimAudit
from gpuwarden.ruleengine.audit_checks import checks, failed
from gpuwarden.ruleengine.audits import audit
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 45
"""Ticks from a job's first sight to its end, and some."""

Step = tuple[Callable[[Lives, int], Awaitable[None]], int]

RELOADS = (
    rule_text(),
    rule_text(after="6m"),
    rule_text(after="20m"),
    rule_text(mode="warn"),
    rule_text(mode="observe"),
    rule_text(whitelist=WHITELIST),
    rule_text().replace("per_hour: 3", "per_hour: 1"),
    rule_text().replace("do: notify", "do: notfy"),
)


async def _tick(lives: Lives, number: int) -> None:
    await lives.tick(1 + number)


async def _long(lives: Lives, _number: int) -> None:
    await lives.tick(LONG)


async def _restart(lives: Lives, number: int) -> None:
    await lives.restart(pause=number * 40.0)


async def _hour(lives: Lives, number: int) -> None:
    await lives.restart(pause=3600.0 + number)


async def _clock(lives: Lives, number: int) -> None:
    lives.step_clock((-7200.0, 7200.0, 4.0, -90000.0)[number % 4])


async def _clock_set_right(lives: Lives, _number: int) -> None:
    lives.step_clock(-lives.offset)


async def _prometheus(lives: Lives, _number: int) -> None:
    lives.fleet.down = not lives.fleet.down


async def _dark(lives: Lives, _number: int) -> None:
    lives.fleet.nodes = {node: not up for node, up in lives.fleet.nodes.items()}


async def _halt(lives: Lives, _number: int) -> None:
    path = lives.folder / "halt"
    if path.exists():
        path.unlink()
    else:
        path.touch()


async def _rules(lives: Lives, number: int) -> None:
    # Where rules are softer, they also lose those stages, and get them back.
    texts = (*RELOADS, *(_softened(text) for text in RELOADS)) if lives.softer else RELOADS
    (lives.folder / "rules.yaml").write_text(texts[number % len(texts)])


def _softened(text: str) -> str:
    return text.replace("  - {level: severe, after", f"{SOFTER}  - {{level: severe, after")


async def _agents(lives: Lives, number: int) -> None:
    lives.agents = ("well", "silent", "refusing", "deaf")[number % 4]


async def _alertmanager(lives: Lives, _number: int) -> None:
    lives.alertmanager_down = not lives.alertmanager_down


async def _slack(lives: Lives, _number: int) -> None:
    lives.slack_down = not lives.slack_down


async def _replace(lives: Lives, number: int) -> None:
    if lives.fleet.jobs:
        lives.replace(number)


async def _hand_over(lives: Lives, number: int) -> None:
    if lives.fleet.jobs:
        lives.hand_over(number)


async def _back_up(lives: Lives, _number: int) -> None:
    lives.back_up()


async def _restore(lives: Lives, _number: int) -> None:
    await lives.restore()


async def _work(lives: Lives, number: int) -> None:
    if lives.fleet.jobs:
        job = lives.fleet.jobs[number % len(lives.fleet.jobs)]
        job.utilization = (0.9, 0.0, None)[number % 3]


async def _well(lives: Lives) -> None:
    """Everything is mended."""
    lives.agents, lives.alertmanager_down, lives.slack_down = "well", False, False
    lives.fleet.down = False
    lives.fleet.nodes = dict.fromkeys(lives.fleet.nodes, True)
    lives.step_clock(-lives.offset)
    (lives.folder / "halt").unlink(missing_ok=True)
    (lives.folder / "rules.yaml").write_text(rule_text(softer=lives.softer))


@contextlib.contextmanager
def _lives(jobs: int, softer: str = "") -> Iterator[Lives]:
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        yield Lives(Path(name), jobs, softer)


def _checked(story: Callable[[Lives], object], softer: str = "") -> None:
    with _lives(jobs=6, softer=softer) as lives:

        async def whole() -> None:
            try:
                await story(lives)  # type: ignore[misc]
                broken = _broken(lives)
                decisions = {
                    job: lives.ledger.job_decisions(job)
                    for job in {job for _, job, _ in lives.seen.ends}
                }
            finally:
                await lives.close()
            for job, found in decisions.items():
                ends = [d for d in found if d.action == "terminate"]
                standing = [d for d in ends if d.state not in ("refused", "lapsed")]
                assert len(standing) <= 1, job
            assert broken == []

        asyncio.run(whole())
        assert lives.seen.faults == []


def _broken(lives: Lives) -> list[str]:
    """What the audits of this life's decisions show of broken invariants."""
    found = []
    for (decision_id,) in lives.ledger.rows("SELECT id FROM decisions ORDER BY id"):
        dossier = dossiers.read(lives.ledger, decision_id)
        assert dossier is not None
        document = json.loads(json.dumps(audit(dossier, now=lives.clock.wall())))
        ReclaimAudit.model_validate(document)
        wrong = failed(checks(document))
        found += [f"{decision_id}: {check.name}: {check.why}" for check in wrong]
    return found


_ACTS = (
    *(
        _tick,
        _tick,
        _tick,
        _long,
        _long,
        _restart,
        _hour,
        _clock,
        _clock_set_right,
        _clock_set_right,
    ),
    *(_prometheus, _dark, _halt, _rules, _rules, _agents, _alertmanager, _slack, _replace, _work),
    *(_hand_over, _hand_over, _back_up, _restore),
)
_STEPS = st.tuples(st.sampled_from(_ACTS), st.integers(0, 40))


async def _any(lives: Lives, steps: list[Step]) -> None:
    await lives.tick(12)
    for step in steps:
        act, number = step
        await act(lives, number)
    await _well(lives)
    await lives.tick(LONG)


def _story_of(order: list[int], stranger: bool) -> list[tuple[float, str, str]]:
    """Who was ended when, with the jobs in an order, and maybe with a busy one of a third user."""
    with _lives(jobs=6) as lives:

        async def story() -> None:
            lives.fleet.jobs = [lives.fleet.jobs[place] for place in order]
            if stranger:
                busy = Job("proc-busy", user="eve", uuid="GPU-busy", utilization=0.8)
                lives.fleet.jobs.insert(len(order) // 2, busy)
            try:
                await lives.tick(LONG)
            finally:
                await lives.close()

        asyncio.run(story())
        assert lives.seen.faults == []
        return lives.seen.ends


@settings(deadline=None, max_examples=3)
@given(order=st.permutations(range(6)), stranger=st.booleans())
def test_neither_order_nor_strangers_change_who_is_ended_and_when(
    order: list[int], stranger: bool
) -> None:
    """The same jobs end at the same ticks, however they are listed and whoever else is there."""
    assert _story_of(order, stranger) == _story_of(list(range(6)), stranger=False)


@settings(deadline=None, max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(steps=st.lists(_STEPS, min_size=1, max_size=10))
def test_promises_and_limits_hold_through_every_life(steps: list[Step]) -> None:
    """No end that the world as it is does not allow, whatever came before."""
    _checked(lambda lives: _any(lives, steps))


@settings(deadline=None, max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(steps=st.lists(_STEPS, min_size=1, max_size=10))
def test_they_hold_as_well_where_jobs_are_asked_before_they_are_ended(steps: list[Step]) -> None:
    """To save, and to leave: every third job does; the others are ended in their time."""
    _checked(lambda lives: _any(lives, steps), SOFTER)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@settings(deadline=None, max_examples=150, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(steps=st.lists(_STEPS, min_size=1, max_size=30))
def test_they_hold_as_well_through_every_long_life_with_softer_stages(steps: list[Step]) -> None:
    """The same, longer and more often."""
    _checked(lambda lives: _any(lives, steps), SOFTER)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@settings(deadline=None, max_examples=200, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(steps=st.lists(_STEPS, min_size=1, max_size=40))
def test_promises_and_limits_hold_through_every_long_life(steps: list[Step]) -> None:
    """The same, longer and more often."""
    _checked(lambda lives: _any(lives, steps))


def test_who_has_left_before_the_request_was_taken_back_counts_as_whoever_leaves() -> None:
    """The rule turns to observe at the moment at which the job leaves."""
    steps: list[Step] = [
        (_tick, 16),
        (_rules, 28),
        (_replace, 34),
        (_tick, 33),
        (_rules, 21),
        (_halt, 22),
        (_dark, 16),
        (_agents, 36),
    ]
    _checked(lambda lives: _any(lives, steps), SOFTER)


def test_who_gets_a_job_is_told_of_its_end_and_so_is_everybody_after_a_restore() -> None:
    """Each job is another user's once one is due, and later the ledger is one of before."""

    async def story(lives: Lives) -> None:
        while not any(s.case.state is CaseState.DUE for s in lives.engine.cases.all()):
            await lives.tick()
        for number in range(len(lives.fleet.jobs)):
            lives.hand_over(number)
        ended = len(lives.seen.ends)
        await lives.tick(10)
        assert len(lives.seen.ends) == ended
        lives.back_up()
        await lives.tick(LONG)
        assert len(lives.seen.ends) > ended
        ended = len(lives.seen.ends)
        await lives.restore()
        await lives.tick(LONG)
        assert len(lives.seen.ends) > ended

    _checked(story)


def test_in_a_world_that_is_well_jobs_are_ended_within_the_limits() -> None:
    """What the tests above allow does happen: three in an hour, two of each owner in a day."""

    async def story(lives: Lives) -> None:
        await lives.tick(LONG)
        assert [user for _, _, user in lives.seen.ends] == ["alice", "bob", "alice"]
        for _ in range(3):
            await lives.restart(pause=7 * 3600.0)
            await lives.tick(4)
        assert [user for _, _, user in lives.seen.ends] == ["alice", "bob", "alice", "bob"]
        left = {job.job_id for job in lives.fleet.jobs}
        assert {s.case.state for s in lives.engine.cases.all() if s.case.job_id in left} == {
            CaseState.DUE
        }
        await lives.restart(pause=3 * 3600.0)
        # Of those that have run for over a day too much work would be lost.
        lives.replace(0)
        lives.replace(1)
        await lives.tick(LONG)
        assert len(lives.seen.ends) == 6

    _checked(story)


def test_in_a_world_that_is_well_jobs_are_asked_before_they_are_ended() -> None:
    """What the tests above allow does happen: some leave, some are ended, all were asked before."""

    async def story(lives: Lives) -> None:
        await lives.tick(LONG)
        for _ in range(3):
            await lives.restart(pause=7 * 3600.0)
            await lives.tick(LONG // 2)
        assert lives.seen.left
        assert lives.seen.ends
        for _, job, _ in lives.seen.ends:
            assert [do for _, name, do in lives.seen.asked if name == job] == [
                "checkpoint",
                "yield",
            ]
        gone = [job for _, job, _ in [*lives.seen.left, *lives.seen.ends]]
        assert len(gone) == len(set(gone))

    _checked(story, SOFTER)
