"""What an engine answers to `gpuwarden top`, held to the form that the screen relies on. Pure.

An engine of another version may say more; what lacks a field, or has another kind of thing in its
place, is no answer, and is told as such in the place of a traceback over a terminal.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.api_fleet_models import Fleet
from gpuwarden.ruleengine.fleet_documents import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

_LARGEST: Final = 1e18
"""Of any number of the document: bytes of memory are far below it."""


def checked_fleet(document: Mapping[str, Any], place: str) -> dict[str, Any]:
    """An answer of `/v1/fleet` that the screen can show.

    Args:
        document: as it came.
        place: who answered, for the message.

    Raises:
        ServiceUnavailable: it is in another form.
    """
    if document.get("schema") != SCHEMA:
        raise ServiceUnavailable(f"{place} does not answer with {SCHEMA}: an older engine?")
    try:
        Fleet.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        for first in (item for item in found if item["type"] != "extra_forbidden"):
            where = ".".join(map(str, first["loc"]))
            raise ServiceUnavailable(
                f"{place} does not answer in the form of {SCHEMA} ({where}: {first['msg']}): is it "
                "gpuwarden's engine, and of this version?"
            ) from error
    if not _bounded(document):
        raise ServiceUnavailable(f"{place} answers with numbers that are none")
    return dict(document)


def _bounded(value: object) -> bool:
    """Whether every number in a document is one that can be shown."""
    if isinstance(value, dict):
        return all(map(_bounded, value.values()))
    if isinstance(value, list):
        return all(map(_bounded, value))
    return not isinstance(value, int | float) or -_LARGEST < value < _LARGEST
