"""Other programs' commands, run with a limit on their time and on what they print.

No shell, an absolute path, a fixed environment: nothing of a job's gets into a command, and what it
prints is data.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 4096

_FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin", "/usr/sbin", "/usr/local/sbin")
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said.

    Attributes:
        status: its exit status; negative for a signal.
        output: its standard output.
        error: the beginning of its standard error.
    """

    status: int
    output: str
    error: str


def find(name: str) -> str | None:
    """Absolute path of a program, in PATH or where such programs usually are; None without one."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *_FOLDERS))
    found = shutil.which(name, path=path)
    return None if found is None else str(Path(found).absolute())


def drop_ambient_rights() -> None:
    """Take from this thread what its children would inherit: they need no right of ours.

    An exporter that is not root reads other users' processes by ambient capabilities, which a
    thread hands to the programs that it starts.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def run(
    *words: str,
    seconds: float,
    environment: Mapping[str, str],
    limit: int = MAX_OUTPUT_BYTES,
) -> Answer:
    """Run a command to its end.

    Args:
        words: absolute path and arguments.
        seconds: how long it may take; then it is killed.
        environment: all of it.
        limit: bytes of output that are taken at most.

    Raises:
        ServiceUnavailable: it cannot be started, takes too long or prints too much.
    """
    name = Path(words[0]).name
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise ServiceUnavailable(f"{words[0]} cannot be started: {error}") from error
    with process:
        try:
            output, errors = _read(process, name, deadline=time.monotonic() + seconds, limit=limit)
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise ServiceUnavailable(f"{name} did not end within {seconds:g} s") from error
        finally:
            if process.poll() is None:
                process.kill()
    return Answer(
        process.returncode,
        output.decode(errors="replace"),
        errors.decode(errors="replace").strip(),
    )


def _read(
    process: subprocess.Popen[bytes], name: str, *, deadline: float, limit: int
) -> tuple[bytes, bytes]:
    """Both streams, until both are closed."""
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream, kept in ((process.stdout, output), (process.stderr, errors)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, kept)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServiceUnavailable(f"{name} did not answer in time")
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.data is errors:
                    errors += chunk[: MAX_ERROR_BYTES - len(errors)]
                else:
                    output += chunk
                    if len(output) > limit:
                        raise ServiceUnavailable(f"{name} printed more than {limit} bytes")
    return bytes(output), bytes(errors)
