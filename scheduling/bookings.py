"""Whether cards can be booked, who has them, and when else they are free. Pure.

Every slot of a booking is known when the booking is made, and each is checked at every instant of
its time: against the share of the cards that may be booked, the team's quota, its budgets, and the
limits of the policy. What is wrong is told in one pass, with the nearest times that would do.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.budget_terms import GPU_HOURS, quantity
from gpuwarden.periods import Span, period_of
from gpuwarden.scheduling.moments import show_moment
from gpuwarden.scheduling.recurrences import MAX_SLOTS, Repeat, starts
from gpuwarden.scheduling.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from zoneinfo import ZoneInfo

    from gpuwarden.periods import Period

MAX_PROPOSALS = 3
MAX_CHECKS = 200
"""Slots that are tried for a proposal; beyond that the calendar is too full to advise."""
MAX_SERIES = 30
"""Slots of a series that are looked at for a proposal."""
_WEEK = 7 * 86400.0
MAX_SHOWN = 5
"""Conflicts that a refusal names."""


@dataclass(frozen=True, slots=True)
class BudgetTerms:
    """A budget of a team.

    Attributes:
        per: by the calendar of the policy's zone.
        limit: how much there is of its unit.
        hard: whether a booking beyond it is refused; else it is only told.
        used: of its unit in the period that runs now, or None where nobody can tell.
        unit: GPU-hours, or a currency.
        rates: kind of cards -> what a card-hour costs in this unit; None is 1 for every kind.
    """

    per: Period
    limit: float
    hard: bool
    used: float | None = None
    unit: str = GPU_HOURS
    rates: Mapping[str, float] | None = None

    def of(self, card: str, hours: float) -> float:
        """What hours of a kind of cards take of it."""
        return hours if self.rates is None else hours * self.rates.get(card, 0.0)


@dataclass(frozen=True, slots=True)
class Terms:
    """What bookings are bound by.

    Attributes:
        zone: of the policy.
        lead_seconds: before a slot; whoever must leave is told then.
        longest_seconds: of one slot.
        ahead_seconds: how far ahead a slot may end.
        share: of the cards of a kind that may be booked at any instant.
        cards: kind -> cards.
        quotas: team -> kind -> cards that it may have at a time, borrowed ones included.
        budgets: team -> its budgets.
    """

    zone: ZoneInfo
    lead_seconds: float
    longest_seconds: float
    ahead_seconds: float
    share: float
    cards: Mapping[str, int]
    quotas: Mapping[str, Mapping[str, int]]
    budgets: Mapping[str, tuple[BudgetTerms, ...]]

    def bookable(self, card: str) -> int:
        """Cards of a kind that may be booked at any instant."""
        # 0.29 * 100 is 28.999999999999996: a share is meant, not its representation.
        return math.floor(self.cards.get(card, 0) * self.share + 1e-9)


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants to book.

    Attributes:
        team: of the policy.
        who: the user who asks.
        gpus: cards.
        card: name of their kind.
        start: Unix time of the first slot.
        seconds: of each slot.
        repeat: how it comes again.
        until: Unix time after which no slot begins, or None: as far ahead as may be booked.
    """

    team: str
    who: str
    gpus: int
    card: str
    start: float
    seconds: float
    repeat: Repeat = Repeat.NONE
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a wish cannot be granted.

    Attributes:
        code: a stable word.
        words: one sentence.
    """

    code: str
    words: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a wish.

    Attributes:
        slots: what would be, or is, booked; without ids.
        objections: why it cannot be; empty where it can.
        warnings: what its owner should know all the same.
        proposals: nearest starts at which it would do, by distance; only for what is in the way.
    """

    slots: tuple[Slot, ...]
    objections: tuple[Objection, ...] = ()
    warnings: tuple[str, ...] = ()
    proposals: tuple[float, ...] = ()

    @property
    def gpu_hours(self) -> float:
        """What all its slots cost."""
        return sum(slot.gpu_hours for slot in self.slots)


