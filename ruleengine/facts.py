"""Gathering: what one tick knows of the fleet, from queries that all carry the same time.

One query for each distinct signal, window and aggregate, whatever the number of cards and rules,
and a fixed number of inventory queries. Nothing is decided here; what is missing stays missing.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.catalogue import SCRAPE_JOB
from gpuwarden.errors import GpuwardenError, TemporaryError
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.assemblies import LABELS, OF_VALUES, Assembly, Expectation
from gpuwarden.ruleengine.conditions import (
    NoProgress,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    leaves,
)
from gpuwarden.ruleengine.prometheus import QueryRefused, table, tabulated
from gpuwarden.ruleengine.verdicts import SignalKey

__all__ = [
    "Expectation",
    "assemble",
    "condition_keys",
    "current_queries",
    "gather",
    "inventory_queries",
    "needed_keys",
    "remembered_queries",
    "silent_nodes",
    "silent_query",
    "value_queries",
]

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.prometheus import Sample, Source, Table
    from gpuwarden.ruleengine.verdicts import FleetFacts

HELD_FOR = "1h"
"""For how long a dark node's jobs are still known by what they held."""
CAUSE_WINDOW_SECONDS = 300.0
"""The longest window that is asked only so that causes can be told."""
SHARED_CAUSE_SECONDS = 900.0
"""The longest window of a rule that tells causes as well, in place of one of their own."""
PARALLEL_QUERIES = 8
_NODE = ("instance",)

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
_LIT = "timestamp(gpuwarden_snapshot_timestamp_seconds) >= time() - {fresh}"
# What was there until less than two scrapes ago counts as well: it amends jobs and makes none.
_LATEST = "last_over_time({metric}[{window}])"
_ONCE = "last_over_time({metric}[" + HELD_FOR + "])"
_REMEMBERED = _STILL + " or " + _ONCE + " unless on (instance) (" + _LIT + ")"
REMEMBERED = ("gpu_job_holds_gpu", "gpu_job_info", "gpu_info", "gpu_mig_info")
"""What is known of a node for `HELD_FOR` after it went dark."""
_SILENT = (
    "(group by (instance) (last_over_time(gpuwarden_snapshot_timestamp_seconds[" + HELD_FOR + "]))"
    " or group by (instance) (last_over_time(gpuwarden_nvml_up[" + HELD_FOR + "])))"
    " unless on (instance) (" + _LIT + ")"
)
MAX_NAMED_NODES = 400
"""Of more silent nodes than these everything is asked, and not theirs alone."""


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
            silent = group.create_task(
                silent_nodes(source, time=time, scrape_interval=scrape_interval)
            )
            for name, query in current_queries(scrape_interval, expected_nodes).items():
                group.create_task(asking.inventory(name, query))
        async with asyncio.TaskGroup() as group:
            for name, query in remembered_queries(scrape_interval, silent.result()).items():
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


async def silent_nodes(source: Source, *, time: float, scrape_interval: float) -> list[str]:
    """The nodes that spoke within `HELD_FOR` and say nothing now.

    Args:
        source: Prometheus.
        time: Unix time.
        scrape_interval: of the nodes, in seconds.

    Raises:
        ServiceUnavailable: not known.
    """
    rows = await table(source, silent_query(scrape_interval), time, _NODE)
    return [node for _, (node,) in rows]


class _Asking:
    """Asks a few queries at a time, and hands each answer on before it asks for more."""

    def __init__(self, source: Source, time: float, assembly: Assembly) -> None:
        self._source, self._time, self._assembly = source, time, assembly
        self._gate = asyncio.Semaphore(PARALLEL_QUERIES)

    async def inventory(self, name: str, query: str) -> None:
        async with self._gate:
            rows = await table(self._source, query, self._time, LABELS[name])
            self._assembly.take_inventory(name, rows)

    async def values(self, query: str, keys: Sequence[SignalKey]) -> None:
        """What our own queries cannot answer ends the tick; an expression fails alone."""
        async with self._gate:
            answer: Table | str
            try:
                answer = await table(self._source, query, self._time, OF_VALUES)
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
        assembly.take_inventory(name, tabulated(found, LABELS[name]))
    assembly.lay_out(answers)
    for key, answer in answers.items():
        known = answer if isinstance(answer, str) else tabulated(answer, OF_VALUES)
        assembly.take_answer(key, known)
    return assembly.facts(skew)


