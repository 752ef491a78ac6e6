"""Gathering: what one tick knows of the fleet, from queries that all carry the same time.

One query for each distinct signal, window and aggregate, whatever the number of cards and rules,
and a fixed number of inventory queries. Nothing is decided here; what is missing stays missing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gpuwarden.catalogue import SCRAPE_JOB
from gpuwarden.errors import GpuwardenError, TemporaryError
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.assemblies import Assembly, Expectation
from gpuwarden.ruleengine.conditions import (
    NoProgress,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    leaves,
)
from gpuwarden.ruleengine.prometheus import QueryRefused
from gpuwarden.ruleengine.verdicts import SignalKey

__all__ = [
    "Expectation",
    "assemble",
    "condition_keys",
    "gather",
    "inventory_queries",
    "needed_keys",
    "value_queries",
]

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.prometheus import Sample, Source
    from gpuwarden.ruleengine.verdicts import FleetFacts

HELD_FOR = "1h"
"""For how long a dark node's jobs are still known by what they held."""
CAUSE_WINDOW_SECONDS = 300.0
"""The longest window that is asked only so that causes can be told."""
SHARED_CAUSE_SECONDS = 900.0
"""The longest window of a rule that tells causes as well, in place of one of their own."""
PARALLEL_QUERIES = 8

_CAUSE_SIGNALS = (
    "gpu_utilization",
    "gpu_memory",
    "throughput",
    "data_wait_share",
    "job_cpu_cores",
    "job_io_wait",
    "job_loader_workers",
)

# Without the gate, Prometheus serves for five minutes what vanished while it was down.
_STILL = "timestamp({metric}) >= time() - {fresh}"
_FRESH = "{metric} and " + _STILL
_LIT = "timestamp(gpuwarden_snapshot_timestamp_seconds) >= time() - {fresh}"
_REMEMBERED = (
    _STILL + " or last_over_time({metric}[" + HELD_FOR + "]) unless on (instance) (" + _LIT + ")"
)


def needed_keys(rules: RuleSet) -> set[SignalKey]:
    """Every query that the rules need, and those that tell causes where none of theirs does."""
    keys: set[SignalKey] = set()
    for rule in rules.rules:
        for condition in rule.conditions:
            keys |= set(condition_keys(condition))
        if rule.only_if_waiting is not None and rule.only_if_waiting.promql is not None:
            keys.add(rule.only_if_waiting.key)
    windows = [key.window_seconds for key in keys if key.window_seconds]
    # Rules with short windows would be explained too late by a long one.
    window = min(CAUSE_WINDOW_SECONDS, max(windows, default=CAUSE_WINDOW_SECONDS))
    asked = {
        key.signal
        for key in keys
        if key.agg == "avg" and 0 < key.window_seconds <= SHARED_CAUSE_SECONDS
    }
    return keys | {SignalKey(name, "avg", window) for name in _CAUSE_SIGNALS if name not in asked}


def condition_keys(condition: Condition) -> Iterable[SignalKey]:
    """The queries behind a condition."""
    for leaf in leaves(condition):
        match leaf:
            case Signal() | NoProgress() | Promql() | OverBudget():
                yield leaf.key
            case ProfileCondition():
                yield from leaf.keys
            case _:
                pass  # silence is read from the inventory


async def gather(
    source: Source,
    rules: RuleSet,
    *,
    time: float,
    scrape_interval: float,
    expected_nodes: Expectation | int | None = None,
    teams: Mapping[str, str] | None = None,
) -> FleetFacts:
    """Gather the facts of one tick.

    Args:
        source: Prometheus, or a replay of it.
        rules: what will be judged.
        time: Unix time of every query.
        scrape_interval: of the nodes, in seconds.
        expected_nodes: which nodes should be lit, or how many; counted from `up` where not given.
        teams: user -> team, of the operator's directory.

    Returns:
        The facts; a custom expression that fails is named in `failed`, and its values are absent.

    Raises:
        ServiceUnavailable: the tick knows too little to judge anything; nothing should change.
        QueryRefused: a query of our own is refused, say because its series are ambiguous.
    """
    if not isinstance(expected_nodes, Expectation):
        expected_nodes = Expectation(number=expected_nodes)
    assembly = Assembly(
        time=time, expected=expected_nodes, teams=teams or {}, scrape_interval=scrape_interval
    )
    asking = _Asking(source, time, assembly)
    values = value_queries(rules, scrape_interval)
    try:
        async with asyncio.TaskGroup() as group:
            skew = group.create_task(source.clock_skew())
            for name, query in inventory_queries(scrape_interval, expected_nodes).items():
                group.create_task(asking.inventory(name, query))
        assembly.lay_out(key for keys in values.values() for key in keys)
        async with asyncio.TaskGroup() as group:
            for query, keys in values.items():
                group.create_task(asking.values(query, keys))
    except BaseExceptionGroup as errors:
        # Callers know our tree, not groups: one server fails for one reason, many times over.
        ours = errors.subgroup(GpuwardenError)
        if ours is None:
            raise
        raise ours.exceptions[0] from errors
    return assembly.facts(skew.result())


