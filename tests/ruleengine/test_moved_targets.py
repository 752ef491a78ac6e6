"""Targets whose labels or names change while jobs run: an exporter's new pod, a node's new address.

Prometheus then has two series of each thing for as long as a window lasts. Public reports of rules
that fail or flap on that are many (rook 14427, kube-prometheus 2826, prometheus 14320).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from gpuwarden.ruleengine.attacks import every_leaf
from gpuwarden.ruleengine.conditions import Promql
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.histories import History, history
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.notations import SeriesName, Stale, sorted_labels
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.rule_tests import RuleTest
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.verdicts import FleetFacts

ROOT = Path(__file__).parents[2]
INTERVAL = 15.0
NODE, OTHER = "n1:9835", "n2:9835"
CHANGE = 1200.0
"""When labels change, in seconds since the begin."""
RULES = """
version: 1
profiles:
- {model: yolov8m, batch: 64, imgsz: 640, hardware: "NVIDIA A100-SXM4-40GB", gpu_memory: 10GiB,
   gpu_utilization: 82%, throughput: 100 img/s}
rules:
- id: idle
  target: job
  match: {}
  cold_start: 1m
  when: {signal: gpu_utilization, agg: max, window: 5m, at_most: 5%, gpus: all}
  for: 1m
  stages: [{level: light, after: 0s, do: log}]
- id: slow
  target: job
  match: {}
  cold_start: 1m
  when: {profile: {throughput: below 30%}, window: 5m}
  for: 1m
  stages: [{level: light, after: 0s, do: log}]
- id: full
  target: job
  match: {}
  cold_start: 1m
  when: {signal: gpu_memory_share, above: 40%, share: 80%, window: 5m, gpus: any}
  for: 1m
  stages: [{level: light, after: 0s, do: log}]
"""
TEST = {
    "name": "two nodes",
    "interval": "15s",
    "jobs": [
        {"job": "proc-idle", "user": "eve", "like": "idle", "node": NODE, "run": {}},
        {"job": "proc-busy", "user": "ana", "node": OTHER, "run": {}},
    ],
    "expect": [{"at": "30m", "rule": "idle", "job": "proc-idle", "stage": "none"}],
}
SCENE = RuleTest.model_validate(TEST)
BEGIN = SCENE.start.timestamp()


def changed(
    how: Callable[[dict[str, str]], dict[str, str]], *, overlap: float = 0.0, marked: bool = True
) -> History:
    """Half an hour in which every series gets other labels.

    Args:
        how: labels -> those from the change on.
        overlap: for how long the former series go on, in seconds.
        marked: whether they end with staleness markers, as those of a scrape do.
    """
    made, found = history(SCENE), History()
    at = (BEGIN + CHANGE) * 1000
    for name, row in made.series.items():
        new = SeriesName(name.metric, sorted_labels(how(dict(name.labels))))
        if new == name:
            found.series[name] = row
            continue
        old = {time: value for time, value in row.items() if time < at + overlap * 1000}
        after = [time for time in row if time not in old]
        if marked and after:
            old[min(after)] = Stale()
        found.series[name] = old
        found.series[new] = {time: value for time, value in row.items() if time >= at}
    return found


def new_pod(labels: dict[str, str]) -> dict[str, str]:
    """The first node's exporter comes back as another pod."""
    return {**labels, "pod": "exporter-b"} if labels.get("instance") == NODE else labels


def new_name(labels: dict[str, str]) -> dict[str, str]:
    """Every target is called by its full name."""
    if "instance" not in labels:
        return labels
    return {**labels, "instance": labels["instance"].replace(":", ".example.org:")}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> RuleSet:
    """Of a card, of a run's pace, and of a share of the card's memory."""
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(RULES)
    found = check_rule_files([path]).rules
    assert found is not None
    return found


def seen(made: History, rules: RuleSet, *ats: float) -> list[tuple[FleetFacts, dict[str, Truth]]]:
    """What ticks know at these seconds, and their verdicts: `rule job` -> truth."""

    async def story() -> list[tuple[FleetFacts, dict[str, Truth]]]:
        found = []
        async with temporary_prometheus(made) as url, PrometheusClient(url) as client:
            for at in ats:
                facts = await gather(client, rules, time=BEGIN + at, scrape_interval=INTERVAL)
                truths = {
                    f"{rule.id} {job.job_id}": evaluate(
                        rule, job, facts, profiles=rules.profiles, whitelist=(), now=facts.time
                    ).truth
                    for rule in rules.rules
                    for job in facts.jobs.values()
                }
                found.append((facts, truths))
        return found

    return asyncio.run(story())


def test_an_exporter_that_comes_back_as_another_pod_costs_its_own_jobs_a_window(
    rules: RuleSet,
) -> None:
    """No tick of the fleet fails; the other node's jobs are judged as before."""
    before, first, second, after = seen(
        changed(new_pod), rules, CHANGE - 30, CHANGE + 20, CHANGE + 120, CHANGE + 400
    )
    for facts, truths in (before, after):
        assert facts.problems == ()
        assert truths["idle proc-idle"] is Truth.YES
        assert truths["full proc-idle"] is Truth.YES
        assert truths["slow proc-busy"] is Truth.NO
    for facts, truths in (first, second):
        assert facts.problems == ()
        assert facts.failed == {}
        assert truths["idle proc-idle"] is Truth.UNKNOWN
        assert truths["idle proc-busy"] is Truth.NO
        assert truths["slow proc-busy"] is Truth.NO
        assert truths["full proc-busy"] is Truth.YES


