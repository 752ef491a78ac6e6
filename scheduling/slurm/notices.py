"""Asking jobs of Slurm's to leave, by the signal that they themselves asked for.

A training leaves on the signal that its script names (`#SBATCH --signal`); to any other job the
same signal would be its end. So a job whose script asks for none is never sent one: it is said that
it cannot be asked. Each attempt is asked once, and what became of it is told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm import attempt_id
from gpuwarden.platforms.slurm_attempts import asked_signal
from gpuwarden.schedule_api import Outcome, Preemption
from gpuwarden.scheduling.slurm.refusals import is_down
from gpuwarden.scheduling.slurm.scripts import read_comment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.platforms.slurm_attempts import AskedSignal
    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.schedule_api import Cause
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.clusters import Cluster

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
    """It was asked before, and is still there."""
    DEAF = "deaf"
    """Its script asks for no signal."""
    EARLY = "early"
    """It has only just begun; a later look asks."""
    FAILED = "failed"
    """Slurm did not pass it on; the next look tries again."""


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


class Notices:
    """The notices of one cluster.

    Args:
        cluster: which.
        asked: attempts that were asked before this process -> Unix time.
    """

    def __init__(self, cluster: Cluster, asked: Mapping[str, float]) -> None:
        self._cluster = cluster
        self._signals: dict[str, AskedSignal | None] = {}
        self._told: dict[str, Preemption] = {}
        self.asked: dict[str, float] = dict(asked)

    def ask(self, job: ListedJob, why: Why, policy: Policy, now: float) -> Answered:
        """Ask a job to leave, once for each attempt.

        Raises:
            ServiceUnavailable: the controller does not answer.
        """
        attempt = attempt_of(job)
        if attempt in self.asked:
            return Answered.BEFORE
        if now - (job.job.start_time or now) < SETTLING_SECONDS:
            return Answered.EARLY
        signal = self._signal_of(job, attempt)
        if signal is None:
            return Answered.DEAF
        batch = ("--batch",) if signal.batch else ()
        answer = self._cluster.run("scancel", *batch, f"--signal={signal.name}", job.number)
        if is_down(answer):
            raise ServiceUnavailable(f"Slurm's controller does not answer: {answer.complaint}")
        if answer.status:
            log.warning("notice_failed", job=job.number, error=answer.complaint)
            return Answered.FAILED
        log.info("notice", job=job.number, cause=why.cause, successor=why.successor)
        self.asked[attempt] = now
        comment = read_comment(job.job.comment)
        patient = policy.preemption is not None and policy.preemption.notice == "epoch"
        self._told[attempt] = Preemption(
            id=f"{why.cause}-{attempt}",
            victim=job.number,
            successor=why.successor,
            cause=why.cause,
            at="epoch" if patient else "step",
            deadline=None if policy.preemption is None else now + policy.preemption.deadline,
            run_id=None if comment is None else comment.run_id,
            steps={"notified": now},
            words=f"It was asked to leave by its signal {signal.name}.",
        )
        return Answered.ASKED

    def _signal_of(self, job: ListedJob, attempt: str) -> AskedSignal | None:
        """The signal that a job's script asks for; None where it asks for none, or has none."""
        if attempt not in self._signals:
            answer = self._cluster.run("scontrol", "write", "batch_script", job.number, "-")
            if is_down(answer):
                raise ServiceUnavailable(f"Slurm's controller does not answer: {answer.complaint}")
            self._signals[attempt] = None if answer.status else asked_signal(answer.output)
            while len(self._signals) > _MOST:
                del self._signals[next(iter(self._signals))]
        return self._signals[attempt]

    def observe(self, jobs: Sequence[ListedJob], now: float) -> None:
        """See who has left, and forget what is long over."""
        holding = {attempt_of(job) for job in jobs if job.job.holds}
        for attempt, told in list(self._told.items()):
            if told.outcome in (Outcome.OPEN, Outcome.OVERDUE) and attempt not in holding:
                steps = {**told.steps, "left": now}
                self._told[attempt] = replace(
                    told, steps=steps, outcome=Outcome.DONE, words="It left."
                )
            elif told.outcome is Outcome.OPEN and told.deadline is not None and now > told.deadline:
                self._told[attempt] = replace(
                    told,
                    outcome=Outcome.OVERDUE,
                    words="Its deadline passed and it is still there: its owner or an operator "
                    "ends it.",
                )
        for attempt, when in list(self.asked.items()):
            if attempt not in holding and now - when > KEPT_SECONDS:
                del self.asked[attempt]
                self._told.pop(attempt, None)

    def preemptions(self) -> tuple[Preemption, ...]:
        """Every notice of the last day, the oldest first."""
        return tuple(sorted(self._told.values(), key=lambda each: each.steps["notified"]))