class _Asking:
    """Asks a few queries at a time, and hands each answer on before it asks for more."""

    def __init__(self, source: Source, time: float, assembly: Assembly) -> None:
        self._source, self._time, self._assembly = source, time, assembly
        self._gate = asyncio.Semaphore(PARALLEL_QUERIES)

    async def inventory(self, name: str, query: str) -> None:
        async with self._gate:
            self._assembly.take_inventory(name, await self._source.instant(query, self._time))

    async def values(self, query: str, keys: Sequence[SignalKey]) -> None:
        """What our own queries cannot answer ends the tick; an expression fails alone."""
        async with self._gate:
            answer: list[Sample] | str
            try:
                answer = await self._source.instant(query, self._time)
            except (QueryRefused, TemporaryError) as error:
                if not keys[0].promql:
                    raise
                answer = str(error)
            for key in keys:
                self._assembly.take_answer(key, answer, amounts=signals.amount(key) is not None)


def value_queries(rules: RuleSet, scrape_interval: float) -> dict[str, list[SignalKey]]:
    """PromQL of every value that rules need -> its keys; what several ask for is asked once.

    Of a share of the card's memory the amount is asked.

    Args:
        rules: what will be judged.
        scrape_interval: of the nodes, in seconds.
    """
    found: dict[str, list[SignalKey]] = {}
    for key in sorted(needed_keys(rules)):
        asked = signals.amount(key) or key
        found.setdefault(signals.query(asked, scrape_interval=scrape_interval), []).append(key)
    return found


def assemble(
    rows: dict[str, list[Sample]],
    answers: dict[SignalKey, list[Sample] | str],
    *,
    time: float,
    skew: float,
    expected: Expectation,
    teams: Mapping[str, str],
    scrape_interval: float,
) -> FleetFacts:
    """Put the facts of one tick together from what was answered. Pure; replays call it as well.

    Args:
        rows: for every name of `inventory_queries`, its rows.
        answers: for every needed key its rows, or why there are none.
        time: Unix time of every query.
        skew: of the server's clock, in seconds.
        expected: which nodes should be lit.
        teams: user -> team.
        scrape_interval: of the nodes, in seconds.
    """
    assembly = Assembly(time=time, expected=expected, teams=teams, scrape_interval=scrape_interval)
    for name, found in rows.items():
        assembly.take_inventory(name, found)
    assembly.lay_out(answers)
    for key, answer in answers.items():
        assembly.take_answer(key, answer)
    return assembly.facts(skew)


def inventory_queries(scrape_interval: float, expected: Expectation) -> dict[str, str]:
    """Name -> PromQL of what the fleet consists of.

    Args:
        scrape_interval: of the nodes, in seconds.
        expected: which nodes should be lit.
    """
    fresh = f"{signals.FRESH_SCRAPES * scrape_interval:g}"
    # What is always 1 tells nothing by its value: to know that it is there is enough.
    there = ("gpu_job_executable", "yolo_info")
    current = (
        "gpu_memory_total_bytes",
        "gpu_mig_memory_total_bytes",
        "gpu_job_start_time_seconds",
        "gpu_job_first_gpu_use_timestamp_seconds",
        "gpu_job_activity_timestamp_seconds",
        "gpu_process_start_time_seconds",
        "yolo_phase_start_timestamp_seconds",
        "yolo_checkpoint_timestamp_seconds",
        "yolo_checkpoint_durable_timestamp_seconds",
    )
    remembered = ("gpu_job_holds_gpu", "gpu_job_info", "gpu_info", "gpu_mig_info")
    return {
        **{metric: _STILL.format(metric=metric, fresh=fresh) for metric in there},
        **{metric: _FRESH.format(metric=metric, fresh=fresh) for metric in current},
        **{metric: _REMEMBERED.format(metric=metric, fresh=fresh) for metric in remembered},
        # Many series of which one is 1: what always stands beside it on a page is asked its age.
        "yolo_phase": "yolo_phase == 1 and on (instance, job_id, run_id) "
        + _STILL.format(metric='yolo_phase{phase="train"}', fresh=fresh),
        "gpu_throttle_active": "gpu_throttle_active == 1 and on (instance, uuid) "
        + _STILL.format(metric="gpu_info", fresh=fresh),
        "yolo_resume_mode": "yolo_resume_mode == 1 and "
        + _STILL.format(metric="yolo_resume_mode", fresh=fresh),
        "gpuwarden_snapshot_timestamp_seconds": "gpuwarden_snapshot_timestamp_seconds",
        "scraped": "timestamp(gpuwarden_snapshot_timestamp_seconds)",
        "expected": _expected_query(expected),
    }


def _expected_query(expected: Expectation) -> str:
    if expected.query is not None:
        return expected.query
    # Many rows are asked for only where they are added to names.
    targets = f'up{{job="{SCRAPE_JOB}"}}'
    return targets if expected.names else f"count({targets})"
