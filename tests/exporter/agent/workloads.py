"""Jobs for the agent to end: `workloads.py KIND REPORT [ARGUMENT...]` does what KIND says.

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
    new = REPORT.with_name(f"{REPORT.name}.{os.getpid()}")
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


def tenant() -> None:
    """A process of another user's, which is a job of its own."""

    def work(ready) -> None:
        os.setgroups([])
        os.setgid(4242)
        os.setuid(4242)
        ready()

    report(begotten(work))
    idle()


def other_user() -> None:
    """A child that belongs to somebody else."""
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        idle()
        os._exit(0)
    report(pid)
    idle()


def named(name: str) -> None:
    """Take a name, as a program of that name has it."""
    Path("/proc/self/comm").write_text(name)


def begotten(work, *, session: bool = True) -> int:
    """Start a child that does some work, and wait until it is set up."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()
        work(lambda: os.write(write, b"x"))
        idle()
        os._exit(0)
    os.read(read, 1)
    return pid


def listener() -> None:
    """Note SIGTERM, and follow the leave request when the step is over."""
    noted: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
    request = Path(sys.argv[3])
    report()
    while not (noted and request.exists()):
        time.sleep(0.02)
    REPORT.with_suffix(".saved").write_text("state")
    os._exit(75)


def orphaned() -> None:
    """A grandchild whose parent is a zombie that nobody waits for."""
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.write(write, str(child()).encode())
        os._exit(0)
    orphan = int(os.read(read, 32))
    while Path(f"/proc/{middle}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    report(orphan)
    idle()


def container() -> None:
    """A container's first process, which SIGTERM does not reach, and a child of it."""
    import ctypes  # noqa: PLC0415 (slow, and only needed here)

    def first(ready) -> None:
        child()
        ready()

    new_pids, new_mounts = 0x20000000, 0x00020000
    if ctypes.CDLL(None, use_errno=True).unshare(new_pids | new_mounts):
        raise OSError(ctypes.get_errno(), "unshare")
    pid = begotten(first)
    inner = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    report(pid, *map(int, inner))
    idle()


def shut_in() -> None:
    """See the given folder otherwise than the node, in the given way."""
    import ctypes  # noqa: PLC0415 (slow, and only needed here)

    folder, way = Path(sys.argv[3]), sys.argv[4]
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, bind, read_only = 0x00020000, 0x44000, 0x1000, 0x1

    def mount(source: str, target: Path, kind: str, flags: int) -> None:
        given = (source.encode(), os.fsencode(target), kind.encode(), flags, None)
        if libc.mount(*given):
            raise OSError(ctypes.get_errno(), f"mount {target}")

    def inside(ready) -> None:
        if libc.unshare(new_mounts):
            raise OSError(ctypes.get_errno(), "unshare")
        mount("none", Path("/"), "none", private)
        match way:
            case "mounted":
                mount(str(folder), folder, "none", bind)
                mount("none", folder, "none", bind | 0x20 | read_only)
            case "other":
                mount("none", folder, "tmpfs", 0)
            case "link":
                real = folder.with_name("real")
                real.mkdir()
                mount(str(folder), real, "none", bind)
                mount("none", folder.parent, "tmpfs", 0)
                folder.symlink_to(f"/proc/{os.getppid()}/root{folder}")
            case "missing":
                mount("none", folder.parent, "tmpfs", 0)
            case "chroot":
                os.chroot(REPORT.parent)
        ready()

    report(begotten(inside))
    idle()


def loaders() -> None:
    """A training with four workers of a DataLoader, that ignore SIGTERM as its workers do."""
    report(*(child() for _ in range(4)))
    idle()


