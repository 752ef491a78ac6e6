"""MIG: instances of a card, each a card of its own for whoever runs on it.

The driver lists processes on the card, with the ids of the instance they run on; memory and
identity are the instance's. Utilization exists for no process on an instance, and for the instance
itself only by GPM (`gpm.py`), where the card has it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from gpuwarden.exporter import drivers
from gpuwarden.exporter.devices import Gpu, MigInstance

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.exporter.devices import DeviceSnapshot

MAX_INSTANCES = 64
"""No card has more than seven; a driver that names another number is not followed for ever."""

_MARK = " MIG "


def read(
    driver: drivers.Driver,
    handle: Any,
    memory: Callable[[Any], tuple[int | None, int | None]],
) -> tuple[MigInstance, ...]:
    """Instances of a card in MIG mode.

    Args:
        driver: counts what could not be had.
        handle: NVML's, of the card.
        memory: (total, used) in bytes of what a handle means.

    Raises:
        Lost: the card is lost.
        DriverUnavailable: the driver is gone.
    """
    count = driver.number("nvmlDeviceGetMaxMigDeviceCount", handle, vital=True) or 0
    found = []
    for index in range(min(count, MAX_INSTANCES)):
        part = ctypes.c_void_p()
        code = driver.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, ctypes.byref(part))
        if code in (drivers.NOT_FOUND, drivers.GPU_NOT_FOUND):
            # Places of instances need not be used without gaps.
            continue
        if code != drivers.SUCCESS:
            # Who runs on it would be said to run on the whole card.
            driver.note(code, vital=True)
            continue
        instance = _instance(driver, part, memory)
        if instance is not None:
            found.append(instance)
    return tuple(found)


def _instance(
    driver: drivers.Driver,
    handle: Any,
    memory: Callable[[Any], tuple[int | None, int | None]],
) -> MigInstance | None:
    uuid = driver.text("nvmlDeviceGetUUID", handle, 96, vital=True)
    gpu_instance = driver.number("nvmlDeviceGetGpuInstanceId", handle, vital=True)
    compute_instance = driver.number("nvmlDeviceGetComputeInstanceId", handle, vital=True)
    if not uuid or gpu_instance is None or compute_instance is None:
        # It went while it was looked at, or cannot be told from the others.
        driver.dropped["enumeration"] += 1
        return None
    total, used = memory(handle)
    return MigInstance(
        uuid=uuid,
        gpu_instance_id=gpu_instance,
        compute_instance_id=compute_instance,
        profile=_profile(driver, handle),
        memory_total_bytes=total,
        memory_used_bytes=used,
    )


def _profile(driver: drivers.Driver, handle: Any) -> str:
    """Such as 1g.5gb: from the name, or from its shares where the name does not tell."""
    name = driver.text("nvmlDeviceGetName", handle, 96)
    if _MARK in name:
        return name.rpartition(_MARK)[2]
    shares = drivers.DEVICE_ATTRIBUTES()
    if not driver.read("nvmlDeviceGetAttributes_v2", handle, ctypes.byref(shares)):
        return ""
    slices, part = int(shares.gpuInstanceSliceCount), int(shares.computeInstanceSliceCount)
    compute = f"{part}c." if part < slices else ""
    return f"{compute}{slices}g.{math.ceil(shares.memorySizeMB / 1024)}gb"


def places(devices: DeviceSnapshot | None) -> tuple[Gpu, ...]:
    """Where processes run: the cards, with an instance of MIG as a card of its own.

    A card with instances is there as well, with what runs on none of them. What is known of the
    memory is on the instance; where two share one GPU instance, nobody knows whose that is, nor
    which of them is at work.

    Args:
        devices: the node's cards.
    """
    if devices is None:
        return ()
    found: list[Gpu] = []
    for gpu in devices.gpus:
        found += _parts(gpu) if gpu.instances else (gpu,)
    return tuple(found)


def _parts(gpu: Gpu) -> list[Gpu]:
    shared = [item.gpu_instance_id for item in gpu.instances]
    parts = []
    for item in gpu.instances:
        ids = (item.gpu_instance_id, item.compute_instance_id)
        sole = shared.count(item.gpu_instance_id) == 1
        parts.append(
            Gpu(
                index=gpu.index,
                uuid=item.uuid,
                name=gpu.name,
                pci_bus_id=gpu.pci_bus_id,
                up=gpu.up,
                memory_total_bytes=item.memory_total_bytes if sole else None,
                memory_used_bytes=item.memory_used_bytes if sole else None,
                utilization_ratio=item.utilization_ratio if sole else None,
                mig_enabled=True,
                processes=None
                if gpu.processes is None
                else tuple(
                    process
                    for process in gpu.processes
                    if (process.gpu_instance_id, process.compute_instance_id) == ids
                ),
            )
        )
    taken = {(item.gpu_instance_id, item.compute_instance_id) for item in gpu.instances}
    parts.append(
        dataclasses.replace(
            gpu,
            instances=(),
            memory_used_bytes=_rest(gpu),
            processes=None
            if gpu.processes is None
            else tuple(
                process
                for process in gpu.processes
                if (process.gpu_instance_id, process.compute_instance_id) not in taken
            ),
        )
    )
    return parts


def _rest(gpu: Gpu) -> int | None:
    """Bytes used on a card outside its instances."""
    used = {item.gpu_instance_id: item.memory_used_bytes for item in gpu.instances}
    known = [size for size in used.values() if size is not None]
    if gpu.memory_used_bytes is None or len(known) < len(used):
        return None
    return max(0, gpu.memory_used_bytes - sum(known))
