"""Inline tests know owners who keep jobs, operators with a kill switch, and MIG instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.rehearsing import RULES, checked, failures, run

if TYPE_CHECKING:
    from pathlib import Path

KEEPABLE = RULES.replace("do: notify}", "do: notify, owner_may: {keep: 20m, times: 1}}", 1)
GRADED = RULES.replace(
    "do: terminate, ",
    "do: terminate,\n     when: {signal: gpu_memory_share, agg: min, window: 2m, above: 90%, "
    "gpus: any}, ",
)

KEEP = "{{at: {}m, rule: idle, job: proc-1, for: 5m}}"


def test_a_keep_moves_the_end_and_one_too_many_does_not(tmp_path: Path) -> None:
    """As far and as often as the rule lets owners; before anything is found there is no keep."""
    tests = """
tests:
- name: kept
  jobs:
  - {job: proc-once, user: ana, like: idle}
  - {job: proc-twice, user: ben, like: idle}
  - {job: proc-long, user: cyd, like: idle}
  - {job: proc-early, user: dan, like: idle}
  keeps:
  - {at: 5m, rule: idle, job: proc-early, for: 20m}
  - {at: 25m, rule: idle, job: proc-once, for: 20m}
  - {at: 25m, rule: idle, job: proc-twice, for: 10m}
  - {at: 25m, rule: idle, job: proc-long, for: 30m}
  - {at: 26m, rule: idle, job: proc-twice, for: 10m}
  expect:
  - {at: 42m, rule: idle, job: proc-early, terminate: true}
  - {at: 42m, rule: idle, job: proc-long, terminate: true}
  - {at: 42m, rule: idle, job: proc-once, terminate: false, held_by: none}
  - {at: 42m, rule: idle, job: proc-twice, terminate: false, held_by: none}
  - {at: 46m, rule: idle, job: proc-twice, terminate: true}
  - {at: 52m, rule: idle, job: proc-once, terminate: false}
  - {at: 56m, rule: idle, job: proc-once, terminate: true}
"""
    assert failures(run(tmp_path, tests, KEEPABLE)) == []


def test_nothing_ends_while_the_kill_switch_is_on(tmp_path: Path) -> None:
    """And at the first tick after it."""
    tests = """
tests:
- name: halted
  jobs: [{job: proc-1, like: idle}]
  kill_switch: [{from: 30m, until: 40m}]
  expect:
  - {at: 39m, rule: idle, job: proc-1, terminate: false, held_by: kill_switch}
  - {at: 40m, rule: idle, job: proc-1, terminate: true}
"""
    assert failures(run(tmp_path, tests)) == []


def test_a_mig_instance_is_a_card_with_the_memory_of_its_own(tmp_path: Path) -> None:
    """Before Hopper its utilization is not known, so that nobody is idle there."""
    tests = """
tests:
- name: instances
  jobs:
  - {job: proc-a, like: idle, mig: 3g.20gb, card_memory: 20GiB}
  - {job: proc-h, user: ben, like: idle, mig: 3g.40gb, hardware: NVIDIA H100 80GB HBM3,
     temperature: 85C}
  expect:
  - {at: 20m, rule: idle, job: proc-a, verdict: unknown, reason: no_data}
  - {at: 20m, rule: idle, job: proc-h, verdict: yes, stage: moderate-notify}
  - {at: 20m, rule: hot, gpu: GPU-of-MIG-proc-h-0, verdict: yes}
  - {at: 20m, rule: hot, gpu: GPU-of-MIG-proc-a-0, verdict: no}
"""
    assert failures(run(tmp_path, tests)) == []


def test_grades_are_tested_inline_like_anything_else(tmp_path: Path) -> None:
    """A stage whose condition does not hold is not entered, and one that holds late comes late."""
    tests = """
tests:
- name: grades
  jobs:
  - {job: proc-half, user: ana, like: idle}
  - {job: proc-full, user: ben, like: idle, memory: 38GiB}
  - {job: proc-late, user: cyd, like: idle, then: [{at: 30m, memory: 38GiB}]}
  expect:
  - {at: 40m, rule: idle, job: proc-full, terminate: true}
  - {at: 40m, rule: idle, job: proc-half, verdict: yes, stage: moderate-notify, terminate: false}
  - {at: 55m, rule: idle, job: proc-late, terminate: false, held_by: none}
  - {at: 59m, rule: idle, job: proc-late, terminate: true}
  - {at: 59m, rule: idle, job: proc-half, stage: moderate-notify, terminate: false}
"""
    assert failures(run(tmp_path, tests, GRADED)) == []


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("keeps: [{at: 1m, rule: idle, job: proc-1, for: 5m}]", []),
        ("keeps: [{at: 1m, rule: idel, job: proc-1, for: 5m}]", ["GW231"]),
        ("keeps: [{at: 1m, rule: many, job: proc-1, for: 5m}]", ["GW231"]),
        ("keeps: [{at: 1m, rule: idle, job: proc-2, for: 5m}]", ["GW231"]),
        (f"keeps: [{KEEP.format(2)}, {KEEP.format(1)}]", ["GW230"]),
        ("keeps: [{at: 1m, rule: idle, job: proc-1, for: 0s}]", ["GW109"]),
        ("kill_switch: [{from: 2m, until: 1m}]", ["GW230"]),
        ("kill_switch: [{from: 2m}]", ["GW105"]),
    ],
)
def test_what_people_do_in_a_test_is_linted(tmp_path: Path, line: str, codes: list[str]) -> None:
    """A keep of a rule that is misspelt would test nothing."""
    tests = f"""
tests:
- name: one
  jobs: [{{job: proc-1, like: idle}}]
  {line}
  expect: [{{at: 5m, rule: idle, job: proc-1, terminate: false}}]
"""
    assert [item.code for item in checked(tmp_path, tests).errors] == codes
