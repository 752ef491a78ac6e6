"""The `reports` part of engine.yaml: who gets a report every week, and when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.fields import Seconds, Strict, TeamName, as_tuple
from gpuwarden.hours import DAYS, Clock, Day
from gpuwarden.ruleengine.directories import Directory, Zone


class ReportSettings(Strict):
    """Weekly reports by mail. Nobody gets one who is not named here."""

    teams: Annotated[tuple[TeamName, ...], BeforeValidator(as_tuple)] = ()
    """Teams that want one, by the directory's name: each a report on its own jobs."""
    to: Literal["contact", "members", "both"] = "contact"
    """Who of a team: its contact, its people, or both, as far as the directory has addresses."""
    operators: StrictBool = False
    """Whether the directory's operators get one on the whole fleet."""
    weekday: Day = "mon"
    """On which day; the report is about the seven days before it."""
    at: Clock = 7 * 60
    """From which time on, such as "07:00"."""
    zone: Zone | None = None
    """Whose days and clock, such as Europe/Berlin; the rules' timezone by default."""
    give_up_after: Annotated[Seconds, Field(ge=3600, le=6 * 86400)] = 2 * 86400.0
    """For how long one that could not be sent is tried again."""

    @model_validator(mode="after")
    def _somebody(self) -> ReportSettings:
        if not self.teams and not self.operators:
            raise PydanticCustomError("GW111", "reports go to nobody: give teams or operators", {})
        if len(set(self.teams)) < len(self.teams):
            raise PydanticCustomError("GW111", "teams names one twice", {"at": ("teams",)})
        return self

    @property
    def weekday_number(self) -> int:
        """The weekday; Monday is 0."""
        return DAYS.index(self.weekday)

    def strangers(self, directory: Directory) -> tuple[str, ...]:
        """Teams that nobody of the directory is of: no report can be made for them."""
        known = {user.team for user in directory.users.values()}
        return tuple(team for team in self.teams if team not in known)
