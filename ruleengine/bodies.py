"""What the engine's handlers read out of a request's body."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from gpuwarden import durations
from gpuwarden.refusals import Refusal, read_body, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

MAX_BODY_BYTES = 16 * 1024
MAX_FIELDS = 20
MAX_WORD = 300
"""Characters that a name or a reason may have."""
MAX_SECONDS = 10 * 365 * 86400.0
"""Longest duration; what is meant to last for ever is said in another way than by a number."""
_UNSEEN = frozenset(
    chr(code) for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
)
"""They turn the direction of the text around them: a reason would read otherwise than it is."""


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        Refusal: it is not one, or has more bytes than the limit.
    """
    body = await read_json(request, limit)
    if not isinstance(body, dict):
        raise Refusal(400, "malformed", "the body is not a JSON object")
    return body


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a page's form.

    Raises:
        Refusal: it is not a form, or too large.
    """
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refusal(400, "malformed", "the body is not a form")
    content = await read_body(request, MAX_BODY_BYTES)
    try:
        fields = parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise Refusal(400, "malformed", "the body is not a form") from error
    return dict(fields)


def word(body: Mapping[str, Any], name: str) -> str:
    """A text of one line.

    Raises:
        Refusal: it is missing, empty or too long, or has characters that are none of a text: others
            read it in a terminal, which would obey them.
    """
    value = body.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_WORD:
        raise Refusal(400, "malformed", f"{name} is not a text of 1 to {MAX_WORD} characters")
    found = " ".join(value.split())
    # Control characters, and halves of a pair, which no file and no socket takes.
    if any(mark in _UNSEEN or unicodedata.category(mark) in ("Cc", "Cs") for mark in found):
        raise Refusal(400, "malformed", f"{name} holds characters that cannot be shown")
    return found


def seconds(body: Mapping[str, Any], name: str) -> float:
    """A duration such as 2h, in seconds; more than none, and less than MAX_SECONDS.

    Raises:
        Refusal: it is missing, or not such a duration.
    """
    try:
        found = durations.parse(word(body, name))
    except ValueError as error:
        raise Refusal(400, "malformed", f"{name}: {error}") from error
    if found <= 0:
        raise Refusal(400, "malformed", f"{name}: must be more than 0s")
    if found > MAX_SECONDS:
        most = durations.render(MAX_SECONDS)
        raise Refusal(400, "malformed", f"{name}: must be at most {most}")
    return found


def optional_seconds(body: Mapping[str, Any], name: str) -> float | None:
    """A duration in seconds, or None where it is missing or empty.

    Raises:
        Refusal: it is not a duration.
    """
    value = body.get(name)
    return None if value is None or value == "" else seconds(body, name)
