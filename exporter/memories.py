"""What is remembered of a job between snapshots, for as long as any of its processes lives.

A job may leave its cards for a while, and the driver may be released under it: neither makes it a
new one, with a new first use and a new cold start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.exporter.recollections import JobRecord, UsageRecord
from gpuwarden.exporter.resources import Growth, Usage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gpuwarden.exporter.processes import Process

Identity = tuple[int, int]


@dataclass(slots=True)
class Memory:
    """What is remembered of one job; times are Unix times.

    Attributes:
        usage: the counters of its tree.
        first_gpu_use: when it was first seen on a card.
        cpu_active_at: when it last used the processor.
        log_written_at: when its log was last written.
        held: card -> its processes there.
    """

    usage: Usage = field(default_factory=Usage)
    first_gpu_use: float | None = None
    cpu_active_at: float | None = None
    log_written_at: float | None = None
    held: dict[str, tuple[Identity, ...]] = field(default_factory=dict)


class Memories:
    """The memories of all jobs by job id."""

    def __init__(self) -> None:
        """Begin knowing nobody."""
        self._by_job: dict[str, Memory] = {}

    def of(self, job_id: str) -> Memory:
        """The memory of a job; a new one for a job that was not known."""
        return self._by_job.setdefault(job_id, Memory())

    def holders(self, uuid: str) -> Iterable[Identity]:
        """Processes that were last seen on a card."""
        for memory in self._by_job.values():
            yield from memory.held.get(uuid, ())

    def forget(self, seen: Collection[str], processes: Mapping[int, Process]) -> None:
        """Drop jobs that have ended.

        Args:
            seen: jobs of this snapshot.
            processes: all processes, by pid.
        """
        gone = [
            job_id
            for job_id, memory in self._by_job.items()
            if job_id not in seen
            and not any(_lives(identity, processes) for identity in memory.usage.ticks)
        ]
        for job_id in gone:
            del self._by_job[job_id]

    def recollect(self) -> dict[str, JobRecord]:
        """What a later exporter must know."""
        return {
            job_id: JobRecord(
                usage=UsageRecord(
                    cpu=(memory.usage.cpu.total, memory.usage.cpu.last),
                    read=(memory.usage.read.total, memory.usage.read.last),
                    io_wait=memory.usage.io_wait,
                    measured_at=memory.usage.measured_at,
                    ticks=dict(memory.usage.ticks),
                ),
                first_gpu_use=memory.first_gpu_use,
                cpu_active_at=memory.cpu_active_at,
                log_written_at=memory.log_written_at,
                held=dict(memory.held),
            )
            for job_id, memory in self._by_job.items()
        }

    def recall(self, jobs: Mapping[str, JobRecord], *, now: float) -> None:
        """Take over what an earlier exporter knew.

        Args:
            jobs: by job id.
            now: Unix time; no time that is remembered lies behind it, however the clock was set.
        """

        def past(time: float | None) -> float | None:
            return None if time is None else min(time, now)

        for job_id, job in jobs.items():
            usage = job.usage
            self._by_job[job_id] = Memory(
                usage=Usage(
                    cpu=Growth(*usage.cpu),
                    ticks=dict(usage.ticks),
                    read=Growth(*usage.read),
                    io_wait=usage.io_wait,
                    measured_at=usage.measured_at,
                ),
                first_gpu_use=past(job.first_gpu_use),
                cpu_active_at=past(job.cpu_active_at),
                log_written_at=past(job.log_written_at),
                held=dict(job.held),
            )


def _lives(identity: Identity, processes: Mapping[int, Process]) -> bool:
    process = processes.get(identity[0])
    return process is not None and process.start_ticks == identity[1] and not process.ended
