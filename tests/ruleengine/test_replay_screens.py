"""One evaluation for each distinct situation says what one for each tick would."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ruleengine.random_frames import RandomFrame
from tests.ruleengine.replaying import default_rules, switched_on

from gpuwarden.quantities import Deviation, Direction, Quantity, Unit
from gpuwarden.ruleengine import evaluation
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.model import Rule
from gpuwarden.ruleengine.profiles import Expected
from gpuwarden.ruleengine.replay_arms import Clock
from gpuwarden.ruleengine.replay_screens import (
    CODES,
    NOT_JUDGED,
    Judge,
    Look,
    ScreenDisagrees,
    exceeded,
)
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.replay_screens import Situation
    from gpuwarden.ruleengine.verdicts import Verdict

ODD = """
version: 1
limits: {terminate: {per_tick: 1, per_hour: 6, per_user_per_day: 3,
  halt_above_share_of_running: 10%}}
whitelist:
- {match: {user: root}, rules: [idle, torn], reason: a, approved_by: b,
   expires: 2026-03-02T08:11:00Z}
- {match: {executable: /usr/bin/python3}, rules: [shared], reason: a, approved_by: b,
   expires: 2030-01-01T00:00:00Z}
profiles:
- {model: yolov8m, batch: 64, imgsz: 640, hardware: NVIDIA A100-SXM4-40GB, gpu_memory: 10GiB,
   throughput: 80 img/s, gpu_utilization: 82%}
rules:
- id: idle
  target: job
  match: {framework: torch, gpu: ".*A100.*"}
  cold_start: 5m
  ignore_phases: {validate: 20m, scan: 1h}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 2m, at_most: 5%, gpus: all}
    - {silent_for: 10m, signals: [cpu, log, heartbeat]}
    - not: {signal: card_power, agg: avg, window: 5m, above: 200W, gpus: any}
  for: 5m
  trust_for: 10m
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 5m, do: notify,
     when: {signal: gpu_memory_share, agg: min, window: 2m, above: 80%, gpus: any}}
- id: torn
  target: job
  cold_start: 0s
  only_during: [{days: [mon], from: "00:00", to: "08:12", zone: Europe/London}]
  when:
    any:
    - {no_progress_for: 10m}
    - {profile: {throughput: below 15%, gpu_memory: "outside 10%, at least 1GiB"}, window: 5m}
    - {promql: "sum by (job_id) (custom)", above: 3}
  for: 1m
  stages: [{level: light, after: 0s, do: log}]
- id: shared
  target: job
  team: vision
  cold_start: 0s
  when:
    all:
    - {needs_memory: 50%}
    - {signal: job_cpu_cores, window: 2m, below: 0.1 cores}
    - {signal: card_utilization, share: 80%, window: 5m, above: 90%, gpus: any}
  for: 1m
  stages: [{level: light, after: 0s, do: log}]
- id: card
  target: gpu
  cold_start: 0s
  when:
    any:
    - {signal: card_temperature, agg: last, above: 80C}
    - {signal: card_memory_share, agg: min, window: 3 samples, above: 5%}
  for: 1m
  stages: [{level: light, after: 0s, do: log}]
