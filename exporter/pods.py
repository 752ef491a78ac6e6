"""Job files of trainings in containers: in their own mount and PID namespaces.

A container's trainer writes to the folder that it sees, and names itself by the pid that it has in
there. The node reads that folder through `/proc/<pid>/root` of a process that it found on a card
itself, and matches pids by `NSpid` within that process's namespace. So a run can speak only for
processes of its own container that were seen on a card, and not for anybody else's.

Whoever is root in a container decides what its paths lead to: no link is followed on the way, and
what may hang (a file system of its own making) has a moment and no more.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.exporter.processes import PROC, read_process
from gpuwarden.exporter.runs import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from gpuwarden.exporter.blocking_calls import BlockingCalls
    from gpuwarden.exporter.processes import Process
    from gpuwarden.exporter.recollections import AttemptRecord
    from gpuwarden.exporter.runs import LiveRun

MAX_FOLDERS = 64
"""Containers whose folders are read at a time; a node has fewer cards than that."""

PATIENCE_SECONDS = 60.0
"""After a restart of the exporter the driver may need its time to list who is on the cards."""

# A name may hold carriage returns: only the kernel's own line feeds end a line.
_INNER_PIDS = re.compile(rb"^NSpid:(?:\t[0-9]{1,10})*\t([0-9]{1,10})$", re.MULTILINE)

Folder = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A process on a card that is not in all of the node's own namespaces."""

    pid: int
    inner_pid: int
    pid_namespace: int
    mount_namespace: int


