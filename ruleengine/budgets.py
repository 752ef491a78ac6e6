"""Budgets of teams: the file that `budgets` in engine.yaml names, and what it means. Pure.

A period is the calendar's, by the clocks of the file's zone: a day that is 23 hours long is one.
"""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpuwarden.checked_files import CheckedFile, check_file
from gpuwarden.diagnostics import Diagnostic, Severity, did_you_mean
from gpuwarden.fields import Ratio, Strict, as_tuple, known_zone
from gpuwarden.ruleengine.costs import Span
from gpuwarden.ruleengine.directories import TeamName

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuwarden.ruleengine.directories import Directory
    from gpuwarden.yaml_files import Node

Period = Literal["day", "week", "month"]
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
    """By the directory's name; jobs of people who are in several teams count for their first."""
    per: Period
    """day, week (from Monday) or month, by the calendar."""
    limit: LimitText
    """`500 GPU-hours`, or money of one currency at the prices of engine.yaml: `900 EUR`."""
    kind: Literal["hard", "soft"]
    """hard: the condition `over_budget` knows it; soft: the team is told, and that is all."""
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


class Budgets(Strict):
    """budgets.yaml."""

    version: Literal[1]
    """Of this file's format."""
    zone: Annotated[str, AfterValidator(known_zone)]
    """Whose calendar: an IANA name such as Europe/Berlin."""
    budgets: Annotated[tuple[Budget, ...], BeforeValidator(as_tuple)]
    """One for each team, period and unit at most."""

    @model_validator(mode="after")
    def _each_once(self) -> Budgets:
        keys = [each.key for each in self.budgets]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise PydanticCustomError(
                    "GW111",
                    "there is another budget of {team} per {per} in {unit}",
                    {"team": key[0], "per": key[1], "unit": key[2], "at": ("budgets", index)},
                )
        return self


def period_of(per: Period, zone: str, now: float) -> Span:
    """The calendar's period that a moment lies in, as Unix times.

    Args:
        per: day, week or month.
        zone: whose calendar.
        now: Unix time.
    """
    known = zoneinfo.ZoneInfo(zone)
    today = dt.datetime.fromtimestamp(now, known).date()
    if per == "day":
        first, after = today, today + dt.timedelta(days=1)
    elif per == "week":
        first = today - dt.timedelta(days=today.weekday())
        after = first + dt.timedelta(days=7)
    else:
        first = today.replace(day=1)
        after = (first + dt.timedelta(days=32)).replace(day=1)
    begin, end = (dt.datetime.combine(day, dt.time(), known).timestamp() for day in (first, after))
    return Span(begin, end)


# -- reading


def check_budgets(
    path: Path, directory: Directory | None, *, currencies: frozenset[str] | None
) -> CheckedFile[Budgets]:
    """Say everything that is wrong with a file of budgets.

    Args:
        path: the file.
        directory: whose teams they are for, or None: any.
        currencies: in which engine.yaml has prices, or None: any.
    """
    return check_file(
        path,
        Budgets,
        lambda budgets, root: _references(budgets, root, directory, currencies),
    )


def load_budgets(
    path: Path, directory: Directory | None, *, currencies: frozenset[str] | None
) -> Budgets:
    """Read budgets that can be used.

    Raises:
        InvalidInput: its text shows every mistake with its line.
    """
    return check_budgets(path, directory, currencies=currencies).usable()


def _references(
    budgets: Budgets,
    root: Node,
    directory: Directory | None,
    currencies: frozenset[str] | None,
) -> Iterator[Diagnostic]:
    teams = _teams(directory)
    for index, each in enumerate(budgets.budgets):
        place = f"budgets[{index}]"
        if teams is not None and each.team not in teams:
            span = root.at(("budgets", index, "team")).span
            text = f'{place}.team: the directory knows no team "{each.team}": nobody uses it up'
            hint = did_you_mean(each.team, sorted(teams))
            yield Diagnostic("GW420", Severity.WARNING, span, text, hint)
        elif directory is not None and each.warn_at and directory.team(each.team).contact is None:
            span = root.at(("budgets", index, "team")).span
            text = f"{place}.team: {each.team} has no contact in the directory: the operators are "
            text += "told in its place"
            yield Diagnostic("GW421", Severity.WARNING, span, text, "give teams.X.contact")
        if currencies is not None and each.unit not in (GPU_HOURS, *currencies):
            span = root.at(("budgets", index, "limit")).span
            text = (
                f"{place}.limit: no price in engine.yaml is in {each.unit}: its use is never known"
            )
            yield Diagnostic("GW422", Severity.ERROR, span, text)


def _teams(directory: Directory | None) -> frozenset[str] | None:
    if directory is None:
        return None
    return frozenset(directory.teams) | {user.team for user in directory.users.values()}
