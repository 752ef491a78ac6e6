"""Which cards may be given to whom, from what was seen of them. Pure.

A card with a process that is no job's of this engine is off limits, and so is one whose memory
somebody uses unseen. A card that a job has left is free when its processes are gone from the card
and the memory is back: not when the job has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.scheduling.preemption_terms import Pool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.scheduling.local.cards import CardSeen
    from gpuwarden.scheduling.policies import Policy

IDLE_BYTES = 1024**3
"""Memory that a card without a process may still have in use: contexts of the driver's own."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An attempt that cards were given to.

    Attributes:
        entry: the job's id.
        pids: its processes that live.
        ended: whether the job has ended: its cards are only waited for.
    """

    entry: str
    pids: frozenset[int]
    ended: bool


@dataclass(frozen=True, slots=True)
class CardUses:
    """What can be done with the cards.

    Attributes:
        free: kind -> UUIDs that may be given to somebody now, by index.
        total: pool -> cards that can serve jobs at one time or another, whoever is on them now.
        released: UUIDs that an ended attempt held, and that are free again.
        refused: UUID -> why a card is off limits.
        missing: kind -> cards that the policy counts and this host does not have.
    """

    free: Mapping[str, tuple[str, ...]]
    total: Mapping[Pool, int]
    released: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)


def uses_of(
    seen: Sequence[CardSeen],
    holders: Mapping[str, Holder],
    policy: Policy,
    *,
    kinds: Mapping[str, str] | None = None,
) -> CardUses:
    """Sort the cards.

    Args:
        seen: every card.
        holders: UUID -> who was given it.
        policy: whose kinds count; cards beyond a kind's number are left alone.
        kinds: UUID -> kind of cards that are held, whatever the policy calls them now.
    """
    names = {card.model: card.name for card in policy.cards}
    counts = {card.name: card.count for card in policy.cards}
    free: dict[str, list[str]] = {card.name: [] for card in policy.cards}
    total: dict[Pool, int] = {}
    refused: dict[str, str] = {}
    released: set[str] = set()
    found: dict[str, int] = {}
    # Cards that are held come first, so that a smaller number in a new policy takes none away; of
    # the others those that work, so that a spare one stands in for one that does not.
    for card in sorted(
        seen, key=lambda each: (each.uuid not in holders, bool(each.problem), each.index)
    ):
        kind = (kinds or {}).get(card.uuid) or names.get(card.model)
        if kind is None:
            unknown = f"no kind of cards of the policy has the model {card.model!r}"
            refused[card.uuid] = card.problem or unknown
            continue
        found[kind] = found.get(kind, 0) + 1
        holder = holders.get(card.uuid)
        if holder is None and found[kind] > counts.get(kind, 0):
            refused[card.uuid] = f"the policy counts {counts.get(kind, 0)} cards of {kind}"
            continue
        problem = _problem(card, holder)
        if problem:
            refused[card.uuid] = problem
        if card.whole and not card.problem:
            total[Pool(kind)] = total.get(Pool(kind), 0) + 1
        if problem or (holder is not None and not holder.ended):
            continue
        if holder is not None:
            released.add(card.uuid)
        free.setdefault(kind, []).append(card.uuid)
    return CardUses(
        free={kind: tuple(uuids) for kind, uuids in free.items()},
        total=total,
        released=frozenset(released),
        refused=refused,
        missing={
            kind: count - found.get(kind, 0)
            for kind, count in counts.items()
            if count > found.get(kind, 0)
        },
    )


def _problem(card: CardSeen, holder: Holder | None) -> str:
    """Why nobody may be given a card now, or an empty string.

    Whoever only draws, as a display server does on every card of a workstation, is no reason while
    its memory is small.
    """
    if card.problem:
        return card.problem
    if not card.whole:
        return "it is in MIG mode, and only whole cards are given here"
    if card.pids is None or card.used is None:
        return "the driver does not tell who uses it"
    own = frozenset() if holder is None else holder.pids
    foreign = sorted(card.pids - own)
    if foreign:
        some = ", ".join(str(pid) for pid in foreign[:4])
        return f"process {some} uses it, and is no job of this queue on this card"
    if holder is None or not holder.ended:
        who = f"by process {min(card.drawing)}, which draws" if card.drawing else "by no process"
        return "" if holder is not None else _unseen(card.used, who)
    left = f"after job {holder.entry} left it"
    return f"processes are still on it {left}" if card.pids & own else _unseen(card.used, left)


def _unseen(used: int, when: str) -> str:
    """What to say of memory that is in use without a process, or an empty string."""
    return "" if used <= IDLE_BYTES else f"{used / 1024**3:.1f} GiB of its memory are in use {when}"
