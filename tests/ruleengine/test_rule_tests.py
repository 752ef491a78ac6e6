"""Inline tests say what the live engine would, on a real Prometheus."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.ruleengine.rehearsing import RULES, RightClock, checked, engine_over, failures, run
from tests.ruleengine.worlds import OwnedClock

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.histories import history
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.prometheus import PrometheusClient, Sample
from gpuwarden.ruleengine.range_sources import RangeSource
from gpuwarden.ruleengine.rehearsals import Moment, compare, rehearse, tick_times
from gpuwarden.ruleengine.rule_tests import Expectation, RuleTest
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.ruleengine.temporary_servers import prometheus_binary, temporary_prometheus

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.model import RuleSet

LIVES = """
tests:
- name: the lives of jobs
  jobs:
  - {job: proc-idle, like: idle, user: ana}
  - {job: proc-busy, user: ben, run: {}}
  - {job: proc-late, user: cyd, begins: 10m, like: idle, log: true, then: [{at: 21m, log: false}]}
  - {job: slurm-1, user: dan, like: idle, node: "n2:9835", then: [{at: 45m, gone: true}]}
  - {job: proc-root, user: root, like: idle}
  - {job: proc-jax, user: eve, like: idle, framework: jax}
  - {job: proc-old, user: flo, like: idle, age: 20h}
  - {job: proc-saved, user: gus, like: idle, age: 20h, run: {saves_every: 10m}}
  - {job: proc-says, user: hal, like: idle, phase: validate, run: {}}
  - {job: proc-two, user: ira, gpus: 2, cards: [{}, {utilization: 0%, temperature: 85C}],
     cpu: 0 cores, log: false}
  expect:
  - {at: 2m, rule: idle, job: proc-idle, verdict: unknown, reason: cold_start, stage: none}
  - {at: 9m, rule: idle, job: proc-idle, verdict: yes, stage: none}
  - {at: 13m, rule: idle, job: proc-idle, verdict: yes, stage: light-log}
  - {at: 18m, rule: idle, job: proc-idle, stage: moderate-notify, terminate: false}
  - {at: 32m, rule: idle, job: proc-idle, stage: moderate-notify, terminate: false}
  - {at: 40m, rule: idle, job: proc-idle, stage: severe-terminate, terminate: true}
  - {at: 40m, rule: idle, job: proc-busy, verdict: no, stage: none, terminate: false}
  - {at: 9m, rule: idle, job: proc-late, verdict: none}
  - {at: 20m, rule: idle, job: proc-late, verdict: no}
  - {at: 26m, rule: idle, job: proc-late, verdict: yes}
  - {at: 40m, rule: idle, job: slurm-1, stage: severe-terminate, terminate: true}
  - {at: 46m, rule: idle, job: slurm-1, verdict: none}
  - {at: 40m, rule: idle, job: proc-root, verdict: no, reason: whitelist}
  - {at: 40m, rule: idle, job: proc-jax, verdict: none}
  - {at: 45m, rule: idle, job: proc-old, verdict: yes, terminate: false, held_by: work_lost}
  - {at: 45m, rule: idle, job: proc-saved, verdict: yes, terminate: true}
  - {at: 9m, rule: idle, job: proc-says, verdict: unknown, reason: phase}
  - {at: 25m, rule: idle, job: proc-says, verdict: yes, stage: light-log}
  - {at: 40m, rule: idle, job: proc-two, verdict: no}
  - {at: 10m, rule: hot, gpu: GPU-proc-two-1, verdict: yes, stage: light-log}
  - {at: 10m, rule: hot, gpu: GPU-proc-two-0, verdict: no}
"""


def test_jobs_live_and_end_as_rules_and_guards_say(tmp_path: Path) -> None:
    """Cold start, silence, phases that are trusted for a while, keepers and protections."""
    assert failures(run(tmp_path, LIVES)) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("limits:", (0, "held_by", "no_limits")),
        ("notices: lost", (0, "held_by", "none")),
    ],
)
def test_nothing_ends_without_limits_or_without_a_proven_notice(
    tmp_path: Path, change: str, found: tuple[int, str, str]
) -> None:
    """A test says what is missing before anybody relies on it."""
    rules = RULES
    if change == "limits:":
        rules = "version: 1\n" + RULES[RULES.index("whitelist:") :]
    tests = f"""
tests:
- name: idle
  {change if change != "limits:" else "notices: delivered"}
  jobs: [{{job: proc-1, like: idle}}]
  expect:
  - {{at: 45m, rule: idle, job: proc-1, verdict: yes, stage: moderate-notify, terminate: false,
     held_by: something}}
