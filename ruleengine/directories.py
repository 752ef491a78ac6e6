"""The operator's directory: who a user is, how to reach them, and who the operators are.

Teams and addresses come from here and never from a job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpuwarden.ruleengine.fields import Strict, as_tuple, known_zone

_ADDRESS = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]{1,64}@[A-Za-z0-9.-]{1,255}")


def _address(text: str) -> str:
    # Also keeps line breaks and lists out of the message's header.
    if _ADDRESS.fullmatch(text) is None:
        raise PydanticCustomError(
            "GW107",
            "{text} is not an email address: write it like name@example.org",
            {"text": repr(text)},
        )
    return text


def _one_or_some(value: object) -> object:
    """A single text stands for a list of one."""
    return (value,) if isinstance(value, str) else as_tuple(value)


Email = Annotated[str, AfterValidator(_address)]
"""One bare address."""
SlackTarget = Annotated[
    str, StringConstraints(pattern=r"^([UWCGD][A-Z0-9]{5,20}|#[a-z0-9._-]{1,80})$")
]
"""A member id such as U012ABCDEF (profile > Copy member ID), a channel id, or #channel."""
Zone = Annotated[str, AfterValidator(known_zone)]
"""IANA name of a time zone."""
UserName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.][A-Za-z0-9_.@+-]{0,62}\$?$")]
"""User name on the nodes."""


_BUDGET = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) GPU-hours? per (day|week|month)")


@dataclass(frozen=True, slots=True)
class Budget:
    """How many GPU-hours a team may hold in any day, week (7 days) or month (30 days)."""

    gpu_hours: float
    period: str


def _budget(value: object) -> Budget:
    found = _BUDGET.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise PydanticCustomError(
            "GW107",
            "{value} is not a budget: write it like 500 GPU-hours per month (or day, or week)",
            {"value": repr(value)},
        )
    return Budget(float(found[1]), found[2])


BudgetText = Annotated[
    Budget,
    PlainValidator(_budget),
    WithJsonSchema({"type": "string", "examples": ["500 GPU-hours per month"]}),
]
"""Such as `500 GPU-hours per month`; periods slide, a month is 30 days."""


class Team(Strict):
    """What holds for a team."""

    budget: Annotated[tuple[BudgetText, ...], BeforeValidator(_one_or_some)] = ()
    """GPU time that its jobs may hold together, one or several; exported, and compared by the
    default rule over-budget."""

    @model_validator(mode="after")
    def _each_period_once(self) -> Team:
        periods = [budget.period for budget in self.budget]
        if len(set(periods)) < len(periods):
            raise PydanticCustomError("GW111", "needs at most one budget for each period", {})
        return self


class User(Strict):
    """One person who owns jobs."""

    email: Email | None = None
    """Where mail goes."""
    slack: SlackTarget | None = None
    """Where direct messages go."""
    team: str = ""
    """Team; label `team` of alerts and metrics."""
    timezone: Zone | None = None
    """Zone for times in messages and on pages; the rule set's by default."""
    sees_team: StrictBool = False
    """Whether this person may see and keep the jobs of the whole team, beside their own."""

    def address(self, channel: str) -> str | None:
        """The address for a channel (email or slack), or None."""
        return {"email": self.email, "slack": self.slack}.get(channel)


class Operators(Strict):
    """Who is told when a person must look."""

    email: Annotated[tuple[Email, ...], BeforeValidator(as_tuple)] = ()
    """Where mail goes."""
    slack: SlackTarget | None = None
    """Where messages go."""

    def addresses(self, channel: str) -> tuple[str, ...]:
        """The addresses for a channel (email or slack)."""
        if channel == "email":
            return self.email
        return (self.slack,) if self.slack else ()


class Directory(Strict):
    """directory.yaml."""

    version: Literal[1]
    """Of this file's format."""
    operators: Operators = Field(default_factory=Operators)
    """Who receives alerts of the level `page`, where Alertmanager routes them to the engine."""
    users: Mapping[UserName, User] = Field(default_factory=lambda: MappingProxyType({}))
    """User name on the nodes -> the person."""
    teams: Mapping[Annotated[str, StringConstraints(min_length=1, max_length=63)], Team] = Field(
        default_factory=lambda: MappingProxyType({})
    )
    """Team, as users name it -> what holds for it."""

    def user(self, name: str) -> User:
        """The person of a user name; one without addresses if the directory has none."""
        return self.users.get(name) or User()


EMPTY = Directory(version=1)
"""A directory that knows nobody."""
