"""Jobs for the agent to end: `workloads.py KIND REPORT` does what KIND says.

The report, a JSON list of the tree's pids with the root first, is there once the job is set up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

REPORT = Path(sys.argv[2])


def report(*pids: int) -> None:
    """Say that the tree stands."""
    new = REPORT.with_suffix(".new")
    new.write_text(json.dumps([os.getpid(), *pids]))
    new.replace(REPORT)


def idle() -> None:
    """Do nothing, long enough for any test."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        time.sleep(1)


def deaf() -> None:
    """Ignore what asks to leave."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def child(*, session: bool = False, ignore: bool = True) -> int:
    """Start a child that idles; whether it ignores SIGTERM is settled before it exists."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()
        idle()
        os._exit(0)
    signal.signal(signal.SIGTERM, before)
    return pid


def named_child(name: str) -> int:
    """Start a child with a name of its own."""
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    comm.write_text(name)
    pid = child()
    comm.write_text(before)
    return pid


def daemon() -> int:
    """Start a grandchild that leaves the tree, its group and its session."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        grandchild = child(session=True)
        os.write(write, str(grandchild).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 32))


def polite() -> None:
    """Leave on SIGTERM, as a process without a handler does."""
    report()
    idle()


def saver() -> None:
    """Save on SIGTERM, with a child's help, then leave."""

    def save(_number: int, _frame: object) -> None:
        helper = os.fork()
        if helper == 0:
            time.sleep(0.3)
            REPORT.with_suffix(".saved").write_text("state")
            os._exit(0)
        os.waitpid(helper, 0)
        os._exit(75)

    signal.signal(signal.SIGTERM, save)
    report()
    idle()


def stubborn() -> None:
    """Ignore SIGTERM."""
    deaf()
    report()
    idle()


def family() -> None:
    """A notebook kernel and its children, one in a session of its own; all ignore SIGTERM."""
    deaf()
    report(child(), child(session=True))
    idle()


def deserted() -> None:
    """Leave on SIGTERM, but not the children, one in a session of its own."""
    report(child(), child(session=True))
    idle()


def service() -> None:
    """Two children, the first one named gw-service."""
    report(named_child("gw-service"), child())
    idle()


def server(*, opens: bool) -> int:
    """Start what looks like a notebook server; it `opens` another job at once, or on SIGTERM."""

    def open_job(_number: int, _frame: object) -> None:
        if os.fork() == 0:
            Path("/proc/self/comm").write_text("python")
            new = REPORT.with_suffix(".newer")
            new.write_text(str(os.getpid()))
            new.replace(REPORT.with_suffix(".opened"))
            idle()
        os._exit(0)

    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.read(read, 1)
        return pid
    os.setsid()
    Path("/proc/self/comm").write_text("jupyter-lab")
    if opens:
        child()
    signal.signal(signal.SIGTERM, open_job)
    os.write(write, b"x")
    idle()
    os._exit(0)


def carrier() -> None:
    """A server below that has started another job."""
    report(server(opens=True))
    idle()


def opener() -> None:
    """A server below that starts another job when it is asked to leave."""
    report(server(opens=False))
    idle()


def daemoniser() -> None:
    """A child that no longer belongs to the tree."""
    deaf()
    report(daemon())
    idle()


def rootless() -> None:
    """Leave behind a worker that holds the card."""
    left = daemon()
    report(left)
    idle()


def forker() -> None:
    """Beget children faster than anybody can look, each in a session of its own."""
    deaf()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    report()
    living = 0
    while True:
        if living < 200 and os.fork() == 0:
            os.setsid()
            idle()
            os._exit(0)
        living += 1
        time.sleep(0.002)


def relay() -> None:
    """On SIGTERM every process first begets its successor, and is gone before it."""

    def pass_on(_number: int, _frame: object) -> None:
        if os.fork():
            os._exit(0)

    signal.signal(signal.SIGTERM, pass_on)
    report()
    idle()


def stopped() -> None:
    """Stopped as by Ctrl-Z, with a handler that needs to run."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(75))
    report()
    os.kill(os.getpid(), signal.SIGSTOP)
    idle()


def headless() -> None:
    """The first thread is gone, another one holds the process; its child holds the card."""
    import ctypes  # noqa: PLC0415 (slow, and only needed here)
    import threading  # noqa: PLC0415

    deaf()
    pids = (child(),)
    threading.Thread(target=idle).start()
    report(*pids)
    ctypes.CDLL(None).pthread_exit(None)


def other_user() -> None:
    """A child that belongs to somebody else."""
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        idle()
        os._exit(0)
    report(pid)
    idle()


globals()[sys.argv[1]]()
