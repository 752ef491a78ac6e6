"""The processes of one job in one snapshot, and what of each card is theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.exporter.cgroups import PlatformKind
from gpuwarden.exporter.instances import places
from gpuwarden.exporter.jobs import Holding
from gpuwarden.exporter.process_tables import BUSY_RATIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.exporter.allocations import Allocation
    from gpuwarden.exporter.cgroups import Platform
    from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess
    from gpuwarden.exporter.memories import Memory
    from gpuwarden.exporter.processes import Process
    from gpuwarden.exporter.runs import LiveRun

MPS_COMM = "nvidia-cuda-mps"
OCCUPIED_BYTES = 2**30
"""More memory than a driver takes for itself, also where it does not tell that apart."""
_UNKNOWN_TENANT = "?"
_HELPERS = frozenset({"pause", "slurmstepd"})
"""What platforms run beside a job."""


@dataclass(slots=True)
class Group:
    """The processes of one job in one snapshot.

    Attributes:
        job_id: the job.
        platform: whose job it is.
        root: the process that names it; None for a job of a platform without a process here.
        root_lives: False where `root` is how it was before it ended.
        tree: all its processes.
        on_cards: pid -> process that the driver lists.
        runs: its declared trainings.
        allocation: what its platform gave it, if that is known.
    """

    job_id: str
    platform: Platform
    root: Process | None
    root_lives: bool = True
    tree: list[Process] = field(default_factory=list)
    on_cards: dict[int, Process] = field(default_factory=dict)
    runs: list[LiveRun] = field(default_factory=list)
    allocation: Allocation | None = None

    def settle(self) -> None:
        """Choose the root among the processes of a platform's job: its owner's oldest."""
        if self.platform.kind is PlatformKind.NONE:
            return
        given = self.allocation.uid if self.allocation is not None else None
        if self.root is not None:
            given = self.root.uid
        own = [
            item
            for item in self.tree
            if item.comm not in _HELPERS and (given is None or item.uid == given)
        ]
        self.root = min(own, key=lambda item: (item.start_ticks, item.pid), default=self.root)


class Tenancies:
    """Who is on which card, by process and by the platforms' word."""

    def __init__(
        self,
        devices: DeviceSnapshot | None,
        processes: Mapping[int, Process],
        groups: Mapping[str, Group],
    ) -> None:
        """Find out once for a snapshot.

        Args:
            devices: the node's cards.
            processes: all processes, by pid.
            groups: by job id.
        """
        self._places = places(devices)
        self._by_job: dict[tuple[str, str], list[GpuProcess]] = {}
        self._tenants: dict[str, set[str]] = {}
        self._given: dict[str, set[str]] = {}
        self._served: set[str] = set()
        owner = {pid: group.job_id for group in groups.values() for pid in group.on_cards}
        for gpu in self._places:
            names = self._tenants.setdefault(gpu.uuid, set())
            for item in gpu.processes or ():
                job_id = owner.get(item.pid)
                if job_id is not None:
                    self._by_job.setdefault((gpu.uuid, job_id), []).append(item)
                process = processes.get(item.pid)
                if process is not None and process.comm.startswith(MPS_COMM):
                    self._served.add(gpu.uuid)
                else:
                    # A process that /proc does not know is a tenant of its own.
                    names.add(job_id or _UNKNOWN_TENANT)
        for group in groups.values():
            for uuid in group.allocation.uuids if group.allocation is not None else ():
                self._given.setdefault(uuid, set()).add(group.job_id)

    def holdings(self, group: Group, memory: Memory) -> tuple[Holding, ...]:
        """The cards that a job holds.

        Args:
            group: the job.
            memory: what is remembered of it; brought forward.
        """
        holdings = []
        for gpu in self._places:
            given = group.job_id in self._given.get(gpu.uuid, ())
            if gpu.processes is None:
                # Lost, or its list cannot be read: what the job held it holds until that is known.
                if given or gpu.uuid in memory.held:
                    holdings.append(Holding(gpu.index, gpu.uuid))
                continue
            own = self._by_job.get((gpu.uuid, group.job_id), [])
            if own:
                memory.held[gpu.uuid] = tuple(group.on_cards[item.pid].identity for item in own)
                holdings.append(self._used(gpu, group, own))
                continue
            memory.held.pop(gpu.uuid, None)
            if given:
                holdings.append(self._unused(gpu))
        return tuple(holdings)

    def _used(self, gpu: Gpu, group: Group, own: Iterable[GpuProcess]) -> Holding:
        sole = self._tenants[gpu.uuid] == {group.job_id}
        return Holding(
            index=gpu.index,
            uuid=gpu.uuid,
            memory_bytes=total(item.memory_bytes for item in own),
            utilization_ratio=gpu.utilization_ratio if sole else _shared(own),
        )

    def _unused(self, gpu: Gpu) -> Holding:
        """A card that a job was given and has no process on.

        If somebody is there to whom the card was not given, it may be the job's work under another
        name, such as a container that it had a daemon start: then nothing is known of its use. Nor
        is it where a server of MPS is at work, for which the driver may list no client, and where a
        card is busy, or one that tells no load is full, with nobody on it: whoever that is, he is
        hidden.
        """
        tenants = self._tenants[gpu.uuid]
        hidden = gpu.uuid in self._served or (not tenants and _works(gpu))
        if hidden or not tenants <= self._given[gpu.uuid]:
            return Holding(gpu.index, gpu.uuid)
        return Holding(gpu.index, gpu.uuid, memory_bytes=0, utilization_ratio=0.0)


def _works(gpu: Gpu) -> bool:
    """Whether a card shows by itself that somebody is on it."""
    if gpu.utilization_ratio is not None:
        return gpu.utilization_ratio >= BUSY_RATIO
    return (gpu.memory_used_bytes or 0) >= OCCUPIED_BYTES


def total(values: Iterable[int | None]) -> int | None:
    """A sum; None where a part is not known."""
    found = 0
    for value in values:
        if value is None:
            return None
        found += value
    return found


def _shared(own: Iterable[GpuProcess]) -> float | None:
    found = 0.0
    for item in own:
        if item.utilization_ratio is None:
            return None
        found += item.utilization_ratio
    return min(1.0, found)
