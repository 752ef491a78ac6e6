"""Which attempt of a Slurm job is meant, and how it stands. Pure.

An attempt is one (cluster, number, time of submission, restarts, user). Slurm counts a restart up
when it takes a job back into its queue, while its nodes are still being emptied, and gives it a new
time of submission once they are: so a job that is COMPLETING with one restart more and the old time
is still the same attempt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from gpuwarden.errors import RefusedAction
from gpuwarden.platforms.slurm import PENDING, attempt_id
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.ports import Standing

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gpuwarden.platforms.slurm import SlurmJob
    from gpuwarden.platforms.slurm_attempts import Record
    from gpuwarden.ruleengine.reclaim.ports import Claim
    from gpuwarden.ruleengine.verdicts import JobFacts

NAME: Final = "slurm"
_NUMBER = re.compile(r"[0-9]{1,10}(?:_[0-9]{1,10})?")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a claim says of its attempt."""

    cluster: str
    number: str
    job_id: int
    submit_time: int
    restarts: int
    user_id: int

    @classmethod
    def of(cls, claim: Claim) -> Self:
        """Read a claim, which may have been on disk since.

        Raises:
            RefusedAction: it is none of Slurm's.
        """
        found = claim.identity
        try:
            identity = cls(
                cluster=str(found["cluster"]),
                number=str(found["number"]),
                job_id=int(found["job_id"] or 0),
                submit_time=int(found["submit_time"] or 0),
                restarts=int(found["restarts"] or 0),
                user_id=int(found["user_id"] if found["user_id"] is not None else -1),
            )
        except (KeyError, ValueError) as error:
            raise RefusedAction("bad_claim", f"no claim of a Slurm job: {error}") from error
        if claim.platform != NAME or not _NUMBER.fullmatch(identity.number):
            raise RefusedAction("bad_claim", f"no claim of a Slurm job: {identity.number[:40]!r}")
        return identity

    def has(self, job: SlurmJob) -> bool:
        """Whether a job is this very attempt."""
        if job.user_id != self.user_id or job.submit_time != float(self.submit_time):
            return False
        ending = "COMPLETING" in job.states and job.restarts == self.restarts + 1
        return job.job_id == self.job_id and (job.restarts == self.restarts or ending)

    def follows(self, job: SlurmJob) -> bool:
        """Whether a job is a later attempt of the same job."""
        return (
            job.job_id == self.job_id
            and job.user_id == self.user_id
            and job.restarts > self.restarts
            and not self.has(job)
        )


@dataclass(frozen=True, slots=True)
class Look:
    """What the controller keeps of a job now.

    Attributes:
        record: of the job, or of the first of its components.
        held_by_others: whether another component has nodes.
    """

    record: Record
    held_by_others: bool = False


def standing(identity: Identity, look: Look) -> Standing:
    """How an attempt stands of which this, or a later attempt of the same job, is known."""
    record, job = look.record, look.record.job
    if identity.has(job) and job.holds:
        return Standing.ENDING if "COMPLETING" in job.states else Standing.RUNNING
    if look.held_by_others:
        return Standing.ENDING
    # What waits comes back, unless a person must release it first.
    waits = bool(job.states & PENDING) and not record.held
    return Standing.RETURNED if waits or job.holds else Standing.ENDED


def strange(own: Record | None, records: Sequence[Record], job: JobFacts) -> Blocked | None:
    """Why a job is not the one of the facts, as it runs now."""
    found = own or records[0]
    if own is None:
        text = f"by Slurm job {found.job.number} is in another attempt now ({found.word})"
        return Blocked("target_changed", text)
    if not job.user or job.user not in (own.job.user_name, str(own.job.user_id)):
        text = f"by Slurm the job is {own.job.user_name}'s, by its node {job.user or 'nobody'}'s"
        return Blocked("user_differs", text)
    # A job that is still being set up has its nodes, and may yet be put back into the queue.
    runs = own.job.holds and not own.job.states & PENDING
    if not runs or own.job.submit_time is None or own.job.user_id is None:
        return Blocked("not_running", f"by Slurm the job is {own.word}")
    if "COMPLETING" in own.job.states:
        return Blocked("ending_already", f"by Slurm the job is {own.word}")
    return None


def together(records: Sequence[Record], cluster: str, offenders: Collection[str]) -> Blocked | None:
    """Whether all that would end with it may end: components with cards only if they offend."""
    others = [
        r.job.job_id for r in records if r.gpu and attempt_id(r.job, cluster) not in offenders
    ]
    if len(records) < 2 or not others:
        return None
    return Blocked(
        "not_all_offenders",
        f"Slurm ends a heterogeneous job only whole, and its component "
        f"{', '.join(map(str, others))} has cards and is not due",
    )
