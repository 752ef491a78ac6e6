"""What `gpuwarden` itself writes: files of its commands, and what it paints on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 120.0
"""How long a command may take on a busy machine."""


class ProgramFailedError(RuntimeError):
    """A command of gpuwarden failed, with what it said."""


async def run(*words: str, module: str = "gpuwarden") -> str:
    """Run `gpuwarden`, or another module, with these words and return its output.

    Raises:
        ProgramFailedError: if it fails, or takes longer than `SECONDS`.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await _ended(process, words)
    if process.returncode:
        raise ProgramFailedError(f"{module} {' '.join(words)}: {errors.decode()[-2000:]}")
    return output.decode()


async def paint(*words: str, columns: int, lines: int, environment: Mapping[str, str]) -> str:
    """Run `gpuwarden` on a terminal of this size and return what it sent, colours and all.

    Raises:
        ProgramFailedError: if it fails, or takes longer than `SECONDS`.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    reader = asyncio.create_task(asyncio.to_thread(_read, ours))
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpuwarden", *words),
            stdin=theirs,
            stdout=theirs,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **environment},
        )
    finally:
        os.close(theirs)
    _, errors = await _ended(process, words)
    painted = await reader
    os.close(ours)
    if process.returncode not in (0, 1):  # 1 is a verdict: the job breaks a rule
        raise ProgramFailedError(f"gpuwarden {' '.join(words)}: {errors.decode()[-2000:]}")
    return painted.decode()


async def _ended(
    process: asyncio.subprocess.Process, words: tuple[str, ...]
) -> tuple[bytes, bytes]:
    try:
        output, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise ProgramFailedError(f"gpuwarden {' '.join(words)} took over {SECONDS:g} s") from None
    return output or b"", errors


def _read(terminal: int) -> bytes:
    parts = []
    # Linux: EIO when the program has closed its end
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 65536):
            parts.append(part)
    return b"".join(parts)
