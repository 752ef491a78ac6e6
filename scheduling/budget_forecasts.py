"""How much of a budget will be used by the end of its period. Pure.

By days of the week: what a Monday used on average of the weeks that are known, and so on. Below a
week of whole days nothing is foretold, and up to two weeks every day is taken for the same.
"""

from __future__ import annotations

import datetime as dt
import zoneinfo
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.periods import Span, period_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_DAYS = 7
"""Whole days of history, below which nothing is said."""
PROFILE_DAYS = 14
"""From which on the days of the week are told apart."""
MOST_DAYS = 56
"""How far back days count: what a team did in spring says little of autumn."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a period will have used.

    Attributes:
        amount: at its end, what is used already included.
        days: whole days that it rests on.
        by_weekday: whether the days of the week were told apart.
    """

    amount: float
    days: int
    by_weekday: bool


def whole_days(zone: str, now: float, *, days: int = MOST_DAYS) -> tuple[Span, ...]:
    """The last whole days before today, by the clocks of a zone, the oldest first."""
    found: list[Span] = []
    begin = period_of("day", zone, now).begin
    while len(found) < days:
        day = period_of("day", zone, begin - 1)
        found.append(day)
        begin = day.begin
    return tuple(reversed(found))


def outlook(
    used: float, history: Sequence[tuple[Span, float]], *, zone: str, now: float, end: float
) -> Outlook | None:
    """Foretell what a period will have used at its end.

    Args:
        used: in the period, up to now.
        history: whole days and what was used in each; days before the first use are left out by
            the caller, days without use are 0.
        zone: whose days.
        now: Unix time.
        end: of the period, Unix time.

    Returns:
        None where there are too few days.
    """
    recent = sorted(history)[-MOST_DAYS:]
    if len(recent) < LEAST_DAYS:
        return None
    by_weekday = len(recent) >= PROFILE_DAYS
    hourly = _profile(recent, zone, by_weekday=by_weekday)
    amount, at = used, now
    while at < end:
        day = period_of("day", zone, at)
        until = min(day.end, end)
        amount += hourly[_weekday(day.begin, zone)] * (until - at)
        at = until
    return Outlook(amount, len(recent), by_weekday)


def _profile(
    recent: Sequence[tuple[Span, float]], zone: str, *, by_weekday: bool
) -> Mapping[int, float]:
    """Day of the week -> what a second of it uses: days of 23 and 25 hours are as dense."""
    sums = {day: [0.0, 0.0] for day in range(7)}
    for span, amount in recent:
        days = [_weekday(span.begin, zone)] if by_weekday else list(sums)
        for day in days:
            sums[day][0] += amount
            sums[day][1] += span.seconds
    return {day: amount / seconds if seconds else 0.0 for day, (amount, seconds) in sums.items()}


def _weekday(at: float, zone: str) -> int:

    return dt.datetime.fromtimestamp(at, zoneinfo.ZoneInfo(zone)).weekday()
