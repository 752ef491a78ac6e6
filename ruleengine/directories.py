"""The operator's directory: who a user is, how to reach them, and who the operators are.

Teams and addresses come from here and never from a job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StringConstraints
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

    def user(self, name: str) -> User:
        """The person of a user name; one without addresses if the directory has none."""
        return self.users.get(name) or User()


EMPTY = Directory(version=1)
"""A directory that knows nobody."""
