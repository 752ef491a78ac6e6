"""The agent's memory and audit: append-only JSON lines, on disk before anything is done.

Each line holds one event and the whole record of its action after it, so that the last line of an
action is its state. An event counts once `append` has returned: content and name are on disk. A
torn last line is what a crash left of an event that never counted; damage anywhere else stops the
agent, because at-most-once rests on this file.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import structlog

from gpuwarden.agent_api import Action, ActionReport, ActionState
from gpuwarden.errors import GpuwardenError, PermanentError
from gpuwarden.exporter.agent.handles import Identity
from gpuwarden.exporter.agent.proofs import Holding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuwarden.clock import Clock

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

VERSION = 1
ROTATE_BYTES = 8 * 1024 * 1024
"""Beyond this size, and twice what must be kept, the journal is begun anew with only that, and the
old one put aside."""
KEEP_OLD = 4
"""Old journals that are kept, for the audit."""
KEEP_FINISHED = 1000
"""Finished actions that are kept in the journal whatever their age, to answer for."""


_DAMAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError, GpuwardenError)


class JournalError(PermanentError):
    """The journal cannot be read or written; nothing may be done without it."""


@dataclass(frozen=True, slots=True)
class Record:
    """All that is known of one action.

    Attributes:
        report: what the API answers.
        epoch: of the request.
        boot_id: boot on which it was taken on.
        run_id: the trainer's run, or None.
        grace: seconds between SIGTERM and SIGKILL.
        at: `step` or `epoch`, for the leave request.
        then: `hold` or `requeue`, for the leave request.
        reason: one line for the owner.
        accepted: Unix time of receipt.
        begun: Unix time at which the ladder began, or None.
        begun_at: the same in seconds since boot: a wall clock that is set must not lift a limit.
        origin: where the job came from, as `restarts.Origins` names it, or an empty string.
        cgroup: the job's, when the ladder began.
        dedicated: whether that cgroup holds nothing but the job.
        root: the job's root, or None where it was gone already.
        members: the processes that are to end, the root first.
        stopped: those that may be stopped by us and must be continued.
        terminating: whether SIGTERM may have been sent.
        sigterm_at: seconds since boot at which all had got SIGTERM, or None.
        killed: those that may have got SIGKILL.
        holdings: what NVML listed of the members when the ladder began.
        device_used: bytes used on their cards at that time, by UUID.
    """

    report: ActionReport
    epoch: int
    boot_id: str
    run_id: str | None
    grace: float
    at: str
    then: str
    reason: str
    accepted: float
    begun: float | None = None
    begun_at: float | None = None
    origin: str = ""
    cgroup: str = ""
    dedicated: bool = False
    root: Identity | None = None
    members: tuple[Identity, ...] = ()
    stopped: tuple[Identity, ...] = ()
    terminating: bool = False
    sigterm_at: float | None = None
    killed: tuple[Identity, ...] = ()
    holdings: tuple[Holding, ...] = ()
    device_used: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def decision_id(self) -> str:
        """The decision that the action carries out."""
        return self.report.decision_id

    @property
    def finished(self) -> bool:
        """Whether the action is over."""
        return self.report.state is ActionState.FINISHED

    @property
    def spends_attempt(self) -> bool:
        """Whether no other `terminate` of this job may be begun.

        True from the moment the ladder began, unless it is over and nothing was signalled.
        """
        if self.report.action is not Action.TERMINATE or self.begun is None:
            return False
        return self.terminating or not self.finished

    def dump(self) -> dict[str, Any]:
        """As JSON's types."""
        fields = dataclasses.asdict(self)
        fields["report"] = json.loads(self.report.encode())
        return fields

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Self:
        """Inverse of `dump`.

        Raises:
            ApiError, KeyError, TypeError, ValueError: the fields are not a record's.
        """
        root = fields["root"]
        return cls(
            **{
                **fields,
                "report": ActionReport.decode(json.dumps(fields["report"]).encode()),
                "root": None if root is None else Identity(**root),
                "members": tuple(Identity(**item) for item in fields["members"]),
                "stopped": tuple(Identity(**item) for item in fields["stopped"]),
                "killed": tuple(Identity(**item) for item in fields["killed"]),
                "holdings": tuple(Holding(**item) for item in fields["holdings"]),
            }
        )


