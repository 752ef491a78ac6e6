"""Where a task's states will lie, and whether its next attempt finds them there. Pure.

What a machine mounts there says: memory and folders for passing things are emptied by a reboot, a
disk of one node is out of sight of the others. States that are uploaded besides come back anyway.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.scheduling.tasks import Task

MOUNTS: Final = Path("/proc/self/mountinfo")
_MOST_BYTES: Final = 4 * 1024 * 1024
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_OF_A_DISK: Final = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "bcachefs",
        "overlay",
        "jfs",
        "reiserfs",
    }
)
_PASSING: Final = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - names, nothing is opened
REMEDY: Final = "say project=FOLDER on storage that lasts, or keep states besides with -- --upload"


class Kind(StrEnum):
    """What becomes of a folder's files."""

    LASTING = "lasting"
    """Every node sees them, as far as can be told."""
    OF_ONE_NODE = "of one node"
    PASSING = "passing"
    """A reboot, or a cleaner of such folders, takes them."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system of this machine.

    Attributes:
        point: where it is mounted.
        system: its type, such as ext4 or nfs4.
    """

    point: str
    system: str


def mounts_here(path: Path = MOUNTS) -> tuple[Mount, ...]:
    """What this process sees mounted; nothing where that cannot be read."""
    try:
        with path.open("rb") as file:
            return read_mounts(file.read(_MOST_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ()


def read_mounts(text: str) -> tuple[Mount, ...]:
    """Read /proc/PID/mountinfo (proc(5)); lines that are none are left out."""
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if dash and len(fields) >= 6:
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            found.append(Mount(point, after.split(" ")[0]))
    return tuple(found)


def states_folder(task: Task) -> str:
    """The folder in which a task's run has its own, by its words."""
    said = task.word("save_dir") or task.word("project") or "runs"
    return posixpath.normpath(posixpath.join(task.directory, said))


def is_uploaded(task: Task) -> bool:
    """Whether its states are kept somewhere else besides."""
    return any(option.startswith("--upload=") for option in task.options)


def kind_of(folder: str, mounts: Iterable[Mount]) -> tuple[Kind, str]:
    """What becomes of a folder's files, and the type of its file system; empty: not known."""
    # Of two on one point the later one hides the other.
    best = Mount("", "")
    for mount in mounts:
        if _is_in(folder, mount.point) and len(mount.point) >= len(best.point):
            best = mount
    passing = any(_is_in(folder, place) for place in _PASSING)
    if best.system in _IN_MEMORY:
        return Kind.PASSING, best.system
    # Somebody may have put storage that lasts below such a name.
    if passing and not any(_is_in(best.point, place) for place in _PASSING):
        return Kind.PASSING, best.system
    return (Kind.OF_ONE_NODE if best.system in _OF_A_DISK else Kind.LASTING), best.system


def storage_doubt(task: Task, mounts: Iterable[Mount], *, several_nodes: bool) -> str | None:
    """Why the next attempt of a task may find no state, with what to do; None: nothing is known.

    Args:
        task: that is to be submitted.
        mounts: of a machine that sees what the nodes see.
        several_nodes: whether the next attempt may run on another node.
    """
    if is_uploaded(task):
        return None
    folder = states_folder(task)
    kind, system = kind_of(folder, mounts)
    if kind is Kind.PASSING:
        lost = (
            "of its node alone, and are lost by a reboot" if several_nodes else "lost by a reboot"
        )
        return (
            f"its states would lie in {folder}: there they are {lost}, and the run would begin "
            f"anew; {REMEDY}"
        )
    if kind is Kind.OF_ONE_NODE and several_nodes:
        return (
            f"its states would lie in {folder}, on a disk of this machine ({system}): an attempt "
            f"on a node that does not share it begins anew; {REMEDY}"
        )
    return None


def _is_in(path: str, folder: str) -> bool:
    return folder in ("/", path) or path.startswith(f"{folder}/")
