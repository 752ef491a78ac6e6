"""Asking Prometheus what a report needs: looked over first, then fetched portion by portion.

An answer that is partial, late or refused ends the report: one with a hole that nobody sees would
be worse than none. Nothing here counts what a gap hides.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from gpuwarden.errors import GpuwardenError, InvalidInput
from gpuwarden.ruleengine.replay_columns import HistoryClient, Ticks
from gpuwarden.ruleengine.reports import expressions, plans

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
    from typing import Any

    from gpuwarden.ruleengine.replay_columns import Columns, Cost, Floats
    from gpuwarden.ruleengine.reports.expressions import Measure
    from gpuwarden.ruleengine.reports.periods import Period
    from gpuwarden.ruleengine.reports.plans import Chunk, Sizes

    Progress = Callable[[int, int], None]
    """Queries that are done, and all."""

_PROBED_SECONDS: Final = 300
"""How long the interval between samples is looked for at one moment."""
_SAME_INTERVAL: Final = 1.2
"""Two intervals are the same up to this factor."""
_MILLISECOND: Final = 0.001


@dataclass(frozen=True, slots=True)
class Rows:
    """One measure, by bin.

    Attributes:
        labels: of each row, in the order of the measure's `by`.
        values: (rows, bins), or (rows, 1) where only the whole is wanted: what adds up in seconds
            or money; of a height its mean, NaN where it is not known.
        known: seconds of each bin in which there were samples.
        source: name of the recorded series, `sampled`, or both.
    """

    labels: tuple[tuple[str, ...], ...]
    values: Floats
    known: Floats
    source: str


@dataclass(frozen=True, slots=True)
class Nodes:
    """Which nodes answered, by bin.

    Attributes:
        answered: seconds of nodes that answered.
        expected: seconds of nodes that were to answer.
    """

    answered: Floats
    expected: Floats


@dataclass(frozen=True, slots=True)
class Gathered:
    """Everything that Prometheus said of a period.

    Attributes:
        period: of what.
        nodes: which answered.
        rows: by measure.
        jobs_per_card: for each day, (instance, gpu) -> jobs.
        sizes: of the fleet, as looked up.
    """

    period: Period
    nodes: Nodes
    rows: Mapping[str, Rows]
    jobs_per_card: tuple[Mapping[tuple[str, str], int], ...]
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Outlook:
    """What was looked over before anything dear is asked.

    Attributes:
        period: of the report.
        nodes: which answered.
        sizes: of the fleet.
        measures: by name.
        marks: recorded series -> samples of it, by bin.
        plan: measure -> its queries.
    """

    period: Period
    nodes: Nodes
    sizes: Sizes
    measures: Mapping[str, Measure]
    marks: Mapping[str, Floats]
    plan: Mapping[str, tuple[Chunk, ...]]

    @property
    def queries(self) -> int:
        """How many are still to be asked."""
        return sum(map(len, self.plan.values())) + len(self.period.days())


@dataclass
class Gatherer:
    """Asks one server for one report.

    Attributes:
        history: the server.
        team: whose jobs count, or None: everybody's.
        users: of that team, or None.
        longest: seconds that one query may cover, or None: as much as the server can hold.
    """

    history: HistoryClient
    team: str | None = None
    users: Collection[str] | None = None
    longest: float | None = None
    _done: int = field(default=0, init=False)

    @property
    def cost(self) -> Cost:
        """What was asked so far."""
        return self.history.cost

    # -- looking over

    async def look(self, period: Period) -> Outlook:
        """See how large the fleet is, and which days are recorded.

        Raises:
            InvalidInput: Prometheus has nothing of the fleet in the period.
            ServiceUnavailable: it does not answer, or not wholly.
            QueryRefused: it refuses a query.
        """
        await self.history.probe(period.begin)
        ticks = _ticks(period)
        up, known, counts = (
            _single(columns)
            for columns in await _together(
                *(
                    self.history.columns(query, ticks)
                    for query in expressions.nodes_up(self._window(period.bin))
                )
            )
        )
        lit = [number for number, value in enumerate(up) if value > 0]
        if not lit:
            raise InvalidInput(
                f"{self.history.url} has no sample of a node from {_when(period, period.begin)} to "
                f"{_when(period, period.end)}: is it the right server, does it keep its data that "
                "long, and is the exporters' scrape job called gpuwarden?"
            )
        sizes = await self._sizes([ticks.begin + period.bin * lit[n] for n in _spread(len(lit))])
        answered = up * intervals(counts, sizes.scrapes, period.bin)
        nodes = Nodes(answered, _forward(known) * period.bin)
        step = plans.sampling(period.bin)
        found = expressions.measures(
            scrape=max(sizes.scrapes),
            step=step,
            inside=self._window(step),
            team=self.team,
            users=self.users,
        )
        marks = await self._marks(period, found, ticks)
        seen = [value > 0 for value in up]
        plan = {}
        for name, measure in found.items():
            recorded: Sequence[bool] = (False,) * len(period.days())
            if measure.recorded and not measure.sampled:
                recorded = (True,) * len(period.days())
            elif measure.marker in marks:
                own = marks[measure.marker]
                each = intervals(own, sizes.rules_of(measure), period.bin)
                shares = np.minimum(own * each / period.bin, 1.0)
                recorded = plans.recorded_days(period.days(), shares.tolist(), seen)
            plan[name] = plans.chunks(period, measure, recorded, sizes=sizes, longest=self.longest)
        return Outlook(period, nodes, sizes, found, marks, plan)

    async def _sizes(self, moments: Sequence[float]) -> Sizes:
        holdings = 1.0
        for moment in moments:
            for metric in ("gpu_job_holds_gpu", "gpu_up"):
                rows = await self.history.instant(f"count({metric}{{{expressions.JOB}}})", moment)
                holdings = max([holdings, *(row.value for row in rows)])
        nodes = await self.history.instant(f"topk(1, up{{{expressions.JOB}}} == 1)", moments[-1])
        instance = nodes[0].labels.get("instance", "") if nodes else ""
        scrapes = await self._intervals(expressions.one_node(instance), moments)
        rules = await self._intervals("fleet:gpus:count", moments)
        if not scrapes:
            raise InvalidInput(
                f"{self.history.url}: how often the nodes are scraped cannot be seen: two samples "
                "of one node are needed within five minutes"
            )
        return plans.Sizes(int(holdings), scrapes, rules)

    async def _intervals(self, series: str, moments: Sequence[float]) -> tuple[float, ...]:
        """Seconds between two samples, at some moments: mostly the same, the shortest first."""
        found: list[float] = []
        for moment in moments:
            ticks = Ticks(moment - _PROBED_SECONDS, 1.0, _PROBED_SECONDS + 1)
            columns = await self.history.columns(f"timestamp({series})", ticks)
            for row in columns.values[:1]:
                times = np.unique(row[np.isfinite(row)])
                if len(times) > 1:
                    found.append(max(1.0, round(float(np.median(np.diff(times))), 1)))
        kept: list[float] = []
        for interval in sorted(found):
            if not kept or interval > kept[-1] * _SAME_INTERVAL:
                kept.append(interval)
        return tuple(kept)

    async def _marks(
        self, period: Period, found: Mapping[str, Measure], ticks: Ticks
    ) -> dict[str, Floats]:
        named = sorted(
            {
                measure.marker
                for measure in found.values()
                if measure.recorded and measure.width <= period.bin
            }
        )
        columns = await _together(
            *(
                self.history.columns(expressions.marks(name, self._window(period.bin)), ticks)
                for name in named
            )
        )
        return {name: _single(answer) for name, answer in zip(named, columns, strict=True)}

    # -- fetching

    async def gather(
        self, outlook: Outlook, progress: Progress = lambda _done, _all: None
    ) -> Gathered:
        """Everything that was planned.

        Raises:
            ServiceUnavailable: no answer, or not a whole one: there is no report then.
            QueryRefused: the server refuses a query.
        """
        self._done = 0

        def told() -> None:
            self._done += 1
            progress(self._done, outlook.queries)

        parts = [(name, chunk) for name, own in outlook.plan.items() for chunk in own]
        answers = await _together(
            *(self._chunk(outlook, chunk, told) for _, chunk in parts),
            *(self._cards(outlook.period, day, told) for day in range(len(outlook.period.days()))),
        )
        cards = answers[len(parts) :]
        by_measure: dict[str, list[tuple[Chunk, _Part]]] = {name: [] for name in outlook.plan}
        for (name, chunk), answer in zip(parts, answers, strict=False):
            if isinstance(answer, _Part):
                by_measure[name].append((chunk, answer))
        return Gathered(
            outlook.period,
            outlook.nodes,
            {name: _joined(outlook, name, own) for name, own in by_measure.items()},
            tuple(each for each in cards if isinstance(each, dict)),
            outlook.sizes,
        )

    async def _chunk(self, outlook: Outlook, chunk: Chunk, told: Callable[[], None]) -> _Part:
        period, measure = outlook.period, chunk.measure
        count = chunk.stop - chunk.start
        if chunk.recorded:
            first = period.begin + period.bin * (chunk.start + 1)
            ticks = Ticks(first, period.bin, count)
            columns = await self.history.columns(measure.binned(self._window(period.bin)), ticks)
            marks = outlook.marks.get(measure.marker, np.zeros(period.count))
            marks = marks[chunk.start : chunk.stop]
            each = intervals(marks, outlook.sizes.rules_of(measure), period.bin)
            known = np.minimum(marks * each, period.bin)
            values = _finite(columns.values)
            if not measure.level:
                values = np.nan_to_num(values) * (measure.each or each)
        else:
            step = plans.sampling(period.bin)
            moments_each = round(period.bin / step)
            first = period.begin + period.bin * chunk.start + step
            ticks = Ticks(first, step, count * moments_each)
            columns = await self.history.columns(measure.sampled, ticks)
            moments = _finite(columns.values).reshape(len(columns.labels), count, moments_each)
            there = ~np.isnan(moments)
            sums = np.nansum(moments, axis=2) if len(columns.labels) else np.zeros((0, count))
            counts = there.sum(axis=2)
            known = step * (there.any(axis=0).sum(axis=1) if len(there) else np.zeros(count))
            if measure.level:
                values = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
            else:
                values = sums * step
        if measure.whole:
            values = values.sum(axis=1, keepdims=True)
        told()
        labels = [tuple(row.get(name, "") for name in measure.by) for row in columns.labels]
        return _Part(labels, values, known)

    async def _cards(
        self, period: Period, number: int, told: Callable[[], None]
    ) -> dict[tuple[str, str], int]:
        """Jobs per card of one day, however long that day is."""
        day = period.days()[number]
        seconds = (day.stop - day.start) * period.bin
        query = expressions.jobs_per_card(self._window(seconds), self.users)
        columns = await self.history.columns(
            query, Ticks(period.begin + period.bin * day.stop, period.bin, 1)
        )
        told()
        return {
            (row.get("instance", ""), row.get("gpu", "")): int(value)
            for row, (value,) in zip(columns.labels, columns.values, strict=True)
            if np.isfinite(value)
        }

    def _window(self, seconds: float) -> float:
        """The window in which no sample lies that is another bin's.

        Prometheus 2 keeps both ends of a window, 3 only the newer one.
        """
        return seconds - _MILLISECOND if self.history.closed else seconds


@dataclass(frozen=True, slots=True)
class _Part:
    labels: list[tuple[str, ...]]
    values: Floats
    known: Floats


async def _together(*waiting: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all of them; the first error ends the others, and is ours alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in waiting]
    except BaseExceptionGroup as errors:
        ours = errors.subgroup(GpuwardenError)
        if ours is None:
            raise
        raise _first(ours) from errors
    return [task.result() for task in tasks]


def intervals(counts: Floats, candidates: Sequence[float], seconds: float) -> Floats:
    """Seconds between two samples in each bin: the longest of those seen that does not overfill it.

    Where all are the same, a bin with fewer samples has a gap. Where nodes were scraped at several
    intervals within one period, a gap may be taken for a longer interval.

    Args:
        counts: samples of one series, by bin.
        candidates: intervals that were seen somewhere; none is taken for one sample in a bin.
        seconds: of a bin.
    """
    known = sorted(candidates) or [seconds]
    found = np.full(len(counts), known[0])
    for interval in known[1:]:
        found = np.where(counts * interval <= seconds * _SAME_INTERVAL, interval, found)
    return found


def _when(period: Period, moment: float) -> str:
    return f"{period.local(moment):%Y-%m-%d %H:%M}"


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def _ticks(period: Period) -> Ticks:
    """The end of each bin."""
    return Ticks(period.begin + period.bin, period.bin, period.count)


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)


def _single(columns: Columns) -> Floats:
    """The one row of an answer; 0 where there is none."""
    if not len(columns.values):
        return np.zeros(columns.values.shape[1])
    values: Floats = np.nan_to_num(_finite(columns.values[0]))
    return values


def _forward(targets: Floats) -> Floats:
    """How many nodes there should be: where nobody says so, as many as before; at first, as later.

    While Prometheus itself is down there is not even the list of its targets.
    """
    numbers = np.where(targets > 0, np.arange(len(targets)), -1)
    last = np.maximum.accumulate(numbers)
    first = int(np.argmax(targets > 0))
    filled: Floats = targets[np.where(last >= 0, last, first)]
    return filled


def _spread(count: int) -> list[int]:
    """Some places of a list, its first and last among them."""
    return sorted({(count - 1) * part // 4 for part in range(5)})


def _joined(outlook: Outlook, name: str, parts: Sequence[tuple[Chunk, _Part]]) -> Rows:
    """Portions as one; the same for every way to cut them."""
    measure, count = outlook.measures[name], outlook.period.count
    labels = sorted({label for _, part in parts for label in part.labels})
    places = {label: number for number, label in enumerate(labels)}
    fill = np.nan if measure.level else 0.0
    values = np.full((len(labels), 1 if measure.whole else count), fill)
    known = np.zeros(count)
    for chunk, part in parts:
        known[chunk.start : chunk.stop] = part.known
        for label, own in zip(part.labels, part.values, strict=True):
            if measure.whole:
                values[places[label]] += own
            else:
                values[places[label], chunk.start : chunk.stop] = own
    sources = {chunk.measure.recorded if chunk.recorded else "sampled" for chunk, _ in parts}
    return Rows(tuple(labels), values, known, " and ".join(sorted(sources)))
