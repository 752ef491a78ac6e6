"""Running Slurm's own commands: by path, without a shell, bounded in time and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


MAX_OUTPUT_BYTES: Final = 16 * 1024 * 1024
_MAX_ERROR = 300
_NO_CONFIGURATION = "Could not establish a configuration source"
_SLURMS_PREFIXES: Final = (
    "SLURM_",
    "SBATCH_",
    "SQUEUE_",
    "SACCT_",
    "SACCTMGR_",
    "SALLOC_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SPRIO_",
    "SRUN_",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command left.

    Attributes:
        status: 0 if it succeeded.
        output: what it printed.
        complaint: what it said of errors, on one line and bounded.
    """

    status: int
    output: str
    complaint: str


class SlurmCommands:
    """The commands of one cluster.

    They get an environment of their own: what somebody exported for his `squeue` must not change
    an answer, and times come as Unix times.

    Args:
        programs: name of a command, such as `squeue` -> its path.
        config: slurm.conf, or None for Slurm's own default.
        timeout: seconds that one command may take.
        setting: where `{name}`, a command, is set: for what people are told.
    """

    def __init__(
        self,
        programs: Mapping[str, Path],
        config: Path | None,
        timeout: float,
        *,
        setting: str = "slurm.{name} in engine.yaml",
    ) -> None:
        self._programs = dict(programs)
        self._timeout = timeout
        self._setting = setting
        self._environment = {
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C",
            "SLURM_TIME_FORMAT": "%s",
            # How long the list of an array's tasks may be; by default 64, which cuts most off.
            "SLURM_BITSTR_LEN": "4096",
        }
        if config is not None:
            self._environment["SLURM_CONF"] = str(config)

    def has(self, name: str) -> bool:
        """Whether there is such a command."""
        return name in self._programs

    async def run(
        self, name: str, *words: str, environment: Mapping[str, str] | None = None
    ) -> Answer:
        """Run a command to its end.

        Args:
            name: of the command, such as `squeue`.
            words: its arguments.
            environment: what it gets instead of the own one, because a job is to inherit it;
                variables of Slurm's in it are left out, for each is an option in disguise.

        Raises:
            ServiceUnavailable: it cannot be run, is not done in time, or prints too much; what it
                was told to do may or may not have been done.
        """
        program = self._programs.get(name)
        if program is None:
            raise ServiceUnavailable(f"engine.yaml names no {name}: give slurm.{name}")
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment if environment is None else self._inherited(environment),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            where = self._setting.format(name=name)
            raise ServiceUnavailable(
                f"{program} cannot be run: {error.strerror}; see {where}"
            ) from error
        try:
            async with asyncio.timeout(self._timeout):
                output, complaint = await _read(process, name)
        except TimeoutError:
            text = f"{name} did not answer within {self._timeout:g} s; see slurm.timeout"
            raise ServiceUnavailable(text) from None
        finally:
            await _gone(process)
        said = " ".join(complaint.decode(errors="replace").split())[:_MAX_ERROR]
        return Answer(process.returncode or 0, output.decode(errors="replace"), said)

    def _inherited(self, environment: Mapping[str, str]) -> dict[str, str]:
        kept = {
            name: value
            for name, value in environment.items()
            if not name.startswith(_SLURMS_PREFIXES)
        }
        config = self._environment.get("SLURM_CONF")
        return kept if config is None else kept | {"SLURM_CONF": config}

    async def output(self, name: str, *words: str) -> str:
        """What a command that must succeed prints.

        Raises:
            ServiceUnavailable: as `run`, or it failed, with what it said.
        """
        answer = await self.run(name, *words)
        if answer.status:
            text = f"{name} failed with status {answer.status}: {answer.complaint}"
            if _NO_CONFIGURATION in answer.complaint:
                text += ": name slurm.conf (`slurm: {config: FILE}`); SLURM_CONF is not looked at"
            raise ServiceUnavailable(text)
        return answer.output


async def _read(process: asyncio.subprocess.Process, name: str) -> tuple[bytes, bytes]:
    """Both outputs to their end, and the command to its own."""
    if process.stdout is None or process.stderr is None:
        raise ServiceUnavailable(f"{name} has no output")

    async def bounded(stream: asyncio.StreamReader) -> bytes:
        parts, size = [], 0
        while chunk := await stream.read(65_536):
            size += len(chunk)
            if size > MAX_OUTPUT_BYTES:
                text = f"{name} printed more than {MAX_OUTPUT_BYTES // 2**20} MiB"
                raise ServiceUnavailable(text)
            parts.append(chunk)
        return b"".join(parts)

    both = await asyncio.gather(bounded(process.stdout), bounded(process.stderr))
    await process.wait()
    return both


async def _gone(process: asyncio.subprocess.Process) -> None:
    """End what is left of a command, and what it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
