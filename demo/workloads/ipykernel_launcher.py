"""A crashed notebook's kernel: it holds its GPU memory and does nothing, not even leave.

It has the command line of a real kernel (`python -m ipykernel_launcher -f kernel-....json`) and two
children, as notebooks do that used multiprocessing; one of them in a session of its own, where a
signal to the process group does not reach it.
"""

import signal
import subprocess
import sys
import time


def ignore_and_wait() -> None:
    """Wait for ever; SIGTERM is ignored, as by a kernel stuck in native code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        signal.pause()


CHILD = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""


def main() -> None:
    """Start the children, say so, and stop doing anything."""
    for own_session in (False, True):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdout=subprocess.PIPE,
            start_new_session=own_session,
            text=True,
        )
        if child.stdout is not None:
            child.stdout.readline()
    sys.stdout.write(f"kernel started {time.time():.0f}\n")
    sys.stdout.flush()
    ignore_and_wait()


if __name__ == "__main__":
    main()
