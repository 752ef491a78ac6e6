"""Who leaves so that somebody else may start: victims, or a refusal in words. Pure.

Nobody is told unless the whole request then fits. A victim is told once. Which one is decided by
class first, then by the work that would be lost, and the answer does not depend on the order in
which jobs are listed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.scheduling.preemption_terms import (
    Choice,
    Code,
    Pool,
    Request,
    Room,
    Running,
    Terms,
    Victim,
    earliest_notice,
    is_worn_out,
    recent,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# ---------------------------------------------------------------------------------------------
# The choice


def choose(
    request: Request,
    running: Iterable[Running],
    history: Mapping[str, Sequence[float]],
    *,
    terms: Terms,
    room: Room,
    now: float,
) -> Choice:
    """Say who is told to leave for a request.

    Args:
        request: that cannot start now.
        running: every job that holds cards, those that are leaving included.
        history: job id -> when it was preempted before.
        terms: of the policy.
        room: cards and quotas.
        now: Unix time.
    """
    jobs = sorted(running, key=lambda job: job.id)
    mine = [job for job in jobs if job.told is not None and job.told.successor == request.id]
    # A victim past its deadline is not counted on, whatever it may do yet.
    coming = tuple(job for job in mine if job.told is not None and now < job.told.deadline)
    overdue = tuple(job.id for job in mine if job not in coming)
    base = Choice(coming=tuple(job.id for job in coming), overdue=overdue)
    places = _places(request, room)
    if not places:
        largest = max(_largest(request, room), default=0)
        return dataclasses.replace(
            base,
            code=Code.TOO_LARGE,
            words=f"It wants {counted_cards(request.gpus)} of {_kinds(request)}"
            f"{'' if request.spread else ' in one host'}, and there are never more than {largest}.",
        )
    able, later = candidates(request, jobs, history, terms=terms, now=now)
    held = _held_by(request.team, jobs)
    options = [_Option.of(request, place, held, room=room, coming=coming) for place in places]
    answered = _without_new_victims(base, options)
    if answered is not None:
        return answered
    there: dict[Pool, list[Running]] = {}
    for job in able:
        for pool in job.holds:
            there.setdefault(pool, []).append(job)
    found = [
        (cover.cost, option.pools, cover)
        for option in options
        if (cover := _cover(option, option.givers(able, there), terms=terms, now=now)) is not None
    ]
    if found:
        _cost, pools, cover = min(found, key=lambda each: each[:2])
        by_id = {job.id: job for job in able}
        victims = tuple(
            victim_of(by_id[name], request, history, terms=terms, now=now) for name in cover.ids
        )
        return dataclasses.replace(
            base, victims=victims, pools=pools, words=asked_words(request, victims)
        )
    ripe = ripening(later, history, terms=terms, now=now)
    if ways := list(_soon(options, able, ripe)):
        option, again, needed = min(ways, key=lambda each: each[1])
        waiting = passing_refusal(base, needed, again=again, now=now)
        return dataclasses.replace(waiting, pools=option.pools)
    if base.overdue:
        return passing_refusal(base, (), again=None, now=now)
    return _refusal(base, request, options, terms=terms)


def _soon(
    options: Sequence[_Option], able: Sequence[Running], ripe: Sequence[tuple[float, Running]]
) -> Iterator[tuple[_Option, float, list[Running]]]:
    """Ways that time alone will open: from when on, and who may not be told before.

    Where not even all of them together would do, nobody is waited for.
    """
    for option in options:
        cards, quota = option.missing_new, option.over_new
        for job in able:
            gain = option.gain(job)
            cards, quota = cards - gain[0], quota - gain[1]
        needed = []
        for time, job in ripe:
            gain = option.gain(job)
            if not any(gain):
                continue
            needed.append(job)
            cards, quota = cards - gain[0], quota - gain[1]
            if cards <= 0 and quota <= 0:
                yield option, time, needed
                break


def _places(request: Request, room: Room) -> list[tuple[Pool, ...]]:
    """Each way to place the request: the pools that it would use together."""
    fitting = sorted(pool for pool in room.total if pool.kind in request.kinds)
    if request.spread:
        by_kind: dict[str, list[Pool]] = {}
        for pool in fitting:
            by_kind.setdefault(pool.kind, []).append(pool)
        ways = [tuple(pools) for _kind, pools in sorted(by_kind.items())]
    else:
        ways = [(pool,) for pool in fitting]
    return [way for way in ways if sum(room.total[pool] for pool in way) >= request.gpus]


def _largest(request: Request, room: Room) -> list[int]:
    sums: dict[object, int] = {}
    for pool, count in room.total.items():
        if pool.kind in request.kinds:
            key = pool.kind if request.spread else pool
            sums[key] = sums.get(key, 0) + count
    return list(sums.values())


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to place a request.

    Attributes:
        pools: that it would use.
        missing: cards that lack there now.
        over: cards by which its team would be over its quota of this kind.
        missing_new, over_new: the same once those who were told for it have left.
        team: whose quota it is.
    """

    pools: tuple[Pool, ...]
    missing: int
    over: int
    missing_new: int
    over_new: int
    team: str | None

    @classmethod
    def of(
        cls,
        request: Request,
        pools: tuple[Pool, ...],
        held: Mapping[str, int],
        *,
        room: Room,
        coming: Sequence[Running],
    ) -> _Option:
        kind = pools[0].kind
        missing = request.gpus - sum(room.free.get(pool, 0) for pool in pools)
        over = 0
        if request.team is not None and (request.team, kind) in room.quota:
            over = held.get(kind, 0) + request.gpus - room.quota[request.team, kind]
        option = cls(pools, max(0, missing), max(0, over), 0, 0, request.team)
        gains = [option.gain(job) for job in coming]
        return dataclasses.replace(
            option,
            missing_new=max(0, option.missing - sum(cards for cards, _quota in gains)),
            over_new=max(0, option.over - sum(quota for _cards, quota in gains)),
        )

    def givers(
        self, able: Sequence[Running], there: Mapping[Pool, Sequence[Running]]
    ) -> Sequence[Running]:
        """Those of the jobs that could give it anything.

        Args:
            able: that may be told, by id.
            there: pool -> those of them that hold cards in it.
        """
        if self.over_new or len(self.pools) > 1:
            return able
        return there.get(self.pools[0], ())

    def gain(self, job: Running) -> tuple[int, int]:
        """Cards in these pools, and of the team's quota, that a job's leaving gives."""
        cards = sum(job.holds.get(pool, 0) for pool in self.pools)
        if job.team is None or job.team != self.team:
            return cards, 0
        kind = self.pools[0].kind
        return cards, sum(count for pool, count in job.holds.items() if pool.kind == kind)


