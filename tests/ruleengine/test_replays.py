"""A replay says what the live engine would have, over a real Prometheus."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from tests.ruleengine.rehearsing import RULES, engine_over
from tests.ruleengine.replaying import (
    Refusing,
    by_rule,
    counted,
    default_rules,
    live_verdicts,
    made,
    plan,
    replayed,
    switched_on,
)
from tests.ruleengine.worlds import OwnedClock

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.ruleengine.histories import history
from gpuwarden.ruleengine.inventories import Expectation, inventory_queries
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.needs import needed_keys
from gpuwarden.ruleengine.prometheus import QueryRefused
from gpuwarden.ruleengine.replay_columns import HistoryClient, Ticks, over_history
from gpuwarden.ruleengine.replay_runs import Plan
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.ruleengine.signals import query
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.ruleengine.histories import History
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.replay_arms import Arm
    from gpuwarden.ruleengine.replay_runs import Replay
    from gpuwarden.ruleengine.rule_tests import RuleTest

JOBS: list[dict[str, Any]] = yaml.safe_load("""
- {job: proc-idle, like: idle, user: ana}
- {job: proc-busy, user: ben, run: {}}
- {job: proc-hog, user: bob, like: hog, run: {}}
- {job: proc-starved, user: bea, like: starved, run: {}}
- {job: proc-late, begins: 10m, like: idle, then: [{at: 21m, log: false}]}
- {job: slurm-1, like: idle, node: "n2:9835", then: [{at: 35m, gone: true}]}
- {job: proc-root, user: root, like: idle}
- {job: proc-old, user: flo, like: idle, age: 20h}
- {job: proc-saved, user: gus, like: idle, age: 20h, run: {saves_every: 10m},
   then: [{at: 40m, like: healthy}]}
- {job: proc-says, user: hal, like: idle, phase: validate, run: {}}
- {job: proc-two, user: ira, gpus: 2, cpu: 0 cores, log: false,
   cards: [{}, {utilization: 0%, temperature: 85C}]}
- {job: proc-share1, like: idle, uuids: [GPU-a], node: "n3:9835"}
- {job: proc-share2, like: idle, uuids: [GPU-a], node: "n3:9835"}
- {job: proc-claim1, run: {id: r1}, node: "n3:9835"}
- {job: proc-claim2, run: {id: r1}, begins: 20m, like: idle, node: "n3:9835"}
""")
OUTAGES = yaml.safe_load("""
- {node: "n2:9835", from: 12m, until: 14m}
- {node: "n3:9835", from: 24m, until: 32m}
""")


def rules_of(folder: Path, text: str = RULES) -> RuleSet:
    """Rules of a file, switched on."""
    path = folder / "rules.yaml"
    path.write_text(text)
    return switched_on(load_rule_files([path]))


def _without_cost(arm: Arm) -> tuple[Any, ...]:
    return arm.incidents, arm.counts, arm.ended, arm.caps, arm.stale, arm.trust


def _plain(arm: Arm) -> tuple[Any, ...]:
    found = [
        (i.rule, i.subject, i.begun, i.closed, [(s.stage, s.at) for s in i.stages], i.end)
        for i in arm.incidents
    ]
    return found, arm.counts, arm.ended, arm.caps, arm.stale, arm.trust


def _compare_with_live(test: RuleTest, rules: RuleSet, refused: str | None = None) -> None:
    def way() -> Refusing | None:
        return None if refused is None else Refusing(refused)

    async def both() -> None:
        async with temporary_prometheus(history(test)) as url:
            result = await replayed(plan(url, test), rules, transport=way())
            live = by_rule(await live_verdicts(url, test, rules, transport=way()))
        assert counted(result, live) == live
        reasons = {reason for row in live.values() for reason in row}
        assert {"YES", "NO", "UNKNOWN", "dark_node", "no_data", "cold_start"} <= reasons
        assert ("query_failed" in reasons) == (refused is not None)

    asyncio.run(both())


def test_verdicts_are_those_of_the_live_queries_through_gaps() -> None:
    """By rule: how often yes, no, and unknown for which reason; the default rules."""
    _compare_with_live(made("40m", JOBS, outages=OUTAGES, tick="4m"), default_rules())


def test_what_the_server_refuses_is_unknown_as_it_is_live() -> None:
    """Values of the same window fail; what is asked of other windows is judged."""
    _compare_with_live(made("40m", JOBS, tick="4m", outages=OUTAGES), default_rules(), "15m")


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_verdicts_are_those_of_the_live_queries_at_every_tick_of_hours() -> None:
    """At the live engine's own pace."""
    _compare_with_live(made("3h", JOBS, outages=OUTAGES, tick="15s"), default_rules())