"""
    assert failures(run(tmp_path, tests, rules)) == [found]


def test_a_dark_node_a_shared_card_and_a_gap_are_unknown(tmp_path: Path) -> None:
    """What is not known is never a violation, in a test as in life."""
    tests = """
tests:
- name: gaps
  tick: 15s
  jobs:
  - {job: proc-1, like: idle, uuids: [GPU-a], temperature: 85C}
  - {job: proc-2, like: idle, uuids: [GPU-a], begins: 5m, temperature: 85C}
  - {job: proc-3, like: idle, node: "n2:9835"}
  outages:
  - {node: "n2:9835", from: 12m, until: 14m}
  expect:
  - {at: 11m, rule: idle, job: proc-3, verdict: yes}
  - {at: 12m15s, rule: idle, job: proc-3, verdict: unknown, reason: dark_node}
  - {at: 14m15s, rule: idle, job: proc-3, verdict: unknown, reason: no_data}
  - {at: 16m, rule: idle, job: proc-3, verdict: yes}
  - {at: 12m, rule: hot, gpu: GPU-a, verdict: yes}
"""
    assert failures(run(tmp_path, tests)) == []


def test_series_in_full_stand_beside_jobs_and_in_their_place(tmp_path: Path) -> None:
    """In promtool's notation: a gap is bridged for five minutes, a stale mark ends at once."""
    tests = """
tests:
- name: in full
  tick: 15s
  interval: 15s
  jobs: [{job: proc-1}, {job: proc-2}]
  series:
  - {series: 'custom_thing{job_id="proc-1",part="a"}', values: 0+1x8 _x40}
  - {series: 'custom_thing{job_id="proc-1",part="b"}', values: 0x8 stale}
  - {series: 'custom_thing{job_id="proc-2"}', values: 9x8 stale}
  - series: >-
      gpu_temperature_celsius{gpu="0",uuid="GPU-proc-1-0",instance="n1:9835",job="gpuwarden"}
    values: 90x40
  expect:
  - {at: 45s, rule: many, job: proc-1, verdict: no}
  - {at: 1m15s, rule: many, job: proc-1, verdict: yes}
  - {at: 5m, rule: many, job: proc-1, verdict: yes, stage: light-log}
  - {at: 8m, rule: many, job: proc-1, verdict: unknown, reason: no_data}
  - {at: 2m, rule: many, job: proc-2, verdict: yes}
  - {at: 2m15s, rule: many, job: proc-2, verdict: unknown, reason: no_data}
  - {at: 5m, rule: hot, gpu: GPU-proc-1-0, verdict: yes}
  - {at: 5m, rule: hot, gpu: GPU-proc-2-0, verdict: no}
"""
    assert failures(run(tmp_path, tests)) == []


def _lives(tmp_path: Path) -> tuple[RuleTest, RuleSet]:
    found = checked(tmp_path, LIVES)
    assert found.rules is not None
    return found.tests[0].test, found.rules


def test_one_range_query_tells_what_instant_queries_would(tmp_path: Path) -> None:
    """Facts of whole ticks are equal, value by value."""
    test, rules = _lives(tmp_path)

    async def both() -> None:
        times = tick_times(test)
        async with (
            temporary_prometheus(history(test)) as url,
            PrometheusClient(url, clock=OwnedClock()) as live,
            httpx.AsyncClient(trust_env=False) as client,
        ):
            ranges = RangeSource(url, client, times=times)
            for time in times[::7]:
                query = "gpu_job_info and timestamp(gpu_job_info) >= time() - 10"
                fast, slow = (
                    sorted((tuple(sorted(r.labels.items())), r.value) for r in rows)
                    for rows in (await ranges.instant(query, time), await live.instant(query, time))
                )
                assert fast == slow
                last = await ranges.instant(
                    "max(gpuwarden_snapshot_timestamp_seconds @ end())", time
                )
                assert last == [Sample({}, time - 0.5)]
                facts = await gather(ranges, rules, time=time, scrape_interval=5)
                again = await gather(RightClock(live), rules, time=time, scrape_interval=5)
                assert facts == again
                assert facts.jobs

    asyncio.run(both())


