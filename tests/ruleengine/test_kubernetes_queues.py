"""Jobs are ended only while a pod waits for a GPU that their end would give it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from tests import kubernetes_manifests as manifests
from tests.ruleengine.fleets import a_job, a_rule
from tests.ruleengine.reclaim.pods import Hands, hands
from tests.ruleengine.test_waiting import IDLE, STAGES

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.conditions import Waiting
from gpuwarden.ruleengine.demand_sources import with_demands
from gpuwarden.ruleengine.demands import service
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines
from gpuwarden.ruleengine.verdicts import FleetFacts, Truth

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.kubernetes_store import Grant, Json

    from gpuwarden.ruleengine.demands import Demand, Service


def unschedulable(hands: Hands, name: str, *, gpus: int, namespace: str = "lab") -> None:
    """A pod for which the scheduler has found no node."""
    hands.cluster.create("Pod", namespace, manifests.pod(name, gpus=gpus, node=None))
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
    }
    hands.cluster.store.status("Pod", namespace, name, conditions=[condition])


def told(
    folder: Path,
    story: Callable[[Hands], Awaitable[Any]],
    *,
    grants: tuple[Grant, ...] | None = None,
) -> Any:
    """The result of a story on a cluster of one node."""

    async def run() -> Any:
        async with hands(folder, grants=grants) as found:
            return await story(found)

    return asyncio.run(run())


def running(hands: Hands, name: str, *, gpus: int) -> Json:
    """A pod on the node."""
    hands.cluster.create("Pod", "lab", manifests.pod(name, gpus=gpus))
    hands.cluster.run_pods()
    return hands.cluster.pod(name)


def served(demand: Demand, pod: Json, place: str = "") -> Service:
    """Whether a pod's end would serve somebody."""
    job = a_job(job_id=f"pod-{pod['metadata']['uid']}", instance="node1:9835")
    return service(demand, job, place)


@pytest.mark.parametrize(
    ("wanted", "truth"), [(1, Truth.NO), (4, Truth.YES), (6, Truth.YES), (7, Truth.NO)]
)
def test_whether_an_end_serves(tmp_path: Path, wanted: int, truth: Truth) -> None:
    """Eight cards, four of the job's and two of another's: two are idle, six after its end."""

    async def story(hands: Hands) -> tuple[Demand, Json]:
        pod = running(hands, "idle", gpus=4)
        running(hands, "busy", gpus=2)
        unschedulable(hands, "next", gpus=wanted)
        return await hands.platform.queue.demand(fits=True), pod

    demand, pod = told(tmp_path, story)
    assert demand.count() == 1
    found = served(demand, pod)
    assert found.truth is truth, found.why


def test_places_and_turns(tmp_path: Path) -> None:
    """Who waits longer, or is more important, is first; a rule may mean one namespace."""

    async def story(hands: Hands) -> tuple[Demand, Json]:
        pod = running(hands, "idle", gpus=8)
        unschedulable(hands, "small", gpus=1)
        unschedulable(hands, "large", gpus=8, namespace="vision")
        hands.cluster.patch("Pod", "large", {"spec": {"priority": 100}}, "vision")
        return await hands.platform.queue.demand(fits=True), pod

    demand, pod = told(tmp_path, story)
    assert [job.name for job in demand.waiting] == ["vision/large", "lab/small"]
    assert (demand.count("lab"), demand.count("vision"), demand.count("x")) == (1, 1, 0)
    assert served(demand, pod, "vision").truth is Truth.YES
    assert served(demand, pod, "lab").truth is Truth.NO


def test_cards_that_are_freed_already(tmp_path: Path) -> None:
    """The scheduler ends others for a pod: it needs nobody's end, and its cards are not idle."""

    async def story(hands: Hands) -> tuple[Demand, Json]:
        pod = running(hands, "idle", gpus=4)
        unschedulable(hands, "preemptor", gpus=4)
        hands.cluster.store.status("Pod", "lab", "preemptor", nominatedNodeName="node1")
        unschedulable(hands, "next", gpus=5)
        return await hands.platform.queue.demand(fits=True), pod

    demand, pod = told(tmp_path, story)
    assert demand.count() == 1
    assert demand.rooms["node1"].cards == {"nvidia.com/gpu": 0}
    assert served(demand, pod).truth is Truth.NO


def test_a_job_of_nobodys(tmp_path: Path) -> None:
    """A process beside Kubernetes: the scheduler never counted its cards as taken."""

    async def story(hands: Hands) -> Demand:
        unschedulable(hands, "next", gpus=1)
        return await hands.platform.queue.demand(fits=True)

    demand = told(tmp_path, story)
    assert service(demand, a_job(job_id="proc-1"), "").truth is Truth.NO


def test_nodes_are_asked_only_while_somebody_waits(tmp_path: Path) -> None:
    """A large cluster is not listed in every tick."""

    async def story(hands: Hands) -> None:
        running(hands, "busy", gpus=2)
        assert (await hands.platform.queue.demand(fits=True)).count() == 0
        assert hands.cluster.asked("GET", "/nodes$") == 0
        assert hands.cluster.asked("GET", "/pods$") == 1

    told(tmp_path, story)


def test_a_server_that_does_not_tell(tmp_path: Path) -> None:
    """Without the right, or without an answer, it is not known; nothing is ended."""

    async def story(hands: Hands) -> None:
        for status in (403, 500):
            hands.cluster.fail("GET", "/pods$", status)
            with pytest.raises(ServiceUnavailable):
                await hands.platform.queue.demand(fits=True)

    told(tmp_path, story)


def test_a_rule_that_asks(tmp_path: Path) -> None:
    """From the rule's words to the number that it is held against."""
    waiting = {"kubernetes": {"namespace": "lab"}, "above": 0}
    rule = a_rule(IDLE, only_if_waiting=waiting, stages=STAGES, match={}, ignore_phases={})
    assert rule.only_if_waiting is not None
    rules = RuleSet(version=1, rules=(rule,))
    lines = "\n".join(explanation_lines(explain_rule(rule, rules, scrape_interval=5.0)))
    assert "pods that wait for a GPU in Kubernetes in its namespace lab is > 0" in lines

    async def nothing() -> FleetFacts:
        return FleetFacts(time=0.0, jobs={}, expected_nodes=1, lit_nodes=1)

    async def story(hands: Hands) -> FleetFacts:
        unschedulable(hands, "next", gpus=1)
        return await with_demands(nothing(), rules, {"kubernetes": hands.platform.queue})

    facts = told(tmp_path, story)
    assert facts.numbers[rule.only_if_waiting.key] == 1.0
    assert facts.demands["kubernetes"].count("lab") == 1


@pytest.mark.parametrize(
    "text",
    [
        {"kubernetes": {}, "slurm": {}, "above": 0},
        {"above": 0},
        {"kubernetes": {"namespace": "Lab"}, "above": 0},
        {"kubernetes": {"partition": "x"}, "above": 0},
    ],
)
def test_rules_that_ask_wrongly(text: dict[str, object]) -> None:
    """Exactly one queue, and only what it has."""
    with pytest.raises(ValidationError):
        Waiting.model_validate(text)
