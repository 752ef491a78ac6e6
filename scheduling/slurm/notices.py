"""Asking jobs of Slurm's to leave, by the signal that they themselves asked for.

A training leaves on the signal that its script names (`#SBATCH --signal`); to any other job the
same signal would be its end. So a job whose script asks for none is never sent one: it is said that
it cannot be asked. Each attempt is asked once: that is on disk before it is sent, and what cannot
be written down is not sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm import attempt_id
from gpuwarden.platforms.slurm_attempts import asked_signal
from gpuwarden.scheduling.slurm.askings import Asking, hear, leave, told
from gpuwarden.scheduling.slurm.refusals import is_down
from gpuwarden.scheduling.slurm.scripts import read_comment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuwarden.platforms.slurm_attempts import AskedSignal
    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.schedule_api import Cause, Preemption
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.clusters import Cluster
    from gpuwarden.scheduling.slurm.receipts import Signs, SignsOf

SETTLING_SECONDS: Final = 60.0
"""A program that has just been started does not heed its signal yet, and would die of it."""
KEPT_SECONDS: Final = 86_400.0
_MOST: Final = 2_000

log = structlog.get_logger(__name__)


class Answered(Enum):
    """What came of asking."""

    ASKED = "asked"
    """Now."""
    BEFORE = "before"
    """It was asked before, or may have been, and is still there."""
    DEAF = "deaf"
    """Its script asks for no signal."""
    EARLY = "early"
    """It has only just begun; a later look asks."""
    FAILED = "failed"
    """Slurm did not pass it on; the next look tries again."""
    UNKEPT = "unkept"
    """It could not be written down, so that it was not sent; the next look tries again."""


@dataclass(frozen=True, slots=True)
class Why:
    """For what a job is asked to leave.

    Attributes:
        cause: of the contract's.
        successor: the slot, the window or the budget's team.
    """

    cause: Cause
    successor: str


def attempt_of(job: ListedJob) -> str:
    """What only one attempt of a job has."""
    return f"{attempt_id(job.job, '')}@{job.job.start_time or 0:.0f}"


def asked_as(job: ListedJob) -> str:
    """What an attempt is asked to leave under: the components of one job have one script.

    Each of them that is sent a signal has Slurm pass it to that script, which would be told twice.
    """
    leader = job.job.het_job_id
    if leader is None:
        return attempt_of(job)
    return attempt_of(replace(job, job=replace(job.job, job_id=leader)))


class Notices:
    """The notices of one cluster.

    Args:
        cluster: which.
        asked: attempt -> its request of before this process, which may never have been sent.
        keep: writes down what is in `asked`, and says whether it is on disk.
        signs: what trainers say; nothing where nobody can tell.

    Attributes:
        asked: attempt -> its request.
        failed: number of a job that Slurm passed nothing on to -> what it said; whoever tells of
            it takes it away.
    """

    def __init__(
        self,
        cluster: Cluster,
        asked: Mapping[str, Asking],
        *,
        keep: Callable[[], bool],
        signs: SignsOf | None = None,
    ) -> None:
        self._cluster = cluster
        self._keep = keep
        self._signs = signs
        self._signals: dict[str, AskedSignal | None] = {}
        self._seen: dict[str, ListedJob] = {}
        self.asked: dict[str, Asking] = dict(asked)
        self.failed: dict[str, str] = {}

    def ask(
        self, jobs: Sequence[tuple[ListedJob, Why]], policy: Policy, now: float
    ) -> list[Answered]:
        """Ask jobs to leave, each attempt once; gives what came of each, in their order.

        Raises:
            ServiceUnavailable: the controller does not answer; who was asked is remembered.
        """
        answers: dict[str, Answered] = {}
        chosen: dict[str, tuple[ListedJob, Asking, AskedSignal]] = {}
        for job, why in jobs:
            attempt = asked_as(job)
            if attempt in answers or attempt in chosen:
                continue
            known = self.asked.get(attempt)
            if known is not None and known.counts(now):
                answers[attempt] = Answered.BEFORE
            elif now - (job.job.start_time or now) < SETTLING_SECONDS:
                answers[attempt] = Answered.EARLY
            elif (signal := self.signal_of(job)) is None:
                answers[attempt] = Answered.DEAF
            else:
                chosen[attempt] = (job, _asking(job, why, signal, policy=policy, now=now), signal)
        answers |= self._send(chosen, now)
        return [answers[asked_as(job)] for job, _ in jobs]

    def _send(
        self, chosen: Mapping[str, tuple[ListedJob, Asking, AskedSignal]], now: float
    ) -> dict[str, Answered]:
        if not chosen:
            return {}
        before = dict(self.asked)
        self.asked |= {attempt: asking for attempt, (_, asking, _) in chosen.items()}
        if not self._keep():
            self.asked = before
            return dict.fromkeys(chosen, Answered.UNKEPT)
        answers = {}
        for attempt, (job, asking, signal) in chosen.items():
            if self._pass_on(job, signal):
                log.info("notice", job=job.number, cause=asking.cause, successor=asking.successor)
                self.asked[attempt] = replace(asking, sent=now)
                answers[attempt] = Answered.ASKED
            else:
                del self.asked[attempt]
                answers[attempt] = Answered.FAILED
        return answers

    def _pass_on(self, job: ListedJob, signal: AskedSignal) -> bool:
        """Send one signal; where no answer comes, the request stays in doubt."""
        batch = ("--batch",) if signal.batch else ()
        answer = self._cluster.run("scancel", *batch, f"--signal={signal.name}", job.number)
        if is_down(answer):
            raise ServiceUnavailable(f"Slurm's controller does not answer: {answer.complaint}")
        if answer.status:
            log.warning("notice_failed", job=job.number, error=answer.complaint)
            self.failed[job.number] = answer.complaint
        return not answer.status

    def signal_of(self, job: ListedJob) -> AskedSignal | None:
        """The signal that a job's script asks for; None where it asks for none, or has none.

        Raises:
            ServiceUnavailable: the controller does not answer.
        """
        attempt = asked_as(job)
        if attempt not in self._signals:
            answer = self._cluster.run("scontrol", "write", "batch_script", job.number, "-")
            if is_down(answer):
                raise ServiceUnavailable(f"Slurm's controller does not answer: {answer.complaint}")
            self._signals[attempt] = None if answer.status else asked_signal(answer.output)
            while len(self._signals) > _MOST:
                del self._signals[next(iter(self._signals))]
        return self._signals[attempt]

    def observe(self, jobs: Sequence[ListedJob], now: float) -> None:
        """See who has left and what those in doubt say, and forget what is long over."""
        holding = {asked_as(job): job for job in jobs if job.job.holds}
        for attempt, asking in list(self.asked.items()):
            if attempt in holding:
                self._seen[attempt] = holding[attempt]
                if not asking.certain:
                    self._end_doubt(attempt, asking)
            elif now - asking.intended > KEPT_SECONDS:
                del self.asked[attempt]
            elif asking.left is None:
                self.asked[attempt] = leave(asking, self._said(attempt, asking), now)
        self._seen = {attempt: job for attempt, job in self._seen.items() if attempt in holding}

    def _end_doubt(self, attempt: str, asking: Asking) -> None:
        heard = hear(asking, self._said(attempt, asking))
        if heard is None:
            log.info("notice_not_sent", job=asking.number)
            del self.asked[attempt]
        else:
            self.asked[attempt] = heard

    def _said(self, attempt: str, asking: Asking) -> Signs | None:
        """What the trainer of an attempt says, which may have left since it was last seen."""
        job = self._seen.get(attempt)
        return None if job is None or self._signs is None else self._signs(job, asking.run_id)

    def preemptions(self, now: float) -> tuple[Preemption, ...]:
        """Every request of the last day, the oldest first."""
        found = sorted(self.asked.items(), key=lambda each: (each[1].intended, each[0]))
        return tuple(told(asking, attempt, now) for attempt, asking in found)


def _asking(job: ListedJob, why: Why, signal: AskedSignal, *, policy: Policy, now: float) -> Asking:
    comment = read_comment(job.job.comment)
    terms = policy.preemption
    return Asking(
        number=job.number,
        cause=why.cause,
        successor=why.successor,
        at="step" if terms is None else terms.notice,
        signal=signal.name,
        intended=now,
        deadline=None if terms is None else now + terms.deadline,
        run_id=None if comment is None else comment.run_id,
    )
