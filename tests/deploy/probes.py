"""What a confined program can do: tries each thing, and prints as JSON which ones succeeded.

`probes.py PID FILE WRITABLE`: another user's process, another user's file, a folder of one's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def _socket(family: int, kind: int = socket.SOCK_DGRAM, protocol: int = 0) -> None:
    socket.socket(family, kind, protocol).close()


def _ptrace(pid: int) -> None:
    _call("ptrace", 0x4206, pid, None, None)  # PTRACE_SEIZE


def _read_memory(pid: int) -> None:
    there = Path(f"/proc/{pid}/maps").read_text("utf-8").split("-", 1)[0]
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        memory.seek(int(there, 16))
        memory.read(1)


def _write_memory(pid: int) -> None:
    with Path(f"/proc/{pid}/mem").open("r+b"):
        pass


def _vm_read(pid: int) -> None:
    there = int(Path(f"/proc/{pid}/maps").read_text("utf-8").split("-", 1)[0], 16)
    held = ctypes.create_string_buffer(1)
    local = (ctypes.c_void_p * 2)(ctypes.addressof(held), 1)
    remote = (ctypes.c_void_p * 2)(there, 1)
    _call("process_vm_readv", pid, local, 1, remote, 1, 0)


def _write(path: str | Path) -> None:
    path = Path(path)
    path.write_text("x", "utf-8")
    path.unlink()


def _setuid_file(folder: Path) -> None:
    path = folder / "setuid"
    path.touch()
    path.chmod(0o4755)
    if not path.stat().st_mode & 0o4000:
        raise PermissionError
    path.unlink()


def _real_time() -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _become_root() -> None:
    found = subprocess.run(
        ["/bin/su", "-c", "id -u"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if found.stdout.strip() != b"0":
        raise PermissionError


def _sees(pid: int) -> None:
    Path(f"/proc/{pid}/stat").read_bytes()


def tries(pid: int, file: Path, own: Path) -> dict[str, Callable[[], object]]:
    """Every attempt by its name."""
    return {
        "write its own folder": partial(_write, own / "mine"),
        "write /etc": partial(_write, "/etc/gpuwarden-probe"),
        "write /usr": partial(_write, "/usr/gpuwarden-probe"),
        "write /opt": partial(_write, "/opt/gpuwarden-probe"),
        "write its program": partial(_write, Path(__file__).with_name("probe")),
        "write /root": partial(_write, "/root/gpuwarden-probe"),
        "write /proc/sys": lambda: Path("/proc/sys/kernel/core_pattern").open("r+b").close(),
        "read another's file": file.read_bytes,
        "write another's file": lambda: file.open("ab").close(),
        "see another's process": partial(_sees, pid),
        "see what another runs": lambda: Path(f"/proc/{pid}/exe").readlink(),
        "trace another": partial(_ptrace, pid),
        "read another's memory": partial(_read_memory, pid),
        "write another's memory": partial(_write_memory, pid),
        "read another's memory at once": partial(_vm_read, pid),
        "signal another": lambda: os.kill(pid, 0),
        "signal init": lambda: os.kill(1, 0),
        "become root": lambda: os.setresuid(0, 0, 0),
        "become root by su": _become_root,
        "make a namespace": partial(_call, "unshare", 0x10000000),
        "enter another's namespace": lambda: _enter(pid),
        "make a setuid file": partial(_setuid_file, own),
        "open a raw socket": partial(_socket, socket.AF_INET, socket.SOCK_RAW, 1),
        "open a packet socket": partial(_socket, socket.AF_PACKET, socket.SOCK_RAW),
        "open a netlink socket": partial(_socket, socket.AF_NETLINK, socket.SOCK_RAW),
        "open an internet socket": partial(_socket, socket.AF_INET),
        "open a unix socket": partial(_socket, socket.AF_UNIX),
        "set the clock": lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()),
        "name the host": partial(_call, "sethostname", b"probe", 5),
        "change the personality": partial(_call, "personality", 0x0040000),
        "run in real time": _real_time,
        "load a program into the kernel": partial(_call, "syscall", 321, 0, None, 0),  # bpf
        "read the kernel's log": partial(_call, "klogctl", 3, ctypes.create_string_buffer(64), 64),
        "load a module": partial(_call, "syscall", 313, -1, b"", 0),  # finit_module
        "restart the machine": partial(_call, "syscall", 169, 0, 0, 0, None),  # wrong magic
        "start a program": lambda: subprocess.run(["/bin/true"], check=True),
        # Last: where it succeeds it hides what was there.
        "mount": partial(_call, "mount", b"none", b"/tmp", b"tmpfs", 0, None),
    }


def _enter(pid: int) -> None:
    descriptor = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    _call("setns", descriptor, 0)


def main() -> None:
    """Try everything."""
    signal.alarm(60)
    pid, file, own = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    found = [name for name, attempt in tries(pid, file, own).items() if _works(attempt)]
    sys.stdout.write(json.dumps(found))


def _works(attempt: Callable[[], object]) -> bool:
    """Whether an attempt succeeds, in a process of its own: none changes what others find."""
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except (OSError, subprocess.SubprocessError):
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
