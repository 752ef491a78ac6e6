"""Time as an argument: everything that waits or compares takes a clock, so that tests own time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: `wall` to talk to people and servers, `monotonic` to measure how long."""

    def wall(self) -> float:
        """Unix time in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        """Unix time in seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since boot, including time asleep: a suspended laptop must not freeze a deadline.

        Linux's CLOCK_BOOTTIME; `time.monotonic` stops in suspend.
        """
        return time.clock_gettime(time.CLOCK_BOOTTIME)
