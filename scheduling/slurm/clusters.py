"""The Slurm cluster that a policy names, asked by its own commands, one after the other."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm_texts import decode_config, decode_settings, decode_version
from gpuwarden.slurm_commands import SlurmCommands

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from gpuwarden.platforms.slurm_texts import ClusterConfig
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.slurm_commands import Answer

PROGRAMS: Final = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sacctmgr")


class Cluster:
    """A cluster, for callers of one thread who wait for each answer.

    Args:
        commands: of the cluster.
    """

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._runner = asyncio.Runner()
        # A command of the terminal asks a few questions and ends: nobody closes it there.
        self._finish = weakref.finalize(self, self._runner.close)
        self._shown: str | None = None
        self._version: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is asked any more."""
        self._finish()

    def run(self, name: str, *words: str, environment: Mapping[str, str] | None = None) -> Answer:
        """Run a command to its end; see `SlurmCommands.run`.

        Raises:
            ServiceUnavailable: it cannot be run, is not done in time, or prints too much; what it
                was told to do may or may not have been done.
        """
        return self._runner.run(self._commands.run(name, *words, environment=environment))

    def output(self, name: str, *words: str) -> str:
        """What a command that must succeed prints.

        Raises:
            ServiceUnavailable: as `run`, or it failed, with what it said.
        """
        return self._runner.run(self._commands.output(name, *words))

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of its commands, such as (24, 11).

        Raises:
            ServiceUnavailable: they do not tell.
        """
        if self._version is None:
            found = decode_version(self.output("scontrol", "--version"))
            if found == (0, 0):
                raise ServiceUnavailable("`scontrol --version` tells no version")
            self._version = found
        return self._version

    @property
    def config(self) -> ClusterConfig:
        """Its settings, as they were when they were first asked for.

        Raises:
            ServiceUnavailable: the controller does not answer.
        """
        return decode_config(self._show_config())

    @property
    def settings(self) -> Mapping[str, str]:
        """Every key of its configuration with its value, as old as `config`.

        Raises:
            ServiceUnavailable: the controller does not answer.
        """
        return decode_settings(self._show_config())

    def _show_config(self) -> str:
        if self._shown is None:
            self._shown = self.output("scontrol", "show", "config")
        return self._shown

    def forget(self) -> None:
        """Ask anew for what may have been changed since."""
        self._shown = None
        self._version = None


def open_cluster(policy: Policy) -> Cluster:
    """The cluster of a policy's `slurm`; nothing is asked of it yet."""
    folder = Path(policy.slurm.programs)
    config = policy.slurm.config
    return Cluster(
        SlurmCommands(
            {name: folder / name for name in PROGRAMS},
            None if config is None else Path(config),
            policy.slurm.timeout,
            setting="slurm.programs of the policy file",
        )
    )
