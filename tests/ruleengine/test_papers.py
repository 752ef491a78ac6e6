"""What is written down for the audit alone: first samples, last looks, what held ends back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.ruleengine.engines import running
from tests.ruleengine.worlds import Job

from gpuwarden.ruleengine import papers
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.dossiers import read

if TYPE_CHECKING:
    from tests.ruleengine.engines import World

LONG_AGO = 1_799_990_000.0


SELECTS = {
    "openings": "SELECT * FROM openings",
    "rule_texts": "SELECT * FROM rule_texts",
    "holds": "SELECT * FROM holds",
}


def rows(world: World, table: str) -> list[tuple[Any, ...]]:
    """Every row of a table."""
    return world.engine.ledger.rows(SELECTS[table])


def test_the_first_sample_is_kept_with_the_rule_as_it_read(servers: World) -> None:
    """Values, and the PromQL behind them; nothing of it changes when the rule does."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.WATCHING)
            begun = world.clock.wall()
            world.rules(mode="warn")
            await world.tick(3)
            ((case_id, name, text),) = rows(world, "openings")
            assert case_id == world.engine.ledger.open_cases()[0].id
            opening = json.loads(text)
            assert opening["time"] == begun
            assert {item["truth"] for item in opening["evidence"]} == {"YES"}
            kept = {row[0]: json.loads(row[2]) for row in rows(world, "rule_texts")}
            assert kept[name]["mode"] == "enforce"
            assert any("max_over_time" in query["promql"] for query in kept[name]["queries"])

    asyncio.run(story())


def test_a_suspicion_that_comes_to_nothing_leaves_nothing(servers: World) -> None:
    """Its first sample goes with its case."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.WATCHING)
            world.fleet.jobs[0].utilization = 0.9
            await world.until(None)
            assert rows(world, "openings") == []

    asyncio.run(story())


def test_so_many_openings_at_once_are_not_all_put_into_words(servers: World) -> None:
    """A fault of the data opens thousands of cases in a tick, which must not make it late."""
    jobs = papers.MAX_OPENINGS + 5

    async def story() -> None:
        servers.fleet.jobs += [
            Job(f"proc-{n}", uuid=f"GPU-{n}", activity={"cpu": LONG_AGO})
            for n in range(2, jobs + 1)
        ]
        async with running(servers) as world:
            await world.until(CaseState.WATCHING)
            assert len(world.engine.cases) == jobs
            assert len(rows(world, "openings")) == papers.MAX_OPENINGS

    asyncio.run(story())


def test_what_holds_an_end_back_is_one_span_over_ticks_and_restarts(servers: World) -> None:
    """The kill switch, from the tick that found it to the one that did not."""

    async def story() -> None:
        switch = servers.folder / "halt"
        switch.touch()
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            begun = world.clock.wall()
            await world.tick(4)
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            await world.tick(2)
            switch.unlink()
            await world.until(CaseState.VERIFIED)
            spans = {row[2]: row for row in rows(world, "holds")}
            assert [row[2] for row in rows(world, "holds")].count("kill_switch") == 1
            _, _, _, sentence, first, last = spans["kill_switch"]
            assert sentence == "the kill switch is on"
            assert (first, last is not None and last > begun + 60) == (begun, True)
            # After the restart fresh data had to be seen for a while, too.
            assert "settling" in spans
            assert all(row[5] is not None for row in spans.values())

    asyncio.run(story())


def test_an_outage_holds_a_due_end_back_and_says_so(servers: World) -> None:
    """No facts is a reason like any other."""

    async def story() -> None:
        (servers.folder / "halt").touch()
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            world.fleet.down = True
            await world.tick(2)
            assert {row[2] for row in rows(world, "holds") if row[5] is None} == {"no_facts"}

    asyncio.run(story())


def test_the_last_look_is_on_disk_before_its_decision(servers: World) -> None:
    """With the facts' age, every limit and how much of it was used, and the promises."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.VERIFIED)
            (found,) = world.engine.ledger.job_decisions("proc-1")
            dossier = read(world.engine.ledger, found.id)
            assert dossier is not None
            assert dossier.look is not None
            assert dossier.look.time <= found.created_at
            look = dossier.look.document
            assert look["truth"] == "YES"
            assert 0 <= look["facts"]["age"] <= look["facts"]["allowed_age"]
            assert {item["limit"]: (item["used"], item["allowed"]) for item in look["limits"]} == {
                "per_tick": (0, 1),
                "per_hour": (0, 3),
                "per_user_per_day": (0, 2),
            }
            assert look["case"]["notice_age"] >= look["case"]["notice_delivered_for"] == 300
            assert look["job"]["work_lost"] > 0
            assert dossier.look.rule is not None

    asyncio.run(story())


def test_refusals_of_a_notice_stay_after_it_is_proven(servers: World) -> None:
    """Why the deadline began so late is a part of why the job was ended when it was."""

    async def story() -> None:
        servers.slack_reply["body"] = {"ok": False, "error": "channel_not_found"}
        async with running(servers) as world:
            await world.until(CaseState.DETECTED)
            await world.tick(12)
            servers.slack_reply["body"] = None
            await world.until(CaseState.VERIFIED)
            (found,) = world.engine.ledger.job_decisions("proc-1")
            dossier = read(world.engine.ledger, found.id)
            assert dossier is not None
            (telling,) = dossier.tellings
            assert telling.state == "proven"
            assert telling.required_at is not None
            assert telling.required_at <= telling.refusals[0][0] < telling.time
            assert "channel_not_found" in telling.refusals[0][1]
            assert telling.attempts > len(telling.refusals) > 0

    asyncio.run(story())
