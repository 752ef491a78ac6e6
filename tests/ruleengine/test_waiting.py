"""A rule may end jobs only while somebody waits for a GPU; notices and deadlines go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError
from tests.ruleengine.engines import World, running
from tests.ruleengine.fleets import END, N1, NOW, SCRAPE, History, a_rule
from tests.ruleengine.test_cases import fresh
from tests.servers import backfill, prometheus

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.messages import Outlook, notice
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines
from gpuwarden.ruleengine.texts.speeches import speech

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.verdicts import FleetFacts

IDLE = {"silent_for": "5m", "signals": ["cpu"]}
STAGES = [
    {"level": "light", "after": "0s", "do": "notify"},
    {
        "level": "severe",
        "after": "1h",
        "do": "terminate",
        "notice_delivered_for": "30m",
        "grace": "60s",
        "max_work_lost": "1h",
    },
]


def _rule(promql: str, **fields: object) -> Rule:
    waiting = {"promql": promql, "above": 0}
    ending = {"stages": STAGES, "match": {}, "ignore_phases": {}}
    return a_rule(IDLE, **({"only_if_waiting": waiting} | ending | fields))


async def _until_due(world: World) -> None:
    """Up to the moment at which the job would be ended, and two ticks more."""
    await world.until(CaseState.DUE)
    await world.tick(2)


def _write(world: World) -> None:
    world.rules()
    path = world.folder / "rules.yaml"
    condition = "  only_if_waiting: {promql: sum(queue_length), above: 0}\n"
    begin = "  cold_start: 60s\n"
    path.write_text(path.read_text().replace(begin, condition + begin))


@pytest.mark.parametrize(("waiting", "why"), [(0.0, "nobody_waiting"), (None, "waiting_unknown")])
def test_a_due_job_stays_while_nobody_waits_and_goes_once_somebody_does(
    servers: World, waiting: float | None, why: str
) -> None:
    """Also while it is not known whether anybody does: UNKNOWN never acts."""

    async def story() -> None:
        _write(servers)
        servers.fleet.waiting = waiting
        async with running(servers) as world:
            await _until_due(world)
            assert world.state() is CaseState.DUE
            assert why in world.why()
            assert world.agent.ended == []
            world.fleet.waiting = 2.0
            await world.tick()
            await world.settled()
            assert world.agent.ended == ["proc-1"]

    asyncio.run(story())


def test_one_number_of_the_cluster_is_known_and_nothing_else_is(tmp_path: Path) -> None:
    """No row and several rows are not known, and a query that fails says why; jobs stay as is."""
    history = History()
    history.node(N1)
    for name in ("a", "b"):
        history.card(name)
        history.job(name, {name: 0.5})
    history.add("queue_length", lambda time: 3.0 if time == END else 1.0)
    backfill(history.text(), tmp_path / "tsdb")
    texts = {
        "one": "sum(queue_length)",
        "none": "sum(no_such_queue)",
        "several": "gpu_memory_total_bytes",
        "broken": "gpu_job_memory_bytes / on (job) gpu_job_memory_bytes",
    }
    rules = {name: _rule(text) for name, text in texts.items()}
    keys = {name: rule.only_if_waiting.key for name, rule in rules.items() if rule.only_if_waiting}

    async def once(url: str) -> FleetFacts:
        known = tuple(rule.model_copy(update={"id": name}) for name, rule in rules.items())
        async with PrometheusClient(url) as client:
            return await gather(
                client, RuleSet(version=1, rules=known), time=NOW, scrape_interval=SCRAPE
            )

    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        fleet = asyncio.run(once(server.url))
    assert dict(fleet.numbers) == {keys["one"]: 3.0}
    assert set(fleet.failed) == {keys["broken"]}
    assert all(not set(keys.values()) & set(job.values) for job in fleet.jobs.values())


@pytest.mark.parametrize(
    ("rule", "codes"),
    [
        (_rule("sum(gpu_processes)"), []),
        (_rule("sum(kube_pod_status_unschedulable)"), ["GW301"]),
        (_rule("sum(gpu_processes) > 3"), ["GW215"]),
        (_rule("(sum(gpu_processes) > 3)"), ["GW215"]),
        (_rule("sum(gpu_processes) > bool 3"), []),
        (_rule("sum("), ["GW213"]),
        (_rule("sum(gpuwarden_violation_active)"), ["GW216"]),
        (_rule("sum(gpu_proceses)"), ["GW216"]),
        (_rule("sum(gpu_processes)", stages=STAGES[:1]), ["GW203"]),
    ],
)
def test_what_would_never_give_a_number_is_found_before_the_night(
    rule: Rule, codes: list[str]
) -> None:
    """Unlike a condition it needs no label job_id; and it holds back nothing where nothing ends."""
    found = [item for item in lint_rule(rule) if item.path[:1] == ("only_if_waiting",)]
    assert [item.code for item in found] == codes


def test_the_owner_is_told_on_whom_it_depends() -> None:
    """Who knows that nobody waits need not hurry."""
    texts = [
        notice(
            fresh(),
            rule,
            (),
            Outlook(remaining=600.0, grace=60.0),
            speech=speech("en"),
            now=NOW,
            zone="UTC",
            engine_url="http://engine:9837",
        )["next"]
        for rule in (_rule("sum(gpu_processes)"), _rule("x", only_if_waiting=None))
    ]
    assert [("while somebody waits for a GPU" in text) for text in texts] == [True, False]


@pytest.mark.parametrize(
    "waiting",
    [
        {"promql": "sum(gpu_processes)"},
        {"promql": "sum(gpu_processes)", "above": "5%"},
        {"promql": "sum(gpu_processes)", "above": 0, "below": 3},
        {"promql": "", "above": 0},
        {"query": "sum(gpu_processes)", "above": 0},
    ],
)
def test_it_has_one_limit_without_a_unit(waiting: dict[str, object]) -> None:
    """An expression's value has none."""
    with pytest.raises(ValidationError):
        _rule("", only_if_waiting=waiting)


def test_an_explanation_says_when_jobs_may_be_ended() -> None:
    """For who writes the rule and wonders why nothing happens."""
    rule = _rule("sum(gpu_processes)")
    explained = explain_rule(rule, RuleSet(version=1, rules=(rule,)), scrape_interval=5)
    lines = [line.strip() for line in explanation_lines(explained)]
    assert "It takes cards only while sum(gpu_processes) > 0" in lines
