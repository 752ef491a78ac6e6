"""What the engine's handlers read out of a query."""

from __future__ import annotations

import datetime as dt

from gpuwarden.refusals import Refusal


def page_number(text: str | None) -> int:
    """Number of a page, from 1 on.

    Raises:
        Refusal: it is not a number.
    """
    return max(1, whole(text, "page") or 1)


def whole(text: str | None, name: str) -> int | None:
    """A whole number of the query, or None where it is missing.

    Raises:
        Refusal: it is not a number, or not of this world.
    """
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Refusal(400, "malformed", f"{name} is not a whole number")
    return int(text)


def moment(text: str | None) -> float | None:
    """A time of the query in RFC 3339 as Unix seconds, or None where it is missing.

    Raises:
        Refusal: it is not a time with an offset.
    """
    if not text:
        return None
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise Refusal(400, "malformed", "before is not a time in RFC 3339") from error
    if found.tzinfo is None:
        raise Refusal(400, "malformed", "before has no offset from UTC")
    return found.timestamp()
