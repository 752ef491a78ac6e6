"""A loop that stands still shows where: the stacks of all threads go to standard error.

The interpreter's own watchdog does it, which needs no lock of Python's and so also sees a thread
that holds it. It is wound up by the loop, as the heartbeat is.
"""

from __future__ import annotations

import faulthandler
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class StallWatch:
    """Dumps the stacks once the loop has not moved for a while; once for each stall.

    Args:
        seconds: after which; 0 for never.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._active = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, the loop is watched from its first beat on."""
        self._active = self._seconds > 0
        try:
            yield
        finally:
            if self._active:
                faulthandler.cancel_dump_traceback_later()
            self._active = False

    def beat(self) -> None:
        """The loop moved. Costs some microseconds: once a second is enough."""
        if self._active:
            faulthandler.dump_traceback_later(self._seconds, file=sys.__stderr__ or sys.stderr)
