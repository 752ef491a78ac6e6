"""What people ask of a job that runs, carried out also where the daemon was killed meanwhile.

An order is written down before anything is done about it. Every tick looks whether what is written
and what the job can read agree: an order that was cut off is given, one that is over is taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import RefusedAction
from gpuwarden.job_files import LeaveRequest
from gpuwarden.scheduling.local.queues import NOTE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuwarden.scheduling.local.progress import RunFiles
    from gpuwarden.scheduling.local.queues import Attempt, Job, Queue

_HOLD_PREFIX = "hold-"

log = structlog.get_logger("gpuwarden.scheduling.local")


def hold_id(attempt: Attempt) -> str:
    """The id of the request by which an attempt is asked to leave, and to wait then."""
    return f"{_HOLD_PREFIX}{attempt.id}"


class Orders:
    """Has running jobs hold or end as people said.

    Args:
        queue: where it is written down.
        files: of a job.
    """

    def __init__(self, queue: Queue, files: Callable[[Job], RunFiles]) -> None:
        self._queue, self._files = queue, files

    def hold(self, attempt: Attempt, job: Job, *, deadline: float) -> None:
        """Ask a job, which is written down to be held, to leave.

        Args:
            attempt: that runs.
            job: whose it is.
            deadline: Unix time until which it has time.

        Raises:
            RefusedAction: it cannot be asked; it is not held then.
        """
        files = self._files(job)
        if files.others():
            self._queue.change_job(job.id, then_what="")
            words = f"its run {job.run_id} is also of another user, who would leave: cancel it"
            raise RefusedAction("run_of_others", words)
        if files.request() is not None:
            return  # it is leaving already, and is held then
        try:
            files.ask(LeaveRequest(hold_id(attempt), deadline, "epoch", "hold", job.words))
        except OSError as error:
            self._queue.change_job(job.id, then_what="")
            raise RefusedAction("job_files", f"it cannot be asked to leave: {error}") from error

    def cut_off(self, *, deadline: float) -> Iterator[Attempt]:
        """Give, or take back, what a daemon that was killed had no time for.

        Args:
            deadline: as of `hold`.

        Yields:
            Attempts of jobs that were cancelled and are still to be ended.
        """
        for attempt in self._queue.attempts("running"):
            job = self._queue.job(str(attempt.job))
            if job is None:
                continue
            if job.then_what == "cancel" and attempt.term_at is None:
                yield attempt
            elif job.then_what == "hold":
                try:
                    self.hold(attempt, job, deadline=deadline)
                except RefusedAction as error:
                    log.warning("not held", entry=job.entry, why=str(error))
            elif not job.then_what:
                self._files(job).withdraw(hold_id(attempt))

    def forget(self, job: Job) -> None:
        """Take back what an earlier attempt of a job was asked: the next one would leave for it."""
        files = self._files(job)
        standing = files.request()
        if standing is not None and standing.decision_id.startswith((NOTE_PREFIX, _HOLD_PREFIX)):
            log.warning("a request to an earlier attempt is taken back", entry=job.entry)
            files.withdraw(standing.decision_id)
