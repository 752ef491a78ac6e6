"""What is asked only of jobs in question: the same verdicts, for fewer questions."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from bench.engine.fleets import SCRAPE_SECONDS, write_fleet
from bench.engine.servers import prometheus
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.fleets import a_rule
from tests.ruleengine.random_frames import BEGIN, JOBS, RandomFrame
from tests.ruleengine.replaying import default_rules
from tests.ruleengine.test_replay_screens import ODD

from gpuwarden.ruleengine import evaluation
from gpuwarden.ruleengine.card_expressions import by_card, of_cards
from gpuwarden.ruleengine.causes import diagnose
from gpuwarden.ruleengine.facts import gather, named_parts, queries_of, value_queries
from gpuwarden.ruleengine.inventories import (
    Expectation,
    current_queries,
    phase_queries,
    silent_query,
    throttle_query,
    training_query,
)
from gpuwarden.ruleengine.job_expressions import of_jobs, separable
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.profiles import Expectations
from gpuwarden.ruleengine.prometheus import PrometheusClient, QueryRefused, Sample
from gpuwarden.ruleengine.replay_columns import Columns
from gpuwarden.ruleengine.rounds import BROAD_SECONDS, MAX_LOOKED_AT, Rounds, first_keys
from gpuwarden.ruleengine.sweeps import Sweeper
from gpuwarden.ruleengine.verdicts import FleetFacts, SignalKey, Truth, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.prometheus import Table
    from gpuwarden.ruleengine.replay_frames import Frame

_NAMED = re.compile(r',?(job_id|uuid|instance)=~("(?:[^"\\]|\\.)*")')
BUSY = {"signal": "gpu_utilization", "agg": "max", "window": "5m", "above": "50%", "gpus": "all"}
HELD = {"signal": "gpu_memory_share", "agg": "min", "window": "5m", "above": "5%", "gpus": "any"}
CORES = {"signal": "job_cpu_cores", "window": "5m", "above": "2 cores"}
SILENT = {"silent_for": "10m", "signals": ["cpu"]}


class FrameSource:
    """One moment of a random stretch of history, as a Prometheus would answer it.

    Args:
        frame: the stretch.
        rules: whose queries are answered.
        tick: which moment.
    """

    def __init__(self, frame: Frame, rules: RuleSet, tick: int) -> None:
        self._tick = tick
        self.time = frame.ticks.begin + frame.ticks.step * tick
        self.asked: list[str] = []
        self.rows = frame.rows
        self._known: dict[str, Columns] = {}
        for query, keys in value_queries(rules, 5.0).items():
            found = frame.answers[keys[0]]
            if keys[0].signal == "card_throttled":
                # What slows a card down now did so for a part of the window.
                values = np.where(found.values == 0, 0.01, found.values)
                found = Columns(found.labels, values, found.failures)
            self._known[query] = found
            promql = keys[0].promql
            # As it is written where jobs, or cards, are named in it.
            if promql and separable(promql):
                plain = _NAMED.sub("", of_jobs(promql, ["somebody"]))
                self._known[plain] = frame.answers[keys[0]]
            elif promql and by_card(promql):
                self._known[promql] = frame.answers[keys[0]]
                plain = _NAMED.sub("", of_cards(promql, [[("node", "card")]]))
                self._known[plain] = frame.answers[keys[0]]
        for name, query in current_queries(5.0, Expectation()).items():
            self._known[query] = frame.rows[name]
        phases = self._known[phase_queries(5.0)["yolo_phase"]] = _one_phase(
            frame.rows["yolo_phase"]
        )
        trains = [labels["phase"] == "train" for labels in phases.labels]
        self._known[training_query(5.0)] = Columns(
            [labels for labels, each in zip(phases.labels, trains, strict=True) if each],
            phases.values[np.array(trains, dtype=bool)],
        )
        self._held: dict[str, set[str]] = {}
        for labels, _ in self._told("gpu_job_holds_gpu"):
            self._held.setdefault(labels["job_id"], set()).add(labels["uuid"])

    async def clock_skew(self) -> float:
        """None."""
        return 0.0

    async def instant(self, query: str, _: float) -> list[Sample]:
        """Rows of a query; those of the named jobs alone where it names some."""
        self.asked.append(query)
        if query == silent_query(5.0):
            return []
        plain = _NAMED.sub("", query)
        columns = self._known.get(plain) or self._known[plain.replace("{}", "")]
        failure = columns.failure(self._tick)
        if failure is not None:
            raise QueryRefused(failure)
        named = {label: _names(names) for label, names in _NAMED.findall(query)}
        jobs = named.get("job_id")
        found = [
            Sample(dict(labels), float(row[self._tick]))
            for labels, row in zip(columns.labels, columns.values, strict=True)
            if not math.isnan(row[self._tick]) and (jobs is None or labels["job_id"] in jobs)
        ]
        if query.startswith("gpu_throttle_active"):
            lit = self._lit()
            return [row for row in found if (row.labels["instance"], row.labels["uuid"]) in lit]
        cards = named.get("uuid")
        if cards is None:
            return found
        # Of a job that holds others as well, a part was asked.
        return [
            row
            if self._held.get(row.labels["job_id"], set()) <= cards
            else Sample(row.labels, -9.0)
            for row in found
        ]

    def _told(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        """Rows of the inventory at this tick."""
        columns = self.rows[name]
        rows = zip(columns.labels, columns.values[:, self._tick], strict=True)
        return [(labels, value) for labels, value in rows if not math.isnan(value)]

    def _lit(self) -> set[tuple[str, str]]:
        """Cards of which a node that is scraped tells now, as the query asks for it."""
        speak = {
            labels["instance"] for labels, _ in self._told("gpuwarden_snapshot_timestamp_seconds")
        }
        fresh = {
            row["instance"] for row, at in self._told("scraped") if at >= self.time - 10
        } & speak
        return {
            (row["instance"], row["uuid"])
            for row, _ in self._told("gpu_info")
            if row["instance"] in fresh
        }


def _one_phase(phases: Columns) -> Columns:
    """A run is in one phase: of two pods that tell of it the node is `scraped_twice`, and dark."""
    values = np.array(phases.values)
    runs = [tuple(labels[name] for name in ("job_id", "run_id")) for labels in phases.labels]
    for earlier, run in enumerate(runs):
        for later in range(earlier + 1, len(runs)):
            if runs[later] == run:
                values[earlier] = np.where(np.isnan(values[later]), values[earlier], np.nan)
    return Columns(phases.labels, values, phases.failures)


def _rules(*conditions: object, for_: float = 60.0) -> RuleSet:
    rules = tuple(
        a_rule(when).model_copy(update={"id": f"r{n}", "for_": for_})
        for n, when in enumerate(conditions)
    )
    return RuleSet(version=1, rules=rules)


def _rounds(rules: RuleSet, cases: Mapping[str, set[str]], *, share: float = 1.0) -> Rounds:
    return Rounds(
        expectations=lambda: Expectations(rules.profiles),
        cases=lambda: cases,
        min_jobs=1,
        max_share=share,
    )


def _gathered(source: FrameSource, rules: RuleSet, rounds: Rounds | None) -> FleetFacts:
    return asyncio.run(gather(source, rules, time=source.time, scrape_interval=5.0, rounds=rounds))


def _found(facts: FleetFacts, rules: RuleSet, cases: Mapping[str, set[str]]) -> list[object]:
    """Everything that a tick makes of facts: verdicts, and the words for those that count."""
    sweeper = Sweeper(
        facts,
        rules.rules,
        expectations=Expectations(rules.profiles),
        whitelist=rules.whitelist,
        now=facts.time,
    )
    said: list[object] = []
    for rule in rules.rules:
        known = cases.get(rule.id, set())
        for job, truth, *rest in sweeper.findings(rule, watched=known):
            said.append((rule.id, job.job_id, truth, *rest))
            if truth is Truth.YES or job.job_id in known:
                verdict = _verdict(rule, job.job_id, facts, rules)
                said.append(verdict)
                # A cause is told of a case that is detected: where `for` is 0, in its first tick.
                if job.job_id in known or not rule.for_:
                    said.append(diagnose(job, verdict, rules.profiles, team=rule.team))
    return said


def _verdict(rule: Rule, job_id: str, facts: FleetFacts, rules: RuleSet) -> Verdict:
    subjects = evaluation.subjects(rule, facts)
    return evaluation.evaluate(
        rule,
        subjects[job_id],
        facts,
        profiles=rules.profiles,
        whitelist=rules.whitelist,
        now=facts.time,
    )


def _compare(rules: RuleSet, seed: int, share: float) -> None:
    """What a tick finds, narrowed and not, at some moments of a random stretch."""
    dice = np.random.default_rng(seed)
    frame = RandomFrame(seed, rules, ticks=8).frame()
    cases = {
        rule.id: {str(job) for job in dice.choice(JOBS, dice.integers(2))} for rule in rules.rules
    }
    for tick in (2, 5):
        source = FrameSource(frame, rules, tick)
        whole = _gathered(source, rules, None)
        narrowed = _gathered(source, rules, _rounds(rules, cases, share=share))
        there = {rule: {job for job in jobs if job in whole.jobs} for rule, jobs in cases.items()}
        assert _found(narrowed, rules, there) == _found(whole, rules, there), (seed, tick)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_a_tick_finds_what_it_would_find_if_everything_were_asked_of_everybody(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float
) -> None:
    """Verdicts, reasons, evidence and causes: with whatever gaps, conflicts and failing queries."""
    path = tmp_path_factory.mktemp("rules") / "odd.yaml"
    path.write_text(ODD)
    _compare(load_rule_files([path]), seed, share)


@pytest.mark.parametrize("seed", range(4))
def test_so_it_does_by_the_shipped_rules(seed: int) -> None:
    """All of them, with half of the jobs in question at most."""
    _compare(default_rules(), seed, 0.5)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_so_it_does_in_many_fleets(seed: int, share: float) -> None:
    """Likewise, for longer."""
    _compare(default_rules(), seed, share)


def test_what_follows_is_asked_only_of_jobs_that_the_first_condition_leaves() -> None:
    """By their names; of all others the verdict is NO whatever the rest would say."""
    rules = _rules({"all": [BUSY, HELD, CORES, SILENT]})
    frame = RandomFrame(7, rules).frame()
    source = FrameSource(frame, rules, 3)
    facts = _gathered(source, rules, _rounds(rules, {}))
    (rule,) = rules.rules
    assert {key.signal for key in first_keys(rule)} == {"gpu_utilization"}
    asked = {key.signal: jobs for key, jobs in facts.narrowed.items()}
    assert set(asked) >= {"gpu_memory_share", "job_cpu_cores", "activity"}
    whole = _gathered(source, rules, None)
    left = {name for name, job in whole.jobs.items() if job.fresh} - asked["gpu_memory_share"]
    assert left
    assert {_verdict(rule, job, whole, rules).truth for job in left} == {Truth.NO}


def test_what_a_job_declares_is_told_before_anything_is_measured() -> None:
    """Few declare a batch that needs more than their card has."""
    (rule,) = _rules({"all": [{"needs_memory": "90%"}, BUSY]}).rules
    assert first_keys(rule) == set()


def test_of_a_value_that_was_not_asked_the_evidence_says_so() -> None:
    """A person who reads why a job is left alone is not told that its samples are missing."""
    rules = _rules({"all": [BUSY, CORES, SILENT]})
    frame = RandomFrame(7, rules).frame()
    facts = _gathered(FrameSource(frame, rules, 3), rules, _rounds(rules, {}))
    whole = _gathered(FrameSource(frame, rules, 3), rules, None)
    (rule,) = rules.rules
    told = {job: _verdict(rule, job, facts, rules) for job in facts.jobs}
    spared = {job for job, verdict in told.items() if verdict.truth is Truth.NO}
    assert spared
    for job in spared:
        reasons = [item.reason for item in told[job].evidence]
        assert reasons == ["", "not_asked", "not_asked"]
        assert "not_asked" not in {e.reason for e in _verdict(rule, job, whole, rules).evidence}


def test_a_job_that_somebody_looks_at_is_asked_everything() -> None:
    """For ten minutes; of many jobs those that were looked at last."""
    rules = _rules({"all": [BUSY, CORES]})
    frame = RandomFrame(7, rules).frame()
    rounds = _rounds(rules, {})
    spared = next(
        job
        for job in JOBS
        if job not in _asked(_gathered(FrameSource(frame, rules, 3), rules, rounds))
    )
    rounds.look_at(spared, BEGIN)
    assert spared in _asked(_gathered(FrameSource(frame, rules, 3), rules, rounds))
    for number in range(MAX_LOOKED_AT):
        rounds.look_at(f"other-{number}", BEGIN)
    assert spared not in _asked(_gathered(FrameSource(frame, rules, 3), rules, rounds))


def _asked(facts: FleetFacts) -> frozenset[str]:
    (jobs,) = [set(jobs) for key, jobs in facts.narrowed.items() if key.signal == "job_cpu_cores"]
    return frozenset(jobs)


def test_what_too_many_jobs_are_in_question_for_is_asked_of_everybody_for_a_while() -> None:
    """A hundred names cost more than a whole fleet; after ten minutes it is tried again."""
    rules = _rules({"all": [BUSY, CORES]})
    frame = RandomFrame(7, rules).frame()
    rounds = _rounds(rules, {}, share=0.0)
    facts = _gathered(FrameSource(frame, rules, 3), rules, rounds)
    cores = SignalKey("job_cpu_cores", "avg", 300.0)
    assert cores not in facts.narrowed
    assert cores in rounds.questions(rules, jobs=5, now=facts.time + BROAD_SECONDS - 1).early
    assert cores in rounds.questions(rules, jobs=5, now=facts.time + BROAD_SECONDS).late


def test_in_a_small_fleet_everything_is_asked_of_everybody() -> None:
    """It costs little, and pages show every figure."""
    rules = _rules({"all": [BUSY, CORES]})
    rounds = Rounds(expectations=lambda: Expectations(rules.profiles), cases=dict)
    questions = rounds.questions(rules, jobs=499, now=BEGIN)
    assert questions.keys == questions.early
    assert rounds.questions(rules, jobs=500, now=BEGIN).late


def test_an_expression_is_asked_of_everybody_or_of_nobody() -> None:
    """Only its author knows whether it means the same of fewer jobs."""
    custom = {"promql": "sum by (job_id) (custom)", "above": 3}
    rules = _rules({"all": [BUSY, custom]})
    frame = RandomFrame(7, rules).frame()
    source = FrameSource(frame, rules, 3)
    _gathered(source, rules, _rounds(rules, {}, share=0.5))
    assert [query for query in source.asked if "custom" in query] == ["sum by (job_id) (custom)"]


def test_names_are_told_in_parts_that_every_server_reads() -> None:
    """No query exceeds the 16 KiB of VictoriaMetrics, however long the names are."""
    jobs = frozenset(f"slurm-{'c' * 90}-{n}_{n}-0" for n in range(500))
    parts = named_parts(jobs)
    assert named_parts(frozenset()) == []
    assert sorted(jobs) == [job for part in parts for job in part]
    keys = [SignalKey("throughput", "avg", 600.0), SignalKey("progress", "avg", 900.0)]
    for part in parts:
        for query in queries_of(keys, 5.0, part):
            assert len(query.encode()) < 16_384


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with 160 cards, a job on each: healthy, idle, starved, slow, dark."""
    with prometheus(tmp_path_factory.mktemp("rounds")) as running:
        write_fleet(running.url, 160, progress=lambda _: None)
        yield running.url


