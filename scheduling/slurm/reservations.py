"""Slots of bookings as Slurm's reservations. Pure.

A slot is one reservation, whose name carries its id: recurring bookings are so many slots, for
Slurm's own DAILY and WEEKLY know no clock that is put back. Cards can be reserved from 23.11 on;
before, whole nodes are, and that is said. Jobs of the team are drawn into it (MAGNETIC); one that
nobody uses gives itself back (PURGE_COMP), also while the scheduler is away.

FLEX would let jobs of the team run past the slot's end, which trainings do, but also before its
beginning: on 22.05 such a job has those in its way leave at once, however far the slot is. So it is
set when the slot has begun.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import RefusedAction
from gpuwarden.scheduling.slurm.meanings import RESERVATION_MARK
from gpuwarden.scheduling.slurm.names import account_of, by_qos

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.platforms.slurm_nodes import SlurmNode
    from gpuwarden.platforms.slurm_reservations import Reservation
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot
    from gpuwarden.scheduling.slurm.queues import Reading

CARDS_SINCE: Final = (23, 11)
"""From this version on cards can be reserved, and not only nodes."""
LEAST_SECONDS: Final = 60.0
"""Slurm reserves by the minute: a slot of less is not worth a reservation."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is reserved for a slot.

    Attributes:
        nodes: how many.
        cards: on each of them; None where whole nodes are reserved.
        gpus: that are kept in all, at least as many as the slot asks for.
    """

    nodes: int
    cards: int | None
    gpus: int


@dataclass(frozen=True, slots=True)
class Steps:
    """What has to be done so that Slurm has the slots, and no others of ours.

    Attributes:
        delete: reservations that are given back, first.
        create: slots that have none.
        extend: slots whose reservation ends at another time.
        open: slots that have begun: their jobs may run past their end from now on.
    """

    delete: tuple[Reservation, ...] = ()
    create: tuple[Slot, ...] = ()
    extend: tuple[Slot, ...] = ()
    open: tuple[Slot, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.delete or self.create or self.extend or self.open)


def name_of(slot: str) -> str:
    """The name of a slot's reservation."""
    return f"{RESERVATION_MARK}{slot}"


def slot_of(reservation: Reservation) -> str | None:
    """The slot of a reservation; None of one that is not ours."""
    if not reservation.name.startswith(RESERVATION_MARK):
        return None
    return reservation.name.removeprefix(RESERVATION_MARK)


def shape_of(
    slot: Slot, policy: Policy, nodes: Sequence[SlurmNode], version: tuple[int, int]
) -> Shape:
    """How much of which size is reserved for a slot.

    Raises:
        RefusedAction: no nodes have so many cards.
    """
    sizes = sorted(cards for node in nodes if (cards := cards_on(node, slot.card, policy)))
    if slot.gpus > sum(sizes):
        raise RefusedAction(
            "no_such_node",
            f"slot {slot.id}: Slurm's nodes have {sum(sizes)} cards of {slot.card}, and it asks "
            f"for {slot.gpus}",
        )
    if version < CARDS_SINCE:
        # Slurm may choose the smallest nodes: enough of them for any choice.
        kept = list(itertools.accumulate(sizes))
        count = next(n for n, total in enumerate(kept, start=1) if total >= slot.gpus)
        return Shape(count, None, kept[count - 1])
    shapes = [
        Shape(count, each, count * each)
        for count in range(1, len(sizes) + 1)
        if sum(size >= (each := math.ceil(slot.gpus / count)) for size in sizes) >= count
    ]
    if not shapes:
        raise RefusedAction(
            "no_such_node",
            f"slot {slot.id}: Slurm reserves as many cards on each node, and {slot.gpus} of "
            f"{slot.card} cannot be had so: book several slots",
        )
    return min(shapes, key=lambda shape: (shape.gpus, shape.nodes))


def cards_on(node: SlurmNode, card: str, policy: Policy) -> int:
    """How many cards of a kind a node has."""
    known = policy.card(card)
    if known is None or known.slurm is None:
        return 0
    if known.slurm.partition is not None:
        wanted = known.slurm.partition
        inside = any(
            name == wanted or (not by_qos(policy) and name.startswith(f"{wanted}-"))
            for name in node.partitions
        )
        if not inside:
            return 0
    return node.cards.get(known.slurm.gres, node.cards.get("", 0))


def creation(
    slot: Slot,
    policy: Policy,
    nodes: Sequence[SlurmNode],
    *,
    version: tuple[int, int],
    now: float,
    ignore_jobs: bool,
) -> tuple[str, ...]:
    """What `scontrol create reservation` is told.

    Args:
        slot: which.
        policy: whose accounts and cards it names.
        nodes: the cluster's.
        version: of Slurm.
        now: Unix time.
        ignore_jobs: also where jobs run into its beginning, which are asked to leave then.

    Raises:
        RefusedAction: no nodes have so many cards, or it is over.
    """
    shape = shape_of(slot, policy, nodes, version)
    # Slurm takes no beginning in the past.
    start = "now" if slot.start <= now else f"uts{int(slot.start)}"
    if slot.end - max(slot.start, now) < LEAST_SECONDS:
        raise RefusedAction("time", f"slot {slot.id} ends within a minute")
    flags = ["MAGNETIC"]
    if policy.bookings is not None:
        flags.append(f"PURGE_COMP={_clock(policy.bookings.no_show_after)}")
    if ignore_jobs:
        flags.append("IGNORE_JOBS")
    partition = _partition(slot, policy)
    cards = () if shape.cards is None else (f"{_tres(slot, policy, nodes)}={shape.cards}",)
    return (
        f"ReservationName={name_of(slot.id)}",
        f"StartTime={start}",
        f"EndTime=uts{int(slot.end)}",
        f"Accounts={account_of(policy, slot.team)}",
        f"NodeCnt={shape.nodes}",
        *(() if partition is None else (f"PartitionName={partition}",)),
        *(f"TRESPerNode={each}" for each in cards),
        f"Flags={','.join(flags)}",
        f"MaxStartDelay={max(1, math.ceil(slot.lead_seconds / 60))}",
    )


