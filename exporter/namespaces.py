"""Whether pids mean here what they mean to the driver.

The driver names processes by the host's pids. In a PID namespace of its own the exporter would find
somebody else, or nobody, under them: then nobody is told who is on a card, and it says so.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwarden.exporter.processes import PROC

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.exporter.devices import DeviceSnapshot

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h

REMEDY = (
    "this is not the host's PID namespace, so that the driver's pids name nobody here: run the "
    "exporter on the host, or in a container with the host's (--pid=host, hostPID: true)"
)


def sees_host_pids(proc: Path = PROC) -> bool:
    """Whether /proc shows the processes that the driver speaks of.

    Args:
        proc: where procfs is mounted.
    """
    try:
        return (proc / "self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def without_names(devices: DeviceSnapshot) -> DeviceSnapshot:
    """The same cards, and as many processes on them, by pids that nobody has.

    Args:
        devices: as the driver names them.
    """
    nobody = itertools.count(-1, -1)
    return replace(
        devices,
        gpus=tuple(
            replace(
                gpu,
                processes=None
                if gpu.processes is None
                else tuple(replace(item, pid=next(nobody)) for item in gpu.processes),
            )
            for gpu in devices.gpus
        ),
    )
