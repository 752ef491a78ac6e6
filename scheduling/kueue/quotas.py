"""Who may use how many cards, as Kueue counts them: quotas, bookings in force, what fits. Pure.

A booking guarantees its team so many cards for its time: what it has not of its own comes from
those that are nobody's, then from the other teams, in proportion; and what is booked is not lent.
The sum never changes, so nothing is promised twice; the same bookings give the same quotas,
whatever was in force before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot

POOL = ""
"""Stands for the cohort's own cards, which are no team's."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one team has of one kind of cards.

    Attributes:
        own: its own.
        borrows: how many more it may use at most.
        lends: how many of its own others may use while it does not.
    """

    own: int
    borrows: int
    lends: int


Shares = dict[tuple[str, str], Share]
"""(team or POOL, card) -> share."""


def shares_of(policy: Policy, slots: Iterable[Slot] = ()) -> Shares:
    """Everybody's shares while some bookings are in force.

    Args:
        policy: the quotas.
        slots: that are in force now.
    """
    found: Shares = {}
    for card in policy.cards:
        found[POOL, card.name] = Share(max(0, policy.unassigned(card.name)), 0, 0)
        for team in policy.teams:
            own = team.own(card.name)
            found[team.name, card.name] = Share(
                own, team.borrow.get(card.name, 0), team.lends(card.name)
            )
    booked: dict[tuple[str, str], int] = {}
    for slot in slots:
        if (slot.team, slot.card) in found:
            key = (slot.team, slot.card)
            booked[key] = booked.get(key, 0) + slot.gpus
    for (name, kind), gpus in sorted(booked.items()):
        _guarantee(found, name, kind, gpus=gpus, booked=booked)
    return found


def _guarantee(
    found: Shares, team: str, card: str, *, gpus: int, booked: Mapping[tuple[str, str], int]
) -> None:
    """Have a team's own be at least what it has booked, and lend none of that."""
    wanted = max(0, gpus - found[team, card].own)
    # What others have booked themselves is not theirs to give.
    have = {
        key: max(0, share.own - booked.get(key, 0))
        for key, share in found.items()
        if key[1] == card and key[0] not in (POOL, team)
    }
    spare = min(found[POOL, card].own, wanted)
    taken = {(POOL, card): spare} | _in_proportion(have, wanted - spare)
    for key, count in taken.items():
        share = found[key]
        own = share.own - count
        found[key] = Share(own, share.borrows, min(share.lends, own))
    share = found[team, card]
    own = share.own + sum(taken.values())
    # Nobody else gets them, or they would not be there when the team comes: who does not come
    # loses the slot (bookings.no_show_after).
    found[team, card] = Share(own, share.borrows, max(0, min(share.lends, own - gpus)))


def _in_proportion(have: Mapping[tuple[str, str], int], count: int) -> dict[tuple[str, str], int]:
    """Take so many in proportion to what each has, whole ones, largest remainders first."""
    total = sum(have.values())
    count = min(count, total)
    if count <= 0:
        return {}
    exact = {key: count * each / total for key, each in have.items()}
    taken = {key: int(value) for key, value in exact.items()}
    order = sorted(have, key=lambda key: (taken[key] - exact[key], key))
    for key in order:
        if sum(taken.values()) == count:
            break
        if taken[key] < have[key]:
            taken[key] += 1
    return taken


@dataclass(frozen=True, slots=True)
class Use:
    """Cards that a job holds by its reservation.

    Attributes:
        id: of the job.
        team: in whose queue it is.
        card: the kind.
        gpus: how many.
    """

    id: str
    team: str
    card: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Shares, and who uses what of them.

    Attributes:
        shares: of everybody.
        uses: of every job with a reservation.
    """

    shares: Shares
    uses: tuple[Use, ...] = field(default=())
    _totals: dict[tuple[str, str], int] = field(init=False, repr=False, compare=False)
    _by_id: dict[str, Use] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Add up once: it is asked for every job that waits."""
        totals: dict[tuple[str, str], int] = {}
        for use in self.uses:
            key = (use.team, use.card)
            totals[key] = totals.get(key, 0) + use.gpus
        object.__setattr__(self, "_totals", totals)
        object.__setattr__(self, "_by_id", {use.id: use for use in self.uses})

    def held(self, team: str, card: str, *, without: frozenset[str] = frozenset()) -> int:
        """Cards of a kind that a team uses, but for some jobs."""
        return self._totals.get((team, card), 0) - self._gone(without).get((team, card), 0)

    def _gone(self, without: frozenset[str]) -> dict[tuple[str, str], int]:
        """Cards that come free by who leaves, added up once for all teams."""
        gone: dict[tuple[str, str], int] = {}
        for name in without:
            use = self._by_id.get(name)
            if use is not None:
                key = (use.team, use.card)
                gone[key] = gone.get(key, 0) + use.gpus
        return gone

    def borrows(self, team: str, card: str) -> bool:
        """Whether a team uses more than its own."""
        share = self.shares.get((team, card))
        return share is not None and self.held(team, card) > share.own

    def fits(
        self, team: str, cards: Sequence[str], gpus: int, *, without: frozenset[str] = frozenset()
    ) -> str | None:
        """The first kind of cards of which a team may have so many more, or None.

        Args:
            team: whose queue.
            cards: kinds that will do, the preferred first.
            gpus: how many, all of one kind.
            without: jobs that will have left.
        """
        gone = self._gone(without)
        for card in cards:
            if self._room(team, card, gone) >= gpus:
                return card
        return None

    def _room(self, team: str, card: str, gone: Mapping[tuple[str, str], int]) -> int:
        """Cards that a team may have yet, by the arithmetic of Kueue's cohorts.

        What a team does not lend is its own whatever happens; the rest is a common pool, which
        everybody uses beyond that.
        """
        share = self.shares.get((team, card))
        if share is None:
            return 0
        pool, used = 0, 0
        for (other, kind), each in self.shares.items():
            if kind == card:
                kept = each.own - each.lends
                pool += each.own if other == POOL else each.lends
                if other != POOL:
                    key = (other, card)
                    used += max(0, self._totals.get(key, 0) - gone.get(key, 0) - kept)
        mine = self._totals.get((team, card), 0) - gone.get((team, card), 0)
        free = max(0, share.own - share.lends - mine) + pool - used
        return min(share.own + share.borrows - mine, free)

    def never(self, team: str, cards: Iterable[str], gpus: int) -> bool:
        """Whether a team may never have so many of any of these kinds."""
        alone = Ledger(self.shares)
        return all(alone.fits(team, (card,), gpus) is None for card in cards)