class Pods:
    """The job files of all containers that have a process on a card; used by one thread."""

    def __init__(
        self,
        inside: Path,
        *,
        boot: str,
        calls: BlockingCalls,
        user_name: Callable[[int], str],
        proc: Path = PROC,
    ) -> None:
        """Begin knowing nobody.

        Args:
            inside: where trainers look for the job directory; the same as on the node.
            boot: this boot's id.
            calls: makes calls that a container may make hang.
            user_name: uid -> name.
            proc: where procfs is mounted.
        """
        self._inside = Path(os.path.normpath(inside))
        self._boot = boot
        self._calls = calls
        self._user_name = user_name
        self._proc = proc
        self._own: tuple[int, int] | None = None
        # Without its own namespaces there is nothing to tell a container's from.
        with suppress(OSError):
            self._own = (_namespace(proc, "self", "pid"), _namespace(proc, "self", "mnt"))
        self._members: dict[tuple[int, int], _Member | None] = {}
        self._folders: dict[Folder, RunDirectory] = {}
        self._lost: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._patient_until = 0.0
        self.dropped: Counter[str] = Counter()

    def recollect(self) -> list[AttemptRecord]:
        """What a later exporter must know of runs in containers."""
        return [
            attempt
            for folder, directory in self._folders.items()
            for attempt in directory.recollect(folder)
        ]

    def recall(self, attempts: Iterable[AttemptRecord], *, seen_at: float, now: float) -> None:
        """Take over what an earlier exporter knew.

        Args:
            attempts: of containers.
            seen_at: Unix time at which it was true.
            now: Unix time; until the driver had its time to answer, no container is held for gone.
        """
        by_folder: dict[Folder, list[AttemptRecord]] = {}
        for attempt in attempts:
            if attempt.folder is not None:
                by_folder.setdefault(attempt.folder, []).append(attempt)
        for folder, found in by_folder.items():
            self._directory(folder).recall(found, seen_at=seen_at)
        self._patient_until = now + PATIENCE_SECONDS

    def with_lost(self, lost: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """(user, reason) -> GPU seconds that no saved state covers, since the start.

        Args:
            lost: those of the node's own folder, which are added.
        """
        total = defaultdict(float, lost)
        for part in (self._lost, *(folder.lost for folder in self._folders.values())):
            for (uid, reason), seconds in dict(part).items():
                total[self._user_name(int(uid)) if uid else "", reason] += seconds
        return dict(total)

    def update(self, processes: Mapping[int, Process], on_cards: Collection[int]) -> None:
        """Take over who is there; a process stays known for as long as it lives.

        Args:
            processes: all processes, by pid.
            on_cards: pids that the driver lists.
        """
        for identity in tuple(self._members):
            process = processes.get(identity[0])
            if process is None or process.identity != identity or process.ended:
                del self._members[identity]
        for pid in on_cards:
            process = processes.get(pid)
            if process is None or process.ended:
                continue
            if process.identity not in self._members:
                self._members[process.identity] = self._member(process)

    def by_namespace(self, processes: Mapping[int, Process]) -> dict[int, dict[int, Process]]:
        """PID namespace -> pid in it -> process, for all that are in a PID namespace of their own.

        Args:
            processes: all processes, by pid.
        """
        return _by_namespace(self._foreign(), processes)

    def scan(
        self, processes: Mapping[int, Process], *, now: float, booted: float
    ) -> tuple[LiveRun, ...]:
        """Read what changed in the containers' folders and give the runs that can be believed.

        Args:
            processes: all processes, by pid.
            now: Unix time.
            booted: Unix time of boot.
        """
        self.dropped = Counter()
        seers = self._seers(processes)
        live: list[LiveRun] = []
        for folder in sorted(seers):
            members = seers[folder]
            runs = self._scan(folder, members, processes, now=now, booted=booted)
            live += runs or ()
        for folder in self._folders.keys() - seers.keys():
            if not self._calls.unanswered and now >= self._patient_until:
                closed = self._folders.pop(folder)
                closed.close(now)
                for key, seconds in closed.lost.items():
                    self._lost[key] += seconds
        return tuple(live)

    def note_holdings(self, run_id: str, gpus: int) -> None:
        """See `RunDirectory.note_holdings`."""
        for folder in self._folders.values():
            folder.note_holdings(run_id, gpus)

    # -----------------------------------------------------------------------------------------

    def _foreign(self) -> list[_Member]:
        return [member for member in self._members.values() if member is not None]

    def _member(self, process: Process) -> _Member | None:
        """What a process is in its container; None where it is in none, or that is not known."""
        try:
            pid_namespace = _namespace(self._proc, process.pid, "pid")
            mount_namespace = _namespace(self._proc, process.pid, "mnt")
            status = (self._proc / str(process.pid) / "status").read_bytes()
        except OSError:
            return None
        if self._own in (None, (pid_namespace, mount_namespace)):
            return None
        pids = _INNER_PIDS.search(status)
        if pids is None:
            return None
        return _Member(process.pid, int(pids[1]), pid_namespace, mount_namespace)

    def _seers(self, processes: Mapping[int, Process]) -> dict[Folder, list[_Member]]:
        """Folder -> the processes whose folder it is; containers of a pod may share one."""
        first: dict[int, _Member] = {}
        for member in self._foreign():
            if self._own is None or member.mount_namespace != self._own[1]:
                first.setdefault(member.mount_namespace, member)
        own = _identity(self._inside / "jobs")
        found: dict[Folder, list[_Member]] = {}
        for namespace, member in sorted(first.items())[:MAX_FOLDERS]:
            folder = self._ask(namespace, processes[member.pid])
            # The node's own folder, mounted into the container, is read already.
            if folder is not None and folder != own:
                found.setdefault(folder, []).extend(
                    item for item in self._foreign() if item.mount_namespace == namespace
                )
        return found

    def _ask(self, namespace: int, process: Process) -> Folder | None:
        # Containers share uids, such as root's: one that hangs concerns no other.
        try:
            return self._calls.make(("mount", namespace), lambda: self._folder_of(process))
        except OSError:
            return None

    def _folder_of(self, process: Process) -> Folder | None:
        with self._opened(process) as descriptor:
            about = os.fstat(descriptor)
            return about.st_dev, about.st_ino

    def _directory(self, folder: Folder) -> RunDirectory:
        directory = self._folders.get(folder)
        if directory is None:
            directory = self._folders[folder] = RunDirectory(
                # The directory of users is asked outside of the calls that read the folder.
                self._inside,
                boot=self._boot,
                pid_namespace=0,
                user_name=str,
            )
        return directory

    def _scan(
        self,
        folder: Folder,
        members: list[_Member],
        processes: Mapping[int, Process],
        *,
        now: float,
        booted: float,
    ) -> tuple[LiveRun, ...] | None:
        directory = self._directory(folder)
        process = processes[members[0].pid]
        others = _by_namespace(members, processes)

        def read() -> tuple[LiveRun, ...]:
            with self._opened(process) as descriptor:
                about = os.fstat(descriptor)
                if (about.st_dev, about.st_ino) != folder:
                    return ()
                directory.follow(Path(f"/proc/self/fd/{descriptor}"))
                return directory.scan({}, now=now, booted=booted, others=others)

        try:
            # Whichever of its containers it is read through: never by two threads at a time.
            runs = self._calls.make(("folder", folder), read)
        except OSError:
            return None
        if runs is None:
            self.dropped["job_file_hangs"] += 1
            return None
        self.dropped.update(directory.dropped)
        return runs

    @contextmanager
    def _opened(self, process: Process) -> Iterator[int]:
        """The folder of job files as a process sees it.

        Raises:
            OSError: there is none, a link leads there, or the process has gone.
        """
        descriptor = os.open(
            self._proc / str(process.pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            for part in (*self._inside.parts[1:], "jobs"):
                below = os.open(
                    part,
                    os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                    dir_fd=descriptor,
                )
                os.close(descriptor)
                descriptor = below
            again = read_process(process.pid, self._proc)
            if again is None or again.identity != process.identity:
                raise ProcessLookupError(process.pid)
            yield descriptor
        finally:
            os.close(descriptor)


def _namespace(proc: Path, pid: int | str, kind: str) -> int:
    return (proc / str(pid) / "ns" / kind).stat().st_ino


def _identity(folder: Path) -> Folder | None:
    try:
        about = folder.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _by_namespace(
    members: Collection[_Member], processes: Mapping[int, Process]
) -> dict[int, dict[int, Process]]:
    found: dict[int, dict[int, Process]] = {}
    for member in members:
        found.setdefault(member.pid_namespace, {})[member.inner_pid] = processes[member.pid]
    return found