def test_a_real_prometheus_answers_the_same_of_named_jobs(url: str) -> None:
    """The shipped rules over a real fleet, narrowed and not, at one moment."""
    rules, cases = default_rules(), dict[str, set[str]]()

    async def both() -> tuple[FleetFacts, FleetFacts]:
        async with PrometheusClient(url) as client:
            now, interval = time.time(), float(SCRAPE_SECONDS)
            rounds = _rounds(rules, cases, share=0.5)
            return (
                await gather(client, rules, time=now, scrape_interval=interval),
                await gather(client, rules, time=now, scrape_interval=interval, rounds=rounds),
            )

    whole, narrowed = asyncio.run(both())
    assert len(narrowed.jobs) == 160
    assert len(narrowed.narrowed) >= 6
    assert _found(narrowed, rules, cases) == _found(whole, rules, cases)
    strikes = [found for found in _found(whole, rules, cases) if isinstance(found, tuple)]
    assert any(found[2] is Truth.YES for found in strikes)


@pytest.mark.parametrize(
    "expression",
    [
        "max by (job_id) (increase(yolo_steps_total[15m]))",
        "stddev_over_time(gpu_job_utilization_ratio[15m])",
        "time() - gpu_job_start_time_seconds * 1",
        "sum without (uuid, gpu) (gpu_job_memory_bytes) / 2^30",
        "topk by (job_id) (1, gpu_job_activity_timestamp_seconds) - 3",
        'yolo_phase{phase=~"train|val.*"} and on (instance, job_id) (gpu_job_memory_bytes > 1)',
        "max by (job_id) (gpu_job_memory_bytes unless on (job_id) (yolo_images_total offset 5m))",
        "avg by (job_id) (max_over_time(rate(gpu_job_cpu_seconds_total[2m])[10m:1m]))",
        "gpu_job_utilization_ratio * on (instance, job_id) group_left (user) gpu_job_info",
        "gpu_job_memory_bytes or ignoring (run_id) yolo_images_total",
        "quantile by (job_id) (0.5, yolo_loss)",
    ],
)
def test_an_expression_of_each_job_for_itself_gives_the_same_of_named_jobs(
    url: str, expression: str
) -> None:
    """By a real Prometheus: rows are left out, and none is changed."""
    assert separable(expression)

    async def both() -> tuple[list[Sample], list[Sample]]:
        async with PrometheusClient(url) as client:
            now = time.time()
            whole = await client.instant(expression, now)
            chosen = {row.labels["job_id"] for row in whole[::3]}
            named = await client.instant(of_jobs(expression, chosen), now)
            return [row for row in whole if row.labels["job_id"] in chosen], named

    whole, named = asyncio.run(both())
    assert whole
    assert sorted(map(repr, named)) == sorted(map(repr, whole))