def ranks() -> None:
    """A launcher as torchrun: two ranks in sessions of their own, which it asks to leave."""
    pids = [child(session=True, ignore=False) for _ in range(2)]

    def forward(_number: int, _frame: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        for pid in pids:
            os.waitpid(pid, 0)
        os._exit(143)

    signal.signal(signal.SIGTERM, forward)
    report(*pids)
    idle()


def changer() -> None:
    """Become another program on SIGTERM, one that ignores it."""

    def change(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.execv("/bin/sleep", ["/bin/sleep", "600"])  # noqa: S606 (what a job may do)

    signal.signal(signal.SIGTERM, change)
    report()
    idle()


def turncoat() -> None:
    """Become somebody else's process on SIGTERM, and stay."""

    def change(_number: int, _frame: object) -> None:
        os.setuid(65534)

    signal.signal(signal.SIGTERM, change)
    report()
    idle()


def emigrant() -> None:
    """Move to the given cgroup on SIGTERM, and beget children there."""

    def move(_number: int, _frame: object) -> None:
        Path(sys.argv[3], "cgroup.procs").write_text(str(os.getpid()))
        child()
        child(session=True)

    signal.signal(signal.SIGTERM, move)
    report()
    idle()


def hosted() -> None:
    """A program of the given name, and two jobs that it starts in sessions of their own."""
    named(sys.argv[3])

    def job(ready) -> None:
        named("python")
        ready()

    report(begotten(job), begotten(job))
    idle()


def notebooks() -> None:
    """Become `python -m jupyterlab`, with two kernels `python -m ipykernel_launcher`."""
    folder = REPORT.with_suffix(".modules")
    folder.mkdir()
    for module, kind in (("jupyterlab", "notebook_server"), ("ipykernel_launcher", "polite")):
        content = f"""import runpy, sys
sys.argv[:1] = [{__file__!r}, {kind!r}]
runpy.run_path({__file__!r})
"""
        (folder / f"{module}.py").write_text(content)
    os.environ["PYTHONPATH"] = str(folder)
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", str(REPORT)])  # noqa: S606 (as a shell does)


def notebook_server() -> None:
    """What `notebooks` becomes."""
    reports = [REPORT.with_suffix(f".kernel{number}") for number in range(2)]
    kernels = [
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "ipykernel_launcher", str(path)],
            os.environ,
            setsid=True,
        )
        for path in reports
    ]
    while not all(path.exists() for path in reports):
        time.sleep(0.02)
    report(*kernels)
    idle()


def respawner() -> None:
    """Something that starts jobs, and starts its one job again whenever that ends."""
    named("supervisord")
    words = [*sys.orig_argv[:3], __file__, "polite", str(REPORT.with_suffix(".job"))]
    while True:
        pid = os.posix_spawn(words[0], words, os.environ)
        report(pid)
        os.waitpid(pid, 0)


def posing() -> None:
    """A process of the given name."""
    named(sys.argv[3])
    report()
    idle()


def tracer() -> None:
    """A debugger that holds the given process stopped."""
    import ctypes  # noqa: PLC0415 (slow, and only needed here)

    attach, pid = 16, int(sys.argv[3])
    if ctypes.CDLL(None, use_errno=True).ptrace(attach, pid, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0)
    report()
    idle()


def impostor() -> None:
    """A child that is given the pid of a process that is gone."""
    import ctypes  # noqa: PLC0415 (slow, and only needed here)

    class Arguments(ctypes.Structure):
        """clone3's."""

        _fields_ = [(name, ctypes.c_uint64) for name in (
            "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size",
            "tls", "set_tid", "set_tid_size", "cgroup",
        )]  # fmt: skip

    wanted = ctypes.c_int(int(sys.argv[3]))
    asked = Arguments(exit_signal=signal.SIGCHLD, set_tid=ctypes.addressof(wanted), set_tid_size=1)
    clone3 = 435
    pid = ctypes.CDLL(None, use_errno=True).syscall(
        clone3, ctypes.byref(asked), ctypes.sizeof(asked)
    )
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone3")
    if pid == 0:
        idle()
        os._exit(0)
    report(pid)
    idle()


globals()[sys.argv[1]]()
