"""Gathering: what one tick knows of the fleet, from queries that all carry the same time.

One query for each distinct signal, window and aggregate, whatever the number of cards and rules,
and a fixed number of inventory queries. Nothing is decided here; what is missing stays missing.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpuwarden.catalogue import SCRAPE_JOB
from gpuwarden.errors import GpuwardenError, TemporaryError
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.conditions import NoProgress, ProfileCondition, Promql, Signal, leaves
from gpuwarden.ruleengine.prometheus import QueryRefused
from gpuwarden.ruleengine.verdicts import (
    MAX_DARK_SHARE,
    MAX_SKEW_SECONDS,
    FleetFacts,
    GpuFacts,
    JobFacts,
    RunFacts,
    SignalKey,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.prometheus import Sample, Source

SNAPSHOT_INTERVAL_SECONDS = 2.0
"""How often an exporter takes its snapshot; a snapshot up to twice as old is current."""
HELD_FOR = "1h"
"""For how long a dark node's jobs are still known by what they held."""
CAUSE_WINDOW_SECONDS = 300.0
"""The longest window over which causes are looked for."""
PARALLEL_QUERIES = 8

_CAUSE_SIGNALS = (
    "gpu_utilization",
    "gpu_memory",
    "throughput",
    "data_wait_share",
    "job_cpu_cores",
    "job_io_wait",
)

# Without the gate, Prometheus serves for five minutes what vanished while it was down.
_FRESH = "{metric} and timestamp({metric}) >= time() - {fresh}"
_ON = "{metric} == 1 and timestamp({metric}) >= time() - {fresh}"
_LIT = "timestamp(gpuwarden_snapshot_timestamp_seconds) >= time() - {fresh}"
_REMEMBERED = (
    _FRESH + " or last_over_time({metric}[" + HELD_FOR + "]) unless on (instance) (" + _LIT + ")"
)


def needed_keys(rules: RuleSet) -> set[SignalKey]:
    """Every query that the rules need, and those that tell causes."""
    keys: set[SignalKey] = set()
    for rule in rules.rules:
        for condition in rule.conditions:
            keys |= set(condition_keys(condition))
        if rule.only_if_waiting is not None and rule.only_if_waiting.promql is not None:
            keys.add(rule.only_if_waiting.key)
    windows = [key.window_seconds for key in keys if key.window_seconds]
    # Rules with short windows would be explained too late by a long one.
    window = min(CAUSE_WINDOW_SECONDS, max(windows, default=CAUSE_WINDOW_SECONDS))
    return keys | {SignalKey(name, "avg", window) for name in _CAUSE_SIGNALS}


def condition_keys(condition: Condition) -> Iterable[SignalKey]:
    """The queries behind a condition."""
    for leaf in leaves(condition):
        match leaf:
            case Signal() | NoProgress() | Promql():
                yield leaf.key
            case ProfileCondition():
                yield from leaf.keys
            case _:
                pass  # silence is read from the inventory


@dataclass(frozen=True, slots=True)
class Expectation:
    """Which nodes should be lit: all that any of these names.

    Attributes:
        number: how many, where nothing names them.
        names: targets of Prometheus.
        query: PromQL whose rows name them by `instance`, or whose one row is their number; None:
            Prometheus' own targets.
    """

    number: int | None = None
    names: frozenset[str] = frozenset()
    query: str | None = None


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
    gate = asyncio.Semaphore(PARALLEL_QUERIES)

    async def ask(query: str) -> list[Sample]:
        async with gate:
            return await source.instant(query, time)

    async def ask_custom(key: SignalKey) -> list[Sample] | str:
        try:
            return await ask(signals.query(key, scrape_interval=scrape_interval))
        except (QueryRefused, TemporaryError) as error:
            if not key.promql:
                raise
            return str(error)

    if not isinstance(expected_nodes, Expectation):
        expected_nodes = Expectation(number=expected_nodes)
    inventory_texts = inventory_queries(scrape_interval, expected_nodes)
    keys = sorted(needed_keys(rules))
    try:
        async with asyncio.TaskGroup() as group:
            skew = group.create_task(source.clock_skew())
            inventory = {
                name: group.create_task(ask(text)) for name, text in inventory_texts.items()
            }
            values = {key: group.create_task(ask_custom(key)) for key in keys}
    except BaseExceptionGroup as errors:
        # Callers know our tree, not groups: one server fails for one reason, many times over.
        ours = errors.subgroup(GpuwardenError)
        if ours is None:
            raise
        raise ours.exceptions[0] from errors
    return assemble(
        {name: task.result() for name, task in inventory.items()},
        {key: task.result() for key, task in values.items()},
        time=time,
        skew=skew.result(),
        expected=expected_nodes,
        teams=teams or {},
        scrape_interval=scrape_interval,
    )


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
    return _Fleet(
        time=time,
        rows=rows,
        answers=answers,
        skew=skew,
        expected=expected,
        teams=teams,
        scrape_interval=scrape_interval,
    ).facts()


