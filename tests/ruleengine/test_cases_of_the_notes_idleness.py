"""Public reports of idle detection gone wrong, by kind, on a real Prometheus.

Each job below is one report with its values; what was done to it there, and what is right, is in
the name of its job and in the claims.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.rehearsing import failures, run

if TYPE_CHECKING:
    from pathlib import Path

RULES = """\
version: 1
limits:
  terminate: {per_tick: 9, per_hour: 99, per_user_per_day: 99, halt_above_share_of_running: 100%}
rules:
- id: idle
  match: {}
  target: job
  cold_start: 1m
  ignore_phases: {scan: 30m}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 3 samples, at_most: 5%, gpus: all}
    - {signal: gpu_memory_share, agg: min, window: 5m, above: 10%, gpus: any}
    - {silent_for: 5m, signals: [log, heartbeat, cpu]}
  for: 5m
  clear_after: 2m
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 5m, do: notify}
  - {level: severe, after: 20m, do: terminate, notice_delivered_for: 10m, grace: 60s,
     max_work_lost: 24h}
- id: unused
  description: By utilisation alone, as other products have it.
  target: job
  cold_start: 1m
  when: {signal: gpu_utilization, agg: max, window: 3 samples, at_most: 5%, gpus: all}
  for: 0s
  stages: [{level: light, after: 0s, do: log}]
- id: one-card
  target: job
  cold_start: 1m
  when: {signal: gpu_utilization, agg: max, window: 3 samples, at_most: 5%, gpus: any}
  for: 5m
  stages: [{level: light, after: 0s, do: log}]
- id: hung
  target: job
  cold_start: 10m
  when:
    all:
    - {signal: gpu_utilization, agg: avg, window: 10m, above: 80%, gpus: any}
    - {no_progress_for: 10m}
  for: 5m
  stages: [{level: light, after: 0s, do: log}]
"""
NODE = 'instance="n1:9835",job="gpuwarden"'


def load(job: str, values: str, gpu: int) -> str:
    """A job's utilisation as a series in full."""
    labels = f'job_id="{job}",gpu="{gpu}",uuid="GPU-{job}-0",{NODE}'
    return f"  - {{series: 'gpu_job_utilization_ratio{{{labels}}}', values: '{values}'}}\n"


LIVES = """
tests:
- name: reports of five hours
  interval: 30s
  tick: 5m
  jobs:
  - {job: proc-one-of-eight, user: ana, gpus: 8, utilization: 90%, cards: [{utilization: 0%}]}
  - {job: proc-download, user: ben, utilization: 0%, cpu: 0.3 cores, phase: scan, run: {}}
  - {job: proc-holder, user: cyd, utilization: 4%, cpu: 0 cores, log: false, heartbeat: false}
  - {job: proc-silent-cell, user: dan, utilization: 80%, cpu: 1 cores, log: false, heartbeat: false}
  - {job: proc-stuck-busy, user: eve, like: idle, interactive: true}
  - {job: proc-terminal, user: flo, utilization: 0%, cpu: 0.2 cores, log: false, interactive: true}
  - {job: proc-once, user: gus, utilization: 90%, then: [{at: 1h, like: idle}]}
  - {job: proc-setup, user: hal, like: idle, begins: 10m, cpu: 2 cores,
     then: [{at: 40m, like: healthy}]}
  - {job: proc-hung, user: ida, gpus: 4, like: spinning, throughput: 0 img/s, run: {},
     cards: [{utilization: 100%}, {utilization: 100%}, {utilization: 0%}, {utilization: 0%}]}
  - {job: proc-zombie, user: jan, like: idle, memory: 36.8GiB}
  - {job: proc-five-percent, user: kim, utilization: 5%, cpu: 3 cores, run: {}}
  expect:
  # T9: one idle card of eight is neither an idle job nor more than a light word
  - {at: 1h, rule: idle, job: proc-one-of-eight, verdict: no, stage: none}
  - {at: 1h, rule: unused, job: proc-one-of-eight, verdict: no}
  - {at: 1h, rule: one-card, job: proc-one-of-eight, verdict: yes, stage: light-log,
     terminate: false}
  # T11: a download of five hours is work; a load that only holds the card is none
  - {at: 5h, rule: idle, job: proc-download, verdict: no, stage: none, terminate: false}
  - {at: 50m, rule: idle, job: proc-holder, verdict: yes, stage: severe-terminate, terminate: true}
  # T14: a long silent cell works; a kernel that calls itself busy does not
  - {at: 1h, rule: idle, job: proc-silent-cell, verdict: no, stage: none}
  - {at: 50m, rule: idle, job: proc-stuck-busy, stage: severe-terminate}
  # T15: somebody types in a terminal
  - {at: 5h, rule: idle, job: proc-terminal, verdict: no, stage: none}
  # T16: setting up is no idleness
  - {at: 40m, rule: idle, job: proc-setup, verdict: no, stage: none}
  # T17: an hour of work does not excuse four hours of none
  - {at: 1h, rule: idle, job: proc-once, verdict: no, stage: none}
  - {at: 1h25m, rule: idle, job: proc-once, verdict: yes, stage: moderate-notify}
  - {at: 5h, rule: idle, job: proc-once, stage: severe-terminate}
  # T18: two cards at 100 %, two at 0 %, and not a step
  - {at: 1h, rule: hung, job: proc-hung, verdict: yes, stage: light-log}
  - {at: 1h, rule: idle, job: proc-hung, verdict: no}
  # T19: held by what is dead, not free
  - {at: 25m, rule: idle, job: proc-zombie, verdict: yes, stage: moderate-notify}
  # a training that really reported 5 % (the planned threshold) is at work
  - {at: 5h, rule: unused, job: proc-five-percent, verdict: yes}
  - {at: 5h, rule: idle, job: proc-five-percent, verdict: no, stage: none, terminate: false}
"""