@pytest.mark.parametrize(
    "expression",
    [
        "sum by (user) (gpu_job_memory_bytes)",
        "max by (job_id) (gpu_job_memory_bytes / on (instance, uuid) gpu_memory_total_bytes)",
        "gpu_job_memory_bytes / on (instance) group_left () count by (instance) (gpu_job_info)",
        "gpu_job_memory_bytes - scalar(avg(gpu_job_memory_bytes))",
        "topk(3, gpu_job_memory_bytes)",
        "topk without (job_id) (3, gpu_job_memory_bytes)",
        "gpu_job_memory_bytes and ignoring (job_id) yolo_images_total",
        'label_replace(gpu_job_memory_bytes, "job_id", "x", "", "")',
        "absent(gpu_job_memory_bytes)",
        "max by (job_id) (custom_metric)",
        '{__name__="gpu_job_memory_bytes"}',
        'gpu_job_info{user="a{b"}',
        'count_values by (job_id) ("n", gpu_job_memory_bytes)',
        "vector(1)",
        "1",
        " + ".join(["gpu_job_memory_bytes"] * 6),
        "this is none",
    ],
)
def test_an_expression_that_mixes_jobs_is_never_asked_of_some(expression: str) -> None:
    """Nor one that the parser cannot write down again, or that would grow too long."""
    assert not separable(expression)
    with pytest.raises(ValueError, match="cannot be asked of some jobs alone"):
        of_jobs(expression, {"j"})


