"""A wall clock that somebody sets while notices run: what is to end by it is moved with it.

Deadlines are kept as times of day, so that they outlive the daemon; set forward, the clock would
end a job that was just asked, and set back it would let one stay for hours.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuwarden.clock import Clock
    from gpuwarden.scheduling.local.progress import RunFiles

CLOCK_SECONDS = 2.0
"""By so much between two looks a clock was set, and has not merely gone wrong."""


class ClockChanges:
    """Compares the wall clock with the one that nobody can set.

    Args:
        clock: both.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead = self._now_ahead()

    def _now_ahead(self) -> float:
        return self._clock.wall() - self._clock.monotonic()

    def moved(self) -> float:
        """Seconds by which the wall clock was set since the last call; 0 if it was not."""
        before, self._ahead = self._ahead, self._now_ahead()
        moved = self._ahead - before
        return moved if abs(moved) >= CLOCK_SECONDS else 0.0


def move_request(files: RunFiles, own: Collection[str], seconds: float) -> None:
    """Write a standing request anew with its deadline by the clock as it is now.

    Args:
        files: of the run.
        own: ids of requests that are ours to change.
        seconds: by which the clock was set.
    """
    standing = files.request()
    if standing is not None and standing.decision_id in own:
        later = dataclasses.replace(standing, leave_by=standing.leave_by + seconds)
        with contextlib.suppress(OSError):  # what it was told before stands
            files.ask(later)
