"""Rule files with inline tests, for the suites that run them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tests.ruleengine.worlds import OwnedClock, alertmanager_sink

from gpuwarden.ruleengine.alertmanager import AlertmanagerClient
from gpuwarden.ruleengine.engine import Engine
from gpuwarden.ruleengine.loading import CheckedFiles, check_rule_files
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.rehearsal_runs import RehearsalResult, run_test
from gpuwarden.ruleengine.rulebooks import RuleBook

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.prometheus import Sample
    from gpuwarden.ruleengine.settings import Settings

RULES = """\
version: 1
limits:
  terminate: {per_tick: 1, per_hour: 6, per_user_per_day: 3, halt_above_share_of_running: 10%}
whitelist:
- {match: {user: root}, rules: [idle], reason: service, approved_by: ops,
   expires: 2030-01-01T00:00:00Z}
rules:
- id: idle
  target: job
  match: {framework: torch}
  cold_start: 5m
  ignore_phases: {validate: 1h}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 2m, at_most: 5%, gpus: all}
    - {silent_for: 3m, signals: [cpu, log]}
  for: 5m
  clear_after: 2m
  trust_for: 10m
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 5m, do: notify}
  - {level: severe, after: 20m, do: terminate, notice_delivered_for: 10m, grace: 60s,
     max_work_lost: 1h}
- id: hot
  target: gpu
  cold_start: 0s
  when: {signal: card_temperature, agg: min, window: 2m, above: 80C}
  for: 2m
  stages: [{level: light, after: 0s, do: log}]
- id: many
  target: job
  cold_start: 0s
  when: {promql: "sum by (job_id) (custom_thing)", above: 3}
  for: 1m
  stages: [{level: light, after: 0s, do: log}]
"""


def checked(folder: Path, tests: str, rules: str = RULES) -> CheckedFiles:
    """A rule file with tests, as checked."""
    path = folder / "rules.yaml"
    path.write_text(rules + tests)
    return check_rule_files([path])


def run(folder: Path, tests: str, rules: str = RULES) -> list[RehearsalResult]:
    """The results of a rule file's tests."""
    found = checked(folder, tests, rules)
    assert found.rules is not None, found.render()
    known = found.rules
    return [asyncio.run(run_test(placed, known)) for placed in found.tests]


def failures(results: list[RehearsalResult]) -> list[tuple[int, str, str]]:
    """(expectation, field, what was found) of everything that was not met."""
    return [
        (item.index, item.field, item.actual) for result in results for item in result.mismatches
    ]


class RightClock:
    """A source whose clock is taken to be right."""

    def __init__(self, client: PrometheusClient) -> None:
        self._client = client

    async def instant(self, text: str, time: float) -> list[Sample]:
        """The rows of a query."""
        return await self._client.instant(text, time)

    async def clock_skew(self) -> float:
        """None."""
        return 0.0


@contextlib.asynccontextmanager
async def engine_over(
    url: str, settings: Settings, ledger: Ledger, clock: OwnedClock
) -> AsyncIterator[Engine]:
    """A live engine over the history of a Prometheus; its ledger is closed at the end."""
    with alertmanager_sink(clock) as (sink, _):
        poster = AlertmanagerClient([sink.url], clock)
        async with PrometheusClient(url, clock=clock) as client:
            yield Engine(
                settings.values,
                settings.path("halt"),
                rulebook=RuleBook(settings),
                ledger=ledger,
                source=RightClock(client),
                alertmanager=poster,
                agents=None,
                signer=None,
                clock=clock,
            )
        await poster.aclose()
        ledger.close()