def _held_by(team: str | None, jobs: Iterable[Running]) -> dict[str, int]:
    """Kind -> cards that a team's jobs hold."""
    held: dict[str, int] = {}
    for job in jobs:
        if team is not None and job.team == team:
            for pool, count in job.holds.items():
                held[pool.kind] = held.get(pool.kind, 0) + count
    return held


def _without_new_victims(base: Choice, options: Sequence[_Option]) -> Choice | None:
    """The answer if the request fits as it is, or once those who were told have left."""
    for option in options:
        if not option.missing and not option.over:
            return dataclasses.replace(
                base, code=Code.FITS, words="It fits as it is.", pools=option.pools
            )
    for option in options:
        if not option.missing_new and not option.over_new:
            return dataclasses.replace(
                base,
                code=Code.COMING,
                words=f"{listed(base.coming)} {'was' if len(base.coming) == 1 else 'were'} told "
                "to leave for it, and nobody else has to.",
                pools=option.pools,
            )
    return None


def candidates(
    request: Request,
    jobs: Iterable[Running],
    history: Mapping[str, Sequence[float]],
    *,
    terms: Terms,
    now: float,
) -> tuple[list[Running], list[Running]]:
    """Jobs that may be told now, and those that may be told later; arguments as of `choose`."""
    able: list[Running] = []
    later: list[Running] = []
    for job in jobs:
        if job.told is not None or job.booked or job.deaf or job.id == request.id:
            continue
        if request.priority is None:
            able.append(job)
            continue
        if not _may_ask(request, request.priority, job, terms):
            continue
        past = history.get(job.id, ())
        if is_worn_out(past, terms, now):
            continue
        ripe = now >= earliest_notice(job, terms, history=past, now=now)
        (able if ripe else later).append(job)
    return able, later


def _may_ask(request: Request, priority: str, job: Running, terms: Terms) -> bool:
    """Whether a job's class, or its borrowed cards, let a request of a priority ask it."""
    if job.priority in terms.preempts.get(priority, frozenset()):
        return True
    lent = request.reclaims and job.borrowed and job.team != request.team
    return lent and terms.value(job.priority) <= terms.value(priority)


