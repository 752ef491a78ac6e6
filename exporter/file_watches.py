"""Waiting for what happens to one file, without looking at it all the time (inotify(7)).

Python has no inotify of its own, so its calls are made on the C library. What is watched is the
file's folder, because the file comes and goes, or the nearest one above it while there is none.
Where the kernel does not let itself be asked (too many watches), waiting ends often enough to look
at the file instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

UNWATCHED_SECONDS = 0.2
"""Longest wait while nothing can be watched."""

_EVENT = struct.Struct("iIII")
_READ_BYTES = 64 * 1024
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
# IN_ATTRIB, IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE of what is in the
# folder, IN_DELETE_SELF and IN_MOVE_SELF of the folder; IN_ONLYDIR.
_MASK = 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800 | 0x1000000
# IN_DELETE_SELF, IN_MOVE_SELF, IN_UNMOUNT, IN_IGNORED, and IN_Q_OVERFLOW: events were lost.
_FOLDER_GONE = 0x400 | 0x800 | 0x2000 | 0x8000 | 0x4000


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder as it is now, and what in it is waited for."""

    folder: Path
    name: bytes
    device: int
    inode: int


class FileWatch:
    """Wakes one waiting thread; `wake` and only that may be called by others."""

    def __init__(self, file: Path) -> None:
        """Begin to watch, if that is possible yet.

        Args:
            file: need not be there, nor its folder.
        """
        self._file = file
        self._library = ctypes.CDLL(None, use_errno=True)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._events: int | None = None
        self._watched: _Place | None = None
        self._renew()

    @property
    def watching(self) -> bool:
        """Whether the kernel tells; else waiting ends within `UNWATCHED_SECONDS`."""
        return self._events is not None

    def wait(self, seconds: float) -> None:
        """Wait until something may have happened to the file, `wake`, or the end of the time.

        Args:
            seconds: the longest time.
        """
        deadline = time.monotonic() + seconds
        if self._nearest() != self._watched:
            self._renew()
            if self.watching:
                # Whatever happened before the watch began has not been told.
                return
        if not self.watching:
            deadline = min(deadline, time.monotonic() + UNWATCHED_SECONDS)
        while (left := deadline - time.monotonic()) > 0:
            ready = self._poll.poll(left * 1000)
            for descriptor, _ in ready:
                if descriptor == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._woken)
                    return
                if self._concerned():
                    return

    def wake(self) -> None:
        """End the wait, or the next one."""
        os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """Watch no more; nobody may be waiting, nor call `wake` afterwards."""
        self._forget()
        os.close(self._woken)

    # -----------------------------------------------------------------------------------------

    def _nearest(self) -> _Place | None:
        """The folder that the file is in, or will be somewhere below."""
        name = self._file
        for folder in self._file.parents:
            try:
                about = folder.stat()
            except OSError:
                name = folder
                continue
            return _Place(folder, os.fsencode(name.name), about.st_dev, about.st_ino)
        return None

    def _renew(self) -> None:
        self._forget()
        place = self._nearest()
        if place is None:
            return
        descriptor = self._library.inotify_init1(_NONBLOCK_CLOEXEC)
        if descriptor < 0:
            return
        folder = os.fsencode(place.folder)
        if self._library.inotify_add_watch(descriptor, folder, ctypes.c_uint32(_MASK)) < 0:
            os.close(descriptor)
            return
        self._events, self._watched = descriptor, place
        self._poll.register(descriptor, select.POLLIN)

    def _forget(self) -> None:
        events, self._events, self._watched = self._events, None, None
        if events is not None:
            self._poll.unregister(events)
            os.close(events)

    def _concerned(self) -> bool:
        """Take the events that have come; whether the file, or the watch itself, is among them."""
        if self._events is None or self._watched is None:
            return True
        try:
            content = os.read(self._events, _READ_BYTES)
        except BlockingIOError:
            return False
        found, at = False, 0
        while at < len(content):
            _, mask, _, length = _EVENT.unpack_from(content, at)
            at += _EVENT.size
            name = content[at : at + length].rstrip(b"\0")
            at += length
            if mask & _FOLDER_GONE:
                self._forget()
                return True
            found = found or name == self._watched.name
        return found
