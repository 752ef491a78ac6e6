"""Facts of one tick, gathered from a real Prometheus over back-filled history."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.fleets import (
    A100,
    END,
    GIB,
    N1,
    N2,
    NOW,
    SCRAPE,
    START,
    History,
    a_rule,
    fleet_history,
    until,
)
from tests.servers import Server, backfill, prometheus

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.evaluation import measured
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.inventories import Expectation
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.needs import needed_keys
from gpuwarden.ruleengine.prometheus import PrometheusClient, QueryRefused, Sample
from gpuwarden.ruleengine.verdicts import FleetFacts, SignalKey, Truth

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuwarden.ruleengine.prometheus import Table

UTILIZATION = {
    "signal": "gpu_utilization",
    "agg": "max",
    "window": "3 samples",
    "at_most": "5%",
    "gpus": "all",
}
POWER = {"signal": "card_power", "agg": "avg", "window": "1m", "above": "1W", "gpus": "all"}
GOOD = {"promql": "sum by (job_id) (gpu_job_memory_bytes)", "above": 1}
DOUBLE = {"promql": "gpu_job_memory_bytes", "above": 1}
BROKEN = {"promql": "gpu_job_memory_bytes / on (job_id) gpu_job_memory_bytes", "above": 1}


def _rules(*conditions: object) -> RuleSet:
    rules = tuple(
        a_rule(when).model_copy(update={"id": f"r{index}"}) for index, when in enumerate(conditions)
    )
    return RuleSet(version=1, rules=rules)


RULES = _rules(UTILIZATION, POWER, GOOD, DOUBLE, BROKEN)


def _gather(
    url: str, rules: RuleSet = RULES, expected: Expectation | int | None = None
) -> FleetFacts:
    async def once() -> FleetFacts:
        async with PrometheusClient(url) as client:
            return await gather(
                client,
                rules,
                time=NOW,
                scrape_interval=SCRAPE,
                expected_nodes=expected,
                teams={"ana": "vision"},
            )

    return asyncio.run(once())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that holds ten minutes of the fleet."""
    storage = tmp_path_factory.mktemp("fleet") / "tsdb"
    backfill(fleet_history().text(), storage)
    with prometheus("global: {}\n", storage) as running:
        yield running


@pytest.fixture(scope="module")
def fleet(server: Server) -> FleetFacts:
    """The fleet's facts."""
    return _gather(server.url)


def test_a_training_is_known_in_full(fleet: FleetFacts) -> None:
    """Everything that rules, causes and the agent need of a job is there."""
    job = fleet.jobs["train"]
    assert (job.user, job.team, job.source, job.framework) == ("ana", "vision", "process", "torch")
    assert not job.interactive
    assert job.start_time == START - 400
    assert job.first_gpu_use == START - 300
    assert job.processes == ((4711, START - 400),)
    assert job.executables == (("/usr/bin/python3.11", "/a.slice"),)
    assert job.activity == {"log": END - 3, "heartbeat": END - 1, "cpu": END - 2}
    assert [(gpu.uuid, gpu.index, gpu.tenants) for gpu in job.gpus] == [("train", "10", 1)]
    assert job.gpus[0].throttle == ("hw_thermal",)
    run = job.run
    assert run is not None
    assert (run.model, run.batch, run.imgsz, run.amp) == ("yolov8m", 64, 640, True)
    assert (run.phase, run.phase_since, run.resume_mode) == ("train", START, "exact")


def test_a_mig_instance_is_a_card_of_its_own(fleet: FleetFacts) -> None:
    """Its name and its memory are the instance's, so that profiles can be written for it."""
    (part,) = fleet.jobs["sliced"].gpus
    assert (part.uuid, part.name) == ("slice", f"{A100} MIG 3g.20gb")
    assert part.memory_total_bytes == 25 * GIB


def test_the_durable_checkpoint_counts(fleet: FleetFacts) -> None:
    """A state that may not be on disk is not what an ended job comes back with."""
    run = fleet.jobs["train"].run
    assert run is not None
    assert run.checkpoint_time == START + 400


def test_a_dark_node_keeps_its_jobs_but_nothing_of_them_is_fresh(fleet: FleetFacts) -> None:
    """What it held is remembered, so that its cards are not taken for free."""
    job = fleet.jobs["dark"]
    assert not job.fresh
    assert job.not_fresh_reason == "dark_node"
    assert [gpu.uuid for gpu in job.gpus] == ["dark"]
    assert job.user == "ana"


def test_a_node_with_a_wrong_clock_is_as_good_as_dark(fleet: FleetFacts) -> None:
    """Its timestamps cannot be compared with ours."""
    assert fleet.jobs["slow"].not_fresh_reason == "clock_skew"


