"""A week of bookings by the clocks of a zone: who has what, and what is free. Pure.

A day is what the zone says it is: of 23 hours where the clock goes forward, of 25 where it goes
back. What is free is free of bookings; jobs without one may run there until its time comes.
"""

from __future__ import annotations

import datetime as dt
import itertools
import zoneinfo
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.periods import Span, period_of
from gpuwarden.schedule_api import BookingState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.schedule_api import BookingEntry, Card, ScheduleDocument

DAYS = 7
HOUR = 3600.0
HOLDING = frozenset(
    {BookingState.PROPOSED, BookingState.BOOKED, BookingState.ACTIVE, BookingState.IDLE}
)
"""States in which a slot takes its cards; released and over it takes none from now on."""


@dataclass(frozen=True, slots=True)
class Day:
    """One day of a zone.

    Attributes:
        date: in the zone.
        span: from its first moment until the next day's.
    """

    date: dt.date
    span: Span

    @property
    def hours(self) -> int:
        """How long it is; 24 but for the days on which the clock is changed."""
        return round(self.span.seconds / HOUR)


def week_days(zone: str, first: dt.date) -> tuple[Day, ...]:
    """The seven days from a Monday on.

    Args:
        zone: IANA name.
        first: the Monday.
    """
    known = zoneinfo.ZoneInfo(zone)
    found = []
    for number in range(DAYS):
        day = first + dt.timedelta(days=number)
        noon = dt.datetime.combine(day, dt.time(12), known).timestamp()
        found.append(Day(day, period_of("day", zone, noon)))
    return tuple(found)


def monday(zone: str, now: float) -> dt.date:
    """The first day of the week that a moment lies in, by the clocks of a zone."""
    today = dt.datetime.fromtimestamp(now, zoneinfo.ZoneInfo(zone)).date()
    return today - dt.timedelta(days=today.weekday())


def week_name(first: dt.date) -> str:
    """How a week is named in addresses: 2026-W49, by ISO 8601."""
    year, week, _ = first.isocalendar()
    return f"{year}-W{week:02d}"


def week_of(name: str) -> dt.date | None:
    """The Monday of a week's name, or None where there is no such week."""
    if not name.isascii() or len(name) != 8 or name[4:6] != "-W":
        return None
    try:
        first = dt.date.fromisocalendar(int(name[:4]), int(name[6:]), 1)
    except ValueError:
        return None
    # Beyond these a week before or after it has no name.
    return first if 1971 <= first.year <= 9990 else None


def week_rows(
    document: ScheduleDocument, days: Sequence[Day], person: Person, *, now: float
) -> list[dict[str, Any]]:
    """Each day with its slots, and what is free of each kind of cards from now on.

    Args:
        document: of the scheduler.
        days: of the week.
        person: who reads it; what a slot is for is told to its team and to operators.
        now: Unix time.
    """
    return [
        {
            "date": day.date.isoformat(),
            "title": f"{day.date:%a %d %b}",
            "hours": day.hours,
            "today": day.span.begin <= now < day.span.end,
            "slots": [
                _slot(entry, day.span, person)
                for entry in sorted(document.bookings, key=lambda each: (each.start, each.id))
                if entry.start < day.span.end and entry.end > day.span.begin
            ],
            "cards": [
                {
                    "name": card.name,
                    "count": card.count,
                    "parts": list(_parts(document.bookings, card, day.span)),
                    "free": list(_free(document.bookings, card, day.span, now=now)),
                }
                for card in document.cards
            ],
        }
        for day in days
    ]


def _slot(entry: BookingEntry, day: Span, person: Person) -> dict[str, Any]:
    told = person.sees_all or entry.team in person.teams or entry.who == person.name
    return {
        "id": entry.id,
        "team": entry.team,
        "user": entry.who,
        "gpus": entry.gpus,
        "gpu_type": entry.gpu_type,
        "begin": max(entry.start, day.begin),
        "end": min(entry.end, day.end),
        "from_before": entry.start < day.begin,
        "goes_on": entry.end > day.end,
        "repeat": entry.repeat,
        "standing": entry.state.value,
        "tone": {"active": "good", "idle": "bad", "booked": "warn"}.get(entry.state.value, "dull"),
        "words": entry.words if told else "",
    }


def _parts(bookings: Sequence[BookingEntry], card: Card, day: Span) -> Iterator[dict[str, float]]:
    """Stretches of a day with what share of a kind is booked in them, as shares of the day."""
    for span, booked in _stretches(bookings, card, day):
        if booked:
            yield {
                "x": (span.begin - day.begin) / day.seconds,
                "width": span.seconds / day.seconds,
                "share": min(1.0, booked / card.count) if card.count else 1.0,
            }


def _free(
    bookings: Sequence[BookingEntry], card: Card, day: Span, *, now: float
) -> Iterator[dict[str, float | int | bool]]:
    """Stretches of a day from now on with how many cards no booking takes."""
    for span, booked in _stretches(bookings, card, day):
        if span.end > now and booked < card.count:
            yield {
                "begin": max(span.begin, now),
                "end": span.end,
                "to_midnight": span.end == day.end,
                "cards": card.count - booked,
            }


def _stretches(
    bookings: Sequence[BookingEntry], card: Card, day: Span
) -> Iterator[tuple[Span, int]]:
    """A day cut where the number of booked cards of a kind changes; neighbours differ."""
    changes = {day.begin: 0, day.end: 0}
    for entry in bookings:
        if entry.gpu_type != card.name or entry.state not in HOLDING:
            continue
        begin, end = max(entry.start, day.begin), min(entry.end, day.end)
        if begin < end:
            changes[begin] = changes.get(begin, 0) + entry.gpus
            changes[end] = changes.get(end, 0) - entry.gpus
    found: list[tuple[Span, int]] = []
    booked = 0
    for begin, end in itertools.pairwise(sorted(changes)):
        booked += changes[begin]
        if found and found[-1][1] == booked:
            found[-1] = (Span(found[-1][0].begin, end), booked)
        else:
            found.append((Span(begin, end), booked))
    yield from found


def known_zone(name: str) -> bool:
    """Whether a zone of this name is known here."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def slot_rows(document: ScheduleDocument, person: Person) -> list[dict[str, Any]]:
    """Every slot, whole, as its reader may read it."""
    return [_slot(entry, Span(entry.start, entry.end), person) for entry in document.bookings]
