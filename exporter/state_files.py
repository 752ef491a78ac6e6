"""Where an exporter keeps what its successor must know: one small file, written by its own thread.

The file is read once, at the start, and only if it is this user's own and nobody else can write it:
whoever could would decide when a job's cold start ends. What cannot be believed is put aside under
the name FILE.bad, said, and the exporter begins knowing nobody, as it does without a file.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from typing import TYPE_CHECKING, Protocol

import structlog

from gpuwarden.clock import SystemClock
from gpuwarden.exporter.recollections import Recollection

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.jobs import NodeSnapshot

MAX_BYTES = 16 * 1024 * 1024
WRITE_SECONDS = 10.0
"""What only moves on is written this often, for an end without notice."""
_STOP_SECONDS = 0.5

_logger = structlog.get_logger(__name__)


class Remembering(Protocol):
    """What knows something that is worth keeping."""

    def recollect(self) -> Recollection:
        """All that a successor must know."""


def load(file: Path, boot_id: str) -> Recollection | None:
    """What an earlier exporter of this boot left, or None.

    Args:
        file: the state file.
        boot_id: this boot's.
    """
    try:
        content = _read(file)
        if content is None:
            return None
        found = Recollection.decode(content)
    except (OSError, ValueError) as error:
        _put_aside(file, str(error))
        return None
    if found.boot_id != boot_id:
        _logger.info("state of an earlier boot is not needed", file=str(file))
        return None
    return found


def _read(file: Path) -> bytes | None:
    """The content of a file that can be trusted, or None where there is none.

    Raises:
        OSError: it cannot be read, or is not one to trust.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as opened:  # noqa: PTH123 (a descriptor has no path)
        about = os.fstat(descriptor)
        others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or others:
            raise PermissionError("it is not a file that only this user can write")
        if about.st_size > MAX_BYTES:
            raise OSError(f"it is larger than {MAX_BYTES} bytes")
        return opened.read(MAX_BYTES)


def _put_aside(file: Path, why: str) -> None:
    aside = file.with_name(f"{file.name}.bad")
    try:
        file.replace(aside)
    except OSError as error:
        _logger.warning("state not believed", file=str(file), error=why, kept=error.strerror)
        return
    _logger.warning(
        "state not believed; jobs that run now begin anew",
        file=str(file),
        error=why,
        kept=str(aside),
    )


class StateFile:
    """Keeps the file up to date; a disk that hangs delays nobody."""

    def __init__(self, file: Path, *, clock: Clock | None = None) -> None:
        """Prepare.

        Args:
            file: where it is kept; its folder must be this user's own.
            clock: for how often it is written.
        """
        self._file = file
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._learnt: object = None
        self._offered_at = float("-inf")
        self._wanted = threading.Condition()
        self._content: bytes | None = None
        self._stopped = False
        self._complaint = ""
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="state", daemon=True)

    def start(self) -> None:
        """Begin to write what is offered."""
        self._thread.start()

    def offer(self, remembering: Remembering, snapshot: NodeSnapshot | None = None) -> None:
        """Have the newest state written, where it is time; called by who changes it.

        At once where a job is new or first uses a card, GPU time was lost or a card had an error:
        that cannot be found out again. What only moves on waits its time.

        Args:
            remembering: what there is to keep.
            snapshot: what was just seen; None: write whatever the time.
        """
        now = self._clock.monotonic()
        if snapshot is not None:
            first = {(job.job_id, job.first_gpu_use) for job in snapshot.jobs}
            xids = snapshot.devices.xids if snapshot.devices is not None else ()
            learnt = (first, snapshot.lost_gpu_seconds, xids)
            if learnt == self._learnt and now - self._offered_at < WRITE_SECONDS:
                return
            self._learnt = learnt
        self._offered_at = now
        content = remembering.recollect().encode()
        with self._wanted:
            self._content = content
            self._wanted.notify()

    def stop(self) -> None:
        """Write what is still to be written, and end."""
        with self._wanted:
            self._stopped = True
            self._wanted.notify()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def _work(self) -> None:
        while True:
            with self._wanted:
                while self._content is None and not self._stopped:
                    self._wanted.wait()
                content, self._content = self._content, None
            if content is None:
                return
            self._write(content)

    def _write(self, content: bytes) -> None:
        if len(content) > MAX_BYTES:
            self._complain(f"it would be larger than {MAX_BYTES} bytes")
            return
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}.tmp")
        try:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123 (as above)
                # Without fsync: what a crash of the node would spoil is of another boot by then.
                file.write(content)
            temporary.replace(self._file)
        except OSError as error:
            self._complain(error.strerror or str(error))
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        self._complaint = ""

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            _logger.warning(
                "state not written; after a restart jobs would begin anew. Its folder must be "
                "there, and this user's own",
                file=str(self._file),
                error=complaint,
            )
