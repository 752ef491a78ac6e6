"""What `why` and a job's page say is what the engine then does, whatever happens around it.

Random lives as in `test_lives`, read at any moment between two ticks: nobody is told of a later end
than there is, nor that nothing holds an end back that does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import io
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tests.ruleengine import test_lives
from tests.ruleengine.engines import World, running
from tests.ruleengine.lives import SOFTER, Lives
from tests.ruleengine.worlds import Job

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.explain import answer, job_document
from gpuwarden.ruleengine.roles import Role

STANDING = {
    *("kill_switch", "paused", "bad_files", "protected", "mode"),
    *("no_facts", "dark_nodes", "clock_skew", "not_confirmed"),
}
"""What holds an end back until somebody or something changes; all else may pass with time."""
SOON = "one of the next ticks ends it"


class Readers(Lives):
    """Lives whose jobs' pages are read at a moment before each tick, and held to what it does.

    Args:
        folder, jobs, softer: as of `Lives`.
        after: seconds after the tick before, at which they are read.
    """

    def __init__(self, folder: Path, jobs: int, softer: str, after: float) -> None:
        super().__init__(folder, jobs, softer)
        self.after = after
        self.wrong: list[str] = []
        self.read = 0
        self.announced = 0

    async def tick(self, count: int = 1) -> None:
        """Tick, and compare with what was read before; the first may see what others did."""
        for number in range(count):
            told = self._documents() if number else {}
            before = len(self.seen.ends)
            await super().tick()
            ended = {job for _, job, _ in self.seen.ends[before:]}
            there = {job.job_id for job in self.fleet.jobs}
            self.read += len(told)
            for job_id, document in told.items():
                if job_id in ended or job_id in there:
                    self._compare(job_id, document, ended=job_id in ended)

    def _documents(self) -> dict[str, dict[str, Any]]:
        self.clock.pass_(self.after)
        found = {job.job_id: job_document(self.engine, job.job_id) for job in self.fleet.jobs}
        self.clock.pass_(-self.after)
        return {job_id: document for job_id, document in found.items() if document is not None}

    def _compare(self, job_id: str, document: dict[str, Any], *, ended: bool) -> None:
        said = answer(document)
        if not ended:
            if SOON in said:
                self.wrong.append(f"{job_id}: not ended: {said}")
            return
        self.announced += 1
        now = self.clock.wall() + 0.01
        ends = [
            item
            for rule in document["rules"]
            for item in rule["next"]
            if item["kind"] == "terminate" and item["at"] is not None
        ]
        held = [rule["why_not"] for rule in document["rules"] if rule["case"]]
        earliest = [rule["case"]["not_before"] for rule in document["rules"] if rule["case"]]
        faults = {
            "its end was not foretold": not ends,
            "its end was foretold for later": all(_time(item["at"]) > now for item in ends),
            "its earliest end was later": all(at is None or _time(at) > now for at in earliest),
            "it was held back": all(STANDING & {b["reason"] for b in why} for why in held),
        }
        self.wrong += [f"{job_id}: {text}: {said}" for text, wrong in faults.items() if wrong]


def _time(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


async def _keep(lives: Lives, number: int) -> None:
    for stored in lives.engine.cases.all()[: 1 + number % 3]:
        rule = lives.engine.rulebook.rule(stored.case.rule_id)
        if rule is not None and stored.case.detected_at is not None and not stored.case.over:
            lives.engine.keep(
                stored, rule, role="operator", by="olga", reason="demo", seconds=60.0 * (1 + number)
            )


async def _pause(lives: Lives, _number: int) -> None:
    pauses = lives.engine.pauses
    if pauses.current() is None:
        pauses.begin(by="root", role=Role.ADMIN.value, reason="an upgrade", seconds=None)
    else:
        pauses.end(by="root", role=Role.ADMIN.value, reason="done")


_STEPS = st.tuples(st.sampled_from((*test_lives._ACTS, _keep, _keep, _pause)), st.integers(0, 40))


def _story(
    steps: list[test_lives.Step], after: float, softer: str = ""
) -> tuple[list[str], int, int]:
    """What was told wrongly, how many pages were read, and how many of them before an end."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        lives = Readers(Path(name), 6, softer, after)

        async def story() -> None:
            try:
                await lives.tick(12)
                for act, number in steps:
                    await act(lives, number)
                await test_lives._well(lives)
                if lives.engine.pauses.current() is not None:
                    await _pause(lives, 0)
                await lives.tick(test_lives.LONG)
            finally:
                await lives.close()

        asyncio.run(story())
        return lives.wrong, lives.read, lives.announced


