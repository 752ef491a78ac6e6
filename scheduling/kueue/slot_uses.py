"""What becomes of bookings whose time has come: who uses their cards, and since when. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.scheduling.slots import SlotUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.slots import Slot


def uses_of(
    slots: Iterable[Slot], holdings: Sequence[Holding], *, held: frozenset[str], now: float
) -> tuple[SlotUse, ...]:
    """What is seen of the slots that are active.

    Several slots of one team are filled one after the other, the earlier first.

    Args:
        slots: of all teams.
        holdings: attempts that held cards since the first of them began.
        held: ids of those whose cards the engine keeps.
        now: Unix time.
    """
    active = sorted(
        (slot for slot in slots if slot.start <= now < slot.end),
        key=lambda slot: (slot.start, slot.id),
    )
    found = []
    for index, slot in enumerate(active):
        before = [
            each for each in active[:index] if (each.team, each.card) == (slot.team, slot.card)
        ]
        mine = [
            each
            for each in holdings
            if (each.team, each.card) == (slot.team, slot.card)
            and each.start < now
            and (each.end is None or each.end > slot.start)
        ]
        found.append(_use(slot, mine, before, held=slot.id in held, now=now))
    return tuple(found)


def _use(
    slot: Slot, mine: Sequence[Holding], before: Sequence[Slot], *, held: bool, now: float
) -> SlotUse:
    moments = {slot.start, now}
    for each in mine:
        moments |= {max(slot.start, each.start), min(now, each.end or now)}
    moments |= {slot_.start for slot_ in before if slot_.start > slot.start}
    edges = sorted(moment for moment in moments if slot.start <= moment <= now)
    used, first, latest = 0.0, None, 0
    for begin, end in zip(edges, [*edges[1:], now], strict=True):
        gpus = sum(
            each.gpus
            for each in mine
            if each.start <= begin and (each.end is None or each.end > begin)
        )
        others = sum(other.gpus for other in before if other.start <= begin < other.end)
        latest = max(0, min(slot.gpus, gpus - others))
        used += latest * (end - begin)
        if latest and first is None:
            first = begin
    return SlotUse(slot.id, held, latest, first, used)
