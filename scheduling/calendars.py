"""Bookings as iCalendar (RFC 5545), for programs that show calendars. Pure.

Each slot is an event of its own with an id that never changes: what was cancelled stays in the
calendar as CANCELLED, so that it vanishes from programs that have it already. Times are those of
the zone's clocks, whose rules come along (VTIMEZONE).
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import icalendar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from zoneinfo import ZoneInfo

    from gpuwarden.scheduling.stores import Booked

_PRODUCT = "-//gpuwarden//bookings 1//EN"


def calendar_of(slots: Iterable[Booked], *, cluster: str, team: str, zone: ZoneInfo) -> bytes:
    """A calendar of slots.

    Args:
        slots: also those that were given back.
        cluster: its name; part of every event's id.
        team: whose, or an empty text: everybody's.
        zone: whose clocks.

    Returns:
        The text, UTF-8, lines folded and ended as the format has it.
    """
    calendar = icalendar.Calendar()
    calendar.add("prodid", _PRODUCT)
    calendar.add("version", "2.0")
    calendar.add("method", "PUBLISH")
    calendar.add("x-wr-calname", f"GPUs of {team or 'all teams'} ({cluster})")
    calendar.add("x-wr-timezone", zone.key)
    calendar.add("refresh-interval", dt.timedelta(minutes=15), parameters={"VALUE": "DURATION"})
    for item in slots:
        calendar.add_component(_event(item, cluster, zone))
    if zone.key != "UTC":
        calendar.add_missing_timezones()
    found: bytes = calendar.to_ical()
    return found


def _event(item: Booked, cluster: str, zone: ZoneInfo) -> icalendar.Event:
    slot, event = item.slot, icalendar.Event()
    changed = item.made if item.changed is None else item.changed
    event.add("uid", f"{slot.id}@{cluster}.gpuwarden")
    event.add("dtstamp", _utc(changed))
    event.add("created", _utc(item.made))
    event.add("last-modified", _utc(changed))
    event.add("sequence", item.revision)
    event.add("dtstart", _local(slot.start, zone))
    event.add("dtend", _local(slot.end, zone))
    event.add("summary", f"{slot.team}: {slot.gpus} x {slot.card}")
    about = [f"Booked by {slot.who} ({slot.id}), {slot.gpu_hours:.1f} GPU-hours."]
    if item.words:
        about.append(item.words)
    event.add("description", "\n".join(about))
    event.add("categories", [slot.team])
    event.add("status", "CONFIRMED" if item.released is None else "CANCELLED")
    # Others' bookings do not make anybody busy.
    event.add("transp", "TRANSPARENT")
    return event


def _utc(at: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(int(at), dt.UTC)


def _local(at: float, zone: ZoneInfo) -> dt.datetime:
    """By the zone's clocks; in the hour that they show twice by UTC, which has it once."""
    local = dt.datetime.fromtimestamp(int(at), zone)
    twice = local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset()
    return _utc(at) if twice else local
