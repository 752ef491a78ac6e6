"""The operator's directory: who a user is, how to reach them, and who the operators are.

Teams and addresses come from here and never from a job.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

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

from gpuwarden.fields import Strict, TeamName, UserName, as_tuple, known_zone, some_tuple
from gpuwarden.ruleengine.texts.speeches import Language

CHANNELS = ("email", "slack")
"""Through which people can be told by a message of their own."""
ADDRESSES = (*CHANNELS, "wecom", "dingtalk", "feishu")
"""Kinds of addresses, those by which bots mention somebody included."""

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
WecomTarget = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._@-]{0,63}|\+?[0-9]{5,15})$")
]
"""A member's user id in WeCom, or the mobile number of the account."""
DingtalkTarget = Annotated[str, StringConstraints(pattern=r"^\+?[0-9][0-9-]{4,18}$")]
"""The mobile number of the DingTalk account."""
FeishuTarget = Annotated[str, StringConstraints(pattern=r"^(ou_|on_)?[A-Za-z0-9]{4,64}$")]
"""An open id (ou_...) or user id of the person in Feishu or Lark."""
Zone = Annotated[str, AfterValidator(known_zone)]
"""IANA name of a time zone."""


def _day(value: object) -> dt.date:
    if isinstance(value, dt.date):
        return value
    try:
        return dt.date.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        raise PydanticCustomError(
            "GW107",
            "{value} is not a day: write it like 2026-11-30",
            {"value": repr(value)},
        ) from None


Day = Annotated[
    dt.date, BeforeValidator(_day), WithJsonSchema({"type": "string", "format": "date"})
]
"""A day such as 2026-11-30."""


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


class Contact(Strict):
    """Where somebody is told who is no user of the nodes, or not by that name."""

    email: Email | None = None
    """Where mail goes."""
    slack: SlackTarget | None = None
    """Where messages go: a person, or a channel that the team reads."""

    def address(self, channel: str) -> str | None:
        """The address for a channel (email or slack), or None."""
        return {"email": self.email, "slack": self.slack}.get(channel)

    @model_validator(mode="after")
    def _some_address(self) -> Contact:
        if self.email is None and self.slack is None:
            raise PydanticCustomError("GW111", "needs an email or a slack address", {})
        return self


class Team(Strict):
    """What holds for a team."""

    contact: Contact | None = None
    """Who is told as well of a job whose owner cannot be: has left, or has no address. That is no
    proof to the owner: nothing severe follows unless the owner has a `deputy`."""
    channels: Annotated[tuple[SlackTarget, ...], BeforeValidator(as_tuple)] = ()
    """Slack channels that this team alone reads, beside its contact's: notices there name its
    people. In every other channel a pseudonym stands for the owner."""
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
    wecom: WecomTarget | None = None
    """Whom a WeCom bot mentions; whether that is proof of a notice, engine.yaml says (`bots`)."""
    dingtalk: DingtalkTarget | None = None
    """Likewise in DingTalk."""
    feishu: FeishuTarget | None = None
    """Likewise in Feishu or Lark."""
    language: Language | None = None
    """Language of this person's notices; the directory's by default."""
    team: Annotated[str, StringConstraints(max_length=63)] = ""
    """Team; label `team` of alerts and metrics."""
    teams: Annotated[tuple[TeamName, ...], BeforeValidator(some_tuple)] = ()
    """In the place of `team`, of who is in several. Jobs count for the first: its label, its
    budget, its routes; of the others the person is a member who sees what members see."""
    timezone: Zone | None = None
    """Zone for times in messages and on pages; the rule set's by default."""
    sees_team: StrictBool = False
    """Whether this person may see and keep the jobs of the whole team (of several: of each), beside
    their own."""
    left: Day | None = None
    """The first day on which this person is not to be told any more. Keep the entry for as long as
    jobs of theirs may run."""
    deputy: UserName | None = None
    """Another user of this directory, who is told in their place where they cannot be: they have
    left, or have no address. The deputy's proof counts as the owner's."""

    @model_validator(mode="before")
    @classmethod
    def _first_team(cls, data: Any) -> Any:
        """Whose team is one of several has the first as `team`."""
        if not isinstance(data, dict) or "teams" not in data:
            return data
        teams = data["teams"]
        first = teams[0] if isinstance(teams, list | tuple) and teams else None
        if data.get("team", first) != first:
            raise PydanticCustomError("GW111", "give either team or teams", {})
        return {**data, "team": first} if isinstance(first, str) else data

    @model_validator(mode="after")
    def _each_team_once(self) -> User:
        if len(set(self.teams)) < len(self.teams):
            raise PydanticCustomError("GW111", "teams names one twice", {"at": ("teams",)})
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address of theirs, through whatever channel."""
        return tuple(to for kind in ADDRESSES if (to := self.address(kind)))

    @property
    def member_of(self) -> tuple[str, ...]:
        """Every team of theirs; the first is whom their jobs count for."""
        return self.teams or ((self.team,) if self.team else ())

    def present(self, today: dt.date) -> bool:
        """Whether this person may be told on a day."""
        return self.left is None or today < self.left

    def address(self, channel: str) -> str | None:
        """The address for a kind of channel, such as email or slack, or None."""
        return {
            "email": self.email,
            "slack": self.slack,
            "wecom": self.wecom,
            "dingtalk": self.dingtalk,
            "feishu": self.feishu,
        }.get(channel)


class Operators(Strict):
    """Who is told when a person must look."""

    email: Annotated[tuple[Email, ...], BeforeValidator(as_tuple)] = ()
    """Where mail goes."""
    slack: SlackTarget | None = None
    """Where messages go."""
    language: Language | None = None
    """Language of their alerts; the directory's by default."""

    def addresses(self, channel: str) -> tuple[str, ...]:
        """The addresses for a channel (email or slack)."""
        if channel == "email":
            return self.email
        return (self.slack,) if self.slack and channel == "slack" else ()


class Directory(Strict):
    """directory.yaml."""

    version: Literal[1]
    """Of this file's format."""
    language: Language = "en"
    """Language of notices to everybody for whom no other is named: en or zh."""
    operators: Operators = Field(default_factory=Operators)
    """Who receives alerts of the level `page`, where Alertmanager routes them to the engine."""
    users: Mapping[UserName, User] = Field(default_factory=lambda: MappingProxyType({}))
    """User name on the nodes -> the person."""
    teams: Mapping[TeamName, Team] = Field(default_factory=lambda: MappingProxyType({}))
    """Team, as users name it -> what holds for it."""

    def user(self, name: str) -> User:
        """The person of a user name; one without addresses if the directory has none."""
        return self.users.get(name) or User()

    def teams_of(self, channel: str) -> tuple[str, ...]:
        """The teams whose own a Slack channel is."""
        return tuple(
            name
            for name, team in self.teams.items()
            if channel in team.channels or (team.contact and team.contact.slack == channel)
        )

    def team(self, name: str) -> Team:
        """What holds for a team; nothing if the directory says nothing of it."""
        return self.teams.get(name) or Team()

    @property
    def operators_language(self) -> Language:
        """Language of what the operators are told."""
        return self.operators.language or self.language

    def language_of(self, user: User) -> Language:
        """Language of what a person is told."""
        return user.language or self.language

    @property
    def languages(self) -> tuple[Language, ...]:
        """Every language that is in use, the operators' first."""
        own = (user.language for user in self.users.values() if user.language is not None)
        return tuple(dict.fromkeys((self.operators_language, self.language, *sorted({*own}))))


EMPTY = Directory(version=1)
"""A directory that knows nobody."""
