"""A driver of the tests' Slurm, without a daemon around it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from tests.servers import ServerFailed

from gpuwarden.scheduling.drivers import Context
from gpuwarden.scheduling.slurm.driver import open_driver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.slurm_servers import SlurmCluster

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


def hurry(box: SlurmCluster, job: int) -> None:
    """Let a job that came back start now: it waits until its credential has expired.

    Told again and again it would never start: each time its wait begins anew.
    """
    said = box.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "-O", "State,Reason")
    if said.split() == ["PENDING", "BeginTime"]:
        with contextlib.suppress(ServerFailed):  # it has begun meanwhile
            box.run("scontrol", "update", f"JobId={job}", "StartTime=now")