def test_verdicts_and_stages_are_those_of_the_live_engine(tmp_path: Path) -> None:
    """The engine ticks through the same history: the same answers, tick by tick."""
    test, rules = _lives(tmp_path)
    (tmp_path / "engine.yaml").write_text(
        "version: 1\nprometheus: {url: http://127.0.0.1:1}\nrules: [rules.yaml]\n"
        "ledger: ledger.sqlite\ntick: 60s\nkill_switch: halt\n"
    )
    settings = load_settings(tmp_path / "engine.yaml")
    subjects = {(item.rule, item.subject) for item in test.expect}

    async def live() -> list[Expectation]:
        clock = OwnedClock(test.start.timestamp())
        found = []
        ledger = Ledger(settings.path(settings.values.ledger))
        async with (
            temporary_prometheus(history(test)) as url,
            engine_over(url, settings, ledger, clock) as engine,
        ):
            for time in tick_times(test):
                await engine.tick()
                for rule, subject in sorted(subjects):
                    at = time - test.start.timestamp()
                    found.append(_said(engine, rule, subject, at))
                clock.pass_(test.tick)
        return found

    expected = asyncio.run(live())
    assert {item.verdict for item in expected} == {"yes", "no", "unknown", "none"}
    told = test.model_copy(update={"expect": tuple(expected)})

    async def rehearsed() -> list[str]:
        async with (
            temporary_prometheus(history(test)) as url,
            httpx.AsyncClient(trust_env=False) as client,
        ):
            source = RangeSource(url, client, times=tick_times(told))
            return [
                f"{told.expect[item.index]}: {item.field} {item.actual}"
                for item in await rehearse(told, rules, source)
            ]

    assert asyncio.run(rehearsed()) == []


def _said(engine: Engine, rule: str, subject: str, at: float) -> Expectation:
    """What the engine says now; a stage that only enforcing reaches is not compared."""
    view, stored = engine.view, engine.cases.get(rule, subject)
    verdict = view.verdicts.get((rule, subject))
    stages = [] if stored is None else [mark.key for mark in stored.case.marks]
    stage = None if "severe-terminate" in stages else (stages or ["none"])[-1]
    key = "gpu" if rule == "hot" else "job"
    word = "none" if verdict is None else verdict.truth.name.lower()
    return Expectation.model_validate(
        {"at": f"{at:.0f}s", "rule": rule, key: subject, "verdict": word, "stage": stage}
    )


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"verdict": "no"}, "verdict"),
        ({"reason": "phase"}, "reason"),
        ({"stage": "light-log"}, "stage"),
        ({"terminate": True}, "terminate"),
        ({"held_by": "work_lost"}, "held_by"),
    ],
)
def test_each_word_of_an_expectation_is_compared(words: dict[str, object], field: str) -> None:
    """And nothing that is not given."""
    item = Expectation.model_validate({"at": "1m", "rule": "r", "job": "j"} | words)
    moment = Moment(verdict="unknown", reasons=("cold_start",), stage="none")
    assert [found.field for found in compare(0, item, moment)] == [field]


_NEAR = 'gpu_job_memory_bytes{job_id="j",uuid="GPU-j-0",instance="n1:9835"}'
_SOME = "expect: [{at: 1m, rule: idle, job: j, verdict: no}]"


def _expecting(words: str) -> str:
    return f"jobs: [{{job: j}}], expect: [{{at: 1m, {words}}}]"


