"""Whose run a folder of states is, and which process may train it now."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Self

from gpuwarden import job_files
from gpuwarden.errors import TemporaryError
from gpuwarden.trainer import typed_documents

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

VERSION = 1


class RunIsLocked(TemporaryError):
    """Another live process trains this run."""

    exit_code = job_files.EXIT_FAULT


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Whose states a folder holds.

    Attributes:
        run_id: name of the run.
        lineage: random token of the run's first start.
        words: the user's choices, as text, that make it this training and no other.
        started: Unix time of the run's first start.
        finished: Unix time of its end, or None.
        answered: leave requests carried out, so that a requeued attempt does not obey them again.
        extended: epochs in all, if it was given more than its words say.
        loggers: by tracker, the id of the run that it keeps of this training.
        begun_from: lineage of the training whose weights this one began from, or None.
    """

    run_id: str
    lineage: str
    words: dict[str, str]
    started: float
    finished: float | None = None
    answered: tuple[str, ...] = ()
    extended: int | None = None
    loggers: dict[str, str] = field(default_factory=dict)
    begun_from: str | None = None

    FILE = "run.json"
    ANSWERS = 32

    def write(self, folder: Path) -> None:
        """Put it on disk in a states folder."""
        document = {"version": VERSION, **dataclasses.asdict(self)}
        job_files.write(folder / self.FILE, json.dumps(document, indent=1).encode(), durable=True)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read it from a states folder; None if there is none that this version understands."""
        path = folder / cls.FILE
        try:
            return cls.decode(path.read_bytes(), where=str(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            log.warning("%s cannot be used, and its run is passed over: %s", path, error)
            return None

    @classmethod
    def decode(cls, content: bytes, *, where: str) -> Self | None:
        """Read its content; None, and a warning, if this version does not understand it.

        Args:
            content: of a file.
            where: that is.
        """
        try:
            data = typed_documents.document(content)
            if (version := data.pop("version", None)) != VERSION:
                log.warning("%s is of version %s, not %d: passed over", where, version, VERSION)
                return None
            return typed_documents.record(cls, data)
        except ValueError as error:
            log.warning("%s cannot be used, and its run is passed over: %s", where, error)
            return None

    def having_answered(self, decision_id: str) -> Self:
        """The same with one more leave request carried out."""
        kept = tuple(item for item in self.answered if item != decision_id)
        return dataclasses.replace(self, answered=(*kept, decision_id)[-self.ANSWERS :])


class RunLock:
    """One process at a time trains into a folder.

    A POSIX record lock: unlike flock it is not inherited by loader workers, which may outlive
    their parent by some seconds, and it works over NFS.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._file: IO[str] | None = None

    def acquire(self, *, wait_seconds: float = 0.0) -> None:
        """Take the lock.

        Args:
            wait_seconds: how long the former attempt may still need to be gone.

        Raises:
            RunIsLocked: another process keeps it.
        """
        try:
            self._acquire(wait_seconds)
        except BaseException:
            self.release()
            raise

    def _acquire(self, wait_seconds: float) -> None:
        self._file = self._path.open("a+")
        deadline = time.monotonic() + wait_seconds
        waiting = False
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                self._file.seek(0)
                holder = self._file.read(64).strip() or "unknown"
                if time.monotonic() >= deadline:
                    raise RunIsLocked(
                        f"{self._path.parent.parent} is being trained by another process "
                        f"({holder}): wait for its end, or train elsewhere with name=..."
                    ) from error
                if not waiting:
                    log.info("waiting up to %g s for %s to be gone", wait_seconds, holder)
                waiting = True
                time.sleep(0.1)
            else:
                break
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
        self._file.flush()

    def withdraw(self) -> None:
        """Give the lock back, for a start that was refused; what it has made goes, if empty."""
        folder = self._path.parent
        if self._file is not None and [path.name for path in folder.iterdir()] == [self._path.name]:
            self._path.unlink()
            for made in (folder, folder.parent / "weights", folder.parent):
                with contextlib.suppress(OSError):  # not empty, or not there
                    made.rmdir()
        self.release()

    def release(self) -> None:
        """Give the lock back; the file stays."""
        if self._file is not None:
            self._file.close()
            self._file = None
