"""What became of jobs that Slurm asked to leave, step by step: seen, never made up.

Slurm says when it chose a job (PreemptTime), when jobs start and, by its accounting, when an
attempt ended; the trainer's own status says when it took note and when its state was on disk.
Without accounting `left` is the look that first saw the job without its nodes, or the successor's
start if that was earlier. What Slurm never tells, such as whether a card's memory is free, is no
step here.

Slurm names no successor. It is taken to be the first job that started on the victim's nodes once
the victim had left, and whose priority preempts the victim's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from gpuwarden import job_files
from gpuwarden.schedule_api import STEPS, Cause, Outcome, Preemption
from gpuwarden.scheduling.slurm.configs import KILL_WAIT_SECONDS, preemptible
from gpuwarden.scheduling.slurm.meanings import priority_of
from gpuwarden.scheduling.slurm.scripts import read_comment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpuwarden.job_files import RunStatus
    from gpuwarden.platforms.slurm_accounting import Attempt
    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.scheduling.policies import Policy

KEPT_SECONDS: Final = 86_400.0
"""How long one that is over is told of."""
SUCCESSOR_SECONDS: Final = 600.0
"""A job that starts later on the same nodes did not wait for these cards."""
_MOST_KEPT = 10_000
_LEFT = (job_files.EXIT_REQUEUE, job_files.EXIT_HOLD)
_WITHIN_SECOND = 0.999
"""Slurm's times are whole seconds: what happened is up to so much later."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What a trainer says of its end, in Unix times; None of what it has not said.

    Attributes:
        acknowledged: it took note of the notice.
        saved: the state with which it leaves is on disk.
        durable: its newest state on disk is of then, whether or not it leaves.
        on_disk: that state was known to be there.
        heard: it last got on; until then it has said all that there was to say.
        status: with which it left, or says that it is about to.
    """

    acknowledged: float | None = None
    saved: float | None = None
    durable: float | None = None
    on_disk: float | None = None
    heard: float | None = None
    status: int | None = None


class SignsOf(Protocol):
    """Where a trainer's signs come from."""

    def __call__(self, job: ListedJob, run_id: str | None, /) -> Signs | None:
        """The signs of an attempt, by what its job says is its run; None where nobody knows."""


def signs_in(root: Path) -> SignsOf:
    """Signs by the job files of this host, for a Slurm whose only node it is.

    Args:
        root: of the job files.
    """

    def read(job: ListedJob, run_id: str | None) -> Signs | None:
        if run_id is None:
            return None
        since = job.job.start_time or 0.0
        try:
            found = job_files.read(job_files.status_path(root, run_id))
            # The folder is everybody's: another user's word about a job is none.
            if found.uid != job.job.user_id:
                return None
            return signs_of(job_files.RunStatus.decode(found.content), since)
        except (OSError, job_files.JobFileError):
            return None

    return read


def signs_of(status: RunStatus, since: float) -> Signs | None:
    """What a trainer's status says of the end of an attempt that started at `since`.

    Returns:
        None where the status is of an earlier attempt.
    """
    if status.heartbeat < math.floor(since):
        return None
    noticed = None if status.notice is None else status.notice.time
    durable = None if status.checkpoint is None else status.checkpoint.durable
    taken = None if status.checkpoint is None else status.checkpoint.time
    # A periodic state after the notice is not yet the last word: the epoch goes on.
    left = status.exit is not None and status.exit.code in _LEFT
    after = noticed is not None and taken is not None and taken >= noticed
    saved = durable if left and after else None
    return Signs(
        noticed,
        saved,
        None if durable is None else taken,
        durable,
        heard=status.heartbeat,
        status=None if status.exit is None else status.exit.code,
    )


def first_of(*sources: SignsOf) -> SignsOf:
    """The signs of the first source that has any."""

    def ask(job: ListedJob, run_id: str | None) -> Signs | None:
        return next(filter(None, (source(job, run_id) for source in sources)), None)

    return ask


@dataclass(slots=True)
class _Victim:
    """One attempt that has to leave, or had to."""

    told: Preemption
    job_id: int
    start: float
    nodes: frozenset[str]
    gpus: int
    priority: str
    durable: float | None = None
    seen: float = 0.0
    """When it was last seen with its nodes."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt that was seen with its nodes, as of the last look."""

    job: ListedJob
    run_id: str | None
    seen: float


