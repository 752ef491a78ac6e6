"""The words of budgets: limits with their unit, and whose they are; one notation for all files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpuwarden.fields import Ratio, Strict, TeamName, as_tuple
from gpuwarden.periods import Period

if TYPE_CHECKING:
    from collections.abc import Sequence

GPU_HOURS = "GPU-hours"
"""The unit of budgets that are no money."""
_LIMIT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) (GPU-hours|[A-Z]{3})")


@dataclass(frozen=True, slots=True)
class Limit:
    """How much may be used: GPU-hours, or money of one currency."""

    amount: float
    unit: str

    def __str__(self) -> str:
        return quantity(self.amount, self.unit)


def quantity(amount: float, unit: str) -> str:
    """An amount with its unit, such as 12.5 GPU-hours or 900.00 EUR."""
    return f"{amount:,.1f} {unit}" if unit == GPU_HOURS else f"{amount:,.2f} {unit}"


def written(limit: Limit) -> str:
    """A limit as files have it."""
    return f"{limit.amount:.15g} {limit.unit}"


def _limit(value: object) -> Limit:
    if isinstance(value, Limit):
        return value
    found = _LIMIT.fullmatch(value) if isinstance(value, str) else None
    if found is None or float(found[1]) <= 0:
        raise PydanticCustomError(
            "GW107",
            "{value} is not a limit: write it like 500 GPU-hours, or like 900 EUR",
            {"value": repr(value)},
        )
    return Limit(float(found[1]), found[2])


LimitText = Annotated[
    Limit,
    PlainValidator(_limit),
    PlainSerializer(written),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{_LIMIT.pattern}$",
            "examples": ["500 GPU-hours", "900 EUR"],
        }
    ),
]


class Budget(Strict):
    """One budget of one team."""

    team: TeamName
    """Whose use is counted."""
    per: Period
    """day, week (from Monday) or month, by the calendar."""
    limit: LimitText
    """`500 GPU-hours`, or money of one currency at the prices of engine.yaml: `900 EUR`."""
    kind: Literal["hard", "soft"]
    """hard: rules and schedulers go by it; soft: the team is told, and that is all."""
    warn_at: Annotated[
        tuple[Annotated[Ratio, Field(gt=0, le=10)], ...], BeforeValidator(as_tuple)
    ] = (0.5, 0.8, 1.0)
    """Shares at which the team's contact is told, once in each period; [] is never."""

    @property
    def unit(self) -> str:
        """GPU-hours or a currency."""
        return self.limit.unit

    @property
    def key(self) -> tuple[str, Period, str]:
        """What only one budget has."""
        return (self.team, self.per, self.unit)


class ScheduledBudget(Budget):
    """One budget of one team, in a file that a scheduler goes by."""

    running: Literal["finish", "leave"] | None = None
    """What becomes of jobs that run when it is spent: `finish` lets them, `leave` asks them to
    save, leave and wait. Mandatory with `kind: hard`, which starts no further job either way."""

    @model_validator(mode="after")
    def _hard_says_what_it_does(self) -> Self:
        if self.kind == "hard" and self.running is None:
            raise PydanticCustomError(
                "GW105",
                "a hard budget must say what becomes of jobs that run when it is spent: running: "
                "finish, or running: leave",
                {},
            )
        if self.kind == "soft" and self.running is not None:
            raise PydanticCustomError(
                "GW111",
                "a soft budget touches no job: leave `running` out, or write kind: hard",
                {"at": ("running",)},
            )
        return self


def each_once(budgets: Sequence[Budget]) -> None:
    """Refuse a second budget of the same team, period and unit.

    Raises:
        PydanticCustomError: at its place below `budgets`.
    """
    keys = [each.key for each in budgets]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise PydanticCustomError(
                "GW111",
                "there is another budget of {team} per {per} in {unit}",
                {"team": key[0], "per": key[1], "unit": key[2], "at": ("budgets", index)},
            )
