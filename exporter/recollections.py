"""What an exporter knew when it ended, for the one that follows it: frozen, and its form in a file.

Nothing in here can be found out again: which root a process had before its parent ended, when a job
first used a card, what ended runs had lost. All of it belongs to one boot, and names processes by
pid and start ticks, which no other process of that boot has.
"""

from __future__ import annotations

import json
import math
from dataclasses import astuple, dataclass, field
from typing import Any

from gpuwarden.exporter.devices import XidErrors
from gpuwarden.exporter.processes import Process

VERSION = 1
MAX_ROWS = 200_000
"""Rows of one list; a node has room for fewer processes than that."""
MAX_TEXT = 65_536

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Counters of a job's tree: see `resources.Usage`.

    Attributes:
        cpu, read: (total, last reading or None).
        io_wait: seconds.
        measured_at: on the monotonic clock, which runs on over a restart, or None.
        ticks: clock ticks of each process alone.
    """

    cpu: tuple[int, int | None] = (0, None)
    read: tuple[int, int | None] = (0, None)
    io_wait: float = 0.0
    measured_at: float | None = None
    ticks: dict[Identity, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What was remembered of a job: see `memories.Memory`; times are Unix times."""

    usage: UsageRecord
    first_gpu_use: float | None = None
    cpu_active_at: float | None = None
    log_written_at: float | None = None
    held: dict[str, tuple[Identity, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt of a run: see `runs.Attempt`.

    Attributes:
        run_id: the run.
        identity: of its process.
        uid: its owner.
        started: Unix time.
        gpus: cards that its job held when it last held any.
        covered: Unix time up to which saved state covers it, or None.
        ended_as, ended_at: why and when (Unix time) it ended, by its trainer's word.
        folder: (device, inode) of a container's folder, or None for the node's own.
        died_at: Unix time at which its end was noticed, or None.
    """

    run_id: str
    identity: Identity
    uid: int
    started: float
    gpus: int = 0
    covered: float | None = None
    ended_as: str = "died"
    ended_at: float | None = None
    died_at: float | None = None
    folder: Identity | None = None


@dataclass(frozen=True, slots=True)
class CounterRecord:
    """The driver's counters that are counted on, and what was left out.

    Attributes:
        traffic: (card, counter) -> (the driver's last reading, bytes since first seen).
        xids: errors of cards.
        dropped: reason -> values that were not believed.
    """

    traffic: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    xids: tuple[XidErrors, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamedRecord:
    """The name of a platform's attempt: see `slurm_jobs`.

    Attributes:
        job_id: its name, which it keeps while it runs.
        number: the platform's own, or None.
        members: its processes when they were last seen.
    """

    job_id: str
    number: int | None
    members: tuple[Identity, ...]


@dataclass(frozen=True, slots=True)
class Recollection:
    """All of it.

    Attributes:
        boot_id: the boot that it belongs to.
        written_at: Unix time at which it was true.
        roots: process -> its job's root, as it was at first sight.
        jobs: by job id.
        attempts: of runs that had been seen alive.
        lost: (user, reason) -> GPU seconds.
        counters: of the cards.
        named: what cgroups call an attempt of Slurm's -> its name.
    """

    boot_id: str
    written_at: float
    roots: dict[Identity, Process]
    jobs: dict[str, JobRecord]
    attempts: tuple[AttemptRecord, ...] = ()
    lost: dict[tuple[str, str], float] = field(default_factory=dict)
    counters: CounterRecord = field(default_factory=CounterRecord)
    named: dict[str, NamedRecord] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The file's content."""
        distinct: dict[Identity, int] = {}
        roots: list[list[Any]] = []
        members: list[list[int]] = []
        for member, root in self.roots.items():
            if root.ppid == 2 and member == root.identity:
                # The kernel's own threads start no jobs.
                continue
            number = distinct.get(root.identity)
            if number is None:
                number = distinct[root.identity] = len(roots)
                roots.append(_root_row(root))
            members.append([*member, number])
        document = {
            "version": VERSION,
            "boot_id": self.boot_id,
            "written_at": self.written_at,
            "roots": roots,
            "members": members,
            "jobs": {name: _job_row(job) for name, job in self.jobs.items()},
            "attempts": [_attempt_row(attempt) for attempt in self.attempts],
            "lost": [[*key, seconds] for key, seconds in self.lost.items()],
            "traffic": [[*key, *value] for key, value in self.counters.traffic.items()],
            "xids": [list(astuple(errors)) for errors in self.counters.xids],
            "dropped": [list(item) for item in self.counters.dropped.items()],
            "named": [
                [name, item.job_id, item.number, list(map(list, item.members))]
                for name, item in self.named.items()
            ],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> Recollection:
        """Read the file's content.

        Raises:
            ValueError: it is no such file, or of another version.
        """
        try:
            document = json.loads(content)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(document, dict):
            raise ValueError("it is no object")  # noqa: TRY004 (of the content, not of a type)
        version = _integer(document.get("version"))
        if version != VERSION:
            raise ValueError(f"its version is {version}, not {VERSION}")
        roots = [_root(row) for row in _rows(document, "roots", 8)]
        members = {}
        for row in _rows(document, "members", 3):
            number = _integer(row[2])
            if number >= len(roots):
                raise ValueError("a root is missing")
            members[_identity(row[:2])] = roots[number]
        return cls(
            boot_id=_text(document.get("boot_id")),
            written_at=_number(document.get("written_at")),
            roots=members,
            jobs={_text(name): _job(row) for name, row in _table(document, "jobs").items()},
            attempts=tuple(_attempt(row) for row in _rows(document, "attempts", 10)),
            lost={
                (_text(row[0]), _text(row[1])): _number(row[2])
                for row in _rows(document, "lost", 3)
            },
            counters=CounterRecord(
                traffic={
                    (_text(row[0]), _text(row[1])): (_integer(row[2]), _integer(row[3]))
                    for row in _rows(document, "traffic", 4)
                },
                xids=tuple(_xid(row) for row in _rows(document, "xids", 5)),
                dropped={_text(row[0]): _integer(row[1]) for row in _rows(document, "dropped", 2)},
            ),
            # An exporter from before there were names wrote none.
            named={
                _text(row[0]): _named(row) for row in _rows({"named": [], **document}, "named", 4)
            },
        )


# ---------------------------------------------------------------------------------------------
# Rows


def _root_row(root: Process) -> list[Any]:
    place = [root.pid, root.start_ticks, root.ppid, root.session, root.tty]
    return [*place, root.uid, root.comm, root.cgroup]


def _root(row: list[Any]) -> Process:
    pid, start_ticks, ppid, session, tty, uid = (_integer(value, minimum=-1) for value in row[:6])
    return Process(
        pid=pid,
        ppid=ppid,
        pgid=0,
        session=session,
        tty=tty,
        # Where it lives, what it is now is read from /proc.
        state="X",
        start_ticks=start_ticks,
        uid=uid,
        comm=_text(row[6]),
        cgroup=_text(row[7]),
        cpu_ticks=0,
        threads=0,
    )


def _job_row(job: JobRecord) -> dict[str, Any]:
    usage = job.usage
    return {
        "first_gpu_use": job.first_gpu_use,
        "cpu_active_at": job.cpu_active_at,
        "log_written_at": job.log_written_at,
        "held": {uuid: list(map(list, held)) for uuid, held in job.held.items()},
        "cpu": list(usage.cpu),
        "read": list(usage.read),
        "io_wait": usage.io_wait,
        "measured_at": usage.measured_at,
        "ticks": [[*identity, ticks] for identity, ticks in usage.ticks.items()],
    }


def _job(row: Any) -> JobRecord:
    if not isinstance(row, dict):
        raise ValueError("a job is no object")  # noqa: TRY004 (of the content, not of a type)
    return JobRecord(
        usage=UsageRecord(
            cpu=_growth(row.get("cpu")),
            read=_growth(row.get("read")),
            io_wait=_number(row.get("io_wait")),
            measured_at=_optional(row.get("measured_at")),
            ticks={_identity(item[:2]): _integer(item[2]) for item in _rows(row, "ticks", 3)},
        ),
        first_gpu_use=_optional(row.get("first_gpu_use")),
        cpu_active_at=_optional(row.get("cpu_active_at")),
        log_written_at=_optional(row.get("log_written_at")),
        held={
            _text(uuid): tuple(_identity(item) for item in _list(held))
            for uuid, held in _table(row, "held").items()
        },
    )


def _attempt_row(attempt: AttemptRecord) -> list[Any]:
    return [
        attempt.run_id,
        list(attempt.identity),
        attempt.uid,
        attempt.started,
        attempt.gpus,
        attempt.covered,
        attempt.ended_as,
        attempt.ended_at,
        attempt.died_at,
        None if attempt.folder is None else list(attempt.folder),
    ]


def _attempt(row: list[Any]) -> AttemptRecord:
    return AttemptRecord(
        run_id=_text(row[0]),
        identity=_identity(row[1]),
        uid=_integer(row[2]),
        started=_number(row[3]),
        gpus=_integer(row[4]),
        covered=_optional(row[5]),
        ended_as=_text(row[6]),
        ended_at=_optional(row[7]),
        died_at=_optional(row[8]),
        folder=None if row[9] is None else _identity(row[9]),
    )


def _xid(row: list[Any]) -> XidErrors:
    index, code, count = _integer(row[0]), _integer(row[2]), _integer(row[3])
    return XidErrors(index, _text(row[1]), code, count=count, last_seen=_number(row[4]))


def _named(row: list[Any]) -> NamedRecord:
    return NamedRecord(
        job_id=_text(row[1]),
        number=None if row[2] is None else _integer(row[2]),
        members=tuple(_identity(item) for item in _list(row[3])),
    )


# ---------------------------------------------------------------------------------------------
# Values


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_ROWS:
        raise ValueError("a list is missing or too long")
    if length is not None and len(value) != length:
        raise ValueError(f"a row has {len(value)} values instead of {length}")
    return value


def _rows(document: dict[str, Any], name: str, length: int) -> list[list[Any]]:
    return [_list(row, length) for row in _list(document.get(name))]


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    if not isinstance(value, dict) or len(value) > MAX_ROWS:
        raise ValueError(f"{name} is no object, or too large")
    return value


def _integer(value: Any, *, minimum: int = 0) -> int:
    if type(value) is not int or not minimum <= value < 2**63:
        raise ValueError("a number is not whole, or out of its range")
    return value


def _number(value: Any) -> float:
    # Times of files and trainers may be negative: whoever writes them must not spoil the state.
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("a number is none, or not finite")
    return float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError("a text is missing or too long")
    return value


def _identity(value: Any) -> Identity:
    first, second = _list(value, 2)
    return _integer(first), _integer(second)


def _growth(value: Any) -> tuple[int, int | None]:
    total, last = _list(value, 2)
    return _integer(total), None if last is None else _integer(last)
