"""What engines tell by a code reaches the numbers that alerts are about."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.scheduling.daemon_scenes import POLICY, WAITS
from tests.scheduling.daemons import running
from tests.scheduling.policy_files import NOW

from gpuwarden.schedule_api import EntryState, Problem
from gpuwarden.scheduling.drivers import LEAK, LOOP

if TYPE_CHECKING:
    from pathlib import Path


def test_loops_and_leaks_are_counted(tmp_path: Path) -> None:
    """A loop that is held by its entry, one that runs by its problem; of leaks each card."""
    with running(tmp_path, POLICY, now=NOW) as here:

        def shown(name: str) -> float:
            here.tick(5)
            lines = here.client.text("/metrics", {}).decode().splitlines()
            found = [line for line in lines if line.startswith(f"gpuwarden_scheduler_{name}")]
            return float(found[0].split()[-1])

        assert (shown("requeue_loops"), shown("quota_leak_gpus")) == (0.0, 0.0)
        here.driver.rows = tuple(
            replace(WAITS, id=str(number), state=EntryState.HELD, why=LOOP) for number in range(2)
        )
        here.driver.wrong = (Problem(LOOP, "7 and 8 are held.", NOW),)
        assert shown("requeue_loops") == 2.0
        here.driver.rows = ()
        assert shown("requeue_loops") == 1.0
        here.driver.wrong = tuple(
            Problem(LEAK, f"{count} cards are counted for a job.", NOW) for count in (3, 4)
        )
        assert shown("quota_leak_gpus") == 7.0
