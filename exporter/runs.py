"""The trainers' files: read with suspicion, matched to processes, and swept up after them.

Whoever can write to `jobs/` can write anything there. A run is believed for one process only: the
one that it names by pid, start ticks and boot, if that belongs to the file's owner. What a run
tells is then shown as that process's job's own word, and nobody else's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from gpuwarden import job_files
from gpuwarden.exporter.allowances import Allowance
from gpuwarden.exporter.jobs import Run
from gpuwarden.exporter.processes import CLOCK_TICKS
from gpuwarden.exporter.recollections import AttemptRecord
from gpuwarden.exporter.shortages import is_shortage
from gpuwarden.job_files import JobFileError, RunDescription, RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from gpuwarden.exporter.processes import Process

MAX_ENTRIES = 10_000
"""Files of `jobs/` that are looked at; a user who makes more hides runs that were not yet seen
alive, but no others, and cannot stop us."""
MAX_COMPLAINTS = 10
"""Lines of log for the faults of one scan."""
MAX_LOST = 1000
"""Users and reasons that lost work is counted for."""
REAP_SECONDS = 600.0
FUTURE_SECONDS = 5.0
"""A time of a trainer that lies further ahead than this is not known."""

_FILE = re.compile(r"(?P<run>[A-Za-z0-9_-]{1,64})(?P<status>\.status)?\.json")
_LEFTOVER = re.compile(r"\.[A-Za-z0-9_.-]{1,96}\.tmp")

_EXIT_REASONS = {
    job_files.EXIT_DONE: "done",
    job_files.EXIT_FAULT: "fault",
    job_files.EXIT_REQUEUE: "requeue",
    job_files.EXIT_HOLD: "hold",
    job_files.EXIT_NOT_RESUMABLE: "not_resumable",
}

_logger = structlog.get_logger(__name__)

Signature = tuple[int, int, int, int, int]
"""Inode, time of writing, size, time of change, owner: a file that was written differs in one."""
Identity = tuple[int, int]


@dataclass(slots=True)
class _Attempt:
    """One attempt of a run, while its process was seen alive.

    Attributes:
        identity: pid and start ticks as its description gives them: in a container, its own pid.
        uid: its owner.
        started: Unix time.
        gpus: cards that its job held when it last held any.
        covered: Unix time up to which saved state covers it, by the newest status that it wrote.
        ended_as, ended_at: why and when (Unix time) it ended, by that status.
        watched: whether this exporter saw it alive itself.
    """

    identity: Identity
    uid: int
    started: float
    gpus: int = 0
    covered: float | None = None
    ended_as: str = "died"
    ended_at: float | None = None
    watched: bool = True

    def take(self, status: RunStatus) -> None:
        """Take over what its newest status says of what is lost if it ends."""
        saved = status.checkpoint
        self.covered = None if saved is None else saved.durable or saved.time
        if status.exit is not None:
            self.ended_as = _EXIT_REASONS.get(status.exit.code, "fault")
            self.ended_at = max(status.exit.time, self.started)


@dataclass(slots=True)
class _Known:
    """What is kept of a run's files."""

    seen_at: float
    description: RunDescription | None = None
    signature: Signature | None = None
    uid: int = -1
    status: RunStatus | None = None
    status_signature: Signature | None = None
    status_uid: int = -1
    modified: float = 0.0
    attempt: _Attempt | None = None
    died_at: float | None = None
    complaints: set[str] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """Whether the trainer said that it is done."""
        return self.status is not None and self.status.exit is not None


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run whose process lives and is its writer's; `pid` is that process."""

    pid: int
    uid: int
    run: Run


