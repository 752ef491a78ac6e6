"""Telling a job that was ended and came back from another one.

Whoever restarts what was ended (a supervisor, a shell's loop, a user) would have it ended again and
again, and its work of each time with it. A job is taken for the same one come back if the same user
runs the same command line below the very same process, and began after the other one's end did.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.processes import (
    CLOCK_TICKS,
    PROC,
    boot_id,
    read_arguments,
    read_process,
)

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.exporter.agent.handles import Identity


class Origins:
    """Says where jobs come from. Safe for threads."""

    def __init__(self, proc: Path = PROC) -> None:
        """Know nobody.

        Args:
            proc: where procfs is mounted.
        """
        self._proc = proc
        self._calls = BlockingCalls()
        self._lock = threading.Lock()

    def of(self, root: Identity | None) -> str:
        """A name for user, command line and starter of a job, which tells none of them.

        Returns:
            The name, or an empty string where the root is gone or cannot be looked at: what is not
            known is the same as nothing.
        """
        if root is None:
            return ""
        try:
            process = read_process(root.pid, self._proc)
            parent = None if process is None else read_process(process.ppid, self._proc)
        except OSError:
            return ""
        if process is None or process.start_ticks != root.start_ticks or parent is None:
            return ""
        with self._lock:
            line = self._calls.make(root.uid, lambda: read_arguments(root.pid, self._proc))
        if not line:
            return ""
        name = f"{root.uid} {parent.pid} {parent.start_ticks} ".encode() + line
        return hashlib.blake2b(name, key=boot_id(self._proc).encode(), digest_size=16).hexdigest()


def began_after(root: Identity, moment: float) -> bool:
    """Whether a process started after a moment, in seconds since boot."""
    return root.start_ticks / CLOCK_TICKS > moment
