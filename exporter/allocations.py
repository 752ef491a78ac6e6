"""Cards that a platform gave to a job, whether or not the job does anything with them.

The most wasted card is one without a process: its job crashed in a step, waits, or never began to
use it. Only the platform knows whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.exporter.processes import PROC

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.exporter.cgroups import Platform
    from gpuwarden.exporter.devices import DeviceSnapshot, Gpu

MAX_INFORMATION_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a platform gave to a job on this node.

    Attributes:
        job_id: the job.
        platform: whose job it is.
        uuids: the cards, or instances of MIG.
        uid: the job's owner, where the platform tells.
        start_time: Unix time at which the platform started it, where it tells.
    """

    job_id: str
    platform: Platform
    uuids: frozenset[str]
    uid: int | None = None
    start_time: float | None = None


class DeviceFiles:
    """Minor number of a device file -> UUID of its card.

    Neither NVML's index nor the place in any list is the minor number: /dev/nvidia0 may be the
    seventh card. A number within a job (CUDA_VISIBLE_DEVICES) is none of them.
    """

    def __init__(self, proc: Path = PROC) -> None:
        """Know nothing yet.

        Args:
            proc: where procfs is mounted; the driver shows its device files there too.
        """
        self._proc = proc
        self._minors: dict[str, int | None] = {}

    def uuids(self, devices: DeviceSnapshot | None) -> dict[int, str]:
        """Cards by minor number; those without one that is known are left out.

        A card in MIG mode is left out too: what is given to jobs are its instances.

        Args:
            devices: the node's cards.
        """
        if devices is None:
            return {}
        found: dict[int, str] = {}
        for gpu in devices.gpus:
            minor = gpu.minor if gpu.minor is not None else self._by_driver(gpu)
            if minor is not None and gpu.uuid and not gpu.mig_enabled:
                found[minor] = gpu.uuid
        return found

    def _by_driver(self, gpu: Gpu) -> int | None:
        if gpu.uuid not in self._minors:
            self._minors[gpu.uuid] = self._read(gpu.pci_bus_id)
        return self._minors[gpu.uuid]

    def _read(self, pci_bus_id: str) -> int | None:
        # NVML writes eight digits of the PCI domain, the kernel four.
        domain, separator, rest = pci_bus_id.lower().partition(":")
        if not separator or "/" in rest:
            return None
        path = self._proc / "driver/nvidia/gpus" / f"{domain[-4:]}:{rest}" / "information"
        try:
            with path.open("rb") as file:
                content = file.read(MAX_INFORMATION_BYTES).decode(errors="replace")
        except OSError:
            return None
        for line in content.split("\n"):
            name, _, value = line.partition(":")
            if name.strip() == "Device Minor" and value.strip().isdecimal():
                return int(value)
        return None


def known_uuids(devices: DeviceSnapshot | None) -> frozenset[str]:
    """UUIDs of all cards and instances.

    Args:
        devices: the node's cards.
    """
    gpus = devices.gpus if devices is not None else ()
    return frozenset(
        uuid for gpu in gpus for uuid in (gpu.uuid, *(item.uuid for item in gpu.instances)) if uuid
    )
