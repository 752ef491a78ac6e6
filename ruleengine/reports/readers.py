"""Whose names a report tells: a team's report those of that team, as engine.yaml allows.

Others are pseudonyms, the same as on the engine's pages where its secret can be read, so that a
report and a page can be laid side by side.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from gpuwarden.ruleengine.names import Pseudonyms

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_TEAM: Final = "none"
"""Team of whoever the directory does not know; the recording rules' word."""


@dataclass(frozen=True)
class Reader:
    """For whom a report is made.

    Attributes:
        teams: user -> team, as the directory or Prometheus has it.
        team: whose report it is, or None: the operators'.
        names: `web.names` of engine.yaml: whose names the people of a team read.
        opened: whether operators read names without opening them first (`web.operator_names`).
        pseudonyms: for everybody else.
    """

    teams: Mapping[str, str]
    team: str | None = None
    names: Literal["team", "everyone", "nobody"] = "team"
    opened: bool = True
    pseudonyms: Pseudonyms = field(default_factory=lambda: Pseudonyms(secrets.token_bytes(32)))

    def team_of(self, user: str) -> str:
        """A user's team; `none` where nobody says."""
        return self.teams.get(user) or NO_TEAM

    @property
    def users(self) -> frozenset[str] | None:
        """The people of the team, or None: everybody."""
        if self.team is None:
            return None
        return frozenset(user for user, team in self.teams.items() if team == self.team)

    def shown(self, user: str) -> str:
        """A user's name, or the pseudonym."""
        if not user:
            return "unknown"
        if self.team is None:
            return user if self.opened else self.pseudonyms.of(user)
        mine = self.names == "team" and self.team_of(user) == self.team
        return user if mine or self.names == "everyone" else self.pseudonyms.of(user)
