"""One tick of the daemon: what the engine is told, what it tells, and what is remembered of it.

Everything here runs in the one thread from which drivers are called. What others may see is the
document, which is replaced as a whole at the end of a tick.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import GpuwardenError, TemporaryError
from gpuwarden.schedule_api import Card, Problem, ScheduleDocument
from gpuwarden.scheduling.attempt_names import AttemptNames
from gpuwarden.scheduling.documents import (
    HORIZON_SECONDS,
    MANY_DAYS,
    booking_entry,
    budget_uses,
    no_shows,
)
from gpuwarden.scheduling.drivers import Described, Remarking, SlotsRefused
from gpuwarden.scheduling.excesses import excesses
from gpuwarden.scheduling.foresight_stores import ForesightStore
from gpuwarden.scheduling.foresights import Foresight
from gpuwarden.scheduling.graces import short_deadline
from gpuwarden.scheduling.sqlite_files import StateUnwritable
from gpuwarden.scheduling.usages import each_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.clock import Clock
    from gpuwarden.scheduling.documents import BudgetUse
    from gpuwarden.scheduling.drivers import Driver
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot, SlotUse
    from gpuwarden.scheduling.stores import Store

ACCOUNT_SECONDS = 60.0
"""How often the engine's account is read."""
OVERLAP_SECONDS = 3600.0
"""By which two readings of the account overlap: records come late."""
SHOWN_SECONDS = 7 * 86400.0
"""How long what is over is shown."""

KEPT_SECONDS = 800 * 86400.0
"""How long accounts and predictions are kept: this year and the last; looked at with each start."""

log = structlog.get_logger(__name__)


