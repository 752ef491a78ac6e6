"""Runs the scheduler's daemon with an engine that is played: what a unit's sandbox leaves of it.

`played_schedulers.py POLICY STATE SOCKET PORT`, in a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scheduling.daemons import PlayedDriver

from gpuwarden.scheduling.daemon import Daemon, Settings


async def run(policy: Path, state: Path, socket: Path, port: int) -> None:
    """Serve until a signal comes."""
    settings = Settings(
        policy=policy, state=state, listen=("127.0.0.1", port), socket=socket, tick_seconds=1.0
    )
    await Daemon(settings, opening=lambda _engine, read, _context: PlayedDriver(read)).run()


if __name__ == "__main__":
    policy, state, socket = (Path(word) for word in sys.argv[1:4])
    asyncio.run(run(policy, state, socket, int(sys.argv[4])))
