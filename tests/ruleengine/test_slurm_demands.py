"""What a pending job of Slurm's needs is read from its request, or said not to be known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.ruleengine.fleets import a_job
from tests.ruleengine.test_slurm_queues import MARK, answer

from gpuwarden.platforms.slurm import SlurmJob
from gpuwarden.platforms.slurm_nodes import SlurmNode
from gpuwarden.platforms.slurm_queue import decode_queue
from gpuwarden.ruleengine.demands import Demand, Needs, Share, service
from gpuwarden.ruleengine.slurm_demands import demand_of, waiting_only
from gpuwarden.ruleengine.verdicts import Truth

MIB = 2**20
NODES = (
    SlurmNode(
        "gpu1",
        hosts=frozenset({"gpu1.example.org", "10.0.0.1"}),
        partitions=frozenset({"main", "side"}),
        features=frozenset({"fast"}),
        usable=True,
        idle={"a100": 1},
        cpus=4,
        memory=8000 * MIB,
    ),
    SlurmNode("gpu2", partitions=frozenset({"main"}), usable=True, idle={"a100": 0}),
    SlurmNode("gpu3", partitions=frozenset({"main"}), usable=False, idle={"a100": 4}),
)
ALL = "cpu=4,mem=2000M,node=1,billing=4"


def _demand(*rows: str, running: tuple[SlurmJob, ...] = ()) -> Demand:
    jobs = decode_queue(answer(*rows), MARK)
    return demand_of(jobs, NODES, running, tiers={"main": 1, "side": 2}, cluster="ci")


def _row(
    *,
    job: str = "7",
    reason: str = "Resources",
    ways: str = "N/A;gres:gpu:1;N/A;N/A",
    priority: int = 1,
    nodes: str = "1;1;1",
    names: str = ";(null);OK;(null);N/A",
    partition: str = "main",
) -> str:
    return f"{job};{partition};{reason};{ways};{priority};{nodes};{names};{ALL}"


@pytest.mark.parametrize(
    ("row", "needs"),
    [
        (_row(), Needs(1, max_nodes=1, cpus=4, memory=2000 * MIB)),
        (
            _row(ways="N/A;gres:gpu:a100:2;N/A;N/A", nodes="3;3;3"),
            Needs(6, per_node=2, nodes=3, max_nodes=3, model="a100", cpus=4, memory=2000 * MIB),
        ),
        (
            _row(names=";(null);NO;(null);N/A"),
            Needs(1, max_nodes=1, cpus=4, memory=2000 * MIB, whole=True),
        ),
        (
            _row(ways="gres:gpu:5;N/A;N/A;N/A", nodes="1;0;1"),
            Needs(5, cpus=4, memory=2000 * MIB),
        ),
        (
            _row(ways="N/A;N/A;N/A;cpu=2,gres/gpu=2", nodes="1;0;3"),
            Needs(6, per_node=2, unit=2, cpus=4, memory=2000 * MIB),
        ),
        (
            _row(ways="gres/gpu:a100=4;gres/gpu:a100=2;N/A;N/A", nodes="2;2;2"),
            Needs(4, per_node=2, nodes=2, max_nodes=2, model="a100", cpus=4, memory=2000 * MIB),
        ),
    ],
)
def test_a_request_is_read_in_whichever_way_it_was_made(row: str, needs: Needs) -> None:
    """In all, by node, by task, and together; with cores and memory."""
    (job,) = _demand(row).waiting
    assert (job.needs, job.unknown) == (needs, "")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (_row(ways="gres:gpu:1;N/A;gres:gpu:1;N/A"), "could not be read"),
        (_row(ways="N/A;gres:gpu:a100:1,gres:gpu:v100:1;N/A;N/A"), "could not be read"),
        (_row(ways="N/A;gres:gpu:1g.5gb:1;N/A;N/A"), "could not be read"),
        (_row(names=";fast|big&new;OK;(null);N/A"), "not told apart"),
        (_row(names=";[a|b];OK;(null);N/A"), "not told apart"),
        (_row(names=";fast*2;OK;(null);N/A"), "not told apart"),
        (_row(names="gpu[1-2];(null);OK;(null);N/A", nodes="3;3;3"), "names some"),
        (_row(names="gpu[1-;(null);OK;(null);N/A"), "names some"),
        (_row(names=";(null);OK;tuesday;N/A"), "reservation"),
        (_row(names=";(null);OK;(null);6"), "several components"),
    ],
)
def test_what_is_not_judged_here_is_said(row: str, says: str) -> None:
    """And so ends nobody."""
    (job,) = _demand(row).waiting
    assert says in job.unknown


@pytest.mark.parametrize(
    ("row", "nodes"),
    [
        (_row(), {"gpu1", "gpu2"}),
        (_row(partition="side"), {"gpu1"}),
        (_row(partition="side,main"), {"gpu1", "gpu2"}),
        (_row(names=";fast;OK;(null);N/A"), {"gpu1"}),
        (_row(names=";fast&big;OK;(null);N/A"), set()),
        (_row(names=";fast|big;OK;(null);N/A"), {"gpu1"}),
        (_row(names="gpu[1-3];(null);OK;(null);N/A", nodes="3;3;3"), {"gpu1", "gpu2"}),
        (_row(names="gpu2;(null);OK;(null);N/A"), {"gpu2"}),
    ],
)
def test_where_it_may_run(row: str, nodes: set[str]) -> None:
    """By partition, features and name; never on a node that takes no job."""
    (job,) = _demand(row).waiting
    assert job.candidates == nodes


def test_the_line_is_that_of_slurms_priorities() -> None:
    """Who waits for something else does not stand in it."""
    demand = _demand(
        _row(job="1", priority=5),
        _row(job="2", priority=4294901757),
        _row(job="3", priority=9, reason="Dependency"),
    )
    assert [job.name for job in demand.waiting] == ["2", "1"]
    assert (demand.count(), demand.count("main"), demand.count("side")) == (2, 2, 0)
    # A partition's tier comes before any priority.
    higher = _demand(_row(job="1", priority=5, partition="side"), _row(job="2", priority=9))
    assert [job.name for job in higher.waiting] == ["1", "2"]
    jobs = decode_queue(answer(_row(job="1"), _row(job="2")), MARK)
    assert waiting_only(jobs).count("main") == 2


def test_what_a_job_holds_is_what_slurm_gave_it() -> None:
    """Of one node in all; of several the sum is shared out, but for the cards."""
    one = SlurmJob(5, nodes=("gpu2",), tres={"cpu": "3", "mem": "4G", "gres/gpu": "2"}, restarts=1)
    two = SlurmJob(6, nodes=("gpu1", "gpu2"), tres={"cpu": "3", "mem": "4G", "gres/gpu": "2"})
    held = _demand(running=(one, two, SlurmJob(8))).holdings
    assert dict(held) == {
        "slurm-ci-5-1": (Share("gpu2", 2, 3.0, 4096.0 * MIB),),
        "slurm-ci-6-0": (
            Share("gpu1", None, 1.0, 2048.0 * MIB),
            Share("gpu2", None, 1.0, 2048.0 * MIB),
        ),
    }


def test_a_nodes_other_names_lead_to_it() -> None:
    """Prometheus may know it by its host's name or its address."""
    assert dict(_demand().hosts) == {"gpu1.example.org": "gpu1", "10.0.0.1": "gpu1"}