async def _live_events(folder: Path, url: str, test: RuleTest) -> list[tuple[Any, ...]]:
    """What a live engine writes into its ledger over the same history."""
    (folder / "engine.yaml").write_text(
        "version: 1\nprometheus: {url: http://127.0.0.1:1}\nrules: [rules.yaml]\n"
        f"ledger: ledger.sqlite\ntick: {test.tick:.0f}s\nkill_switch: halt\n"
        f"scrape_interval: {test.interval:.0f}s\n"
    )
    settings, clock = load_settings(folder / "engine.yaml"), OwnedClock(test.start.timestamp())
    ledger = Ledger(settings.path(settings.values.ledger))
    async with engine_over(url, settings, ledger, clock) as engine:
        for _ in range(int(test.length // test.tick) + 1):
            await engine.tick()
            clock.pass_(test.tick)
        return [
            (row["rule"], job["job"], row["kind"], row["time"], dict(row["detail"]).get("stage"))
            for job in test.model_dump()["jobs"]
            for row in ledger.events(job["job"])
        ]


def test_cases_and_stages_are_those_of_the_live_engine(tmp_path: Path) -> None:
    """An engine ticks through the same history, rules as they are written."""
    text = RULES.replace("target: job\n  match", "mode: warn\n  target: job\n  match")
    (tmp_path / "rules.yaml").write_text(text)
    rules = load_rule_files([tmp_path / "rules.yaml"])
    test = made("40m", JOBS, outages=OUTAGES, tick="60s", interval="15s")

    async def both() -> tuple[list[tuple[Any, ...]], Arm]:
        async with temporary_prometheus(history(test)) as url:
            events = await _live_events(tmp_path, url, test)
            return events, (await replayed(plan(url, test), rules)).arms[0]

    events, arm = asyncio.run(both())
    detected = {(r, j, at) for r, j, kind, at, _ in events if kind == "detected"}
    assert {(i.rule, i.subject, i.detected) for i in arm.incidents if i.rule != "hot"} == detected
    stages = {(r, j, str(kind), at, stage) for r, j, kind, at, stage in events if stage}
    assert {
        (i.rule, i.subject, str(s.do), s.at, s.stage)
        for i in arm.incidents
        for s in i.stages
        if i.rule != "hot"
    } == stages
    closed = {(r, j, at) for r, j, kind, at, _ in events if kind == "closed"}
    assert {(i.rule, i.subject, i.closed) for i in arm.incidents if i.closed is not None} == closed
    assert len(detected) > 5
    assert closed
    assert any(stage == "moderate-notify" for *_, stage in stages)


def _changed(made: History, at: float, **labels: str) -> None:
    """From a Unix time on every series of a node has these labels as well."""
    for name in [name for name in made.series if dict(name.labels).get("instance") == "n1:9835"]:
        samples = made.series[name]
        late = {moment: value for moment, value in samples.items() if moment >= at * 1000}
        made.series[name] = {moment: samples[moment] for moment in samples.keys() - late.keys()}
        changed = sorted((dict(name.labels) | labels).items())
        made.series.setdefault(name._replace(labels=tuple(changed)), {}).update(late)


def _lost(made: History, begin: float, end: float) -> None:
    """Between two Unix times nothing at all was scraped: the server was restarted."""
    for name, samples in made.series.items():
        kept = {at: value for at, value in samples.items() if not begin <= at / 1000 < end}
        made.series[name] = kept


def test_a_restarted_server_and_changed_labels_are_judged_as_live(tmp_path: Path) -> None:
    """An exporter that comes back as another pod, and a job that is another user's all at once."""
    text = RULES.replace("target: job\n  match", "mode: warn\n  target: job\n  match")
    (tmp_path / "rules.yaml").write_text(text)
    rules = load_rule_files([tmp_path / "rules.yaml"])
    test = made("45m", JOBS[:8], tick="60s", interval="15s")
    series, begin = history(test), test.start.timestamp()
    _lost(series, begin + 12 * 60, begin + 13.6 * 60)
    _changed(series, begin + 17 * 60, pod="gpuwarden-new")
    _changed(series, begin + 25 * 60, user="zoe")

    async def both() -> tuple[list[tuple[Any, ...]], list[Replay], dict[str, dict[str, int]]]:
        async with temporary_prometheus(series) as url:
            events = await _live_events(tmp_path, url, test)
            results = [
                await replayed(plan(url, test, stretch=stretch), rules) for stretch in (9e4, 420.0)
            ]
            return events, results, by_rule(await live_verdicts(url, test, rules))

    events, results, live = asyncio.run(both())
    stages = {(r, j, str(kind), at, stage) for r, j, kind, at, stage in events if stage}
    closed = {(r, j, at) for r, j, kind, at, _ in events if kind == "closed"}
    assert len({job for _, job, *_ in stages}) > 3
    for result in results:
        assert counted(result, live) == live
        found = [item for item in result.arms[0].incidents if item.rule != "hot"]
        assert {
            (i.rule, i.subject, str(s.do), s.at, s.stage) for i in found for s in i.stages
        } == stages
        assert {(i.rule, i.subject, i.closed) for i in found if i.closed is not None} == closed


def test_neither_the_cuts_nor_the_order_of_jobs_change_anything(tmp_path: Path) -> None:
    """Stretches of 5 minutes, 13 minutes or all; the same jobs the other way round."""
    rules = rules_of(tmp_path)
    forward = made("45m", JOBS, outages=OUTAGES, interval="15s")
    backward = forward.model_copy(update={"jobs": forward.jobs[::-1]})

    async def each() -> list[Arm]:
        found = []
        async with temporary_prometheus(history(forward)) as url:
            for stretch in (86400.0, 300.0, 780.0):
                result = await replayed(plan(url, forward, stretch=stretch), rules)
                found.append(result.arms[0])
        async with temporary_prometheus(history(backward)) as url:
            found.append((await replayed(plan(url, backward), rules)).arms[0])
        return found

    first, *others, turned = asyncio.run(each())
    assert set(first.ended) == {"proc-saved", "proc-idle", "proc-late", "proc-says"}
    for other in others:
        assert _without_cost(other) == _without_cost(first)
    # Cards are counted in the order of jobs, so that their numbers in the evidence differ.
    assert _plain(turned) == _plain(first)


def test_what_an_end_would_have_freed_lost_and_spoiled_is_told(tmp_path: Path) -> None:
    """One job stays idle until it is gone, one goes on working, one is ended by its platform."""
    jobs = yaml.safe_load("""
- {job: proc-stays, user: ana, like: idle, gpus: 2, age: 5h, run: {saves_every: 10m},
   then: [{at: 100m, gone: true}]}
- {job: proc-returns, user: ben, like: idle, age: 5h, run: {saves_every: 10m},
   then: [{at: 90m, like: healthy}]}
- {job: slurm-1, user: cyd, like: idle}
- {job: proc-unsaved, user: dan, like: idle, age: 5h}
""")
    test = made("150m", jobs, interval="15s")
    rules = rules_of(tmp_path)

    async def run() -> Any:
        async with temporary_prometheus(history(test)) as url:
            return await replayed(plan(url, test), rules)

    arm = asyncio.run(run()).arms[0]
    begin = test.start.timestamp()
    ends = {item.subject: item.end for item in arm.incidents if item.end is not None}
    assert set(ends) == {"proc-stays", "proc-returns", "slurm-1"}
    stays, returns = ends["proc-stays"], ends["proc-returns"]
    # Long warm when it begins: 5 minutes of silence are known at once, 5m for, 20m until the end.
    assert stays is not None
    assert returns is not None
    # Both are due at once, and one end a tick is allowed.
    assert (stays.at - begin, stays.gpus) == (28 * 60, 2)
    assert stays.over == pytest.approx(begin + 100 * 60, abs=90)
    assert stays.freed_gpu_seconds == pytest.approx(2 * (100 - 28) * 60, abs=200)
    assert stays.lost_gpu_seconds == pytest.approx(2 * 8 * 60, abs=10)
    assert stays.active_again is None
    assert returns.at - begin == 27 * 60
    assert returns.active_again == pytest.approx(begin + 91 * 60, abs=90)
    assert returns.active_by == "steps"
    held = {item.subject: set(item.held) for item in arm.incidents if item.due and not item.end}
    assert held["proc-unsaved"] >= {"work_lost"}


def test_limits_hold_as_live_and_it_is_told_when_and_how_many(tmp_path: Path) -> None:
    """One per tick, two per hour, one of a user a day."""
    text = RULES.replace("per_hour: 6, per_user_per_day: 3", "per_hour: 2, per_user_per_day: 1")
    jobs = [
        {"job": f"proc-{n}", "user": user, "like": "idle", "run": {"saves_every": "10m"}}
        for n, user in enumerate(("ana", "ana", "ben", "cyd"))
    ]
    test = made("100m", jobs, interval="15s")

    async def run() -> Any:
        async with temporary_prometheus(history(test)) as url:
            return await replayed(plan(url, test), rules_of(tmp_path, text))

    arm = asyncio.run(run()).arms[0]
    first, second, third = sorted(arm.ended.values())
    assert 60 <= second - first < 3600
    assert third - first >= 3600
    caps = {
        reason: max(count for r, _, count in arm.caps if r == reason) for reason, *_ in arm.caps
    }
    assert caps == {"limit_per_tick": 3, "limit_per_hour": 2, "limit_per_user_per_day": 1} | (
        {"cool_down": 1} if "cool_down" in caps else {}
    )


def test_a_job_that_only_stopped_data_would_have_ended_is_named(tmp_path: Path) -> None:
    """Its node is dark when the deadline comes, and the job is at work again behind that."""
    jobs = yaml.safe_load("""
- {job: proc-dark, like: idle, age: 5h, run: {saves_every: 10m}, then: [{at: 26m, like: healthy}]}
""")
    outage = [{"node": "n1:9835", "from": "24m", "until": "34m"}]
    test = made("60m", jobs, outages=outage)

    async def run() -> Any:
        async with temporary_prometheus(history(test)) as url:
            return await replayed(plan(url, test), rules_of(tmp_path))

    arm = asyncio.run(run()).arms[0]
    assert arm.ended == {}
    assert [(item.rule, item.subject) for item in arm.stale] == [("idle", "proc-dark")]
    assert 24 * 60 < arm.stale[0].at - test.start.timestamp() < 34 * 60


# -- the server


def test_no_gate_stays_that_would_be_dear_over_history() -> None:
    """`timestamp()` remains for what is a time itself."""
    keys = needed_keys(default_rules())
    texts = {key.signal: query(key, scrape_interval=5) for key in keys if not key.promql}
    texts |= inventory_queries(5, Expectation())
    assert "timestamp(gpuwarden" in texts.pop("scraped")
    for text in texts.values():
        cheap = over_history(text, closed=True)
        assert "timestamp(" not in cheap
        assert cheap.count("present_over_time") == text.count("timestamp(")


@pytest.mark.parametrize(
    ("live", "closed", "cheap"),
    [
        ("x and timestamp(x) >= time() - 10", True, "x and present_over_time(x[10s])"),
        (
            "x == 1 and timestamp(x) >= time() - 7.5",
            False,
            "x == 1 and present_over_time(x[7s501ms])",
        ),
        (
            'max(y and timestamp(x{a="b"}) >= time() - 10)',
            True,
            'max(y and (present_over_time(x{a="b"}[10s]) and x{a="b"}))',
        ),
        ("timestamp(x offset 5m) >= time() - 10", True, None),
        ("timestamp(rate(x[5m])) >= time() - 10", True, None),
    ],
)
def test_a_gate_is_changed_only_where_that_means_the_same(
    live: str, closed: bool, cheap: str | None
) -> None:
    """What is more than a series and a number stays as it is written."""
    assert over_history(live, closed=closed) == (cheap or live)


def test_an_expression_that_is_refused_at_some_moments_fails_at_those_alone(
    tmp_path: Path,
) -> None:
    """Two series that match one, for three minutes."""
    text = RULES.replace(
        '"sum by (job_id) (custom_thing)"',
        '"custom_thing * on (job_id) group_left () custom_other"',
    )
    series = [
        {"series": 'custom_thing{job_id="proc-1"}', "values": "2x239"},
        {"series": 'custom_other{job_id="proc-1",a="1"}', "values": "2x239"},
        {"series": 'custom_other{job_id="proc-1",a="2"}', "values": "_x95 2x35 stale"},
    ]
    test = made("20m", [{"job": "proc-1"}], series=series)
    rules = rules_of(tmp_path, text)

    async def run() -> Any:
        async with temporary_prometheus(history(test)) as url:
            where = plan(url, test)
            result = await replayed(where, rules)
            async with httpx.AsyncClient(trust_env=False) as client:
                source = HistoryClient(url, client)
                ticks = Ticks(where.begin, 60, 21)
                with pytest.raises(QueryRefused, match="duplicate series"):
                    await source.columns("custom_thing * on (job_id) custom_other", ticks)
            return result

    counts = asyncio.run(run()).arms[0].counts["many"]
    assert (counts.judged, counts.yes, dict(counts.reasons)) == (21, 18, {"query_failed": 3})


def test_how_often_nodes_were_scraped_is_seen_through_gaps(tmp_path: Path) -> None:
    """Whatever was given, and although a node was dark in the end."""
    outage = [{"node": "n1:9835", "from": "52m", "until": "57m"}]
    test = made("60m", [{"job": "proc-1"}], interval="15s", outages=outage)

    async def run() -> list[float | None]:
        async with temporary_prometheus(history(test)) as url:
            return [
                (
                    await replayed(plan(url, test, scrape_interval=given), rules_of(tmp_path))
                ).seen_interval
                for given in (5.0, 15.0)
            ]

    assert asyncio.run(run()) == [15.0, 15.0]


def test_a_server_without_the_history_or_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Nothing is no result."""
    test = made("20m", [{"job": "proc-1"}])
    rules = rules_of(tmp_path)

    async def run() -> None:
        async with temporary_prometheus(history(test)) as url:
            where = plan(url, test)
            before = dataclasses.replace(where, begin=where.begin - 9e6, end=where.begin - 8.9e6)
            with pytest.raises(InvalidInput, match="has no series of gpuwarden"):
                await replayed(dataclasses.replace(before, step=900), rules)
        with pytest.raises(ServiceUnavailable, match="Prometheus at"):
            await replayed(Plan("http://127.0.0.1:1", 0, 60), rules)

    asyncio.run(run())
