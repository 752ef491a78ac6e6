"""`gpuwarden doctor engine`: what Prometheus knows of the nodes, and of gpuwarden itself."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.catalogue import SCRAPE_JOB
from gpuwarden.errors import GpuwardenError, ServiceUnavailable
from gpuwarden.findings import CannotCheck, Check
from gpuwarden.node_api import REGISTER_PATH
from gpuwarden.ruleengine import doctor_findings as known
from gpuwarden.ruleengine.doctor_centres import SECONDS, finite
from gpuwarden.ruleengine.expressions import parsed
from gpuwarden.ruleengine.prometheus import PrometheusClient
from gpuwarden.ruleengine.prometheus_settings import client_of
from gpuwarden.yaml_files import load_located

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.findings import Finding
    from gpuwarden.ruleengine.doctor_centres import Centre

SHIPPED_RULES: Final = Path(__file__).resolve().parent / "alerting_rules"
"""Recording and health rules of this version."""
ENGINE_JOB: Final = f"{SCRAPE_JOB}-engine"
SKEW_WARNING, SKEW_FAILED = 2.0, 5.0
"""Seconds between two clocks; beyond the second nothing is ended."""
_FRESH_SECONDS = 15.0
_WINDOW = 120.0
_OUR_LABELS = "job_id|uuid|gpu|user|run_id|team|phase"
_NEEDED = ("gpu_info", "gpuwarden_collector_success")
_NAMED = 20
"""Nodes of the same trouble that are told one by one."""


def prometheus_checks(centre: Centre) -> list[Check]:
    """Every check that asks Prometheus."""
    return [
        Check(known.PROMETHEUS, lambda: _answer(centre), 15.0),
        Check(known.NODES, lambda: _nodes(centre), 20.0),
        Check(known.INTERVAL, lambda: _interval(centre), 15.0),
        Check(known.TARGETS, lambda: _targets(centre), 15.0),
        Check(known.LABELS, lambda: _labels(centre), 15.0),
        Check(known.METRICS, lambda: _metrics(centre), 20.0),
        Check(known.RECORDED, lambda: _recorded(centre), 15.0),
        Check(known.WATCHED, lambda: _watched(centre), 15.0),
        Check(known.CLOCKS, lambda: _clocks(centre), 15.0),
    ]


def _answer(centre: Centre) -> Iterator[Finding]:
    for url in centre.prometheus:
        try:
            centre.rows("vector(1)", url)
        except CannotCheck as error:
            yield known.PROMETHEUS.failed(str(error), url)
            continue
        try:
            version = centre.prometheus_api(url, "/api/v1/status/buildinfo")["version"]
            yield known.PROMETHEUS.ok(f"version {version}", url)
        except (CannotCheck, KeyError, TypeError):
            yield known.PROMETHEUS.ok("answers queries", url)


def _nodes(centre: Centre) -> Iterator[Finding]:
    lit = {
        row.labels.get("instance", "")
        for row in finite(
            centre.rows(
                f"timestamp(gpuwarden_snapshot_timestamp_seconds) >= time() - {_FRESH_SECONDS:g}"
            )
        )
    }
    scraped = {
        row.labels.get("instance", ""): row.value
        for row in centre.rows(f'up{{job="{SCRAPE_JOB}"}}')
    }
    expected, number = _expected(centre)
    for name in sorted(expected | scraped.keys()):
        if name in lit:
            continue
        if name not in scraped:
            yield known.NODES.failed("expected, and Prometheus has no target for it", name)
        elif scraped[name] == 0:
            yield known.NODES.failed("its scrape fails", name)
        else:
            why = "scraped, but without a current snapshot: see gpuwarden_nvml_up on its page"
            yield known.NODES.failed(why, name)
    if number is not None and len(lit) < number and not expected - lit:
        yield known.NODES.failed(f"{len(lit)} nodes are lit, and {number} expected")
    if not lit and not scraped and not expected:
        yield known.NODES.failed("there is no node at all: does Prometheus have targets?")
    yield known.NODES.ok(f"{len(lit)} nodes are lit")


def _expected(centre: Centre) -> tuple[set[str], int | None]:
    """Names of the nodes that should be, as far as they have some, and how many."""
    values = centre.settings.values
    names = set(values.nodes.names) if values.nodes else set()
    number = values.expected_nodes
    try:
        document = centre.engine(REGISTER_PATH)
    except CannotCheck:
        return names, number
    names |= {node["address"] for node in document["nodes"] if node["expected"]}
    return names, number if number is not None else document["expected"]


def _interval(centre: Centre) -> Iterator[Finding]:
    wanted = centre.settings.values.scrape_interval
    rows = finite(
        centre.rows(
            f'count_over_time(up{{job="{SCRAPE_JOB}"}}[{_WINDOW:g}s]) '
            # A target that has just come has not had its samples yet.
            f'and on (instance) up{{job="{SCRAPE_JOB}"}} offset {_WINDOW:g}s'
        )
    )
    if not rows:
        yield known.INTERVAL.unchecked("no node was scraped for two minutes yet", needed=False)
        return
    wrong = 0
    for row in rows:
        found = _WINDOW / max(1.0, row.value)
        if 0.75 * wanted <= found <= 1.35 * wanted:
            continue
        wrong += 1
        if wrong <= _NAMED:
            text = f"scraped every {found:.3g} s; engine.yaml says {wanted:g} s"
            yield known.INTERVAL.failed(text, row.labels.get("instance", ""))
    if not wrong:
        yield known.INTERVAL.ok(f"{len(rows)} nodes, every {wanted:g} s")


def _targets(centre: Centre) -> Iterator[Finding]:
    # Replicas of a shard hold the same: only what one of them has twice is scraped twice.
    rows = finite(
        centre.rows(
            "count by (instance) (gpuwarden_snapshot_timestamp_seconds) > 1 "
            "or count by (instance) (count by (instance, uuid) (gpu_info) > 1) > 0"
        )
    )
    for row in rows[:_NAMED]:
        yield known.TARGETS.failed("its series are there twice", row.labels.get("instance", ""))
    if len(rows) > _NAMED:
        yield known.TARGETS.failed(f"and {len(rows) - _NAMED} more")
    cards = finite(centre.rows("count by (uuid) (count by (uuid, instance) (gpu_info)) > 1"))
    for row in cards[:_NAMED]:
        text = "the same card is told of by two targets: one exporter under two addresses?"
        yield known.TARGETS.failed(text, row.labels.get("uuid", ""))
    if not rows and not cards:
        yield known.TARGETS.ok("no node and no card is there twice")


def _labels(centre: Centre) -> Iterator[Finding]:
    found = False
    for row in finite(
        centre.rows(
            f'count by (instance) ({{job="{SCRAPE_JOB}",exported_instance!=""}} '
            f'or {{job="{SCRAPE_JOB}",exported_job!=""}})'
        )
    )[:_NAMED]:
        found = True
        text = "has exported_job or exported_instance: something between exporter and Prometheus"
        yield known.LABELS.failed(f"{text} adds labels", row.labels.get("instance", ""))
    for name in _OUR_LABELS.split("|"):
        rows = finite(centre.rows(f'count({{__name__=~"gpu_.+|yolo_.+",exported_{name}!=""}})'))
        if rows:
            found = True
            text = f"exported_{name} is there: a target label or external label is called {name}"
            yield known.LABELS.failed(text)
    if not found:
        yield known.LABELS.ok("none is renamed")


def _metrics(centre: Centre) -> Iterator[Finding]:
    lit = finite(centre.rows("count by (instance) (gpuwarden_snapshot_timestamp_seconds)"))
    missing = 0
    for name in _NEEDED:
        have = {row.labels.get("instance") for row in centre.rows(f"count by (instance) ({name})")}
        for row in lit:
            instance = row.labels.get("instance", "")
            if instance not in have:
                missing += 1
                yield known.METRICS.failed(f"{name} is missing", instance)
    for row in finite(centre.rows("gpuwarden_collector_success == 0"))[: 5 * _NAMED]:
        missing += 1
        text = f"the collector {row.labels.get('collector', '')} fails"
        yield known.METRICS.warning(text, row.labels.get("instance", ""))
    if not lit:
        raise CannotCheck("no node has a snapshot")
    if not missing:
        yield known.METRICS.ok(f"{len(lit)} nodes tell of their cards")


# ---------------------------------------------------------------------------------------------
# Rules of Prometheus


def _recorded(centre: Centre) -> Iterator[Finding]:
    shipped = shipped_rules(SHIPPED_RULES)
    if not shipped:
        raise CannotCheck("this installation comes without alerting/rules", needed=False)
    for url in centre.prometheus:
        try:
            data = centre.prometheus_api(url, "/api/v1/rules")
            loaded = {
                (rule["name"], written(rule["query"])): rule
                for group in data["groups"]
                for rule in group["rules"]
            }
        except (CannotCheck, KeyError, TypeError) as error:
            text = f"this server does not tell its rules ({error})"
            yield known.RECORDED.unchecked(text, url, needed=False)
            continue
        yield from _compared(url, shipped, loaded)


def _compared(
    url: str, shipped: set[tuple[str, str]], loaded: dict[tuple[str, str], Any]
) -> Iterator[Finding]:
    names = {name for name, _ in loaded}
    missing = sorted({name for name, _ in shipped} - names)
    other = sorted({name for name, _ in shipped - loaded.keys()} & names)
    failing = sorted(
        name
        for (name, query), rule in loaded.items()
        if (name, query) in shipped and rule.get("health") == "err"
    )
    for texts, what in (
        (missing, "not loaded"),
        (other, "loaded with another expression: of another version, or changed here"),
        (failing, "cannot be evaluated"),
    ):
        if texts:
            listed = ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if texts[5:] else "")
            make = known.RECORDED.warning if texts is other else known.RECORDED.failed
            yield make(f"{len(texts)} {what}: {listed}", url)
    if not missing and not other and not failing:
        yield known.RECORDED.ok(f"{len(shipped)} rules of this version", url)


def shipped_rules(folder: Path) -> set[tuple[str, str]]:
    """Name and expression of every rule in a folder of rule files."""
    found = set()
    for path in sorted(folder.glob("*.yml")):
        document = load_located(path)
        for group in (document.root.data() if document.root else {}).get("groups", []):
            for rule in group.get("rules", []):
                name = rule.get("record") or rule.get("alert")
                found.add((name, written(str(rule["expr"]))))
    return found


def written(query: str) -> str:
    """An expression without what its author's hand adds: spaces, quotes, order of matchers."""
    try:
        text = parsed(query).prettify()
    except (ValueError, AttributeError):
        text = query
    return re.sub(r"\s+", "", text)