_SOME = settings(
    deadline=None, max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


@_SOME
@example(
    steps=[(test_lives._restart, 0), (test_lives._prometheus, 0), (test_lives._tick, 20)], after=0.0
)
@example(steps=[], after=14.9)
@given(steps=st.lists(_STEPS, max_size=10), after=st.sampled_from((0.0, 4.0, 11.0, 14.9)))
def test_what_is_told_of_a_job_is_what_becomes_of_it(
    steps: list[test_lives.Step], after: float
) -> None:
    """Whenever it is read: no end that was told for later, or as held back, or not at all."""
    faults, read, announced = _story(steps, after)
    assert faults == []
    assert read > 50
    assert announced > 0


@_SOME
@given(steps=st.lists(_STEPS, max_size=10), after=st.sampled_from((0.0, 14.9)))
def test_it_is_so_as_well_where_jobs_are_asked_before_they_are_ended(
    steps: list[test_lives.Step], after: float
) -> None:
    """To save, and to leave."""
    faults, read, _ = _story(steps, after, SOFTER)
    assert faults == []
    assert read > 50


def test_between_two_ticks_nothing_new_holds_an_end_back(servers: World) -> None:
    """A tick asks afresh before it acts: that the last one was a while ago is no reason."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            reasons = _reasons(world)
            world.clock.pass_(14.0)
            assert _reasons(world) == reasons
            world.clock.pass_(60.0)
            assert _reasons(world) == reasons | {"stale_facts"}

    asyncio.run(story())


def _reasons(world: World) -> set[str]:
    document = job_document(world.engine, "proc-1")
    assert document is not None
    return {block["reason"] for rule in document["rules"] for block in rule["why_not"]}


def test_who_asks_while_nothing_is_known_is_told_so(servers: World) -> None:
    """Neither that a job breaks no rule, nor that its end is near, nor that it is gone."""

    async def story() -> None:
        async with running(servers) as world:
            job = Job("proc-2", user="bob", uuid="GPU-2", activity={"cpu": 1_799_990_000.0})
            world.fleet.jobs.append(job)
            await world.until(CaseState.NOTIFIED)
            job.utilization = 0.8
            await world.tick(3)
            assert _said(world, "proc-2") == "This job breaks no rule."
            world.fleet.down = True
            await world.tick()
            down = "; too little is known now: Prometheus is down."
            assert _said(world, "proc-2").endswith(f" this job broke no rule{down}")
            world.fleet.down = False
            world.fleet.jobs.remove(job)
            await world.tick()
            assert _said(world, "proc-2").startswith("This job is not seen any more")
            world.fleet.down = True
            await world.tick()
            assert " this job was not seen any more; gpuw" in _said(world, "proc-2")
        async with running(servers) as world:
            unknown = "Nothing is known of this job now, and so it is left alone: "
            none = "no tick has been completed since the engine began."
            assert _said(world, "proc-2") == unknown + none
            await world.tick()
            assert _said(world, "proc-2") == f"{unknown}{down.removeprefix('; ')}"

    asyncio.run(story())


def _said(world: World, job_id: str) -> str:
    document = job_document(world.engine, job_id)
    assert document is not None
    return answer(document)
