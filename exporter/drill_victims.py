"""The victim of a drill: a small process that holds a little GPU memory and waits to be ended.

It says of itself only that it is a drill. Whether it is one is decided by its user, which the
engine's configuration names: a process of anybody else that says the same is a job like any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import signal
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from gpuwarden import job_files
from gpuwarden.errors import DriverUnavailable, InvalidInput
from gpuwarden.exporter import scenarios
from gpuwarden.exporter.processes import boot_id, read_process
from gpuwarden.exporter.scenarios import SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "drill-"
"""How the run ids of drills begin."""
_LIBRARY = "libcuda.so.1"
_SUCCESS = 0

log = structlog.get_logger(__name__)


class OnTerm(StrEnum):
    """What a victim does when it is asked to leave."""

    LEAVE = "leave"
    """It frees its memory and ends, as a well-behaved job."""
    IGNORE = "ignore"
    """It stays, so that SIGKILL has to end it."""


class Ending(StrEnum):
    """Why a victim ended by itself."""

    TERM = "SIGTERM"
    INTERRUPT = "SIGINT"
    BOUND = "bound"
    """Nobody ended it for as long as it was to wait."""


class Card(Protocol):
    """Something that holds memory of a card while it is entered."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Hold the memory."""


class CudaCard:
    """Memory of a real card, by the driver's own library; nothing else is needed on the node.

    Args:
        index: of the card, as CUDA counts them for this process.
        size: bytes.
    """

    def __init__(self, index: int, size: int) -> None:
        self._index = index
        self._size = size

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the memory in a context of this process.

        Raises:
            DriverUnavailable: there is no driver, no such card, or no such memory left.
        """
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise DriverUnavailable(
                f"{_LIBRARY} cannot be loaded ({error}): this node has no NVIDIA driver. On "
                "simulated cards, give --gpus simulated:FILE"
            ) from error
        device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        _call(library, "cuInit", ctypes.c_uint(0))
        _call(library, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._index))
        _call(library, "cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), device)
        try:
            size = ctypes.c_size_t(self._size)
            _call(library, "cuMemAlloc_v2", ctypes.byref(memory), size)
            _call(library, "cuMemsetD8_v2", memory, ctypes.c_ubyte(0), size)
            yield
        finally:
            # The context's memory goes with it.
            library.cuCtxDestroy_v2(context)


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(library, name)(*arguments)
    if status == _SUCCESS:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorString(status, ctypes.byref(text))
    why = text.value.decode(errors="replace") if text.value else f"error {status}"
    raise DriverUnavailable(f"{name}: {why}; is there such a card, and memory left on it?")


class SimulatedCard:
    """Memory of a simulated card, by a line in its scenario.

    Args:
        path: the scenario file, which this process must be able to replace.
        index: of the card.
        size: bytes.
    """

    def __init__(self, path: Path, index: int, size: int) -> None:
        self._path = path
        self._index = index
        self._size = size

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be on the card; the driver itself notices when the process is gone.

        Raises:
            InvalidInput: the scenario cannot be read or replaced, or has no such card.
        """
        with self._locked():
            scenario = scenarios.read(self._path)
            own = SimulatedProcess(card=self._index, pid=os.getpid(), memory=self._size)
            # Earlier drills are gone; what else stands there is none of ours.
            others = [
                item
                for item in scenario.processes
                if item.start is None or item.ghost or read_process(item.pid) is not None
            ]
            try:
                dataclasses.replace(scenario, processes=[*others, own]).write(self._path)
            except OSError as error:
                raise InvalidInput(f"{self._path} cannot be replaced: {error.strerror}") from error
        yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._path.with_name(f"{self._path.name}.lock")
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InvalidInput(f"{lock} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def wait_to_be_ended(
    card: Card, *, run_id: str, jobs: Path, on_term: OnTerm, seconds: float
) -> Ending:
    """Hold a card's memory, declare a drill, and wait.

    Args:
        card: what is held.
        run_id: of the drill; begins with `drill-`.
        jobs: directory of the node's job files.
        on_term: what to do on SIGTERM.
        seconds: after which it ends by itself.

    Returns:
        Why it ended; SIGKILL returns nothing.

    Raises:
        InvalidInput: the run id is none of a drill, or the job files cannot be written.
        DriverUnavailable: the card cannot be had.
    """
    if not run_id.startswith(PREFIX) or not job_files.RUN_ID.fullmatch(run_id):
        raise InvalidInput(f"{run_id!r} is no drill's run id: write it like {PREFIX}node7-1")
    waited = {signal.SIGINT} | ({signal.SIGTERM} if on_term is OnTerm.LEAVE else set())
    # Threads of the driver begin with the mask of this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN) if on_term is OnTerm.IGNORE else None
    try:
        with card.held(), _declared(jobs, run_id):
            log.info("waiting to be ended", run_id=run_id, pid=os.getpid(), seconds=seconds)
            found = signal.sigtimedwait(waited, seconds)
        if found is None:
            return Ending.BOUND
        return Ending.TERM if found.si_signo == signal.SIGTERM else Ending.INTERRUPT
    finally:
        if ignored is not None:
            signal.signal(signal.SIGTERM, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _declared(jobs: Path, run_id: str) -> Iterator[None]:
    """The run's description; what a killed victim leaves, the exporter reaps."""
    path = job_files.description_path(jobs, run_id)
    try:
        job_files.write(path, _description(run_id).encode())
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be written ({error.strerror}): without it nobody can tell that this is "
            "a drill. The exporter makes the directory; --jobs.directory names another"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _description(run_id: str) -> job_files.RunDescription:
    own = read_process(os.getpid())
    if own is None:
        raise InvalidInput("/proc does not show this process: is it mounted with hidepid?")
    return job_files.RunDescription(
        run_id=run_id,
        pid=os.getpid(),
        pid_ns=Path("/proc/self/ns/pid").stat().st_ino,
        start_ticks=own.start_ticks,
        boot_id=boot_id(),
        model="drill",
        batch=1,
        imgsz=32,
        amp=False,
        epochs=0,
        project="drill",
    )


def new_run_id(node: str, now: float | None = None) -> str:
    """A run id for a drill on a node, such as `drill-gpu-node-7-1764471600`.

    Args:
        node: its host name; what no run id may hold becomes a dash.
        now: Unix time; the machine's by default.
    """
    moment = int(time.time() if now is None else now)
    plain = "".join(mark if mark.isascii() and mark.isalnum() else "-" for mark in node)
    return f"{PREFIX}{plain[:40]}-{moment}"
