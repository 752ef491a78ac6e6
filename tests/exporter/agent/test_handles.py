from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.servers import until

from gpuwarden.exporter.agent.handles import Group, Handle, Identity
from gpuwarden.exporter.processes import read_process

if TYPE_CHECKING:
    from tests.exporter.agent.nodes import Jobs


def identity(pid: int) -> Identity:
    """Who has a pid now."""
    process = read_process(pid)
    assert process is not None
    return Identity.of(process)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose a pid")
def test_a_pid_that_is_taken_over_is_not_hit(jobs: Jobs) -> None:
    """A handle means the process that was identified, also when another has its pid."""
    job = jobs.start("polite")
    held = Handle.open(identity(job.pid))
    assert held is not None
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{job.pid}").exists())
    newcomer = jobs.start("impostor", job.pid).pids[1]
    assert newcomer == job.pid
    assert held.ended
    assert held.send(signal.SIGKILL) is False
    assert Handle.open(held.identity) is None
    process = read_process(newcomer)
    assert process is not None
    assert not process.ended
    held.close()


def test_an_identity_is_compared_after_the_process_is_held(jobs: Jobs) -> None:
    """Another start, or another owner, is another process: it is not taken hold of."""
    own = identity(jobs.start("polite").pid)
    for other in (
        Identity(own.pid, own.start_ticks + 1, own.uid),
        Identity(own.pid, own.start_ticks, own.uid + 1),
    ):
        assert Handle.open(other) is None
    with Group() as group:
        assert group.add(own)
        assert group.alive() == (own,)
        assert group.send(signal.SIGKILL, [own]) == {own}
        until(lambda: not group.alive())
        assert group.send(signal.SIGTERM, [own]) == set()
        assert group.identities == (own,)
