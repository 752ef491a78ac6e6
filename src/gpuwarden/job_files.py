"""The contract between trainer and node: the files of a run and of a leave request.

`$GPUWARDEN_JOBS` (default /run/gpuwarden) holds `jobs/` (mode 1777; written by trainers) with
`<run_id>.json` and `<run_id>.status.json`, and `requests/` (mode 0755; written by the agent) with
`<run_id>.json`. Each file has one writer, is replaced atomically, and is at most 64 KiB. Readers
do not follow links, ignore unknown fields and refuse unknown major versions. Nothing in these
files is believed beyond its shape: who may speak for which process is the exporter's to decide.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

from gpuwarden.catalogue import PHASES
from gpuwarden.job_file_fields import Fields, JobFileError, encode

__all__ = [
    "DEFAULT_DIRECTORY",
    "DIRECTORY_VARIABLE",
    "EXIT_DONE",
    "EXIT_FAULT",
    "EXIT_HOLD",
    "EXIT_NOT_RESUMABLE",
    "EXIT_REQUEUE",
    "MAX_BYTES",
    "RUN_ID",
    "Checkpoint",
    "Counters",
    "JobFileError",
    "LeaveRequest",
    "OpenedFile",
    "RequestProgress",
    "RequestState",
    "RunDescription",
    "RunExit",
    "RunStatus",
    "UploadProgress",
    "description_path",
    "directory",
    "read",
    "request_path",
    "status_path",
    "write",
]

MAX_BYTES = 64 * 1024
DEFAULT_DIRECTORY = Path("/run/gpuwarden")
DIRECTORY_VARIABLE = "GPUWARDEN_JOBS"
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

EXIT_DONE = 0
"""The training is complete."""
EXIT_FAULT = 1
"""The training failed."""
EXIT_REQUEUE = 75
"""State is saved; the scheduler should bring the job back (EX_TEMPFAIL of sysexits.h)."""
EXIT_HOLD = 76
"""State is saved; the job left because a rule ended it and must not come back by itself."""
EXIT_NOT_RESUMABLE = 77
"""The job left, but what it saved cannot be resumed."""


class RequestState(StrEnum):
    """How far a trainer has come with a leave request."""

    RECEIVED = "received"
    SAVING = "saving"
    LEAVING = "leaving"


def directory(environ: dict[str, str] | None = None) -> Path:
    """Where the job files are: `$GPUWARDEN_JOBS`, or /run/gpuwarden."""
    environ = dict(os.environ) if environ is None else environ
    return Path(environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)


def description_path(root: Path, run_id: str) -> Path:
    """Path of a run's description."""
    return root / "jobs" / f"{_checked(run_id)}.json"


def status_path(root: Path, run_id: str) -> Path:
    """Path of a run's status."""
    return root / "jobs" / f"{_checked(run_id)}.status.json"


def request_path(root: Path, run_id: str) -> Path:
    """Path of a leave request to a run."""
    return root / "requests" / f"{_checked(run_id)}.json"


def _checked(run_id: str) -> str:
    if not RUN_ID.fullmatch(run_id):
        raise JobFileError("run_id", f"{run_id!r} is not a run id: 1 to 64 of A-Z a-z 0-9 _ -")
    return run_id


