"""Families that can be switched on and off: what they are, what they cost, and the usual choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switch:
    """A group of families.

    Attributes:
        help: which families, and what they cost.
        default: whether they are on where nothing is said; None: where what they need is found.
    """

    help: str
    default: bool | None = True


SWITCHES = {
    "clock": Switch("gpu_clock_hertz: four driver calls per card."),
    "ecc": Switch("gpu_ecc_errors_total: two driver calls per card."),
    "kubernetes": Switch(
        "Names of pods, by the folders of /var/log/pods, and the cards that the kubelet gave to "
        "pods without a process, by its pod-resources socket (gpuwarden[kubelet]): asked every "
        "10 s, at most every 2 s. Found on a node of Kubernetes.",
        default=None,
    ),
    "mig": Switch(
        "gpu_mig_*, and a job's card is its instance: six driver calls per instance, "
        "and two more for its utilization on Hopper and later."
    ),
    "nvlink": Switch(
        "gpu_nvlink_*_bytes_total, of the few cards that have links: in the call of pcie.",
        default=False,
    ),
    "pcie": Switch("gpu_pcie_*_bytes_total: one driver call per card."),
    "process": Switch("gpu_process_*: one series per process, card and family."),
    "slurm": Switch(
        "Identity of Slurm's jobs, and the cards that jobs without a process hold: one squeue "
        "every 30 s, or after 2 s for a job that is new, and one scontrol per new job. Without it "
        "Slurm's jobs are slurm-unresolved-N. Found where Slurm's commands and configuration are.",
        default=None,
    ),
    "tensor": Switch(
        "gpu_tensor_activity_ratio and gpu_mig_tensor_activity_ratio, on Hopper and later: two "
        "driver calls per card.",
        default=False,
    ),
    "throttle": Switch("gpu_throttle_active: one driver call per card."),
    "xid": Switch("gpu_xid_*: a thread that waits for events of the driver."),
}
"""Flag after `--collector.` -> group."""

DEFAULT_COLLECTORS = frozenset(name for name, switch in SWITCHES.items() if switch.default)
"""Those that need nothing to be found."""
