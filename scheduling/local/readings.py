"""Jobs as the plan sees them, from what is remembered and what they publish. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.job_files import RequestState
from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.local.scenes import Waiting, Working
from gpuwarden.scheduling.local.views import LEFT
from gpuwarden.scheduling.preemption_terms import Pool, Told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.job_files import LeaveRequest, RunStatus
    from gpuwarden.scheduling.local.queues import Attempt, Job, Note

KILL_SECONDS = 60.0
"""Between the signal to leave, at a job's deadline, and the one that cannot be refused."""
FREE_SECONDS = 120.0
"""How long the memory of a job that has left is waited for before another one is asked."""


def working(
    job: Job,
    attempt: Attempt,
    note: Note | None,
    status: RunStatus | None,
    *,
    asked: LeaveRequest | None,
) -> Working:
    """A job that holds cards: it runs, or it has left and its memory is still to come back.

    Args:
        job: whose cards they are.
        attempt: that holds them.
        note: the notice that stands.
        status: what it published last.
        asked: the request that it can read, of whoever made it.
    """
    told, cause = None, Cause.PRIORITY
    if note is not None:
        cause = Cause(note.cause)
        successor = note.successor if cause in (Cause.PRIORITY, Cause.BOOKING) else None
        # Another victim is taken only when this one has not even obeyed the last signal.
        patience = note.deadline + 2 * KILL_SECONDS
        if note.left is not None:
            patience = note.left + FREE_SECONDS
        told = Told(successor, patience)
    answer = None if status is None else status.request
    # Whoever says to be leaving is not asked: so it counts only as the answer to a request.
    followed = (
        answer is not None
        and asked is not None
        and answer.decision_id == asked.decision_id
        and answer.state is not RequestState.RECEIVED
    )
    ended = attempt.state == "ended"
    limit = job.task.time_limit_seconds
    return Working(
        # A job that has left and waits again is not the one whose memory is to come back.
        id=f"{job.entry}{LEFT}" if ended else job.entry,
        priority=job.task.priority,
        team=job.task.team,
        holds={Pool(attempt.kind): attempt.gpus},
        since=attempt.created,
        window=None if ended else job.task.window,
        began=attempt.began,
        saved=attempt.saved,
        epoch_seconds=job.epoch_seconds or job.task.epoch_seconds,
        ends=attempt.ended if ended else (None if limit is None else attempt.created + limit),
        told=told,
        cause=cause,
        final=ended or followed or attempt.term_at is not None,
        deaf=ended or bool(job.then_what),
        user=job.user,
    )


def waiting(job: Job, states: Mapping[str, str], *, stranger: str = "") -> Waiting:
    """A job without cards.

    Args:
        job: that waits.
        states: of the jobs that it runs after.
        stranger: why its user cannot be started as now, or empty.
    """
    task = job.task
    return Waiting(
        id=job.entry,
        priority=task.priority,
        team=task.team,
        gpus=task.gpus,
        submitted=job.submitted,
        kind=task.gpu_type,
        seconds=task.time_limit_seconds,
        window=task.window,
        not_before=task.not_before,
        held=job.held or stranger,
        unmet=tuple(each for each in task.after if states.get(each) in ("waiting", "active")),
        broken=tuple(each for each in task.after if states.get(each) == "failed"),
        ran=job.requeues > 0,
        user=job.user,
    )
