"""A /proc of chosen real processes that puts them into other cgroups.

Everything that is read of a process is its own, the cgroup excepted: so a test has real processes
in the cgroups of Slurm or Kubernetes on any machine, whatever cgroups that has itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NODE = ("stat", "sys", "pressure", "self")
_PROCESS = ("stat", "status", "cmdline", "environ", "maps", "io", "exe", "root", "ns", "task")


class ProcMirror:
    """A folder that can be read in the place of /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in _NODE:
            (folder / name).symlink_to(Path("/proc") / name)

    def put(self, pids: Iterable[int], cgroup: str) -> None:
        """Show processes, as if they were in a cgroup (v2)."""
        self.put_lines(pids, f"0::{cgroup}")

    def put_lines(self, pids: Iterable[int], *lines: str) -> None:
        """Show processes with this content of their cgroup file."""
        for pid in pids:
            own = self.folder / str(pid)
            own.mkdir(exist_ok=True)
            for name in _PROCESS:
                if not (own / name).is_symlink():
                    (own / name).symlink_to(f"/proc/{pid}/{name}")
            (own / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def remove(self, pids: Iterable[int]) -> None:
        """Show processes no more."""
        for pid in pids:
            own = self.folder / str(pid)
            for item in own.iterdir():
                item.unlink()
            own.rmdir()
