"""Field types of what a person writes in YAML: strict, with units, with messages that help."""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from gpuwarden import quantities
from gpuwarden.quantities import Deviation, Quantity, Window

if TYPE_CHECKING:
    from collections.abc import Mapping


class Strict(BaseModel):
    """Base of everything that a person writes: frozen, refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values; what `functools.cached_property` found is found anew."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


def _text_schema(pattern: str, *examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": list(examples)})


Seconds = Annotated[
    float,
    BeforeValidator(quantities.parse_duration),
    _text_schema(quantities.DURATION_PATTERN, "30s", "5m", "1h30m"),
]
"""A duration with its unit; seconds."""
Ratio = Annotated[
    float,
    BeforeValidator(quantities.parse_ratio),
    _text_schema(quantities.QUANTITY_PATTERN, "15%"),
]
"""A percentage; ratio, 1 is 100 %."""
Bytes = Annotated[
    float,
    BeforeValidator(quantities.parse_bytes),
    Field(gt=0),
    _text_schema(quantities.QUANTITY_PATTERN, "10.5GiB"),
]
"""A size with its unit; bytes."""
ImagesPerSecond = Annotated[
    float,
    BeforeValidator(quantities.parse_throughput),
    Field(gt=0),
    _text_schema(quantities.QUANTITY_PATTERN, "78 img/s"),
]
"""A throughput with its unit; images per second."""
Threshold = Annotated[
    Quantity,
    BeforeValidator(quantities.parse_quantity),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": quantities.QUANTITY_PATTERN},
                {"type": "number", "minimum": 0},
            ],
            "examples": ["5%", "10GiB", "78 img/s", "0.5 cores"],
        }
    ),
]
"""A number in the unit of the signal."""
WindowText = Annotated[
    Window,
    BeforeValidator(quantities.parse_window),
    _text_schema(quantities.WINDOW_PATTERN, "5m", "3 samples"),
]
"""A length of time, or the last N scrapes."""
DeviationText = Annotated[
    Deviation,
    BeforeValidator(quantities.parse_deviation),
    _text_schema(quantities.DEVIATION_PATTERN, "below 15%", "above 15%, at least 2GiB"),
]
"""How far a value may be from its expectation."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError(
            "GW107",
            "{pattern} is not a regular expression: {error}",
            {"pattern": repr(pattern), "error": str(error)},
        ) from error
    return pattern


def known_zone(name: str) -> str:
    """Accept an IANA name of a time zone, or raise."""
    # ZoneInfo also reads abbreviations such as EST, which mean different things to different people
    if "/" not in name and name != "UTC":
        raise PydanticCustomError(
            "GW107",
            "{name} is not a time zone: write an IANA name such as Asia/Shanghai or UTC",
            {"name": repr(name)},
        )
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise PydanticCustomError(
            "GW107",
            "{name} is not a known time zone: write an IANA name such as Asia/Shanghai",
            {"name": repr(name)},
        ) from error
    return name


def aware(value: object) -> object:
    """YAML keeps dates as text here; a date without an offset means different moments."""
    if not isinstance(value, str):
        return value
    try:
        moment = dt.datetime.fromisoformat(value)
    except ValueError as error:
        raise PydanticCustomError(
            "GW107",
            "{value} is not a moment: write it like 2027-06-30T00:00:00+08:00",
            {"value": repr(value)},
        ) from error
    if moment.tzinfo is None:
        raise PydanticCustomError(
            "GW107",
            "{value} lacks its offset from UTC: write it like 2027-06-30T00:00:00+08:00",
            {"value": repr(value)},
        )
    try:
        moment.astimezone(dt.UTC)
    except OverflowError as error:
        raise PydanticCustomError(
            "GW107",
            "{value} lies outside of the years 1 to 9999 of UTC: write 9999-12-31T00:00:00+00:00 "
            "for ever",
            {"value": repr(value)},
        ) from error
    return moment


def as_tuple(value: object) -> object:
    """YAML has lists; frozen types hold tuples."""
    return tuple(value) if isinstance(value, list) else value


def some_tuple(value: object) -> object:
    """Like `as_tuple`, and an empty list is refused: `all` of nothing would be a trap."""
    if isinstance(value, (list, tuple)) and not value:
        raise PydanticCustomError("GW111", "must not be empty", {})
    return as_tuple(value)


def _below_root(text: str) -> str:
    if re.fullmatch(r"/.*[^/]/?", text) is None:
        raise PydanticCustomError(
            "GW107",
            "{text} is not a cgroup below the root: write it like /system.slice/board.service",
            {"text": repr(text)},
        )
    return text


def _file_path(text: str) -> str:
    if re.fullmatch(r"/.*[^/]", text) is None:
        raise PydanticCustomError(
            "GW107",
            "{text} is not the path of a file: write it like /usr/bin/tensorboard",
            {"text": repr(text)},
        )
    return text


Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
"""Lower-case letters, digits, `-` and `_`; used as a label value and as a key in the ledger."""
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
"""A regular expression that must match the whole value."""
CgroupPath = Annotated[
    str, AfterValidator(_below_root), Field(json_schema_extra={"pattern": "^/.*[^/]/?$"})
]
"""A path in the cgroup hierarchy; the root itself would be everybody."""
ExecutablePath = Annotated[
    str, AfterValidator(_file_path), Field(json_schema_extra={"pattern": "^/.*[^/]$"})
]
"""Absolute path of a file."""
Words = Annotated[str, Field(min_length=1, max_length=500)]
"""Text for people; not empty."""
UserName = Annotated[
    str, StringConstraints(pattern=r"^[\w.](?:[\w.@+\\-]*[\w.@+-])?\$?$", max_length=255)
]
"""User name on the nodes, also as directories of organisations have them: `EXAMPLE\\ana`,
`ana@example.org`."""
TeamName = Annotated[str, StringConstraints(min_length=1, max_length=63)]
"""Name of a team; a text without rules of its own."""