class Scheduler:
    """The state of the daemon.

    Args:
        policy: to go by.
        driver: of the engine, not yet started.
        store: what is remembered.
        clock: time.
    """

    def __init__(self, policy: Policy, driver: Driver, store: Store, clock: Clock) -> None:
        self.policy = policy
        self.driver = driver
        self.store = store
        self.foresights = ForesightStore(store)
        self.attempts = AttemptNames(store)
        self.clock = clock
        self.outcomes: Counter[str] = Counter()
        self.tick_seconds = 0.0
        self.ticked: float | None = None
        self.budgets: tuple[BudgetUse, ...] = budget_uses(policy, None, now=clock.wall())
        self.uses: Mapping[str, SlotUse] = {}
        self.reload_problem: str | None = None
        self._foresight = Foresight(self.foresights, store)
        self._held: dict[str, list[Holding]] = {}
        self.remarks: Mapping[str, str] = {}
        self._refused: Mapping[str, str] = {}
        self._since: dict[str, float] = {}
        self._wrong: list[tuple[str, str]] = []
        self._started = False
        self._epochs: tuple[float, ...] = ()
        self._accounted: float | None = None
        self.document = ScheduleDocument(
            engine=driver.engine,
            cluster=driver.cluster,
            taken=0.0,
            timezone=policy.timezone,
            cards=_cards(policy),
        )

    @property
    def accounted(self) -> float | None:
        """When the engine's account was last read, Unix time; None: not since the start."""
        return self._accounted

    @property
    def seen(self) -> float | None:
        """When the engine was last seen, Unix time; None: not yet."""
        return self.document.taken or None

    def tick(self) -> None:
        """Have one tick; what goes wrong in it is told, and ends nothing."""
        began, now = time.monotonic(), self.clock.wall()
        self._wrong = []
        try:
            self._tick(now)
            outcome = "completed"
        except StateUnwritable as error:
            outcome = "failed"
            self._wrong = []  # what could not be told or read besides is the same trouble
            self._tell("state_unwritable", f"{error}: nothing new is started until it can be")
        except TemporaryError as error:
            outcome = "unseen"
            self._wrong = []  # likewise
            self._tell("engine_unseen", f"{self.driver.engine} cannot be seen: {error}. Jobs go on")
        except GpuwardenError as error:
            outcome = "failed"
            self._tell("engine_refuses", f"{self.driver.engine}: {error}")
        except Exception as error:
            # Whatever it is, the next tick may go well; jobs and bookings are worth the try.
            outcome = "failed"
            log.exception("tick failed")
            self._tell("tick_failed", f"a fault of gpuwarden's own: {error!r}; see the log")
        self.outcomes[outcome] += 1
        self.ticked, self.tick_seconds = now, time.monotonic() - began
        if self.reload_problem is not None:
            self._tell("policy_invalid", self.reload_problem)
        for name, why in self._refused.items():
            self._tell("slot_refused", f"{name}: {why}")
        self._publish(now)

    def _tell(self, code: str, words: str) -> None:
        self._wrong.append((code, words))

    def adopt(self, policy: Policy) -> None:
        """Go by another policy, all of it or, where the engine cannot, the old one.

        Raises:
            GpuwardenError: it cannot be followed.
        """
        if policy.engine != self.policy.engine:
            raise GpuwardenError(
                f"the policy is for {policy.engine} now, and this daemon drives "
                f"{self.policy.engine}: restart it"
            )
        self.driver.adopt(policy)
        self.policy = policy
        self._accounted = None

    def book(self, now: float) -> Mapping[str, str]:
        """Tell the engine of the slots.

        Returns:
            Slot -> why the engine refuses it.

        Raises:
            TemporaryError: it cannot be seen.
        """
        slots = [
            slot
            for slot in self.store.standing(now)
            if slot.start - slot.lead_seconds <= now + HORIZON_SECONDS
        ]
        self._refused = _orphaned(slots, self.policy)
        try:
            self.driver.book([slot for slot in slots if slot.id not in self._refused], now)
        except SlotsRefused as error:
            self._refused = {**self._refused, **error.refusals}
        if isinstance(self.driver, Remarking):
            self.remarks = self.driver.remarks()
        self.store.enter((slot.id for slot in slots if slot.id not in self._refused), now=now)
        return self._refused

    def _tick(self, now: float) -> None:
        self.uses = {}
        if not self._started:
            self.driver.start(now)
            self._started = True
        try:
            self.book(now)
        except GpuwardenError as error:
            # Who may not make reservations can have a queue all the same.
            self._tell("bookings_untold", f"{self.driver.engine} was not told of slots: {error}")
        self.driver.tick(now)
        self.uses = {use.slot: use for use in self.driver.slot_uses()}
        self.store.note_use(self.uses.values(), now=now)
        self._release(now)
        self.store.keep_preemptions(self.driver.preemptions(), now=now)
        entries = tuple(self.driver.entries())
        self.foresights.keep_entries(entries)
        self.attempts.keep(entries, now=now)
        for words in excesses(entries, self.store.standing(now), self.policy, now):
            self._tell("quota_exceeded", words)
        try:
            self._account(now)
        except GpuwardenError as error:
            # An account that does not answer hides no queue.
            self._tell("account_unseen", f"who held what cannot be read: {error}")
        short = short_deadline(self.policy, self._epochs)
        if short is not None:
            self._tell("deadline_short", short)
        trainings = self.driver.trainings() if isinstance(self.driver, Described) else {}
        entries = self._foresight.look(entries, trainings, self._held, now=now)
        self.document = replace(self.document, entries=entries, taken=now)

    def _release(self, now: float) -> None:
        if self.policy.bookings is None:
            return
        gone = no_shows(
            self.store.slots_between(now, now + 1.0),
            self.uses,
            after=self.policy.bookings.no_show_after,
            now=now,
        )
        if gone:
            log.info("slots released: nobody came", slots=gone)
            self.store.release(gone, by="no-show", now=now)
            self.book(now)

    def _account(self, now: float) -> None:
        # A clock that was put back must not keep budgets as they were until it has caught up.
        if self._accounted is not None and 0 <= now - self._accounted < ACCOUNT_SECONDS:
            return
        since = now - MANY_DAYS
        newest = self.store.newest_holding()
        if newest is not None:
            # It was written by a clock that may have been ahead.
            newest = min(newest, now)
            running = self.store.oldest_running()
            since = max(since, min(newest - OVERLAP_SECONDS, now if running is None else running))
        told = each_once(self.driver.usage(since, now))
        if self._accounted is None and newest is not None:
            # By the last time that was seen: a clock that is years ahead must not drop everything.
            self.store.forget(newest - KEPT_SECONDS)
        self.store.keep_holdings(told, since=since, now=now)
        self._accounted = now
        self._epochs = self.foresights.epoch_seconds()
        holdings = self.store.holdings(self.driver.engine, now - MANY_DAYS, now)
        self.budgets = budget_uses(self.policy, holdings, now=now)
        self._held = {}
        for item in holdings:
            self._held.setdefault(item.entry, []).append(item)

    def _publish(self, now: float) -> None:
        """Replace the document: also where the engine was not seen, what is ours is current."""
        own = self._wrong
        problems = [Problem(code, words, self._begun(code, now)) for code, words in own]
        self._since = {code: at for code, at in self._since.items() if code in dict(own)}
        ahead = 0.0 if self.policy.bookings is None else self.policy.bookings.ahead
        booked = self.store.slots_between(now - SHOWN_SECONDS, now + ahead + SHOWN_SECONDS)
        self.document = replace(
            self.document,
            preemptions=self.store.preemptions(now - SHOWN_SECONDS, now=now),
            bookings=tuple(
                booking_entry(
                    item, self.uses.get(item.slot.id), now, remark=self.remarks.get(item.slot.id)
                )
                for item in booked
            ),
            budgets=tuple(entry for use in self.budgets if (entry := use.entry()) is not None),
            problems=(*problems, *self.driver.problems()),
            cards=_cards(self.policy),
            timezone=self.policy.timezone,
            cluster=self.driver.cluster,
        )

    def _begun(self, code: str, now: float) -> float:
        return self._since.setdefault(code, now)


def _orphaned(slots: Sequence[Slot], policy: Policy) -> dict[str, str]:
    """Slots that a policy which was changed leaves nobody for, and why: nothing is kept for them.

    Else jobs would be asked to leave for cards that nobody may use.
    """
    found = {}
    for slot in slots:
        lacks = ""
        if policy.team(slot.team) is None:
            lacks = f"team {slot.team}"
        elif policy.card(slot.card) is None:
            lacks = f"kind of cards {slot.card}"
        if lacks:
            found[slot.id] = (
                f"there is no {lacks} in the policy any more, and nothing is kept for it: put it "
                f"back, or give the slot back (gpuwarden book cancel {slot.id})"
            )
    return found


def _cards(policy: Policy) -> tuple[Card, ...]:
    return tuple(Card(card.name, card.count) for card in policy.cards)
