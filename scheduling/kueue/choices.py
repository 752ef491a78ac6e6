"""Who is asked to leave, for a job that waits or for a booking; and whose notice is useless. Pure.

Jobs that wait are looked at in Kueue's order, each with what those before it will have taken, so
that no card is counted for two. Nobody is asked unless the whole request then fits.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gpuwarden.schedule_api import Cause, Outcome
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.leavings import Phase
from gpuwarden.scheduling.kueue.quotas import Ledger, Use
from gpuwarden.scheduling.kueue.renderings import falls_back, gates_notices
from gpuwarden.scheduling.kueue.silences import choose_askable, unasked
from gpuwarden.scheduling.kueue.views import (
    SETTLE_SECONDS,
    STUCK_SECONDS,
    Act,
    Close,
    Fault,
    Open,
    Tell,
    Verdict,
    Wait,
    is_due,
    is_leaving,
    leaving_of,
    progress_of,
)
from gpuwarden.scheduling.preemption_terms import Code, Pool, Request, Running, Told, terms_of
from gpuwarden.scheduling.preemptions import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpuwarden.scheduling.kueue.leavings import Leaving
    from gpuwarden.scheduling.kueue.views import View
    from gpuwarden.scheduling.kueue.workloads import QueuedJob
    from gpuwarden.scheduling.preemption_terms import Choice, Terms, Victim
    from gpuwarden.scheduling.slots import Slot


def choose_all(view: View) -> Verdict:
    """Notices for bookings and for jobs that wait."""
    terms = terms_of(view.policy)
    if terms is None:
        return _without_notices(view)
    # Bookings were promised first: what they need is nobody's to be asked for by others.
    booked, taken = _for_bookings(view, terms)
    return Verdict.of([booked, _for_jobs(view, terms, taken)])


def starved(view: View) -> list[QueuedJob]:
    """Jobs that have their quota and no card: whoever left for them is stuck (kueue #6489)."""
    stuck = {
        job.leaving.successor
        for job in view.jobs
        if job.leaving is not None
        and job.leaving.phase is Phase.PARKED
        and job.here
        and view.now > job.leaving.patience(job.grace) + STUCK_SECONDS
    }
    return [
        job
        for job in view.jobs
        if job.id in stuck
        and job.reserved is not None
        and not job.finished
        and job.active
        and job.running_since is None
    ]


def can_start(job: QueuedJob, view: View) -> bool:
    """Whether a job that waits for quota would start with it."""
    return not job.barred and job.team not in view.spent


def waiting(view: View) -> list[QueuedJob]:
    """Jobs that wait for quota, in Kueue's order."""
    found = [job for job in view.jobs if job.pending]
    return sorted(found, key=lambda job: (-job.value, job.created, job.id))


def _without_notices(view: View) -> Verdict:
    """Where the policy lets nobody be asked, gates for notices hold nobody up."""
    opened = [_open(job) for job in view.jobs if names.NOTICE_GATE in job.gates]
    return Verdict(tuple(opened))


# -- jobs


def _for_jobs(view: View, terms: Terms, taken: frozenset[str]) -> Verdict:
    return _Round(view, terms, taken).run()


class _Round:
    """One look at all that wait, in order; each sees what those before it will have taken.

    Args:
        view: of the cluster.
        terms: of preemption.
        taken: jobs that leave for bookings.
    """

    def __init__(self, view: View, terms: Terms, taken: frozenset[str]) -> None:
        self._view = view
        self._terms = terms
        self._ledger = view.ledger()
        self._running = [
            _running(job, view, self._ledger)
            for job in view.jobs
            if job.counts and job.id not in taken
        ]
        self._history = {job.id: job.history for job in view.jobs}
        self._by_id = {job.id: job for job in view.jobs}
        self._going = frozenset(
            job.id
            for job in view.jobs
            if job.leaving is None
            and job.goes_by is not None
            and view.now < job.goes_by + STUCK_SECONDS
        )
        self._acts: list[Act] = []
        self._waits: dict[str, Wait] = {}
        self._faults: list[Fault] = []

    def run(self) -> Verdict:
        """Notices, gates that open, and why each waits."""
        for job in starved(self._view):
            # What it has been promised already is what it asks for.
            self._take((), without=frozenset({job.id}))
            self._look(job)
        for job in waiting(self._view):
            self._look(job)
        return Verdict(tuple(self._acts), self._waits, tuple(self._faults))

    def _look(self, job: QueuedJob) -> None:
        if not job.priority or self._ledger.never(job.team, job.cards, job.gpus):
            self._waits[job.id] = _never(job)
            self._acts += [_open(job)] if names.NOTICE_GATE in job.gates else []
            return
        if not can_start(job, self._view):
            # Whoever left for it would leave in vain; why it waits is told by what keeps it.
            return
        if self._goes_by_itself(job):
            return
        if names.NOTICE_GATE in job.gates and not gates_notices(self._view.policy, job.priority):
            # The policy has changed since: nobody ends jobs without us, and it need not wait.
            self._acts.append(_open(job))
        team = self._view.policy.team(job.team)
        if team is None or not team.may_choose(job.priority):
            self._take((job,))
            self._waits[job.id] = _not_theirs(job)
            return
        reclaims = _within_own(self._ledger, job)
        if self._terms.preempts.get(job.priority) or reclaims:
            self._choose(job, reclaims=reclaims)
            return
        # Who may ask nobody waits for what comes free: most of a long queue is decided here.
        if not self._take((job,)):
            words = "Others use the cards that its team may have, and it may ask nobody to leave."
            self._waits[job.id] = Wait(Code.NO_VICTIM.value, words)
        elif names.NOTICE_GATE in job.gates:
            self._acts.append(_open(job))

    def _goes_by_itself(self, job: QueuedJob) -> bool:
        """Whether cards for it come free as it is: jobs that were cancelled are in their grace."""
        going = self._going
        if not going:
            return False
        fits = _fits(self._ledger, job.team, job.cards, job.gpus)
        if fits(frozenset()) or not fits(going):
            return False
        words = f"{listed(sorted(going))} {'is' if len(going) == 1 else 'are'} on the way out."
        self._waits[job.id] = Wait(Code.COMING.value, words, tuple(sorted(going)))
        # What is given to one is not given to the next.
        self._going = frozenset()
        return self._take((job,), without=going)

    def _choose(self, job: QueuedJob, *, reclaims: bool) -> None:
        view = self._view
        request = Request(
            id=job.id,
            gpus=job.gpus,
            kinds=frozenset(job.cards),
            priority=job.priority,
            team=job.team,
            spread=True,
            reclaims=reclaims,
        )
        choice, unheard = choose_askable(
            request,
            self._running,
            self._history,
            terms=self._terms,
            fits=_fits(self._ledger, job.team, job.cards, job.gpus),
            view=view,
            hard=falls_back(view.policy),
        )
        gated = names.NOTICE_GATE in job.gates
        if gated or view.now >= job.created + SETTLE_SECONDS:
            for victim in choice.victims:
                own = self._by_id[victim.id]
                told = unasked(_told(own, view, job.id, victim=victim), view.silence(own))
                self._acts.append(Tell(own, told))
        if gated and _may_open(choice, self._by_id):
            self._acts.append(_open(job))
        overdue = [self._by_id[name] for name in choice.overdue if name in self._by_id]
        self._faults += [_overdue(victim, job) for victim in overdue]
        gone = frozenset((*choice.coming, *(victim.id for victim in choice.victims)))
        if choice.code is not Code.FITS:
            ends = tuple(sorted({*gone, *choice.overdue}))
            code = choice.code.value if choice.code is not None else "preempting"
            self._waits[job.id] = unheard or Wait(code, choice.words, ends)
        if choice.code in (Code.FITS, Code.COMING) or choice.victims:
            self._take((job,), without=gone)

    def _take(self, jobs: Sequence[QueuedJob], *, without: frozenset[str] = frozenset()) -> bool:
        """Count jobs as having their cards, and others as gone; whether they fit."""
        ledger, more = self._ledger, []
        for job in jobs:
            card = ledger.fits(job.team, job.cards, job.gpus, without=without)
            if card is None:
                return False
            more.append(Use(job.id, job.team, card, job.gpus))
        kept = tuple(use for use in ledger.uses if use.id not in without)
        self._ledger = Ledger(ledger.shares, (*kept, *more))
        if without:
            self._running = [each for each in self._running if each.id not in without]
        return True


def _fits(
    ledger: Ledger, team: str, cards: Iterable[str], gpus: int
) -> Callable[[frozenset[str]], bool]:
    kinds = tuple(cards)

    def fits(without: frozenset[str]) -> bool:
        return ledger.fits(team, kinds, gpus, without=without) is not None

    return fits


def _running(job: QueuedJob, view: View, ledger: Ledger) -> Running:
    """A job as the choice sees it."""
    known = progress_of(job, view)
    told = None
    if job.leaving is not None and is_leaving(job):
        own = job.leaving.cause in (Cause.PRIORITY, Cause.BOOKING)
        told = Told(job.leaving.successor if own else None, job.leaving.patience(job.grace))
    card = job.card or next(iter(job.cards), "")
    since = job.running_since
    return Running(
        id=job.id,
        priority=job.priority,
        holds={Pool(card): job.gpus},
        started=view.now if since is None else since,
        saved=known.saved,
        team=job.team,
        epoch_seconds=known.epoch_seconds or job.epoch_seconds,
        told=told,
        booked=_is_booked(job, view),
        borrowed=ledger.borrows(job.team, card),
        deaf=view.silence(job) is not None
        or bool(job.finished)
        or not job.active
        or job.dark
        or job.goes_by is not None,
    )


def _within_own(ledger: Ledger, job: QueuedJob) -> bool:
    """Whether its team stays within its own quota with it."""
    return any(
        (share := ledger.shares.get((job.team, card))) is not None
        and ledger.held(job.team, card) + job.gpus <= share.own
        for card in job.cards
    )


def _is_booked(job: QueuedJob, view: View) -> bool:
    """Whether it runs on cards that its team has booked: the team's oldest jobs do."""
    booked = sum(
        slot.gpus
        for slot in view.in_force(view.now)
        if slot.team == job.team and slot.card == job.card
    )
    if not booked:
        return False
    mine = [
        each for each in view.jobs if each.counts and (each.team, each.card) == (job.team, job.card)
    ]
    mine.sort(key=lambda each: (each.running_since or view.now, each.id))
    before = sum(each.gpus for each in mine[: [each.id for each in mine].index(job.id) + 1])
    return before <= booked


def _told(job: QueuedJob, view: View, successor: str, *, victim: Victim) -> Leaving:
    return leaving_of(
        job,
        view,
        cause=Cause.PRIORITY,
        successor=successor,
        at=victim.at,
        deadline=victim.deadline,
        words=victim.words,
    )


def _may_open(choice: Choice, by_id: dict[str, QueuedJob]) -> bool:
    """Whether a job behind a gate may go.

    It fits; or all that leave for it have had the signal; or somebody is overdue, and Kueue has to
    do the rest.
    """
    if choice.code is Code.FITS or choice.overdue:
        return True
    coming = [by_id[name].leaving for name in choice.coming if name in by_id]
    parked = [each for each in coming if each is not None and each.phase is Phase.PARKED]
    return choice.code is Code.COMING and bool(coming) and len(parked) == len(coming)


def _open(job: QueuedJob) -> Open:
    return Open(job, (names.NOTICE_GATE,))


def _never(job: QueuedJob) -> Wait:
    if not job.priority:
        return Wait(
            "no_priority",
            "It has no priority of the policy: submit it with `gpuwarden submit`, or give it the "
            f"label {names.PRIORITY_LABEL}.",
        )
    kinds = " or ".join(job.cards) or "any kind of cards of the policy"
    return Wait(
        "too_large",
        f"It wants {job.gpus} of {kinds}, and team {job.team} never has as many at once.",
    )


def _not_theirs(job: QueuedJob) -> Wait:
    """Whoever writes a Job can name any priority; only those of its team make others leave."""
    return Wait(
        "priority_not_allowed",
        f"Team {job.team} may not choose the priority {job.priority}: nobody is asked to leave for "
        "it. Submit it anew with one of the team's.",
    )


def _overdue(victim: QueuedJob, job: QueuedJob) -> Fault:
    words = f"{victim.id} was to leave for {job.id} and is still there past its deadline and grace"
    return Fault("victim_overdue", victim.id, words)


# -- bookings


def _for_bookings(view: View, terms: Terms) -> tuple[Verdict, frozenset[str]]:
    """Notices for slots that come, and the jobs that leave for slots."""
    acts: list[Act] = []
    faults: list[Fault] = []
    history = {job.id: job.history for job in view.jobs}
    by_id = {job.id: job for job in view.jobs}
    taken: set[str] = set()
    for slot in sorted(view.slots, key=lambda each: (each.start, each.id)):
        if not slot.start - slot.lead_seconds <= view.now < slot.end:
            continue
        moment = max(view.now, slot.start)
        ledger = view.ledger(moment)
        booked = sum(
            each.gpus
            for each in view.in_force(moment)
            if (each.team, each.card) == (slot.team, slot.card)
        )
        need = booked - ledger.held(slot.team, slot.card)
        if need <= 0:
            continue
        running = [
            _running(job, view, ledger)
            for job in view.jobs
            if job.counts
            and job.id not in taken
            and job.team != slot.team
            and slot.card in (job.card, *job.cards[:1])
        ]
        request = Request(id=slot.id, gpus=need, kinds=frozenset({slot.card}), team=slot.team)
        choice, unheard = choose_askable(
            request,
            running,
            history,
            terms=terms,
            fits=_fits(ledger, slot.team, (slot.card,), need),
            view=view,
            hard=falls_back(view.policy),
        )
        deadline = slot.start if slot.start > view.now else view.now + terms.deadline
        for victim in choice.victims:
            job = by_id[victim.id]
            told = _for_slot(job, view, slot, terms=terms, deadline=deadline)
            acts.append(Tell(job, unasked(told, view.silence(job))))
        taken |= {*choice.coming, *(victim.id for victim in choice.victims)}
        if not choice.victims and choice.code not in (None, Code.FITS, Code.COMING):
            why = choice.words if unheard is None else unheard.words
            words = f"booking {slot.id} of {slot.team} does not get its cards: {why}"
            faults.append(Fault("booking_short", slot.id, words))
    return Verdict(tuple(acts), faults=tuple(faults)), frozenset(taken)


def _for_slot(job: QueuedJob, view: View, slot: Slot, *, terms: Terms, deadline: float) -> Leaving:
    words = f"Team {slot.team} has booked {slot.gpus} of {slot.card} (booking {slot.id})."
    return leaving_of(
        job,
        view,
        cause=Cause.BOOKING,
        successor=slot.id,
        at=terms.at,
        deadline=deadline,
        words=words,
    )


# -- useless notices


def withdraw_useless(view: View) -> Verdict:
    """Notices whose successor waits no more, or fits without them; the dearest is let off first.

    They are looked at before leaves go on: who comes back after the deadline ends nobody for
    somebody who is gone.
    """
    by_id = {job.id: job for job in view.jobs}
    slots = {slot.id for slot in view.slots if view.now < slot.end}
    told = [
        job
        for job in view.jobs
        if job.leaving is not None
        and job.leaving.phase is Phase.TOLD
        and not job.finished
        and job.active
        and not job.evicted
    ]
    acts: list[Act] = []
    asks = terms_of(view.policy) is not None
    wanting = {job.id for job in waiting(view) if can_start(job, view)}
    wanting |= {job.id for job in starved(view)}
    ledger = view.ledger()
    kept: dict[str, list[QueuedJob]] = {}
    for job in sorted(told, key=_dearness, reverse=True):
        leaving = job.leaving
        if leaving is None:
            continue
        if leaving.cause is Cause.BOOKING and leaving.successor not in slots:
            acts.append(_withdrawn(job, leaving, "The booking is gone."))
        if not asks and leaving.cause in (Cause.PRIORITY, Cause.BOOKING):
            acts.append(_withdrawn(job, leaving, "The policy asks nobody to leave any more."))
            continue
        if not is_due(job, leaving, view):
            acts.append(_withdrawn(job, leaving, f"{leaving.successor} lets it go on now."))
        if leaving.cause is not Cause.PRIORITY:
            continue
        successor = by_id.get(leaving.successor)
        if successor is None or successor.id not in wanting:
            acts.append(_withdrawn(job, leaving, f"{leaving.successor} no longer waits for it."))
            continue
        others = kept.setdefault(
            successor.id,
            [
                each
                for each in view.jobs
                if each.leaving is not None
                and is_leaving(each)
                and each.leaving.successor == successor.id
                and view.now < each.leaving.patience(each.grace)
            ],
        )
        rest = frozenset(each.id for each in others if each.id != job.id)
        rest |= {successor.id}
        if ledger.fits(successor.team, successor.cards, successor.gpus, without=rest) is not None:
            kept[successor.id] = [each for each in others if each.id != job.id]
            acts.append(_withdrawn(job, leaving, f"{successor.id} fits without it."))
    return Verdict(tuple(acts))


def _dearness(job: QueuedJob) -> tuple[int, float, str]:
    lost = job.leaving.lost if job.leaving is not None and job.leaving.lost is not None else 0.0
    return job.value, lost, job.id


def _withdrawn(job: QueuedJob, leaving: Leaving, words: str) -> Close:
    ended = dataclasses.replace(leaving, words=words)
    return Close(job, ended, Outcome.WITHDRAWN, withdraw=bool(leaving.request))