# ---------------------------------------------------------------------------------------------
# What the trainer writes


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What does not change during one attempt of a run.

    Attributes:
        run_id: stable over resumes.
        pid: process of the training loop (rank 0), in its own PID namespace.
        pid_ns: inode of that namespace (`/proc/self/ns/pid`).
        start_ticks: field 22 of `/proc/<pid>/stat`.
        boot_id: `/proc/sys/kernel/random/boot_id`.
        model: model name or YAML, without its directory and suffix; of weights whose name is no
            model's, such as best.pt, the known model that they were made from.
        batch: images per optimizer micro-step over all ranks.
        imgsz: image size in pixels.
        amp: whether automatic mixed precision is on.
        epochs: planned epochs.
        world_size: number of ranks.
        project: ultralytics' project, or an empty string.
        log: path of the log whose growth shows life, or None.
        checkpoints: directory of the saved states, or None.
        steps_per_epoch: batches of an epoch; None: not known yet.
        sizes: shortest and longest side of its images in pixels, such as `320-960`, where not all
            are squares of `imgsz` (multi_scale, rect); else an empty string.
    """

    run_id: str
    pid: int
    pid_ns: int
    start_ticks: int
    boot_id: str
    model: str
    batch: int
    imgsz: int
    amp: bool
    epochs: int
    world_size: int = 1
    project: str = ""
    log: str | None = None
    checkpoints: str | None = None
    steps_per_epoch: int | None = None
    sizes: str = ""

    def encode(self) -> bytes:
        """The file's content."""
        return encode(dataclasses.asdict(self))

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Read the file's content.

        Raises:
            JobFileError: naming the field.
        """
        data = Fields(content)
        return cls(
            run_id=_checked(data.text("run_id", 64)),
            pid=data.integer("pid", 1),
            pid_ns=data.integer("pid_ns"),
            start_ticks=data.integer("start_ticks"),
            boot_id=data.text("boot_id", 64),
            model=data.text("model", 128),
            batch=data.integer("batch", 1),
            imgsz=data.integer("imgsz", 1),
            amp=data.boolean("amp"),
            epochs=data.integer("epochs"),
            world_size=data.integer("world_size", 1, default=1),
            project=data.text("project", 128, default=""),
            log=data.optional_text("log", 4096),
            checkpoints=data.optional_text("checkpoints", 4096),
            steps_per_epoch=data.optional_integer("steps_per_epoch"),
            sizes=data.text("sizes", 32, default=""),
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest saved state.

    Attributes:
        time: Unix time at which it was taken.
        step: batches trained on in the whole run up to it.
        durable: Unix time at which it was known to be on disk, or None.
        bytes: its size.
    """

    time: float
    step: int
    durable: float | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Counters:
    """What only grows within one attempt; seconds and counts."""

    images: int = 0
    steps: int = 0
    data_wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    nonfinite_losses: int = 0
    checkpoint_seconds: float = 0.0
    replay_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    optimizer_steps: int = 0


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """How far the saved states have come on their way to their second home.

    Attributes:
        uploaded: Unix time at which the newest state that is there was taken, or None.
        pending: Unix time at which the oldest one that is newer, and durable here, was taken; None
            if everything is there.
    """

    uploaded: float | None = None
    pending: float | None = None


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """The trainer's answer to a leave request.

    Attributes:
        decision_id: the request's.
        state: how far it has come.
        times: state -> Unix time at which it was reached; of a trainer that tells none, empty.
    """

    decision_id: str
    state: RequestState
    times: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NoticeSeen:
    """The trainer knows that it is to leave, by a signal or a request.

    Attributes:
        reason: the signal's name, or the reason of the request.
        at: `step` or `epoch`: where it means to leave.
        time: Unix time at which the loop took note of it.
    """

    reason: str
    at: str
    time: float