def inventory_queries(scrape_interval: float, expected: Expectation) -> dict[str, str]:
    """Name -> PromQL of what the fleet consists of.

    Args:
        scrape_interval: of the nodes, in seconds.
        expected: which nodes should be lit.
    """
    fresh = f"{signals.FRESH_SCRAPES * scrape_interval:g}"
    current = (
        "gpu_job_executable",
        "gpu_memory_total_bytes",
        "gpu_mig_memory_total_bytes",
        "gpu_job_start_time_seconds",
        "gpu_job_first_gpu_use_timestamp_seconds",
        "gpu_job_activity_timestamp_seconds",
        "gpu_process_start_time_seconds",
        "yolo_info",
        "yolo_phase_start_timestamp_seconds",
        "yolo_checkpoint_timestamp_seconds",
        "yolo_checkpoint_durable_timestamp_seconds",
    )
    remembered = ("gpu_job_holds_gpu", "gpu_job_info", "gpu_info", "gpu_mig_info")
    switches = ("yolo_phase", "yolo_resume_mode", "gpu_throttle_active")
    return {
        **{metric: _FRESH.format(metric=metric, fresh=fresh) for metric in current},
        **{metric: _REMEMBERED.format(metric=metric, fresh=fresh) for metric in remembered},
        **{metric: _ON.format(metric=metric, fresh=fresh) for metric in switches},
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


_Card = tuple[str, str]
"""(instance, uuid)."""


@dataclass
class _Draft:
    """One job while its rows are put together."""

    instances: set[str] = field(default_factory=set)
    labels: dict[str, str] = field(default_factory=dict)
    cards: set[_Card] = field(default_factory=set)
    executables: set[tuple[str, str]] = field(default_factory=set)
    start: float | None = None
    first_use: float | None = None
    processes: set[tuple[int, float]] = field(default_factory=set)
    activity: dict[str, float] = field(default_factory=dict)
    runs: dict[str, RunFacts] = field(default_factory=dict)
    values: dict[SignalKey, dict[str, float]] = field(default_factory=dict)


@dataclass
class _Fleet:
    """One tick's rows, and how they become facts."""

    time: float
    rows: dict[str, list[Sample]]
    answers: dict[SignalKey, list[Sample] | str]
    skew: float
    expected: Expectation
    teams: Mapping[str, str]
    scrape_interval: float

    def facts(self) -> FleetFacts:
        dark, skews = self._nodes()
        drafts = self._drafts()
        cards = self._cards(drafts)
        failed = {key: rows for key, rows in self.answers.items() if isinstance(rows, str)}
        device = self._values(drafts, cards)
        self._mark_conflicts(drafts, dark)
        lit_names = set(skews) - set(dark)
        names, expected = self._expected(lit_names)
        lit = len(lit_names)
        jobs = {
            job_id: self._job(job_id, draft, cards=cards, dark=dark)
            for job_id, draft in sorted(drafts.items())
        }
        usable = [abs(skew) for node, skew in skews.items() if node not in dark]
        worst = max([abs(self.skew), *usable])
        return FleetFacts(
            time=self.time,
            jobs=jobs,
            expected_nodes=expected,
            lit_nodes=lit,
            clock_skew_seconds=worst,
            problems=tuple(_problems(expected, lit, worst)),
            cards=self._card_subjects(cards, device, dark),
            failed=failed,
            scrape_interval=self.scrape_interval,
            numbers=self._numbers(),
            expected_names=tuple(sorted(names)),
            lit_names=tuple(sorted(lit_names)),
        )

    def _numbers(self) -> dict[SignalKey, float]:
        """Custom expressions that gave one number for the whole cluster."""
        return {
            key: rows[0].value
            for key, rows in self.answers.items()
            if key.promql
            and not isinstance(rows, str)
            and len(rows) == 1
            and math.isfinite(rows[0].value)
        }

    # -- nodes

    def _expected(self, lit: set[str]) -> tuple[set[str], int]:
        """Names of the nodes that should be lit, and how many nodes there are with all others.

        A node that nobody expected does not stand in for one that is missing.
        """
        if self.expected.number is not None:
            return set(), self.expected.number
        rows = [row for row in self.rows["expected"] if math.isfinite(row.value)]
        named = {row.labels["instance"] for row in rows if row.labels.get("instance")}
        counted = sum(int(row.value) for row in rows if not row.labels.get("instance"))
        names = named | self.expected.names
        return names, max(len(names | lit) if names else 0, counted)

    def _nodes(self) -> tuple[dict[str, str], dict[str, float]]:
        """Instances that are not fresh with the reason, and the clock skew of those that speak."""
        scraped = {row.labels.get("instance", ""): row.value for row in self.rows["scraped"]}
        taken = self.rows["gpuwarden_snapshot_timestamp_seconds"]
        skews: dict[str, float] = {}
        dark: dict[str, str] = {}
        for row in taken:
            node = row.labels.get("instance", "")
            at = scraped.get(node, -math.inf)
            age = at - row.value
            skew = min(0.0, age) or max(0.0, age - 2 * SNAPSHOT_INTERVAL_SECONDS)
            skews[node] = skew
            if at < self.time - signals.FRESH_SCRAPES * self.scrape_interval:
                dark[node] = "dark_node"
            elif abs(skew) > MAX_SKEW_SECONDS:
                dark[node] = "clock_skew"
        known = {
            row.labels.get("instance", "")
            for name in ("gpu_job_holds_gpu", "gpu_job_info", "gpu_info")
            for row in self.rows[name]
        }
        return dark | dict.fromkeys(known - set(skews), "dark_node"), skews

    # -- jobs

    def _drafts(self) -> dict[str, _Draft]:
        drafts: dict[str, _Draft] = defaultdict(_Draft)

        def each(name: str, take: Callable[[_Draft, Sample], None]) -> None:
            for row in self.rows[name]:
                job_id = row.labels.get("job_id", "")
                if job_id and math.isfinite(row.value):
                    draft = drafts[job_id]
                    draft.instances.add(row.labels.get("instance", ""))
                    take(draft, row)

        each("gpu_job_holds_gpu", lambda draft, row: draft.cards.add(_card(row)))
        each("gpu_job_info", lambda draft, row: draft.labels.update(row.labels))
        each("gpu_job_executable", _take_executable)
        each("gpu_job_start_time_seconds", _take_start)
        each("gpu_job_first_gpu_use_timestamp_seconds", _take_first_use)
        each("gpu_job_activity_timestamp_seconds", _take_activity)
        each("gpu_process_start_time_seconds", _take_process)
        each("yolo_info", _take_run)
        each("yolo_phase", _take_phase)
        each("yolo_phase_start_timestamp_seconds", _take_phase_start)
        # The durable one comes second, so that it stands where both exist.
        each("yolo_checkpoint_timestamp_seconds", _take_checkpoint)
        each("yolo_checkpoint_durable_timestamp_seconds", _take_checkpoint)
        each("yolo_resume_mode", _take_resume_mode)
        return drafts

    def _mark_conflicts(self, drafts: dict[str, _Draft], dark: Mapping[str, str]) -> None:
        """A run claimed by two jobs, or a job with two runs: nobody is believed."""
        claims: dict[str, set[str]] = defaultdict(set)
        for job_id, draft in drafts.items():
            for run_id in draft.runs:
                if not draft.instances <= set(dark):
                    claims[run_id].add(job_id)
        for draft in drafts.values():
            torn = len(draft.runs) > 1 or any(len(claims[run_id]) > 1 for run_id in draft.runs)
            if torn:
                first = min(draft.runs)
                draft.runs = {first: RunFacts(run_id=first, conflict=True)}
                for key in [key for key in draft.values if _self_report(key)]:
                    del draft.values[key]

    def _cards(self, drafts: Mapping[str, _Draft]) -> dict[_Card, GpuFacts]:
        tenants: dict[_Card, int] = defaultdict(int)
        for draft in drafts.values():
            for card in draft.cards:
                tenants[card] += 1
        total = {_card(row): row.value for row in self.rows["gpu_memory_total_bytes"]}
        total |= {_part(row): row.value for row in self.rows["gpu_mig_memory_total_bytes"]}
        throttle: dict[_Card, set[str]] = defaultdict(set)
        for row in self.rows["gpu_throttle_active"]:
            throttle[_card(row)].add(row.labels.get("reason", ""))
        info = {_card(row): row.labels for row in self.rows["gpu_info"]}
        info |= {
            _part(row): _part_labels(row, info.get(_card(row), {}))
            for row in self.rows["gpu_mig_info"]
        }
        index = {_card(row): row.labels.get("gpu", "") for row in self.rows["gpu_job_holds_gpu"]}
        return {
            card: GpuFacts(
                uuid=card[1],
                index=info.get(card, {}).get("gpu", index.get(card, "")),
                name=info.get(card, {}).get("name", ""),
                memory_total_bytes=total.get(card),
                tenants=tenants.get(card, 0),
                throttle=tuple(sorted(throttle.get(card, ()))),
                instance=card[0],
            )
            for card in sorted(set(info) | set(tenants))
        }

    def _job(
        self,
        job_id: str,
        draft: _Draft,
        *,
        cards: Mapping[_Card, GpuFacts],
        dark: Mapping[str, str],
    ) -> JobFacts:
        instances = tuple(sorted(draft.instances))
        reasons = sorted({dark[node] for node in instances if node in dark})
        user = draft.labels.get("user", "")
        return JobFacts(
            job_id=job_id,
            instance=instances[0] if instances else "",
            instances=instances,
            user=user,
            team=self.teams.get(user, ""),
            source=draft.labels.get("source", ""),
            framework=draft.labels.get("framework", ""),
            interactive=draft.labels.get("interactive", "") == "true",
            executables=tuple(sorted(draft.executables)),
            gpus=tuple(cards[card] for card in sorted(draft.cards)),
            start_time=draft.start,
            first_gpu_use=draft.first_use,
            run=next(iter(draft.runs.values()), None),
            processes=tuple(sorted(draft.processes)),
            activity=draft.activity,
            values=draft.values,
            fresh=not reasons,
            not_fresh_reason=reasons[0] if reasons else "",
        )

    # -- values

    def _values(
        self, drafts: Mapping[str, _Draft], cards: Mapping[_Card, GpuFacts]
    ) -> dict[_Card, dict[SignalKey, dict[str, float]]]:
        """Hand every value to its jobs; returns what belongs to the cards themselves."""
        holders: dict[_Card, list[_Draft]] = defaultdict(list)
        for draft in drafts.values():
            for card in draft.cards:
                holders[card].append(draft)
        device: dict[_Card, dict[SignalKey, dict[str, float]]] = {card: {} for card in cards}
        for key, rows in self.answers.items():
            if isinstance(rows, str):
                continue
            known = [row for row in rows if math.isfinite(row.value)]
            spec = signals.SIGNALS.get(key.signal)
            if spec is not None and spec.device:
                for row in known:
                    card = _card(row)
                    device.setdefault(card, {})[key] = {card[1]: row.value}
                    for draft in holders[card]:
                        draft.values.setdefault(key, {})[card[1]] = row.value
            else:
                self._job_values(drafts, key, known)
        return device

    @staticmethod
    def _job_values(drafts: Mapping[str, _Draft], key: SignalKey, rows: Sequence[Sample]) -> None:
        spec = signals.SIGNALS.get(key.signal)
        per_gpu = spec is not None and spec.per_gpu
        seen: dict[str, int] = defaultdict(int)
        for row in rows:
            job_id = row.labels.get("job_id", "")
            draft = drafts.get(job_id)
            if draft is None:
                continue
            into = draft.values.setdefault(key, {})
            if per_gpu:
                into[row.labels.get("uuid", "")] = row.value
            else:
                # A job on several nodes has one row for each: together they are the job's.
                into[""] = into.get("", 0.0) + row.value
            seen[job_id] += 1
        if per_gpu:
            return
        for job_id, count in seen.items():
            # Of an expression, only its author knows which of two rows is meant; of a node's
            # measure, the sum is known only when every node gave its part.
            single = spec is None or spec.training
            nodes = len(drafts[job_id].instances)
            apart = spec is not None and not spec.additive and nodes > 1
            if apart or count != (1 if single else nodes):
                del drafts[job_id].values[key]

    def _card_subjects(
        self,
        cards: Mapping[_Card, GpuFacts],
        device: Mapping[_Card, Mapping[SignalKey, Mapping[str, float]]],
        dark: Mapping[str, str],
    ) -> dict[str, JobFacts]:
        return {
            card[1]: JobFacts(
                job_id=card[1],
                instance=card[0],
                instances=(card[0],),
                gpus=(replace(facts, tenants=1),),
                values=device.get(card, {}),
                fresh=card[0] not in dark,
                not_fresh_reason=dark.get(card[0], ""),
            )
            for card, facts in cards.items()
        }


def _problems(expected: int, lit: int, skew: float) -> Iterable[str]:
    if expected <= 0:
        yield "no node is expected: set expected_nodes, or check the scrape job"
    elif expected - lit > MAX_DARK_SHARE * expected:
        yield f"{expected - lit} of {expected} nodes are dark"
    if skew > MAX_SKEW_SECONDS:
        yield f"clocks are {skew:.0f} s apart"


def _card(row: Sample) -> _Card:
    return (row.labels.get("instance", ""), row.labels.get("uuid", ""))


def _part(row: Sample) -> _Card:
    """A MIG instance: a card of its own."""
    return (row.labels.get("instance", ""), row.labels.get("mig_uuid", ""))


def _part_labels(row: Sample, card: Mapping[str, str]) -> Mapping[str, str]:
    """What an instance is called, as NVML calls it: such as NVIDIA H100 80GB HBM3 MIG 1g.10gb."""
    name, profile = card.get("name", ""), row.labels.get("profile", "")
    both = f"{name} MIG {profile}" if name and profile else ""
    return {"gpu": row.labels.get("gpu", ""), "name": both}


def _self_report(key: SignalKey) -> bool:
    spec = signals.SIGNALS.get(key.signal)
    return spec is not None and spec.self_report


def _take_executable(draft: _Draft, row: Sample) -> None:
    draft.executables.add((row.labels.get("executable", ""), row.labels.get("cgroup", "")))


def _take_start(draft: _Draft, row: Sample) -> None:
    # Of several nodes: the latest, so that no node's part is judged too early.
    draft.start = row.value if draft.start is None else max(draft.start, row.value)


def _take_first_use(draft: _Draft, row: Sample) -> None:
    draft.first_use = row.value if draft.first_use is None else max(draft.first_use, row.value)


def _take_activity(draft: _Draft, row: Sample) -> None:
    signal = row.labels.get("signal", "")
    draft.activity[signal] = max(row.value, draft.activity.get(signal, -math.inf))


def _take_process(draft: _Draft, row: Sample) -> None:
    pid = row.labels.get("pid", "")
    if pid.isdecimal():
        draft.processes.add((int(pid), row.value))


def _take_run(draft: _Draft, row: Sample) -> None:
    labels = row.labels
    amp = {"true": True, "false": False}.get(labels.get("amp", "").lower())
    run_id = labels.get("run_id", "")
    draft.runs[run_id] = RunFacts(
        run_id=run_id,
        model=labels.get("model", ""),
        batch=_whole(labels.get("batch", "")),
        imgsz=_whole(labels.get("imgsz", "")),
        amp=amp,
        project=labels.get("project", ""),
    )


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def _amend(draft: _Draft, row: Sample, change: Callable[[RunFacts], RunFacts]) -> None:
    run = draft.runs.get(row.labels.get("run_id", ""))
    if run is not None:
        draft.runs[run.run_id] = change(run)


def _take_phase(draft: _Draft, row: Sample) -> None:
    _amend(draft, row, lambda run: replace(run, phase=row.labels.get("phase", "")))


def _take_phase_start(draft: _Draft, row: Sample) -> None:
    _amend(draft, row, lambda run: replace(run, phase_since=row.value))


def _take_checkpoint(draft: _Draft, row: Sample) -> None:
    _amend(draft, row, lambda run: replace(run, checkpoint_time=row.value))


def _take_resume_mode(draft: _Draft, row: Sample) -> None:
    _amend(draft, row, lambda run: replace(run, resume_mode=row.labels.get("mode", "")))