@pytest.mark.parametrize(
    ("test", "code", "place"),
    [
        ("expect: []", "GW111", "expect"),
        (_expecting("rule: idle, job: j"), "GW111", "expect[0]"),
        (_expecting("rule: idle, verdict: yes"), "GW111", "expect[0]"),
        (_expecting("rule: idle, job: j, gpu: g, verdict: yes"), "GW111", "expect[0]"),
        (_expecting("rule: ideal, job: j, verdict: no"), "GW231", "expect[0].rule"),
        (_expecting("rule: idle, job: k, verdict: no"), "GW231", "expect[0].job"),
        (_expecting("rule: idle, job: j, stage: severe"), "GW231", "expect[0].stage"),
        (_expecting("rule: hot, job: j, verdict: no"), "GW231", "expect[0].job"),
        (_expecting("rule: idle, gpu: GPU-j-0, verdict: no"), "GW231", "expect[0].gpu"),
        (_expecting("rule: idle, job: j, verdict: maybe"), "GW104", "expect[0].verdict"),
        (f"jobs: [{{job: j}}, {{job: j}}], {_SOME}", "GW231", "jobs[1].job"),
        (f"jobs: [{{job: j, cards: [{{}}, {{}}]}}], {_SOME}", "GW231", "jobs[0].cards"),
        (f"jobs: [{{job: j, uuids: [a, a]}}], {_SOME}", "GW231", "jobs[0].uuids"),
        (
            f"jobs: [{{job: j, then: [{{at: 2m}}, {{at: 1m}}]}}], {_SOME}",
            "GW230",
            "jobs[0].then",
        ),
        (
            f"jobs: [{{job: j}}], outages: [{{node: n9, from: 1m, until: 2m}}], {_SOME}",
            "GW231",
            "outages[0].node",
        ),
        (
            f"jobs: [{{job: j, node: n}}], outages: [{{node: n, from: 2m, until: 2m}}], {_SOME}",
            "GW230",
            "outages[0].until",
        ),
        (
            f"jobs: [{{job: j}}], {_SOME.replace('1m', '90d')}, tick: 1d",
            "GW232",
            "",
        ),
        (f"jobs: [{{job: j, memory: 20W}}], {_SOME}", "GW107", "jobs[0].memory"),
        (f"jobs: [{{job: j, cpu: 2}}], {_SOME}", "GW107", "jobs[0].cpu"),
        (f"jobs: [{{job: j, lik: idle}}], {_SOME}", "GW103", "jobs[0].lik"),
        (f"series: [{{series: 'up{{', values: '1'}}], {_SOME}", "GW107", "series[0].series"),
        (f"series: [{{series: up, values: one}}], {_SOME}", "GW107", "series[0].values"),
        (
            f"series: [{{series: up, values: 1x2}}, {{series: 'up{{}}', values: 1x2}}], {_SOME}",
            "GW231",
            "series[1].series",
        ),
        (
            f"jobs: [{{job: j}}], series: [{{series: '{_NEAR}', values: 1x2}}], {_SOME}",
            "GW233",
            "series[0].series",
        ),
    ],
)
def test_a_test_that_could_not_fail_or_makes_no_sense_is_refused(
    tmp_path: Path, test: str, code: str, place: str
) -> None:
    """With its place in the file."""
    found = checked(tmp_path, f"tests:\n- {{name: x, {test}}}\n")
    assert found.rules is None
    where = f"tests[0].{place}".rstrip(".")
    assert [(item.code, item.message.partition(":")[0]) for item in found.errors] == [(code, where)]


def test_yes_and_no_may_have_been_through_a_tool_that_reads_yaml_1_1() -> None:
    """There they are truth values; what is meant is plain."""
    words = {"at": "1m", "rule": "r", "job": "j"}
    for value, word in ((True, "yes"), (False, "no")):
        assert Expectation.model_validate(words | {"verdict": value}).verdict == word


def test_a_series_of_another_node_or_card_stands_beside_those_of_jobs(tmp_path: Path) -> None:
    """A job on two nodes, or a card that nobody uses."""
    tests = """
tests:
- name: beside
  jobs: [{job: j}]
  series:
  - {series: 'gpu_job_cpu_seconds_total{job_id="j",instance="n2:9835"}', values: 1x9}
  - {series: 'gpu_temperature_celsius{uuid="GPU-x",instance="n1:9835"}', values: 90x9}
  expect: [{at: 1m, rule: idle, job: j, verdict: unknown}]
"""
    assert checked(tmp_path, tests).errors == ()


def test_a_history_that_ends_in_the_future_is_refused_with_its_place(tmp_path: Path) -> None:
    """And not as an answer of a server that nobody knows."""
    tests = """
tests:
- name: later
  start: 2200-01-01T00:00:00Z
  jobs: [{job: j}]
  expect: [{at: 1m, rule: idle, job: j, verdict: unknown}]
"""
    with pytest.raises(InvalidInput, match=r"rules.yaml:\d+:3: later: ends in the future"):
        run(tmp_path, tests)


def test_a_series_that_stands_twice_costs_no_verdict(tmp_path: Path) -> None:
    """As after a new pod of the exporter: two series of a run, by a label nobody asks for."""
    tests = """
tests:
- name: torn
  jobs: [{job: j, run: {}}]
  series:
  - series: >-
      yolo_phase{phase="train",job_id="j",run_id="run-of-j",instance="n1:9835",copy="2"}
    values: 1x90
  expect: [{at: 6m, rule: idle, job: j, verdict: no}]
"""
    assert failures(run(tmp_path, tests)) == []


def test_tests_do_not_change_what_a_rule_set_is(tmp_path: Path) -> None:
    """The engine's rules and their hash are those without tests."""
    with_tests, without = checked(tmp_path, LIVES), checked(tmp_path, "")
    assert with_tests.rules == without.rules


def test_without_prometheus_it_says_what_to_install(tmp_path: Path) -> None:
    """Tests of rules run on the real one."""
    with pytest.raises(ServiceUnavailable, match="apt-get install"):
        prometheus_binary([tmp_path])