def test_a_job_with_too_many_cards_to_be_named_is_asked_with_all_others() -> None:
    """Of VictoriaMetrics, a query of 20 KiB would leave every job unknown."""
    rules = default_rules()
    keys = {key for rule in rules.rules for key in condition_keys(rule.when)}
    (expression,) = [
        key.promql for key in keys if "clamp_max" in key.promql and "[30m]" in key.promql
    ]
    frame = RandomFrame(7, rules).frame()
    held = frame.rows["gpu_job_holds_gpu"]
    (first, *_), shape = held.labels, (400, held.values.shape[1])
    many = [first | {"job_id": "huge", "uuid": f"GPU-{number:040}"} for number in range(shape[0])]
    frame.rows["gpu_job_holds_gpu"] = Columns(
        [*held.labels, *many], np.vstack([held.values, np.full(shape, frame.ticks.begin)])
    )
    source = FrameSource(frame, rules, 3)
    narrowed = _gathered(source, rules, _rounds(rules, {}, share=1.0))
    assert "huge" in narrowed.jobs
    assert expression in source.asked
    assert max(len(query.encode()) for query in source.asked) < 16_384


@pytest.mark.parametrize("seed", range(12))
def test_of_runs_that_train_no_other_phase_is_asked(seed: int) -> None:
    """Of seven series each the other six are asked of runs that do not train, or of all."""
    rules = _rules(BUSY)
    frame = RandomFrame(seed, rules).frame()
    source = FrameSource(frame, rules, 3)
    facts = _gathered(source, rules, _rounds(rules, {}))
    whole = _gathered(FrameSource(frame, rules, 3), rules, None)
    phases = {job_id: job.run.phase for job_id, job in facts.jobs.items() if job.run}
    assert phases == {job_id: job.run.phase for job_id, job in whole.jobs.items() if job.run}
    asked = [query for query in source.asked if query.startswith("yolo_phase")]
    named = {
        name for query in asked for _, names in _NAMED.findall(query) for name in _names(names)
    }
    broad = phase_queries(5.0)["yolo_phase"] in asked
    others = {job for job, phase in phases.items() if phase not in (None, "", "train")}
    assert broad or others <= named
    assert not {job for job, phase in phases.items() if phase == "train"} & named


def test_what_slows_cards_down_is_asked_of_those_that_something_slows_down(url: str) -> None:
    """Nothing does here, so nothing is asked, but by an engine without a rule that looks for it."""
    every = default_rules()
    blind = every.model_copy(
        update={"rules": tuple(rule for rule in every.rules if rule.id != "throttled-card")}
    )

    async def asked(rules: RuleSet) -> list[str]:
        found: list[str] = []

        class Listening(PrometheusClient):
            async def table(self, query: str, time: float, labels: tuple[str, ...]) -> Table:
                found.append(query)
                return await super().table(query, time, labels)

        async with Listening(url) as client:
            interval = float(SCRAPE_SECONDS)
            rounds = _rounds(rules, {})
            await gather(client, rules, time=time.time(), scrape_interval=interval, rounds=rounds)
        return [query for query in found if query.startswith("gpu_throttle_active")]

    assert asyncio.run(asked(every)) == []
    assert asyncio.run(asked(blind)) == [throttle_query(float(SCRAPE_SECONDS))]


def _names(text: str) -> set[str]:
    return set(json.loads(text).replace("\\", "").split("|"))
