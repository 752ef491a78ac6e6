"""The release window: an operator has exporter and agent let go of the driver for a while.

A card cannot be reset, its MIG mode not changed and a driver not replaced while any process holds
it. `gpuwarden exporter release` leaves a file in the runtime directory, which only root may write;
whoever holds the driver is woken by it, closes the driver while it is there and takes it back when
it is gone or its time is over. A file and not a request over the network:
whoever can blind a node must be its root.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from gpuwarden.clock import SystemClock
from gpuwarden.errors import PermanentError
from gpuwarden.exporter.file_watches import FileWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.clock import Clock

DEFAULT_RELEASE_FILE = Path("/run/gpuwarden/release")
LONGEST_SECONDS = 86_400.0
VERSION = 1
_MAX_BYTES = 4096
_STOP_SECONDS = 0.5
_SHORTEST_SECONDS = 0.01
LOOK_SECONDS = 5.0
"""The file is looked at so often even if nobody tells of it, and so is a driver's upgrade."""

_logger = structlog.get_logger(__name__)


class Holder(Protocol):
    """What can let go of the driver."""

    @property
    def stale(self) -> bool:
        """Whether only a new process can load the driver's new library."""

    def release(self) -> bool:
        """Let go until `acquire`; False where a call hangs."""

    def acquire(self) -> None:
        """Take the driver again when it is next needed."""


@dataclass(frozen=True, slots=True)
class Release:
    """An order to let go.

    Attributes:
        until: Unix time of its end, or None: until the file is removed.
    """

    until: float | None = None

    def covers(self, now: float) -> bool:
        """Whether it holds at a Unix time."""
        return self.until is None or now < self.until


def order(file: Path, seconds: float, *, clock: Clock) -> Release:
    """Have everybody let go for a while.

    Args:
        file: the release file.
        seconds: for how long.
        clock: the node's.

    Raises:
        PermanentError: it cannot be written.
    """
    release = Release(clock.wall() + seconds)
    content = json.dumps({"version": VERSION, "until": release.until})
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(f"{content}\n")
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise PermanentError(_not_written(file, error)) from error
    return release


def withdraw(file: Path) -> bool:
    """Let everybody take the driver back; False where nobody was told to let go.

    Args:
        file: the release file.

    Raises:
        PermanentError: it cannot be removed.
    """
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PermanentError(_not_written(file, error)) from error
    return True


def _not_written(file: Path, error: OSError) -> str:
    return (
        f"{file}: {error.strerror}; run this as root, and with the --release-file of the node's "
        "exporter and agent"
    )


def read(file: Path) -> Release | None:
    """The order that a release file holds, or None.

    A file that root or this process's own user wrote counts even where its content is not
    understood: then it holds until it is removed, as does an empty one (`touch`).

    Args:
        file: the release file.

    Raises:
        OSError: it cannot be read, or is not one that counts.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as opened:  # noqa: PTH123 (a descriptor has no path)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in (0, os.geteuid()):
            raise PermissionError(1, "not a file of root's or this user's")
        content = opened.read(_MAX_BYTES)
    try:
        until = json.loads(content)["until"]
        return Release(float(until))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Release()


class ReleaseWatch:
    """Looks at the release file whenever something happens to it, in a thread of its own."""

    def __init__(
        self,
        file: Path,
        holder: Holder,
        *,
        restart: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        """Prepare; `look` or `start` begins.

        Args:
            file: the release file.
            holder: who lets go.
            restart: called where it cannot let go because a call of the driver hangs: only the end
                of the process closes what that call holds. The new process finds the file. Also
                called where an old library stands in the way of the new one.
            clock: for the order's end.
        """
        self._file = file
        self._holder = holder
        self._restart = restart
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._stop = threading.Event()
        self._watch: FileWatch | None = None
        self._thread: threading.Thread | None = None
        self._until: float | None = None
        self._released = False
        self._complaint = ""

    def start(self) -> None:
        """Look from now on."""
        # Before the first look: what happens in between must not be missed.
        self._watch = FileWatch(self._file)
        self.look()
        # A daemon: letting go waits for the driver.
        self._thread = threading.Thread(
            target=self._work, args=(self._watch,), name="release-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._watch is None or self._thread is None:
            return
        self._watch.wake()
        self._thread.join(_STOP_SECONDS)
        if not self._thread.is_alive():
            # One that still lets go, of a driver that hangs, keeps what it waits on to its end.
            self._watch.close()

    def look(self) -> None:
        """Look once, and do what is ordered, or what an upgrade of the driver asks for."""
        if self._holder.stale:
            _logger.warning("driver upgraded: restarting to load its new library")
            self._restart()
            return
        try:
            release = read(self._file)
        except OSError as error:
            # What was ordered before holds on: neither is right without knowing.
            self._until = None
            self._complain(error.strerror or str(error))
            return
        self._complaint = ""
        self._until = release.until if release is not None else None
        wanted = release is not None and release.covers(self._clock.wall())
        if wanted == self._released:
            return
        self._released = wanted
        if not wanted:
            _logger.info("driver taken back")
            self._holder.acquire()
            return
        until = release.until if release is not None else None
        if self._holder.release():
            _logger.info("driver released", until=until)
        else:
            _logger.warning("driver hangs: restarting to let go of it", until=until)
            self._restart()

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            _logger.warning("release file not followed", file=str(self._file), error=complaint)

    def _work(self, watch: FileWatch) -> None:
        while True:
            watch.wait(self._patience())
            if self._stop.is_set():
                return
            try:
                self.look()
            except Exception:
                # Whatever it was, the next order must be followed.
                _logger.exception("release file not followed")

    def _patience(self) -> float:
        """Seconds until the next look if nothing happens: an order ends by the clock."""
        if not self._released or self._until is None:
            return LOOK_SECONDS
        left = self._until - self._clock.wall()
        return min(LOOK_SECONDS, max(_SHORTEST_SECONDS, left))


def restart() -> None:
    """Become a new process of the same command; nothing that is open survives.

    The new one has the same pid, so that a supervisor sees no end.
    """
    for entry in Path("/proc/self/fd").iterdir():
        descriptor = int(entry.name)
        if descriptor > 2:
            # Drivers have been seen to open their files without close-on-exec.
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (its own command)
    except OSError as error:
        # Its program may be gone by its own upgrade. The supervisor starts what is there now.
        _logger.critical("cannot become a new process: ending", error=error.strerror)
        os._exit(1)


@dataclass(frozen=True, slots=True, order=True)
class Open:
    """A process that has a card's device file open."""

    pid: int
    comm: str


def holders(prefix: str, proc: Path = Path("/proc")) -> tuple[Open, ...]:
    """Processes that have a file open whose path begins so; to see all of them takes root.

    Args:
        prefix: such as `/dev/nvidia`.
        proc: where procfs is mounted.
    """
    found = set()
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        # Processes end while they are looked at, and some are another user's.
        with contextlib.suppress(OSError):
            for entry in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()).startswith(prefix):
                        comm = (folder / "comm").read_text(errors="replace").strip()
                        found.add(Open(int(folder.name), comm))
    return tuple(sorted(found))
