"""Histories and replays, for the suites about `rules replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httpx

from gpuwarden.ruleengine import cases, evaluation
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.rehearsals import enforced
from gpuwarden.ruleengine.replay_runs import Plan, replay
from gpuwarden.ruleengine.rule_tests import RuleTest
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.replay_runs import Replay

DEFAULTS = Path(evaluation.__file__).with_name("rules")
START = "2026-03-02T08:00:00Z"


def switched_on(rules: RuleSet) -> RuleSet:
    """Every rule as if its mode were enforce."""
    return enforced(rules, frozenset(rule.id for rule in rules.rules))


def default_rules() -> RuleSet:
    """What comes with gpuwarden, switched on."""
    return switched_on(load_rule_files(sorted(DEFAULTS.glob("*.yaml"))))


def made(length: str, jobs: list[dict[str, Any]], **more: Any) -> RuleTest:
    """A history of some jobs."""
    last = {"at": length, "rule": "any", "job": "any", "verdict": "none"}
    return RuleTest.model_validate(
        {"name": "history", "start": START, "jobs": jobs, "expect": [last], **more}
    )


def plan(url: str, test: RuleTest, **more: Any) -> Plan:
    """A replay of a whole test."""
    begin = test.start.timestamp()
    more = {"step": test.tick, "scrape_interval": test.interval} | more
    return Plan(url, begin, begin + test.length, **more)


class Refusing(httpx.AsyncHTTPTransport):
    """The way to a Prometheus through a Mimir, which refuses windows longer than it allows.

    Args:
        window: as PromQL writes the one that is refused.
    """

    def __init__(self, window: str) -> None:
        super().__init__()
        self._window = f"[{window}]"

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Refuse, or pass on."""
        if self._window in unquote((await request.aread()).decode()):
            said = {"status": "error", "errorType": "execution", "error": "window too long"}
            return httpx.Response(422, json=said)
        return await super().handle_async_request(request)


async def replayed(
    where: Plan, *sets: RuleSet, transport: httpx.AsyncBaseTransport | None = None
) -> Replay:
    """The replay of rule sets."""
    async with httpx.AsyncClient(timeout=60, trust_env=False, transport=transport) as client:
        return await replay(where, [(f"set {n}", rules) for n, rules in enumerate(sets)], client)


Told = dict[tuple[str, str], dict[str, Any]]


async def live_verdicts(
    url: str,
    test: RuleTest,
    rules: RuleSet,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Told:
    """What the live queries and evaluation say, tick by tick: counts by rule and reason."""
    begin = test.start.timestamp()
    told: Told = {}
    trust: dict[tuple[str, str], float] = {}
    async with httpx.AsyncClient(timeout=60, trust_env=False, transport=transport) as client:
        source = PrometheusClient(url, client=client)
        for number in range(int(test.length // test.tick) + 1):
            facts = await gather(
                source,
                rules,
                time=begin + number * test.tick,
                scrape_interval=test.interval,
                teams={},
            )
            for rule in rules.rules:
                for job in evaluation.subjects(rule, facts).values():
                    if evaluation.applies(rule, job) is Truth.NO:
                        continue
                    with_word, without = (
                        evaluation.evaluate(
                            rule,
                            job,
                            facts,
                            profiles=rules.profiles,
                            whitelist=rules.whitelist,
                            now=facts.time,
                            trusted=trusted,
                        )
                        for trusted in (True, False)
                    )
                    verdict = with_word
                    if with_word.self_report_only:
                        pair = (rule.id, job.job_id)
                        spent = trust.get(pair, 0.0)
                        verdict = cases.budgeted(
                            with_word, without, spent=spent, trust_for=rule.trust_for
                        )
                        trust[pair] = spent + (test.tick if number else 0.0)
                    truth = verdict.truth
                    row = told.setdefault((rule.id, job.job_id), {"judged": 0})
                    row["judged"] += 1
                    row[truth.name] = row.get(truth.name, 0) + 1
                    if truth is Truth.UNKNOWN:
                        for reason in verdict.unknown_reasons or ("unknown",):
                            row[reason] = row.get(reason, 0) + 1
    return told


def by_rule(told: Told) -> dict[str, dict[str, int]]:
    """Added up over the jobs of each rule."""
    found: dict[str, dict[str, int]] = {}
    for (rule, _), row in told.items():
        into = found.setdefault(rule, {})
        for name, count in row.items():
            into[name] = into.get(name, 0) + count
    return found


def counted(result: Replay, rules: Iterable[str]) -> dict[str, dict[str, int]]:
    """The same, as a replay counted it."""
    found = {}
    for rule in rules:
        counts = result.arms[0].counts[rule]
        row = {"judged": counts.judged, "YES": counts.yes, "UNKNOWN": counts.unknown}
        row["NO"] = counts.judged - counts.yes - counts.unknown
        found[rule] = {k: v for k, v in (row | dict(counts.reasons)).items() if v}
    return found
