"""Which part of a training this process is: alone, or one rank among several on this node.

The environment says it, as for every launcher (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_*`).
Ranks of gpuwarden's own launcher also keep a line to it: if it dies they save, leave, and are gone
after the grace; nothing that it started outlives it. No torch here: all of this comes before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer.leaving import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Mapping

LAUNCHER_VARIABLE = "GPUWARDEN_LAUNCHER"
"""Of a rank: `PID:LINE:STORE:GRACE`, see `Line`; STORE means something to rank 0 only."""
DEVICE_VARIABLE = "GPUWARDEN_RANK_DEVICE"
"""What `device` means to the rank, which sees no other card than its own."""

DURABLE = b"D"
"""A rank tells the launcher: a state of this run is on disk."""
HOLD = b"H"
"""A rank tells the launcher: who asked to leave wants the job held, not brought back."""

_PR_SET_PDEATHSIG = 1
_SAVED_IN_TIME = 2.0
"""How much earlier than the launcher's own patience ends that of its orphans, in seconds."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where among a training's processes this one is.

    Attributes:
        rank: 0 leads.
        world: processes of the training.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The place that a launcher gave this process, as ultralytics reads it.

        Raises:
            InvalidInput: the variables contradict one another, or name other nodes.
        """
        environ = os.environ if environ is None else environ
        try:
            world = int(environ.get("WORLD_SIZE") or 1)
            if world <= 1:
                return cls()
            rank = int(environ["RANK"])
            local = int(environ.get("LOCAL_RANK", rank))
            local_world = int(environ.get("LOCAL_WORLD_SIZE", world))
        except (KeyError, ValueError) as error:
            raise InvalidInput(
                f"the launcher's variables cannot be understood ({error}): unset RANK and "
                "WORLD_SIZE, and let gpuwarden train launch the ranks: device=0,1"
            ) from error
        if local_world != world or local != rank:
            raise InvalidInput(
                f"{world} ranks, {local_world} of them on this node: gpuwarden trains on the cards "
                "of one node; start it there with device=0,1,..."
            )
        if not 0 <= rank < world:
            raise InvalidInput(f"RANK={rank} is not one of WORLD_SIZE={world} ranks")
        return cls(rank, world)

    @property
    def leads(self) -> bool:
        """Whether this process speaks for the training: to the disk, the node and the user."""
        return self.rank == 0


def is_launched() -> bool:
    """Whether a launcher, ours or another, started this process as a rank."""
    return Place.of().world > 1


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends.

    Linux only; elsewhere nothing happens. It is lost by set-user-ID programs alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


class Line:
    """A rank's line to gpuwarden's launcher.

    Args:
        parent: pid of the launcher.
        connection: socket whose other end only the launcher holds.
        store: descriptor of the listening socket for the rendezvous, which rank 0 takes over.
        grace: seconds that ranks have to leave.
    """

    def __init__(self, parent: int, connection: socket.socket, store: int, grace: float) -> None:
        self.store, self.grace = store, grace
        self._parent, self._connection = parent, connection

    @classmethod
    def from_environment(cls) -> Self | None:
        """The line that the launcher left; None for a process that another one started."""
        # Taken out: a process that the training starts must not think itself a rank's equal.
        said = os.environ.pop(LAUNCHER_VARIABLE, None)
        if not said:
            return None
        try:
            parent, line, store, grace = said.split(":")
            connection = socket.socket(fileno=int(line))
            for descriptor in (int(line), int(store)):
                fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            return cls(int(parent), connection, int(store), float(grace))
        except (ValueError, OSError) as error:
            raise InvalidInput(
                f"${LAUNCHER_VARIABLE} is for gpuwarden's own use ({error}): unset it"
            ) from error

    def bind(self) -> None:
        """From now on this process ends with its launcher; signals held back until now arrive.

        Raises:
            SystemExit: the launcher is gone already.
        """
        die_with_parent(signal.SIGTERM)
        if os.getppid() != self._parent:
            raise SystemExit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=self._watch, name="gpuwarden-line", daemon=True).start()

    def tell(self, word: bytes) -> None:
        """Let the launcher know; that it may be gone is the watching thread's concern."""
        with contextlib.suppress(OSError):
            self._connection.send(word, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while self._connection.recv(64):
                pass
        # What is said went through the launcher: a broken pipe must not end a rank that saves.
        with Path(os.devnull).open("wb") as nowhere:
            for descriptor in (1, 2) if Place.of().rank else (2,):
                os.dup2(nowhere.fileno(), descriptor)
        # SIGTERM has come by the kernel; the main thread may wait for good for a peer, though.
        threading.Event().wait(max(0.0, self.grace - _SAVED_IN_TIME))
        os.killpg(os.getpgid(0), signal.SIGKILL)


_line: Line | None = None


def bind() -> Line | None:
    """Take up the line to gpuwarden's launcher, if one started this process.

    To be called once the signals are handled: until then the launcher holds them back.
    """
    global _line  # noqa: PLW0603 -- a process has one parent
    if _line is None:
        line = Line.from_environment()
        if line is not None:
            line.bind()
            _line = line
    return _line


def line() -> Line | None:
    """The line to gpuwarden's launcher, or None."""
    return _line


def tell(word: bytes) -> None:
    """Let gpuwarden's launcher know, if there is one."""
    if _line is not None:
        _line.tell(word)
