"""Gathering: what one tick knows of the fleet, from queries that all carry the same time.

One query for each distinct signal, window and aggregate, whatever the number of cards and rules,
and a fixed number of inventory queries. Nothing is decided here; what is missing stays missing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.catalogue import SCRAPE_JOB
from gpuwarden.errors import GpuwardenError, TemporaryError
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.assemblies import (
    ACTIVITY_METRIC,
    LABELS,
    OF_VALUES,
    Assembly,
    Expectation,
)
from gpuwarden.ruleengine.job_expressions import of_jobs
from gpuwarden.ruleengine.needs import ACTIVITY, needed_keys
from gpuwarden.ruleengine.prometheus import QueryRefused, table, tabulated
from gpuwarden.ruleengine.rounds import everything

__all__ = [
    "Expectation",
    "assemble",
    "current_queries",
    "gather",
    "inventory_queries",
    "remembered_queries",
    "silent_nodes",
    "silent_query",
    "value_queries",
]

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.held_sets import HeldSets
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.prometheus import Sample, Source, Table
    from gpuwarden.ruleengine.rounds import Rounds
    from gpuwarden.ruleengine.verdicts import FleetFacts, SignalKey

HELD_FOR = "1h"
"""For how long a dark node's jobs are still known by what they held."""
PARALLEL_QUERIES = 8
_NODE = ("instance",)

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
MAX_NAMES_BYTES = 3000
"""Of jobs that one selector names: a query has up to five, and VictoriaMetrics reads queries of up
to 16 KiB (its -search.maxQueryLen)."""
MAX_NAMED_NODES = 400
"""Of more silent nodes than these everything is asked, and not theirs alone."""


async def gather(
    source: Source,
    rules: RuleSet,
    *,
    time: float,
    scrape_interval: float,
    expected_nodes: Expectation | int | None = None,
    teams: Mapping[str, str] | None = None,
    rounds: Rounds | None = None,
    held: HeldSets | None = None,
) -> FleetFacts:
    """Gather the facts of one tick.

    Args:
        source: Prometheus, or a replay of it.
        rules: what will be judged.
        time: Unix time of every query.
        scrape_interval: of the nodes, in seconds.
        expected_nodes: which nodes should be lit, or how many; counted from `up` where not given.
        teams: user -> team, of the operator's directory.
        rounds: decide what is asked only of jobs in question; None: everything is asked of all.
        held: knows what jobs hold on nodes that have been dark for longer than `HELD_FOR`.

    Returns:
        The facts; a custom expression that fails, and a value of which the server refuses the
        query, are named in `failed`, and absent.

    Raises:
        ServiceUnavailable: the tick knows too little to judge anything; nothing should change.
        LedgerUnusable: what `held` should remember cannot be written down.
        QueryRefused: what the fleet consists of cannot be asked, say because a store is away.
    """
    if not isinstance(expected_nodes, Expectation):
        expected_nodes = Expectation(number=expected_nodes)
    assembly = Assembly(
        time=time, expected=expected_nodes, teams=teams or {}, scrape_interval=scrape_interval
    )
    asking = _Asking(source, time, assembly, scrape_interval=scrape_interval)
    try:
        async with asyncio.TaskGroup() as group:
            skew = group.create_task(source.clock_skew())
            silent = group.create_task(
                silent_nodes(source, time=time, scrape_interval=scrape_interval)
            )
            for name, query in current_queries(scrape_interval, expected_nodes).items():
                if name != ACTIVITY_METRIC:  # asked as values are, of whom it can concern
                    group.create_task(asking.inventory(name, query))
        async with asyncio.TaskGroup() as group:
            for name, query in remembered_queries(scrape_interval, silent.result()).items():
                group.create_task(asking.inventory(name, query))
        if held is not None:
            assembly.take_held(held)
        assembly.lay_out(sorted(needed_keys(rules)))
        questions = (
            everything(rules)
            if rounds is None
            else rounds.questions(rules, jobs=assembly.jobs, now=time)
        )
        await asking.answers(dict.fromkeys(questions.early))
        assembly.take_activity()
        facts = assembly.facts(skew.result())
        if rounds is not None and questions.keys != questions.early:
            chosen = rounds.in_question(questions, rules, facts)
            await asking.answers(chosen)
            assembly.take_activity()
            assembly.forget_claims()
            narrowed = {key: jobs for key, jobs in chosen.items() if jobs is not None}
            facts = replace(facts, narrowed=MappingProxyType(narrowed))
    except BaseExceptionGroup as errors:
        # Callers know our tree, not groups: one server fails for one reason, many times over.
        ours = errors.subgroup(GpuwardenError)
        if ours is None:
            raise
        raise ours.exceptions[0] from errors
    return facts


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

    def __init__(
        self, source: Source, time: float, assembly: Assembly, *, scrape_interval: float
    ) -> None:
        self._source, self._time, self._assembly = source, time, assembly
        self._scrape_interval = scrape_interval
        self._gate = asyncio.Semaphore(PARALLEL_QUERIES)

    async def inventory(self, name: str, query: str) -> None:
        async with self._gate:
            rows = await table(self._source, query, self._time, LABELS[name])
            self._assembly.take_inventory(name, rows)

    async def answers(self, keys: Mapping[SignalKey, frozenset[str] | None]) -> None:
        """Ask for values: of the jobs that are named, of all where None is."""
        asked: dict[frozenset[str] | None, list[SignalKey]] = {}
        for key, jobs in keys.items():
            asked.setdefault(jobs, []).append(key)
        async with asyncio.TaskGroup() as group:
            for jobs, found in asked.items():
                numbers = [key for key in found if key != ACTIVITY]
                for part in [None] if jobs is None else named_parts(jobs):
                    for query, same in queries_of(numbers, self._scrape_interval, part).items():
                        group.create_task(self._values(query, same))
                    if ACTIVITY in found:
                        query = _latest(ACTIVITY_METRIC, self._scrape_interval, part)
                        group.create_task(self.inventory(ACTIVITY_METRIC, query))

    async def _values(self, query: str, keys: Sequence[SignalKey]) -> None:
        """A server that does not answer ends the tick; what it refuses fails alone.

        It refuses a window longer than it allows, or more series, however healthy it is: one rule
        must not blind all others. What an expression costs is its author's affair.
        """
        async with self._gate:
            answer: Table | str
            try:
                answer = await table(self._source, query, self._time, OF_VALUES)
            except QueryRefused as error:
                answer = str(error)
            except TemporaryError as error:
                if not keys[0].promql:
                    raise
                answer = str(error)
            for key in keys:
                self._assembly.take_answer(key, answer, amounts=signals.amount(key) is not None)


