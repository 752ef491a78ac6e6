"""Windows: when in the week jobs may start, as stretches of time, on every night of the year. Pure.

A window opens at a time on the wall and closes at one. Where clocks are put back, it opens at the
first and closes at the second of two moments that are called the same, so that it has no gap; a
time that the clocks skip is the moment at which they skip it.
"""

from __future__ import annotations

import datetime as dt
import functools
import zoneinfo
from typing import TYPE_CHECKING

from gpuwarden.hours import DAYS
from gpuwarden.periods import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.hours import Day

_DAY = 86400.0
_LOOK = 9
"""Days on either side of a moment: a window comes back every week, and lasts a day at most."""


@functools.lru_cache(maxsize=4096)
def moment_of(day: dt.date, minutes: int, zone: str, *, later: bool) -> float:
    """The Unix time at which the clocks of a zone show a time.

    Args:
        day: of that time.
        minutes: since midnight; 1440 is the end of the day.
        zone: an IANA name.
        later: which moment is meant if two are called the same.
    """
    wall = dt.datetime.combine(day, dt.time()) + dt.timedelta(minutes=minutes)
    known = zoneinfo.ZoneInfo(zone)
    first = wall.replace(tzinfo=known, fold=0).timestamp()
    second = wall.replace(tzinfo=known, fold=1).timestamp()
    if first <= second:
        return second if later else first
    # Skipped. With the offset from before the moment lies after the change, and vice versa.
    low, high = int(second), int(first)
    before = dt.datetime.fromtimestamp(low, known).utcoffset()
    while high - low > 1:
        middle = (low + high) // 2
        if dt.datetime.fromtimestamp(middle, known).utcoffset() == before:
            low = middle
        else:
            high = middle
    return float(high)


def oddity(day: dt.date, minutes: int, zone: str) -> str | None:
    """Whether a time is `skipped` or `repeated` on a day, or None where it is an ordinary one."""
    wall = dt.datetime.combine(day, dt.time()) + dt.timedelta(minutes=minutes)
    known = zoneinfo.ZoneInfo(zone)
    first = wall.replace(tzinfo=known, fold=0).timestamp()
    second = wall.replace(tzinfo=known, fold=1).timestamp()
    if first == second:
        return None
    return "repeated" if first < second else "skipped"


def openings(
    days: Sequence[Day], opens: int, closes: int, *, zone: str, around: float
) -> tuple[Span, ...]:
    """When a window is open in the nine days before and after a moment, in order.

    Args:
        days: on which it opens.
        opens: minutes since midnight.
        closes: likewise; on the next day if that is not after `opens`.
        zone: an IANA name.
        around: Unix time.

    Returns:
        Stretches that neither overlap nor touch; the first and last may have begun earlier, or end
        later, than is looked at.
    """
    today = dt.datetime.fromtimestamp(around, zoneinfo.ZoneInfo(zone)).date()
    return _openings(tuple(days), opens, closes, zone=zone, today=today)


@functools.lru_cache(maxsize=256)
def _openings(
    days: tuple[Day, ...], opens: int, closes: int, *, zone: str, today: dt.date
) -> tuple[Span, ...]:
    # Remembered: every job that waits for a window asks for the same at every tick.
    merged: list[Span] = []
    for span in _each(days, opens, closes, zone=zone, today=today):
        if merged and span.begin <= merged[-1].end:
            merged[-1] = Span(merged[-1].begin, max(span.end, merged[-1].end))
        else:
            merged.append(span)
    return tuple(merged)


def _each(
    days: Sequence[Day], opens: int, closes: int, *, zone: str, today: dt.date
) -> Iterator[Span]:
    for offset in range(-_LOOK, _LOOK + 1):
        day = today + dt.timedelta(days=offset)
        if DAYS[day.weekday()] not in days:
            continue
        last = day if closes > opens else day + dt.timedelta(days=1)
        begin = moment_of(day, opens, zone, later=False)
        end = moment_of(last, closes, zone, later=True)
        if end > begin:
            yield Span(begin, end)


def opening_at(spans: Sequence[Span], now: float) -> Span | None:
    """The stretch that a moment lies in, or None: closed."""
    return next((span for span in spans if span.begin <= now < span.end), None)


def next_opening(spans: Sequence[Span], now: float) -> Span | None:
    """The first stretch that begins after a moment; None if it never closes."""
    return next((span for span in spans if span.begin > now), None)


def always_open(spans: Sequence[Span], now: float) -> bool:
    """Whether it has no end within a week."""
    span = opening_at(spans, now)
    return span is not None and span.end - now > 7 * _DAY
