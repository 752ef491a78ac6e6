"""What the gathered samples come to: by day, by hour of the week, by person and by team. Pure.

Hours are hours of cards. What is not known is not in any sum, and is told as such: every mean is
over the time in which there were samples.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.replay_columns import Floats
    from gpuwarden.ruleengine.reports.gatherings import Gathered, Rows
    from gpuwarden.ruleengine.reports.readers import Reader

HOUR: Final = 3600.0
HEIGHTS: Final = ("utilization", "p10", "p50", "p90")
MOST_DAYS_IN_HOURS: Final = 3
MOST_DAYS_BY_NAME: Final = 14
MOST_PIECES: Final = 80
SUMS: Final = ("held", "idle", "lost", "reclaimed")
"""Hours of cards, by user and team."""
MONEY: Final = ("cost", "idle_cost", "lost_cost")
"""Amounts by currency, by user and team."""


@dataclass(frozen=True, slots=True)
class Span:
    """Some bins, one after the other.

    Attributes:
        start, stop: their numbers, the second exclusive.
    """

    start: int
    stop: int

    def of(self, values: Floats) -> Floats:
        """That part of what there is for each bin."""
        return values[..., self.start : self.stop]


def figures(gathered: Gathered, span: Span) -> dict[str, Any]:
    """What a stretch of time comes to.

    Args:
        gathered: what Prometheus said.
        span: which bins.
    """
    answered, expected = (
        float(span.of(values).sum())
        for values in (gathered.nodes.answered, gathered.nodes.expected)
    )
    cards = _sum(gathered.rows["cards"], span) / HOUR
    held, idle = (_sum(gathered.rows[name], span) / HOUR for name in ("held", "idle"))
    jobs = gathered.rows["jobs"]
    known = float(span.of(jobs.known).sum())
    return {
        "coverage": _ratio(min(answered, expected), expected),
        "card_hours": round(cards, 3),
        "held_hours": round(held, 3),
        "held_share": _ratio(min(held, cards), cards),
        "idle_hours": round(idle, 3),
        "idle_share": _ratio(min(idle, held), held),
        "jobs_at_once": _ratio(_sum(jobs, span), known, 2),
        **{name: _height(gathered, name, span) for name in HEIGHTS},
    }


def totals(gathered: Gathered) -> dict[str, Any]:
    """What the whole period comes to."""
    whole = Span(0, gathered.period.count)
    return {
        **figures(gathered, whole),
        "lost_hours": round(_sum(gathered.rows["lost"], whole) / HOUR, 3),
        "reclaimed_hours": round(_sum(gathered.rows["reclaimed"], whole) / HOUR, 3),
        **{name: money(gathered, name) for name in MONEY},
    }


def money(gathered: Gathered, name: str) -> dict[str, float]:
    """Currency -> amount; empty where no price was known."""
    found: dict[str, float] = defaultdict(float)
    rows = gathered.rows[name]
    for (_, _, currency), own in zip(rows.labels, rows.values, strict=True):
        found[currency] += float(own.sum())
    return {currency: round(amount, 2) for currency, amount in sorted(found.items())}


def days(gathered: Gathered) -> list[dict[str, Any]]:
    """Each day of the zone, with how many jobs its cards had."""
    found = []
    for day, cards in zip(gathered.period.days(), gathered.jobs_per_card, strict=True):
        span = Span(day.start, day.stop)
        numbers = np.array(list(cards.values()), dtype=np.float64)
        # Cards that nobody held have had no job, and are known only from how many there were.
        hours = (day.stop - day.start) * gathered.period.bin / HOUR
        own = figures(gathered, span)
        count = max(len(numbers), round(own["card_hours"] / hours))
        found.append(
            {
                "date": day.date.isoformat(),
                "hours": round(hours, 2),
                **own,
                "cards": count,
                "jobs_per_card": round(float(numbers.sum()) / count, 2) if count else None,
                "most_jobs_on_a_card": int(numbers.max()) if len(numbers) else 0,
            }
        )
    return found


def timeline(gathered: Gathered) -> list[dict[str, Any]]:
    """The period in pieces that a plot can show: days, of few days hours, of few hours minutes."""
    period = gathered.period
    days_ = period.days()
    if len(days_) > MOST_DAYS_IN_HOURS:
        spans = [(Span(day.start, day.stop), f"{day.date:%a} {day.date.day}") for day in days_]
        if len(days_) > MOST_DAYS_BY_NAME:
            spans = [
                (span, f"{day.date.day} {day.date:%b}")
                for (span, _), day in zip(spans, days_, strict=True)
            ]
    else:
        wanted = period.seconds / MOST_PIECES
        sizes = [period.bin * number for number in (1, 2, 4, 5, 10, 12, 20, 60)]
        size = next((each for each in sizes if each >= wanted), sizes[-1])
        bins = round(size / period.bin)
        clock = "%H:%M" if size % 60 == 0 else "%H:%M:%S"
        spans = [
            (
                Span(start, min(start + bins, period.count)),
                period.local(period.begin + start * period.bin).strftime(clock),
            )
            for start in range(0, period.count, bins)
        ]
    return [
        {
            "from": period.local(period.begin + span.start * period.bin).isoformat(),
            "label": label,
            **figures(gathered, span),
        }
        for span, label in spans
    ]


def week(gathered: Gathered) -> list[list[float | None]]:
    """Mean utilisation by weekday (Monday first) and hour of the zone's clocks."""
    rows = gathered.rows["utilization"]
    found: list[list[float | None]] = [[None] * 24 for _ in range(7)]
    places = gathered.period.hours()
    weights = _weights(gathered)
    heights = rows.values[0] if len(rows.values) else np.full(gathered.period.count, np.nan)
    there = ~np.isnan(heights) & (weights > 0)
    sums, counts = np.zeros((7, 24)), np.zeros((7, 24))
    for (weekday, hour), height, weight, known in zip(places, heights, weights, there, strict=True):
        if known:
            sums[weekday, hour] += height * weight
            counts[weekday, hour] += weight
    for weekday, hour in zip(*np.nonzero(counts), strict=True):
        found[weekday][hour] = round(float(sums[weekday, hour] / counts[weekday, hour]), 4)
    return found


