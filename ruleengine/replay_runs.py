"""Replaying: rules over days of history, stretch by stretch, each expression asked once.

While one stretch is judged the next one is fetched. What a stretch leaves (open cases, trust that
was spent, ends, when jobs were last at work) is carried to the next, so that the result does not
depend on where history is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import httpx
import numpy as np

from gpuwarden.errors import GpuwardenError, InvalidInput
from gpuwarden.ruleengine import replay_signals, signals
from gpuwarden.ruleengine.dry_runs import COOL_DOWN_SECONDS, DryRun
from gpuwarden.ruleengine.inventories import Expectation, inventory_queries
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.replay_arms import Arm, Clock, IdleTimes
from gpuwarden.ruleengine.replay_columns import MAX_POINTS, HistoryClient, Ticks
from gpuwarden.ruleengine.replay_frames import Frame
from gpuwarden.ruleengine.replay_outcomes import follow_up
from gpuwarden.ruleengine.replay_people import People, Promises
from gpuwarden.ruleengine.verdicts import SignalKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.replay_columns import Columns, Cost

    Progress = Callable[[int, int], None]
    """Ticks that are done, and all."""

MEMORY_BYTES: Final = 384 * 1024 * 1024
"""What the answers of one stretch may take, while those of the one before are judged.

The shorter stretches are, the more often situations are judged and windows are read anew.
"""
SWITCH_SECONDS: Final = 0.0005
MIN_STRETCH_TICKS: Final = 40
MAX_TICKS: Final = 10_000_000
"""More than four years of ticks at 15 s are a slip of the pen."""
_SEEN_INTERVAL = (
    "min((max_over_time({series}[10m]) - min_over_time({series}[10m])) "
    "/ (count_over_time({series}[10m]) - 1))"
).format(series="gpuwarden_snapshot_timestamp_seconds")
"""A node takes its snapshot anew for each scrape: the time between two is that of its scrapes."""
_UTILIZATION = SignalKey("gpu_utilization", "last", 0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is replayed.

    Attributes:
        url: of Prometheus.
        begin, end: Unix times of the first tick, and of the latest possible one.
        step: seconds between two ticks.
        scrape_interval: of the nodes, in seconds.
        stretch: seconds that are fetched at once; less where memory would not do.
        horizon: seconds after an end in which a job that is active again counts as regret.
        expected: which nodes should be lit.
        teams: user -> team.
        cool_down, settle_after: of the engine, in seconds.
        timeout: seconds for one query.
        people: what people did meanwhile, or None where that is not known.
    """

    url: str
    begin: float
    end: float
    step: float = 15.0
    scrape_interval: float = 5.0
    stretch: float = 6 * 3600.0
    horizon: float = 24 * 3600.0
    expected: Expectation = field(default_factory=Expectation)
    teams: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cool_down: float = COOL_DOWN_SECONDS
    settle_after: float = 0.0
    timeout: float = 120.0
    people: People | None = None

    @property
    def ticks(self) -> Ticks:
        """Every tick."""
        return Ticks(self.begin, self.step, int((self.end - self.begin) // self.step) + 1)


@dataclass
class Replay:
    """What came of it.

    Attributes:
        plan: what was replayed.
        arms: one for each rule set, in the order given.
        blind: ticks at which the server knew nothing.
        cost: of the queries.
        seconds: that it took.
        stretches: in how many parts.
        jobs: how many jobs were seen.
        seen_interval: seconds between two scrapes, as the server has them; None where that cannot
            be told.
    """

    plan: Plan
    arms: list[Arm]
    cost: Cost
    blind: int = 0
    seconds: float = 0.0
    stretches: int = 0
    jobs: int = 0
    seen_interval: float | None = None


async def replay(
    plan: Plan,
    sets: Sequence[tuple[str, RuleSet]],
    client: httpx.AsyncClient,
    *,
    progress: Progress = lambda _done, _all: None,
) -> Replay:
    """Judge history by one or several rule sets at once.

    Args:
        plan: what is replayed.
        sets: (name, rules); what they have in common is asked and fetched once.
        client: for the server.
        progress: told after each stretch.

    Raises:
        InvalidInput: there is no tick, or no data at all.
        ServiceUnavailable: the server fails.
        QueryRefused: it refuses to say what the fleet consists of.
    """
    begun = time.monotonic()
    ticks = plan.ticks
    if ticks.count < 1:
        raise InvalidInput("--to is before --from: there is no tick to replay")
    if ticks.count > MAX_TICKS:
        raise InvalidInput(
            f"{ticks.count} ticks are too many: at most {MAX_TICKS}, by a later --from or a "
            "longer --step"
        )
    # The server ends what takes too long; what it says of that is waited for.
    client.timeout = httpx.Timeout(2 * plan.timeout, connect=10.0)
    history = HistoryClient(plan.url, client, timeout=plan.timeout)
    await history.probe(plan.begin)
    arms = [_arm(plan, name, rules) for name, rules in sets]
    result = Replay(plan, arms, history.cost)
    fetcher = _Fetcher(plan, history, [rules for _, rules in sets])
    clock, idle_times, jobs = Clock(plan.step), IdleTimes(), set[str]()
    done = 0
    pending: asyncio.Task[Frame] | None = asyncio.create_task(fetcher.frame(ticks))
    try:
        while pending is not None:
            frame = await pending
            done += frame.ticks.count
            rest = ticks.part(done, ticks.count)
            pending = asyncio.create_task(fetcher.frame(rest)) if rest.count > 0 else None
            with _answers_first():
                jobs |= await asyncio.to_thread(_judge, frame, arms, clock, idle_times)
            result.blind += int(np.count_nonzero(frame.blind))
            result.stretches += 1
            progress(done, ticks.count)
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
    if result.blind == ticks.count:
        raise InvalidInput(
            f"{plan.url} has no series of gpuwarden between --from and --to: is it the right "
            "server, and does it keep its data that long?"
        )
    result.jobs = len(jobs)
    if clock.last is not None:
        result.seen_interval = await _seen_interval(history, plan.begin, clock.last)
    for arm in arms:
        await follow_up(history, arm.incidents, plan.scrape_interval, plan.horizon)
    result.seconds = time.monotonic() - begun
    return result


@contextlib.contextmanager
def _answers_first() -> Iterator[None]:
    """Let the thread that reads answers go first while another one judges.

    Python lets a thread that computes go on for 5 ms each time that another wants to; an answer
    comes in hundreds of parts, and the server would wait for its next question meanwhile.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def _seen_interval(history: HistoryClient, begin: float, last: float) -> float | None:
    """The shortest of some moments and all nodes: a gap makes it no longer."""
    found = [
        row.value
        for time in sorted({last, max(begin, last - 3600.0), (begin + last) / 2})
        for row in await history.instant(_SEEN_INTERVAL, time)
    ]
    return min((value for value in found if 0 < value < math.inf), default=None)


def _arm(plan: Plan, name: str, rules: RuleSet) -> Arm:
    run = DryRun(
        rules,
        plan.scrape_interval,
        cool_down=plan.cool_down,
        settle_after=plan.settle_after,
    )
    return Arm(name, run, promises=Promises(plan.people, rules))


def _judge(frame: Frame, arms: Sequence[Arm], clock: Clock, idle_times: IdleTimes) -> set[str]:
    idle_times.enter(frame)
    deltas, outages = clock.deltas(frame)
    groups = frame.groups()
    for arm in arms:
        arm.pass_through(frame, groups, deltas, outages, idle_times)
    return {job for group in groups for job in group.jobs}


@dataclass
class _Fetcher:
    """Fetches stretches."""

    plan: Plan
    history: HistoryClient
    sets: Sequence[RuleSet]

    async def frame(self, rest: Ticks) -> Frame:
        """The next stretch: as much as may be fetched at once, from the first of these ticks on."""
        plan, interval = self.plan, self.plan.scrape_interval
        inventory, keys = inventory_queries(interval, plan.expected), self._keys()
        wanted = dict.fromkeys(inventory.values(), False)
        for key in (*(signals.amount(key) or key for key in keys), _UTILIZATION):
            wanted |= dict.fromkeys(replay_signals.texts_of(key, interval), True)
        ticks = rest.part(0, await self._count(rest, len(wanted)))
        found = await self._fetch(wanted, ticks)
        rows = {name: found[text] for name, text in inventory.items()}
        busy = await self._busy(found, ticks)
        return Frame(
            ticks=ticks,
            rows=rows,
            answers=await self._answers(keys, found, rows, ticks),
            scrape_interval=interval,
            expected=plan.expected,
            teams=plan.teams,
            activity={
                row.get("job_id", ""): own
                for row, own in zip(busy.labels, busy.values, strict=True)
            },
        )

    async def _fetch(self, wanted: Mapping[str, bool], ticks: Ticks) -> dict[str, Columns]:
        """The answers to expressions, of which it is told whether a refusal is one."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    text: group.create_task(self.history.columns(text, ticks, custom=custom))
                    for text, custom in wanted.items()
                }
        except BaseExceptionGroup as errors:
            ours = errors.subgroup(GpuwardenError)
            if ours is None:
                raise
            raise ours.exceptions[0] from errors
        return {text: task.result() for text, task in tasks.items()}

    async def _busy(self, found: Mapping[str, Columns], ticks: Ticks) -> Columns:
        """The highest utilization of a card of each job."""
        (text,) = replay_signals.texts_of(_UTILIZATION, self.plan.scrape_interval)
        highest = replay_signals.largest(found[text], replay_signals.JOB)
        if highest is None:
            text = f"max by (job_id) ({text})"
            highest = (await self._fetch({text: False}, ticks))[text]
        return highest

    async def _answers(
        self,
        keys: Sequence[SignalKey],
        found: Mapping[str, Columns],
        rows: Mapping[str, Columns],
        ticks: Ticks,
    ) -> dict[SignalKey, Columns]:
        """The values of signals and expressions, from what was fetched."""
        interval = self.plan.scrape_interval
        asked = {key: signals.amount(key) or key for key in keys}
        whole: dict[SignalKey, Columns] = {}
        for key in sorted(set(asked.values())):
            known = replay_signals.put_together(key, found, interval)
            if known is None:
                text = signals.query(key, scrape_interval=interval)
                known = (await self._fetch({text: True}, ticks))[text]
            whole[key] = known
        totals = (
            (rows["gpu_memory_total_bytes"], "uuid"),
            (rows["gpu_mig_memory_total_bytes"], "mig_uuid"),
        )
        return {
            key: whole[key]
            if asked[key] == key
            else replay_signals.shares(whole[asked[key]], totals)
            for key in keys
        }

    def _keys(self) -> list[SignalKey]:
        """Every query that a rule of any set needs."""
        keys: set[SignalKey] = set()
        for rules in self.sets:
            for rule in rules.rules:
                for condition in rule.conditions:
                    keys |= set(condition_keys(condition))
                waiting = rule.only_if_waiting
                if waiting is not None and waiting.promql is not None:
                    keys.add(waiting.key)
        return sorted(keys)

    async def _count(self, rest: Ticks, expressions: int) -> int:
        """How many ticks may be fetched at once."""
        most = max(1, min(int(self.plan.stretch // rest.step), MAX_POINTS, rest.count))
        end = rest.begin + rest.step * (most - 1)
        seconds = max(300, round(end - rest.begin))
        rows = await self.history.instant(
            f"count(last_over_time(gpu_job_holds_gpu[{seconds}s]))", end
        )
        series = max(1.0, rows[0].value if rows else 1.0)
        fitting = int(MEMORY_BYTES / (8 * series * expressions))
        return min(most, max(MIN_STRETCH_TICKS, fitting))
