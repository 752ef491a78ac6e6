"""Rates that are kept to: so many at once, and so many per second after that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwarden.clock import Clock


class Bucket:
    """Tokens that fill up with time.

    Args:
        per_second: how many come back.
        most: how many there are at first, and at most.
        clock: monotonic time.
    """

    def __init__(self, per_second: float, most: float, clock: Clock) -> None:
        self._per_second, self._most, self._clock = per_second, most, clock
        self._left, self._at = most, clock.monotonic()

    def take(self) -> bool:
        """Take one, if there is one."""
        now = self._clock.monotonic()
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