def test_what_looks_idle_and_is_not_and_the_reverse(tmp_path: Path) -> None:
    """T9, T11, T14 to T19: the reports' jobs over five hours, each judged as it should be."""
    assert failures(run(tmp_path, LIVES, RULES)) == []


def spikes(*pattern: str, ticks: int = 80) -> str:
    """A pattern of values, over and over."""
    return " ".join(islice(cycle(pattern), ticks))


@pytest.mark.parametrize(
    "pattern",
    [
        ("0", "0", "0.95"),
        ("0.95", "0", "0"),
        ("0", "0.51"),
        ("0.02", "0.01", "0.06"),
    ],
    ids=" ".join,
)
def test_a_loop_that_waits_for_its_data_is_never_idle(
    tmp_path: Path, pattern: tuple[str, ...]
) -> None:
    """T13: 0 % between spikes, or for 20 s between epochs, at no tick looks like three samples."""
    moments = [f"{minutes}m{seconds}s" for minutes in (8, 12) for seconds in (15, 30, 45)]
    expect = "".join(
        f"  - {{at: {at}, rule: unused, job: proc-spikes, verdict: no, stage: none}}\n"
        for at in moments
    )
    tests = (
        "\ntests:\n- name: spikes\n  interval: 15s\n  tick: 15s\n  jobs:\n"
        "  - {job: proc-spikes, cpu: 0 cores, log: false}\n  series:\n"
        + load("proc-spikes", spikes(*pattern), gpu=0)
        + "  expect:\n"
        + expect
    )
    assert failures(run(tmp_path, tests, RULES)) == []


def test_what_was_not_measured_is_not_idle(tmp_path: Path) -> None:
    """T20: no utilisation under MIG, or NaN, is UNKNOWN and not 0; a value of 0 is 0."""
    jobs = ("proc-mig", "proc-nan", "proc-one", "proc-zero")
    series = (
        load("proc-mig", "_x80", 0)
        + load("proc-nan", "NaNx80", 1)
        + load("proc-one", "_x39 0 _x40", 2)
        + load("proc-zero", "0x80", 3)
    )
    tests = (
        "\ntests:\n- name: not measured\n  interval: 15s\n  tick: 15s\n  jobs:\n"
        + "".join(
            f"  - {{job: {job}, cpu: 0 cores, log: false, heartbeat: false}}\n" for job in jobs
        )
        + f"  series:\n{series}  expect:\n"
        + "".join(
            f"  - {{at: {at}, rule: {rule}, job: {job}, verdict: unknown, stage: none}}\n"
            for job in jobs[:3]
            for rule in ("unused", "idle")
            for at in ("10m", "10m15s", "18m")
        )
        + "  - {at: 10m, rule: unused, job: proc-zero, verdict: yes}\n"
    )
    assert failures(run(tmp_path, tests, RULES)) == []


def test_a_scrape_that_fails_now_and_then_does_not_begin_everything_anew(tmp_path: Path) -> None:
    """T21, T27: gaps of two scrapes every few minutes: later, and not never."""
    gaps = "".join(
        f'  - {{node: "n2:9835", from: {minutes}m, until: {minutes}m30s}}\n'
        for minutes in range(12, 40, 4)
    )
    tests = f"""
tests:
- name: flapping
  interval: 15s
  tick: 15s
  jobs:
  - {{job: proc-flaps, like: idle, node: "n2:9835"}}
  - {{job: proc-steady, like: idle}}
  outages:
{gaps}  expect:
  - {{at: 12m15s, rule: idle, job: proc-flaps, verdict: unknown, reason: dark_node}}
  - {{at: 14m, rule: idle, job: proc-steady, stage: light-log}}
  - {{at: 40m, rule: idle, job: proc-steady, stage: severe-terminate}}
  - {{at: 39m, rule: idle, job: proc-flaps, stage: moderate-notify, terminate: false}}
  - {{at: 60m, rule: idle, job: proc-flaps, stage: severe-terminate}}
"""
    assert failures(run(tmp_path, tests, RULES)) == []