class Journal:
    """The journal of this agent, opened by one process at a time.

    Not safe for threads: its owner holds a lock around every call.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal, and read it.

        Args:
            path: the file; `<path>.lock` and old journals `<path>.1` and so on lie beside it.

        Raises:
            JournalError: another agent has it, it is damaged, or the folder cannot be written.
        """
        self.path = path
        self.records: dict[str, Record] = {}
        self.aliases: dict[str, str] = {}
        self.epoch = 0
        self._attempts: dict[str, str] = {}
        self._kept_size = 0
        self._broken = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(
                path.with_name(f"{path.name}.lock"),
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
        except OSError as error:
            raise JournalError(
                f"the journal's folder {path.parent} cannot be written: {error.strerror}"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise JournalError(f"another agent is using the journal {path}") from error
        try:
            self._descriptor, self._size = self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> tuple[int, int]:
        try:
            descriptor = os.open(
                self.path,
                os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
        except OSError as error:
            raise JournalError(
                f"the journal {self.path} cannot be opened: {error.strerror}"
            ) from error
        try:
            size = self._read(descriptor)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
            _sync_folder(self.path.parent)
        except OSError as error:
            os.close(descriptor)
            raise JournalError(
                f"the journal {self.path} cannot be read: {error.strerror}"
            ) from error
        except JournalError:
            os.close(descriptor)
            raise
        return descriptor, size

    def _read(self, descriptor: int) -> int:
        """Take in every line; gives the size without a torn last one."""
        size = 0
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._take_in(json.loads(line))
                except _DAMAGE as error:
                    raise JournalError(
                        f"{self.path}:{number}: damaged ({error!r}). Nothing can be ended without "
                        "it. Put the file aside only if every action in it is over: what it "
                        "forgets can be ended a second time"
                    ) from error
                size += len(line)
        return size

    def _take_in(self, event: dict[str, Any]) -> None:
        if event["version"] != VERSION:
            raise ValueError(f"version {event['version']!r} is not {VERSION}")
        kind = event["event"]
        if kind == "epoch":
            self.epoch = max(self.epoch, int(event["epoch"]))
        elif kind == "alias":
            self.aliases[str(event["decision_id"])] = str(event["of"])
        else:
            self.remember(Record.load(event["record"]))

    def remember(self, record: Record) -> None:
        """Take the state of an action to be this, on disk or not."""
        self.records[record.decision_id] = record
        self.epoch = max(self.epoch, record.epoch)
        if record.spends_attempt:
            self._attempts[record.report.job_id] = record.decision_id
        elif self._attempts.get(record.report.job_id) == record.decision_id:
            del self._attempts[record.report.job_id]

    # -----------------------------------------------------------------------------------------
    # Asking

    def find(self, decision_id: str) -> Record | None:
        """The action of a decision, or the one that stood in for it."""
        return self.records.get(self.aliases.get(decision_id, decision_id))

    def attempt(self, job_id: str) -> Record | None:
        """The `terminate` that was begun for a job, or None."""
        decision_id = self._attempts.get(job_id)
        return None if decision_id is None else self.records[decision_id]

    def begun_within(self, seconds: float, *, boot_id: str, clock: Clock) -> int:
        """How many ladders were begun lately, by whichever of the two clocks counts more.

        Args:
            seconds: how far back.
            boot_id: the present boot; of another one only the Unix time is known.
            clock: the node's.
        """
        wall, since_boot = clock.wall() - seconds, clock.monotonic() - seconds

        def lately(record: Record) -> bool:
            if record.begun is None or not record.spends_attempt:
                return False
            return record.begun > wall or (
                record.boot_id == boot_id
                and record.begun_at is not None
                and record.begun_at > since_boot
            )

        return sum(map(lately, self.records.values()))

    def ended_of(self, origin: str, *, boot_id: str) -> Iterator[Record]:
        """Attempts of this boot that were begun on jobs of one origin, the newest first."""
        for record in reversed(self.records.values()):
            if record.origin == origin and record.boot_id == boot_id and record.spends_attempt:
                yield record

    def unfinished(self) -> tuple[Record, ...]:
        """Actions that are not over, in the order of their receipt."""
        return tuple(record for record in self.records.values() if not record.finished)

    # -----------------------------------------------------------------------------------------
    # Writing

    def append(self, event: str, record: Record, *, time: float) -> None:
        """Put an event on disk; it counts when this returns.

        Args:
            event: what happened, a word for the audit.
            record: the action after it.
            time: Unix time.

        Raises:
            JournalError: it is not on disk; the event must not take effect.
        """
        self._write({"event": event, "time": time, "record": record.dump()})
        self.remember(record)
        # Twice: however much must be kept, old journals are not pushed out by one event each.
        if self._size > max(ROTATE_BYTES, 2 * self._kept_size):
            try:
                self.rotate(time=time)
            except JournalError as error:
                # The event itself is on disk; the next one tries again.
                _log.warning("journal not rotated", error=str(error))

    def alias(self, decision_id: str, of: str, *, time: float) -> None:
        """Note that a decision is answered by the report of another one.

        Raises:
            JournalError: as `append`.
        """
        self._write({"event": "alias", "time": time, "decision_id": decision_id, "of": of})
        self.aliases[decision_id] = of

    def check(self) -> None:
        """Go on only while the file that is written is the one that the next start will read.

        Raises:
            JournalError: it was removed, replaced, cut or written by somebody else, or could not be
                written; nothing can be done until the agent is started anew.
        """
        if self._broken:
            raise JournalError(
                f"the journal {self.path} could not be written, or was changed by somebody else, "
                "before; see the log, and start the agent anew"
            )
        try:
            named, held = self.path.lstat(), os.fstat(self._descriptor)
        except OSError as error:
            self._broken = True
            raise JournalError(
                f"the journal {self.path} is not there any more ({error.strerror}). What it "
                "forgets can be ended a second time: put it back, then start the agent anew"
            ) from error
        if not os.path.samestat(named, held) or held.st_size != self._size:
            self._broken = True
            raise JournalError(
                f"the journal {self.path} was replaced, cut or written by somebody else. What it "
                "forgets can be ended a second time: put it back, then start the agent anew"
            )

    def _write(self, event: dict[str, Any]) -> None:
        self.check()
        line = _line(event)
        try:
            _write_all(self._descriptor, line)
            os.fsync(self._descriptor)
        except OSError as error:
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError:
                self._broken = True
            # After a failed fsync the kernel may have dropped what it could not write: nobody
            # knows what is on disk until the file is read again at the next start.
            self._broken = self._broken or error.errno not in _SPACE
            raise JournalError(
                f"the journal {self.path} cannot be written: {error.strerror}"
            ) from error
        self._size += len(line)
        # Once more: what went to a file that was replaced meanwhile is not on disk.
        self.check()

    def rotate(self, *, time: float) -> None:
        """Begin the file anew with what must be kept; the old one is put aside for the audit.

        Kept are actions that are not over, every attempt that was ended on this boot, and the
        newest of the others.

        Raises:
            JournalError: the new file cannot be written; the old one stays in use.
        """
        boots = [record.boot_id for record in self.records.values()]
        kept = self._kept(boots[-1] if boots else "")
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            new.unlink(missing_ok=True)
            descriptor = os.open(
                new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            try:
                size = self._write_kept(descriptor, kept, time)
                os.fsync(descriptor)
                self._put_aside()
                new.replace(self.path)
                _sync_folder(self.path.parent)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise JournalError(
                f"the journal {self.path} cannot be begun anew: {error.strerror}"
            ) from error
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, size
        self._kept_size = size
        self.records = {record.decision_id: record for record in kept}
        self._attempts = {
            job_id: decision_id
            for job_id, decision_id in self._attempts.items()
            if decision_id in self.records
        }
        self.aliases = {name: of for name, of in self.aliases.items() if of in self.records}

    def _kept(self, boot: str) -> list[Record]:
        newest = {record.decision_id for record in list(self.records.values())[-KEEP_FINISHED:]}
        return [
            record
            for record in self.records.values()
            if record.decision_id in newest
            or not record.finished
            or (record.spends_attempt and record.boot_id == boot)
        ]

    def _write_kept(self, descriptor: int, kept: list[Record], time: float) -> int:
        names = {record.decision_id for record in kept}
        lines = [
            _line({"event": "epoch", "time": time, "epoch": self.epoch}),
            *(_line({"event": "kept", "time": time, "record": item.dump()}) for item in kept),
            *(
                _line({"event": "alias", "time": time, "decision_id": name, "of": of})
                for name, of in self.aliases.items()
                if of in names
            ),
        ]
        for line in lines:
            _write_all(descriptor, line)
        return sum(map(len, lines))

    def _put_aside(self) -> None:
        def old(number: int) -> Path:
            return self.path.with_name(f"{self.path.name}.{number}")

        for number in range(KEEP_OLD - 1, 0, -1):
            if old(number).exists():
                old(number).replace(old(number + 1))
        # A second name for the present file: it is never without its own.
        old(1).unlink(missing_ok=True)
        os.link(self.path, old(1))

    def close(self) -> None:
        """Let another agent have it; what a thread still has to say is not written any more."""
        self._broken = True
        os.close(self._descriptor)
        os.close(self._lock)


_SPACE = (errno.ENOSPC, errno.EDQUOT)  # refused before anything was taken on


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **event}, separators=(",", ":")).encode() + b"\n"


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
