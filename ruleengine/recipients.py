"""Who must have a notice, and who stands in for an owner who cannot be reached. Pure.

A notice that precedes an end must reach the owner, or the deputy whom the directory names for them.
A team's contact is told as well, which proves nothing to the owner: without either nothing severe
follows, and the operators hear of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.ruleengine.messages import local_time

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping, Sequence

    from gpuwarden.ruleengine.directories import Contact, Directory, User

NO_ADDRESS = "the directory has no address"
"""Why a notice cannot be brought to its owner at all."""

Address = tuple[str, str]
"""(channel, address)."""
_Way = tuple[str, str]
"""(channel, kind of address that it needs)."""


@dataclass(frozen=True, slots=True)
class Recipients:
    """Who is to have a notice about a user's job.

    Attributes:
        required: whose proof the deadline waits for; empty where nobody's would count.
        informed: who is told as well.
        deputy: user name of who stands in for the owner, or an empty string.
        why_not: why the owner is not told, in words, or an empty string.
    """

    required: tuple[Address, ...]
    informed: tuple[Address, ...] = ()
    deputy: str = ""
    why_not: str = ""


def recipients(
    directory: Directory,
    user: str,
    channels: Sequence[str],
    *,
    now: float,
    kinds: Mapping[str, str] | None = None,
) -> Recipients:
    """Who is to have a notice through some channels.

    Args:
        directory: the one in force.
        user: the owner.
        channels: names of channels, such as email.
        now: Unix time: a day of leaving begins in the person's own zone.
        kinds: of the channels that are not called like the address that they need.
    """
    given = tuple((channel, (kinds or {}).get(channel, channel)) for channel in channels)
    owner = directory.user(user)
    why_not = _why_not(owner, given, now)
    if not why_not:
        return Recipients(_addresses(owner, given))
    contact = directory.team(owner.team).contact
    informed = () if contact is None else _addresses(contact, given)
    deputy = owner.deputy or ""
    stands_in = directory.user(deputy)
    if not deputy or _why_not(stands_in, given, now):
        return Recipients((), informed, why_not=why_not)
    required = _addresses(stands_in, given)
    others = tuple(address for address in informed if address not in required)
    return Recipients(required, others, deputy, why_not)


def day_of(user: User, now: float) -> dt.date:
    """The day that it is for a person."""
    return local_time(now, user.timezone or "UTC").date()


def _why_not(user: User, channels: Sequence[_Way], now: float) -> str:
    if not user.present(day_of(user, now)):
        return f"they have left (by the directory, on {user.left})"
    return "" if _addresses(user, channels) else NO_ADDRESS


def _addresses(person: User | Contact, channels: Sequence[_Way]) -> tuple[Address, ...]:
    found = ((channel, person.address(kind)) for channel, kind in channels)
    return tuple((channel, address) for channel, address in found if address)
