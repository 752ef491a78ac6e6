"""What a process is, by its command line and the libraries it has loaded.

Command lines are only looked at: what leaves this module is a framework's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.exporter.job_servers import python_program
from gpuwarden.exporter.processes import PROC
from gpuwarden.exporter.yolo_commands import yolo_command

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["is_kernel", "loaded_framework", "yolo_command"]

MAX_MAPS_BYTES = 4 * 1024 * 1024
"""A training maps a few thousand files; what comes after this is not looked at."""

_KERNELS = frozenset(
    {"colab_kernel_launcher", "ipykernel", "ipykernel_launcher", "pydevconsole", "spyder_kernels"}
)
_KERNEL_PROGRAMS = frozenset({"xpython", "xpython-raw"})
_LIBRARIES = (
    ("torch", b"/libtorch"),
    ("tensorflow", b"/libtensorflow"),
    ("jax", b"/jaxlib/"),
)


def is_kernel(arguments: Sequence[str]) -> bool:
    """Whether a command line is a Jupyter kernel's, or a console's of an editor."""
    # Only the program: a notebook's own path may hold any word.
    program = python_program(arguments)
    if program.package in _KERNELS or program.name.removesuffix(".py") in _KERNELS:
        return True
    return bool(arguments) and arguments[0].rpartition("/")[2] in _KERNEL_PROGRAMS


def loaded_framework(pid: int, proc: Path = PROC) -> str:
    """The framework whose library a process has mapped, or an empty string.

    Reading the maps of a training takes about a millisecond: ask once per process.
    """
    try:
        with Path(proc, str(pid), "maps").open("rb") as file:
            content = file.read(MAX_MAPS_BYTES)
    except OSError:
        return ""
    for name, mark in _LIBRARIES:
        if mark in content:
            return name
    return ""