def consider(
    wish: Wish, taken: Iterable[Slot], terms: Terms, *, now: float, advise: bool = True
) -> Answer:
    """Say whether cards can be booked.

    Args:
        wish: what is wanted.
        taken: every slot that is booked or active, in any order.
        terms: what bookings are bound by.
        now: Unix time.
        advise: whether to look for other times.

    Returns:
        The slots, and every objection to them.
    """
    taken = sorted((slot for slot in taken if slot.end > now), key=_order)
    objections = list(_malformed(wish, terms))
    if objections:
        return Answer((), tuple(objections))
    slots = _slots(wish, terms, now)
    objections += _limits(wish, slots, terms, now)
    # Whoever only asks whether it would do needs no second reason against it.
    blocked = list(itertools.islice(_conflicts(wish, slots, taken, terms), None if advise else 1))
    objections += blocked
    over, warnings = _over_budget(slots, taken, terms, now)
    objections += over
    proposals: tuple[float, ...] = ()
    if blocked and advise and len(blocked) == len(objections):
        proposals = _proposals(wish, slots, taken, terms, now)
    return Answer(slots, tuple(objections), tuple(warnings), proposals)


def lengthened(
    slot: Slot, end: float, taken: Iterable[Slot], terms: Terms, *, now: float
) -> Answer:
    """Say whether a slot may last until another moment.

    Args:
        slot: as it is booked.
        end: Unix time of its new end.
        taken: every slot that is booked or active; `slot` itself counts for nothing.
        terms: what bookings are bound by.
        now: Unix time.
    """
    others = sorted((each for each in taken if each.id != slot.id and each.end > now), key=_order)
    longer = replace(slot, end=end)
    if end <= max(slot.start, now):
        return Answer((), (Objection("empty", "the slot would end before it begins, or now"),))
    wish = Wish(slot.team, slot.who, slot.gpus, slot.card, slot.start, end - slot.start)
    objections = list(_malformed(wish, terms))
    if end > now + terms.ahead_seconds:
        objections.append(_too_far(terms, now))
    if now < slot.start:
        objections += _too_short(wish.seconds, terms)
    if objections:
        # Nothing is counted for thousands of years of days.
        return Answer((longer,), tuple(objections))
    objections += _conflicts(wish, (longer,), others, terms)
    objections += _over_budget((longer,), others, terms, now)[0]
    return Answer((longer,), tuple(objections))


def peak(slots: Iterable[Slot], begin: float, end: float) -> int:
    """Most cards that slots hold at any instant of [begin, end)."""
    changes: dict[float, int] = {}
    for slot in slots:
        if slot.start < end and slot.end > begin:
            changes[max(slot.start, begin)] = changes.get(max(slot.start, begin), 0) + slot.gpus
            changes[slot.end] = changes.get(slot.end, 0) - slot.gpus
    held = most = 0
    for at in sorted(changes):
        held += changes[at]
        if at < end:
            most = max(most, held)
    return most


# -- parts


def _order(slot: Slot) -> tuple[float, float, str]:
    return (slot.start, slot.end, slot.id)


def _slots(wish: Wish, terms: Terms, now: float) -> tuple[Slot, ...]:
    last = now + terms.ahead_seconds - wish.seconds
    until = last if wish.until is None else wish.until
    return tuple(
        Slot("", wish.team, wish.who, wish.gpus, wish.card, at, at + wish.seconds,
             terms.lead_seconds)
        for at in starts(wish.start, wish.repeat, until=until, zone=terms.zone)
    )  # fmt: skip


def _malformed(wish: Wish, terms: Terms) -> Iterator[Objection]:
    """What makes no sense, whatever else is booked."""
    if wish.card not in terms.cards:
        known = ", ".join(terms.cards)
        yield Objection("card", f"no cards called {wish.card}: there are {known}")
    if wish.team not in terms.quotas:
        yield Objection("team", f"there is no team {wish.team} in the policy")
    if wish.gpus < 1:
        yield Objection("gpus", "at least one card is booked")
    if wish.seconds <= 0:
        yield Objection("empty", "the slot would end before it begins")
    elif wish.seconds > terms.longest_seconds:
        longest = durations.render(terms.longest_seconds)
        yield Objection("longest", f"a slot is at most {longest} long (bookings.longest)")


