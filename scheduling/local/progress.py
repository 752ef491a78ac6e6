"""What a job's own files say of it, believed for its own process alone.

They decide how soon a victim leaves and which one is cheapest, and they are receipts. Whether a job
has ended, and whether its cards are free, is never read from them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden import job_files
from gpuwarden.job_files import JobFileError, LeaveRequest, RunDescription, RunStatus

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The job files of one attempt's run.

    Attributes:
        root: the job files' folder.
        run_id: the run.
        uid: whose files count.
    """

    root: Path
    run_id: str
    uid: int

    def status(self, *, pids: frozenset[int], boot: str, since: float) -> RunStatus | None:
        """What the attempt publishes; None: nothing yet, or not this attempt's.

        Args:
            pids: of the attempt's processes; empty: it has ended, and `since` decides.
            boot: id of the boot that they belong to.
            since: Unix time of its start.
        """
        try:
            described = job_files.read(job_files.description_path(self.root, self.run_id))
            written = job_files.read(job_files.status_path(self.root, self.run_id))
            description = RunDescription.decode(described.content)
            status = RunStatus.decode(written.content)
        except (FileNotFoundError, JobFileError):
            return None
        if not self.uid == described.uid == written.uid:
            return None
        own = description.boot_id == boot and (
            description.pid in pids if pids else described.modified >= since - 1.0
        )
        return status if own and written.modified >= since - 1.0 else None

    def others(self) -> bool:
        """Whether a run of this name is somebody else's: they would read what this job is asked.

        Nobody can be there in their place: in this folder only its owner can replace a file.
        """
        try:
            return job_files.description_path(self.root, self.run_id).lstat().st_uid != self.uid
        except OSError:
            return False

    def request(self) -> LeaveRequest | None:
        """The leave request that stands."""
        try:
            content = job_files.read(job_files.request_path(self.root, self.run_id)).content
            return LeaveRequest.decode(content)
        except (FileNotFoundError, JobFileError):
            return None

    def ask(self, request: LeaveRequest) -> None:
        """Write a leave request.

        Raises:
            OSError: the folder cannot be written.
        """
        path = job_files.request_path(self.root, self.run_id)
        path.parent.mkdir(mode=0o755, exist_ok=True)
        job_files.write(path, request.encode(), durable=True)

    def withdraw(self, decision_id: str) -> None:
        """Take a leave request back, if it is the one that stands."""
        standing = self.request()
        if standing is not None and standing.decision_id == decision_id:
            job_files.request_path(self.root, self.run_id).unlink(missing_ok=True)


def prepared(root: Path) -> str:
    """Make the job files' folder if it is not there; returns what is wrong with it, or nothing.

    Where an exporter and an agent serve the node it is theirs, and there already.
    """
    try:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name, mode in (("jobs", 0o1777), ("requests", 0o755)):
            folder = root / name
            if not folder.is_dir():
                folder.mkdir(mode=mode)
                folder.chmod(mode)
    except OSError as error:
        return f"{error.filename} cannot be made: {error.strerror}"
    if not os.access(root / "requests", os.W_OK | os.X_OK):
        return f"{root / 'requests'} cannot be written: no job can be asked to leave"
    return ""
