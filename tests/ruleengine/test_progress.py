"""A training that trains and counts no step makes no progress; of all others nothing is claimed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.fleets import (
    END,
    N1,
    NOW,
    SCRAPE,
    START,
    History,
    a_job,
    a_rule,
    a_run,
    fleet_of,
    until,
)
from tests.servers import backfill, prometheus

from gpuwarden.ruleengine.conditions import NoProgress
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.linting import lint_rule
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ruleengine.fleets import Curve

    from gpuwarden.ruleengine.verdicts import FleetFacts

STUCK = {"no_progress_for": "5m"}
RULE = a_rule(STUCK)
BUSY = {"signal": "gpu_utilization", "agg": "avg", "window": "5m", "above": "80%", "gpus": "all"}


def _run(history: History, job_id: str, steps: Curve, *, validates: Curve = lambda _: 0.0) -> None:
    history.card(job_id)
    history.job(job_id, {job_id: 0.95})
    names = {"job_id": job_id, "run_id": f"run-{job_id}"}
    history.add("yolo_info", 1, **names, model="m", batch="1", imgsz="640", amp="true")
    history.add("yolo_phase", lambda time: 1 - (validates(time) or 0), **names, phase="train")
    history.add("yolo_phase", validates, **names, phase="validate")
    history.add("yolo_steps_total", steps, **names)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetFacts]:
    """Trainings of every kind, as a real Prometheus has them."""
    history = History()
    history.node(N1)
    _run(history, "advancing", lambda time: time - START)
    _run(history, "stuck", lambda _: 700.0)
    _run(history, "stuck-at-0", lambda _: 0.0)
    _run(history, "slow", lambda time: 700.0 if time < END - 280 else 701.0)
    _run(history, "validating", lambda _: 700.0, validates=lambda _: 1.0)
    _run(history, "just-back", lambda _: 700.0, validates=lambda time: float(time < END - 60))
    _run(history, "validates-between", lambda time: time - START, validates=lambda t: t // 60 % 2)
    _run(history, "started-anew", lambda time: time - START if time < END - 60 else 0.0)
    _run(history, "silent", until(END - 30, 700.0))
    history.card("undeclared")
    history.job("undeclared", {"undeclared": 0.95})
    storage = tmp_path_factory.mktemp("progress") / "tsdb"
    backfill(history.text(), storage)
    rules = RuleSet(version=1, rules=(RULE,))

    async def once(url: str) -> FleetFacts:
        async with PrometheusClient(url) as client:
            return await gather(client, rules, time=NOW, scrape_interval=SCRAPE)

    with prometheus("global: {}\n", storage) as server:
        yield asyncio.run(once(server.url))


@pytest.mark.parametrize(
    ("job_id", "truth", "reason"),
    [
        ("advancing", Truth.NO, ()),
        ("stuck", Truth.YES, ()),
        ("stuck-at-0", Truth.YES, ()),
        ("slow", Truth.NO, ()),
        ("validating", Truth.UNKNOWN, ("no_data",)),
        ("just-back", Truth.UNKNOWN, ("no_data",)),
        ("validates-between", Truth.NO, ()),
        ("started-anew", Truth.NO, ()),
        ("silent", Truth.UNKNOWN, ("no_data",)),
        ("undeclared", Truth.UNKNOWN, ("no_run",)),
    ],
)
def test_only_who_trains_all_the_time_without_a_step_is_stuck(
    fleet: FleetFacts, job_id: str, truth: Truth, reason: tuple[str, ...]
) -> None:
    """One step suffices; validation, a counter that stopped coming and no trainer are UNKNOWN."""
    verdict = evaluate(RULE, fleet.jobs[job_id], fleet, profiles=[], whitelist=[], now=NOW)
    assert (verdict.truth, verdict.unknown_reasons) == (truth, reason)


def test_a_run_claimed_twice_and_a_cold_start_are_unknown() -> None:
    """Whose steps these are is not known, or they reach back before the first use of a card."""
    condition = RULE.when
    assert isinstance(condition, NoProgress)
    values = {condition.key: {"": 0.0}}
    for job, reason in (
        (a_job(values, run=a_run(conflict=True)), "run_conflict"),
        (a_job(values, run=a_run(), first_gpu_use=fleet_of().time - 200), "cold_start"),
    ):
        verdict = evaluate(RULE, job, fleet_of(job), profiles=[], whitelist=[], now=fleet_of().time)
        assert verdict.truth is Truth.UNKNOWN
        assert verdict.unknown_reasons == (reason,)


TERMINATING = [
    {"level": "light", "after": "0s", "do": "notify"},
    {
        "level": "severe",
        "after": "30m",
        "do": "terminate",
        "notice_delivered_for": "30m",
        "grace": "60s",
        "max_work_lost": "1h",
    },
]
MEASURED = {"signal": "job_cpu_cores", "window": "5m", "below": "0.1 cores"}


@pytest.mark.parametrize(
    ("when", "fields", "codes"),
    [
        (STUCK, {}, []),
        ({"no_progress_for": "10s"}, {}, [("GW212", ("when", "no_progress_for"))]),
        (STUCK, {"target": "gpu"}, [("GW206", ("when",))]),
        (STUCK, {"stages": TERMINATING, "match": {}, "ignore_phases": {}}, [("GW209", ("when",))]),
        (
            {"all": [STUCK, BUSY]},
            {"stages": TERMINATING, "match": {}, "ignore_phases": {}},
            [],
        ),
        (
            {"all": [STUCK, MEASURED]},
            {"stages": TERMINATING, "match": {}, "ignore_phases": {}},
            [],
        ),
    ],
)
def test_the_trainers_word_alone_ends_nothing(
    when: dict[str, object], fields: dict[str, object], codes: list[object]
) -> None:
    """Who does not train at all could say as much; and a single lost scrape must not decide."""
    rule = a_rule(when, **fields)
    found = lint_rule(rule, scrape_interval=SCRAPE)
    assert [(item.code, item.path) for item in found] == codes
