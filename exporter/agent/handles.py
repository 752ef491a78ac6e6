"""Processes held by their pidfd: what is signalled is what was identified, whatever pids do.

A pidfd is opened first and the identity compared afterwards. From then on the descriptor means that
very process: a pid that is reused meanwhile cannot be hit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gpuwarden.exporter.processes import PROC, read_process

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from gpuwarden.exporter.processes import Process


@dataclass(frozen=True, slots=True)
class Identity:
    """A process on one boot, and whose it is.

    Attributes:
        pid: in the node's PID namespace.
        start_ticks: clock ticks from boot to its start.
        uid: its real user id.
    """

    pid: int
    start_ticks: int
    uid: int

    @classmethod
    def of(cls, process: Process) -> Self:
        """The identity of a process as /proc showed it."""
        return cls(process.pid, process.start_ticks, process.uid)

    @property
    def key(self) -> tuple[int, int]:
        """(pid, start ticks)."""
        return (self.pid, self.start_ticks)


class Wake:
    """Ends every wait of the agent's threads at once, when the agent itself has to stop."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._set = False

    def fileno(self) -> int:
        """Readable from `set` on."""
        return self._descriptor

    @property
    def is_set(self) -> bool:
        """Whether the agent is stopping."""
        return self._set

    def set(self) -> None:
        """Wake everything that waits, now and from now on."""
        self._set = True
        os.eventfd_write(self._descriptor, 1)

    def wait(self, seconds: float) -> bool:
        """Wait for `set`, at most so long; says whether it is set."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)
        return self._set


class Handle:
    """One process, held by its pidfd until `close`."""

    def __init__(self, identity: Identity, descriptor: int) -> None:
        self.identity = identity
        self._descriptor = descriptor

    @classmethod
    def open(cls, identity: Identity, proc: Path = PROC) -> Self | None:
        """Take hold of a process.

        Returns:
            The handle, or None if the process is gone or its pid or owner is another's now.

        Raises:
            OSError: the process exists but cannot be opened, such as with too many open files.
        """
        try:
            descriptor = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return None
        try:
            found = read_process(identity.pid, proc)
        except BaseException:
            os.close(descriptor)
            raise
        if found is None or Identity.of(found) != identity:
            os.close(descriptor)
            return None
        return cls(identity, descriptor)

    def fileno(self) -> int:
        """Readable once the process has ended."""
        return self._descriptor

    @property
    def ended(self) -> bool:
        """Whether all its threads have ended; a zombie has."""
        if self._descriptor < 0:
            return True
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def send(self, number: signal.Signals | int) -> bool:
        """Signal the process; 0 only asks whether that would be allowed.

        Returns:
            False if it has ended.

        Raises:
            PermissionError: the agent may not signal it.
        """
        if self._descriptor < 0:
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Let go of the process."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Group:
    """The processes of one action, by identity; those that ended stay known."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._handles: dict[tuple[int, int], Handle] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all."""
        for handle in self._handles.values():
            handle.close()

    def add(self, identity: Identity) -> bool:
        """Take hold of one more process; False if it is gone, True also if it was known.

        Raises:
            OSError: as `Handle.open`.
        """
        if identity.key in self._handles:
            return True
        handle = Handle.open(identity, self._proc)
        if handle is None:
            return False
        self._handles[identity.key] = handle
        return True

    @property
    def identities(self) -> tuple[Identity, ...]:
        """All that were ever added, in that order."""
        return tuple(handle.identity for handle in self._handles.values())

    def knows(self, key: tuple[int, int]) -> bool:
        """Whether (pid, start ticks) was ever added."""
        return key in self._handles

    def alive(self) -> tuple[Identity, ...]:
        """Those that have not ended; the descriptors of the others are given back."""
        living = []
        for handle in self._handles.values():
            if handle.ended:
                handle.close()
            else:
                living.append(handle.identity)
        return tuple(living)

    def send(self, number: signal.Signals, identities: Iterable[Identity]) -> set[Identity]:
        """Signal members; says which of them were there and could be signalled."""
        reached = set()
        for identity in identities:
            handle = self._handles.get(identity.key)
            # Without the right to signal one, the others are still signalled: what survives is
            # found by looking, not by trusting this.
            with contextlib.suppress(PermissionError):
                if handle is not None and handle.send(number):
                    reached.add(identity)
        return reached

    def may_signal(self, identity: Identity) -> bool:
        """Whether the agent has the right to signal a member; True if it has ended."""
        handle = self._handles.get(identity.key)
        try:
            return handle is None or handle.send(0) or True
        except PermissionError:
            return False

    def wait(self, seconds: float, wake: Wake) -> None:
        """Return when one more member has ended, on `wake`, or after so many seconds."""
        poller = select.poll()
        poller.register(wake.fileno(), select.POLLIN)
        for handle in self._handles.values():
            if handle.fileno() >= 0:
                poller.register(handle.fileno(), select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)
