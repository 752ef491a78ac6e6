"""What the scheduler's handlers read out of a request: each field once, of one kind, bounded."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from gpuwarden.diagnostics import did_you_mean
from gpuwarden.refusals import Refusal, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from gpuwarden.scheduling.policies import Policy

MAX_BODY_BYTES = 64 * 1024
MAX_TEXT = 200


async def read_fields(request: Request, *known: str) -> dict[str, Any]:
    """The body as a JSON object of these fields.

    Raises:
        Refusal: it is not one, is too large, or has others.
    """
    body = await read_json(request, MAX_BODY_BYTES)
    if not isinstance(body, dict):
        raise Refusal(400, "malformed", "the body is not a JSON object")
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise Refusal(
            400, "malformed", f"unknown field {unknown[0]!r}: there are {', '.join(known)}"
        )
    return body


def text(body: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    """A text of one line.

    Raises:
        Refusal: it is missing or none, or has characters that a terminal would obey.
    """
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise Refusal(400, "malformed", f"{name} is not a text of at most {MAX_TEXT} characters")
    if any(unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Zl", "Zp") for mark in value):
        raise Refusal(400, "malformed", f"{name} holds characters that cannot be shown")
    return value


def whole(body: Mapping[str, Any], name: str, *, most: int) -> int:
    """A whole number from 1 on.

    Raises:
        Refusal: it is none.
    """
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise Refusal(400, "malformed", f"{name} is not a whole number of 1 to {most}")
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """True or false; false where it is missing.

    Raises:
        Refusal: it is neither.
    """
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise Refusal(400, "malformed", f"{name} is neither true nor false")
    return value


def known_team(policy: Policy, name: str | None) -> None:
    """See that a team that somebody asks about is one; of an empty name it is not asked.

    Raises:
        Refusal: the policy has none of this name.
    """
    if not name or policy.team(name) is not None:
        return
    teams = [team.name for team in policy.teams]
    hint = did_you_mean(name, teams)
    known = f"there are {', '.join(teams)}" if teams else "the policy has none"
    raise Refusal(
        404, "unknown", f"there is no team {name}: {known}" + (f"; {hint}" if hint else "")
    )
