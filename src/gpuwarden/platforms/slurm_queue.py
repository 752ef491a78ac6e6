"""Who waits for a GPU in Slurm's queue, read from `squeue` so that no user's words count.

A pending job waits for a GPU if it asks for one and nothing but room or its turn keeps it. One
that is held, depends on another, begins later or is over a limit would not start on a freed card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

QUEUE_FIELDS: Final = (
    "JobID",
    "Partition",
    "Reason",
    "tres-per-job",
    "tres-per-node",
    "tres-per-socket",
    "tres-per-task",
)
"""What `squeue -O` is asked for: a GPU may be asked for in any of four ways."""
WAITING_REASONS: Final = frozenset({"Resources", "Priority"})
"""Why a job pends that would start if there were room for it."""

_MARK = re.compile(r"\|[0-9a-z]{8,64}")
_JOB = re.compile(r"[0-9]{1,10}")
# Such as gres:gpu:2, gres/gpu:a100=1 or gpu:a100:1 in a list with other resources.
_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?=[:=,]|$)")


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job, or all tasks of an array that have not begun.

    Attributes:
        partitions: any of which it may start in.
        reason: why it pends, in Slurm's word.
        gpu: whether it asks for one.
    """

    partitions: frozenset[str]
    reason: str
    gpu: bool


def queue_format(mark: str) -> str:
    """The argument of `squeue --noheader --states=PENDING -O` whose answer `decode_queue` reads.

    Args:
        mark: `|` and at least eight letters or digits that nobody can foresee.
    """
    if not _MARK.fullmatch(mark):
        raise ValueError(f"{mark!r} is no mark")
    return ",".join(f"{name}:{mark}" for name in QUEUE_FIELDS)


def decode_queue(text: str, mark: str) -> tuple[PendingJob, ...]:
    """The pending jobs of an answer in `queue_format`.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    values = [value.strip() for value in text.split(mark)]
    if values.pop() or len(values) % len(QUEUE_FIELDS):
        raise ServiceUnavailable("squeue answered in another form than it was asked for")
    jobs = []
    for at in range(0, len(values), len(QUEUE_FIELDS)):
        job_id, partitions, reason, *asked = values[at : at + len(QUEUE_FIELDS)]
        if not _JOB.fullmatch(job_id):
            raise ServiceUnavailable("squeue answered with a job that has no number")
        jobs.append(
            PendingJob(
                frozenset(partitions.split(",")),
                reason,
                any(_GPU.search(resources) for resources in asked),
            )
        )
    return tuple(jobs)


def waiting_jobs(jobs: Iterable[PendingJob], partition: str | None = None) -> int:
    """How many jobs wait for a GPU, an array counted once; in one partition or in all."""
    return sum(
        1
        for job in jobs
        if job.gpu
        and job.reason in WAITING_REASONS
        and (partition is None or partition in job.partitions)
    )
