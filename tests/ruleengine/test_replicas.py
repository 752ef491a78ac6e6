"""Several servers in the place of one: replicas take turns, shards are put together."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.worlds import Fleet

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.histories import History
from gpuwarden.ruleengine.prometheus import PrometheusClient, QueryRefused, Sample
from gpuwarden.ruleengine.replicas import Replica, Servers, Shards
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus
from gpuwarden.ruleengine.verdicts import FleetFacts, SignalKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuwarden.ruleengine.prometheus import Source

NOW = 1_800_000_000.0
PAST = 1_700_000_000.0
"""Prometheus takes no samples of the future."""


@dataclass
class Held:
    """A server that holds rows for any query, sees so many nodes, and may fail."""

    lit: float = 3.0
    rows: list[Sample] = field(default_factory=list)
    skew: float = 0.0
    fails_after: int | None = None
    refuses: bool = False
    asked: int = 0
    seen: dict[str, float] = field(default_factory=dict)
    """Node -> its last snapshot."""
    times: set[float] = field(default_factory=set)

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Rows, or the number of nodes."""
        self.times.add(time)
        if self.fails_after is not None and self.asked >= self.fails_after:
            raise ServiceUnavailable("gone")
        if query.startswith("count(timestamp("):
            return [Sample({}, self.lit)]
        if query.startswith("last_over_time(gpuwarden_snapshot"):
            return [Sample({"instance": name}, at) for name, at in self.seen.items()]
        if self.refuses:
            raise QueryRefused("execution: receive series from store-2: unavailable")
        self.asked += 1
        return self.rows

    async def clock_skew(self) -> float:
        """How far its clock is from ours."""
        return self.skew


def servers(*groups: dict[str, Held]) -> Servers:
    """Servers of shards, each with its replicas by name."""
    return Servers(
        [[Replica(name, held) for name, held in group.items()] for group in groups],
        wall=lambda: NOW,
        scrape_interval=5.0,
        probe=0.05,
    )


async def three(source: Source) -> FleetFacts:
    """A question of three queries."""
    for number in range(3):
        await source.instant(f"vector({number})", NOW)
    return FleetFacts(time=NOW, jobs={}, expected_nodes=1, lit_nodes=1)


def asked(made: Servers, *, again: bool = False) -> None:
    """Ask the question once."""
    asyncio.run(made.ask(three, again=again))


def test_one_server_is_asked_and_nothing_else() -> None:
    """No probe: what a plain engine.yaml names costs no query more."""
    held = Held()
    asked(servers({"a": held}))
    assert held.asked == 3


def test_the_replica_that_sees_more_nodes_answers_the_whole_question() -> None:
    """Of equals the one in use, at first the one that is named first."""
    a, b = Held(lit=3), Held(lit=3)
    made = servers({"a": a, "b": b})
    asked(made)
    assert (a.asked, b.asked) == (3, 0)
    b.lit = 4
    asked(made)
    b.lit = 3
    asked(made)
    assert (a.asked, b.asked) == (3, 6)
    assert made.states() == {"a": "spare", "b": "used"}


def test_a_replica_that_fails_in_between_has_answered_nothing() -> None:
    """Everything is asked anew of the next: no answer is made of two servers' data."""
    a, b = Held(lit=9, fails_after=1), Held(lit=3)
    made = servers({"a": a, "b": b})
    asked(made)
    assert (a.asked, b.asked) == (1, 3)
    assert made.states() == {"a": "failed", "b": "used"}


def test_a_replica_that_refuses_our_queries_is_passed_over() -> None:
    """Thanos says so, and not that it is unavailable, when one of its stores is away."""
    a, b = Held(refuses=True), Held()
    made = servers({"a": a, "b": b})
    asked(made)
    assert (a.asked, b.asked) == (0, 3)
    b.refuses = True
    with pytest.raises(QueryRefused):
        asked(made)


async def partly(source: Source) -> FleetFacts:
    """A question of a value that may be refused, and of another."""
    failed = {}
    for key in (SignalKey("gpu_utilization", "max", 60.0), SignalKey("gpu_memory", "avg", 9e5)):
        try:
            await source.instant(f"{key.signal}", NOW)
        except QueryRefused as error:
            failed[key] = str(error)
    return FleetFacts(time=NOW, jobs={}, expected_nodes=1, lit_nodes=1, failed=failed)


def test_what_one_replica_refuses_is_asked_of_the_next_before_it_is_unknown() -> None:
    """Where every one refuses it, or the rest is away, all else that was answered counts."""
    a, b = Held(refuses=True), Held()
    made = servers({"a": a, "b": b})
    assert not asyncio.run(made.ask(partly)).failed
    assert made.states() == {"a": "failed", "b": "used"}
    b.refuses = True
    assert asyncio.run(made.ask(partly)).failed
    b.fails_after = 0
    a.lit = 9
    assert asyncio.run(made.ask(partly)).failed
    assert made.states()["a"] == "used"


