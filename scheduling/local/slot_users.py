"""Which running jobs use the cards of which slot. Pure.

A booking adds cards to what its team may run: what the team ran before runs on the team's quota,
and uses up nothing of the slot. Only jobs that got their cards in it do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuwarden.scheduling.local.scenes import Scene, Working
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot


def slot_users(scene: Scene, policy: Policy, now: float) -> dict[str, dict[str, int]]:
    """Slot -> jobs that use it -> how many of its cards each has.

    First jobs of whoever booked it, then higher classes, then older ones. A job of more cards than
    are left of a slot has those, and its others by its team's quota.

    Args:
        scene: as it is now.
        policy: whose classes count.
        now: Unix time.
    """
    kept = sorted(
        (slot for slot in scene.slots if slot.is_kept(now)), key=lambda slot: (slot.start, slot.id)
    )
    jobs = [job for job in sorted(scene.working, key=seniority(policy)) if job.told is None]
    found: dict[str, dict[str, int]] = {}
    used: set[str] = set()
    for slot in kept:
        mine = [
            job
            for job in jobs
            if job.id not in used
            and job.cards(slot.card)
            and slot.admits(job.team, job.user, job.since)
        ]
        rest = slot.gpus
        found[slot.id] = {}
        for job in sorted(mine, key=lambda job: job.user != slot.who):
            if rest:
                found[slot.id][job.id] = min(rest, job.cards(slot.card))
                rest -= found[slot.id][job.id]
        used.update(found[slot.id])
    for slot in kept:
        older = [job for job in jobs if is_bookers(slot, job) and job.id not in used]
        beside = _beside(slot, scene, found) - sum(job.cards(slot.card) for job in older)
        rest = slot.gpus - sum(found[slot.id].values())
        # Nobody is asked to leave for what he booked himself, to come back into it: where there
        # are not cards enough besides, what he ran before is in the slot too.
        for job in older:
            if rest <= max(0, beside):
                break
            found[slot.id][job.id] = min(rest, job.cards(slot.card))
            rest -= found[slot.id][job.id]
            used.add(job.id)
    return found


def _beside(slot: Slot, scene: Scene, found: Mapping[str, Mapping[str, int]]) -> int:
    """Cards of a slot's kind that neither other slots nor its own users have."""
    total = sum(count for pool, count in scene.total.items() if pool.kind == slot.card)
    others = sum(
        each.gpus
        for each in scene.slots
        if each.id in found and each.id != slot.id and each.card == slot.card
    )
    return total - others - sum(found[slot.id].values())


def is_bookers(slot: Slot, job: Working) -> bool:
    """Whether a job that has cards of a slot's kind is of whoever booked the slot."""
    return (job.team, job.user) == (slot.team, slot.who) and job.cards(slot.card) > 0


def seniority(policy: Policy) -> Callable[[Working], tuple[int, float, str]]:
    """How running jobs are ranked: higher classes first, then older ones."""
    return lambda job: (-value_of(policy, job.priority), job.since, job.id)


def value_of(policy: Policy, priority: str) -> int:
    """Of a class; one that the policy does not know any more is worth nothing."""
    known = policy.priority(priority)
    return 0 if known is None else known.value