def _limits(wish: Wish, slots: Sequence[Slot], terms: Terms, now: float) -> Iterator[Objection]:
    if wish.start < now + terms.lead_seconds:
        earliest = show_moment(math.ceil((now + terms.lead_seconds) / 60) * 60, terms.zone)
        lead = durations.render(terms.lead_seconds)
        yield Objection(
            "lead_time",
            f"the first slot begins too soon: whoever must leave is told {lead} before "
            f"(bookings.lead_time); the earliest start is {earliest}",
        )
    yield from _too_short(wish.seconds, terms)
    if not slots:
        yield Objection("until", "no slot begins before the last day of the booking")
    elif slots[-1].end > now + terms.ahead_seconds:
        yield _too_far(terms, now)
    if len(slots) == MAX_SLOTS and wish.repeat is not Repeat.NONE:
        yield Objection("slots", f"one booking has at most {MAX_SLOTS} slots: give an earlier end")
    if any(b.start < a.end for a, b in itertools.pairwise(slots)):
        yield Objection("overlap", "its slots overlap: each begins before the last one has ended")


def _too_short(seconds: float, terms: Terms) -> Iterator[Objection]:
    # Its cards are kept, and others leave, from lead time on: a minute would cost them a quarter of
    # an hour, and whoever books a minute often enough has the cards and pays for none.
    if seconds < terms.lead_seconds:
        lead = durations.render(terms.lead_seconds)
        yield Objection(
            "shortest",
            f"a slot is at least {lead} long, as cards are kept for it from {lead} before its "
            "start on (bookings.lead_time)",
        )


def _too_far(terms: Terms, now: float) -> Objection:
    last = show_moment(now + terms.ahead_seconds, terms.zone)
    ahead = durations.render(terms.ahead_seconds)
    return Objection(
        "ahead", f"slots end within {ahead} from now (bookings.ahead), that is until {last}"
    )


def _conflicts(
    wish: Wish, slots: Sequence[Slot], taken: Sequence[Slot], terms: Terms
) -> Iterator[Objection]:
    limit = terms.bookable(wish.card)
    if wish.gpus > limit:
        count = terms.cards[wish.card]
        yield Objection(
            "share",
            f"at most {limit} of {count} {wish.card} can be booked (bookings.at_most_share)",
        )
        return
    quota = terms.quotas[wish.team].get(wish.card, 0)
    if wish.gpus > quota:
        yield Objection(
            "quota", f"{wish.team} may have {quota} {wish.card} at a time, borrowed ones included"
        )
        return
    same = [each for each in taken if each.card == wish.card]
    own = [each for each in same if each.team == wish.team]
    told = 0
    for slot in slots:
        near = _near(same, slot)
        if peak(near, slot.start, slot.end) + slot.gpus > limit:
            told += 1
            if told <= MAX_SHOWN:
                yield _conflict(slot, near, limit, terms)
        elif peak(_near(own, slot), slot.start, slot.end) + slot.gpus > quota:
            told += 1
            if told <= MAX_SHOWN:
                yield Objection(
                    "quota",
                    f"{show_moment(slot.start, terms.zone)}: with what {wish.team} has booked "
                    f"then it would have more than its {quota} {wish.card}",
                )
    if told > MAX_SHOWN:
        yield Objection("conflict", f"and {told - MAX_SHOWN} more of its slots")


def _near(taken: Sequence[Slot], slot: Slot) -> list[Slot]:
    return [each for each in taken if each.start < slot.end and each.end > slot.start]


