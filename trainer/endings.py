"""How the process of `gpuwarden train` ends once its word is given: without being taken apart.

A training that leaves for another has its state on disk within a step, and then the interpreter
takes seconds to give torch's modules back, one by one, while the card stays held. All that has a
meaning is done before that: other threads have ended, whoever registered for the exit was called
(experiment trackers, loader workers, temporary folders), and what files hold back is written.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import os
import sys
from pathlib import Path

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""What plain files are made of, the outer before the inner."""
_PROFILED = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Set where a profiler is in the process, which writes its report when the process is torn down."""


class Ending:
    """The end of this process, if it is that of the command and of nobody else's program.

    To be made before torch is imported: whoever registers for the exit later is called first.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        if _is_commands_own() and not _is_watched():
            atexit.register(self._end)

    def settle(self, status: int) -> None:
        """The command ends with this status; nothing but the process's end is to come."""
        self._status = status

    def _end(self) -> None:
        if self._status is None:
            return  # an error is on its way out, and is told by the interpreter as always
        logging.shutdown()
        flush_all()
        os._exit(self._status)


def _is_commands_own() -> bool:
    """Whether the process was started for the command, and is no script or notebook that calls it.

    `python -m gpuwarden`, or the console script of that name.
    """
    program = sys.modules.get("__main__")
    spec = getattr(program, "__spec__", None)
    if spec is not None:
        return bool(spec.name == "gpuwarden.__main__")
    return Path(getattr(program, "__file__", None) or "").name == "gpuwarden"


def _is_watched() -> bool:
    """Whether somebody else waits for the interpreter's whole end: debugger, coverage, profiler."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if monitoring is not None and any(monitoring.get_tool(number) for number in range(6)):
        return True
    return any(name in os.environ for name in _PROFILED)


def flush_all() -> None:
    """Write what plain files hold back, also those that nobody closed, and those of libraries."""
    held: dict[type, list[io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom]]
    held = {kind: [] for kind in _BUFFERED}
    for thing in gc.get_objects():
        if type(thing) in held:
            held[type(thing)].append(thing)
    for kind in _BUFFERED:
        for file in held[kind]:
            # Closed, its reader gone, its disk full: a status that is decided is not changed by it.
            with contextlib.suppress(OSError, ValueError):
                file.flush()
    ctypes.CDLL(None).fflush(None)
