"""A driver of the tests' Slurm, without a daemon around it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from gpuwarden.scheduling.drivers import Context
from gpuwarden.scheduling.slurm.driver import open_driver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.driver import SlurmDriver


class WallClock:
    """The machine's time, and as much more as a test wants."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def wall(self) -> float:
        """Unix time."""
        return time.time() + self.ahead

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic() + self.ahead


@contextlib.contextmanager
def a_driver(policy: Policy, state: Path, clock: WallClock | None = None) -> Iterator[SlurmDriver]:
    """A driver that has started."""
    used = clock or WallClock()
    driver = open_driver(policy, Context(state=state, clock=used, wake=lambda: None))
    try:
        driver.start(used.wall())
        yield driver
    finally:
        driver.stop()
