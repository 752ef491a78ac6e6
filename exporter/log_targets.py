"""Where each job's output lies, as a file by which an agent of logs finds it (Alloy, Promtail).

Only this node knows both: which files a job writes, and which job_id it has. So the exporter writes
a list in the format of Prometheus' file discovery, one entry for each file with the label `job_id`,
and whoever ships logs reads it. What counts as a job's output:

- a regular file that its root process has open as standard output or error for writing: what a
  shell, Slurm or nohup directed there, whoever chose it could open it;
- the log that a believed run declares, if it is a regular file of the run's owner.

A name is listed only if it leads to that very file here; names in another mount namespace do not,
and a pod's output is the container runtime's. The name may be exchanged afterwards: whoever reads
the files must have no right to what users may not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from gpuwarden.clock import Clock, SystemClock
from gpuwarden.exporter.processes import read_process
from gpuwarden.exporter.replaced_files import ReplacedFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.exporter.jobs import Job, NodeSnapshot

INTERVAL_SECONDS = 5.0
"""Between two looks at where jobs write."""
LINGER_SECONDS = 600.0
"""How long the output of a job that has ended stays listed, so that its last words are read."""
MAX_TARGETS = 2000
MAX_RUNS = 8
"""Declared runs of one job that are looked at."""
MAX_PATH = 1024

# What shippers of logs take for patterns would lead to other files than the one that was looked at.
_PATTERNS = frozenset("*?[]{}!\\")
_STOP_SECONDS = 0.5

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A file, and whose output it is.

    Attributes:
        path: its absolute name.
        job_id, user: of the job.
        run_id: where a run declares it, else empty.
    """

    path: str
    job_id: str
    user: str
    run_id: str = ""

    def labels(self) -> dict[str, str]:
        """Labels of its lines, and its name as agents of logs take it."""
        found = {"__path__": self.path, "job_id": self.job_id, "user": self.user}
        return {**found, "run_id": self.run_id} if self.run_id else found


def targets(job: Job, proc: Path = Path("/proc")) -> Iterator[Target]:
    """The files that a job's output goes to.

    Args:
        job: of the newest snapshot.
        proc: of the process table.
    """
    if job.root is None:
        return
    directed = [
        _directed(proc / str(job.root.pid) / "fd" / str(number), number, proc) for number in (1, 2)
    ]
    # Looked at last: a pid that is another process's by now says nothing of this job.
    now = read_process(job.root.pid, proc)
    if now is not None and now.start_ticks == job.root.start_ticks:
        for path in sorted({path for path in directed if path is not None}):
            yield Target(path, job.job_id, job.user)
    for run in job.runs[:MAX_RUNS]:
        log = run.description.log
        if log is not None and _declared(log, job.root.uid):
            yield Target(log, job.job_id, job.user, run.description.run_id)


def _directed(link: Path, number: int, proc: Path) -> str | None:
    """The file that a descriptor writes, by the name by which it is found here too."""
    try:
        name = str(link.readlink())
        opened = link.stat()
        flags = (link.parents[1] / "fdinfo" / str(number)).read_bytes()
    except OSError:
        return None
    if not _plain(name) or Path(name).is_relative_to(proc) or not _for_writing(flags):
        return None
    try:
        here = Path(name).stat(follow_symlinks=False)
    except (OSError, ValueError):
        return None
    same = (here.st_dev, here.st_ino) == (opened.st_dev, opened.st_ino)
    return name if same and stat.S_ISREG(opened.st_mode) else None


def _for_writing(fdinfo: bytes) -> bool:
    for line in fdinfo.splitlines():
        key, _, value = line.partition(b":")
        if key == b"flags":
            with contextlib.suppress(ValueError):
                return int(value, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _declared(name: str, uid: int) -> bool:
    if not _plain(name):
        return False
    try:
        about = Path(name).stat(follow_symlinks=False)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid == uid


def _plain(name: str) -> bool:
    return (
        name.startswith("/")
        and len(name) <= MAX_PATH
        and name.isprintable()
        and os.path.normpath(name) == name
        and not _PATTERNS & set(name)
    )


class Snapshots(Protocol):
    """Where snapshots come from: the sampler."""

    @property
    def snapshot(self) -> NodeSnapshot | None:
        """The newest, or None before the first."""

    def wait(self, seconds: float) -> bool:
        """Wait for the first, at most so long; says whether there has been one."""


class LogTargets:
    """Writes the list, from a thread of its own: a file system of a user's may hang."""

    def __init__(self, file: Path, sampler: Snapshots, *, clock: Clock | None = None) -> None:
        """Prepare.

        Args:
            file: the list; in a folder that only this user may write.
            sampler: where snapshots come from.
            clock: for how long ended jobs stay listed.
        """
        # Names of users' files are for the group that the folder hands on (setgid).
        self._file = ReplacedFile(
            file, mode=0o640, complaint="log targets not written", folder_mode=0o750
        )
        self._sampler = sampler
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._seen: dict[str, tuple[Target, float]] = {}
        self._written: bytes | None = None
        self._stop = threading.Event()
        # A daemon: a file system that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="log-targets", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write no more. The list stays: jobs go on, and so does who reads their output."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)

    def write(self) -> None:
        """Write the list of the newest snapshot, if it is another than the last."""
        snapshot = self._sampler.snapshot
        if snapshot is not None:
            self._look(snapshot)
        body = self._body()
        if body == self._written and self._file.path.exists():
            return
        if self._file.write(body):
            self._written = body

    def _look(self, snapshot: NodeSnapshot) -> None:
        now = self._clock.monotonic()
        # A file that two jobs write is the later one's; what a run declares adds its run_id.
        for job in sorted(snapshot.jobs, key=lambda job: (job.start_time or 0.0, job.job_id)):
            for target in targets(job):
                self._seen[target.path] = (target, now)
        self._seen = {
            path: (target, seen)
            for path, (target, seen) in self._seen.items()
            if now - seen <= LINGER_SECONDS
        }

    def _body(self) -> bytes:
        newest = sorted(self._seen.values(), key=lambda item: (-item[1], item[0].path))
        rows = [
            {"targets": ["localhost"], "labels": target.labels()}
            for target, _ in newest[:MAX_TARGETS]
        ]
        rows.sort(key=lambda row: str(row["labels"]))
        return json.dumps(rows, indent=1).encode() + b"\n"

    def _work(self) -> None:
        self._sampler.wait(INTERVAL_SECONDS)
        while not self._stop.is_set():
            try:
                self.write()
            except Exception:
                # Whatever it was, the next look may succeed.
                _logger.exception("log targets not written", file=str(self._file.path))
            self._stop.wait(INTERVAL_SECONDS)