"""


def _odd(folder: Path) -> RuleSet:
    path = folder / "odd.yaml"
    path.write_text(ODD)
    return switched_on(load_rule_files([path]))


def _said(found: Situation | None) -> tuple[object, ...]:
    if found is None:
        return ()
    return tuple(
        (v.truth, v.unknown_reasons, v.protected, v.self_report_only, *_grades(v))
        for v in (found.verdict, found.plain)
    )


def _grades(verdict: Verdict) -> tuple[object, ...]:
    return tuple((grade.stage, grade.truth) for grade in verdict.grades)


def _compare(rules: RuleSet, seed: int) -> int:
    """Every rule, subject and tick; returns how many were judged."""
    frame = RandomFrame(seed, rules).frame()
    judge, count = Judge(rules, frame), 0
    for group in frame.groups():
        for rule in rules.rules:
            for track in judge.tracks(rule, group):
                for tick in range(frame.ticks.count):
                    found = judge.evaluate(rule, group, track.subject, tick)
                    where = (seed, rule.id, track.subject, tick)
                    assert _said(track.situations[int(track.index[tick])]) == _said(found), where
                    code = NOT_JUDGED if found is None else CODES[found.verdict.truth]
                    assert track.trusted[tick] == code, where
                    count += found is not None
    return count


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_verdict_of_a_situation_is_that_of_each_of_its_ticks(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Truth, reasons, protection and trust: with whatever gaps, conflicts and values at limits."""
    _compare(_odd(tmp_path_factory.mktemp("rules")), seed)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_same_of_the_default_rules(seed: int) -> None:
    """All that come with gpuwarden."""
    _compare(default_rules(), seed)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_jobs_word_is_weighed_wherever_it_has_a_part(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Both verdicts of a situation are those of judging twice, with the word and without it."""
    rules = _odd(tmp_path_factory.mktemp("rules"))
    frame = RandomFrame(seed, rules).frame()
    judge = Judge(rules, frame)
    for group in frame.groups():
        for rule in rules.rules:
            for name, tick in itertools.product((*group.jobs, *group.cards), (0, 7, 20)):
                found = judge.evaluate(rule, group, name, tick)
                if found is None:
                    continue
                plain = evaluation.evaluate(
                    rule,
                    found.job,
                    group.facts(tick),
                    profiles=rules.profiles,
                    whitelist=rules.whitelist,
                    now=group.facts(tick).time,
                    trusted=False,
                )
                own = plain.truth is Truth.YES and found.verdict.truth is not Truth.YES
                worded = [
                    (grade.stage, grade.truth is not Truth.YES and bare.truth is Truth.YES)
                    for grade, bare in zip(found.verdict.grades, plain.grades, strict=True)
                ]
                assert found.plain == plain
                assert [(grade.stage, grade.worded) for grade in found.verdict.grades] == worded
                assert found.verdict.self_report_only == (own or any(each for _, each in worded))


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(
        st.one_of(
            st.floats(50, 200),
            st.sampled_from([84.99999999999, 85.0, 85.00000000001, 115.0, math.nan, math.inf]),
        ),
        min_size=1,
    ),
    band=st.sampled_from([None, (100.0, 100.0), (90.0, 120.0)]),
    deviation=st.builds(
        Deviation,
        direction=st.sampled_from(Direction),
        tolerance=st.sampled_from([0.0, 0.15]),
        floor=st.sampled_from([None, Quantity(20.0, Unit.COUNT)]),
    ),
    tolerance=st.sampled_from([None, 0.3]),
)
def test_deviations_told_apart_by_bisection_are_those_of_each_value(
    values: list[float],
    band: tuple[float, float] | None,
    deviation: Deviation,
    tolerance: float | None,
) -> None:
    """At the limit, beside it, within a band, and where nothing or everything is out."""
    low, high = band or (100.0, 100.0)
    target = Expected("throughput", 100.0, low, high, "", band is not None, tolerance)
    wanted = [int(math.isfinite(value) and target.exceeded(value, deviation)) for value in values]
    found = exceeded(np.array(values), target, deviation)
    known = np.isfinite(values)
    assert list(found[known]) == list(np.array(wanted)[known])


@pytest.mark.parametrize("seed", range(6))
def test_the_facts_of_a_group_are_those_of_the_whole_fleet(tmp_path: Path, seed: int) -> None:
    """What does not hang together with a job changes nothing about it."""
    frame = RandomFrame(seed, _odd(tmp_path)).frame()
    rows = {name: range(len(columns.labels)) for name, columns in frame.rows.items()}
    answers = {key: range(len(columns.labels)) for key, columns in frame.answers.items()}
    running = frame.running
    for tick in range(frame.ticks.count):
        whole = frame.facts_of(rows, answers, tick)
        fleet = frame.fleet(tick)
        assert running[tick] == sum(job.fresh for job in whole.jobs.values())
        assert (fleet.problems, fleet.lit_nodes, fleet.expected_nodes) == (
            whole.problems,
            whole.lit_nodes,
            whole.expected_nodes,
        )
        jobs, cards = {}, {}
        for group in frame.groups():
            jobs |= group.facts(tick).jobs
            cards |= group.facts(tick).cards
        assert jobs == whole.jobs
        assert cards == whole.cards


def test_most_ticks_need_no_evaluation_of_their_own(tmp_path: Path) -> None:
    """Where nothing changes, one situation is the whole stretch."""
    rules = _odd(tmp_path)
    frame = RandomFrame(3, rules).frame()
    for columns in (*frame.rows.values(), *frame.answers.values()):
        columns.values[:] = columns.values[:, :1]
    judge = Judge(rules, frame)
    for group in frame.groups():
        for rule in rules.rules:
            list(judge.tracks(rule, group))
    subjects = len(rules.rules) * (5 + 4)
    assert judge.evaluations < 8 * subjects < frame.ticks.count * subjects


class _Graded(Rule):
    """A rule with a key that the screen has never heard of."""

    grade: str = ""


def test_what_the_screen_does_not_know_is_judged_at_every_tick(tmp_path: Path) -> None:
    """A new key of the language makes replays slower, and never wrong."""
    rules = _odd(tmp_path)
    plain = rules.rules[0]
    known = {name: getattr(plain, name) for name in type(plain).model_fields}
    graded = _Graded.model_construct(**known, grade="severe")
    frame = RandomFrame(5, rules).frame()
    group = next(group for group in frame.groups() if group.jobs)
    track = next(iter(Judge(rules, frame).tracks(graded, group)))
    assert len(track.situations) == frame.ticks.count
    same = next(iter(Judge(rules, frame).tracks(plain, group)))
    assert np.array_equal(track.trusted, same.trusted)


def test_a_screen_that_were_wrong_would_be_noticed(tmp_path: Path) -> None:
    """Before anything is reported, the live code is asked at the very tick."""
    rules = _odd(tmp_path)
    frame = RandomFrame(5, rules).frame()
    group = next(group for group in frame.groups() if group.jobs)
    judge = Judge(rules, frame)
    track = next(iter(judge.tracks(rules.rules[1], group)))
    track.trusted[2] = 7
    with pytest.raises(ScreenDisagrees, match="report this"):
        _ = Look(judge, track, 2, truth=None, over=False).situation


def test_time_at_blind_ticks_counts_no_more_than_in_an_outage(tmp_path: Path) -> None:
    """As live: at most three ticks are made up for, and more than that is an outage."""
    frame = RandomFrame(5, _odd(tmp_path)).frame()
    clock = Clock(60.0)
    for name in ("scraped", "gpuwarden_snapshot_timestamp_seconds", "expected"):
        frame.rows[name].values[:] = 1.0
        frame.rows[name].values[:, 4:6] = np.nan
        frame.rows[name].values[:, 10:15] = np.nan
    deltas, outages = clock.deltas(frame)
    assert list(np.flatnonzero(frame.blind)) == [4, 5, 10, 11, 12, 13, 14]
    assert list(deltas[:7]) == [0, 60, 60, 60, 0, 0, 180]
    assert (deltas[15], outages[15], outages[6]) == (180, True, False)
