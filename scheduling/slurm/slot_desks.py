"""Bookings at a Slurm: its reservations made as they are wanted, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.platforms.slurm_reservations import decode_reservations
from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.drivers import SlotsRefused
from gpuwarden.scheduling.slots import SlotUse
from gpuwarden.scheduling.slurm import reservations
from gpuwarden.scheduling.slurm.memories import SlotMemory
from gpuwarden.scheduling.slurm.names import account_of
from gpuwarden.scheduling.slurm.notices import Answered, Why, attempt_of
from gpuwarden.scheduling.slurm.queues import is_waiting
from gpuwarden.scheduling.slurm.refusals import refusal_of_reservation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.platforms.slurm_nodes import SlurmNode
    from gpuwarden.platforms.slurm_reservations import Reservation
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot
    from gpuwarden.scheduling.slurm.clusters import Cluster
    from gpuwarden.scheduling.slurm.notices import Notices
    from gpuwarden.scheduling.slurm.queues import Reading

LOOK_SECONDS: Final = 20.0
"""How often Slurm's reservations are looked at while nothing changes."""
FORGET_SECONDS: Final = 86_400.0
END_SOON: Final = "now+1minutes"

log = structlog.get_logger(__name__)


class SlotDesk:
    """The slots of one cluster.

    Args:
        cluster: which.
        notices: by which jobs are asked to leave.
        known: slot -> what is remembered of it.
    """

    def __init__(self, cluster: Cluster, notices: Notices, known: Mapping[str, SlotMemory]) -> None:
        self._cluster = cluster
        self._notices = notices
        self.known: dict[str, SlotMemory] = dict(known)
        self.problems: dict[str, str] = {}
        self._slots: tuple[Slot, ...] = ()
        self._reservations: tuple[Reservation, ...] = ()
        self._looked_at: float | None = None
        self._refused: dict[str, str] = {}

    # -- the whole truth

    def book(
        self, slots: Sequence[Slot], policy: Policy, nodes: Sequence[SlurmNode], now: float
    ) -> None:
        """Have Slurm keep cards for these slots, and for no others of ours.

        Raises:
            SlotsRefused: Slurm refuses some of them; the others are kept.
            ServiceUnavailable: it does not answer.
        """
        same = tuple(slots) == self._slots
        fresh = self._looked_at is not None and 0 <= now - self._looked_at < LOOK_SECONDS
        if same and fresh:
            self._complain()
            return
        self._look(now)
        self._slots = tuple(slots)
        self._refused = {}
        todo = reservations.steps(
            slots, self._reservations, policy, made=self.known.keys(), now=now
        )
        for each in todo.delete:
            self._give_back(each)
        for slot in todo.create:
            self._make(slot, policy, nodes, now)
        for slot in todo.extend:
            self._change(slot, f"EndTime=uts{int(slot.end)}")
        for slot in todo.open:
            self._change(slot, "Flags+=FLEX")
        if todo:
            self._look(now)
        present = {reservations.slot_of(each) for each in self._reservations}
        for slot in slots:
            if slot.id in present:
                memory = self.known.get(slot.id, SlotMemory(slot.end))
                self.known[slot.id] = replace(memory, end=slot.end)
        for name in [n for n, m in self.known.items() if now - m.end > FORGET_SECONDS]:
            del self.known[name]
        self._complain()

    def _complain(self) -> None:
        if self._refused:
            raise SlotsRefused({name: self._refused[name] for name in sorted(self._refused)})

    def _look(self, now: float) -> None:
        text = self._cluster.output("scontrol", "--oneliner", "show", "reservation")
        self._reservations = decode_reservations(text)
        self._looked_at = now

    def _make(self, slot: Slot, policy: Policy, nodes: Sequence[SlurmNode], now: float) -> None:
        error: RefusedAction | None = None
        # Where jobs run into the slot's beginning they can be asked to leave, by the policy.
        for ignore_jobs in (False, True) if policy.preemption is not None else (False,):
            try:
                words = reservations.creation(
                    slot,
                    policy,
                    nodes,
                    version=self._cluster.version,
                    now=now,
                    ignore_jobs=ignore_jobs,
                )
            except RefusedAction as refused:
                error = refused
                break
            answer = self._cluster.run("scontrol", "create", "reservation", *words)
            if not answer.status:
                log.info("slot_reserved", slot=slot.id, words=words)
                return
            refusal = refusal_of_reservation(answer)
            if isinstance(refusal, ServiceUnavailable):
                raise refusal
            if refusal.reason == "duplicate":
                # Made by an answer that was lost: the next look finds it.
                return
            error = refusal
            if refusal.reason != "busy":
                break
        log.warning("slot_refused", slot=slot.id, error=str(error))
        self._refused[slot.id] = f"slot {slot.id} of {slot.team}: {error}"

    def _give_back(self, reservation: Reservation) -> None:
        """Delete a reservation; one in which jobs run ends within a minute, and they go on."""
        name = f"ReservationName={reservation.name}"
        answer = self._cluster.run("scontrol", "delete", name)
        if answer.status:
            refusal = refusal_of_reservation(answer)
            if isinstance(refusal, ServiceUnavailable):
                raise refusal
            if refusal.reason == "gone":
                return
            answer = self._cluster.run("scontrol", "update", name, f"EndTime={END_SOON}")
        if answer.status:
            log.warning("slot_not_given_back", name=reservation.name, error=answer.complaint)
            return
        log.info("slot_given_back", name=reservation.name)

    def _change(self, slot: Slot, words: str) -> None:
        name = reservations.name_of(slot.id)
        answer = self._cluster.run("scontrol", "update", f"ReservationName={name}", words)
        if answer.status:
            log.warning("slot_not_changed", slot=slot.id, words=words, error=answer.complaint)
            self._refused[slot.id] = f"slot {slot.id}: {refusal_of_reservation(answer)}"

    def remarks(self, nodes: Sequence[SlurmNode]) -> dict[str, str]:
        """Slot -> what its team should know of how Slurm keeps it: whole nodes, above all.

        Args:
            nodes: with their cards.
        """
        kept = {reservations.slot_of(each): each for each in self._reservations}
        found = {}
        for slot in self._slots:
            each = kept.get(slot.id)
            if each is None or each.cards is not None:
                continue
            own = [node for node in nodes if node.name in each.nodes]
            cards = sum(sum(node.cards.values()) for node in own)
            if cards > slot.gpus:
                found[slot.id] = (
                    f"this Slurm keeps whole nodes: {cards} cards of {', '.join(each.nodes)} for "
                    f"the {slot.gpus} that are booked (23.11 and later keeps cards)"
                )
        return found

    # -- what becomes of them

    def watch(self, reading: Reading, policy: Policy, now: float) -> None:
        """Count what is used of active slots, ask those in the way to leave, and see conflicts."""
        self.problems = {}
        kept = {reservations.slot_of(each): each for each in self._reservations}
        pairs = [
            (slot, each)
            for slot in self._slots
            if slot.end > now and (each := kept.get(slot.id)) is not None
        ]
        blocked: list[str] = []
        for slot, each in pairs:
            if slot.start <= now:
                self._count(slot, each, reading, policy=policy, now=now)
            if slot.start - slot.lead_seconds <= now:
                blocked += self._ask(slot, each, reading, policy=policy, now=now)
        if blocked:
            self.problems["booking_blocked"] = (
                "jobs run into a slot and asked for no signal, so they cannot be told to leave: "
                f"{_some(blocked)}; their owners or an operator end them, or the slot waits"
            )
        self._say_nodes(pairs, reading)
        late = [
            f"{', '.join(found)} in {slot.id}"
            for slot, each in pairs
            if (found := reservations.conflicts(slot, each, reading.jobs, policy))
        ]
        if late:
            self.problems["booking_conflict"] = (
                f"Slurm plans jobs of others on nodes that are booked: {_some(late)}; their QOS "
                "may have the flag NoReserve"
            )

    def _say_nodes(self, pairs: Sequence[tuple[Slot, Reservation]], reading: Reading) -> None:
        """Where more is kept than was booked."""
        whole = [
            f"{slot.id} (nodes {', '.join(each.nodes)} for {slot.gpus} cards)"
            for slot, each in pairs
            if each.cards is None
        ]
        if whole and self._cluster.version < reservations.CARDS_SINCE:
            self.problems["booking_whole_nodes"] = (
                f"this Slurm reserves whole nodes, not cards: {_some(whole)}; Slurm 23.11 and "
                "later reserves cards"
            )
        taken = [slot.id for slot, each in pairs if self._takes_nodes(each, reading)]
        if taken:
            self.problems["booking_takes_node"] = (
                f"slots {_some(taken)} keep some cards, but nearly all processors of their nodes, "
                "so that nobody can use the other cards there: say in gres.conf which processors "
                "go with which card (Cores=)"
            )

    def _takes_nodes(self, reservation: Reservation, reading: Reading) -> bool:
        """Whether a reservation of some cards has all processors that were idle."""
        nodes = [node for node in reading.nodes if node.name in reservation.nodes]
        cards = sum(sum(node.cards.values()) for node in nodes)
        cores = sum(node.cores for node in nodes)
        if not nodes or reservation.cards is None or reservation.cards >= cards:
            return False
        return reservation.cores / max(1, cores) > (1 + reservation.cards / cards) / 2

    def _count(
        self,
        slot: Slot,
        reservation: Reservation,
        reading: Reading,
        *,
        policy: Policy,
        now: float,
    ) -> None:
        memory = self.known.get(slot.id, SlotMemory(slot.end))
        held = dict(memory.held)
        account = account_of(policy, slot.team)
        for job in reservations.uses(reservation, reading.jobs, account).values():
            begin = max(job.job.start_time or now, slot.start)
            # From timestamps, not from looks: a look that fell out loses nothing.
            held[attempt_of(job)] = job.gpus * max(0.0, min(now, slot.end) - begin)
        first = memory.first_used
        if first is None and held:
            first = now
        self.known[slot.id] = replace(memory, held=held, first_used=first)

    def _ask(
        self,
        slot: Slot,
        reservation: Reservation,
        reading: Reading,
        *,
        policy: Policy,
        now: float,
    ) -> Sequence[str]:
        """Ask jobs of others to leave that run into a slot; gives those that cannot be asked."""
        if policy.preemption is None:
            return ()
        why = Why(Cause.BOOKING, slot.id)
        chosen = [
            (job, why)
            for job in reservations.in_the_way(slot, reservation, reading, policy)
            if not self._is_slurms(job, slot, now)
        ]
        answers = self._notices.ask(chosen, policy, now)
        return [
            f"{job.number} in {slot.id}"
            for (job, _), answer in zip(chosen, answers, strict=True)
            if answer is Answered.DEAF
        ]

    def _is_slurms(self, job: ListedJob, slot: Slot, now: float) -> bool:
        """Whether Slurm tells a job itself, as the slot begins.

        It does so for who asked for that (`--signal=R:`). Who ran before the slot was near is told
        ahead all the same; one that was let in later would have begun for a minute.
        """
        signal = self._notices.signal_of(job)
        if signal is None or not signal.makes_way:
            return False
        near = slot.start - slot.lead_seconds
        return slot.start <= now or (job.job.start_time or now) > near

    def returns(self, reading: Reading, now: float) -> dict[str, Slot]:
        """Number of a waiting job -> the slot for which it made way, and which has not begun.

        Slurm would start it once more in front of that slot.
        """
        ahead = {slot.id: slot for slot in self._slots if slot.start > now}
        made_way = {
            asking.number: slot
            for asking in self._notices.asked.values()
            if asking.cause is Cause.BOOKING and (slot := ahead.get(asking.successor)) is not None
        }
        return {
            job.number: made_way[job.number]
            for job in reading.jobs
            if job.number in made_way and is_waiting(job)
        }

    def uses(self, reading: Reading | None, policy: Policy, now: float) -> tuple[SlotUse, ...]:
        """What becomes of the slots whose time has come."""
        kept = {reservations.slot_of(each): each for each in self._reservations}
        found = []
        for slot in self._slots:
            if not slot.start <= now < slot.end:
                continue
            each, memory = kept.get(slot.id), self.known.get(slot.id, SlotMemory(slot.end))
            jobs: Mapping[str, ListedJob] = {}
            if each is not None and reading is not None:
                jobs = reservations.uses(each, reading.jobs, account_of(policy, slot.team))
            found.append(
                SlotUse(
                    slot.id,
                    held=each is not None and each.end > now,
                    gpus=min(slot.gpus, sum(job.gpus for job in jobs.values())),
                    first_used=memory.first_used,
                    used_gpu_seconds=sum(memory.held.values()),
                )
            )
        return tuple(found)


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return f"{'; '.join(words[:20])}{more}"
