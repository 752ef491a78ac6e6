"""How rows become facts, where what they say is contradictory."""

from __future__ import annotations

import math

import pytest
from tests.ruleengine.fleets import NOW_FACTS, an_entry

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.assemblies import LAST_MOMENT, Assembly
from gpuwarden.ruleengine.facts import assemble
from gpuwarden.ruleengine.inventories import LABELS, OF_VALUES, Expectation
from gpuwarden.ruleengine.messages import local_time
from gpuwarden.ruleengine.prometheus import Sample, tabulated
from gpuwarden.ruleengine.verdicts import FleetFacts, JobFacts, RunFacts, SignalKey, Truth
from gpuwarden.ruleengine.whitelists import protection

NODE = "n1:9835"
KEY = SignalKey("promql", "last", promql="custom")


def _row(value: float, **labels: str) -> Sample:
    return Sample({"instance": NODE, "job_id": "j", **labels}, value)


def _facts(answer: list[Sample], *runs: str, **more: list[Sample]) -> FleetFacts:
    """One job on one card with these runs, an expression's answer, and more rows by metric."""
    node = Sample({"instance": NODE}, NOW_FACTS)
    rows = {
        "gpuwarden_snapshot_timestamp_seconds": [node],
        "scraped": [node],
        "gpu_job_holds_gpu": [_row(1, uuid="g0")],
        "yolo_info": [_row(1, run_id=run, model="yolov8m") for run in runs],
    }
    return assemble(
        rows | more,
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


@pytest.mark.parametrize(("value", "moment"), [(1e18, LAST_MOMENT), (-1.7e308, 0.0)])
def test_a_time_that_has_no_date_stays_as_early_or_as_late(value: float, moment: float) -> None:
    """A node that counts in nanoseconds, or lies, spoils neither a page nor a rule for others."""
    found = _facts(
        [],
        "r",
        gpu_job_start_time_seconds=[_row(value)],
        gpu_job_first_gpu_use_timestamp_seconds=[_row(value)],
        gpu_job_activity_timestamp_seconds=[_row(value, signal="cpu")],
        gpu_process_start_time_seconds=[_row(value, pid="7")],
        yolo_phase_start_timestamp_seconds=[_row(value, run_id="r")],
        yolo_checkpoint_timestamp_seconds=[_row(value, run_id="r")],
    ).jobs["j"]
    assert found.run is not None
    assert {
        found.start_time,
        found.first_gpu_use,
        found.activity["cpu"],
        found.processes[0][1],
        found.run.phase_since,
        found.run.checkpoint_time,
    } == {moment}
    assert rfc3339(moment)
    zones = [local_time(moment, zone) for zone in ("Pacific/Kiritimati", "Etc/GMT+12")]
    assert len(zones) == 2


@pytest.mark.parametrize("pid", ["9" * 5000, "\u0667", "-7", ""])
def test_what_is_no_pid_is_no_process(pid: str) -> None:
    """And ends no tick."""
    rows = [_row(9.0, pid=pid), _row(9.0, pid="7")]
    assert _facts([], gpu_process_start_time_seconds=rows).jobs["j"].processes == ((7, 9.0),)


def test_a_snapshot_without_a_time_is_none() -> None:
    """Nothing tells how old it is."""
    nothing = [Sample({"instance": NODE}, math.nan)]
    found = _facts([], gpuwarden_snapshot_timestamp_seconds=nothing)
    assert (found.lit_nodes, found.jobs["j"].not_fresh_reason) == (0, "dark_node")


def _shares(amount: float, *, known: bool = True, total: float = 40.0) -> dict[str, float]:
    """A job's share of its card, from its amount."""
    share = SignalKey("gpu_memory_share", "avg", 300)
    parts = Assembly(time=NOW_FACTS, expected=Expectation(number=1), teams={}, scrape_interval=5.0)
    for name, value in {"gpu_job_holds_gpu": 1, "gpu_memory_total_bytes": total}.items():
        if known or name == "gpu_job_holds_gpu":
            parts.take_inventory(name, tabulated([_row(value, uuid="g0")], LABELS[name]))
    parts.lay_out([share])
    parts.take_answer(share, tabulated([_row(amount, uuid="g0")], OF_VALUES), amounts=True)
    return dict(parts.facts(0.0).jobs["j"].values.get(share, {}))


def test_a_share_is_the_amount_by_the_memory_of_the_card() -> None:
    """The very number that Prometheus would have divided."""
    assert _shares(30.0) == {"g0": 30.0 / 40.0}


def test_a_share_of_a_card_whose_memory_is_not_known_is_not_known() -> None:
    """Neither all nor nothing of it: nobody is found to hog what nobody has measured."""
    assert _shares(30.0, known=False) == {}
    assert _shares(30.0, total=0.0) == {}
    assert _shares(math.inf) == {}


@pytest.mark.parametrize("order", [1, -1])
def test_a_card_that_is_remembered_elsewhere_is_where_it_is_lit(order: int) -> None:
    """It was put into another machine, and the rest of the first one stays dark."""
    homes = [("a-gone:9835", "g0"), ("a-gone:9835", "g1"), (NODE, "g0"), ("z-gone:9835", "g0")]
    infos = [
        Sample({"instance": node, "uuid": uuid, "gpu": "0", "name": "A100"}, 1.0)
        for node, uuid in [*homes, ("z-gone:9835", "g2")][::order]
    ]
    holds = [Sample({"instance": node, "job_id": "j", "uuid": "g0"}, 1.0) for node, _ in homes]
    facts = _facts([], gpu_info=infos, gpu_job_holds_gpu=holds[::order])
    assert (facts.cards["g0"].instance, facts.cards["g0"].fresh) == (NODE, True)
    assert not facts.cards["g1"].fresh
    assert [gpu.instance for gpu in facts.jobs["j"].gpus] == [NODE]


OTHER = "n2:9835"


def _of_two_nodes(**more: list[Sample]) -> JobFacts:
    """A job on two lit nodes, and more rows by metric."""
    nodes = [Sample({"instance": node}, NOW_FACTS) for node in (NODE, OTHER)]
    holds = [_row(1, uuid="g0"), _row(1, uuid="g1", instance=OTHER)]
    rows: dict[str, list[Sample]] = {
        "gpuwarden_snapshot_timestamp_seconds": nodes,
        "scraped": nodes,
        "gpu_job_holds_gpu": holds,
    }
    return _facts([], **(rows | more)).jobs["j"]


@pytest.mark.parametrize("order", [1, -1])
def test_whose_a_job_is_must_be_agreed_on_by_its_nodes(order: int) -> None:
    """A directory that is away on one of them: a whitelisted user must not be taken for no one."""
    same = {"source": "slurm", "interactive": "false"}
    infos = [
        _row(1, user="ana", framework="ultralytics", **same),
        _row(1, user="1001", framework="torch", instance=OTHER, **same),
    ]
    job = _of_two_nodes(gpu_job_info=infos[::order])
    assert (job.fresh, job.user, job.framework) == (True, "", "torch")
    entry = an_entry({"user": "ana"})
    assert protection(entry.rules[0], job, [entry], now=NOW_FACTS)[0] is Truth.UNKNOWN
    again = [*infos, _row(1, user="ana", framework="torch", instance="n3:9835", **same)]
    assert _of_two_nodes(gpu_job_info=again[::order]).user == ""
    agreeing = [_row(1, user="ana", **same), _row(1, user="ana", instance=OTHER, **same)]
    assert _of_two_nodes(gpu_job_info=agreeing).user == "ana"


def test_whether_a_job_computes_is_known_when_every_node_tells() -> None:
    """The processor of a node that says nothing of it may be at work: silence is not known."""
    old, young = NOW_FACTS - 7200.0, NOW_FACTS - 5.0
    one = [_row(old, signal="cpu"), _row(old, signal="log")]
    two = [_row(young, signal="cpu", instance=OTHER)]
    assert _of_two_nodes(gpu_job_activity_timestamp_seconds=one).activity == {"log": old}
    found = _of_two_nodes(gpu_job_activity_timestamp_seconds=[*two, *one]).activity
    assert found == {"log": old, "cpu": young}