@dataclass(frozen=True, slots=True)
class RunExit:
    """How the attempt ended: exit status, why, when (Unix time)."""

    code: int
    reason: str
    time: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What the training loop publishes, about once a second.

    Attributes:
        run_id: the run.
        sequence: grows by one with each write.
        phase: one of `catalogue.PHASES`.
        phase_since: Unix time.
        heartbeat: Unix time of the loop's last progress; a separate thread must not refresh it.
        epoch: from 0.
        step: batches trained on in the whole run, resumed ones included.
        throughput: images per second over the last writes, or None.
        losses: component -> running mean; finite values only.
        metrics: validation metric -> value; finite values only.
        lr: parameter group -> learning rate.
        gpu_memory_peak, gpu_memory_allocated, gpu_memory_reserved: bytes, as torch counts them.
        loader_workers: processes that load training data; None: not known.
        upload: None where no upload was asked for.
        notice: to leave, if one stands; a withdrawn one is gone from here.
    """

    run_id: str
    sequence: int
    phase: str
    phase_since: float
    heartbeat: float
    epoch: int = 0
    step: int = 0
    throughput: float | None = None
    counters: Counters = field(default_factory=Counters)
    losses: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    lr: dict[str, float] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    gradient_norm: float | None = None
    amp_scale: float | None = None
    stop_latency: float | None = None
    gpu_memory_peak: int | None = None
    gpu_memory_allocated: int | None = None
    gpu_memory_reserved: int | None = None
    loader_workers: int | None = None
    upload: UploadProgress | None = None
    resume_mode: str = "none"
    request: RequestProgress | None = None
    notice: NoticeSeen | None = None
    exit: RunExit | None = None

    def encode(self) -> bytes:
        """The file's content."""
        return encode(dataclasses.asdict(self))

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Read the file's content.

        Raises:
            JobFileError: naming the field.
        """
        data = Fields(content)
        phase = data.text("phase", 32)
        if phase not in PHASES:
            raise JobFileError("phase", f"phase {phase!r} is none of {', '.join(PHASES)}")
        counters = data.child("counters")
        return cls(
            run_id=_checked(data.text("run_id", 64)),
            sequence=data.integer("sequence"),
            phase=phase,
            phase_since=data.number("phase_since"),
            heartbeat=data.number("heartbeat"),
            epoch=data.integer("epoch", default=0),
            step=data.integer("step", default=0),
            throughput=data.optional_number("throughput"),
            counters=_decode_counters(counters) if counters else Counters(),
            losses=data.numbers("losses"),
            metrics=data.numbers("metrics"),
            lr=data.numbers("lr"),
            checkpoint=_decode_checkpoint(data.child("checkpoint")),
            gradient_norm=data.optional_number("gradient_norm"),
            amp_scale=data.optional_number("amp_scale"),
            stop_latency=data.optional_number("stop_latency"),
            gpu_memory_peak=data.optional_integer("gpu_memory_peak"),
            gpu_memory_allocated=data.optional_integer("gpu_memory_allocated"),
            gpu_memory_reserved=data.optional_integer("gpu_memory_reserved"),
            loader_workers=data.optional_integer("loader_workers"),
            upload=_decode_upload(data.child("upload")),
            resume_mode=data.text("resume_mode", 32, default="none"),
            request=_decode_progress(data.child("request")),
            notice=_decode_notice(data.child("notice")),
            exit=_decode_exit(data.child("exit")),
        )


def _decode_counters(data: Fields) -> Counters:
    seconds = data.numbers("phase_seconds")
    return Counters(
        images=data.integer("images", default=0),
        steps=data.integer("steps", default=0),
        data_wait_seconds=data.number("data_wait_seconds", default=0.0),
        compute_seconds=data.number("compute_seconds", default=0.0),
        nonfinite_losses=data.integer("nonfinite_losses", default=0),
        checkpoint_seconds=data.number("checkpoint_seconds", default=0.0),
        replay_seconds=data.number("replay_seconds", default=0.0),
        phase_seconds={name: value for name, value in seconds.items() if name in PHASES},
        optimizer_steps=data.integer("optimizer_steps", default=0),
    )


def _decode_checkpoint(data: Fields | None) -> Checkpoint | None:
    if data is None:
        return None
    return Checkpoint(
        time=data.number("time"),
        step=data.integer("step"),
        durable=data.optional_number("durable"),
        bytes=data.integer("bytes", default=0),
    )


def _decode_upload(data: Fields | None) -> UploadProgress | None:
    if data is None:
        return None
    return UploadProgress(data.optional_number("uploaded"), data.optional_number("pending"))


def _decode_progress(data: Fields | None) -> RequestProgress | None:
    if data is None:
        return None
    state = data.text("state", 16)
    if state not in set(RequestState):
        raise JobFileError("request", f"request.state {state!r} is none of {list(RequestState)}")
    times = data.numbers("times")
    return RequestProgress(
        data.text("decision_id", 64),
        RequestState(state),
        {state.value: times[state] for state in RequestState if state in times},
    )


def _decode_notice(data: Fields | None) -> NoticeSeen | None:
    if data is None:
        return None
    at = data.text("at", 8)
    if at not in ("step", "epoch"):
        raise JobFileError("notice", f"notice.at {at!r} is neither 'step' nor 'epoch'")
    return NoticeSeen(data.text("reason", 256), at, data.number("time"))


def _decode_exit(data: Fields | None) -> RunExit | None:
    if data is None:
        return None
    return RunExit(data.integer("code"), data.text("reason", 256), data.number("time"))


# ---------------------------------------------------------------------------------------------
# What the agent writes


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """The agent asks a run to save and leave.

    Attributes:
        decision_id: the engine's decision; the trainer names it in its answer.
        leave_by: Unix time after which the agent goes on without the trainer.
        at: `step` (the next batch boundary) or `epoch` (the end of the epoch).
        then: `requeue` (exit 75) or `hold` (exit 76), or `continue`: save, but do not leave.
        reason: one line for the owner.
    """

    decision_id: str
    leave_by: float
    at: str = "step"
    then: str = "requeue"
    reason: str = ""

    AT = ("step", "epoch")
    THEN = ("requeue", "hold", "continue")

    def encode(self) -> bytes:
        """The file's content."""
        return encode(dataclasses.asdict(self))

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Read the file's content.

        Raises:
            JobFileError: naming the field.
        """
        data = Fields(content)
        at, then = data.text("at", 16, default="step"), data.text("then", 16, default="requeue")
        if at not in cls.AT:
            raise JobFileError("at", f"at {at!r} is none of {', '.join(cls.AT)}")
        if then not in cls.THEN:
            raise JobFileError("then", f"then {then!r} is none of {', '.join(cls.THEN)}")
        return cls(
            decision_id=data.text("decision_id", 64),
            leave_by=data.number("leave_by"),
            at=at,
            then=then,
            reason=data.text("reason", 1024, default=""),
        )


# ---------------------------------------------------------------------------------------------
# Reading and writing


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """Content of a job file and who wrote it: owner's uid, modification time (Unix), inode."""

    content: bytes
    uid: int
    modified: float
    inode: int


