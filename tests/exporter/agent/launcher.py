"""Stands for sshd or tmux: a process of its own, in nobody's tree, that starts jobs when told.

Reads one JSON list (an argv) per line and answers with the pid. Ends its children when its input
ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

NAME = "gw-launcher"


def main() -> None:
    """Leave the starter's tree, then serve."""
    if os.fork():
        os._exit(0)
    os.setsid()
    Path("/proc/self/comm").write_text(NAME)
    children: set[int] = set()

    def reap(_number: int, _frame: object) -> None:
        for pid in tuple(children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    children.discard(pid)

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        argv = json.loads(line)
        # A group of its own, as a shell gives each job.
        pid = os.posix_spawn(argv[0], argv, os.environ, setpgroup=0, setsigdef=[signal.SIGCHLD])
        children.add(pid)
        print(pid, flush=True)  # noqa: T201 (the answer)
    for pid in tuple(children):
        os.kill(pid, signal.SIGKILL)


main()