_Cost = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Cover:
    """Jobs that give enough together, and what that costs: sums, compared from the left."""

    cost: _Cost
    ids: tuple[str, ...]


def _cover(option: _Option, able: Sequence[Running], *, terms: Terms, now: float) -> _Cover | None:
    """The cheapest jobs whose leaving is enough, or None.

    Cards of a higher class are dearer than any number of a lower one; then work lost counts, then
    the number of jobs that are disturbed, then how long they have run. All of it adds up, so the
    best way to give so many cards is found from the best ways to give fewer.
    """
    wanted = (option.missing_new, option.over_new)
    useful = [(job, gain) for job in able if any(map(_useful, gain := option.gain(job), wanted))]
    # The most that each could give is checked first: most refusals end here.
    if any(sum(gain[part] for _job, gain in useful) < wanted[part] for part in (0, 1)):
        return None
    classes = sorted({terms.value(job.priority) for job, _gain in useful}, reverse=True)
    best: dict[tuple[int, int], _Cover] = {(0, 0): _Cover((), ())}
    keys: dict[tuple[int, int], tuple[_Cost, tuple[str, ...]]] = {}
    for job, gain in useful:
        value = terms.value(job.priority)
        own: _Cost = (
            *(float(job.gpus) if value == each else 0.0 for each in classes[:-1]),
            job.lost_gpu_seconds(now),
            1.0,
            max(0.0, now - job.started),
        )
        for (cards, quota), cover in list(best.items()):
            reached = (min(cards + gain[0], wanted[0]), min(quota + gain[1], wanted[1]))
            if reached == (cards, quota):
                continue
            base = cover.cost or (0.0,) * len(own)
            cost = tuple(map(math.fsum, zip(base, own, strict=True)))
            offer = _Cover(cost, (*cover.ids, job.id))
            key = _key(offer)
            if reached not in keys or key < keys[reached]:
                best[reached], keys[reached] = offer, key
    chosen = best.get(wanted)
    if chosen is None:
        return None
    # Between places the classes must be comparable: said by value, whoever else is there.
    picked = [job for job, _gain in useful if job.id in chosen.ids]
    by_class = [
        float(sum(job.gpus for job in picked if terms.value(job.priority) == each))
        for each in sorted({*terms.values.values(), 0}, reverse=True)
    ]
    return _Cover((*by_class[:-1], *chosen.cost[len(classes) - 1 :]), chosen.ids)


def _useful(gain: int, wanted: int) -> bool:
    return gain > 0 and wanted > 0


def _key(cover: _Cover) -> tuple[_Cost, tuple[str, ...]]:
    # Rounded: sums of the same numbers in another order may differ in their last digit.
    return tuple(round(part, 6) for part in cover.cost), cover.ids


def victim_of(
    job: Running,
    request: Request,
    history: Mapping[str, Sequence[float]],
    *,
    terms: Terms,
    now: float,
) -> Victim:
    """What a chosen job is told; arguments as of `choose`."""
    counted = len(recent(history.get(job.id, ()), terms, now)) + 1
    last = request.priority is not None and counted >= terms.times
    who = (
        f"booking {request.id}"
        if request.priority is None
        else f"job {request.id} of priority {request.priority}"
    )
    words = f"{who[0].upper()}{who[1:]} needs {counted_cards(request.gpus)}"
    if last:
        words += (
            f"; this is the {_ordinal(counted)} time within {durations.render(terms.per)}, so "
            "nobody asks it again for a while"
        )
    return Victim(
        id=job.id,
        cards=job.gpus,
        lost_gpu_seconds=job.lost_gpu_seconds(now),
        at=terms.at,
        last=last,
        deadline=now + terms.deadline,
        words=words,
    )


# ---------------------------------------------------------------------------------------------
# What is told


def _refusal(
    base: Choice,
    request: Request,
    options: Sequence[_Option],
    *,
    terms: Terms,
) -> Choice:
    if all(option.over for option in options):
        option = min(options, key=lambda each: (each.over, each.pools))
        return dataclasses.replace(
            base,
            code=Code.QUOTA,
            words=f"With it team {request.team} would hold {counted_cards(option.over)} of "
            f"{option.pools[0].kind} more than it may at once, and none of its own jobs may be "
            "asked to leave for it.",
        )
    nearest = min(options, key=lambda each: (each.missing_new, each.pools))
    may = sorted(terms.preempts.get(request.priority or "", ()))
    reason = (
        "no job there may be asked to leave for a booking"
        if request.priority is None
        else f"jobs of {listed(may)} cannot give them"
        if may
        else f"priority {request.priority} may ask nobody to leave"
    )
    return dataclasses.replace(
        base,
        code=Code.NO_VICTIM,
        words=f"It lacks {counted_cards(nearest.missing_new)}, and {reason}.",
    )