def _partition(slot: Slot, policy: Policy) -> str | None:
    known = policy.card(slot.card)
    base = None if known is None or known.slurm is None else known.slurm.partition
    if by_qos(policy):
        return base
    usual = policy.usual_priority.name
    return usual if base is None else f"{base}-{usual}"


def _tres(slot: Slot, policy: Policy, nodes: Sequence[SlurmNode]) -> str:
    """Cards of a type only where there are several: a cluster need not count each type."""
    known = policy.card(slot.card)
    models = {model for node in nodes for model in node.cards if model}
    if known is None or known.slurm is None or len(models) < 2:
        return "gres/gpu"
    return f"gres/gpu:{known.slurm.gres}"


def _clock(seconds: float) -> str:
    """A time as Slurm takes it, in whole minutes, at least one."""
    minutes = max(1, math.ceil(seconds / 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{f'{days}-' if days else ''}{rest // 60:02d}:{rest % 60:02d}:00"


def steps(
    slots: Sequence[Slot],
    reservations: Sequence[Reservation],
    policy: Policy,
    *,
    made: Collection[str],
    now: float,
) -> Steps:
    """What differs between the slots and Slurm's reservations.

    Args:
        slots: the whole truth.
        reservations: all of Slurm's; those without our mark are nobody's business.
        policy: whose accounts the teams have.
        made: slots that Slurm has kept before. One of them that has begun and is gone was given
            back, by Slurm for nobody came, or by a person: it is not made again.
        now: Unix time.
    """
    wanted = {slot.id: slot for slot in slots if slot.end - now >= LEAST_SECONDS}
    delete: list[Reservation] = []
    extend: list[Slot] = []
    begun: list[Slot] = []
    kept: set[str] = set()
    for each in reservations:
        own = slot_of(each)
        if own is None:
            continue
        slot = wanted.get(own)
        if slot is None or not _same(slot, each, policy):
            # One that ends by itself right away is not worth a command.
            if each.end - now >= LEAST_SECONDS:
                delete.append(each)
                continue
            kept.add(own)
            continue
        kept.add(own)
        if int(each.end) != int(slot.end):
            extend.append(slot)
        if slot.start <= now and "FLEX" not in each.flags:
            begun.append(slot)
    create = [
        slot
        for slot in wanted.values()
        if slot.id not in kept and not (slot.id in made and slot.start <= now)
    ]
    create.sort(key=lambda slot: (slot.start, slot.id))
    return Steps(tuple(delete), tuple(create), tuple(extend), tuple(begun))


def _same(slot: Slot, reservation: Reservation, policy: Policy) -> bool:
    """Whether a reservation is this slot's; one that was made late begins later."""
    if account_of(policy, slot.team) not in reservation.accounts:
        return False
    late = reservation.active and slot.start <= reservation.start
    return late or int(reservation.start) == int(slot.start)


def conflicts(
    slot: Slot, reservation: Reservation, jobs: Sequence[ListedJob], policy: Policy
) -> tuple[str, ...]:
    """Jobs of others that Slurm plans to start in a slot's whole nodes.

    Those of a QOS with the flag NoReserve, for example. Where only some cards of a node are kept,
    that cannot be told.
    """
    if reservation.cards is not None:
        return ()
    account = account_of(policy, slot.team)
    found = []
    for job in jobs:
        planned = job.job.start_time
        if planned is None or job.job.holds or job.job.account == account or not job.gpus:
            continue
        end = planned + (job.job.time_limit or math.inf)
        inside = planned < reservation.end and end > reservation.start
        if inside and set(job.planned_nodes) & set(reservation.nodes):
            found.append(job.number)
    return tuple(found)


def in_the_way(
    slot: Slot, reservation: Reservation, reading: Reading, policy: Policy
) -> tuple[ListedJob, ...]:
    """Jobs of others that run into a slot and have to leave for it.

    Where only some cards of a node are kept, those that began last, until there are enough.
    """
    account = account_of(policy, slot.team)
    others = [
        job
        for job in reading.jobs
        if job.job.holds
        and job.gpus
        and job.job.account != account
        and set(job.job.nodes) & set(reservation.nodes)
        and (job.job.end_time is None or job.job.end_time > slot.start)
    ]
    others.sort(key=lambda job: (-(job.job.start_time or 0.0), job.job.job_id))
    if reservation.cards is None:
        return tuple(others)
    missing = slot.gpus - sum(
        sum(node.idle.values()) for node in reading.nodes if node.name in reservation.nodes
    )
    missing -= sum(job.gpus for job in uses(reservation, reading.jobs, account).values())
    found = []
    for job in others:
        if missing <= 0:
            break
        found.append(job)
        missing -= job.gpus
    return tuple(found)


def uses(
    reservation: Reservation, jobs: Sequence[ListedJob], account: str
) -> Mapping[str, ListedJob]:
    """Jobs that run in a reservation, by number.

    Those that Slurm put there; in whole nodes also those of the team that ran there before.
    """
    whole = reservation.cards is None
    return {
        job.number: job
        for job in jobs
        if job.job.holds
        and job.gpus
        and (
            job.reservation == reservation.name
            or (
                whole
                and job.job.account == account
                and not set(job.job.nodes).isdisjoint(reservation.nodes)
            )
        )
    }
