"""What a node's GPUs looked like at one moment: frozen snapshots in our own nouns.

Every value that the driver did not give is None, never 0. `nvml.py` builds these, everything else
only reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class ProcessKind(StrEnum):
    """Which of NVML's lists a process came from."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process as NVML lists it on one GPU.

    Attributes:
        pid: in the PID namespace of the driver, the host's.
        kind: the list it came from.
        memory_bytes: None where the driver does not tell.
        utilization_ratio: 0 only where the driver said so, or said NOT_FOUND for a process that its
            list shows alive on a card that supports samples; None where it cannot be measured.
        gpu_instance_id, compute_instance_id: the MIG instance it runs on, None without one.
    """

    pid: int
    kind: ProcessKind
    memory_bytes: int | None = None
    utilization_ratio: float | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """An instance of a GPU in MIG mode.

    Attributes:
        uuid: its own, not the card's.
        gpu_instance_id, compute_instance_id: by which processes name it.
        profile: such as 1g.5gb; empty where the driver does not tell.
        memory_total_bytes, memory_used_bytes: of its GPU instance.
        utilization_ratio: share of time that its GPU instance worked, by GPM; None before Hopper.
        tensor_activity_ratio: likewise of its tensor cores, where it is asked for.
    """

    uuid: str
    gpu_instance_id: int
    compute_instance_id: int
    profile: str = ""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    tensor_activity_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        index: NVML's index now; not stable over reboots.
        uuid: NVML's UUID; identifies the card.
        name: product name.
        pci_bus_id: such as 00000000:3B:00.0.
        minor: of its device file, /dev/nvidia<minor>: not its index; None where not told.
        up: whether it answers; a lost card has no values.
        processes: None where the list could not be read; an empty tuple says that there is none.
        memory_unified: whether it uses the node's memory and has none of its own, so that its sizes
            are not known; None where that is not known either.
        *_bytes: bytes; *_ratio: 0 to 1; *_celsius, *_watts, *_joules, *_hertz: base units.
        tensor_activity_ratio: share of time that its tensor cores worked, where it is asked for and
            the card has GPM.
        throttle: reason -> active.
        ecc_errors: kind (corrected, uncorrected) -> count since the driver was loaded.
        traffic_bytes: pcie_receive, pcie_transmit, nvlink_receive, nvlink_transmit -> bytes since
            the card was first seen.
        instances: of a card in MIG mode; of a lost one, those that it had, without values.
    """

    index: int
    uuid: str
    name: str
    pci_bus_id: str = ""
    minor: int | None = None
    up: bool = True
    utilization_ratio: float | None = None
    tensor_activity_ratio: float | None = None
    memory_activity_ratio: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_unified: bool | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    clocks_hertz: dict[str, float] = field(default_factory=dict)
    throttle: dict[str, bool] = field(default_factory=dict)
    ecc_errors: dict[str, int] = field(default_factory=dict)
    traffic_bytes: dict[str, int] = field(default_factory=dict)
    mig_enabled: bool = False
    processes: tuple[GpuProcess, ...] | None = None
    instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class XidErrors:
    """One kind of error that the driver reported of a card.

    Attributes:
        index: NVML's index of the card when it was last seen.
        uuid: the card.
        code: NVIDIA's number of the error.
        count: how often it was heard since the exporter started.
        last_seen: Unix time.
    """

    index: int
    uuid: str
    code: int
    count: int
    last_seen: float


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """All GPUs of the node at one moment.

    Attributes:
        taken_at: Unix time at which reading began.
        driver_version: as NVML gives it.
        simulated: whether the driver is gpuwarden's simulation.
        gpus: by index; lost ones included.
        dropped: reason -> how many values were read but not believed in this snapshot.
        complete: False if an unexpected error hid part of the node.
        xids: errors of cards, also of those that are gone.
        xids_heard: whether every card that could report an error is listened to.
    """

    taken_at: float
    driver_version: str
    simulated: bool
    gpus: tuple[Gpu, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    complete: bool = True
    xids: tuple[XidErrors, ...] = ()
    xids_heard: bool = True
