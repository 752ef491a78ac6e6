"""Moments as people type them: `2026-12-01 20:00`, `tomorrow 20:00`, `fri 18:30`, `+2h`. Pure.

A time without an offset is one of the policy's zone. In the night in which clocks are put back one
reading of a clock is two moments, and in the other night some are none: both are refused, with what
to write instead. Guessing would book the wrong hour.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.periods import period_of

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_DATE_LENGTH = len("2026-12-01")
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")
_HOW = "write it like 2026-12-01 20:00, tomorrow 20:00, fri 18:30, +2h or now-7d"


class MomentUnclear(ValueError):
    """What was written is no single moment; the text says what to write instead."""


def readings(naive: dt.datetime, zone: ZoneInfo) -> tuple[float, ...]:
    """The moments at which a zone's clocks show a time: none, one or two, in order.

    Args:
        naive: what the clock shows.
        zone: whose clocks.

    Returns:
        Unix times.
    """
    found = []
    for fold in (0, 1):
        at = naive.replace(tzinfo=zone, fold=fold).timestamp()
        shown = dt.datetime.fromtimestamp(at, zone).replace(tzinfo=None)
        if shown == naive and at not in found:
            found.append(at)
    return tuple(sorted(found))


def read_moment(text: str, *, now: float, zone: ZoneInfo) -> float:
    """Read a moment.

    Args:
        text: as somebody typed it.
        now: Unix time.
        zone: of the policy.

    Returns:
        Unix time, of a whole second.

    Raises:
        MomentUnclear: it is none, or more than one.
    """
    words = " ".join(text.split()).lower()
    try:
        found = _read(words, now=now, zone=zone)
    except MomentUnclear:
        raise
    except (OverflowError, OSError, ValueError) as error:
        raise MomentUnclear(f"{text!r} is beyond all calendars: {_HOW}") from error
    if found is None:
        raise MomentUnclear(f"{text!r} is no moment: {_HOW}")
    if not 0 <= found < 253_000_000_000:
        raise MomentUnclear(f"{text!r} is beyond the years 1970 to 9987: {_HOW}")
    return found


def read_last(text: str, *, now: float, zone: ZoneInfo) -> float:
    """Read a moment up to which something goes; a day without a time is meant to its end.

    Args:
        text: as somebody typed it.
        now: Unix time.
        zone: of the policy.

    Raises:
        MomentUnclear: it is none, or more than one.
    """
    found = read_moment(text, now=now, zone=zone)
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text.strip()) is None:
        return found
    return period_of("day", zone.key, found).end - 1


def _read(words: str, *, now: float, zone: ZoneInfo) -> float | None:
    now = float(int(now))
    relative = re.fullmatch(r"now|(?:now ?)?([+-]) ?(\S+)", words)
    if relative is not None:
        return now + (_distance(relative[1], relative[2]) if relative[1] else 0.0)
    today = dt.datetime.fromtimestamp(now, zone).date()
    head, _, clock = words.rpartition(" ")
    minutes = _clock(clock)
    if minutes is None:
        return _iso(words, zone)
    if head in ("", "today", "tomorrow"):
        return _at(today + dt.timedelta(days=int(head == "tomorrow")), minutes, zone)
    day = _weekday(head.removeprefix("next ").removeprefix("on "))
    if day is not None:
        ahead = (day - today.weekday()) % 7
        found = _at(today + dt.timedelta(days=ahead), minutes, zone)
        return found if found > now else _at(today + dt.timedelta(days=ahead + 7), minutes, zone)
    return _iso(words, zone)


def _distance(sign: str, text: str) -> float:
    try:
        seconds = float(int(durations.parse(text)))
    except ValueError as error:
        raise MomentUnclear(str(error)) from error
    return seconds if sign == "+" else -seconds


def _weekday(word: str) -> int | None:
    return next(
        (number for number, day in enumerate(_DAYS) if len(word) >= 3 and day.startswith(word)),
        None,
    )


def _clock(text: str) -> int | None:
    match = _CLOCK.fullmatch(text)
    return None if match is None else 60 * int(match[1]) + int(match[2])


def _at(day: dt.date, minutes: int, zone: ZoneInfo) -> float:
    return single(dt.datetime.combine(day, dt.time(minutes // 60, minutes % 60)), zone)


def _iso(words: str, zone: ZoneInfo) -> float | None:
    # 9:00 is read like 09:00, as it is behind the name of a day.
    words = re.sub(r"(?<=[0-9][ t])([0-9]:[0-9]{2})", r"0\1", words, count=1)
    day = re.match(r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\b", words)
    if day is not None and not _is_day(day[0]):
        raise MomentUnclear(f"{words!r} is no moment, for {day[0]} is no day: {_HOW}")
    try:
        date = dt.datetime.fromisoformat(words.upper())
    except ValueError:
        return None
    if date.tzinfo is not None:
        return float(int(date.timestamp()))
    if date.time() == dt.time() and len(words) == _DATE_LENGTH:
        # Where clocks skip midnight, the day begins later.
        noon = date.replace(hour=12, tzinfo=zone).timestamp()
        return period_of("day", zone.key, noon).begin
    return single(date.replace(microsecond=0), zone)


def _is_day(text: str) -> bool:
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def single(naive: dt.datetime, zone: ZoneInfo) -> float:
    """The one moment at which a zone's clocks show a time.

    Raises:
        MomentUnclear: there is none, or there are two; the text has what to write instead.
    """
    found = readings(naive, zone)
    if len(found) == 1:
        return found[0]
    shown = f"{naive:%Y-%m-%d %H:%M}"
    if found:
        choices = " or ".join(dt.datetime.fromtimestamp(at, zone).isoformat() for at in found)
        raise MomentUnclear(
            f"{shown} is twice in {zone.key}, whose clocks are put back then: write {choices}"
        )
    # A gap: read with the offset of before it, the moment lies as far behind the gap as it says.
    after = dt.datetime.fromtimestamp(naive.replace(tzinfo=zone, fold=0).timestamp(), zone)
    raise MomentUnclear(
        f"{shown} is not in {zone.key}, whose clocks are put forward then: write "
        f"{after:%Y-%m-%d %H:%M}, for example"
    )


def show_moment(at: float, zone: ZoneInfo) -> str:
    """Such as `Tue 2026-12-01 20:00`; with its offset where the clock shows the time twice."""
    local = dt.datetime.fromtimestamp(at, zone)
    naive = local.replace(tzinfo=None, fold=0)
    twice = len(readings(naive, zone)) > 1
    offset = f"{local:%z}"
    return f"{local:%a %Y-%m-%d %H:%M}{offset[:3] + ':' + offset[3:] if twice else ''}"