# ---------------------------------------------------------------------------------------------
# The engine as a target, and clocks


def _watched(centre: Centre) -> Iterator[Finding]:
    rows = centre.rows(f'up{{job="{ENGINE_JOB}"}}')
    if not rows:
        yield known.WATCHED.failed(f"there is no target of the job {ENGINE_JOB}")
    for row in rows:
        name = row.labels.get("instance", "")
        if row.value == 1:
            yield known.WATCHED.ok("scraped", name)
        else:
            yield known.WATCHED.failed("its scrape fails", name)


def _clocks(centre: Centre) -> Iterator[Finding]:
    for url in centre.prometheus:
        try:
            skew = _skew(centre, url)
        except GpuwardenError as error:
            yield known.CLOCKS.unchecked(str(error), url)
            continue
        yield _clock(abs(skew), f"{abs(skew):.1f} s from this machine's clock", url)
    age = "timestamp(gpuwarden_snapshot_timestamp_seconds) - gpuwarden_snapshot_timestamp_seconds"
    rows = finite(centre.rows(f"{age} > {SKEW_FAILED + 5:g} or {age} < -{SKEW_WARNING:g}"))
    for row in rows[:_NAMED]:
        name = row.labels.get("instance", "")
        text = f"its snapshots are {abs(row.value):.1f} s"
        way = "old when they are scraped: its clock is behind" if row.value > 0 else "in the future"
        yield known.CLOCKS.failed(f"{text} {way}", name)
    if not rows:
        yield known.CLOCKS.ok("no node's snapshots are of another time")


def _clock(skew: float, text: str, subject: str) -> Finding:
    if skew > SKEW_FAILED:
        return known.CLOCKS.failed(text, subject)
    return (known.CLOCKS.warning if skew > SKEW_WARNING else known.CLOCKS.ok)(text, subject)


def _skew(centre: Centre, url: str) -> float:
    async def story() -> float:
        values = centre.settings.values.prometheus
        async with client_of(values, centre.settings.path) as client:
            return await PrometheusClient(url, timeout=SECONDS, client=client).clock_skew()

    try:
        return asyncio.run(story())
    except ValueError as error:
        raise ServiceUnavailable(str(error)) from error
