"""The training's side of uploads: starts the process that does them, and knows how far it is.

Nothing here waits for the network but `flush`, which an attempt that leaves calls with a limit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput, MissingExtra, ServiceUnavailable
from gpuwarden.job_files import UploadProgress

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.trainer.states import Manifest

log = logging.getLogger(__name__)

READ_SECONDS = 60.0
"""How long the answer may take whether a run is at a URL."""
FETCH_SECONDS = 3600.0
_END_SECONDS = 5.0
"""How long a process with nothing left to do has to end."""
_EXTRAS = {"s3": "s3", "s3a": "s3", "oss": "oss"}
_MODULE = "gpuwarden.trainer.remotes"
_left_behind: list[subprocess.Popen[bytes]] = []
"""Processes that may still be sending for a training that is over; kept to be reaped."""


def check(url: str) -> None:
    """Refuse a URL for which nothing is installed, before anything is trained.

    Raises:
        MissingExtra: fsspec or the back end is not installed.
        InvalidInput: fsspec knows no such URL.
    """
    protocol = url.partition("://")[0]
    try:
        registry: Any = importlib.import_module("fsspec")
        registry.get_filesystem_class(protocol)
    except ModuleNotFoundError as error:
        raise MissingExtra("train --upload", error.name or "fsspec", "upload") from error
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        if extra is not None:
            raise MissingExtra("train --upload", protocol, extra) from error
        raise InvalidInput(f"--upload {url}: {error}") from error
    except ValueError as error:
        raise InvalidInput(f"--upload {url}: {error}") from error


def _ask(part: str, url: str, *words: str, timeout: float) -> dict[str, Any]:
    try:
        ran = subprocess.run(
            [sys.executable, "-m", _MODULE, part, url, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=False,
            timeout=timeout,
        )
        answer = json.loads(ran.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise ServiceUnavailable(f"{url} did not answer within {timeout:g} s") from error
    except (IndexError, ValueError) as error:
        raise ServiceUnavailable(f"{url} could not be read, see above") from error
    if not isinstance(answer, dict) or "error" in answer:
        said = answer.get("error") if isinstance(answer, dict) else answer
        raise ServiceUnavailable(f"{url} could not be read: {said}")
    return answer


def remote_record(url: str, run_id: str) -> bytes | None:
    """Content of the record of a run at a URL; None if it is not there.

    Raises:
        ServiceUnavailable: that could not be found out.
    """
    content = _ask("record", url, run_id, timeout=READ_SECONDS)["record"]
    return None if content is None else str(content).encode()


def fetch(url: str, run_id: str, save_dir: Path, *, lineage: str, after: int = 0) -> int | None:
    """Bring the newest good state of a run here, see `remotes.Remote.fetch`.

    Raises:
        ServiceUnavailable: it could not be fetched.
        InvalidInput: all that is there is damaged, and nothing is here.
    """
    words = (run_id, str(save_dir), lineage, str(after))
    answer = _ask("fetch", url, *words, timeout=FETCH_SECONDS)
    if "damaged" in answer:
        raise InvalidInput(f"{url}: {answer['damaged']}")
    sequence = answer["state"]
    return None if sequence is None else int(sequence)


class Uploader:
    """Sends states of one training to a URL, newest first.

    Args:
        url: of all runs.
        run_id: the run.
        save_dir: of the run.
        keep: how many states stay there.
        restart_seconds: a process that has ended by itself is not started again sooner.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        save_dir: Path,
        *,
        keep: int,
        restart_seconds: float = 30.0,
    ) -> None:
        self._restart_seconds = restart_seconds
        self._url, self._words = url, (run_id, str(save_dir), str(keep))
        self._process: subprocess.Popen[bytes] | None = None
        self._started = float("-inf")
        self._buffer = b""
        self._pending: list[tuple[int, float]] = []
        self._record_pending = False
        self._uploaded: float | None = None
        self._complained = ""
        _left_behind[:] = [process for process in _left_behind if process.poll() is None]

    # -- orders

    def committed(self, manifest: Manifest) -> None:
        """A state is on disk: send it, if no newer one comes first."""
        self._pending.append((manifest.sequence, manifest.time))
        self._order({"state": manifest.sequence})

    def recorded(self) -> None:
        """The run's record has changed."""
        self._record_pending = True
        self._order({"record": True})

    @property
    def progress(self) -> UploadProgress:
        """How far it is."""
        oldest = self._pending[0][1] if self._pending else None
        return UploadProgress(self._uploaded, oldest)

    @property
    def done(self) -> bool:
        """Whether everything has arrived."""
        return not self._pending and not self._record_pending

    @property
    def failing(self) -> bool:
        """Whether the newest try has failed."""
        return bool(self._complained)

    # -- the process

    def _order(self, document: dict[str, Any]) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            self._start()
            return
        self._send(process, document)

    def _send(self, process: subprocess.Popen[bytes], document: dict[str, Any]) -> None:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # poll() starts it again
                os.write(process.stdin.fileno(), json.dumps(document).encode() + b"\n")

    def _start(self) -> None:
        now = time.monotonic()
        if now - self._started < self._restart_seconds:
            return
        self._close()
        self._started, self._buffer = now, b""
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, "serve", self._url, *self._words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # signals to the training's group are not for it
            )
        except OSError as error:
            self._complain(f"its process cannot be started: {error}")
            return
        self._process = process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        if self._pending:
            self._send(process, {"state": self._pending[-1][0]})
        if self._record_pending:
            self._send(process, {"record": True})

    def poll(self) -> None:
        """Take note of what has arrived. Costs a read that does not wait."""
        process = self._process
        if process is None or process.stdout is None:
            if not self.done:
                self._start()
            return
        try:
            part = os.read(process.stdout.fileno(), 1 << 16)
        except OSError:  # nothing there yet
            return
        if not part and process.poll() is not None:
            self._complain(f"its process has ended with status {process.returncode}")
            self._close()
            return
        *lines, self._buffer = (self._buffer + part).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._heard(json.loads(line))

    def _heard(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self._complain(str(answer["error"]))
            return
        if self._complained:
            log.info("uploads to %s work again", self._url)
            self._complained = ""
        if "record" in answer:
            self._record_pending = False
        sequence = answer.get("state")
        if sequence is not None:
            arrived = [time for number, time in self._pending if number <= sequence]
            self._pending = [item for item in self._pending if item[0] > sequence]
            self._uploaded = max(arrived, default=self._uploaded)

    def _complain(self, what: str) -> None:
        if what != self._complained:
            log.warning("upload to %s: %s; tried again, states stay on this disk", self._url, what)
        self._complained = what

    def flush(self, seconds: float) -> bool:
        """Wait until everything has arrived.

        Args:
            seconds: at most so long.

        Returns:
            Whether it has.
        """
        until = time.monotonic() + seconds
        self.poll()
        while not self.done and (left := until - time.monotonic()) > 0:
            process = self._process
            if process is not None and process.stdout is not None:
                select.select([process.stdout], [], [], min(left, 0.5))
            else:
                time.sleep(min(left, 0.5))
            self.poll()
        return self.done

    def close(self) -> None:
        """Send no more; what is on its way may still arrive, for a minute."""
        self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS if self.done else 0.0)
        if process.returncode is None:
            _left_behind.append(process)
