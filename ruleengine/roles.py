"""Who is asking, and what that lets them see and change. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a person may do; each may do what the one before may."""

    OWNER = "owner"
    """See and keep their own jobs."""
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
        team: whose jobs an owner may see and keep beside their own, or an empty string.
        shared: the token is one that several share, so that its bearer says who they are.
    """

    name: str
    role: Role
    session: str = ""
    team: str = ""
    shared: bool = False

    def sees(self, user: str, team: str) -> bool:
        """Whether the jobs of a user are theirs to see and to keep."""
        if self.role is not Role.OWNER:
            return True
        return bool(user) and (user == self.name or (bool(self.team) and team == self.team))


EVERYONE = Person("", Role.OPERATOR)
"""Who has not signed in, where pages can be read without."""