def _conflict(slot: Slot, near: Sequence[Slot], limit: int, terms: Terms) -> Objection:
    whose = "; ".join(
        f"{each.team} ({each.who}) has {each.gpus} from {show_moment(each.start, terms.zone)} to "
        f"{show_moment(each.end, terms.zone)} [{each.id}]"
        for each in near[:MAX_SHOWN]
    )
    more = f"; and {len(near) - MAX_SHOWN} more" if len(near) > MAX_SHOWN else ""
    return Objection(
        "conflict",
        f"{show_moment(slot.start, terms.zone)}: of {limit} {slot.card} that can be booked, "
        f"{limit - peak(near, slot.start, slot.end)} are free throughout: {whose}{more}",
    )


def _over_budget(
    slots: Sequence[Slot], taken: Sequence[Slot], terms: Terms, now: float
) -> tuple[list[Objection], list[str]]:
    """Budgets that the slots would break: hard ones are objections, soft ones are told."""
    objections: list[Objection] = []
    warnings: list[str] = []
    if not slots:
        return objections, warnings
    team = slots[0].team
    own = [slot for slot in taken if slot.team == team]
    for budget in terms.budgets.get(team, ()):
        current = period_of(budget.per, terms.zone.key, now)
        for span in _periods(slots, budget.per, terms.zone.key):
            wanted = sum(budget.of(slot.card, _hours_in(slot, span, now)) for slot in slots)
            booked = sum(budget.of(slot.card, _hours_in(slot, span, now)) for slot in own)
            used = (budget.used or 0.0) if span == current else 0.0
            if wanted + booked + used <= budget.limit + 1e-6:
                continue
            text = (
                f"in the {budget.per} from {show_moment(span.begin, terms.zone)} {team} has "
                f"{quantity(budget.limit, budget.unit)}: {used:.1f} are used, {booked:.1f} booked, "
                f"and this would be {wanted:.1f} more"
            )
            if budget.hard:
                objections.append(Objection("budget", text))
            else:
                warnings.append(f"{text} (a soft budget)")
            break
        if budget.used is None and budget.hard:
            warnings.append(f"what {team} has used of its budget per {budget.per} is not known")
    return objections, warnings


def _periods(slots: Sequence[Slot], per: Period, zone: str) -> list[Span]:
    found: dict[Span, None] = {}
    for slot in slots:
        at = slot.start
        while at < slot.end:
            span = period_of(per, zone, at)
            found[span] = None
            at = span.end
    return list(found)


def _hours_in(slot: Slot, span: Span, now: float) -> float:
    """GPU-hours of a slot in a period that are still to come; what is past is in `used`."""
    seconds = min(slot.end, span.end) - max(slot.start, span.begin, now)
    return slot.gpus * max(0.0, seconds) / 3600.0


def _proposals(
    wish: Wish, slots: Sequence[Slot], taken: Sequence[Slot], terms: Terms, now: float
) -> tuple[float, ...]:
    """Starts at which the whole wish would do, the nearest first."""
    earliest = math.ceil((now + terms.lead_seconds) / 60) * 60.0
    same = [slot for slot in taken if slot.card == wish.card]
    shifts = {earliest - wish.start}
    # Where one is in the way of a later slot, the whole series moves by as much.
    for slot in slots[:MAX_SERIES]:
        for each in same:
            if wish.repeat is Repeat.NONE or abs(each.start - slot.start) < _WEEK:
                shifts |= {each.end - slot.start, each.start - slot.end}
    # By whole minutes, as people type them: later ones later, earlier ones earlier.
    whole = {_whole_minute(wish.start + by, later=by > 0) for by in shifts}
    near = sorted((at for at in whole if at >= earliest), key=lambda at: (abs(at - wish.start), at))
    found: list[float] = []
    for at in near[: max(MAX_PROPOSALS, MAX_CHECKS // max(1, len(slots)))]:
        moved = replace(wish, start=at)
        if not consider(moved, taken, terms, now=now, advise=False).objections:
            found.append(at)
        if len(found) == MAX_PROPOSALS:
            break
    return tuple(found)


def _whole_minute(at: float, *, later: bool) -> float:
    return (math.ceil(at / 60) if later else math.floor(at / 60)) * 60.0
