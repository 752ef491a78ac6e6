"""Booking cards, and giving them back: on behalf of somebody, once, and with the engine's consent.

A booking is first written down and then told to the engine. Where the engine refuses it, it is
taken back at once, and whoever asked reads why; where the engine cannot be seen it stands as
proposed, and is told to the engine when that is back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.errors import GpuwardenError, RefusedAction, TemporaryError
from gpuwarden.scheduling.booking_terms import prices_of, terms_of
from gpuwarden.scheduling.bookings import Answer, Wish, consider, lengthened
from gpuwarden.scheduling.recurrences import MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuwarden.scheduling.callers import Caller
    from gpuwarden.scheduling.schedulers import Scheduler
    from gpuwarden.scheduling.stores import Booked

MAX_STANDING = 5000
"""Slots ahead at a time; a calendar beyond it is read by nobody."""
MAX_OF_ONE = MAX_SLOTS
"""Of them of one user: as many as one booking has at most. Nobody fills everybody's calendar."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a wish to book.

    Attributes:
        answer: of the calendar: slots, objections, warnings, other times.
        slots: as they are booked; empty for a dry run and where it was refused.
        booking: its id, or an empty text.
        cost: currency -> amount, where the policy tells prices.
        repeated: whether it was booked before, by the same key.
    """

    answer: Answer
    slots: tuple[Booked, ...] = ()
    booking: str = ""
    cost: Mapping[str, float] = dataclasses.field(default_factory=dict)
    repeated: bool = False


class BookingDesk:
    """Takes bookings.

    Args:
        scheduler: whose store and policy count.
        tell: runs a function in the driver's thread and gives its result; raises TimeoutError
            where that has no time for it now.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tell: Callable[[Callable[[], Mapping[str, str]]], Mapping[str, str]],
    ) -> None:
        self._scheduler = scheduler
        self._tell = tell
        self._desk = threading.Lock()

    def book(
        self,
        wish: Wish,
        caller: Caller,
        *,
        words: str = "",
        key: str | None = None,
        dry_run: bool = False,
    ) -> Outcome:
        """Book cards, or say why that cannot be.

        Args:
            wish: what is wanted; team and user were checked by `caller.team`.
            caller: who asks.
            words: what it is for.
            key: by which a second try of the same wish is known.
            dry_run: only say what would be.

        Raises:
            RefusedAction: nothing can be booked here, the key is that of another wish, or the
                engine refuses.
        """
        own_key = None if key is None else f"{caller.name}:{key}"
        text = _text(wish)
        now = self._scheduler.clock.wall()
        # The engine is asked while the desk is held: nobody is promised what is about to be undone.
        with self._desk:
            if own_key is not None and not dry_run:
                before = self._scheduler.store.reservation_by(own_key)
                if before is not None and before.wish != text:
                    raise RefusedAction("key", "this key was used for another booking: take a new")
                if before is not None:
                    slots = tuple(item.slot for item in before.slots)
                    return self._outcome(Answer(slots), before.slots, before.id, repeated=True)
            terms = terms_of(self._scheduler.policy, self._used())
            taken = self._scheduler.store.standing(now)
            answer = consider(wish, taken, terms, now=now)
            if answer.objections or dry_run:
                return self._outcome(answer)
            if len(taken) + len(answer.slots) > MAX_STANDING:
                raise RefusedAction("full", f"{MAX_STANDING} slots are booked: cancel some first")
            own = sum(slot.who == caller.name for slot in taken)
            if own + len(answer.slots) > MAX_OF_ONE:
                raise RefusedAction(
                    "full",
                    f"{own} slots ahead are yours, and {MAX_OF_ONE} may be: cancel some first, or "
                    "book fewer (--until)",
                )
            made = self._scheduler.store.reserve(
                answer.slots,
                wish=text,
                repeat=wish.repeat,
                words=words,
                key=own_key,
                now=now,
            )
            return self._entered(answer, made.id, [item.slot.id for item in made.slots], now)

    def cancel(self, name: str, caller: Caller) -> tuple[Booked, ...]:
        """Give a booking back, or one slot of it; what is over stays as it was.

        Returns:
            The slots that were given back.

        Raises:
            RefusedAction: there is none of this name, or it is others'.
        """
        now = self._scheduler.clock.wall()
        with self._desk:
            own = self._own(name, caller)
            standing = [item for item in own if item.released is None and item.slot.end > now]
            if not standing:
                raise RefusedAction("over", f"{name} is over, or was given back already")
            names = [item.slot.id for item in standing]
            self._scheduler.store.release(names, by=caller.name, now=now)
            with contextlib.suppress(GpuwardenError):  # told by the next tick, or a problem
                self._tell_engine()
            return tuple(
                item for item in self._scheduler.store.slots_of(name) if item.slot.id in set(names)
            )

    def lengthen(self, name: str, caller: Caller, *, end: float, dry_run: bool = False) -> Outcome:
        """Have a slot last until another moment; earlier is possible too.

        Raises:
            RefusedAction: there is no such slot, it is others', or over; or the engine refuses.
        """
        now = self._scheduler.clock.wall()
        with self._desk:
            own = [item for item in self._own(name, caller) if item.slot.end > now]
            if len(own) != 1 or own[0].released is not None:
                which = ", ".join(item.slot.id for item in own[:5])
                hint = f": say which slot: {which}" if len(own) > 1 else ""
                raise RefusedAction("slot", f"{name} is no single slot that is ahead{hint}")
            slot = own[0].slot
            terms = terms_of(self._scheduler.policy, self._used())
            taken = self._scheduler.store.standing(now)
            answer = lengthened(slot, end, taken, terms, now=now)
            if answer.objections or dry_run:
                return self._outcome(answer)
            self._scheduler.store.lengthen(slot.id, end, now=now)
            try:
                refused = self._tell_engine()
            except GpuwardenError as error:
                refused = {slot.id: str(error)}
            if slot.id in refused:
                self._scheduler.store.lengthen(slot.id, slot.end, now=now)
                with contextlib.suppress(GpuwardenError):
                    self._tell_engine()
                raise RefusedAction("engine", refused[slot.id])
            found = self._scheduler.store.slots_of(slot.id)
            return self._outcome(answer, found, found[0].booking)

    # -- parts

    def _own(self, name: str, caller: Caller) -> tuple[Booked, ...]:
        caller.must_change()
        found = self._scheduler.store.slots_of(name)
        if not found:
            raise RefusedAction("unknown", f"there is no booking {name}: see gpuwarden book list")
        slot = found[0].slot
        teams = {team.name for team in self._scheduler.policy.teams_of(caller.name)}
        if not (caller.operates or caller.name == slot.who or slot.team in teams):
            raise RefusedAction(
                "others", f"{name} is of {slot.team}, made by {slot.who}: they or an operator can"
            )
        return found

    def _used(self) -> dict[tuple[str, str, str], float | None]:
        return {use.budget.key: use.used for use in self._scheduler.budgets}

    def _tell_engine(self) -> Mapping[str, str]:
        """Tell the engine what is booked now; where it cannot be seen, the next tick does."""
        scheduler = self._scheduler
        try:
            return self._tell(lambda: scheduler.book(scheduler.clock.wall()))
        except (TemporaryError, TimeoutError):
            return {}

    def _entered(self, answer: Answer, booking: str, names: Sequence[str], now: float) -> Outcome:
        try:
            refused = self._tell_engine()
        except GpuwardenError as error:
            # It keeps no slots at all now: somebody's right is missing, for example.
            refused = dict.fromkeys(names, str(error))
        against = {name: refused[name] for name in names if name in refused}
        if against:
            self._scheduler.store.release(names, by="engine", now=now)
            with contextlib.suppress(GpuwardenError):
                self._tell_engine()
            why = "; ".join(f"{name}: {text}" for name, text in against.items())
            raise RefusedAction("engine", f"{self._scheduler.driver.engine} refuses: {why}")
        return self._outcome(answer, self._scheduler.store.slots_of(booking), booking)

    def _outcome(
        self,
        answer: Answer,
        slots: tuple[Booked, ...] = (),
        booking: str = "",
        *,
        repeated: bool = False,
    ) -> Outcome:
        prices = prices_of(self._scheduler.policy)
        cost: dict[str, float] = {}
        for slot in answer.slots:
            if slot.card in prices:
                amount, currency = prices[slot.card]
                cost[currency] = cost.get(currency, 0.0) + amount * slot.gpu_hours
        return Outcome(answer, slots, booking, cost, repeated)


def _text(wish: Wish) -> str:
    return json.dumps(dataclasses.asdict(wish), sort_keys=True)