@pytest.mark.parametrize(("overlap", "marked"), [(30.0, True), (0.0, False)])
def test_two_series_of_one_node_are_believed_once_one_of_them_is_over(
    rules: RuleSet, *, overlap: float, marked: bool
) -> None:
    """Until then its jobs are unknown: also for a server that has no staleness markers."""
    (twice, truths), (once, after) = seen(
        changed(new_pod, overlap=overlap, marked=marked), rules, CHANGE + 5, CHANGE + 400
    )
    assert twice.jobs["proc-idle"].not_fresh_reason == "scraped_twice"
    assert truths["idle proc-idle"] is Truth.UNKNOWN
    assert once.jobs["proc-idle"].fresh
    assert after["idle proc-idle"] is Truth.YES


def test_a_node_under_a_new_name_takes_its_jobs_along(rules: RuleSet) -> None:
    """No job is on two nodes, one of them dark, because its card is remembered under the former."""
    (facts, _), (_, after) = seen(changed(new_name), rules, CHANGE + 60, CHANGE + 400)
    for job, node in (("proc-idle", "n1.example.org:9835"), ("proc-busy", "n2.example.org:9835")):
        assert facts.jobs[job].instances == (node,)
        assert facts.jobs[job].fresh
        assert len(facts.jobs[job].gpus) == 1
    assert after["idle proc-idle"] is Truth.YES
    assert after["slow proc-busy"] is Truth.NO


def under_two_names(**told: float) -> History:
    """The first node is scraped by its name and by its address.

    Args:
        told: metric -> what the second target says of it all the time.
    """
    made, found = history(SCENE), History()
    for name, row in made.series.items():
        found.series[name] = row
        if dict(name.labels).get("instance") == NODE:
            labels = sorted_labels({**dict(name.labels), "instance": "10.0.0.1:9835"})
            again = {time: told.get(name.metric, value) for time, value in row.items()}
            found.series[SeriesName(name.metric, labels)] = again
    return found


@pytest.mark.parametrize("told", [{}, {"gpu_job_utilization_ratio": 0.9}])
def test_a_card_that_two_nodes_tell_of_is_there_once_and_not_believed(
    rules: RuleSet, told: dict[str, float]
) -> None:
    """Whether both say the same or not: an exporter that hangs, or is older, is not told apart."""
    ((facts, truths),) = seen(under_two_names(**told), rules, CHANGE)
    job = facts.jobs["proc-idle"]
    assert (job.fresh, job.not_fresh_reason) == (False, "scraped_twice")
    assert len(job.gpus) == 1
    assert truths["idle proc-idle"] is Truth.UNKNOWN
    assert truths["full proc-idle"] is Truth.UNKNOWN
    (uuid,) = [gpu.uuid for gpu in job.gpus]
    assert not facts.cards[uuid].fresh
    # Whoever is on other cards is judged.
    assert truths["idle proc-busy"] is Truth.NO
    assert truths["full proc-busy"] is Truth.YES


def test_one_of_two_targets_of_a_node_is_enough_once_the_other_is_away(rules: RuleSet) -> None:
    """An operator takes the second target away: two scrapes later the node is like any other."""
    made = under_two_names()
    for name, row in made.series.items():
        if dict(name.labels).get("instance") == "10.0.0.1:9835":
            after = [time for time in row if time >= (BEGIN + CHANGE) * 1000]
            made.series[name] = {time: row[time] for time in row if time not in after}
            made.series[name][min(after)] = Stale()
    ((before, _), (facts, truths)) = seen(made, rules, CHANGE - 10, CHANGE + 40)
    assert before.jobs["proc-idle"].not_fresh_reason == "scraped_twice"
    assert facts.jobs["proc-idle"].instances == (NODE,)
    assert truths["idle proc-idle"] is Truth.YES


def test_a_node_that_is_dark_is_remembered_all_the_same(rules: RuleSet) -> None:
    """Its cards are lit nowhere else."""

    def gone(labels: dict[str, str]) -> dict[str, str]:
        # A series that nobody asks for, in the place of each of the first node's.
        away = labels.get("instance") == NODE
        return {"gone": "yes"} if away else labels

    ((facts, truths),) = seen(changed(gone), rules, CHANGE + 120)
    assert facts.jobs["proc-idle"].not_fresh_reason == "dark_node"
    assert truths["idle proc-idle"] is Truth.UNKNOWN


@pytest.mark.parametrize(
    "how", [new_pod, pytest.param(new_name, marks=pytest.mark.sweep)], ids=["pod", "name"]
)
def test_no_shipped_expression_fails_while_labels_change(
    how: Callable[[dict[str, str]], dict[str, str]],
) -> None:
    """Recording and health rules, and those of the default rules."""
    defaults = check_rule_files([ROOT / "ruleengine/rules/defaults.yaml"]).rules
    assert defaults is not None
    asked = {
        leaf.promql
        for rule in defaults.rules
        for leaf in every_leaf(rule)
        if isinstance(leaf, Promql)
    }
    for path in (ROOT / "alerting/rules").glob("*.yml"):
        groups = (yaml.safe_load(path.read_text()) or {}).get("groups", [])
        asked |= {rule["expr"] for group in groups for rule in group["rules"]}
    assert len(asked) > 50

    async def story() -> None:
        made = changed(how, overlap=30.0)
        async with temporary_prometheus(made) as url, PrometheusClient(url) as client:
            for at in (CHANGE + 10, CHANGE + 120):
                await asyncio.gather(*(client.instant(text, BEGIN + at) for text in asked))

    asyncio.run(story())
