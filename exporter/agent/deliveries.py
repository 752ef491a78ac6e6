"""Whether a job can see its leave request: a pod does only where `requests/` is mounted into it.

The folder is looked for as the job's processes see it, through `/proc/<pid>/root`, and must be the
node's own. Whoever is root in a container decides what its paths lead to: no link is followed on
the way, and a file system that does not answer has a moment and no more.
"""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.exporter.agent import members
from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.processes import (
    PROC,
    Launchers,
    Process,
    boot_id,
    boot_time,
    read_all,
    read_process,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.agent_api import ActionRequest

MAX_PROCESSES = 64
"""Processes of a job that are asked; they seldom differ."""


class Deliveries:
    """Looks at the node's `requests/` through the eyes of jobs. Safe for threads."""

    def __init__(
        self,
        directory: Path,
        launchers: Launchers,
        *,
        calls: BlockingCalls | None = None,
        proc: Path = PROC,
    ) -> None:
        """Look at nothing yet.

        Args:
            directory: the job directory, which trainers look for under the same path.
            launchers: what starts jobs on this node.
            calls: makes calls that a job may make hang.
            proc: where procfs is mounted.
        """
        self._folder = Path(os.path.normpath(directory), "requests")
        # The node's own /var/run is a link to /run, which is not followed in a job's root.
        self._paths = tuple(dict.fromkeys((self._folder, Path(os.path.realpath(self._folder)))))
        self._launchers = launchers
        self._calls = calls if calls is not None else BlockingCalls()
        self._lock = threading.Lock()
        self._proc = proc

    def obstacle(self, request: ActionRequest) -> tuple[str, str] | None:
        """Why a job cannot see its leave request, or None where one of its processes can.

        Returns:
            A word, `no_process`, `hangs`, `hidden` or `not_mounted`, and the same for people.
        """
        found = members.of_job(
            read_all(self._proc),
            request.job_id,
            boot=boot_id(self._proc),
            booted=boot_time(self._proc),
            launchers=self._launchers,
            seen=request.seen,
        )
        if not found:
            return "no_process", f"no process of {request.job_id} is known on this node"
        word = "not_mounted"
        with self._lock:
            for process in found[:MAX_PROCESSES]:
                try:
                    sees = self._calls.make(process.uid, partial(self._sees, process))
                except PermissionError:
                    word = "hidden"
                    continue
                except OSError:
                    continue
                if sees:
                    return None
                if sees is None:
                    word = "hangs"
        return word, _MESSAGES[word].format(folder=self._folder)

    def _sees(self, process: Process) -> bool:
        """Whether the folder of a process is the node's.

        Raises:
            OSError: it has none, a link leads there, or the process has gone.
        """
        about = self._folder.stat()
        own, its = Path("/").stat(), (self._proc / str(process.pid) / "root").stat()
        mounts = [(self._proc / str(pid) / "ns/mnt").stat().st_ino for pid in ("self", process.pid)]
        if (own.st_dev, own.st_ino) == (its.st_dev, its.st_ino) and len(set(mounts)) == 1:
            seen = [about]
        else:
            seen = list(self._look(process))
        again = read_process(process.pid, self._proc)
        if again is None or again.identity != process.identity:
            raise ProcessLookupError(process.pid)
        return (about.st_dev, about.st_ino) in {(item.st_dev, item.st_ino) for item in seen}

    def _look(self, process: Process) -> Iterator[os.stat_result]:
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield self._open(process, path)

    def _open(self, process: Process, path: Path) -> os.stat_result:
        at = os.open(
            self._proc / str(process.pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            for part in path.parts[1:]:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                below = os.open(part, flags, dir_fd=at)
                os.close(at)
                at = below
            return os.fstat(at)
        finally:
            os.close(at)


_MESSAGES = {
    "not_mounted": "no process of the job sees {folder} of the node: mount it into the pod, "
    "read-only and under the same path",
    "hidden": "the agent may not look at what the job sees of {folder}: it needs CAP_SYS_PTRACE",
    "hangs": "a file system of the job does not answer, so that nobody knows whether it sees "
    "{folder}",
}