def named_parts(jobs: frozenset[str]) -> list[list[str]]:
    """Jobs in parts that a query can name, in their order.

    Args:
        jobs: their ids.
    """
    parts: list[list[str]] = []
    size = MAX_NAMES_BYTES
    for job in sorted(jobs):
        length = len(signals.one_of([job]).encode()) - 1
        if size + length > MAX_NAMES_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(job)
        size += length
    return parts


def value_queries(rules: RuleSet, scrape_interval: float) -> dict[str, list[SignalKey]]:
    """PromQL of every value that rules need -> its keys; what several ask for is asked once.

    Args:
        rules: what will be judged.
        scrape_interval: of the nodes, in seconds.
    """
    return queries_of(needed_keys(rules), scrape_interval)


def queries_of(
    keys: Iterable[SignalKey], scrape_interval: float, jobs: Sequence[str] | None = None
) -> dict[str, list[SignalKey]]:
    """PromQL of values -> their keys.

    Of a share of the card's memory the amount is asked.

    Args:
        keys: what to measure.
        scrape_interval: of the nodes, in seconds.
        jobs: of which jobs; None for the whole fleet.
    """
    found: dict[str, list[SignalKey]] = {}
    for key in sorted(keys):
        asked = signals.amount(key) or key
        if key.promql and jobs is not None:
            query = of_jobs(key.promql, jobs)
        else:
            query = signals.query(asked, scrape_interval=scrape_interval, jobs=jobs)
        found.setdefault(query, []).append(key)
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
    # What is always 1 tells nothing by its value: to know that it is there is enough.
    there = ("gpu_job_executable", "yolo_info", *REMEMBERED)
    latest = (
        "gpu_memory_total_bytes",
        "gpu_mig_memory_total_bytes",
        "gpu_job_start_time_seconds",
        "gpu_job_first_gpu_use_timestamp_seconds",
        ACTIVITY_METRIC,
        "gpu_process_start_time_seconds",
        "yolo_phase_start_timestamp_seconds",
        "yolo_checkpoint_timestamp_seconds",
        "yolo_checkpoint_durable_timestamp_seconds",
    )
    return {
        **{metric: _STILL.format(metric=metric, fresh=fresh) for metric in there},
        **{metric: _latest(metric, scrape_interval) for metric in latest},
        # Many series of which one is 1: what always stands beside it on a page is asked its age.
        "yolo_phase": "yolo_phase == 1 and on (instance, job_id, run_id) "
        + _STILL.format(metric='yolo_phase{phase="train"}', fresh=fresh),
        "gpu_throttle_active": "gpu_throttle_active == 1 and on (instance, uuid) "
        + _STILL.format(metric="gpu_info", fresh=fresh),
        "yolo_resume_mode": _latest("yolo_resume_mode", scrape_interval) + " == 1",
        # A row is a training that does not run on the cards that its job holds; few are.
        "yolo_devices": _latest("yolo_devices", scrape_interval)
        + " != on (instance, job_id) group_left () count by (instance, job_id) "
        f"(max by (instance, job_id, uuid) ({_latest('gpu_job_holds_gpu', scrape_interval)}))",
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
    chosen = f"{{instance=~{signals.one_of(silent)}}}"
    return {name: _ONCE.format(metric=name + chosen) for name in REMEMBERED}


def silent_query(scrape_interval: float) -> str:
    """PromQL of the nodes that spoke within `HELD_FOR` and say nothing now.

    Args:
        scrape_interval: of the nodes, in seconds.
    """
    return _SILENT.format(fresh=_fresh(scrape_interval))


def _latest(metric: str, scrape_interval: float, jobs: Sequence[str] | None = None) -> str:
    """What was said within two scrapes, of these jobs or of all."""
    window = durations.render(signals.FRESH_SCRAPES * scrape_interval)
    return _LATEST.format(metric=metric + signals.of_jobs(jobs), window=window)


def _fresh(scrape_interval: float) -> str:
    """Seconds, as PromQL compares them, up to which a sample is fresh."""
    return f"{signals.FRESH_SCRAPES * scrape_interval:g}"


def _expected_query(expected: Expectation) -> str:
    if expected.query is not None:
        return expected.query
    # Many rows are asked for only where they are added to names.
    targets = f'up{{job="{SCRAPE_JOB}"}}'
    return targets if expected.names else f"count({targets})"
