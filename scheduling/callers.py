"""Who asks: whom the kernel names on a socket, or whom a token belongs to.

On a socket of this machine nobody can say to be another: SO_PEERCRED is the kernel's word, and no
header, no body and no environment variable changes it.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy

_CREDENTIALS = struct.Struct("=iII")
"""pid, uid, gid: struct ucred of Linux."""


class Role(StrEnum):
    """What somebody may do."""

    READER = "reader"
    """Look."""
    USER = "user"
    """Also book for a team of theirs, submit, and command what is theirs."""
    OPERATOR = "operator"
    """Also command what is others'."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks.

    Attributes:
        name: of the user, or of a program that only looks.
        role: what they may do.
        uid: on this machine, or None where a token showed who it is.
        gid: likewise.
    """

    name: str
    role: Role
    uid: int | None = None
    gid: int | None = None

    @property
    def operates(self) -> bool:
        """Whether they may command what is others'."""
        return self.role is Role.OPERATOR

    def must_change(self) -> None:
        """Stop who only looks: their name may be that of a user, whose jobs are not theirs.

        Raises:
            RefusedAction: they may change nothing.
        """
        if self.role is Role.READER:
            raise RefusedAction("reader", f"{self.name} may look, and change nothing")

    def team(self, policy: Policy, named: str) -> str:
        """The team that they act for.

        Args:
            policy: says who is in which.
            named: the team that they named, or an empty text.

        Raises:
            RefusedAction: they are in none, in several, or not in that one.
        """
        self.must_change()
        own = [team.name for team in policy.teams_of(self.name)]
        if named and policy.team(named) is None:
            known = ", ".join(team.name for team in policy.teams)
            raise RefusedAction("team", f"there is no team {named}: there are {known}")
        if named and (named in own or self.operates):
            return named
        if named:
            whose = f"is of {', '.join(own)}" if own else "is of no team of the policy"
            raise RefusedAction("team", f"{self.name} {whose}, and cannot act for {named}")
        if len(own) == 1:
            return own[0]
        if own:
            raise RefusedAction("team", f"{self.name} is of {', '.join(own)}: say --team for which")
        raise RefusedAction("team", f"{self.name} is of no team of the policy: say --team")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Uid and gid of who is at the other end of a unix socket, as of when it connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, gid = _CREDENTIALS.unpack(raw)
    return uid, gid


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a socket, by this machine's directory of users.

    Attributes:
        uid: as the kernel told.
        gid: likewise.
        name: see `user_name`.
        groups: names of the groups that they are in.
    """

    uid: int
    gid: int
    name: str
    groups: frozenset[str]

    @classmethod
    def of(cls, uid: int, gid: int) -> Peer:
        """Look them up; a directory of an organisation may take its time, or not answer."""
        name = user_name(uid)
        groups = set() if name.startswith("#") else _groups(name, gid)
        return cls(uid, gid, name, frozenset(groups))


def local_caller(peer: Peer, policy: Policy) -> Caller:
    """Who a user of this machine is by the policy.

    Args:
        peer: as the kernel and the directory told.
        policy: names the operators.
    """
    operators = policy.operators
    named = peer.name in operators.users or peer.groups & set(operators.groups)
    nameless = peer.name.startswith("#")
    role = Role.OPERATOR if not nameless and (peer.uid == 0 or named) else Role.USER
    return Caller(peer.name, role, peer.uid, peer.gid)


def user_name(uid: int) -> str:
    """The name of a user of this machine; `#` and the number of one who has none.

    Of a container, or their directory does not answer: no policy can have such a name.
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _groups(name: str, gid: int) -> set[str]:
    found = set()
    for number in os.getgrouplist(name, gid):
        try:
            found.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return found
