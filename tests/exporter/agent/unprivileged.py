"""Runs something with the rights that a unit of deploy/systemd gives, and no more.

`unprivileged.py UNIT probe PID FILE` says as JSON what those rights allow on another user's process
and file; `unprivileged.py UNIT gpuwarden WORD...` runs the program itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.cli import main
from gpuwarden.exporter.agent.handles import Handle, Identity
from gpuwarden.exporter.processes import executable_link, read_process

if TYPE_CHECKING:
    from collections.abc import Callable

USER = 4343
NUMBERS = {"CAP_DAC_OVERRIDE": 1, "CAP_DAC_READ_SEARCH": 2, "CAP_KILL": 5, "CAP_SYS_PTRACE": 19}
UNITS = Path(__file__).parents[3] / "deploy/systemd"

_KEEP_CAPABILITIES, _NO_NEW_PRIVILEGES, _DUMPABLE, _DROP_BOUNDING = 8, 38, 4, 24


def capabilities(unit: str) -> frozenset[int]:
    """Numbers of the capabilities that a unit gives."""
    for line in (UNITS / unit).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name == "AmbientCapabilities":
            return frozenset(NUMBERS[word] for word in value.split())
    raise LookupError(unit)


def give_up_all_but(kept: frozenset[int]) -> None:
    """Become the user, with these capabilities and no way to others, as systemd does it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), name)

    for number in range(64):
        if number not in kept:
            # There are fewer than 64 of them.
            libc.prctl(_DROP_BOUNDING, number, 0, 0, 0)
    call("prctl", _KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    mask = sum(1 << number for number in kept)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", header, (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0))
    call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # As after the exec by which systemd starts it.
    call("prctl", _DUMPABLE, 1, 0, 0, 0)


def probe(pid: int, file: Path) -> dict[str, bool]:
    """What may be done to a process and a file of somebody else's."""
    process = read_process(pid)
    assert process is not None
    handle = Handle.open(Identity.of(process))
    assert handle is not None
    tries: dict[str, Callable[[], object]] = {
        "sees whose it is": lambda: process.uid,
        "sees what it runs": lambda: executable_link(pid) or _refuse(),
        "sees what it read": lambda: Path(f"/proc/{pid}/io").read_bytes(),
        "sees its command line": lambda: Path(f"/proc/{pid}/cmdline").read_bytes() or _refuse(),
        "sees its files": file.read_bytes,
        "may signal it": partial(handle.send, 0),
        "may kill it by its pid": lambda: os.kill(pid, 0),
        "may write its files": lambda: file.open("ab").close(),
        "may become root": lambda: os.setresuid(0, 0, 0),
        "may become its user": lambda: os.setresuid(process.uid, process.uid, process.uid),
        "may give files away": lambda: os.chown(file, USER, USER),
        "may renice it": lambda: os.setpriority(os.PRIO_PROCESS, pid, -5),
        "may enter its namespaces": partial(_set_namespace, pid),
        "may signal init": lambda: os.kill(1, 0),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = True
        except OSError:
            found[name] = False
    return found


def _refuse() -> None:
    raise PermissionError


def _set_namespace(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    if libc.setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    signal.alarm(60)
    unit, what, *words = sys.argv[1:]
    give_up_all_but(capabilities(unit))
    if what == "probe":
        sys.stdout.write(json.dumps(probe(int(words[0]), Path(words[1]))))
    else:
        sys.argv = ["gpuwarden", *words]
        sys.exit(main())
