"""What happens to jobs and cards, event by event; who starts and who leaves is decided elsewhere.

A decider is shown the same scene as the product's own planner, and answers with its plan. Decisions
fall at ticks, as a daemon's do. Every card-second of the fleet ends in exactly one account: useful,
lost, overhead or idle; the last one is counted apart, from the free cards.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.local.scenes import PROMISED_SECONDS, Scene, Waiting, Working
from gpuwarden.scheduling.preemption_terms import Pool, Told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.scheduling.workloads import Job
    from gpuwarden.scheduling.local.scenes import Notice, Plan
    from gpuwarden.scheduling.slots import Slot

TICK: Final = 10.0
START_SECONDS: Final = 90.0
"""From the start of an attempt to its first step: imports, caches, the state to resume."""
SAVE_SECONDS: Final = 10.0
_ROUNDS: Final = 8
"""Decisions at one moment at most: a kill frees cards that the next one gives away."""


class Decider(Protocol):
    """Who starts, and who is asked to leave."""

    def decide(self, scene: Scene, now: float) -> Plan:
        """Answer with a plan for this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """What becomes of jobs that have to leave.

    Attributes:
        polite: they finish their epoch and save, until the notice's deadline; else they are killed.
        state_seconds: an attempt's periodic states; None: at the end of each epoch only.
        knows_bookings: whether the decider is told of them.
        knows_windows: whether jobs keep to theirs; else they may run at any time.
        hard_hours: team -> GPU-hours that it may use; nothing of it starts beyond.
    """

    polite: bool = True
    state_seconds: float | None = 300.0
    knows_bookings: bool = True
    knows_windows: bool = True
    hard_hours: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Accounts:
    """Card-seconds."""

    useful: float = 0.0
    lost: float = 0.0
    overhead: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.useful + self.lost + self.overhead + self.idle


@dataclass(slots=True)
class Attempt:
    """A job on its cards."""

    begun: float
    base: float
    holds: Mapping[Pool, int]
    told: Told | None = None
    cause: Cause = Cause.PRIORITY
    leaves_at: float | None = None
    final: bool = False