def week_hours(gathered: Gathered) -> list[list[float]]:
    """How many hours of the period each hour of the week has: 0 where it is outside."""
    found = [[0.0] * 24 for _ in range(7)]
    for weekday, hour in gathered.period.hours():
        found[weekday][hour] += gathered.period.bin / HOUR
    return [[round(value, 3) for value in row] for row in found]


def people(gathered: Gathered, reader: Reader) -> list[dict[str, Any]]:
    """Each user with their hours, the longest first; names as the reader may see them."""
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def of(user: str, team: str) -> dict[str, Any]:
        chosen = team or reader.team_of(user)
        return found.setdefault(
            (user, chosen),
            {
                "user": reader.shown(user),
                "team": chosen,
                **{f"{name}_hours": 0.0 for name in SUMS},
                "cost": {},
                "idle_cost": {},
                "lost_cost": {},
            },
        )

    for name in SUMS:
        rows = gathered.rows[name]
        for (user, team), own in zip(rows.labels, rows.values, strict=True):
            of(user, team)[f"{name}_hours"] += float(own.sum()) / HOUR
    for name in MONEY:
        rows = gathered.rows[name]
        for (user, team, currency), own in zip(rows.labels, rows.values, strict=True):
            amounts = of(user, team)[name]
            amounts[currency] = amounts.get(currency, 0.0) + float(own.sum())
    # Money alone is a row as well: a team may have been another when it was recorded.
    some = [
        each
        for each in found.values()
        if any(each[name] for name in (*MONEY, *(f"{name}_hours" for name in SUMS)))
    ]
    return [_told(each) for each in sorted(some, key=_by_hours)]


def teams(people_: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same by team: their sums are those of their people."""
    found: dict[str, dict[str, Any]] = {}
    for person in people_:
        own = found.setdefault(
            person["team"],
            {
                "team": person["team"],
                "people": 0,
                **{f"{name}_hours": 0.0 for name in SUMS},
                "cost": {},
                "idle_cost": {},
                "lost_cost": {},
            },
        )
        own["people"] += 1
        for name in SUMS:
            own[f"{name}_hours"] += person[f"{name}_hours"]
        for name in MONEY:
            for currency, amount in person[name].items():
                own[name][currency] = own[name].get(currency, 0.0) + amount
    return [_told(each) for each in sorted(found.values(), key=_by_hours)]


def idle_jobs(gathered: Gathered, reader: Reader, most: int) -> list[dict[str, Any]]:
    """The jobs that held cards idle for longest."""
    rows = gathered.rows["idle_jobs"]
    hours: dict[tuple[str, str, str], float] = defaultdict(float)
    for label, own in zip(rows.labels, rows.values, strict=True):
        job_id, user, team = label
        hours[job_id, user, team or reader.team_of(user)] += float(own.sum()) / HOUR
    longest = sorted(hours.items(), key=lambda item: (-item[1], item[0]))[:most]
    return [
        {"job_id": job, "user": reader.shown(user), "team": team, "idle_hours": round(spent, 3)}
        for (job, user, team), spent in longest
        if spent > 0
    ]


def busiest_cards(gathered: Gathered, most: int) -> list[dict[str, Any]]:
    """The cards that passed through most hands."""
    jobs: dict[tuple[str, str], int] = defaultdict(int)
    for cards in gathered.jobs_per_card:
        for card, count in cards.items():
            jobs[card] += count
    first = sorted(jobs.items(), key=lambda item: (-item[1], item[0]))[:most]
    return [
        {
            "card": f"{instance.rpartition(':')[0] or instance} / {gpu}",
            "jobs_per_day": round(count / len(gathered.jobs_per_card), 2),
        }
        for (instance, gpu), count in first
    ]


def _told(figures_: Mapping[str, Any]) -> dict[str, Any]:
    """With what follows from the sums, rounded."""
    held, idle = figures_["held_hours"], figures_["idle_hours"]
    rounded: dict[str, Any] = {}
    for name, value in figures_.items():
        if isinstance(value, float):
            rounded[name] = round(value, 3)
        elif isinstance(value, dict):
            rounded[name] = {key: round(amount, 2) for key, amount in sorted(value.items())}
        else:
            rounded[name] = value
    return {**rounded, "idle_share": _ratio(min(idle, held), held)}


def _by_hours(each: Mapping[str, Any]) -> tuple[float, str, str]:
    return (-each["held_hours"], each["team"], each.get("user", ""))


def _sum(rows: Rows, span: Span) -> float:
    return float(span.of(rows.values).sum()) if len(rows.values) else 0.0


def _weights(gathered: Gathered) -> Floats:
    """How much a bin counts in a mean: its hours of cards."""
    rows = gathered.rows["cards"]
    return rows.values[0] if len(rows.values) else np.zeros(gathered.period.count)


def _height(gathered: Gathered, name: str, span: Span) -> float | None:
    rows = gathered.rows[name]
    if not len(rows.values):
        return None
    heights, weights = span.of(rows.values[0]), span.of(_weights(gathered))
    there = ~np.isnan(heights) & (weights > 0)
    if not there.any():
        return None
    return round(float(np.average(heights[there], weights=weights[there])), 4)


def _ratio(part: float, whole: float, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole > 0 else None
