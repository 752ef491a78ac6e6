"""Who is asking, and what that lets them see and change. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a person may do; each may do what the one before may."""

    OWNER = "owner"
    """See and keep their own jobs."""
    SCHEDULER = "scheduler"
    """Ask running jobs to leave within the limits of `leaves`, and take that back; for the program
    that decides who goes first. It sees and keeps nobody's jobs."""
    OPERATOR = "operator"
    """See and keep every job, and read the audit."""
    ADMIN = "admin"
    """Pause and resume enforcement."""

    def includes(self, other: Role) -> bool:
        """Whether this role may do what another may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who has signed in, or a program that bears a token.

    Attributes:
        name: for the audit; of an owner, the user name on the nodes.
        role: what they may do.
        session: what forms are bound to, or an empty string for who bears a token.
        teams: that an owner is a member of.
        sees_teams: they may see and keep the jobs of these teams beside their own.
        shared: the token is one that several share, so that its bearer says who they are.
    """

    name: str
    role: Role
    session: str = ""
    teams: tuple[str, ...] = ()
    sees_teams: bool = False
    shared: bool = False

    @property
    def sees_all(self) -> bool:
        """Whether every job is theirs to see."""
        return self.role.includes(Role.OPERATOR)

    def sees(self, user: str, team: str) -> bool:
        """Whether the jobs of a user are theirs to see and to keep."""
        if self.sees_all:
            return True
        if self.role is Role.SCHEDULER:
            return False
        return bool(user) and (user == self.name or (self.sees_teams and team in self.teams))

    def knows(self, user: str, team: str) -> bool:
        """Whether a user's name is theirs to read: their own, or that of somebody of their team."""
        return self.sees_all or (bool(user) and (user == self.name or team in self.teams))


EVERYONE = Person("", Role.OPERATOR)
"""Who has not signed in, where pages can be read without."""
STRANGER = Person("", Role.OWNER)
"""Who has not signed in, where pages cannot; nobody's jobs are theirs."""