class _Doubled(PrometheusClient):
    """A global view that holds one node under two values of a label that nobody asks for."""

    node = ""

    async def table(self, query: str, time: float, labels: tuple[str, ...]) -> Table:
        """The rows, and those of the node once more."""
        rows = await super().table(query, time, labels)
        node = labels.index("instance") if "instance" in labels else None
        return [*rows, *(row for row in rows if node is not None and row[1][node] == self.node)]


def test_a_node_that_is_there_twice_is_not_believed(server: Server, fleet: FleetFacts) -> None:
    """Two clusters or unfolded replicas: which is which is not known; other nodes are judged."""
    fresh = [job for job in fleet.jobs.values() if job.fresh]
    node = fleet.jobs["train"].instance

    async def once() -> FleetFacts:
        async with _Doubled(server.url) as client:
            client.node = node
            return await gather(client, _rules(UTILIZATION), time=NOW, scrape_interval=SCRAPE)

    doubled = asyncio.run(once())
    for job in fresh:
        there = doubled.jobs[job.job_id]
        assert there.fresh == (node not in job.instances)
        if not there.fresh:
            assert there.not_fresh_reason == "scraped_twice"
    assert doubled.lit_nodes == fleet.lit_nodes - 1


def test_dark_nodes_are_counted_and_named_as_a_problem(fleet: FleetFacts) -> None:
    """Two of three nodes do not speak: nothing may be ended on that."""
    assert (fleet.expected_nodes, fleet.lit_nodes) == (3, 1)
    assert fleet.problems == ("2 of 3 nodes are dark",)
    assert fleet.clock_skew_seconds < 5


def test_expected_nodes_can_be_set(server: Server) -> None:
    """A node that left service discovery is missed only by a count that somebody wrote down."""
    assert _gather(server.url, expected=20).problems == ("19 of 20 nodes are dark",)


@pytest.mark.parametrize(
    ("expected", "counts"),
    [
        # One of three known nodes is lit; a name that nobody scrapes is one more that is dark.
        (Expectation(names=frozenset({"gone:9835"})), (4, 1)),
        (Expectation(names=frozenset({N1})), (3, 1)),
        # A query says it all: what else is scraped is not missed.
        (Expectation(query=f'up{{instance="{N1}"}}'), (1, 1)),
        (Expectation(query=f'up{{instance!="{N1}"}}'), (3, 1)),
        (Expectation(query="count(up) + 17"), (20, 1)),
        (Expectation(query="vector(0) / 0"), (0, 1)),
        (Expectation(query="up == 2"), (0, 1)),
        (Expectation(names=frozenset({"gone:9835"}), query=f'up{{instance="{N1}"}}'), (2, 1)),
    ],
)
def test_expected_nodes_can_be_named(
    server: Server, expected: Expectation, counts: tuple[int, int]
) -> None:
    """A lit node that nobody expected does not stand in for one that is missing."""
    fleet = _gather(server.url, expected=expected)
    assert (fleet.expected_nodes, fleet.lit_nodes) == counts
    assert fleet.lit_names == (N1,)


def test_a_run_that_two_jobs_claim_is_believed_of_neither(fleet: FleetFacts) -> None:
    """Neither its parameters nor its figures count."""
    throughput = next(key for key in needed_keys(RULES) if key.signal == "throughput")
    for name in ("twice", "shared-b"):
        job = fleet.jobs[name]
        assert job.run is not None
        assert job.run.conflict
        assert job.run.model == ""
        assert throughput not in job.values
    assert throughput in fleet.jobs["train"].values


def test_a_shared_card_says_so_to_both_jobs(fleet: FleetFacts) -> None:
    """What is measured on the card is no job's own."""
    assert fleet.jobs["shared-a"].gpus[0].tenants == 2
    assert fleet.jobs["shared-b"].gpus[0].tenants == 2


def test_nan_is_not_a_value(fleet: FleetFacts) -> None:
    """NaN compares as false with everything, which would be taken for NO."""
    assert not fleet.jobs["nan"].values.get(_key(0))
    assert fleet.jobs["idle"].values[_key(0)] == {"idle": 0.0}


def _key(index: int) -> SignalKey:
    condition = RULES.rules[index].when
    key: SignalKey = condition.key  # type: ignore[union-attr]
    return key


def test_values_of_a_card_reach_its_jobs_and_the_card_itself(fleet: FleetFacts) -> None:
    """A free card is a subject too."""
    assert fleet.jobs["busy"].values[_key(1)] == {"busy0": 300, "busy1": 300}
    assert fleet.cards["free"].values[_key(1)] == {"free": 300}