def test_without_any_replica_nothing_is_answered() -> None:
    """The tick is discarded, as with one server that is away."""
    made = servers({"a": Held(fails_after=0), "b": Held(fails_after=0)})
    with pytest.raises(ServiceUnavailable, match="gone"):
        asked(made)
    assert set(made.states().values()) == {"failed"}


def test_the_last_look_is_at_the_same_replica() -> None:
    """A second opinion on the same facts comes from where they came from, or not at all."""
    a, b = Held(), Held()
    made = servers({"a": a, "b": b})
    asked(made)
    b.lit = 9
    asked(made, again=True)
    assert (a.asked, b.asked) == (6, 0)
    a.fails_after = 0
    with pytest.raises(ServiceUnavailable):
        asked(made, again=True)
    assert b.asked == 0


def test_a_replica_that_hangs_is_asked_last() -> None:
    """Its probe is cut off; the other answers the tick."""

    @dataclass
    class Hanging(Held):
        async def instant(self, query: str, time: float) -> list[Sample]:
            await asyncio.Event().wait()
            return await super().instant(query, time)

    hanging, other = Hanging(lit=9), Held(lit=3)
    made = servers({"a": hanging, "b": other})
    asked(made)
    assert (hanging.asked, other.asked) == (0, 3)


def of_shards(*rows: list[Sample], seen: Sequence[dict[str, float]] = ()) -> list[Sample]:
    """The rows of a query to shards with these answers, that saw their nodes so long ago."""
    held = [Held(rows=list(part)) for part in rows]
    for one, ages in zip(held, seen, strict=False):
        one.seen = {name: NOW - age for name, age in ages.items()}
    parts = [Replica(str(number), one) for number, one in enumerate(held)]
    return asyncio.run(Shards(parts, scrape_interval=5.0).instant("q", NOW))


def test_rows_of_shards_are_put_together() -> None:
    """Each shard knows its own nodes."""
    one, two = Sample({"instance": "n1"}, 1.0), Sample({"instance": "n2"}, 2.0)
    assert of_shards([one], [two], []) == [one, two]


def test_an_aggregate_of_two_shards_is_not_known() -> None:
    """A job on nodes of both would be seen by half: its row is left out, others are not."""
    half = [Sample({"job_id": "both"}, 1.0), Sample({"job_id": "one"}, 2.0)]
    assert of_shards(half, [Sample({"job_id": "both"}, 1.0)]) == [half[1]]


def test_a_node_in_two_shards_is_a_mistake() -> None:
    """Cards of it would be counted twice, or half of a job left out: nothing is judged."""
    row = Sample({"instance": "n1", "uuid": "GPU-1"}, 1.0)
    with pytest.raises(ServiceUnavailable, match="n1 is scraped by two of the shards 0, 1"):
        of_shards([row], [row])


def test_a_node_that_has_moved_is_that_of_the_shard_which_saw_it_last() -> None:
    """Also while it is dark; a job that has ended since is not brought back by the other's word."""
    row = Sample({"instance": "n1", "uuid": "GPU-1"}, 1.0)
    ghost = Sample({"instance": "n1", "uuid": "GPU-1", "job_id": "ended"}, 1.0)
    other = Sample({"instance": "n2", "uuid": "GPU-2"}, 1.0)
    seen = [{"n1": 60.0, "n2": 2.0}, {"n1": 2.0}]
    assert of_shards([row, ghost, other], [row], seen=seen) == [other, row]
    assert of_shards([row, other], [row, ghost], seen=[{"n1": 900.0}, {"n1": 1800.0}]) == [
        row,
        other,
    ]


def test_a_node_that_two_shards_have_seen_just_now_is_a_mistake() -> None:
    """Or has moved this moment: neither is believed until it is clear."""
    row = Sample({"instance": "n1", "uuid": "GPU-1"}, 1.0)
    with pytest.raises(ServiceUnavailable, match="n1 is scraped by two of the shards 0, 1"):
        of_shards([row], [], seen=[{"n1": 12.0}, {"n1": 2.0}])


