"""How rows become facts, where what they say is contradictory."""

from __future__ import annotations

import math

import pytest
from tests.ruleengine.fleets import NOW_FACTS

from gpuwarden.ruleengine.facts import Expectation, assemble
from gpuwarden.ruleengine.prometheus import Sample
from gpuwarden.ruleengine.verdicts import FleetFacts, RunFacts, SignalKey

NODE = "n1:9835"
KEY = SignalKey("promql", "last", promql="custom")


def _row(value: float, **labels: str) -> Sample:
    return Sample({"instance": NODE, "job_id": "j", **labels}, value)


def _facts(answer: list[Sample], *runs: str) -> FleetFacts:
    """One job on one card with these runs, and an expression's answer."""
    node = Sample({"instance": NODE}, NOW_FACTS)
    rows = {
        "gpuwarden_snapshot_timestamp_seconds": [node],
        "scraped": [node],
        "gpu_job_holds_gpu": [_row(1, uuid="g0")],
        "yolo_info": [_row(1, run_id=run, model="yolov8m") for run in runs],
    }
    return assemble(
        rows,
        {KEY: answer},
        time=NOW_FACTS,
        skew=0.0,
        expected=Expectation(number=1),
        teams={},
        scrape_interval=5.0,
    )


def test_of_a_job_with_two_runs_each_is_known_and_none_believed() -> None:
    """Two trainings in one terminal: the whitelist must still find the one that it protects."""
    run = _facts([], "b", "a").jobs["j"].run
    assert run == RunFacts("a", conflict=True, claims=("a", "b"))


@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_a_row_without_a_number_is_a_row(nothing: float) -> None:
    """Beside another of the same job it leaves open which is meant."""
    assert _facts([_row(5.0)]).jobs["j"].values[KEY] == {"": 5.0}
    assert KEY not in _facts([_row(5.0), _row(nothing)]).jobs["j"].values
    assert KEY not in _facts([_row(nothing)]).jobs["j"].values
