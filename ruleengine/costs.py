"""Statements: what GPU time was held, by whom, and what it costs by tariff, rounded. Pure.

A holding is one attempt on one card. Its measured time is rounded by `prices.billing`, and its cost
with it; the sums of a statement are sums of its holdings. Currencies are never added up, and time
without a known price is told apart and costs nothing.
"""

from __future__ import annotations

import datetime as dt
import itertools
import zoneinfo
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gpuwarden.periods import Span
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.slices import share_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gpuwarden.hours import Hours
    from gpuwarden.ruleengine.prices import Billing, Prices, Rate

Level = Literal["team", "user", "project", "job"]
"""What the lines of a statement are about."""
LABELS: Mapping[Level, tuple[str, ...]] = {
    "team": ("team",),
    "user": ("user", "team"),
    "project": ("project", "team"),
    "job": ("job_id", "user", "team", "project"),
}
"""What tells lines apart."""
SCHEMA = "gpuwarden.costs/v1"
DAY_SECONDS = 86400.0


def spans(prices: Prices | None, whole: Span, *, longest: float = DAY_SECONDS) -> tuple[Span, ...]:
    """Cut a time into parts in which no price changes.

    Args:
        prices: with their tariffs, or None.
        whole: what is cut.
        longest: seconds that a part may be long.

    Returns:
        Parts without a gap, in order; a tariff counts for all of a part or for none of it.
    """
    edges = {whole.begin, whole.end}
    steps = max(1, -int(-whole.seconds // longest))
    edges |= {whole.begin + whole.seconds * n / steps for n in range(1, steps)}
    for tariff in () if prices is None else prices.tariffs:
        edges |= {at.timestamp() for at in (tariff.from_, tariff.until) if at is not None}
        edges |= {at for each in tariff.during for at in switches(each, whole)}
    inside = sorted(at for at in edges if whole.begin <= at <= whole.end)
    return tuple(Span(a, b) for a, b in itertools.pairwise(inside))


def switches(hours: Hours, whole: Span) -> tuple[float, ...]:
    """When hours of the week begin and end within a time, by the clocks of their zone.

    A clock that is put on or back is seen: where nothing else changes, at its jump.
    """
    found: list[float] = []
    edges = sorted({whole.begin, whole.end, *_candidates(hours, whole)})
    before: bool | None = None
    for begin, end in itertools.pairwise(edges):
        inside = hours.include((begin + end) / 2)
        if before is not None and inside is not before:
            found.append(begin)
        before = inside
    return tuple(found)


def _candidates(hours: Hours, whole: Span) -> Iterator[float]:
    """Every moment at which the answer may change: the clock times of each day, and jumps."""
    zone = zoneinfo.ZoneInfo(hours.zone)
    day = dt.datetime.fromtimestamp(whole.begin - DAY_SECONDS, zone).date()
    last = dt.datetime.fromtimestamp(whole.end + DAY_SECONDS, zone).date()
    while day <= last:
        midnight = dt.datetime.combine(day, dt.time(), zone)
        for minutes in {0, hours.from_ % 1440, hours.to % 1440}:
            for fold in (0, 1):
                clock = dt.time(minutes // 60, minutes % 60, fold=fold)
                yield _within(dt.datetime.combine(day, clock, zone).timestamp(), whole)
        yield from (_within(at, whole) for at in _jumps(midnight))
        day += dt.timedelta(days=1)


def _jumps(midnight: dt.datetime) -> Iterator[float]:
    """When the clock jumps on a day; to the second, by halving."""
    begin, offset = midnight.timestamp(), midnight.utcoffset()
    zone = midnight.tzinfo
    end = begin + DAY_SECONDS
    if dt.datetime.fromtimestamp(end, zone).utcoffset() == offset:
        return
    while end - begin > 1:
        middle = (begin + end) // 2
        same = dt.datetime.fromtimestamp(middle, zone).utcoffset() == offset
        begin, end = (middle, end) if same else (begin, middle)
    yield end


def _within(at: float, whole: Span) -> float:
    return min(max(at, whole.begin), whole.end)


class Use(NamedTuple):
    """What was measured of one holding in one part of the time.

    Attributes:
        labels: job_id, user, team, project.
        card: what it was held on: the node's target and the UUID.
        model: as NVML names it, with the profile of a MIG instance.
        held: seconds that it was held.
        gpu_seconds: the same by its share of the card; of a shared card a part.
        idle_gpu_seconds: of these, those in which it was not used.
    """

    labels: Mapping[str, str]
    card: tuple[str, str]
    model: str
    held: float
    gpu_seconds: float
    idle_gpu_seconds: float = 0.0


@dataclass(slots=True)
class _Holding:
    """One attempt on one card, in all parts of the time."""

    parts: list[tuple[Use, Rate | None]] = field(default_factory=list)

    def factor(self, billing: Billing | None, *, whole: bool) -> float:
        """How much longer it is billed than it was held, at least 1."""
        held = sum(use.held for use, _ in self.parts)
        if billing is None or held <= 0:
            return 1.0
        return billing.billed(held, whole=whole) / held


@dataclass(slots=True)
class Line:
    """One line of a statement, or its sum.

    Attributes:
        labels: what it is about.
        jobs: attempts.
        gpu_seconds: that were held, by share.
        billed_gpu_seconds: the same after rounding.
        idle_gpu_seconds: held and not used.
        unpriced_gpu_seconds: held on cards without a price.
        cost: currency -> amount, with rounding.
        idle_cost: currency -> amount of what was held idle, without rounding.
        tariffs: tariff -> GPU seconds; an empty name is of the prices that hold otherwise.
        lost_gpu_seconds: work that no saved state covered, or None: not known at this level.
        lost_cost: currency -> amount of it.
        reclaimed_gpu_seconds: that others held in the day after an end, or None: likewise.
    """

    labels: Mapping[str, str]
    jobs: int = 0
    gpu_seconds: float = 0.0
    billed_gpu_seconds: float = 0.0
    idle_gpu_seconds: float = 0.0
    unpriced_gpu_seconds: float = 0.0
    cost: dict[str, float] = field(default_factory=dict)
    idle_cost: dict[str, float] = field(default_factory=dict)
    tariffs: dict[str, float] = field(default_factory=dict)
    lost_gpu_seconds: float | None = None
    lost_cost: dict[str, float] = field(default_factory=dict)
    reclaimed_gpu_seconds: float | None = None

    def document(self) -> dict[str, Any]:
        """For JSON; GPU-hours, and amounts to the cent."""
        return {
            **self.labels,
            "jobs": self.jobs,
            "gpu_hours": _hours(self.gpu_seconds),
            "billed_gpu_hours": _hours(self.billed_gpu_seconds),
            "idle_gpu_hours": _hours(self.idle_gpu_seconds),
            "unpriced_gpu_hours": _hours(self.unpriced_gpu_seconds),
            "cost": _cents(self.cost),
            "idle_cost": _cents(self.idle_cost),
            "tariffs": {name or "base": _hours(n) for name, n in sorted(self.tariffs.items())},
            "lost_gpu_hours": _hours(self.lost_gpu_seconds),
            "lost_cost": _cents(self.lost_cost),
            "reclaimed_gpu_hours": _hours(self.reclaimed_gpu_seconds),
        }


@dataclass(frozen=True, slots=True)
class Statement:
    """Who held what, and what it costs.

    Attributes:
        span: the time.
        by: what its lines are about.
        lines: dearest first, then longest.
        total: of all lines.
        covered: share of the time of which anything was recorded; the rest counts as no use.
        notes: what a reader must know, in words.
    """

    span: Span
    by: Level
    lines: tuple[Line, ...]
    total: Line
    covered: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def currencies(self) -> tuple[str, ...]:
        """Every currency in it, sorted."""
        return tuple(sorted({*self.total.cost, *self.total.lost_cost}))

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "from": rfc3339(self.span.begin),
            "to": rfc3339(self.span.end),
            "by": self.by,
            "covered": None if self.covered is None else round(self.covered, 4),
            "notes": list(self.notes),
            "lines": [line.document() for line in self.lines],
            "total": self.total.document(),
        }


@dataclass(frozen=True, slots=True)
class Extra:
    """A figure that was counted elsewhere: lost or reclaimed time of some labels."""

    labels: Mapping[str, str]
    gpu_seconds: float = 0.0
    cost: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Costs:
    """Everything that was measured in a time, from which statements at any level are made.

    Attributes:
        span: the time.
        prices: or None: nothing has a price.
        ran_before: attempts that held a card already when it began.
        runs_on: attempts that still held one when it ended; only what has ended is rounded.
        lost: work that ends have cost, by user and team; and by job, where `jobs_known`.
        jobs_known: whether the ledger told of single jobs what was lost.
        reclaimed: what others held afterwards.
        covered: share of the time of which anything was recorded, or None.
        notes: what a reader must know.
    """

    span: Span
    prices: Prices | None = None
    ran_before: Collection[str] = ()
    runs_on: Collection[str] = ()
    lost: Sequence[Extra] = ()
    jobs_known: bool = False
    reclaimed: Sequence[Extra] = ()
    covered: float | None = None
    notes: Sequence[str] = ()
    _holdings: dict[tuple[str, tuple[str, str]], _Holding] = field(default_factory=dict)

    def add(self, span: Span, uses: Iterable[Use]) -> None:
        """Take what was measured in a part of the time, in which no price changes."""
        middle = (span.begin + span.end) / 2
        rates: dict[str, Rate | None] = {}
        for use in uses:
            if use.model not in rates:
                rates[use.model] = (
                    None if self.prices is None else self.prices.rate(use.model, middle)
                )
            key = (use.labels["job_id"], use.card)
            self._holdings.setdefault(key, _Holding()).parts.append((use, rates[use.model]))

    def statement(self, by: Level) -> Statement:
        """The lines and the sum of a level."""
        lines: dict[tuple[str, ...], Line] = {}
        total = self._new({}, by)
        jobs: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
        billing = None if self.prices is None else self.prices.billing
        for (job, _card), holding in self._holdings.items():
            factor = 1.0
            if job not in self.runs_on:
                factor = holding.factor(billing, whole=job not in self.ran_before)
            for use, rate in holding.parts:
                key = _key(by, use.labels)
                line = lines.setdefault(key, self._new(use.labels, by))
                jobs[key].add(job)
                jobs[()].add(job)
                for each in (line, total):
                    _charge(each, use, rate, factor)
        self._add_extras(lines, total, by)
        for key, line in lines.items():
            line.jobs = len(jobs[key])
        total.jobs = len(jobs[()])
        ordered = sorted(lines.values(), key=_weight, reverse=True)
        return Statement(self.span, by, tuple(ordered), total, self.covered, tuple(self.notes))

    def _new(self, labels: Mapping[str, str], by: Level) -> Line:
        """A line of zeros; what is not known at a level is None."""
        line = Line({name: labels[name] for name in LABELS[by]} if labels else {})
        if by in ("team", "user") or (by == "job" and self.jobs_known):
            line.lost_gpu_seconds = 0.0
        if by != "project":
            line.reclaimed_gpu_seconds = 0.0
        return line

    def _add_extras(self, lines: dict[tuple[str, ...], Line], total: Line, by: Level) -> None:
        for extra in self.lost:
            line = self._line_of(extra, lines, by)
            for each in () if line is None else (line, total):
                each.lost_gpu_seconds = _added(each.lost_gpu_seconds, extra.gpu_seconds)
                for currency, amount in extra.cost.items():
                    _put(each.lost_cost, currency, amount)
        for extra in self.reclaimed:
            line = self._line_of(extra, lines, by)
            for each in () if line is None else (line, total):
                each.reclaimed_gpu_seconds = _added(each.reclaimed_gpu_seconds, extra.gpu_seconds)

    def _line_of(self, extra: Extra, lines: dict[tuple[str, ...], Line], by: Level) -> Line | None:
        """The line that a figure belongs to, or None: it is not known so closely."""
        labels = extra.labels
        if by == "job" and "job_id" in labels:
            own = (line for line in lines.values() if line.labels["job_id"] == labels["job_id"])
            found = next(own, None)
            if found is not None:
                return found
            # Of a job that was ended before: it held nothing now, and is told all the same.
            labels = {**labels, "project": "none"}
        if not labels.keys() >= set(LABELS[by]):
            return None
        return lines.setdefault(_key(by, labels), self._new(labels, by))


def _key(by: Level, labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in LABELS[by])


def _charge(line: Line, use: Use, rate: Rate | None, factor: float) -> None:
    line.gpu_seconds += use.gpu_seconds
    line.billed_gpu_seconds += use.gpu_seconds * factor
    line.idle_gpu_seconds += use.idle_gpu_seconds
    if rate is None:
        line.unpriced_gpu_seconds += use.gpu_seconds
        return
    _put(line.tariffs, rate.tariff, use.gpu_seconds)
    if use.gpu_seconds <= 0 or use.held <= 0:
        return
    # A MIG instance has a price of its own; a shared card is paid by all who hold it.
    hourly = rate.price.amount * _tenancy(use)
    _put(line.cost, rate.price.currency, hourly * use.held * factor / 3600)
    idle = use.held * use.idle_gpu_seconds / use.gpu_seconds
    _put(line.idle_cost, rate.price.currency, hourly * idle / 3600)


def _tenancy(use: Use) -> float:
    """Its part of the card or instance, on average: 1 where nobody else held it."""
    return use.gpu_seconds / use.held / share_of(use.model)


def _added(before: float | None, more: float) -> float | None:
    return None if before is None else before + more


def _put(amounts: dict[str, float], name: str, amount: float) -> None:
    amounts[name] = amounts.get(name, 0.0) + amount


def _weight(line: Line) -> tuple[float, float, tuple[str, ...]]:
    # Amounts of different currencies cannot be compared: the largest single one decides.
    dearest = max(line.cost.values(), default=0.0)
    return (dearest, line.gpu_seconds, tuple(line.labels.values()))


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds / 3600, 6)


def _cents(amounts: Mapping[str, float]) -> dict[str, float]:
    return {currency: round(amount, 2) for currency, amount in sorted(amounts.items())}
