"""Leave requests: the files by which the agent asks a trainer to save, or to save and leave.

The agent is the only writer of `requests/`; a request that nobody needs any more must go, because a
run keeps its name when it is resumed and would leave again at once.
"""

from __future__ import annotations

import errno
import stat
import threading
from typing import TYPE_CHECKING

from gpuwarden import job_files
from gpuwarden.agent_api import decision_of
from gpuwarden.errors import RefusedAction
from gpuwarden.job_files import JobFileError, LeaveRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.clock import Clock

KEEP_SECONDS = 600.0
"""A request stays this long after its `leave_by`, for a trainer that is late."""
MAX_FILES = 10_000


class LeaveRequests:
    """The folder `requests/` of the job directory. Safe for threads.

    Attributes:
        directory: the job directory.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        """Make the folder where it is missing.

        Args:
            directory: the job directory, such as /run/gpuwarden.
            clock: to tell which requests are over.

        Raises:
            OSError: it cannot be made, or anybody could write requests to it.
        """
        self.directory = directory
        self._folder = directory / "requests"
        self._clock = clock
        # What was read must still be what is removed.
        self._changing = threading.Lock()
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o755)
        if self._folder.stat().st_mode & stat.S_IWOTH:
            raise PermissionError(
                errno.EPERM, f"{self._folder} can be written by anybody: chmod 755 it"
            )

    def write(self, run_id: str, request: LeaveRequest) -> None:
        """Ask a run; replaces an earlier request.

        Raises:
            RefusedAction: `requests`, the file cannot be written.
        """
        path = job_files.request_path(self.directory, run_id)
        try:
            with self._changing:
                job_files.write(path, request.encode(), durable=True)
        except (OSError, JobFileError) as error:
            raise RefusedAction(
                "requests", f"the leave request cannot be written to {self._folder}: {error}"
            ) from error

    def withdraw(self, run_id: str, decision_id: str) -> bool:
        """Remove a run's request if it is this one.

        Args:
            run_id: the run.
            decision_id: of the request.

        Returns:
            Whether there was one to remove.

        Raises:
            RefusedAction: `requests`, it cannot be removed.
        """
        path = job_files.request_path(self.directory, run_id)
        return self._remove(path, lambda present: present == decision_id)

    def cancel(self, run_id: str, asked: str) -> bool:
        """Remove a run's request if it is that of the same decision.

        Args:
            run_id: the run.
            asked: id of the question that takes it back; one that names no decision takes back
                whatever the run was asked.

        Returns:
            Whether there was one to remove.

        Raises:
            RefusedAction: `requests`, it cannot be removed.
        """
        decision = decision_of(asked)
        path = job_files.request_path(self.directory, run_id)
        return self._remove(
            path,
            lambda present: (
                decision is None or present is None or (decision_of(present) or present) == decision
            ),
        )

    def _remove(self, path: Path, means: Callable[[str | None], bool]) -> bool:
        """Remove a request if it is meant, by its decision; None: it cannot be read."""
        try:
            with self._changing:
                present = self._read(path)
                if not means(None if present is None else present.decision_id):
                    return False
                path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RefusedAction(
                "requests", f"the leave request {path} cannot be removed: {error.strerror}"
            ) from error
        return True

    def pending(self) -> Iterator[tuple[str, LeaveRequest]]:
        """Run and request of every file that can be read; at most 10,000."""
        for number, path in enumerate(self._folder.glob("*.json")):
            if number >= MAX_FILES:
                return
            request = self._read(path)
            if request is not None and job_files.RUN_ID.fullmatch(path.stem):
                yield path.stem, request

    def is_over(self, request: LeaveRequest) -> bool:
        """Whether nobody can still be about to follow a request."""
        return self._clock.wall() > request.leave_by + KEEP_SECONDS

    @staticmethod
    def _read(path: Path) -> LeaveRequest | None:
        try:
            return LeaveRequest.decode(job_files.read(path).content)
        except (FileNotFoundError, JobFileError):
            return None