def test_an_expression_gives_a_number_for_each_job_or_nothing(fleet: FleetFacts) -> None:
    """Two rows of one job leave open which is meant."""
    assert fleet.jobs["busy"].values[_key(2)] == {"": 40 * 2**30}
    assert _key(3) not in fleet.jobs["busy"].values
    assert fleet.jobs["idle"].values[_key(3)] == {"": 30 * 2**30}


def test_an_expression_that_fails_costs_nothing_but_its_own_rule(fleet: FleetFacts) -> None:
    """The others are judged; the reason is kept for people."""
    assert set(fleet.failed) == {_key(4)}
    assert "many-to-many" in fleet.failed[_key(4)] or "duplicate" in fleet.failed[_key(4)]


class _Limited(PrometheusClient):
    """A Mimir that allows no window of 9 min (max_total_query_length)."""

    async def table(self, query: str, time: float, labels: tuple[str, ...]) -> Table:
        if "[9m]" in query:
            raise QueryRefused("execution: the query time range exceeds the limit")
        return await super().table(query, time, labels)


def test_a_window_that_the_server_refuses_costs_its_own_rule_and_no_other(server: Server) -> None:
    """The server is healthy: one rule's window must not blind the rules of all others."""
    long = {**UTILIZATION, "window": "9m"}
    rules = _rules(UTILIZATION, long, {"no_progress_for": "9m"}, {**POWER, "window": "9m"})

    async def once() -> FleetFacts:
        async with _Limited(server.url) as client:
            return await gather(client, rules, time=NOW, scrape_interval=SCRAPE)

    fleet = asyncio.run(once())
    judged = [
        measured(rule.when, rule, fleet.jobs[job], fleet, profiles=(), now=NOW, trusted=True)
        for rule, job in zip(rules.rules, ("idle", "idle", "train", "idle"), strict=True)
    ]
    assert judged[0] == (Truth.YES, ())
    assert judged[1:] == [(Truth.UNKNOWN, ("query_failed",))] * 3
    assert {key.window_seconds for key in fleet.failed} == {540}


def test_no_prometheus_is_an_error_and_not_an_empty_fleet() -> None:
    """Nothing known must never look like nothing running."""
    with pytest.raises(ServiceUnavailable, match="Prometheus at"):
        _gather("http://127.0.0.1:9")


def test_causes_are_looked_for_in_windows_no_longer_than_the_rules() -> None:
    """A rule with short windows is not explained minutes later."""
    short = dict(UTILIZATION, window="30s")
    causes = {key.window_seconds for key in needed_keys(_rules(short)) if key.agg == "avg"}
    assert causes == {30}
    assert SignalKey("data_wait_share", "avg", 300) in needed_keys(_rules(UTILIZATION))


def test_a_job_on_two_nodes_is_one_job_and_needs_both(tmp_path: Path) -> None:
    """Its CPU time is the sum of the nodes, and unknown if one of them does not give its part."""
    history = History()
    for node, uuid in ((N1, "a"), ("n2:9835", "b")):
        history.node(node)
        history.card(uuid, instance=node)
        history.job("wide", {uuid: 0.5}, instance=node)
        history.add(
            "gpu_job_cpu_seconds_total", lambda time: time - START, instance=node, job_id="wide"
        )
        history.job("lame", {uuid: 0.5}, instance=node)
    history.add("gpu_job_cpu_seconds_total", lambda time: time - START, job_id="lame")
    backfill(history.text(), tmp_path / "tsdb")
    cores = {"signal": "job_cpu_cores", "window": "5m", "above": "1 core"}
    rules = _rules(cores)
    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        fleet = _gather(server.url, rules)
    key = rules.rules[0].when.key  # type: ignore[union-attr]
    assert fleet.jobs["wide"].values[key][""] == pytest.approx(2)
    assert fleet.jobs["wide"].instances == (N1, "n2:9835")
    assert [gpu.uuid for gpu in fleet.jobs["wide"].gpus] == ["a", "b"]
    assert key not in fleet.jobs["lame"].values


def test_a_training_on_some_of_its_jobs_cards_is_told_apart(tmp_path: Path) -> None:
    """By its own word for how many it runs on; of cards that are scraped twice each counts once."""
    history = History()
    history.node(N1)
    held = {"whole": 2, "part": 4, "ending": 2, "starting": 1, "silent": 2}
    for job, cards in held.items():
        uuids = [f"{job}-{number}" for number in range(cards)]
        for uuid in uuids:
            history.card(uuid)
        history.job(job, dict.fromkeys(uuids, 0.5))
        history.run(job, f"r-{job}", images=50)
    for job, devices in {"whole": 2, "part": 1, "starting": 2}.items():
        history.add("yolo_devices", devices, job_id=job, run_id=f"r-{job}")
    for number in range(2):
        names = {"job_id": "whole", "uuid": f"whole-{number}", "gpu": "7"}
        history.add("gpu_job_holds_gpu", 1, job="another", **names)
    # What it said until three scrapes ago it says no more.
    said = until(END - 3 * SCRAPE, 1.0)
    history.add("yolo_devices", said, job_id="ending", run_id="r-ending")
    backfill(history.text(), tmp_path / "tsdb")
    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        fleet = _gather(server.url, _rules(UTILIZATION))
    other = {job: run.other_cards for job in held if (run := fleet.jobs[job].run) is not None}
    assert {job for job, differs in other.items() if differs} == {"part", "starting"}
    assert set(other) == set(held)


