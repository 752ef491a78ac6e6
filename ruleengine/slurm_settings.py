"""The commands of the Slurm that engine.yaml names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.slurm_commands import SlurmCommands

if TYPE_CHECKING:
    from gpuwarden.ruleengine.settings import Settings


def slurm_commands(settings: Settings, *, least: float = 0.0) -> SlurmCommands | None:
    """Those that engine.yaml names, or None where it has no `slurm`.

    Args:
        settings: of engine.yaml.
        least: seconds that one command may take even if `slurm.timeout` is shorter.
    """
    chosen = settings.values.slurm
    if chosen is None:
        return None
    named = {
        "squeue": chosen.squeue,
        "scontrol": chosen.scontrol,
        "scancel": chosen.scancel,
        "sacct": chosen.sacct,
    }
    return SlurmCommands(
        {name: settings.path(path) for name, path in named.items() if path is not None},
        None if chosen.config is None else settings.path(chosen.config),
        max(chosen.timeout, least),
    )
