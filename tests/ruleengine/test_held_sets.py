"""A job over several nodes, one of which went dark: the rest of it is not the job."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import running
from tests.ruleengine.worlds import NODE, Job

from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.held_sets import GONE_SECONDS, HeldSets
from gpuwarden.ruleengine.histories import History, history
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.notations import SeriesName, Stale, sorted_labels
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.rule_tests import RuleTest
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ruleengine.engines import World

    from gpuwarden.ruleengine.held_sets import Row

A, B, NEW = "a:9835", "b:9835", "b.example.org:9835"
NOW = 1_800_000_000.0
HOUR = 3600.0
BOTH = {A: ("g0",), B: ("g1",)}


def rows(places: dict[str, tuple[str, ...]], job: str = "wide") -> list[Row]:
    """Rows of a job that holds these cards on these nodes."""
    return [(1.0, (node, job, uuid, "0")) for node, cards in places.items() for uuid in cards]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A new ledger."""
    with Ledger(tmp_path / "ledger.sqlite") as made:
        yield made


def missing(
    held: HeldSets, told: dict[str, tuple[str, ...]], lit: set[str], time: float = NOW
) -> list[Row]:
    """What is added to the rows of one tick."""
    return held.missing(rows(told) + rows({A: ("g9",)}, "narrow"), lit=lit, time=time)


def test_what_nobody_tells_any_more_is_known_from_the_ledger(ledger: Ledger) -> None:
    """Also after a restart, and until the node answers: then it says what is there."""
    held = HeldSets(ledger)
    assert missing(held, BOTH, {A, B}) == []
    assert missing(held, {A: ("g0",)}, {A}) == rows({B: ("g1",)})
    held = HeldSets(ledger)
    assert missing(held, {A: ("g0",)}, {A}, NOW + 50 * HOUR) == rows({B: ("g1",)})
    assert missing(held, {A: ("g0",)}, {A, B}) == []
    assert missing(held, {A: ("g0",)}, {A}) == []
    assert ledger.rows("SELECT * FROM held_sets") == []


def test_a_node_under_a_new_name_has_answered(ledger: Ledger) -> None:
    """Its cards are those that the job holds there."""
    held = HeldSets(ledger)
    missing(held, BOTH, {A, B})
    renamed = {A: ("g0",), NEW: ("g1",)}
    assert missing(held, renamed, {A, NEW}) == []
    assert missing(held, {A: ("g0",)}, {A}) == rows({NEW: ("g1",)})


def test_what_the_server_still_remembers_is_not_added(ledger: Ledger) -> None:
    """For its first hour a dark node's rows are told; a third node's are added beside them."""
    held = HeldSets(ledger)
    missing(held, BOTH | {"c:9835": ("g2",)}, {A, B, "c:9835"})
    assert missing(held, BOTH, {A}) == rows({"c:9835": ("g2",)})


def test_a_job_that_no_node_tells_of_ends_an_hour_later(ledger: Ledger) -> None:
    """Not with one scrape that missed it, and not while none of its nodes could tell."""
    held = HeldSets(ledger)
    missing(held, BOTH, {A, B})
    assert missing(held, {}, {A}) == []
    assert missing(held, {A: ("g0",)}, {A}, NOW + 15) == rows({B: ("g1",)})
    missing(held, {}, set(), NOW + 20)
    missing(held, {}, set(), NOW + 20 + 2 * GONE_SECONDS)
    # A clock that was set back proves nothing.
    missing(held, {}, {A}, NOW + 20 * HOUR)
    missing(held, {}, {A}, NOW)
    assert missing(held, {A: ("g0",)}, {A}, NOW + 30) == rows({B: ("g1",)})
    missing(held, {}, {A}, NOW + 40)
    missing(held, {}, {A}, NOW + 40 + GONE_SECONDS)
    assert ledger.rows("SELECT * FROM held_sets") == []


def test_nothing_is_written_while_nothing_changes(ledger: Ledger) -> None:
    """Each tick costs a look, and no transaction."""
    held = HeldSets(ledger)
    missing(held, BOTH, {A, B})
    (before,) = ledger.rows("SELECT total_changes()")
    for _ in range(3):
        missing(held, BOTH, {A, B})
        missing(held, {A: ("g0",)}, {A})
    assert ledger.rows("SELECT total_changes()") == [before]


SCENE = RuleTest.model_validate(
    {
        "name": "a job on two nodes",
        "interval": "15s",
        "jobs": [
            {"job": "wide", "user": "eve", "like": "idle", "node": A, "uuids": ["g0"]},
            {"job": "there", "user": "eve", "node": B, "uuids": ["g1"]},
        ],
        "expect": [{"at": "2h", "rule": "idle", "job": "wide", "stage": "none"}],
    }
)
DARK_FROM = 600.0


def dark_for_long() -> History:
    """The second node, on which the job works, falls silent for the rest of two hours."""
    found, begin = History(), SCENE.start.timestamp()
    for name, row in history(SCENE).series.items():
        labels = dict(name.labels)
        if labels.get("job_id") == "there":
            labels["job_id"] = "wide"
        gone = round((begin + DARK_FROM) * 1000)
        silent = {time: value for time, value in row.items() if time < gone} | {gone: Stale()}
        there = silent if labels.get("instance") == B else row
        found.series[SeriesName(name.metric, sorted_labels(labels))] = there
    return found


def test_of_a_node_that_is_dark_for_hours_the_job_is_remembered(ledger: Ledger) -> None:
    """Prometheus forgets it after one: the idle half that is seen would be all of the job."""
    begin = SCENE.start.timestamp()

    async def story() -> list[tuple[tuple[str, ...], str, int]]:
        found = []
        async with temporary_prometheus(dark_for_long()) as url, PrometheusClient(url) as client:
            for at in (DARK_FROM - 30, DARK_FROM + 60, DARK_FROM + 1.5 * HOUR):
                facts = await gather(
                    client,
                    RuleSet(version=1),
                    time=begin + at,
                    scrape_interval=15.0,
                    # As after a restart of the engine, each time.
                    held=HeldSets(ledger),
                )
                job = facts.jobs["wide"]
                found.append((job.instances, job.not_fresh_reason, len(job.gpus)))
        return found

    assert asyncio.run(story()) == [
        ((A, B), "", 2),
        ((A, B), "dark_node", 2),
        ((A, B), "dark_node", 2),
    ]


def test_an_engine_judges_no_half_of_a_job(servers: World) -> None:
    """Its other node was forgotten by Prometheus, and the engine was restarted in between."""
    other = "node-2:9835"
    servers.fleet.nodes[other] = True
    (near,) = servers.fleet.jobs
    servers.fleet.jobs.append(Job(near.job_id, uuid="GPU-2", utilization=0.9, instance=other))

    async def story() -> None:
        async with running(servers) as world:
            await world.tick()
            assert world.engine.view.facts is not None
            assert world.engine.view.facts.jobs["proc-1"].fresh
        del servers.fleet.nodes[other]
        servers.fleet.jobs[:] = [near]
        async with running(servers) as world:
            await world.tick(40)
            assert world.engine.view.facts is not None
            job = world.engine.view.facts.jobs["proc-1"]
            assert (job.instances, job.not_fresh_reason) == ((NODE, other), "dark_node")
            assert world.state() is None

    asyncio.run(story())
