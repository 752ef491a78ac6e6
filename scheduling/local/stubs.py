"""The parent of one job: run as a script of its own, with nothing but the standard library.

It starts the job as its user, outlives the daemon, and writes down how the job ended, for whoever
attaches again cannot wait for a process that is not its child. What the job leaves behind comes to
it, and is ended after a while. It reads its orders as JSON from standard input:

    claim, record   files that it writes; the claim must not be there yet
    argv, environment, directory, log, user, uid, gid

The claim is the one moment that decides: whoever links it first, this program or a daemon that has
given the launch up, has won. Only behind it does the job begin.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

GIVEN_UP = "the launch was given up before it began"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LINGER_SECONDS = 3.0
"""How long what a job leaves behind may go on without it."""
_RETRY_SECONDS = 1.0
"""Between two tries to write how the job ended."""
OPEN_FILES = 65536
"""Files that a job may have open, where the host lets it: loader workers pass batches as files, and
1024 are soon used up."""
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE)


def main() -> int:
    """Read the orders, leave the daemon, start the job, and stay until nothing of it is left."""
    orders = json.load(sys.stdin)
    answer, told = os.pipe()
    if os.fork():
        os.close(told)
        with os.fdopen(answer, "rb") as lines:
            said = lines.read()
        sys.stdout.write(said.decode())
        return 0 if said.startswith(b"{") else 1
    os.close(answer)
    try:
        _supervise(orders, told)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the daemon is to hear of it)
        _say(told, f"{type(error).__name__}: {error}")
    os._exit(1)


def _supervise(orders: dict[str, Any], told: int) -> None:
    """Leave the daemon, start the job, tell of it, and stay until nothing of it is left."""
    os.setsid()
    os.chdir("/")
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not let a process adopt others")
    _detach()
    gate, go = os.pipe()
    failed, failure = os.pipe()
    job = os.fork()
    if job == 0:
        for other in (go, failed, told):
            os.close(other)
        _become(orders, gate, failure)
    os.close(gate)
    os.close(failure)
    claim = {
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "stub": [os.getpid(), _ticks(os.getpid())],
        "job": [job, _ticks(job)],
        "time": time.time(),
    }
    if not _claimed(orders["claim"], claim):
        os.close(go)
        os.waitpid(job, 0)
        raise RuntimeError(GIVEN_UP)
    os.write(go, b"g")
    os.close(go)
    # The daemon does not wait for the job's folder: one that hangs would keep everybody waiting.
    _say(told, json.dumps(claim))
    with os.fdopen(failed, "rb") as lines:
        error = lines.read().decode(errors="replace")  # ends when the job has become its program
    _watch(job, orders["record"], error)
    os._exit(0)


def _say(pipe: int, text: str) -> None:
    with contextlib.suppress(OSError):  # told already, or nobody listens any more
        os.write(pipe, text.encode())
        os.close(pipe)


def _detach() -> None:
    """Let go of the daemon's standard streams: it reads them to their end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def _become(orders: dict[str, Any], gate: int, failure: int) -> None:
    """Wait for the word, then become the user and the program."""
    try:
        if os.read(gate, 1) != b"g":
            os._exit(0)
        os.close(gate)
        os.setsid()
        # What is ignored or blocked, here or by whoever started the daemon, stays so in another
        # program.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _shed_limits()
        uid, gid = orders["uid"], orders["gid"]
        if os.geteuid() == 0 and uid != 0:
            os.initgroups(orders["user"], gid)
            os.setgid(gid)
            os.setuid(uid)
        os.umask(0o022)
        os.chdir(orders["directory"])
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        log = os.open(orders["log"], flags, 0o640)
        os.set_blocking(log, True)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        argv = orders["argv"]
        os.execvpe(argv[0], argv, orders["environment"])  # noqa: S606 (no shell is wanted)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the parent is to hear of it)
        os.write(failure, f"{error}".encode()[:4000] or b"unknown")
    os._exit(127)


def _shed_limits() -> None:
    """Give up what the daemon was given for itself, while there are rights to."""
    adjusted = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        if int(adjusted.read_text(encoding="ascii")) < 0:
            adjusted.write_text("0", encoding="ascii")
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _claimed(path: str, claim: dict[str, object]) -> bool:
    part = f"{path}.{os.getpid()}"
    _write(part, claim)
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        Path(part).unlink()
    _sync(path)
    return True


def _watch(job: int, record: str, error: str) -> None:
    """Wait for the job, write how it ended, and end what it left behind."""
    ended: dict[str, object] = {}
    deadline = float("inf")
    while True:
        try:
            pid, status = os.waitpid(-1, 0 if not ended else os.WNOHANG)
        except ChildProcessError:
            break
        if pid == job:
            ended = {"code": os.waitstatus_to_exitcode(status), "time": time.time()}
            if error:
                ended["error"] = error
            deadline = time.monotonic() + _LINGER_SECONDS
            _recorded(record, ended)
        elif pid == 0:
            if time.monotonic() >= deadline:
                _kill_children()
            time.sleep(0.1)
    _recorded(record, {**ended, "empty": time.time()})


def _recorded(record: str, ended: dict[str, object]) -> None:
    """Write how the job ended, as soon as that can be written: nobody else saw it.

    The daemon waits for it while this process is there; a folder that is gone for good is not
    waited for.
    """
    while Path(record).parent.is_dir():
        try:
            _replace(record, ended)
        except OSError:
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _kill_children() -> None:
    """Kill what has become our own children; their children come to us next."""
    me = os.getpid()
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and _parent(int(path.name)) == me:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)  # not reaped yet, so the number is its own


def _stat(pid: int) -> list[str]:
    """The fields of a process' stat line from the third on."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _ticks(pid: int) -> int:
    return int(_stat(pid)[19])


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace").strip()


def _write(path: str, document: dict[str, object]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: str, document: dict[str, object]) -> None:
    _write(f"{path}.part", document)
    Path(f"{path}.part").replace(path)
    _sync(path)


def _sync(path: str) -> None:
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


if __name__ == "__main__":
    sys.exit(main())
