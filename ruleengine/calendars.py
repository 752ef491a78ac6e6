"""Bookings as iCalendar (RFC 5545), and the signed address at which a calendar program fetches it.

A calendar program shows no token: its address is the secret. It is bound to one name, reads what an
owner of that name reads and no more, whoever it was made for, and has an end.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from itsdangerous import BadData, URLSafeSerializer

from gpuwarden.ruleengine.links import SIGNED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/calendar; charset=utf-8"
LIFETIME_SECONDS = 400 * 86400.0
"""An address lives for a little more than a year."""
_FOLD = 73
"""Bytes of a line before it is folded; RFC 5545 allows 75 with the space of a continuation."""


class CalendarAddresses:
    """Makes and reads the secret part of calendars' addresses.

    Args:
        key: the engine's secret, or None: there are no such addresses.
    """

    def __init__(self, key: bytes | None) -> None:
        self._signer = (
            None
            if key is None
            else URLSafeSerializer(key, salt="gpuwarden calendar", signer_kwargs=SIGNED)
        )

    def make(self, name: str, *, now: float) -> str:
        """What a person's calendar program shows; empty where there is no key, or no name.

        The same all month, so that an address that was copied is the one that is shown.

        Args:
            name: of the person.
            now: Unix time.
        """
        if self._signer is None or not name:
            return ""
        month = 30 * 86400
        until = int(now // month) * month + int(LIFETIME_SECONDS)
        return str(self._signer.dumps([name, until]))

    def read(self, token: str, *, now: float) -> str | None:
        """Whose an address is, or None for one that is not ours or has ended."""
        if self._signer is None:
            return None
        try:
            name, until = self._signer.loads(token)
        except (BadData, TypeError, ValueError):
            return None
        if not isinstance(name, str) or not isinstance(until, int) or until <= now:
            return None
        return name


def icalendar(slots: Iterable[Mapping[str, Any]], *, name: str, stamp: float) -> bytes:
    """A calendar of slots.

    Args:
        slots: id, team, gpus, gpu_type, begin and end (Unix times), user, words, standing.
        name: of the calendar.
        stamp: Unix time at which they were true.
    """
    lines = [
        "BEGIN:VCALENDAR",
        "VERSION:2.0",
        "PRODID:-//gpuwarden//bookings//EN",
        "CALSCALE:GREGORIAN",
        f"X-WR-CALNAME:{_escaped(name)}",
    ]
    for slot in slots:
        over = slot["standing"] in ("released", "over")
        lines += [
            "BEGIN:VEVENT",
            f"UID:{_escaped(slot['id'])}@gpuwarden",
            f"DTSTAMP:{_utc(stamp)}",
            f"DTSTART:{_utc(slot['begin'])}",
            f"DTEND:{_utc(slot['end'])}",
            f"SUMMARY:{_escaped(_title(slot))}",
            f"DESCRIPTION:{_escaped(_about(slot))}",
            f"STATUS:{'CANCELLED' if over else 'CONFIRMED'}",
            "TRANSP:TRANSPARENT",
            "END:VEVENT",
        ]
    lines.append("END:VCALENDAR")
    return b"".join(_folded(line) for line in lines)


def _title(slot: Mapping[str, Any]) -> str:
    return f"{slot['team'] or slot['user']}: {slot['gpus']} x {slot['gpu_type'] or 'GPU'}"


def _about(slot: Mapping[str, Any]) -> str:
    parts = [slot["words"], f"by {slot['user']}" if slot["user"] else "", slot["standing"]]
    return ", ".join(str(part) for part in parts if part)


def _utc(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y%m%dT%H%M%SZ")


def _escaped(text: object) -> str:
    plain = "".join(mark if mark.isprintable() else " " for mark in str(text))
    return plain.replace("\\", "\\\\").replace(";", "\\;").replace(",", "\\,")


def _folded(line: str) -> bytes:
    """A line of at most 75 bytes, continued as often as needed; no character is cut in two."""
    parts, part = [], b""
    for mark in line:
        more = mark.encode()
        if len(part) + len(more) > _FOLD:
            parts.append(part)
            part = b""
        part += more
    parts.append(part)
    return b"\r\n ".join(parts) + b"\r\n"
