"""What one look at the cluster shows, and what can be done next. Pure.

Decisions are made from a `View` alone: what the API has, what the engine said of leaves, what teams
have spent, which slots are in force. They are acts on one object each, in an order in which any of
them may be the last that is done.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.kueue.leavings import Leaving, Phase
from gpuwarden.scheduling.kueue.quotas import Ledger, Use, shares_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.schedule_api import Outcome
    from gpuwarden.scheduling.kueue.holds import Hold
    from gpuwarden.scheduling.kueue.workloads import QueuedJob
    from gpuwarden.scheduling.leaves import Leave
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot

SETTLE_SECONDS: Final = 5.0
"""Kueue is given so long to start what simply fits."""
VERIFY_SECONDS: Final = 60.0
"""After which a check's Retry must have given the quota back (kueue #6035)."""
MOST_RETRY_SECONDS: Final = 3600
"""A budget may be raised: who waits for it is looked at again after this at the latest."""
PATIENCE_SECONDS: Final = 300.0
"""A parked job comes back so long after it left, even if its successor never came."""
CLOSE_SECONDS: Final = 600.0
"""After which nothing more is expected to be seen of a leave."""
STUCK_SECONDS: Final = 60.0
"""Past its grace a pod is stuck (kueue #6489)."""
LEAK_SECONDS: Final = 600.0
"""Quota that nothing runs on for so long is a leak (kueue #14811)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a training from elsewhere.

    Attributes:
        saved: Unix time of its newest durable state, or None.
        epoch_seconds: how long its epochs take, or None.
    """

    saved: float | None = None
    epoch_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """A hard budget that has nothing left.

    Attributes:
        words: for its team.
        until: Unix time at which the next period begins.
        leave: whether running jobs are asked to leave.
    """

    words: str
    until: float
    leave: bool


@dataclass(frozen=True, slots=True)
class Silence:
    """A job that the engine would not ask to leave, or could not.

    Attributes:
        until: Unix time; then it may be tried again.
        words: of the engine.
        protected: whether it may not be asked, rather than cannot: then nobody ends it either.
    """

    until: float
    words: str
    protected: bool


@dataclass(frozen=True, slots=True)
class View:
    """Everything that decisions are made from.

    Attributes:
        policy: in force.
        now: Unix time.
        jobs: in our queues, by id.
        receipts: id of a decision -> the engine's leave.
        asks: whether there is an engine that can be asked.
        silent: uid of a Workload -> why the engine did not ask it.
        progress: the exporter's id of a job -> what is known of it.
        spent: team -> its spent budget.
        slots: bookings that are ahead and active.
    """

    policy: Policy
    now: float
    jobs: tuple[QueuedJob, ...] = ()
    receipts: Mapping[str, Leave] = field(default_factory=dict)
    asks: bool = True
    silent: Mapping[str, Silence] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    spent: Mapping[str, Spent] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()

    def in_force(self, moment: float) -> tuple[Slot, ...]:
        """Slots that are active at a moment."""
        return tuple(slot for slot in self.slots if slot.start <= moment < slot.end)

    def silence(self, job: QueuedJob) -> Silence | None:
        """Why a job is not asked now, or None where it may be."""
        found = self.silent.get(job.uid)
        return found if found is not None and self.now < found.until else None

    def ledger(self, moment: float | None = None) -> Ledger:
        """Who uses what of the shares of now, or of a moment ahead."""
        shares = shares_of(self.policy, self.in_force(self.now if moment is None else moment))
        return Ledger(shares, tuple(use_of(job) for job in self.jobs if job.counts))


def use_of(job: QueuedJob) -> Use:
    """Cards that a job holds."""
    return Use(job.id, job.team, job.card or next(iter(job.cards), ""), job.gpus)


def progress_of(job: QueuedJob, view: View) -> Progress:
    """What is known of the training that runs: of several pods, by the one that saves."""
    known = [
        found for pod in job.pods if pod.holds and (found := view.progress.get(f"pod-{pod.uid}"))
    ]
    return max(known, key=lambda each: each.saved or 0.0, default=Progress())


def is_leaving(job: QueuedJob) -> bool:
    """Whether it was asked to leave and is on its way."""
    return job.leaving is not None and job.leaving.phase is not Phase.RETURNED


def is_due(job: QueuedJob, leaving: Leaving, view: View) -> bool:
    """Whether hours and budgets still want a job away: both can be changed meanwhile."""
    if leaving.cause is Cause.WINDOW:
        window = view.policy.window(job.window) if job.window else None
        return window is None or not window.is_open(view.policy.timezone, view.now)
    return leaving.cause is not Cause.BUDGET or job.team in view.spent


