"""Nodes of many kinds, each as a scenario: what a driver tells there, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwarden.exporter.simulated import (
    GIB,
    NOT_AVAILABLE,
    Card,
    Fault,
    Scenario,
    SimulatedInstance,
    SimulatedProcess,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_SUPPORTED, NO_PERMISSION, LOST, UNKNOWN = 3, 4, 15, 999
MIB = 2**20


def _faults(code: int, *calls: str, card: int | None = None) -> list[Fault]:
    return [Fault(call, code, card=card) for call in calls]


def scenarios(pids: Sequence[int]) -> dict[str, Scenario]:
    """Kind of node -> what its driver says.

    Args:
        pids: of four live processes.
    """
    first, second, third, fourth = pids
    busy = SimulatedProcess(0, first, memory=8 * GIB, sm=60, mem=20)
    other = SimulatedProcess(0, second, memory=4 * GIB, sm=37, mem=10)
    on_next = SimulatedProcess(1, third, memory=2 * GIB, sm=90, mem=50)
    data_centre = Scenario(
        [
            Card(0, reserved=614 * MIB, memory=143771 * MIB, name="NVIDIA H200", throttle=4),
            Card(1, ecc_corrected=3, ecc_uncorrected=1, energy=10**12),
        ],
        [busy, other, on_next],
        driver="580.65.06",
    )
    geforce = Scenario(
        [Card(0, name="NVIDIA GeForce RTX 2080 SUPER", memory=8 * GIB, reserved=400 * MIB)],
        [replace(busy, memory=2 * GIB), SimulatedProcess(0, second, memory=GIB, kind="graphics")],
        faults=_faults(NOT_SUPPORTED, "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMigMode"),
    )
    mig = Scenario(
        [Card(0, mig=1, name="NVIDIA H200")],
        [
            SimulatedProcess(0, first, memory=2194 * MIB, sm=60, gi=1, ci=0),
            SimulatedProcess(0, second, memory=1170 * MIB, sm=60, gi=2, ci=0),
            SimulatedProcess(0, third, memory=13526 * MIB, sm=60, gi=2, ci=1),
            SimulatedProcess(0, fourth, memory=100 * MIB),
        ],
        instances=[
            SimulatedInstance(0, 1, "MIG-1"),
            SimulatedInstance(0, 2, "MIG-2", profile="3g.71gb", memory=70 * GIB),
            SimulatedInstance(0, 2, "MIG-3", ci=1, profile="1c.3g.71gb", memory=70 * GIB),
        ],
    )
    wsl = Scenario(
        [Card(0, name="\udcf8\udcffNVIDIA GeForce RTX 4090", memory=24 * GIB, used=GIB)],
        [replace(busy, memory=NOT_AVAILABLE)],
        faults=_faults(
            NOT_SUPPORTED,
            "nvmlDeviceGetComputeRunningProcesses*",
            "nvmlDeviceGetProcessUtilization",
            "nvmlDeviceGetFieldValues",
            "nvmlEvent*",
        ),
        driver="555.99",
    )
    tegra = Scenario(
        [Card(0, name="Orin (nvgpu)")],
        [busy],
        faults=_faults(
            NOT_SUPPORTED,
            *("nvmlDeviceGetMemoryInfo*", "nvmlDeviceGetTemperature*", "nvmlDeviceGetPower*"),
            *("nvmlDeviceGetEnforced*", "nvmlDeviceGetTotal*", "nvmlDeviceGetClock*"),
            *("nvmlDeviceGet*Processes*", "nvmlDeviceGetProcess*", "nvmlDeviceGetField*"),
            *("nvmlDeviceGetCurrent*", "nvmlDeviceGetMig*", "nvmlDeviceGetUtilization*"),
            *("nvmlDeviceGetPciInfo*", "nvmlEvent*", "nvmlGpm*", "nvmlDeviceGetPersistence*"),
            *("nvmlDeviceGetComputeRunning*", "nvmlDeviceGetGraphics*", "nvmlDeviceGetMPS*"),
        ),
    )
    grace = Scenario(
        [Card(0, name="NVIDIA GB10", utilization=42)],
        [busy],
        faults=_faults(NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo*"),
    )
    virtual = Scenario(
        [Card(0, name="GRID A100-10C", memory=10 * GIB)],
        [replace(busy, memory=2 * GIB), other],
        faults=_faults(
            NOT_SUPPORTED,
            *("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetTotal*", "nvmlDeviceGetPower*"),
            *("nvmlDeviceGetEnforced*", "nvmlDeviceGetTemperature*", "nvmlDeviceGetFieldValues"),
        ),
    )
    mps = Scenario(
        [Card(0)],
        [busy, replace(other, kind="mps", memory=NOT_AVAILABLE), replace(on_next, card=0, sm=0)],
    )
    old = Scenario(
        [Card(0, name="Tesla K80", memory=12 * GIB)],
        [replace(busy, memory=GIB)],
        missing=[
            *("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"),
            *("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlEventSetWait_v2"),
            *("nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetTemperatureV"),
            *("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMigMode"),
        ],
        driver="470.256.02",
    )
    return {
        "data-centre": data_centre,
        "geforce": geforce,
        "mig": mig,
        "wsl": wsl,
        "tegra": tegra,
        "grace-blackwell": grace,
        "vgpu": virtual,
        "mps": mps,
        "before-r510": old,
        "wide-rows": replace(data_centre, row_bytes=32, driver="535.54.03"),
        "lost": replace(data_centre, faults=_faults(LOST, "*", card=1)),
        "lost-from-the-start": replace(
            data_centre, faults=_faults(LOST, "nvmlDeviceGetHandleByIndex_v2")
        ),
        "no-permission": replace(
            data_centre, faults=_faults(NO_PERMISSION, "nvmlDeviceGet*", card=0)
        ),
        "everything-fails": replace(data_centre, faults=_faults(UNKNOWN, "nvmlDeviceGet*", card=0)),
        "no-driver": replace(data_centre, faults=_faults(9, "nvmlInit*")),
        "no-cards": Scenario(),
        "ghost-load": Scenario([Card(0, utilization=100, power=70)]),
        "strangers": Scenario(
            [Card(0)], [SimulatedProcess(0, 3_999_999, memory=28234 * 10**6, ghost=1)]
        ),
    }
