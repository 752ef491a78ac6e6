"""The time that a report is about, cut into bins, and into the days of a time zone. Pure.

Bins are laid over Unix time and only then given the day and the hour that the zone's clocks showed:
a day on which clocks are put back has 25 hours, one on which they are put forward 23, and no second
is counted twice or lost.
"""

from __future__ import annotations

import datetime as dt
import math
import zoneinfo
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import InvalidInput
from gpuwarden.option_values import parse_moment

if TYPE_CHECKING:
    from collections.abc import Iterator

DAY_SECONDS: Final = 86400.0
QUARTER_SECONDS: Final = 900.0
"""Every zone of today is a multiple of this from UTC: no bin lies in two days or two hours."""
MAX_SECONDS: Final = 2 * 366 * DAY_SECONDS
_BINS: Final = ((2 * 3600.0, 15.0), (12 * 3600.0, 60.0), (4 * DAY_SECONDS, 300.0))
"""Longest period -> seconds of its bins."""


@dataclass(frozen=True, slots=True)
class Day:
    """A day of the zone, as far as it lies within the period.

    Attributes:
        date: in the zone.
        start, stop: numbers of its bins, the second exclusive.
    """

    date: dt.date
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Period:
    """From a moment to just before another, in bins of the same length.

    Attributes:
        begin, end: Unix times, multiples of `bin`.
        bin: seconds of a bin.
        zone: IANA name of the zone whose days are told.
    """

    begin: float
    end: float
    bin: float
    zone: str

    @property
    def count(self) -> int:
        """How many bins there are."""
        return round((self.end - self.begin) / self.bin)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin

    def local(self, moment: float) -> dt.datetime:
        """What the zone's clocks show."""
        return dt.datetime.fromtimestamp(moment, zoneinfo.ZoneInfo(self.zone))

    def starts(self) -> Iterator[float]:
        """Unix time at which each bin begins."""
        return (self.begin + self.bin * number for number in range(self.count))

    def days(self) -> tuple[Day, ...]:
        """The days of the zone, in order."""
        zone = zoneinfo.ZoneInfo(self.zone)
        dates = (dt.datetime.fromtimestamp(at, zone).date() for at in self.starts())
        found: list[Day] = []
        start = 0
        for date, same in groupby(dates):
            stop = start + sum(1 for _ in same)
            found.append(Day(date, start, stop))
            start = stop
        return tuple(found)

    def hours(self) -> tuple[tuple[int, int], ...]:
        """Weekday (Monday is 0) and hour of each bin, by the zone's clocks."""
        zone = zoneinfo.ZoneInfo(self.zone)
        local = (dt.datetime.fromtimestamp(at, zone) for at in self.starts())
        return tuple((each.weekday(), each.hour) for each in local)

    def before(self) -> Period:
        """The one of the same length just before: of whole days, as many days of the calendar."""
        first, last = self.local(self.begin), self.local(self.end)
        if first.time() == last.time() == dt.time():
            days = (last.date() - first.date()).days
            begin = _midnight(first.date() - dt.timedelta(days=days), self.zone)
        else:
            begin = self.begin - self.seconds
        return Period(begin, self.begin, self.bin, self.zone)


def period_of(begin: float, end: float, zone: str, *, bins: float | None = None) -> Period:
    """The bins that cover what was asked for.

    Args:
        begin: Unix time; moved back to the edge of a bin.
        end: Unix time; moved forward to the edge of a bin.
        zone: IANA name.
        bins: seconds of a bin, or None: chosen by the length.

    Raises:
        InvalidInput: there is no time in between, or too much.
    """
    if end <= begin:
        raise InvalidInput("--to is not after --from: there is nothing to report on")
    if end - begin > MAX_SECONDS:
        raise InvalidInput("a report covers at most two years: give a later --from")
    chosen = bins
    if chosen is None:
        fitting = (size for longest, size in _BINS if end - begin <= longest)
        chosen = next(fitting, QUARTER_SECONDS)
    return Period(
        math.floor(begin / chosen) * chosen, math.ceil(end / chosen) * chosen, chosen, zone
    )


def moment_in(text: str, zone: str, *, now: float) -> float:
    """A moment as people write it; without a zone of its own it is one of the report's.

    Raises:
        InvalidInput: it is none; the text says how to write it.
    """
    try:
        return parse_moment(text, now=now, zone=zoneinfo.ZoneInfo(zone))
    except ValueError as error:
        raise InvalidInput(str(error)) from error


def last_week(now: float, zone: str, *, weekday: int, minute: int) -> tuple[float, float, float]:
    """The week that the newest weekly report is about.

    Args:
        now: Unix time.
        zone: whose week it is.
        weekday: on which it is due, Monday is 0.
        minute: of that day, at which it is due.

    Returns:
        Begin and end of its seven days, and when it was due; Unix times.
    """
    local = dt.datetime.fromtimestamp(now, zoneinfo.ZoneInfo(zone))
    date = local.date() - dt.timedelta(days=(local.weekday() - weekday) % 7)
    if _at(date, minute, zone) > now:
        date -= dt.timedelta(days=7)
    end = _midnight(date, zone)
    return _midnight(date - dt.timedelta(days=7), zone), end, _at(date, minute, zone)


def _midnight(date: dt.date, zone: str) -> float:
    return _at(date, 0, zone)


def _at(date: dt.date, minute: int, zone: str) -> float:
    # What a clock skips is taken as if it had not been put forward yet: as early as can be.
    clock = dt.time(minute // 60, minute % 60, tzinfo=zoneinfo.ZoneInfo(zone))
    return dt.datetime.combine(date, clock).timestamp()