def decision_id(job: QueuedJob, successor: str, now: float) -> str:
    """A name for a decision that no other has; the same for the same one."""
    digest = hashlib.sha256(f"{job.uid} {successor} {now:.3f}".encode()).hexdigest()[:12]
    return f"kueue.{int(now):x}.{digest}"


def leaving_of(
    job: QueuedJob,
    view: View,
    *,
    cause: Cause,
    successor: str,
    at: str,
    deadline: float,
    words: str,
    until: float | None = None,
    phase: Phase = Phase.TOLD,
) -> Leaving:
    """A new leave of a job.

    Args:
        job: that is to leave.
        view: in which it was decided.
        cause: why.
        successor: who wants the cards.
        at: step or epoch.
        deadline: Unix time.
        words: for its owner.
        until: it does not come back before.
        phase: TOLD, or PARKED of one that holds nothing.
    """
    saved = progress_of(job, view).saved
    since = job.running_since
    lost = None
    if since is not None:
        lost = max(0.0, view.now - max(since, saved or 0.0)) * job.gpus
    return Leaving(
        id=decision_id(job, successor, view.now),
        cause=cause,
        successor=successor,
        at=at,
        begun=view.now,
        deadline=deadline,
        phase=phase,
        lost=lost,
        until=until,
        words=words,
    )


@dataclass(frozen=True, slots=True)
class Tell:
    """Write down that a job is to leave; it is asked once that is written."""

    job: QueuedJob
    leaving: Leaving


@dataclass(frozen=True, slots=True)
class Ask:
    """Have the engine ask it; repeated with the same key until its fate is known."""

    job: QueuedJob
    leaving: Leaving


@dataclass(frozen=True, slots=True)
class Note:
    """Write down what was seen."""

    job: QueuedJob
    leaving: Leaving


@dataclass(frozen=True, slots=True)
class Park:
    """Take it out of the queue: its pods get the signal and their grace."""

    job: QueuedJob
    leaving: Leaving


@dataclass(frozen=True, slots=True)
class Return:
    """Put it back into the queue."""

    job: QueuedJob
    leaving: Leaving


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing more will be seen of a leave: take the note off.

    Attributes:
        job: of it.
        leaving: as it ended.
        outcome: how.
        counts: whether it had to leave, which is remembered.
        withdraw: whether the engine is told that it need not.
        silent_seconds: for how long nobody asks it again, for the reason in `leaving`.
    """

    job: QueuedJob
    leaving: Leaving
    outcome: Outcome
    counts: bool = False
    withdraw: bool = False
    silent_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Open:
    """Take gates away, so that Kueue may start it."""

    job: QueuedJob
    gates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judge:
    """Set the state of our admission check.

    Attributes:
        job: of it.
        state: Ready or Retry.
        message: for its owner.
        retry_seconds: with Retry, until it is looked at again.
    """

    job: QueuedJob
    state: str
    message: str
    retry_seconds: int = 0


@dataclass(frozen=True, slots=True)
class Mend:
    """Take a note away that cannot be read, and what it may have stopped start again."""

    job: QueuedJob


@dataclass(frozen=True, slots=True)
class Free:
    """Bring back what a policy that is gone keeps out of its queue.

    Attributes:
        job: of which no more is known than what it is called.
        patch: of its Workload.
    """

    job: QueuedJob
    patch: Json


@dataclass(frozen=True, slots=True)
class HoldBack:
    """Take it out of the queue until it is released."""

    job: QueuedJob
    hold: Hold


@dataclass(frozen=True, slots=True)
class Unhold:
    """Let it go on: a hold is over."""

    job: QueuedJob


Act = Tell | Ask | Note | Park | Return | Close | Open | Judge | Mend | Free | HoldBack | Unhold


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job waits.

    Attributes:
        code: a stable word.
        words: one sentence.
        must_end: ids of jobs that would have to end first.
    """

    code: str
    words: str
    must_end: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something for the operator.

    Attributes:
        code: a stable word.
        about: what it is about: with the code it names one problem.
        words: what is so, and what to do.
    """

    code: str
    about: str
    words: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from a view.

    Attributes:
        acts: in order.
        waits: job id -> why it waits.
        faults: for the operator.
    """

    acts: tuple[Act, ...] = ()
    waits: Mapping[str, Wait] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    @staticmethod
    def of(parts: Sequence[Verdict]) -> Verdict:
        """Several of them in order; of each job the first reason to wait counts."""
        waits: dict[str, Wait] = {}
        for part in parts:
            for job, wait in part.waits.items():
                waits.setdefault(job, wait)
        acts = tuple(act for part in parts for act in part.acts)
        return Verdict(acts, waits, tuple(fault for part in parts for fault in part.faults))
