"""What the processes of a job were started with, for those whom the engine authorised to know."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import TYPE_CHECKING

from gpuwarden.agent_api import MAX_BODY_BYTES, CommandLine, CommandLines
from gpuwarden.clock import SystemClock
from gpuwarden.errors import RefusedAction
from gpuwarden.exporter.agent import members, redactions
from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.processes import (
    MAX_ARGUMENT_BYTES,
    PROC,
    Launchers,
    Process,
    boot_id,
    boot_time,
    read_all,
    read_arguments,
    read_process,
    split_arguments,
)

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.agent_api import ActionRequest
    from gpuwarden.clock import Clock

MAX_PROCESSES = 256
MAX_ARGUMENTS = 256
MAX_CHARACTERS = 1024
"""Of one argument."""
MAX_SECONDS = 5.0
"""After this no further process is looked at: users decide what their command lines hold."""
_MAX_ANSWER_BYTES = MAX_BODY_BYTES // 2


class Reader:
    """Reads command lines, and hides what may be a secret in them. Safe for threads."""

    def __init__(
        self, launchers: Launchers, *, clock: Clock | None = None, proc: Path = PROC
    ) -> None:
        """Read nothing yet.

        Args:
            launchers: what starts jobs on this node.
            clock: bounds how long it takes; the node's by default.
            proc: where procfs is mounted.
        """
        self._clock = clock if clock is not None else SystemClock()
        self._launchers = launchers
        self._proc = proc
        self._calls = BlockingCalls()
        self._lock = threading.Lock()

    def read(self, request: ActionRequest) -> CommandLines:
        """The command lines of a job.

        Raises:
            RefusedAction: `gone`, no process of the job is known here.
        """
        found = members.of_job(
            read_all(self._proc),
            request.job_id,
            boot=boot_id(self._proc),
            booted=boot_time(self._proc),
            launchers=self._launchers,
            seen=request.seen,
        )
        if not found:
            raise RefusedAction("gone", f"no process of {request.job_id} is known on this node")
        lines: list[CommandLine] = []
        left, until = _MAX_ANSWER_BYTES, self._clock.monotonic() + MAX_SECONDS
        cut = len(found) > MAX_PROCESSES
        with self._lock:
            for process in found[:MAX_PROCESSES]:
                if self._clock.monotonic() > until:
                    cut = True
                    break
                line = self._line(process)
                if line is None:
                    continue
                left -= len(json.dumps(dataclasses.asdict(line)))
                if left < 0:
                    cut = True
                    break
                lines.append(line)
        return CommandLines(request.decision_id, request.job_id, tuple(lines), cut=cut)

    def _line(self, process: Process) -> CommandLine | None:
        """A process's command line; None where the process has gone meanwhile."""
        content = self._calls.make(process.uid, lambda: read_arguments(process.pid, self._proc))
        try:
            again = read_process(process.pid, self._proc)
        except OSError:
            again = None
        if again is None or again.identity != process.identity:
            return None
        if content is None:
            return CommandLine(process.pid, process.start_ticks, None)
        arguments = split_arguments(content)
        whole = len(content) < MAX_ARGUMENT_BYTES
        if not whole:
            # What is cut in the middle has lost the shape by which a secret is known.
            arguments = arguments[:-1]
        shown = redactions.redact(arguments)
        told = tuple(argument[:MAX_CHARACTERS] for argument in shown[:MAX_ARGUMENTS])
        return CommandLine(process.pid, process.start_ticks, told, cut=not whole or told != shown)
