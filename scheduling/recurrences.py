"""Slots that come again, by the clocks on the wall of a zone. Pure.

`20:00 weekly` is 20:00 on the wall in summer and in winter. Each slot is as long as the first one,
in seconds: it costs the same, and in the night in which clocks change it ends an hour off. Where
a clock skips the time of a start the slot begins as much later (02:30 becomes 03:30), where the
clock shows it twice, at the first: as RFC 5545 has it, so that calendars agree.
"""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from zoneinfo import ZoneInfo

MAX_SLOTS = 1000
"""Of one booking; a daily one of more than two years."""


class Repeat(StrEnum):
    """How a booking comes again."""

    NONE = "none"
    DAILY = "daily"
    WEEKDAYS = "weekdays"
    """Monday to Friday."""
    WEEKLY = "weekly"


def starts(first: float, repeat: Repeat, *, until: float, zone: ZoneInfo) -> tuple[float, ...]:
    """When the slots of a booking begin.

    Args:
        first: Unix time of the first one.
        repeat: how it comes again.
        until: Unix time; none begins after it.
        zone: whose clocks.

    Returns:
        Unix times in order, `first` among them unless `until` is before it; at most MAX_SLOTS.
    """
    if repeat is Repeat.NONE:
        return (first,)
    found: list[float] = []
    for at in _each(first, repeat, zone):
        if at > until or len(found) == MAX_SLOTS:
            break
        found.append(at)
    return tuple(found)


def _each(first: float, repeat: Repeat, zone: ZoneInfo) -> Iterator[float]:
    yield first
    local = dt.datetime.fromtimestamp(first, zone)
    step = 7 if repeat is Repeat.WEEKLY else 1
    day = local.date()
    while day <= dt.date.max - dt.timedelta(days=step):
        day += dt.timedelta(days=step)
        if repeat is Repeat.WEEKDAYS and day.weekday() > 4:
            continue
        yield dt.datetime.combine(day, local.time().replace(fold=0), zone).timestamp()