@dataclass(slots=True)
class Life:
    """What a job has gone through.

    Attributes:
        job: as it was submitted.
        done: seconds of training that are safe in a state.
        attempt: on its cards, or None.
        number: of attempts so far; events of an older one mean nothing.
        first_start, finished: Unix time, or None.
        left: when it had to leave.
        lost: card-seconds.
    """

    job: Job
    done: float = 0.0
    attempt: Attempt | None = None
    number: int = 0
    first_start: float | None = None
    finished: float | None = None
    left: list[float] = field(default_factory=list)
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stood at a moment: team -> cards held, and teams with jobs that wait."""

    time: float
    held: Mapping[str, int]
    backlogged: frozenset[str]


@dataclass(slots=True)
class World:
    """The fleet and its jobs.

    Attributes:
        decider: who starts and who leaves.
        manners: how they leave.
        total: pool -> cards.
        slots: of bookings.
        end: Unix time; what runs then is accounted up to it.
    """

    decider: Decider
    manners: Manners
    total: Mapping[Pool, int]
    slots: Sequence[Slot]
    begin: float
    end: float
    accounts: Accounts = field(default_factory=Accounts)
    lives: dict[str, Life] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    _free: dict[Pool, int] = field(default_factory=dict)
    _waiting: dict[str, Life] = field(default_factory=dict)
    _working: dict[str, Life] = field(default_factory=dict)
    _events: list[tuple[float, int, str, int, str]] = field(default_factory=list)
    _sequence: int = 0
    _now: float = 0.0
    _used: dict[str, float] = field(default_factory=dict)
    _promised: dict[str, float] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job]) -> None:
        """Let it all happen."""
        self._free, self._now = dict(self.total), self.begin
        for job in jobs:
            self.lives[job.id] = Life(job)
            self._at(job.submitted, "arrives", job.id, 0)
        hour = self.begin
        while hour <= self.end:
            self._at(hour, "sample", "", 0)
            hour += 3600.0
        again: float | None = None
        while self._events:
            moment = self._events[0][0]
            if again is not None and again < moment:
                moment = again
            moment = self.begin + math.ceil((moment - self.begin) / TICK) * TICK
            if moment > self.end:
                break
            self._pass(moment)
            while self._events and self._events[0][0] <= moment:
                self._happen(*self._events[0][2:], at=heapq.heappop(self._events)[0])
            again = self._decide()
        self._pass(self.end)
        for life in list(self._working.values()):
            self._account(life, self.end, saved=True)

    # -- events

    def _at(self, time: float, what: str, job: str, number: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, job, number, what))

    def _pass(self, moment: float) -> None:
        """Let time go by; cards that nobody holds are idle."""
        self.accounts.idle += sum(self._free.values()) * (moment - self._now)
        self._now = moment

    def _happen(self, job: str, number: int, what: str, *, at: float) -> None:
        if what == "sample":
            self._sample()
            return
        life = self.lives[job]
        if what == "arrives":
            self._waiting[job] = life
            return
        attempt = life.attempt
        if attempt is None or number != life.number:
            return
        if what == "ends":
            self._account(life, at, saved=True)
            life.done, life.finished = life.job.work, at
            self._release(life)
        elif what == "epoch over" and attempt.leaves_at is not None and attempt.leaves_at <= at:
            attempt.final = True
            self._at(at + SAVE_SECONDS, "left", job, number)
        elif what == "left" and attempt.final:
            self._account(life, at - SAVE_SECONDS, saved=True)
            self._leave(life)
        elif what == "deadline" and not attempt.final and _is_due(attempt, at):
            self._kill(life)

    def _sample(self) -> None:
        held: dict[str, int] = {}
        for life in self._working.values():
            held[life.job.team] = held.get(life.job.team, 0) + life.job.gpus
        backlogged = frozenset(
            life.job.team for life in self._waiting.values() if life.job.submitted < self._now
        )
        self.samples.append(Sample(self._now, held, backlogged))

    # -- decisions

    def _decide(self) -> float | None:
        for _round in range(_ROUNDS):
            plan = self.decider.decide(self._scene(), self._now)
            for name in plan.withdrawn:
                self._withdraw(name)
            killed = [notice.victim for notice in plan.notices if self._tell(notice)]
            for start in plan.starts:
                self._start(self._waiting.pop(start.id), start.holds)
            if not killed:
                return plan.again
        return None

    def _scene(self) -> Scene:
        spent = {
            team: "Its budget is spent."
            for team, hours in self.manners.hard_hours.items()
            if self._hours(team) >= hours
        }
        return Scene(
            total=self.total,
            free=dict(self._free),
            waiting=[self._as_waiting(life) for life in self._waiting.values()],
            working=[self._as_working(life) for life in self._working.values()],
            slots=self.slots if self.manners.knows_bookings else (),
            history={name: life.left for name, life in self.lives.items() if life.left},
            spent=spent,
            promised=frozenset(
                name for name, at in self._promised.items() if self._now < at + PROMISED_SECONDS
            ),
        )

    def _hours(self, team: str) -> float:
        now = sum(
            (self._now - life.attempt.begun) * life.job.gpus
            for life in self._working.values()
            if life.attempt is not None and life.job.team == team
        )
        return (self._used.get(team, 0.0) + now) / 3600.0

    def _as_waiting(self, life: Life) -> Waiting:
        job = life.job
        seconds = None
        if job.predicted is not None:
            seconds = _still(job.predicted, life.done) + START_SECONDS
        return Waiting(
            id=job.id,
            priority=job.priority,
            team=job.team,
            gpus=job.gpus,
            submitted=job.submitted,
            seconds=seconds,
            window=job.window if self.manners.knows_windows else None,
            ran=life.number > 0,
            user=job.user,
        )

    def _as_working(self, life: Life) -> Working:
        job, attempt = life.job, self._attempt(life)
        trains = attempt.begun + START_SECONDS <= self._now
        state = self._state(life, self._now)
        ends = None
        if job.predicted is not None:
            ends = attempt.begun + START_SECONDS + _still(job.predicted, attempt.base)
        return Working(
            id=job.id,
            priority=job.priority,
            team=job.team,
            holds=attempt.holds,
            since=attempt.begun,
            window=job.window if self.manners.knows_windows else None,
            began=attempt.begun + START_SECONDS if trains else None,
            saved=attempt.begun + START_SECONDS + state - attempt.base
            if state > attempt.base
            else None,
            epoch_seconds=job.epoch,
            ends=ends,
            told=attempt.told,
            cause=attempt.cause,
            final=attempt.final,
            user=job.user,
        )

    # -- jobs

    @staticmethod
    def _attempt(life: Life) -> Attempt:
        if life.attempt is None:
            raise RuntimeError(f"{life.job.id} holds no cards")
        return life.attempt

    def _start(self, life: Life, holds: Mapping[Pool, int]) -> None:
        job = life.job
        if sum(holds.values()) != job.gpus:
            raise RuntimeError(f"{job.id} wants {job.gpus} cards and was given {dict(holds)}")
        for pool, count in holds.items():
            self._free[pool] -= count
            if self._free[pool] < 0:
                raise RuntimeError(f"{job.id} was given cards of {pool} that others hold")
        life.number += 1
        self._promised.pop(job.id, None)
        life.attempt = Attempt(self._now, life.done, dict(holds))
        if life.first_start is None:
            life.first_start = self._now
        self._working[job.id] = life
        end = self._now + START_SECONDS + job.work - life.done
        self._at(end, "ends", job.id, life.number)

    def _tell(self, notice: Notice) -> bool:
        """Give a notice; whether the job was killed for it."""
        life = self._working[notice.victim]
        if not self.manners.polite:
            self._kill(life)
            return True
        attempt = self._attempt(life)
        attempt.told = Told(notice.successor, notice.deadline)
        attempt.cause = notice.cause
        attempt.leaves_at = self._boundary(life, notice)
        self._at(attempt.leaves_at, "epoch over", life.job.id, life.number)
        self._at(notice.deadline, "deadline", life.job.id, life.number)
        return False

    def _boundary(self, life: Life, notice: Notice) -> float:
        """When it stops to train: at the next step, or at the end of its epoch."""
        attempt = self._attempt(life)
        training = attempt.begun + START_SECONDS
        if self._now <= training:
            return training  # the first step of all
        if notice.at == "step":
            return self._now
        done = self._done(life, self._now)
        return self._now + math.ceil(done / life.job.epoch + 1e-9) * life.job.epoch - done

    def _withdraw(self, name: str) -> None:
        attempt = self._attempt(self.lives[name])
        if not attempt.final:
            attempt.told, attempt.leaves_at = None, None

    def _kill(self, life: Life) -> None:
        self._account(life, self._now, saved=False)
        self._leave(life)

    def _leave(self, life: Life) -> None:
        life.left.append(self._now)
        told = self._attempt(life).told
        if told is not None and told.successor in self._waiting:
            self._promised[told.successor] = self._now
        self._release(life)
        self._waiting[life.job.id] = life

    def _release(self, life: Life) -> None:
        attempt = self._attempt(life)
        for pool, count in attempt.holds.items():
            self._free[pool] += count
        job = life.job
        self._used[job.team] = self._used.get(job.team, 0.0) + (
            (self._now - attempt.begun) * job.gpus
        )
        del self._working[job.id]
        life.attempt = None

    def _done(self, life: Life, now: float) -> float:
        """Seconds of training that are done, safe or not."""
        attempt = self._attempt(life)
        trained = max(0.0, now - attempt.begun - START_SECONDS)
        return min(life.job.work, attempt.base + trained)

    def _state(self, life: Life, now: float) -> float:
        """Seconds of training that are safe in the newest state."""
        attempt = self._attempt(life)
        done, every = self._done(life, now), self.manners.state_seconds
        if every is None:
            return max(attempt.base, math.floor(done / life.job.epoch) * life.job.epoch)
        return attempt.base + math.floor((done - attempt.base) / every) * every

    def _account(self, life: Life, until: float, *, saved: bool) -> None:
        """Close the books of an attempt.

        Args:
            life: of its job.
            until: when it stopped to train.
            saved: whether all that was trained is kept.
        """
        attempt, gpus = self._attempt(life), life.job.gpus
        done = self._done(life, until)
        kept = done if saved else self._state(life, until)
        held = self._now - attempt.begun
        self.accounts.useful += (kept - attempt.base) * gpus
        self.accounts.lost += (done - kept) * gpus
        self.accounts.overhead += (held - (done - attempt.base)) * gpus
        life.lost += (done - kept) * gpus
        life.done = kept


def _still(predicted: float, done: float) -> float:
    """Seconds that a job is expected to train still; one that is late, as long again as it is."""
    return abs(predicted - done)


def _is_due(attempt: Attempt, at: float) -> bool:
    # A notice that was withdrawn leaves an event behind, and a later one has its own deadline.
    return attempt.told is not None and attempt.told.deadline <= at


def finished(world: World) -> Iterator[Life]:
    """Jobs that are done, in the order of their ids."""
    return (life for _name, life in sorted(world.lives.items()) if life.finished is not None)
