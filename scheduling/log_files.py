"""The end of a job's log: a file that its user writes, and whoever may read it opens."""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from typing import TYPE_CHECKING, BinaryIO

from gpuwarden.errors import RefusedAction, ServiceUnavailable

if TYPE_CHECKING:
    from pathlib import Path

MAX_LINES = 10_000
_MAX_BYTES = 8 * 1024 * 1024
"""Of the file's end that lines are looked for in."""
_ORDERS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
"""What a terminal is told: colours, and to clear the rest of its line (ECMA-48, CSI)."""


def opened_log(path: Path) -> BinaryIO:
    """Open a log to be read; devices, pipes and links are refused, and nothing is waited for.

    Raises:
        ServiceUnavailable: the job has written nothing yet.
        RefusedAction: it may not be read, or is no plain file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ServiceUnavailable(f"{path} is not there: the job has not begun yet") from error
    except OSError as error:
        raise RefusedAction("log", f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RefusedAction("log", f"{path} is no plain file")
    return os.fdopen(handle, "rb")


def last_lines(file: BinaryIO, count: int) -> list[str]:
    """The last lines of a file, which is at its end afterwards.

    Args:
        file: to read.
        count: how many; fewer where they are very long.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_BYTES))
    found = deque(file.read().removesuffix(b"\n").split(b"\n"), maxlen=count)
    return [shown_line(line) for line in found]


def shown_line(line: bytes) -> str:
    """A line as a terminal would leave it: without colours, and of a progress bar how it ended."""
    ended = line.rstrip(b"\r\n").rsplit(b"\r", 1)[-1]
    return _ORDERS.sub(b"", ended).decode(errors="replace")