@pytest.mark.parametrize(
    ("ask", "cards", "truth"),
    [
        ("N/A;gres:gpu:2;N/A;N/A", "1", Truth.NO),
        ("N/A;gres:gpu:2;N/A;N/A", "2", Truth.YES),
        ("N/A;gres:gpu:1;N/A;N/A", "2", Truth.NO),
    ],
)
def test_from_queue_and_nodes_to_an_answer(ask: str, cards: str, truth: Truth) -> None:
    """One card is idle on gpu1; the job on gpu2 has one or two."""
    held = SlurmJob(5, nodes=("gpu2",), tres={"cpu": "4", "mem": "2000M", "gres/gpu": cards})
    demand = _demand(_row(ways=ask), running=(held,))
    assert service(demand, a_job(job_id="slurm-ci-5-0"), "main").truth is truth


def test_a_long_queue_is_asked_for_few_things() -> None:
    """Ten thousand that wait and a thousand nodes are answered within one tick's patience."""
    nodes = tuple(replace(NODES[1], name=f"gpu{n}", cpus=8, memory=MIB) for n in range(1000))
    row = _row(ways="N/A;gres:gpu:2;N/A;N/A")
    jobs = decode_queue(answer(row), MARK) * 10_000
    demand = demand_of(jobs, nodes, (), tiers={}, cluster="ci")
    candidates = {id(job.candidates) for job in demand.waiting}
    assert (len(demand.waiting), len(candidates)) == (10_000, 1)
    assert len(demand.waiting[0].candidates) == 1000