def inventory_queries(scrape_interval: float, expected: Expectation) -> dict[str, str]:
    """Name -> PromQL of what the fleet consists of, in one question each.

    Args:
        scrape_interval: of the nodes, in seconds.
        expected: which nodes should be lit.
    """
    fresh = _fresh(scrape_interval)
    remembered = {name: _REMEMBERED.format(metric=name, fresh=fresh) for name in REMEMBERED}
    return current_queries(scrape_interval, expected) | remembered


def current_queries(scrape_interval: float, expected: Expectation) -> dict[str, str]:
    """Name -> PromQL of what lit nodes say now.

    Args:
        scrape_interval: of the nodes, in seconds.
        expected: which nodes should be lit.
    """
    fresh = _fresh(scrape_interval)
    window = durations.render(signals.FRESH_SCRAPES * scrape_interval)
    # What is always 1 tells nothing by its value: to know that it is there is enough.
    there = ("gpu_job_executable", "yolo_info", *REMEMBERED)
    latest = (
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
    return {
        **{metric: _STILL.format(metric=metric, fresh=fresh) for metric in there},
        **{metric: _LATEST.format(metric=metric, window=window) for metric in latest},
        # Many series of which one is 1: what always stands beside it on a page is asked its age.
        "yolo_phase": "yolo_phase == 1 and on (instance, job_id, run_id) "
        + _STILL.format(metric='yolo_phase{phase="train"}', fresh=fresh),
        "gpu_throttle_active": "gpu_throttle_active == 1 and on (instance, uuid) "
        + _STILL.format(metric="gpu_info", fresh=fresh),
        "yolo_resume_mode": _LATEST.format(metric="yolo_resume_mode", window=window) + " == 1",
        "gpuwarden_snapshot_timestamp_seconds": "gpuwarden_snapshot_timestamp_seconds",
        "scraped": "timestamp(gpuwarden_snapshot_timestamp_seconds)",
        "expected": _expected_query(expected),
    }


def remembered_queries(scrape_interval: float, silent: Sequence[str]) -> dict[str, str]:
    """Name -> PromQL of what silent nodes said last; none where no node is silent.

    An hour of every card is dear to look through, and few nodes are dark.

    Args:
        scrape_interval: of the nodes, in seconds.
        silent: their names, as of `silent_nodes`.
    """
    if not silent:
        return {}
    if len(silent) > MAX_NAMED_NODES:
        lit = _LIT.format(fresh=_fresh(scrape_interval))
        return {
            name: f"{_ONCE.format(metric=name)} unless on (instance) ({lit})" for name in REMEMBERED
        }
    names = "|".join(re.escape(node) for node in sorted(silent))
    chosen = f"{{instance=~{json.dumps(names, ensure_ascii=False)}}}"
    return {name: _ONCE.format(metric=name + chosen) for name in REMEMBERED}


def silent_query(scrape_interval: float) -> str:
    """PromQL of the nodes that spoke within `HELD_FOR` and say nothing now.

    Args:
        scrape_interval: of the nodes, in seconds.
    """
    return _SILENT.format(fresh=_fresh(scrape_interval))


def _fresh(scrape_interval: float) -> str:
    """Seconds, as PromQL compares them, up to which a sample is fresh."""
    return f"{signals.FRESH_SCRAPES * scrape_interval:g}"


def _expected_query(expected: Expectation) -> str:
    if expected.query is not None:
        return expected.query
    # Many rows are asked for only where they are added to names.
    targets = f'up{{job="{SCRAPE_JOB}"}}'
    return targets if expected.names else f"count({targets})"