class _Pressed:
    """A source in which every job it is asked of stalls for a quarter of its time, on each node."""

    def __init__(self, **nodes: tuple[str, ...]) -> None:
        self._nodes = nodes

    async def instant(self, query: str, _: float) -> list[Sample]:
        asked = query.startswith(("rate(gpu_job_pressure", "timestamp(gpu_job_holds_gpu)"))
        return [
            Sample({"instance": node, "job_id": job, "gpu": "0", "uuid": f"{job}-{node}"}, 0.25)
            for job, nodes in (self._nodes.items() if asked else ())
            for node in nodes
        ]

    async def clock_skew(self) -> float:
        return 0.0


def test_shares_of_time_on_several_nodes_do_not_add_up() -> None:
    """Two nodes that stall for a quarter do not stall for half; whose share counts is not known."""
    rules = _rules({"signal": "job_io_pressure", "window": "5m", "above": "1%"})
    key = SignalKey("job_io_pressure", "avg", 300)
    source = _Pressed(near=(N1,), far=(N1, N2))
    fleet = asyncio.run(gather(source, rules, time=NOW, scrape_interval=SCRAPE, expected_nodes=2))
    assert fleet.jobs["near"].values[key] == {"": 0.25}
    assert key not in fleet.jobs["far"].values


def test_what_vanished_while_prometheus_was_down_is_not_taken_for_current(tmp_path: Path) -> None:
    """Without a staleness marker it is served for five minutes: a job that ended is not idle."""
    gone = END - 30
    history = History()
    history.node(N1)
    history.card("a")
    history.job("live", {"a": 0.5})
    history.run("live", "r1", images=50, phase="train")
    for metric, labels in (
        ("gpu_job_info", {"user": "bob", "source": "process", "framework": "torch"}),
        ("gpu_job_holds_gpu", {"gpu": "0", "uuid": "a"}),
        ("gpu_job_start_time_seconds", {}),
        ("gpu_job_activity_timestamp_seconds", {"signal": "cpu"}),
        ("yolo_info", {"run_id": "r1", "model": "yolov8m", "batch": "64", "imgsz": "640"}),
    ):
        history.add(metric, until(gone, START), job_id="ended", **labels)
    own = {"job_id": "live", "run_id": "r1"}
    history.add("yolo_info", until(gone, 1), **own, model="other", batch="1", imgsz="1")
    history.add("yolo_phase", until(gone, 1), **own, phase="a phase of an older trainer")
    for name, curve in (("/usr/bin/old", until(gone, 1)), ("/usr/bin/new", 1.0)):
        history.add("gpu_job_executable", curve, job_id="live", executable=name, cgroup="/x")
    backfill(history.text(), tmp_path / "tsdb")
    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        fleet = _gather(server.url)
        assert server.query('gpu_job_holds_gpu{job_id="ended"}', at=NOW)
    assert set(fleet.jobs) == {"live"}
    job = fleet.jobs["live"]
    assert job.gpus[0].tenants == 1
    assert job.executables == (("/usr/bin/new", "/x"),)
    assert job.run is not None
    assert (job.run.conflict, job.run.model, job.run.phase) == (False, "yolov8m", "train")


class _Recorded:
    """A source that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    async def instant(self, query: str, time: float) -> list[Sample]:
        self.asked.append((query, time))
        return []

    async def clock_skew(self) -> float:
        return 0.0


def test_one_query_for_each_signal_and_one_time_for_all() -> None:
    """Rules that differ only in their limits share a query; the fleet's size costs no more."""
    source = _Recorded()
    rules = _rules(UTILIZATION, dict(UTILIZATION, at_most="10%"), dict(UTILIZATION, gpus="any"))
    fleet = asyncio.run(gather(source, rules, time=NOW, scrape_interval=SCRAPE, expected_nodes=0))
    asked = [query for query, _ in source.asked]
    assert len(asked) == len(set(asked))
    assert sum("max_over_time(gpu_job_utilization_ratio[17s500ms])" in text for text in asked) == 1
    assert {time for _, time in source.asked} == {NOW}
    assert fleet.problems
