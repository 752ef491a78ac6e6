"""Which attempt of which Slurm job each process belongs to, and which cards jobs were given.

A cgroup names a job by a number that Slurm uses again, for another cluster's job and for another
attempt of the same job. Cluster and attempt come from the controller, and it may be slow or down.
**The identity of a running attempt never changes**: until the controller has answered a question
that was asked after an attempt was first seen, the attempt is withheld, and nobody is judged by
what is not shown. Where there is no answer for as long as the engine keeps a case in abeyance, the
attempt is shown as unresolved for the rest of its life, and nobody may end it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.exporter.allocations import Allocation, DeviceFiles, known_uuids
from gpuwarden.exporter.cgroups import Platform, PlatformKind, platform_of
from gpuwarden.exporter.processes import PROC, arguments, environment
from gpuwarden.exporter.recollections import NamedRecord
from gpuwarden.platforms.slurm import UNRESOLVED, attempt_id
from gpuwarden.platforms.slurm_texts import step_job

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.blocking_calls import BlockingCalls
    from gpuwarden.exporter.devices import DeviceSnapshot
    from gpuwarden.exporter.inquiries import Inquiry, Told
    from gpuwarden.exporter.processes import Process
    from gpuwarden.exporter.slurm import SlurmView
    from gpuwarden.platforms.slurm import SlurmJob

PATIENCE_SECONDS = 600.0
"""The engine closes the case of a job that it has not seen for so long; see design.md section 7."""
FRESH_SECONDS = 120.0
"""An answer that is older does not tell who has a card now."""

Identity = tuple[int, int]


@dataclass(slots=True)
class _Attempt:
    """An attempt with processes here.

    Attributes:
        after: the last question that was begun before it was first seen.
        seen_at: monotonic time of that.
        members: its processes in the last snapshot.
        number: Slurm's own number, or None where the cgroup names the job otherwise.
        job_id: its identity; None while it is withheld.
        job: what the controller said of it.
    """

    after: int
    seen_at: float
    members: frozenset[Identity] = frozenset()
    number: int | None = None
    job_id: str | None = None
    job: SlurmJob | None = None


class SlurmJobs:
    """Identities and cards of this node's Slurm jobs; used by the thread that takes snapshots."""

    def __init__(
        self,
        inquiry: Inquiry[SlurmView] | None,
        *,
        clock: Clock,
        calls: BlockingCalls,
        proc: Path = PROC,
    ) -> None:
        """Begin knowing nobody.

        Args:
            inquiry: asks the controller; None: nobody is asked, and every job stays unresolved.
            clock: for how long an attempt has waited.
            calls: makes calls that a job may make hang.
            proc: where procfs is mounted.
        """
        self._inquiry = inquiry
        self._clock = clock
        self._calls = calls
        self._proc = proc
        self._files = DeviceFiles(proc)
        self._attempts: dict[str, _Attempt] = {}
        self._by_job_id: dict[str, SlurmJob] = {}
        self.dropped: Counter[str] = Counter()

    @property
    def failed(self) -> bool:
        """Whether the controller does not answer, or has not yet."""
        return self._inquiry is not None and not self._inquiry.current(FRESH_SECONDS)

    def job_id(self, name: str) -> str | None:
        """The identity of a job that a cgroup names; None while it is withheld.

        Args:
            name: Slurm's number, or its SLUID.
        """
        if self._inquiry is None:
            return UNRESOLVED + name
        attempt = self._attempts.get(name)
        return attempt.job_id if attempt is not None else None

    def about(self, job_id: str) -> SlurmJob | None:
        """What the controller said of a job of the last snapshot, or None."""
        return self._by_job_id.get(job_id)

    def recollect(self) -> dict[str, NamedRecord]:
        """What a later exporter must know: the names of attempts."""
        return {
            name: NamedRecord(attempt.job_id, attempt.number, tuple(sorted(attempt.members)))
            for name, attempt in self._attempts.items()
            if attempt.job_id is not None
        }

    def recall(self, named: Mapping[str, NamedRecord]) -> None:
        """Take over the names that an earlier exporter gave; they hold while a process lives.

        Args:
            named: what cgroups call an attempt -> its name.
        """
        for name, item in named.items() if self._inquiry is not None else ():
            self._attempts[name] = _Attempt(
                after=0,
                seen_at=self._clock.monotonic(),
                members=frozenset(item.members),
                number=item.number,
                job_id=item.job_id,
            )

    def update(self, processes: Mapping[int, Process]) -> None:
        """Learn which attempts there are, and who they are.

        Args:
            processes: all processes, by pid.
        """
        self.dropped = Counter()
        self._by_job_id = {}
        if self._inquiry is None:
            return
        told = self._inquiry.told
        now = self._clock.monotonic()
        attempts: dict[str, _Attempt] = {}
        for name, members in _members(processes).items():
            attempt = self._attempts.get(name)
            if attempt is None or attempt.members.isdisjoint(members):
                # The same number, and nobody of before: it may be another attempt.
                number = int(name) if name.isdecimal() else None
                attempt = _Attempt(self._inquiry.begun, now, number=number)
            attempt.members = frozenset(members)
            attempts[name] = attempt
            if attempt.job_id is None:
                self._resolve(name, attempt, members, told=told, now=now)
            elif attempt.job is None and told is not None:
                attempt.job = _same(attempt, told.value)
            if attempt.job_id is not None and attempt.job is not None:
                self._by_job_id[attempt.job_id] = attempt.job
        self._attempts = attempts
        if told is None:
            # Also where no job has a process here: its cards are held nevertheless.
            self._inquiry.want()

    def _resolve(
        self,
        name: str,
        attempt: _Attempt,
        members: Mapping[Identity, Process],
        *,
        told: Told[SlurmView] | None,
        now: float,
    ) -> None:
        if self._inquiry is None:
            return
        if told is not None and told.number > attempt.after:
            if attempt.number is None:
                attempt.number = self._number(members.values(), told.value)
            job = told.value.jobs.get(attempt.number) if attempt.number is not None else None
            if job is None:
                # It has ended and left processes behind, or may not be seen by this user.
                attempt.job_id = UNRESOLVED + name
                self.dropped["slurm_unknown_job"] += 1
            else:
                attempt.job, attempt.job_id = job, attempt_id(job, told.value.cluster)
        elif now - attempt.seen_at >= PATIENCE_SECONDS:
            attempt.job_id = UNRESOLVED + name
            self.dropped["slurm_unresolved"] += 1
        else:
            self.dropped["slurm_pending"] += 1
            self._inquiry.want()

    def _number(self, members: Collection[Process], view: SlurmView) -> int | None:
        """Slurm's own number of a job whose cgroup calls it otherwise; None where nothing tells."""
        for process in members:
            if process.uid == 0 and process.comm == "slurmstepd":
                number = step_job("".join(arguments(process.pid, self._proc)[:1]))
                if number is not None:
                    return number
        for process in members:
            # Its owner's word, which counts for a job of the same owner on this node only.
            number = self._by_environment(process)
            job = view.jobs.get(number) if number is not None else None
            if job is not None and job.user_id == process.uid:
                return job.job_id
        return None

    def _by_environment(self, process: Process) -> int | None:
        found = self._calls.make(
            process.uid, lambda: environment(process.pid, "SLURM_JOB_ID", self._proc)
        )
        return int(found) if found and found.isdecimal() and len(found) <= 10 else None

    def allocations(self, devices: DeviceSnapshot | None) -> tuple[Allocation, ...]:
        """Which cards jobs hold now by the controller's word.

        Args:
            devices: the node's cards.
        """
        if self._inquiry is None or self._inquiry.told is None:
            return ()
        told = self._inquiry.told
        if self._clock.monotonic() - told.asked_at > FRESH_SECONDS:
            return ()
        view = told.value
        minors, known = self._files.uuids(devices), known_uuids(devices)
        names = {item.number: item for item in self._attempts.values() if item.number is not None}
        found = []
        for number, job in view.jobs.items():
            attempt = names.get(number)
            job_id = attempt_id(job, view.cluster) if attempt is None else attempt.job_id
            uuids = self._uuids(job, view, minors, known) if job.holds else frozenset()
            if job_id is None or not uuids:
                continue
            self._by_job_id.setdefault(job_id, job)
            found.append(
                Allocation(
                    job_id=job_id,
                    platform=Platform(PlatformKind.SLURM, str(number)),
                    uuids=uuids,
                    uid=job.user_id,
                    start_time=job.start_time,
                )
            )
        return tuple(found)

    def _uuids(
        self, job: SlurmJob, view: SlurmView, minors: Mapping[int, str], known: frozenset[str]
    ) -> frozenset[str]:
        cards = view.gpus(job)
        if cards is None:
            self.dropped["slurm_cards"] += 1
            return frozenset()
        found = set()
        for card in cards:
            uuid = card.uuid
            if uuid not in known:
                uuid = minors.get(card.minor, "") if card.minor is not None else ""
            if uuid:
                found.add(uuid)
            else:
                self.dropped["slurm_cards"] += 1
        return frozenset(found)


def _same(attempt: _Attempt, view: SlurmView) -> SlurmJob | None:
    """What the controller says of an attempt whose name is known; None where it is another."""
    job = view.jobs.get(attempt.number) if attempt.number is not None else None
    return job if job is not None and attempt_id(job, view.cluster) == attempt.job_id else None


def _members(processes: Mapping[int, Process]) -> dict[str, dict[Identity, Process]]:
    """What cgroups call a job -> its live processes."""
    found: dict[str, dict[Identity, Process]] = {}
    for process in processes.values():
        platform = platform_of(process.cgroup)
        if platform.kind is PlatformKind.SLURM and not process.ended:
            found.setdefault(platform.id, {})[process.identity] = process
    return found
