"""Hours: when in the week a rule counts, by the clocks on the wall of a time zone. Pure.

A moment is turned into local time, never the other way round: where a clock is put back both of the
hours that are called the same are inside, and an hour that a clock skips does not exist.
"""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from typing import TYPE_CHECKING, Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.fields import Strict, known_zone, some_tuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = get_args(Day)

_CLOCK = r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"


def parse_clock(value: object) -> object:
    """Minutes since midnight of a clock such as "22:30"; what is a number already stays one.

    Raises:
        PydanticCustomError: it is not such a clock.
    """
    if isinstance(value, str) and re.fullmatch(_CLOCK, value):
        hours, _, minutes = value.partition(":")
        return 60 * int(hours) + int(minutes)
    raise PydanticCustomError(
        "GW107",
        '{value} is not a time of day: write it in quotes with two digits each, like "06:30"',
        {"value": repr(value)},
    )


Clock = Annotated[
    int,
    BeforeValidator(parse_clock),
    WithJsonSchema({"type": "string", "pattern": _CLOCK, "examples": ["06:30", "22:00"]}),
]
"""A time of day; minutes since midnight."""


class Hours(Strict):
    """Some hours of some days of the week."""

    days: Annotated[tuple[Day, ...], BeforeValidator(some_tuple)] = DAYS
    """On which days they begin."""
    from_: Clock = Field(alias="from")
    """From this time on."""
    to: Clock
    """Until just before this time; if that is before `from`, it is on the next day."""
    zone: Annotated[str, AfterValidator(known_zone)]
    """Whose clocks: an IANA name such as Europe/Berlin."""

    @model_validator(mode="after")
    def _some_time(self) -> Self:
        if self.from_ in (self.to, 24 * 60):
            raise PydanticCustomError(
                "GW107",
                'these hours have no length: a whole day is from: "00:00", to: "24:00"',
                {"at": ("to",)},
            )
        return self

    def include(self, now: float) -> bool:
        """Whether a moment lies within.

        Args:
            now: Unix time in seconds.
        """
        local = dt.datetime.fromtimestamp(now, zoneinfo.ZoneInfo(self.zone))
        minute, today = 60 * local.hour + local.minute, DAYS[local.weekday()]
        if self.from_ < self.to:
            return today in self.days and self.from_ <= minute < self.to
        yesterday = DAYS[local.weekday() - 1]
        return (today in self.days and minute >= self.from_) or (
            yesterday in self.days and minute < self.to
        )

    def __str__(self) -> str:
        """Such as `mon, tue 22:00 to 06:00 Europe/Berlin`."""
        days = "" if self.days == DAYS else f"{', '.join(self.days)} "
        return f"{days}{_clock(self.from_)} to {_clock(self.to)} {self.zone}"


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def within(hours: Sequence[Hours], now: float) -> bool:
    """Whether a moment lies within any of them; of none, every moment does."""
    return not hours or any(each.include(now) for each in hours)


def local_times(hours: Sequence[Hours], now: float) -> str:
    """What the clocks of their zones show, such as `Sun 03:10 Europe/Berlin`."""
    zones = dict.fromkeys(each.zone for each in hours)
    return ", ".join(
        f"{dt.datetime.fromtimestamp(now, zoneinfo.ZoneInfo(zone)):%a %H:%M} {zone}"
        for zone in zones
    )
