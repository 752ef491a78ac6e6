"""Who starts now, who is asked to leave, and why the others wait: one pure function.

In this order: what bookings need; jobs that run outside their window or past a hard budget; then
every job that waits, the higher class first, in a class the team that has least for its share.
A job that cannot start and has somebody leaving for it keeps the cards that are free already. One
for which nobody leaves lets others pass that are expected to be done before it could start.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.local.claims import Claim, Shadow, is_done_by
from gpuwarden.scheduling.local.gates import gate
from gpuwarden.scheduling.local.placements import add, placed, take
from gpuwarden.scheduling.local.scenes import Notice, Plan, Start, Wait
from gpuwarden.scheduling.local.slot_users import is_bookers, seniority, slot_users
from gpuwarden.scheduling.local.turns import Turns
from gpuwarden.scheduling.preemption_terms import Code, Request, Room, Terms, terms_of
from gpuwarden.scheduling.preemptions import choose, counted_cards, listed, useless_notices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.scheduling.local.scenes import Scene, Waiting
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.preemption_terms import Choice, Pool, Running
    from gpuwarden.scheduling.slots import Slot

DRAIN_SECONDS = 3600.0
"""A job that has waited so long at the front, where nobody knows when others end, is not passed any
more: cards that become free are kept for it. Else small jobs could pass a large one for ever."""
_NOBODY = Terms({}, {}, 0.0, "epoch", 0.0, 0.0, 1, 1.0)
"""Of a policy without preemption: no class may ask another."""
_FINAL = frozenset({"behind", "off_limits", Code.NO_VICTIM, Code.QUOTA, Code.TOO_LARGE})
"""Answers that hold for every later job of the same kind in the same plan."""
_CLAIMING = frozenset({Code.COMING, Code.NOT_YET, Code.OVERDUE})


def plan(scene: Scene, policy: Policy, now: float, *, explain: bool = True) -> Plan:
    """Say what is to be done.

    Args:
        scene: as it is now.
        policy: in force.
        now: Unix time.
        explain: say of every job that waits who would have to end for it. That is half of the work
            where many wait, and changes nothing of what is done: a simulation does without.
    """
    asked = {job.told.successor for job in scene.working if job.told is not None}
    first = scene.promised | {name for name in asked if name is not None}
    return _Planner(scene, policy, now, explain, Turns(policy, first)).run()


@dataclass(slots=True)
class _Planner:
    """One plan in the making; the fields grow while it is made."""

    scene: Scene
    policy: Policy
    now: float
    explain: bool
    turns: Turns
    within: dict[Pool, int] = field(default_factory=dict)
    """Cards that are free, or held by jobs of this queue: all that may ever be given to another."""
    terms: Terms | None = None
    free: dict[Pool, int] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    adopted: dict[str, dict[str, int]] = field(default_factory=dict)
    """Slot -> jobs that use it -> how many cards of it each has."""
    kept: dict[str, dict[Pool, int]] = field(default_factory=dict)
    """Slot -> free cards that are kept for it."""
    begun: dict[str, int] = field(default_factory=dict)
    """Slot -> cards of it that this plan gives to jobs of its team."""
    started: dict[tuple[str, str], int] = field(default_factory=dict)
    """(team, kind) -> cards that this plan gives, or has promised."""
    told: set[str] = field(default_factory=set)
    starts: list[Start] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    withdrawn: set[str] = field(default_factory=set)
    waits: dict[str, Wait] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    overdue: set[str] = field(default_factory=set)
    shadows: list[Shadow] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    firm: dict[object, tuple[str, ...]] = field(default_factory=dict)
    """Answers to who would have to end; long queues ask the same for many jobs."""

    def run(self) -> Plan:
        """Make it."""
        self.terms = terms_of(self.policy)
        self.free = dict(self.scene.free)
        self.turns.read(self.scene.working)
        self.within = dict(self.scene.free)
        for job in self.scene.working:
            add(self.within, job.holds)
        slots = sorted(self.scene.slots, key=lambda slot: (slot.start, slot.id))
        self.adopted = slot_users(self.scene, self.policy, self.now)
        self._read_running()
        self._keep(slots)
        self._close()
        self._serve()
        self._take_back()
        return Plan(
            starts=tuple(self.starts),
            notices=tuple(self.notices),
            withdrawn=tuple(sorted(self.withdrawn)),
            waits=self.waits,
            order=tuple(self.order),
            kept={slot: self._slot_cards(slot) for slot in self.kept},
            used={slot: tuple(sorted(jobs)) for slot, jobs in self.adopted.items()},
            overdue=tuple(sorted(self.overdue)),
            again=min((time for time in self.times if time > self.now), default=None),
        )

    # -- bookings

    def _read_running(self) -> None:
        # One that has only some of its cards from a slot may be asked, as on the others it could.
        cards = {name: count for jobs in self.adopted.values() for name, count in jobs.items()}
        booked = {job.id for job in self.scene.working if cards.get(job.id) == job.gpus}
        borrowed = self._borrowed(booked)
        self.running = [
            job.running(booked=job.id in booked, borrowed=job.id in borrowed)
            for job in self.scene.working
        ]

    def _borrowed(self, booked: set[str]) -> set[str]:
        """Jobs with which their teams hold more than their own: the youngest of them."""
        found: set[str] = set()
        by_rank = seniority(self.policy)
        for (name, kind), held in self.turns.held.items():
            team = self.policy.team(name)
            own = 0 if team is None else team.own(kind)
            jobs = [
                job
                for job in self.scene.working
                if job.team == name and job.cards(kind) and job.id not in booked
            ]
            over = held - own - self._booked_cards(name, kind)
            for job in sorted(jobs, key=by_rank, reverse=True):
                if over <= 0:
                    break
                found.add(job.id)
                over -= job.cards(kind)
        return found

    def _booked_cards(self, team: str, kind: str) -> int:
        return sum(
            sum(self.adopted[slot.id].values())
            for slot in self.scene.slots
            if slot.id in self.adopted and (slot.team, slot.card) == (team, kind)
        )

    def _keep(self, slots: list[Slot]) -> None:
        """Keep cards for slots whose time is near, and ask whoever holds them."""
        for slot in slots:
            self.times += [slot.start - slot.lead_seconds, slot.start, slot.end]
            if not slot.is_kept(self.now):
                continue
            wanted = slot.gpus - sum(self.adopted[slot.id].values())
            request = Request(slot.id, wanted, frozenset({slot.card}), spread=True)
            if wanted and self.terms is not None:
                own = {job.id for job in self.scene.working if is_bookers(slot, job)}
                choice = self._choose(request, self.free, {}, spared=own)
                patience = min(self.terms.deadline, slot.lead_seconds)
                self._tell(choice, Cause.BOOKING, slot.id, max(slot.start, self.now + patience))
                self._spare(request, choice, self.free, {})
            self.kept[slot.id] = take(self.free, slot.card, wanted)

    def _slot_cards(self, slot: str) -> int:
        used = sum(self.adopted[slot].values())
        return used + self.begun.get(slot, 0) + sum(self.kept[slot].values())

    # -- windows and budgets

    def _close(self) -> None:
        """Ask jobs to leave whose window has closed, or whose team's budget is spent."""
        for job in sorted(self.scene.working, key=lambda each: each.id):
            window = None if job.window is None else self.policy.window(job.window)
            closed = (
                window is not None
                and window.running == "leave"
                and not window.is_open(self.policy.timezone, self.now)
            )
            spent = job.team in self.scene.leaving
            if job.told is not None:
                if (job.cause is Cause.WINDOW and not closed) or (
                    job.cause is Cause.BUDGET and not spent
                ):
                    self._withdraw(job.id)
                continue
            if job.deaf or job.id in self.told or self.terms is None:
                continue
            if closed:
                self._ask(job.id, Cause.WINDOW, str(job.window), f"Window {job.window} has closed")
            elif spent:
                words = self.scene.spent.get(job.team, "The team's budget is spent").rstrip(".")
                self._ask(job.id, Cause.BUDGET, job.team, words)

    def _ask(self, victim: str, cause: Cause, successor: str, words: str) -> None:
        if self.terms is None:
            return
        self.told.add(victim)
        deadline = self.now + self.terms.deadline
        self.notices.append(Notice(victim, cause, successor, self.terms.at, deadline, words))

    def _withdraw(self, victim: str) -> None:
        if any(job.id == victim and not job.final for job in self.scene.working):
            self.withdrawn.add(victim)

    # -- jobs that wait

    def _serve(self) -> None:
        groups: dict[tuple[str, str], list[Waiting]] = {}
        for job in sorted(self.scene.waiting, key=lambda each: (each.submitted, each.id)):
            wait = gate(job, self.scene, self.policy, self.now)
            if wait is None:
                groups.setdefault((job.priority, job.team), []).append(job)
            else:
                self.waits[job.id] = wait
                if wait.again is not None:
                    self.times.append(wait.again)
        self._serve_bookers(groups)
        for jobs in groups.values():
            self.turns.line_up(jobs)
        refused: dict[object, Wait] = {}
        while groups:
            key = min(groups, key=lambda each: self.turns.turn(groups[each][-1]))
            job = groups[key].pop()
            if not groups[key]:
                del groups[key]
            # How long it takes decides only whether it may pass others, which `_start` looks at.
            kind = (job.priority, job.team, job.gpus, job.kind, job.spread)
            if self._start(job):
                self.turns.line_up(groups.get(key, []))
                continue
            self.order.append(job.id)
            if kind in refused and not self._has_told(job.id):
                # A job like it was refused a moment ago, and cards have not become more since.
                self.waits[job.id] = refused[kind]
                continue
            self._refuse(job)
            if self.waits[job.id].code in _FINAL:
                refused[kind] = self.waits[job.id]

    def _serve_bookers(self, groups: dict[tuple[str, str], list[Waiting]]) -> None:
        """In a slot whose time has come, jobs of whoever booked it go before its team's others."""
        for slot in sorted(self.scene.slots, key=lambda each: (each.start, each.id)):
            if slot.id not in self.kept or slot.start > self.now:
                continue
            mine = [
                job
                for (_priority, team), jobs in groups.items()
                for job in jobs
                if (team, job.user) == (slot.team, slot.who) and slot.card in self.turns.kinds(job)
            ]
            for job in sorted(mine, key=lambda each: (*self.turns.turn(each), each.id)):
                fits = job.gpus <= sum(self.kept[slot.id].values())
                if fits and self._start(job, slot.card):
                    groups[job.priority, job.team].remove(job)
        for key in [key for key, jobs in groups.items() if not jobs]:
            del groups[key]

    def _has_told(self, successor: str) -> bool:
        return any(
            job.told is not None and job.told.successor == successor for job in self.scene.working
        )

    def _start(self, job: Waiting, only: str | None = None) -> bool:
        """Give a job its cards, of one kind only perhaps, if it may have them."""
        for kind in self.turns.kinds(job) if only is None else [only]:
            view = self._view(job, kind, lent=True)
            room = self._quota(job.team, kind) - self.turns.held.get((job.team, kind), 0)
            if job.gpus > room + self._open_slot_cards(job.team, kind):
                continue
            holds = placed(job, kind, view)
            if holds is None or self._delays_somebody(job, holds):
                continue
            self.starts.append(Start(job.id, holds))
            self._count(job, kind)
            self._use(job, holds)
            return True
        return False

    def _count(self, job: Waiting, kind: str) -> None:
        key = (job.team, kind)
        self.turns.count(job, kind, job.gpus)
        self.started[key] = self.started.get(key, 0) + job.gpus

    def _use(self, job: Waiting, holds: Mapping[Pool, int]) -> None:
        """Take cards that are free: first those that are kept for its own team's slots."""
        for pool, count in holds.items():
            rest = count
            for slot in self.scene.slots:
                mine = self.kept.get(slot.id, {}) if self._is_for(slot, job) else {}
                taken = min(rest, mine.get(pool, 0))
                if taken:
                    mine[pool] -= taken
                    self.begun[slot.id] = self.begun.get(slot.id, 0) + taken
                    rest -= taken
            from_free = min(rest, self.free.get(pool, 0))
            self.free[pool] = self.free.get(pool, 0) - from_free
            rest -= from_free
            # What is left was lent: it is expected to end before whose cards they are needs them.
            lent = [self.kept[slot.id] for slot in self.scene.slots if slot.id in self.kept]
            for theirs in (*lent, *(claim.cards for claim in self.claims)):
                taken = min(rest, theirs.get(pool, 0))
                if taken:
                    theirs[pool] -= taken
                    rest -= taken

    def _quota(self, team: str, kind: str) -> int:
        known = self.policy.team(team)
        return 0 if known is None else known.most(kind) + self._booked_cards(team, kind)

    def _open_slot_cards(self, team: str, kind: str) -> int:
        """Cards that are kept for a team's slots whose time has come: no quota binds there."""
        return sum(
            sum(self.kept[slot.id].values())
            for slot in self.scene.slots
            if slot.id in self.kept
            and (slot.team, slot.card) == (team, kind)
            and slot.start <= self.now
        )

    def _view(self, job: Waiting, kind: str, *, lent: bool = False) -> dict[Pool, int]:
        """Free cards of a kind, as one job may see them; with those that claims lend, perhaps."""
        view = {pool: count for pool, count in self.free.items() if pool.kind == kind}
        for slot in self.scene.slots:
            if slot.card != kind or self.now >= slot.end:
                continue
            before = is_done_by(job, slot.start, self.now)
            if slot.id in self.kept:
                if before and not self._is_for(slot, job):
                    add(view, self.kept[slot.id])
            elif not before and self._is_soon(slot):
                take(view, kind, slot.gpus)
        if lent:
            self._lend(view, job, kind)
        borrowed = (
            self.turns.held.get((job.team, kind), 0) + job.gpus - self.turns.own(job.team, kind)
        )
        borrowed -= self._booked_cards(job.team, kind) + self._open_slot_cards(job.team, kind)
        if borrowed > 0:
            take(view, kind, self._not_lent(job.team, kind))
        # What is booked is not lent.
        for slot in self.scene.slots:
            if slot.card == kind and self._is_for(slot, job) and slot.id in self.kept:
                add(view, self.kept[slot.id])
        return view

    def _lend(self, view: dict[Pool, int], job: Waiting, kind: str) -> None:
        """Add what claims lend a job to what it may see."""
        for claim in self.claims:
            if is_done_by(job, claim.at, self.now):
                add(view, {pool: n for pool, n in claim.cards.items() if pool.kind == kind})

    def _is_for(self, slot: Slot, job: Waiting) -> bool:
        """Whether a job that starts now may have the slot's cards."""
        return slot.admits(job.team, job.user, self.now)

    def _is_soon(self, slot: Slot) -> bool:
        """Whether a job that starts now would be asked to leave before it got anywhere."""
        least = 0.0 if self.terms is None else self.terms.minimum_run
        return slot.start - slot.lead_seconds - self.now < least

    def _not_lent(self, borrower: str, kind: str) -> int:
        """Cards that other teams do not use, and do not lend."""
        return sum(
            max(0, team.own(kind) - team.lends(kind) - self.turns.held.get((team.name, kind), 0))
            for team in self.policy.teams
            if team.name != borrower
        )

    def _delays_somebody(self, job: Waiting, holds: Mapping[Pool, int]) -> bool:
        """Whether a start would put off a job that comes before; those with room beside pass."""
        for shadow in self.shadows:
            here = sum(count for pool, count in holds.items() if pool in shadow.pools)
            if not here or is_done_by(job, shadow.at, self.now):
                continue
            if math.isinf(shadow.at):
                continue
            if here > shadow.extra:
                return True
            shadow.extra -= here
        return False

    # -- jobs that cannot start

    def _refuse(self, job: Waiting) -> None:
        kinds = self.turns.kinds(job)
        view = {pool: count for kind in kinds for pool, count in self._view(job, kind).items()}
        quota = {
            (job.team, kind): self._quota(job.team, kind)
            + self._open_slot_cards(job.team, kind)
            - self.started.get((job.team, kind), 0)
            for kind in kinds
        }
        reclaims = self.terms is not None and all(self.turns.is_own(job, kind) for kind in kinds)
        request = Request(
            job.id, job.gpus, frozenset(kinds), job.priority, job.team, job.spread, reclaims
        )
        reach = self._most(job, self.within)
        if reach < job.gpus <= self._most(job, self.scene.total):
            self._give_up(job, reach)
            return
        choice = self._choose(request, view, quota)
        if self.terms is not None:
            self._tell(choice, Cause.PRIORITY, job.id, self.now + self.terms.deadline)
            self._spare(request, choice, view, quota)
        if choice.again is not None:
            self.times.append(choice.again)
        self._reserve(job, choice, view)
        self.waits[job.id] = self._wait(request, choice, view, quota)

    def _most(self, job: Waiting, cards: Mapping[Pool, int]) -> int:
        """The most cards that a job could have together of these."""
        sums: dict[object, int] = {}
        for pool, count in cards.items():
            if pool.kind in self.turns.kinds(job):
                key = pool.kind if job.spread else pool
                sums[key] = sums.get(key, 0) + count
        return max(sums.values(), default=0)

    def _give_up(self, job: Waiting, reach: int) -> None:
        """Say that no end of a job of this queue would help; nothing is kept for one like this."""
        for each in self.scene.working:
            if each.told is not None and each.told.successor == job.id:
                self._withdraw(each.id)
        host = "" if job.spread or job.gpus == 1 else " of one host"
        words = (
            f"It needs {counted_cards(job.gpus)}{host}, and {reach} of those that there are can be "
            "given to jobs now: the others are off limits, as the queue's problems say."
        )
        self.waits[job.id] = Wait("off_limits", words)

    def _choose(
        self,
        request: Request,
        free: Mapping[Pool, int],
        quota: Mapping[tuple[str, str], int],
        *,
        spared: Iterable[str] = (),
    ) -> Choice:
        terms = self.terms or _NOBODY
        silent = self.told.union(spared)
        # Those that were told a moment ago for another are there, but cannot be told again.
        running = [
            dataclasses.replace(job, deaf=True) if job.id in silent else job for job in self.running
        ]
        room = Room(self.scene.total, free, quota)
        return choose(request, running, self.scene.history, terms=terms, room=room, now=self.now)

    def _tell(self, choice: Choice, cause: Cause, successor: str, deadline: float) -> None:
        self.overdue.update(choice.overdue)
        for victim in choice.victims:
            self.told.add(victim.id)
            self.notices.append(
                Notice(victim.id, cause, successor, victim.at, deadline, victim.words)
            )

    def _spare(
        self,
        request: Request,
        choice: Choice,
        free: Mapping[Pool, int],
        quota: Mapping[tuple[str, str], int],
    ) -> None:
        """Take back notices for a request that it does not need any more."""
        if self.terms is None or choice.victims or choice.overdue:
            return
        room = Room(self.scene.total, free, quota)
        spared = useless_notices([request], self.running, terms=self.terms, room=room, now=self.now)
        for name in set(spared) & set(choice.coming):
            self._withdraw(name)

    def _reserve(self, job: Waiting, choice: Choice, view: Mapping[Pool, int]) -> None:
        """Keep for a job what is free, or let those pass that do not put it off."""
        if choice.code in (Code.TOO_LARGE, Code.QUOTA):
            return
        kinds = self.turns.kinds(job)
        places = choice.pools or tuple(pool for pool in sorted(view) if pool.kind in kinds)
        if not job.spread and len(places) > 1:
            within = [pool for pool in places if self.within.get(pool, 0) >= job.gpus] or places
            places = (max(within, key=lambda pool: (self._within_reach(pool, view), pool)),)
        if choice.victims or choice.code is Code.COMING:
            # It will have its cards: no other request of its team counts on the same quota.
            self._count(job, places[0].kind)
        if choice.victims or choice.code in _CLAIMING:
            # Until somebody may be asked, or ends, the rest cannot be there.
            until = choice.again if choice.code is Code.NOT_YET else None
            at = -math.inf if until is None else min(until, self._fits_at(job, places, view)[0])
            self._claim(job, places, at)
            return
        if any(set(shadow.pools) & set(places) for shadow in self.shadows):
            return
        at, extra = self._fits_at(job, places, view)
        if math.isinf(at) and self.now - job.submitted > DRAIN_SECONDS:
            self._claim(job, places, -math.inf)
        else:
            self.shadows.append(Shadow(job.id, places, at, extra))

    def _within_reach(self, pool: Pool, view: Mapping[Pool, int]) -> int:
        return min(self.scene.total.get(pool, 0), view.get(pool, 0))

    def _claim(self, job: Waiting, places: tuple[Pool, ...], at: float) -> None:
        """Keep free cards for a job, and lend them to whoever is done by a moment."""
        rest, cards = job.gpus, {}
        for pool in places:
            cards[pool] = min(rest, self.free.get(pool, 0))
            self.free[pool] = self.free.get(pool, 0) - cards[pool]
            rest -= cards[pool]
        self.claims.append(Claim(cards, at))

    def _fits_at(
        self, job: Waiting, places: tuple[Pool, ...], view: Mapping[Pool, int]
    ) -> tuple[float, int]:
        """When enough jobs are expected to have ended, and the cards free besides then."""
        cards = sum(view.get(pool, 0) for pool in places)
        if cards >= job.gpus:
            # What it lacks is no card: those that are free are not kept from others.
            return math.inf, cards
        ends = sorted(
            (end, sum(each.holds.get(pool, 0) for pool in places))
            for each in self.scene.working
            if (end := each.expected_end(self.now)) is not None
        )
        for end, count in ends:
            cards += count
            if cards >= job.gpus:
                return end, cards - job.gpus
        return math.inf, 0

    def _wait(
        self,
        request: Request,
        choice: Choice,
        view: Mapping[Pool, int],
        quota: Mapping[tuple[str, str], int],
    ) -> Wait:
        told = tuple(sorted((*(victim.id for victim in choice.victims), *choice.coming)))
        if choice.code is Code.FITS:
            ahead = ", ".join(shadow.job for shadow in self.shadows) or "another job"
            return Wait("behind", f"Cards are free, but {ahead} comes first and needs them.")
        if choice.victims or choice.code is Code.COMING:
            leaving = "is" if len(told) == 1 else "are"
            return Wait("preempting", f"{listed(told)} {leaving} leaving for it.", must_end=told)
        code = str(choice.code)
        must_end = told
        unwilling = (Code.NO_VICTIM, Code.NOT_YET, Code.OVERDUE, Code.QUOTA)
        if self.explain and choice.code in unwilling:
            must_end = self._must_end(request, view, quota) or told
        words = choice.words
        if self.terms is None and choice.code is Code.NO_VICTIM:
            words = f"All cards are in use; it needs {counted_cards(request.gpus)}."
        return Wait(code, words, must_end=must_end, again=choice.again)

    def _must_end(
        self, request: Request, view: Mapping[Pool, int], quota: Mapping[tuple[str, str], int]
    ) -> tuple[str, ...]:
        """Who would have to end, whatever their class: one answer for all requests alike."""
        firm = Request(
            request.id, request.gpus, request.kinds, team=request.team, spread=request.spread
        )
        # Only who is leaving for it already makes a request another than those like it.
        key = (
            firm if self._has_told(request.id) else dataclasses.replace(firm, id=""),
            tuple(sorted(view.items())),
            tuple(sorted(quota.items())),
            frozenset(self.told),
        )
        if key not in self.firm:
            would = self._choose(firm, view, quota)
            self.firm[key] = tuple(victim.id for victim in would.victims)
        return self.firm[key]

    def _take_back(self) -> None:
        """Take back notices whose successor waits no more."""
        waiting = {job.id for job in self.scene.waiting} - {start.id for start in self.starts}
        slots = {slot.id for slot in self.scene.slots if slot.is_kept(self.now)}
        for job in self.scene.working:
            if job.told is None or job.cause not in (Cause.PRIORITY, Cause.BOOKING):
                continue
            successor = job.told.successor
            if successor not in waiting | slots or (
                successor in self.waits and self.waits[successor].held
            ):
                self._withdraw(job.id)
