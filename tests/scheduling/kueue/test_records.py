"""Pods that hold cards are written down as they are, in whatever order they come and go."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from tests.scheduling.kueue.test_decisions import a_job

from gpuwarden.periods import Span
from gpuwarden.scheduling.kueue.pods import Pod
from gpuwarden.scheduling.kueue.records import Records
from gpuwarden.scheduling.usages import account

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_800_000_000.0


def test_pods_that_begin_one_after_the_other_hold_their_parts(tmp_path: Path) -> None:
    """The first of four is no holder of all eight cards, and two of one second count each."""
    pods = [
        Pod(f"pod-{number}", "node1", "Running", started=NOW + begun)
        for number, begun in enumerate((0.0, 60.0, 60.0, 90.0))
    ]
    job = a_job("wide", gpus=8, width=4, card="a100-40")
    with contextlib.closing(Records(tmp_path / "kueue.sqlite")) as records:
        for begun in (1, 3, 4):
            records.observe([dataclasses.replace(job, pods=tuple(pods[:begun]))], NOW + 30 * begun)
        over = [
            dataclasses.replace(pod, phase="Succeeded", exit_code=0, ended=NOW + 3600)
            for pod in pods
        ]
        records.observe([dataclasses.replace(job, pods=tuple(over))], NOW + 3601)
        held = records.holdings(NOW, NOW + 7200)
    found = account(held, Span(NOW, NOW + 7200), "team", now=NOW + 7200)
    assert found.total.gpu_seconds == 2 * (3600 + 3540 + 3540 + 3510)


def test_what_runs_unseen_is_counted_by_kueues_word(tmp_path: Path) -> None:
    """A RayJob, or one in another cluster, escapes no budget: from admission to its end."""
    job = a_job("ray", gpus=4, card="a100-40", kind="RayJob", reserved=NOW, admitted=NOW)
    with contextlib.closing(Records(tmp_path / "kueue.sqlite")) as records:
        for later in (1.0, 30.0, 3599.0):
            records.observe([job], NOW + later)
        records.observe([dataclasses.replace(job, finished="Succeeded")], NOW + 3600.0)
        again = dataclasses.replace(job, reserved=NOW + 5000.0, admitted=NOW + 5000.0)
        records.observe([again], NOW + 5000.0)
        held = records.holdings(NOW, NOW + 7200.0)
    assert [(each.gpus, each.start, each.end) for each in held] == [
        (4, NOW, NOW + 3600.0),
        (4, NOW + 5000.0, None),
    ]