class RunDirectory:
    """The files of `jobs/`, read only where they changed."""

    def __init__(
        self,
        root: Path,
        *,
        boot: str,
        pid_namespace: int,
        user_name: Callable[[int], str],
    ) -> None:
        """Begin knowing nothing.

        Args:
            root: the folder that holds `jobs/`.
            boot: this boot's id.
            pid_namespace: inode of the namespace whose pids /proc shows.
            user_name: uid -> name.
        """
        self._folder = root / "jobs"
        self._boot = boot
        self._pid_namespace = pid_namespace
        self._user_name = user_name
        self._known: dict[str, _Known] = {}
        self._others: Mapping[int, Mapping[int, Process]] = {}
        self._leftovers: list[tuple[str, Signature]] = []
        self._waiting: dict[str, None] = {}
        self._complained = 0
        self._complained_of_reaping = False
        self.dropped: Counter[str] = Counter()
        self.lost: defaultdict[tuple[str, str], float] = defaultdict(float)

    def follow(self, folder: Path) -> None:
        """Read the files by another path from now on; they are the same.

        Args:
            folder: the folder that was `jobs/`.
        """
        self._folder = folder

    def close(self, now: float) -> None:
        """Count what was lost with the runs, whose folder is gone.

        Args:
            now: Unix time.
        """
        for known in self._known.values():
            self._account(known, now)
        self._known = {}

    def scan(
        self,
        processes: Mapping[int, Process],
        *,
        now: float,
        booted: float,
        others: Mapping[int, Mapping[int, Process]] | None = None,
    ) -> tuple[LiveRun, ...]:
        """Read what changed and give the runs that can be believed.

        Args:
            processes: all processes, by pid.
            now: Unix time.
            booted: Unix time of boot.
            others: PID namespace -> processes by their pid in it, for namespaces beside the own.
        """
        self.dropped = Counter()
        self._complained = 0
        self._others = others or {}
        self._read_folder(now)
        live: list[tuple[_Known, RunDescription, Process]] = []
        claims: Counter[Identity] = Counter()
        for run_id, known in self._known.items():
            description, process = known.description, self._process_of(known, processes)
            if description is None or process is None:
                self._end(run_id, known, now)
                continue
            if known.over:
                # The training ended, though its process goes on (a notebook's kernel).
                self._end(run_id, known, now)
            else:
                known.died_at = None
                claims[process.identity] += 1
            live.append((known, description, process))
        return tuple(
            LiveRun(
                process.pid,
                known.uid,
                self._run(known, description, process, now=now, booted=booted),
            )
            for known, description, process in live
            if self._sole(description.run_id, known, claims[process.identity])
        )

    def note_holdings(self, run_id: str, gpus: int) -> None:
        """Remember how many cards a run's job holds, for what it loses if it dies now."""
        known = self._known.get(run_id)
        if gpus and known is not None and known.attempt is not None:
            known.attempt.gpus = gpus

    # -----------------------------------------------------------------------------------------
    # Over a restart of the exporter

    def recollect(self, folder: Identity | None = None) -> list[AttemptRecord]:
        """What a later exporter must know of runs that were seen alive.

        Args:
            folder: what this folder is told from others by.
        """
        return [
            AttemptRecord(
                run_id=run_id,
                identity=known.attempt.identity,
                uid=known.attempt.uid,
                started=known.attempt.started,
                gpus=known.attempt.gpus,
                covered=known.attempt.covered,
                ended_as=known.attempt.ended_as,
                ended_at=known.attempt.ended_at,
                died_at=known.died_at,
                folder=folder,
            )
            for run_id, known in self._known.items()
            if known.attempt is not None
        ]

    def recall(self, attempts: Iterable[AttemptRecord], *, seen_at: float) -> None:
        """Take over what an earlier exporter knew.

        Args:
            attempts: of this folder.
            seen_at: Unix time at which it was true.
        """
        for item in attempts:
            attempt = _Attempt(
                identity=item.identity,
                uid=item.uid,
                started=item.started,
                gpus=item.gpus,
                covered=item.covered,
                ended_as=item.ended_as,
                ended_at=item.ended_at,
                watched=False,
            )
            self._known[item.run_id] = _Known(
                seen_at=seen_at, attempt=attempt, died_at=item.died_at
            )

    # -----------------------------------------------------------------------------------------
    # Reading

    def _read_folder(self, now: float) -> None:
        found = self._list(now)
        for gone in self._known.keys() - found.keys():
            self._account(self._known.pop(gone), now)
        allowance = Allowance()
        waited, self._waiting = [run for run in self._waiting if run in found], {}
        for run_id in dict.fromkeys([*waited, *found]):
            description, status, modified = found[run_id]
            if description is None:
                continue
            known = self._known.setdefault(run_id, _Known(seen_at=now))
            known.modified = modified
            if known.signature != description and self._may_read(allowance, run_id, description):
                self._read_description(run_id, known, description, now=now)
            if status is None:
                known.status, known.status_signature = None, None
            elif known.status_signature != status and self._may_read(allowance, run_id, status):
                self._read_status(run_id, known, status, now=now)

    def _may_read(self, allowance: Allowance, run_id: str, signature: Signature) -> bool:
        _, _, size, _, uid = signature
        if allowance.takes(uid, min(size, job_files.MAX_BYTES)):
            return True
        self._waiting[run_id] = None
        self.dropped["job_file_waits"] += 1
        return False

    def _list(self, now: float) -> dict[str, tuple[Signature | None, Signature | None, float]]:
        """Signatures of each run's description and status, and when either was last written."""
        found: dict[str, tuple[Signature | None, Signature | None, float]] = {}
        self._leftovers = []
        try:
            with os.scandir(self._folder) as entries:
                first = list(itertools.islice(entries, MAX_ENTRIES + 1))
        except FileNotFoundError:
            # No training has been here yet, or an operator removed the folder.
            return {}
        if len(first) > MAX_ENTRIES:
            self.dropped["job_file_entries"] += 1
        for entry in first[:MAX_ENTRIES]:
            match = _FILE.fullmatch(entry.name)
            try:
                about = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            signature = _signature(about)
            if match is not None:
                description, status, modified = found.get(match["run"], (None, None, 0.0))
                if match["status"]:
                    status = signature
                else:
                    description = signature
                found[match["run"]] = (description, status, max(modified, about.st_mtime))
            elif _LEFTOVER.fullmatch(entry.name) and about.st_mtime < now - REAP_SECONDS:
                self._leftovers.append((entry.name, signature))
        if len(first) > MAX_ENTRIES:
            self._look_up(found)
        return found

    def _look_up(self, found: dict[str, tuple[Signature | None, Signature | None, float]]) -> None:
        """Ask by name for the files of runs that were seen alive and that a crowd of files hides.

        Else whoever fills the folder takes from others' trainings their word and their chance to
        save, and what still runs is counted as lost.
        """
        seen = [run_id for run_id, known in self._known.items() if known.attempt is not None]
        for run_id in seen[:MAX_ENTRIES]:
            signatures = list(found.get(run_id, (None, None, 0.0))[:2])
            modified = found.get(run_id, (None, None, 0.0))[2]
            for part, name in enumerate((f"{run_id}.json", f"{run_id}.status.json")):
                if signatures[part] is None:
                    with contextlib.suppress(OSError):
                        about = (self._folder / name).lstat()
                        signatures[part] = _signature(about)
                        modified = max(modified, about.st_mtime)
            if any(signatures):
                found[run_id] = (signatures[0], signatures[1], modified)

    def _read_description(
        self, run_id: str, known: _Known, signature: Signature, *, now: float
    ) -> None:
        known.signature = signature
        known.description = None
        try:
            file = job_files.read(self._folder / f"{run_id}.json")
            description = RunDescription.decode(file.content)
            _check_run_id(run_id, description.run_id)
        except FileNotFoundError:
            return
        except JobFileError as error:
            if is_shortage(error.__cause__):
                known.signature = None
            self._complain(run_id, known, f"job_file_{error.reason}")
            return
        attempt = known.attempt
        if attempt is not None and attempt.identity != (description.pid, description.start_ticks):
            # Resumed before its earlier attempt was swept up.
            self._account(known, now)
        known.description, known.uid = description, file.uid
        known.complaints = set()

    def _read_status(self, run_id: str, known: _Known, signature: Signature, *, now: float) -> None:
        known.status_signature = signature
        try:
            file = job_files.read(self._folder / f"{run_id}.status.json")
            status = RunStatus.decode(file.content)
            _check_run_id(run_id, status.run_id)
        except FileNotFoundError:
            known.status = None
            return
        except JobFileError as error:
            # What was believed before was true of its time only.
            known.status = None
            if is_shortage(error.__cause__):
                known.status_signature = None
            self._complain(run_id, known, f"job_file_{error.reason}")
            return
        known.status, known.status_uid = status, file.uid
        for name in ("heartbeat", "phase_since"):
            if getattr(status, name) > now + FUTURE_SECONDS:
                self.dropped["future"] += 1

    def _process_of(self, known: _Known, processes: Mapping[int, Process]) -> Process | None:
        """The process that a run speaks for, or None where it is gone or not its writer's."""
        description = known.description
        if description is None or description.boot_id != self._boot:
            return None
        if description.pid_ns != self._pid_namespace:
            if description.pid_ns not in self._others:
                self._complain(description.run_id, known, "job_file_pid_namespace")
                return None
            processes = self._others[description.pid_ns]
        process = processes.get(description.pid)
        if process is None or process.start_ticks != description.start_ticks or process.ended:
            return None
        if process.uid != known.uid:
            self._complain(description.run_id, known, "job_file_owner")
            return None
        if known.status is not None and known.status_uid != known.uid:
            self._complain(description.run_id, known, "job_file_owner")
            known.status = None
        return process

    def _sole(self, run_id: str, known: _Known, claims: int) -> bool:
        if known.over:
            return claims == 0
        if claims > 1:
            self._complain(run_id, known, "job_file_claimed_twice")
            return False
        return True

    def _complain(self, run_id: str, known: _Known, reason: str) -> None:
        """Count a fault once for each description of the run."""
        if reason not in known.complaints:
            known.complaints.add(reason)
            self.dropped[reason] += 1
            self._complained += 1
            if self._complained <= MAX_COMPLAINTS:
                # The rest is in the counter: a log that a user can fill tells nothing.
                _logger.warning("job file not believed", run_id=run_id, reason=reason)

    @staticmethod
    def _run(
        known: _Known, description: RunDescription, process: Process, *, now: float, booted: float
    ) -> Run:
        status = known.status
        if known.attempt is None:
            known.attempt = _Attempt(
                identity=(description.pid, description.start_ticks),
                uid=known.uid,
                started=booted + process.start_ticks / CLOCK_TICKS,
            )
        known.attempt.watched = True
        if status is None:
            return Run(description)
        known.attempt.take(status)

        def believable(time: float | None) -> float | None:
            return time if time is not None and 0 < time <= now + FUTURE_SECONDS else None

        checkpoint = status.checkpoint
        return Run(
            description,
            status,
            heartbeat=believable(status.heartbeat),
            phase_since=believable(status.phase_since),
            checkpoint_time=believable(checkpoint.time if checkpoint else None),
            checkpoint_durable=believable(checkpoint.durable if checkpoint else None),
            upload_lag=upload_lag(status, now),
            answered={
                state: time
                for state, told in (status.request.times if status.request else {}).items()
                if (time := believable(told)) is not None
            },
        )

    # -----------------------------------------------------------------------------------------
    # Sweeping up

    def _end(self, run_id: str, known: _Known, now: float) -> None:
        if known.died_at is None:
            # An exporter that was down when the process died knows it by the last writing.
            seen = known.attempt is not None and known.attempt.watched
            known.died_at = now if seen else min(now, max(known.modified, known.seen_at))
            if known.attempt is not None and known.status is not None:
                known.attempt.take(known.status)
        silent = now - max(known.died_at, min(known.modified, now))
        if now - known.died_at >= REAP_SECONDS and silent >= REAP_SECONDS:
            self._account(known, now)
            self._remove(f"{run_id}.json", known.signature)
            self._remove(f"{run_id}.status.json", known.status_signature)

    def _account(self, known: _Known, now: float) -> None:
        """Count the GPU time of an attempt that no saved state covers; once."""
        attempt, known.attempt = known.attempt, None
        died_at, known.died_at = known.died_at, None
        if attempt is None or not attempt.gpus:
            return
        if died_at is None:
            # One that ended while no exporter ran was last known to live when the state was kept.
            died_at = now if attempt.watched else min(now, known.seen_at)
        ended = died_at if attempt.ended_at is None else min(died_at, attempt.ended_at)
        covered = max(attempt.started, attempt.covered or 0.0)
        done = attempt.ended_as == "done"
        lost = 0.0 if done else max(0.0, ended - covered) * attempt.gpus
        user = self._user_name(attempt.uid)
        if (user, attempt.ended_as) not in self.lost and len(self.lost) >= MAX_LOST:
            # A user may have sixty thousand uids of his own (subuid); together they have one name.
            user = ""
        self.lost[user, attempt.ended_as] += lost

    def reap_leftovers(self) -> None:
        """Remove temporary files that a crashed trainer left ten minutes ago."""
        for name, signature in self._leftovers:
            self._remove(name, signature)

    def _remove(self, name: str, signature: Signature | None) -> None:
        if signature is None:
            return
        path = self._folder / name
        try:
            about = path.lstat()
            # A run that came back meanwhile has written anew.
            if _signature(about) == signature and not stat.S_ISDIR(about.st_mode):
                path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._complained_of_reaping:
                self._complained_of_reaping = True
                _logger.warning(
                    "files of ended runs cannot be removed; the exporter's user must own jobs/",
                    folder=str(self._folder),
                    error=error.strerror,
                )


def _check_run_id(file: str, inside: str) -> None:
    if file != inside:
        raise JobFileError("run_id", f"the file of run {file} speaks of {inside}")


def _signature(about: os.stat_result) -> Signature:
    return (about.st_ino, about.st_mtime_ns, about.st_size, about.st_ctime_ns, about.st_uid)


def prepare(root: Path) -> None:
    """Make the folders of the job files, if this user may.

    Raises:
        OSError: they are not there and cannot be made.
    """
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name, mode in (("jobs", 0o1777), ("requests", 0o755)):
        folder = root / name
        try:
            folder.mkdir(mode=0o755)
        except FileExistsError:
            continue
        # mkdir's mode passes through the umask.
        folder.chmod(mode)


def upload_lag(status: RunStatus, now: float) -> float | None:
    """Seconds since the oldest state that is not uploaded was taken; None where none is asked for.

    It grows with the clock and not with the job's word, which may have come to a halt.

    Args:
        status: of the run.
        now: Unix time.
    """
    upload = status.upload
    if upload is None:
        return None
    if upload.pending is None:
        return 0.0
    if not 0 < upload.pending <= now + FUTURE_SECONDS:
        return None
    return max(0.0, now - upload.pending)
