"""Public reports of old, missing and partial data taken for the truth, by kind."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import RULES, World, running
from tests.ruleengine.fleets import END, History
from tests.ruleengine.test_chaos_prometheus import Switched, fleet_server
from tests.servers import Server, backfill, prometheus

from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.verdicts import SignalKey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ruleengine.worlds import Answer

SCRAPE = 15
KEYS = (
    SignalKey("gpu_utilization", "max", samples=3),
    SignalKey("gpu_utilization", "avg", 300),
    SignalKey("gpu_utilization", "last"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Ten minutes of a node that is scraped every 15 s, the last time at END."""
    history = History(scrape=SCRAPE)
    history.node("n1:9835")
    history.card("GPU-1")
    history.job("proc-1", {"GPU-1": 0.0})
    storage = tmp_path_factory.mktemp("aged") / "tsdb"
    backfill(history.text(), storage)
    with prometheus("global: {}\n", storage) as running:
        yield running


@pytest.mark.parametrize("key", KEYS[1:], ids=lambda key: key.agg)
@pytest.mark.parametrize(("age", "known"), [(0, True), (29, True), (31, False), (120, False)])
def test_a_value_older_than_two_scrapes_is_not_known(
    server: Server, key: SignalKey, age: int, known: bool
) -> None:
    """T24: 29 s is usable at 15 s scrapes, 31 s is not, although Prometheus serves it for 5 min."""
    rows = server.query(signals.query(key, scrape_interval=SCRAPE), at=END + age)
    assert bool(rows) is known
    assert server.query('gpu_job_utilization_ratio{job_id="proc-1"}', at=END + age)


def test_three_samples_are_the_last_three_scrapes(server: Server) -> None:
    """T24: where the last scrape failed there are not three of them."""
    for age, known in ((0, True), (6, True), (29, False), (31, False)):
        rows = server.query(signals.query(KEYS[0], scrape_interval=SCRAPE), at=END + age)
        assert bool(rows) is known, age


@pytest.mark.parametrize("late", [0.0, 0.001, 7.5, 14.999])
def test_a_window_of_three_samples_is_one_whatever_the_moment(server: Server, late: float) -> None:
    """T23: between two scrapes, and exactly at one, the last three samples are there."""
    rows = server.query(signals.query(KEYS[0], scrape_interval=SCRAPE), at=END - 60 + late)
    assert len(rows) == 1


def test_after_a_restart_of_prometheus_old_values_are_not_new(tmp_path: Path) -> None:
    """T25: killed, and back without its node: it serves the last value as if it were now."""
    scrape = (
        "scrape_configs: [{job_name: self, scrape_interval: 1s, static_configs: [{targets: []}]}]\n"
    )
    now = time.time()
    history = History(scrape=5)
    history.job("proc-1", {"GPU-1": 0.0})
    storage = tmp_path / "tsdb"
    backfill(history.text(), storage)
    with prometheus(scrape, storage) as server:
        server.kill()
        server.start()
        raw = 'gpu_job_utilization_ratio{job_id="proc-1"}'
        assert server.query(raw, at=END + 30)
        for key in KEYS:
            assert server.query(signals.query(key, scrape_interval=5), at=END + 30) == []
        assert server.query(raw, at=now) == []


CUSTOM = (
    RULES.replace("WHITELIST", "").replace("MODE", "enforce")
    + """
- id: custom
  target: job
  match: {}
  cold_start: 60s
  when:
    all:
    - {promql: "sum by (job_id) (site_idle_score)", above: 3}
    - {silent_for: 5m, signals: [cpu]}
  for: 1m
  stages:
  - {level: light, after: 0s, do: log}
"""
)
FAILURES: dict[str, Answer] = {
    "time out": (
        503,
        b'{"status": "error", "errorType": "timeout", "error": "query timed out"}',
    ),
    "malformed": (200, b'{"status": "success", "data": {"resultType": "vector", "result": [{}]}}'),
    "refused": (422, b'{"status": "error", "errorType": "execution", "error": "many-to-many"}'),
    "nonsense": (200, b"OK"),
    "a warning": (
        200,
        b'{"status": "success", "warnings": ["x"], "data": {"resultType": "vector", "result": []}}',
    ),
}


def test_an_expression_that_times_out_ends_nobody_and_is_counted(servers: World) -> None:
    """T16: a site's own signal that is late, malformed or refused is UNKNOWN, for its rule only."""
    (servers.folder / "rules.yaml").write_text(CUSTOM)
    servers.source = switch = Switched(servers.fleet)
    counter = 'gpuwarden_unknown_total{reason="query_failed",rule="custom"}'

    async def story() -> None:
        async with running(servers):
            await servers.until(CaseState.NOTIFIED)
            with fleet_server(servers) as (state, sink):
                async with PrometheusClient(sink.url, clock=servers.clock) as client:
                    switch.source = client
                    before = servers.told().get(counter, 0.0)
                    for number, (name, failure) in enumerate(FAILURES.items(), start=1):

                        def spoil(query: str, body: bytes, bad: Answer = failure) -> Answer:
                            return bad if "site_idle_score" in query else (200, body)

                        state.spoil = spoil
                        await servers.tick()
                        assert servers.told()[counter] == before + number, name
                        assert servers.engine.cases.get("custom", "proc-1") is None
            assert servers.engine.ticks.outcomes.get("discarded", 0) == 0
            assert servers.state() is CaseState.NOTIFIED

    asyncio.run(story())
