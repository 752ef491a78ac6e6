"""Times from a moment to another, and the calendar's periods, by the clocks of a zone. Pure."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from typing import Literal, NamedTuple

Period = Literal["day", "week", "month"]


class Span(NamedTuple):
    """A time from `begin` on until just before `end`, Unix seconds."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


def period_of(per: Period, zone: str, now: float) -> Span:
    """The calendar's period that a moment lies in, as Unix times.

    A day that is 23 hours long is one.

    Args:
        per: day, week (from Monday) or month.
        zone: whose calendar.
        now: Unix time.
    """
    known = zoneinfo.ZoneInfo(zone)
    today = dt.datetime.fromtimestamp(now, known).date()
    if per == "day":
        first, after = today, today + dt.timedelta(days=1)
    elif per == "week":
        first = today - dt.timedelta(days=today.weekday())
        after = first + dt.timedelta(days=7)
    else:
        first = today.replace(day=1)
        after = (first + dt.timedelta(days=32)).replace(day=1)
    begin, end = (dt.datetime.combine(day, dt.time(), known).timestamp() for day in (first, after))
    return Span(begin, end)
