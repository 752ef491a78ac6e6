"""Teams that hold more cards than the policy grants: our own count beside the engine's. Pure.

An engine that enforces quotas may miscount them: a queue beyond its capability, jobs that it never
saw, a limit that somebody lifted by hand (volcano #1860, #2264). Nothing is ended for it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from gpuwarden.schedule_api import EntryState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.schedule_api import QueueEntry
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot

SETTLED_SECONDS: Final = 300.0
"""A job counts from so long after its start on: before, another may be on its way out."""
_HOLDS: Final = (EntryState.RUNNING, EntryState.LEAVING)


def excesses(
    entries: Iterable[QueueEntry], slots: Iterable[Slot], policy: Policy, now: float
) -> tuple[str, ...]:
    """A sentence for each team and kind of cards of which it holds too many, in their order.

    Args:
        entries: every job.
        slots: bookings that stand; in its own a team is bound by no quota.
        policy: in force.
        now: Unix time.
    """
    held: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        settled = entry.started is not None and now - entry.started >= SETTLED_SECONDS
        if entry.state in _HOLDS and settled:
            held[entry.team, entry.gpu_type] += entry.gpus
    booked: Counter[tuple[str, str]] = Counter()
    for slot in slots:
        if slot.start - slot.lead_seconds <= now < slot.end:
            booked[slot.team, slot.card] += slot.gpus
    found = []
    for (name, card), cards in sorted(held.items()):
        team = policy.team(name)
        if team is None or policy.card(card) is None:
            continue
        granted = team.most(card) + booked[name, card]
        if cards > granted:
            found.append(
                f"team {name} holds {cards} cards of {card}, and its quota, what it may borrow and "
                f"its bookings are {granted}: see `gpuwarden policy drift`; jobs that run past "
                "their booking count too"
            )
    return tuple(found)