def test_of_two_real_servers_a_node_that_has_moved_is_known_by_one() -> None:
    """The former one remembers what it held for an hour, and nothing waits for that."""

    def history(age: float, job: str) -> History:
        made, at = History(), round(PAST - age)
        labels = {"instance": "n1:9835", "job": "gpuwarden"}
        made.add("gpuwarden_snapshot_timestamp_seconds", at, at - 1.0, labels)
        made.add("gpu_job_holds_gpu", at, 1.0, {**labels, "job_id": job, "uuid": "GPU-1"})
        return made

    async def story() -> list[str]:
        async with (
            temporary_prometheus(history(300.0, "ended")) as old,
            temporary_prometheus(history(2.0, "lives")) as new,
            PrometheusClient(old) as one,
            PrometheusClient(new) as two,
        ):
            made = Servers(
                [[Replica("old", one)], [Replica("new", two)]],
                wall=lambda: PAST,
                scrape_interval=5.0,
            )
            rows = await made.current().instant("last_over_time(gpu_job_holds_gpu[1h])", PAST)
            return [row.labels["job_id"] for row in rows]

    assert asyncio.run(story()) == ["lives"]


def test_a_shard_that_is_away_hides_nodes_and_so_everything_waits() -> None:
    """Unless a replica of that shard answers: then everything is asked anew."""
    a, b, c = Held(), Held(fails_after=0), Held()
    with pytest.raises(ServiceUnavailable):
        asked(servers({"a": a}, {"b": b}))
    made = servers({"a": a}, {"b": b, "c": c})
    a.asked = 0
    asked(made)
    assert (a.asked, c.asked) == (3, 3)
    assert made.states() == {"a": "used", "b": "failed", "c": "used"}


def test_the_clock_that_is_furthest_off_counts() -> None:
    """With a shard's clock wrong nothing is ended."""
    parts = [Replica("a", Held(skew=0.1)), Replica("b", Held(skew=-7.0))]
    assert asyncio.run(Shards(parts, scrape_interval=5.0).clock_skew()) == -7.0


def _down(fleet: Fleet) -> None:
    fleet.down = True


def _dark(fleet: Fleet) -> None:
    fleet.nodes = dict.fromkeys(fleet.nodes, False)


class Probed(Fleet):
    """A fleet that also answers which nodes it sees."""

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Rows of one query."""
        if query.startswith("count(timestamp(") and not self.down:
            return [Sample({}, float(sum(self.nodes.values())))]
        return await super().instant(query, time)


@pytest.mark.parametrize("fault", [_down, _dark])
def test_an_engine_goes_on_over_a_replica_that_fails(
    servers: World, fault: Callable[[Fleet], None]
) -> None:
    """A deadline runs on over the failure of the first: no outage, and the job is ended in time."""

    async def story() -> None:
        job = servers.fleet.jobs[0]
        first, second = Probed(servers.clock, jobs=[job]), Probed(servers.clock, jobs=[job])
        async with running(servers) as world:
            first.rules = second.rules = world.engine.rulebook.rules
            world.engine.servers = Servers(
                [[Replica("first", first), Replica("second", second)]],
                wall=world.clock.wall,
                scrape_interval=5.0,
            )
            await world.until(CaseState.NOTIFIED)
            assert second.queries == 0
            fault(first)
            while not world.agent.ended:
                await world.tick()
            await world.settled()
            assert "discarded" not in world.engine.ticks.outcomes
            assert world.engine.servers.states()["second"] == "used"

    asyncio.run(story())


def test_the_probe_asks_for_the_engines_time() -> None:
    """All queries of a tick are of one clock."""
    a, b = Held(), Held()
    asked(servers({"a": a, "b": b}))
    assert a.times | b.times == {NOW}


def test_of_two_real_servers_the_one_with_fresh_nodes_answers_until_it_is_stopped() -> None:
    """The probe is PromQL, and Prometheus' own word counts; then the other one takes over."""

    def history(*ages: float) -> History:
        made = History()
        for number, age in enumerate(ages):
            labels = {"instance": f"n{number}:9835", "job": "gpuwarden"}
            at = round(PAST - age)
            made.add("gpuwarden_snapshot_timestamp_seconds", at, at - 1.0, labels)
        return made

    async def story() -> list[dict[str, str]]:
        server = contextlib.AsyncExitStack()
        async with (
            temporary_prometheus(history(2.0, 200.0)) as old,
            server,
            PrometheusClient(old) as one,
            PrometheusClient(
                await server.enter_async_context(temporary_prometheus(history(2.0, 4.0)))
            ) as two,
        ):
            made = Servers(
                [[Replica("old", one), Replica("fresh", two)]],
                wall=lambda: PAST,
                scrape_interval=5.0,
            )
            await made.ask(three)
            before = made.states()
            await server.aclose()
            await made.ask(three)
            return [before, made.states()]

    assert asyncio.run(story()) == [
        {"old": "spare", "fresh": "used"},
        {"old": "used", "fresh": "failed"},
    ]
