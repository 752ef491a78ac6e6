"""What a node's jobs looked like at one moment: frozen, and all that the collector reads.

Every value that could not be had is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.exporter.devices import DeviceSnapshot
    from gpuwarden.exporter.processes import Process
    from gpuwarden.job_files import RunDescription, RunStatus


@dataclass(frozen=True, slots=True)
class Holding:
    """A card that a job holds.

    Attributes:
        index: NVML's index.
        uuid: the card.
        memory_bytes: of the job's processes on it; None where one of them is not known.
        utilization_ratio: the card's for a sole tenant, else the sum of the job's processes; None
            where it cannot be measured.
    """

    index: int
    uuid: str
    memory_bytes: int | None = None
    utilization_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job's whole process tree uses of the node.

    Attributes:
        cpu_seconds: since the job was first seen, and what its processes had used by then.
        read_bytes: read from storage; None where /proc does not tell.
        io_wait_seconds: time that its processes were seen blocked, summed over processes.
        threads: of all its processes.
        loader_workers: processes that look like a data loader's workers.
        resident_bytes: resident memory; pages shared by processes count for each.
        states: state -> how many processes.
        pressure: resource (cpu, io, memory) -> stall seconds of its cgroup.
    """

    cpu_seconds: float
    read_bytes: int | None
    io_wait_seconds: float
    threads: int
    loader_workers: int
    resident_bytes: int
    states: dict[str, int]
    pressure: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class YoloCommand:
    """What a command line tells of a YOLO training; empty where it does not say.

    Attributes:
        model: name without folder and suffix.
        batch: images per step over all cards; empty where the training finds it by itself.
        imgsz: longer side of an image in pixels.
        epochs: as written.
        project: its last folder.
        devices: how many cards it asks for, 0 for none, None where it does not say.
        framework: ultralytics, or torch for the older repositories' train.py.
        refused: values that were given but could not be taken for what they should be.
    """

    model: str = ""
    batch: str = ""
    imgsz: str = ""
    epochs: str = ""
    project: str = ""
    devices: int | None = None
    framework: str = "ultralytics"
    refused: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class PlatformFacts:
    """What is known of a job beside its processes; empty where it is not known.

    Attributes:
        platform: slurm, kubernetes, or empty.
        number: what the platform's tools take: Slurm's number of the job, or the pod's uid.
        cluster, partition, account: Slurm's.
        namespace, name: the pod's.
        submit_time: Unix time at which it was submitted (Slurm), or None.
        containers: ids of the containers of its processes on cards.
    """

    platform: str = ""
    number: str = ""
    cluster: str = ""
    partition: str = ""
    account: str = ""
    namespace: str = ""
    name: str = ""
    submit_time: float | None = None
    containers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A declared training whose process is proven to be its writer's.

    Attributes:
        description: what does not change.
        status: the newest, or None while there is none.
        heartbeat, phase_since, checkpoint_time, checkpoint_durable: Unix times of the status, None
            where they are not given or lie in the future.
        upload_lag: seconds; see `UploadProgress`.
        answered: state of a leave request -> Unix time, likewise.
    """

    description: RunDescription
    status: RunStatus | None = None
    heartbeat: float | None = None
    phase_since: float | None = None
    checkpoint_time: float | None = None
    checkpoint_durable: float | None = None
    upload_lag: float | None = None
    answered: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of a job on this node.

    Attributes:
        job_id: see design.md section 3.
        user: name of its owner, or the uid where it has none.
        source: where its identity comes from: slurm, pod, trainer, cmdline or process.
        framework: ultralytics, torch, jupyter, tensorflow, jax, or empty where not recognised.
        interactive: a terminal or a Jupyter kernel.
        root: its root process, or the oldest of its processes for a platform's job; None where
            such a job has no process here.
        executables: (executable, cgroup) of each process that holds a GPU, an empty executable
            where it does not count; those whose executable could not be found out are not in it.
        holdings: the cards that it holds.
        start_time: Unix time; of a job without a process, by its platform, or None.
        first_gpu_use: Unix time, or None while it used none.
        activity: signal (log, heartbeat, cpu) -> Unix time of the last sign of life.
        resources: None where /proc could not be read.
        runs: its declared trainings.
        command: an undeclared training recognised from the command line.
        platform: what its platform tells of it.
    """

    job_id: str
    user: str
    source: str
    framework: str
    interactive: bool
    root: Process | None
    executables: tuple[tuple[str, str], ...]
    holdings: tuple[Holding, ...]
    start_time: float | None
    first_gpu_use: float | None
    activity: dict[str, float]
    resources: Resources | None = None
    runs: tuple[Run, ...] = ()
    command: YoloCommand | None = None
    platform: PlatformFacts = field(default_factory=PlatformFacts)


@dataclass(frozen=True, slots=True)
class GpuProcessRow:
    """A process on a card, with who it belongs to.

    Attributes:
        index, uuid: the card.
        pid: the process.
        user: name of its owner.
        job_id: its job; empty for what serves all jobs (MPS).
        start_time: Unix time.
        memory_bytes, utilization_ratio: as NVML gave them.
    """

    index: int
    uuid: str
    pid: int
    user: str
    job_id: str
    start_time: float
    memory_bytes: int | None = None
    utilization_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The whole node at one moment.

    Attributes:
        taken_at: Unix time at which reading began.
        devices: the cards, or None without a driver.
        jobs: by job id.
        processes: those on cards.
        unattributed: card -> used bytes that no process known to /proc accounts for.
        node_pressure: resource -> stall seconds of the node.
        lost_gpu_seconds: (user, reason) -> GPU time of ended runs that no saved state covers.
        dropped: reason -> values dropped in this snapshot.
        failed: collectors that failed: the snapshot is not complete.
        impaired: collectors that failed, without which it is complete all the same.
        host_pids: whether pids mean here what they mean to the driver.
    """

    taken_at: float
    devices: DeviceSnapshot | None
    jobs: tuple[Job, ...] = ()
    processes: tuple[GpuProcessRow, ...] = ()
    unattributed: dict[str, int] = field(default_factory=dict)
    node_pressure: dict[str, float] = field(default_factory=dict)
    lost_gpu_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    impaired: frozenset[str] = frozenset()
    host_pids: bool = True
