"""Asking Slurm whether somebody waits for a GPU, for rules that end jobs only then.

`squeue` is run without a shell, by its path, with an environment of its own and limits on its time
and on what it prints. Whatever goes wrong leaves the number unknown, so that nothing is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm_queue import decode_queue, queue_format, waiting_jobs

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from gpuwarden.platforms.slurm_queue import PendingJob
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.verdicts import FleetFacts, SignalKey

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
_MAX_ERROR = 300
_NO_SLURM = "engine.yaml has no `slurm`, so that its queue cannot be asked"

log = structlog.get_logger(__name__)


class SlurmQueue:
    """Slurm's queue, by its own command.

    Args:
        squeue: the command.
        config: slurm.conf, or None for Slurm's own default.
        timeout: seconds that one question may take.
    """

    def __init__(self, squeue: Path, config: Path | None, timeout: float) -> None:
        self._squeue = squeue
        self._timeout = timeout
        self._environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
        if config is not None:
            self._environment["SLURM_CONF"] = str(config)

    async def pending(self) -> tuple[PendingJob, ...]:
        """All jobs that pend now.

        Raises:
            ServiceUnavailable: Slurm does not answer, or not in time, or says something else.
        """
        mark = f"|{secrets.token_hex(8)}"
        words = ("--noheader", "--states=PENDING", "-O", queue_format(mark))
        try:
            process = await asyncio.create_subprocess_exec(
                self._squeue,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise ServiceUnavailable(
                f"{self._squeue} cannot be run: {error.strerror}; see slurm.squeue in engine.yaml"
            ) from error
        try:
            async with asyncio.timeout(self._timeout):
                output, complaint = await _read(process)
        except TimeoutError:
            text = f"squeue did not answer within {self._timeout:g} s; see slurm.timeout"
            raise ServiceUnavailable(text) from None
        finally:
            await _gone(process)
        if process.returncode:
            said = " ".join(complaint.decode(errors="replace").split())[:_MAX_ERROR]
            raise ServiceUnavailable(f"squeue failed with status {process.returncode}: {said}")
        return decode_queue(output.decode(errors="replace"), mark)


async def _read(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """Both outputs to their end, and the command to its own."""
    if process.stdout is None or process.stderr is None:
        raise ServiceUnavailable("squeue has no output")

    async def bounded(stream: asyncio.StreamReader) -> bytes:
        parts, size = [], 0
        while chunk := await stream.read(65_536):
            size += len(chunk)
            if size > MAX_OUTPUT_BYTES:
                text = f"squeue printed more than {MAX_OUTPUT_BYTES // 2**20} MiB"
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


async def with_queue(
    facts: Awaitable[FleetFacts], rules: RuleSet, queue: SlurmQueue | None
) -> FleetFacts:
    """Facts with the numbers of Slurm's queue that the rules ask for, asked at the same time.

    Args:
        facts: being gathered.
        rules: those that will be judged.
        queue: Slurm's, or None where engine.yaml names none.
    """
    wanted = {
        rule.only_if_waiting.key: rule.only_if_waiting.slurm.partition
        for rule in rules.rules
        if rule.only_if_waiting is not None and rule.only_if_waiting.slurm is not None
    }
    if not wanted:
        return await facts
    asked = asyncio.create_task(_numbers(wanted, queue))
    try:
        found = await facts
        numbers, failed = await asked
    finally:
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
    return replace(found, numbers={**found.numbers, **numbers}, failed={**found.failed, **failed})


async def _numbers(
    wanted: dict[SignalKey, str | None], queue: SlurmQueue | None
) -> tuple[dict[SignalKey, float], dict[SignalKey, str]]:
    if queue is None:
        return {}, dict.fromkeys(wanted, _NO_SLURM)
    try:
        jobs = await queue.pending()
    except ServiceUnavailable as error:
        log.warning("Slurm's queue is not known", error=str(error))
        return {}, dict.fromkeys(wanted, str(error))
    return {key: float(waiting_jobs(jobs, name)) for key, name in wanted.items()}, {}