def ripening(
    later: Sequence[Running],
    history: Mapping[str, Sequence[float]],
    *,
    terms: Terms,
    now: float,
) -> list[tuple[float, Running]]:
    """Jobs that may be told later, with the Unix time from which on they may, the first one first.

    Args:
        later: see `candidates`.
        history: job id -> when it was preempted before.
        terms: of the policy.
        now: Unix time.
    """
    times = [
        (earliest_notice(job, terms, history=history.get(job.id, ()), now=now), job)
        for job in later
    ]
    return sorted(times, key=lambda each: (each[0], each[1].id))


def passing_refusal(
    base: Choice, needed: Sequence[Running], *, again: float | None, now: float
) -> Choice:
    """The refusal that time alone may end: somebody is overdue, or may not be told yet.

    Args:
        base: with whoever was told before.
        needed: who may not be told yet; somebody, unless somebody is overdue.
        again: Unix time from which on enough of them may.
        now: Unix time.
    """
    if base.overdue:
        return dataclasses.replace(
            base,
            code=Code.OVERDUE,
            again=again,
            words=f"{listed(base.overdue)} did not leave in time, and nobody else can make room.",
        )
    left = 1.0 if again is None else max(1.0, math.ceil(again - now))
    return dataclasses.replace(
        base,
        code=Code.NOT_YET,
        again=again,
        words=f"{listed([job.id for job in needed])} may not be asked to leave yet, having just "
        f"begun; enough of them may in {durations.render(left)}.",
    )


def asked_words(request: Request, victims: Sequence[Victim]) -> str:
    """Who must end for whom."""
    return f"{listed([victim.id for victim in victims])} must end for {request.id}."


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, five at most."""
    shown = list(names[:5]) + ([f"{len(names) - 5} more"] if len(names) > 5 else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _kinds(request: Request) -> str:
    return " or ".join(sorted(request.kinds)) or "no kind"


def counted_cards(count: int) -> str:
    """So many cards, in words."""
    return "1 card" if count == 1 else f"{count} cards"


def _ordinal(number: int) -> str:
    if number % 100 in {11, 12, 13}:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


# ---------------------------------------------------------------------------------------------
# Notices that have become useless


def useless_notices(
    requests: Iterable[Request], running: Iterable[Running], *, terms: Terms, room: Room, now: float
) -> tuple[str, ...]:
    """Ids of jobs whose notice is to be withdrawn.

    A notice is useless once its successor is no longer waiting, or fits without this victim. Of
    several, those that would cost most are let off first.

    Args:
        requests: that wait still, and have not been given cards.
        running: every job that holds cards.
        terms: of the policy.
        room: as each request would see it: with the cards free that are kept for it.
        now: Unix time.
    """
    waiting = {request.id: request for request in requests}
    jobs = sorted(running, key=lambda job: job.id)
    useless: list[str] = []
    told: dict[str, list[Running]] = {}
    for job in jobs:
        if job.told is None or job.told.successor is None:
            continue
        if job.told.successor in waiting:
            told.setdefault(job.told.successor, []).append(job)
        else:
            useless.append(job.id)
    for successor, victims in told.items():
        request = waiting[successor]
        kept = list(victims)
        dearest = sorted(
            victims,
            key=lambda job: (terms.value(job.priority), job.lost_gpu_seconds(now), job.id),
            reverse=True,
        )
        for job in dearest:
            rest = [each for each in kept if each is not job]
            if _suffice(request, jobs, rest, room=room):
                kept = rest
                useless.append(job.id)
    return tuple(sorted(useless))


def _suffice(
    request: Request, jobs: Sequence[Running], victims: Sequence[Running], *, room: Room
) -> bool:
    """Whether a request fits once these have left."""
    held = _held_by(request.team, jobs)
    for place in _places(request, room):
        option = _Option.of(request, place, held, room=room, coming=victims)
        if not option.missing_new and not option.over_new:
            return True
    return False
