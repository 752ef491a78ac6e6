"""Families under another exporter's names, for dashboards that know only those.

`--compat dcgm` gives the six families of dcgm-exporter that Grafana's dashboard 12239 asks for,
with its labels and in its units; ours stay beside them. What was not measured is absent, where
dcgm-exporter has been seen to write 0 or a number that stands for nothing.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from gpuwarden.catalogue import Metric, MetricType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.exporter.devices import Gpu
    from gpuwarden.exporter.pages import Families

DCGM = "dcgm"
COMPATIBILITIES = (DCGM,)
NEEDED_COLLECTORS = {DCGM: frozenset({"clock", "tensor"})}
"""Compatibility -> collectors without which families of it would be missing."""

# dcgm-exporter wrote Hostname until May 2026, and hostname since; dashboards know either.
_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "hostname")
_MIB = 1024 * 1024


def _dcgm(name: str, text: str) -> Metric:
    return Metric(name, MetricType.GAUGE, "", _LABELS, f"{text} As dcgm-exporter names it.")


FOREIGN: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _dcgm("DCGM_FI_DEV_SM_CLOCK", "SM clock in MHz."),
        _dcgm("DCGM_FI_DEV_GPU_TEMP", "Temperature in degrees Celsius."),
        _dcgm("DCGM_FI_DEV_POWER_USAGE", "Power draw in watts."),
        _dcgm("DCGM_FI_DEV_GPU_UTIL", "Utilization in per cent."),
        _dcgm("DCGM_FI_DEV_FB_USED", "Used memory in MiB."),
        _dcgm("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Share of time tensor cores worked, 0 to 1."),
    )
}
"""Families that are not in our catalogue, by name."""


def node_name() -> str:
    """What dcgm-exporter takes for the host: NODE_NAME, which Kubernetes sets, or its name."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


def add_dcgm(families: Families, gpus: Iterable[Gpu], host: str) -> None:
    """Add the cards' families under dcgm-exporter's names.

    Args:
        families: the page.
        gpus: the cards; a lost one has no values.
        host: `node_name`.
    """
    for gpu in gpus:
        labels = (
            str(gpu.index),
            gpu.uuid,
            gpu.pci_bus_id,
            f"nvidia{gpu.index}",
            gpu.name,
            host,
            host,
        )
        clock = gpu.clocks_hertz.get("sm")
        for name, value in (
            ("DCGM_FI_DEV_SM_CLOCK", None if clock is None else clock / 1e6),
            ("DCGM_FI_DEV_GPU_TEMP", gpu.temperature_celsius),
            ("DCGM_FI_DEV_POWER_USAGE", gpu.power_watts),
            ("DCGM_FI_DEV_GPU_UTIL", _per_cent(gpu.utilization_ratio)),
            ("DCGM_FI_DEV_FB_USED", _mib(gpu.memory_used_bytes)),
            ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", gpu.tensor_activity_ratio),
        ):
            families.add(name, value, *labels)


def _per_cent(ratio: float | None) -> float | None:
    # NVML gives whole per cents.
    return None if ratio is None else float(round(ratio * 100))


def _mib(size: int | None) -> float | None:
    return None if size is None else float(size // _MIB)