def read(path: Path) -> OpenedFile:
    """Read a job file that somebody else wrote.

    Links are not followed, and devices, pipes and sockets are refused without waiting on them.

    Raises:
        FileNotFoundError: it is not there.
        JobFileError: it is not a plain file of at most 64 KiB, or cannot be read.
    """
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JobFileError("open", f"{path}: {error.strerror}") from error
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise JobFileError("kind", f"{path} is not a plain file")
        if about.st_nlink > 1:
            raise JobFileError("kind", f"{path} has a second hard link")
        content = b""
        while len(content) <= MAX_BYTES:
            part = os.read(descriptor, MAX_BYTES + 1 - len(content))
            if not part:
                break
            content += part
        if len(content) > MAX_BYTES:
            raise JobFileError("size", f"{path} is larger than {MAX_BYTES} bytes")
        return OpenedFile(content, about.st_uid, about.st_mtime, about.st_ino)
    except OSError as error:
        raise JobFileError("read", f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace a job file atomically.

    Args:
        path: its name; a temporary file is made beside it.
        content: at most 64 KiB.
        mode: permissions of the new file.
        durable: wait until content and name are on disk.

    Raises:
        JobFileError: the content is too large.
        OSError: the directory cannot be written.
    """
    if len(content) > MAX_BYTES:
        raise JobFileError("size", f"{path.name} would be larger than {MAX_BYTES} bytes")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # A leftover of a crashed process with our pid is ours to remove; O_EXCL never opens a link.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode
    )
    try:
        os.fchmod(descriptor, mode)
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        if durable:
            os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    temporary.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