class Receipts:
    """Follows a queue, look after look.

    Args:
        policy: by whose words jobs are told of.
        signs: what trainers say; nothing where nobody can tell.
    """

    def __init__(self, policy: Policy, signs: SignsOf | None = None) -> None:
        self._policy = policy
        self._signs = signs
        self._attempts: dict[int, _Attempt] = {}
        self._open: dict[tuple[int, float], _Victim] = {}
        self._over: dict[tuple[int, float], _Victim] = {}

    def adopt(self, policy: Policy) -> None:
        """Go by another policy from the next look on."""
        self._policy = policy

    def preemptions(self) -> tuple[Preemption, ...]:
        """Open ones, and those that were over within a day; the oldest first."""
        both = (*self._over.values(), *self._open.values())
        return tuple(sorted((each.told for each in both), key=lambda each: (_first(each), each.id)))

    def observe(
        self, jobs: Sequence[ListedJob], now: float, attempts: Sequence[Attempt] = ()
    ) -> None:
        """Take in one look at the queue.

        Args:
            jobs: every job that the controller knows, those that ended within minutes too.
            now: Unix time of the look.
            attempts: what accounting has of recent attempts, if it was asked.
        """
        holding = {
            each.job.job_id: each
            for each in jobs
            if each.job.holds
            and "COMPLETING" not in each.job.states
            and each.job.start_time is not None
            and not each.tasks
        }
        # While its nodes are cleared, a job that is queued again has the next attempt's times.
        ending = {each.job.job_id for each in jobs if "COMPLETING" in each.job.states}
        known = {each.job.job_id: each for each in jobs if not each.tasks}
        for number, attempt in list(self._attempts.items()):
            if number in ending:
                self._ends(number, attempt, now)
            elif not _same(attempt.job, holding.get(number)):
                del self._attempts[number]
                self._left(attempt, known.get(number), now)
        for number, each in holding.items():
            self._holds(number, each, now)
        for victim in list(self._over.values()):
            if "started" not in victim.told.steps:
                self._find_successor(victim, jobs)
        for past in attempts:
            over = self._over.get((past.job_id, past.start or 0.0))
            if over is not None and past.end is not None:
                _set_left(over, past.end)
        self._forget(now)

    def _said(self, job: ListedJob, run_id: str | None) -> Signs | None:
        return None if self._signs is None else self._signs(job, run_id)

    # -- a look at a job that has its nodes

    def _holds(self, number: int, each: ListedJob, now: float) -> None:
        comment = read_comment(each.job.comment)
        run_id = None if comment is None else comment.run_id
        start = each.job.start_time or 0.0
        self._attempts[number] = _Attempt(each, run_id, now)
        if each.preempted is None or each.preempted < start:
            return
        victim = self._open.get((number, start))
        if victim is None:
            victim = self._victim(each, run_id, each.preempted)
            self._open[number, start] = victim
        victim.seen = now
        self._take_signs(victim, self._said(each, run_id))
        deadline = victim.told.deadline
        if deadline is not None and now > deadline + KILL_WAIT_SECONDS:
            words = f"job {each.number} is still there, after its grace and Slurm's KillWait"
            victim.told = replace(victim.told, outcome=Outcome.OVERDUE, words=words)

    def _ends(self, number: int, attempt: _Attempt, now: float) -> None:
        self._attempts[number] = replace(attempt, seen=now)
        start = attempt.job.job.start_time or 0.0
        if (victim := self._open.get((number, start))) is not None:
            victim.seen = now
            self._take_signs(victim, self._said(attempt.job, attempt.run_id))

    def _victim(self, each: ListedJob, run_id: str | None, notified: float | None) -> _Victim:
        terms = self._policy.preemption
        start = each.job.start_time or 0.0
        steps = {} if notified is None else {"notified": notified}
        told = Preemption(
            id=f"slurm-{each.number}-{int(start)}",
            victim=each.number,
            successor="",
            cause=Cause.PRIORITY,
            at="step" if terms is None else terms.notice,
            deadline=None if terms is None or notified is None else notified + terms.deadline,
            run_id=run_id,
            steps=steps,
            words=f"job {each.number} was told to leave",
        )
        return _Victim(
            told,
            job_id=each.job.job_id,
            start=start,
            nodes=frozenset(each.job.nodes),
            gpus=each.gpus,
            priority=priority_of(self._policy, each.job.qos, each.job.partition),
        )

    def _take_signs(self, victim: _Victim, signs: Signs | None) -> None:
        if signs is None:
            return
        victim.durable = signs.durable if signs.durable is not None else victim.durable
        for step, when in (("acknowledged", signs.acknowledged), ("saved", signs.saved)):
            if when is not None:
                self._step(victim, step, when)

    def _take_last(self, victim: _Victim, signs: Signs | None) -> None:
        """It left as one that saved: its newest state is that of its end."""
        steps = victim.told.steps
        told = steps.get("acknowledged", steps.get("notified"))
        if signs is None or signs.durable is None or signs.on_disk is None or told is None:
            return
        if signs.durable >= told:
            self._step(victim, "saved", signs.on_disk)

    # -- a job that has its nodes no more

    def _left(self, attempt: _Attempt, now_is: ListedJob | None, now: float) -> None:
        job = attempt.job
        start = job.job.start_time or 0.0
        signs = self._said(job, attempt.run_id)
        victim = self._open.pop((job.job.job_id, start), None)
        if victim is None:
            victim = self._unseen(attempt, now_is, signs)
            if victim is None:
                return
        victim.seen = attempt.seen
        self._over[job.job.job_id, start] = victim
        self._take_signs(victim, signs)
        if now_is is not None and now_is.status in _LEFT:
            self._take_last(victim, signs)
        ended = None if now_is is None or not now_is.job.ended else now_is.job.end_time
        self._step(victim, "left", now if ended is None else ended)
        self._judge(victim, now_is, told=signs is not None)

    def _unseen(
        self, attempt: _Attempt, now_is: ListedJob | None, signs: Signs | None
    ) -> _Victim | None:
        """A job that was told and gone between two looks: Slurm keeps when it chose it."""
        job = attempt.job
        start = job.job.start_time or 0.0
        if priority_of(self._policy, job.job.qos, job.job.partition) not in preemptible(
            self._policy
        ):
            return None
        chosen = None if now_is is None else now_is.preempted
        if chosen is not None and chosen >= start:
            return self._victim(job, attempt.run_id, chosen)
        queued = now_is is not None and now_is.job.restarts > job.job.restarts
        if queued and signs is not None and signs.acknowledged is not None:
            return self._victim(job, attempt.run_id, None)
        return None

    def _judge(self, victim: _Victim, now_is: ListedJob | None, *, told: bool) -> None:
        """Say what became of it; `told` is whether its trainer said anything."""
        leaving, steps = victim.told, victim.told.steps
        left, name = steps["left"], leaving.victim
        states = frozenset[str]() if now_is is None else now_is.job.states
        status = None if now_is is None else now_is.status
        back = now_is is not None and not now_is.job.ended
        saved = "saved" in steps or status in _LEFT
        lost = 0.0 if saved else None
        if not saved and victim.durable is not None:
            lost = max(0.0, left - victim.durable) * victim.gpus
        if "CANCELLED" in states:
            outcome, words = Outcome.ENDED, f"job {name} was cancelled while it had to leave"
        elif "COMPLETED" in states:
            outcome = Outcome.ENDED
            words = f"job {name} ended with status 0 within its grace: it does not come back"
        elif saved and "SPECIAL_EXIT" in states:
            outcome, words = Outcome.DONE, f"job {name} saved, left, and is held"
        elif saved and back:
            outcome, words = Outcome.DONE, f"job {name} saved, left, and is queued again"
        elif saved:
            outcome, words = Outcome.DONE, f"job {name} saved and left"
        elif back and not told:
            # From 23.11 on Slurm tells no status of who left within its grace, not even 75.
            outcome = Outcome.DONE
            words = f"job {name} left, and is queued again; whether it saved, nobody tells"
        else:
            outcome, words = Outcome.FAILED, f"job {name} left without a state of its end"
        victim.told = replace(leaving, outcome=outcome, words=words, lost_seconds=lost)

    # -- who came

    def _find_successor(self, victim: _Victim, jobs: Sequence[ListedJob]) -> None:
        left = math.floor(victim.seen)
        came = [
            each
            for each in jobs
            if each.job.job_id != victim.job_id
            and each.job.start_time is not None
            and left <= each.job.start_time <= left + SUCCESSOR_SECONDS
            and victim.nodes & frozenset(each.job.nodes)
            and self._policy.preempts(
                priority_of(self._policy, each.job.qos, each.job.partition), victim.priority
            )
        ]
        if not came:
            return
        first = min(came, key=lambda each: (each.job.start_time or 0.0, each.job.job_id))
        start = first.job.start_time or 0.0
        if start < victim.told.steps["left"]:
            _set_left(victim, start)
        self._step(victim, "started", start)
        victim.told = replace(victim.told, successor=first.number)

    def _step(self, victim: _Victim, step: str, when: float) -> None:
        """Note a step, once; one of whole seconds counts from the step before it, if within it."""
        steps = victim.told.steps
        if step in steps:
            return
        before = [steps[name] for name in STEPS[: STEPS.index(step)] if name in steps]
        if before and when < before[-1] <= when + _WITHIN_SECOND and when == math.floor(when):
            when = before[-1]
        # In the contract's order, whichever was seen first.
        found = {**steps, step: when}
        ordered = {name: found[name] for name in STEPS if name in found}
        victim.told = replace(victim.told, steps=ordered)

    def _forget(self, now: float) -> None:
        old = [
            key for key, each in self._over.items() if each.told.steps["left"] < now - KEPT_SECONDS
        ]
        for key in old:
            del self._over[key]
        while len(self._over) > _MOST_KEPT:
            del self._over[next(iter(self._over))]


def _same(before: ListedJob, now: ListedJob | None) -> bool:
    """Whether it is the same attempt still."""
    return now is not None and now.job.start_time == before.job.start_time


def _set_left(victim: _Victim, when: float) -> None:
    """Correct when a job left, by somebody who knows it better; no step before it was later."""
    steps = victim.told.steps
    before = [steps[name] for name in STEPS[: STEPS.index("left")] if name in steps]
    if before and when < before[-1] <= when + _WITHIN_SECOND:
        when = before[-1]
    victim.told = replace(victim.told, steps={**steps, "left": when})


def _first(told: Preemption) -> float:
    return min(told.steps.values(), default=0.0)
