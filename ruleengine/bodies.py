"""What the engine's handlers read out of a request's body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from gpuwarden import durations
from gpuwarden.ruleengine.refusals import Refusal, read_body, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

MAX_BODY_BYTES = 16 * 1024
MAX_FIELDS = 20
MAX_WORD = 300
"""Characters that a name or a reason may have."""


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
        Refusal: it is missing, empty or too long.
    """
    value = body.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_WORD:
        raise Refusal(400, "malformed", f"{name} is not a text of 1 to {MAX_WORD} characters")
    return " ".join(value.split())


def seconds(body: Mapping[str, Any], name: str) -> float:
    """A duration such as 2h, in seconds; more than none.

    Raises:
        Refusal: it is missing, or not a duration.
    """
    try:
        found = durations.parse(word(body, name))
    except ValueError as error:
        raise Refusal(400, "malformed", f"{name}: {error}") from error
    if found <= 0:
        raise Refusal(400, "malformed", f"{name}: must be more than 0s")
    return found


def optional_seconds(body: Mapping[str, Any], name: str) -> float | None:
    """A duration in seconds, or None where it is missing or empty.

    Raises:
        Refusal: it is not a duration.
    """
    value = body.get(name)
    return None if value is None or value == "" else seconds(body, name)
