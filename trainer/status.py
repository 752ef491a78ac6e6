"""What the training tells the node: its description once, its status about once a second.

Everything here runs on the training thread and costs microseconds; nothing is served from the
training process. The heartbeat moves only when the loop does. A failure to write is said once and
never reaches the training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import stat
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.job_files import Checkpoint, Counters, RunExit, RunStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.clock import Clock
    from gpuwarden.job_files import NoticeSeen, RequestState, RunDescription

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
RETRY_SECONDS = 10.0
THROUGHPUT_SECONDS = 10.0
MAX_VALUES = 64
"""The contract's limit on components, metrics and groups."""


def process_identity(pid: int | None = None) -> dict[str, int | str]:
    """What names this process beyond its pid: `pid`, `pid_ns`, `start_ticks`, `boot_id`.

    Raises:
        OSError: no /proc.
    """
    pid = os.getpid() if pid is None else pid
    # The command's name may hold any bytes, brackets too: fields count from the last bracket.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return {
        "pid": pid,
        "pid_ns": Path(f"/proc/{pid}/ns/pid").stat().st_ino,
        "start_ticks": int(fields[19]),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip(),
    }


def output_file() -> Path | None:
    """The plain file behind standard output, whose growth shows life; None for pipes and ttys."""
    try:
        if not stat.S_ISREG(os.fstat(1).st_mode):
            return None
        return Path("/proc/self/fd/1").readlink()
    except OSError:
        return None


@dataclass(slots=True)
class Pulse:
    """What every batch changes: the loop counts it up in place, the board reads it once a second.

    Attributes:
        drawn: images of the batches that the loop was given in this attempt.
        images: those that are known to have been trained on.
        steps: batches trained on in this attempt.
        step: batches trained on in the whole run; None before the first.
        data_wait: seconds that the loop waited for batches.
        compute: seconds that it worked on them: all but waiting for data and saving.
        saving: seconds that it stood still for saving.
        nonfinite: batches whose loss was no number.
        optimizer_steps: made in this attempt.
        replay: seconds in which batches of an earlier attempt were passed over.
    """

    drawn: int = 0
    images: int = 0
    steps: int = 0
    step: int | None = None
    data_wait: float = 0.0
    compute: float = 0.0
    saving: float = 0.0
    nonfinite: int = 0
    optimizer_steps: int = 0
    replay: float = 0.0


class StatusBoard:
    """Keeps one attempt's figures and publishes them.

    Args:
        root: directory of the job files, with its `jobs/` folder made by the node.
        run_id: the run.
        clock: wall for what is published, monotonic for durations.
    """

    def __init__(self, root: Path, run_id: str, *, clock: Clock) -> None:
        self._root, self._run_id, self._clock = root, run_id, clock
        now = clock.monotonic()
        self._status = RunStatus(
            run_id, sequence=0, phase="setup", phase_since=clock.wall(), heartbeat=clock.wall()
        )
        self._accounted = now
        self._written = float("-inf")
        self._retry = float("-inf")
        self._complained = False
        self.pulse = Pulse()
        self._phases: dict[str, float] = {}
        self._window: deque[tuple[float, int]] = deque()
        self._description: bytes | None = None

    @property
    def status(self) -> RunStatus:
        """What was published last, or is about to be."""
        return self._status

    def seconds(self, phase: str) -> float:
        """Seconds that the loop has spent in a phase, as far as they were accounted."""
        return self._phases.get(phase, 0.0)

    # -- what the loop reports

    def begin(self) -> None:
        """A new attempt: what a former one said of its process is withdrawn."""
        with contextlib.suppress(OSError):
            job_files.description_path(self._root, self._run_id).unlink()
        self.beat(force=True)

    def describe(self, description: RunDescription) -> None:
        """Publish what does not change during the attempt, and again whenever it is gone."""
        self._description = description.encode()
        self._write(job_files.description_path(self._root, self._run_id), self._description)

    def enter(self, phase: str) -> None:
        """The loop is in another phase from now on."""
        if phase == self._status.phase:
            return
        self._account()
        self.set(throughput=self._throughput(self._clock.monotonic()))
        if phase == "train":
            self._window.clear()
        self.set(phase=phase, phase_since=self._clock.wall())
        self.beat(force=True)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The loop is in another phase for as long as the block lasts."""
        before = self._status.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def set(self, **values: Any) -> None:
        """Change fields of the status; they are published with the next write."""
        self._status = dataclasses.replace(self._status, **values)

    def figures(
        self,
        *,
        losses: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        lr: Mapping[str, Any] | None = None,
    ) -> None:
        """Change losses, metrics or learning rates; what is not finite is left out."""
        for name, values in (("losses", losses), ("metrics", metrics), ("lr", lr)):
            if values is not None:
                self.set(**{name: finite_numbers(values)})

    def saved(self, checkpoint: Checkpoint) -> None:
        """A state is now known to be on disk; published at once, for it bounds what can be lost.

        One that is only being written is not told.
        """
        self.set(checkpoint=checkpoint)
        self.beat(force=True)

    def answered(self, decision_id: str, state: RequestState) -> None:
        """How far a leave request has come; published at once."""
        before = self.status.request
        times = dict(before.times) if before and before.decision_id == decision_id else {}
        # The first time counts: a state may be said again.
        times.setdefault(state.value, self._clock.wall())
        self.set(request=job_files.RequestProgress(decision_id, state, times))
        self.beat(force=True)

    def noticed(self, notice: NoticeSeen) -> None:
        """The training knows that it is to leave; published at once."""
        self.set(notice=notice)
        self.beat(force=True)

    @property
    def due_at(self) -> float:
        """Monotonic time from which on a beat writes."""
        return self._written + WRITE_SECONDS

    def due(self) -> bool:
        """Whether the next beat would write: time to look up figures that cost something."""
        return self._clock.monotonic() >= self.due_at

    def beat(self, *, force: bool = False) -> None:
        """The loop moved on."""
        now = self._clock.monotonic()
        if not force and now < self.due_at:
            return
        self._account()
        self._written = now
        pulse = self.pulse
        self._status = dataclasses.replace(
            self._status,
            heartbeat=self._clock.wall(),
            step=self._status.step if pulse.step is None else pulse.step,
            sequence=self._status.sequence + 1,
            throughput=self._throughput(now),
            counters=Counters(
                images=pulse.images,
                steps=pulse.steps,
                data_wait_seconds=pulse.data_wait,
                compute_seconds=pulse.compute,
                nonfinite_losses=pulse.nonfinite,
                checkpoint_seconds=pulse.saving,
                replay_seconds=pulse.replay,
                phase_seconds=dict(self._phases),
                optimizer_steps=pulse.optimizer_steps,
            ),
        )
        self._write(job_files.status_path(self._root, self._run_id), self._status.encode())
        description = job_files.description_path(self._root, self._run_id)
        if self._description is not None and _is_absent(description):
            self._write(description, self._description)  # the node's folder came late, or anew

    def finish(self, code: int, reason: str) -> None:
        """Publish how the attempt ended; the last word of this board."""
        self.set(exit=RunExit(code, reason[:256], self._clock.wall()))
        self._retry = float("-inf")
        self.beat(force=True)

    # -- inside

    def _account(self) -> None:
        now = self._clock.monotonic()
        phase = self._status.phase
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._accounted
        self._accounted = now
        self.pulse.saving = self._phases.get("checkpoint", 0.0)

    def _throughput(self, now: float) -> float | None:
        if self._status.phase != "train":
            return self._status.throughput
        window = self._window
        window.append((now, self.pulse.images))
        while len(window) > 2 and now - window[1][0] >= THROUGHPUT_SECONDS:
            window.popleft()
        seconds, images = now - window[0][0], self.pulse.images - window[0][1]
        if seconds <= 0 or (not images and seconds < THROUGHPUT_SECONDS):
            # The phase has only begun, or is what follows a validation: results, last.pt.
            return self._status.throughput
        return images / seconds

    def _write(self, path: Path, content: bytes) -> None:
        now = self._clock.monotonic()
        if now < self._retry:
            return
        try:
            job_files.write(path, content)
        except (OSError, job_files.JobFileError) as error:
            self._retry = now + RETRY_SECONDS
            if not self._complained:
                log.warning(
                    "cannot write %s (%s): training goes on, but the node cannot see how it goes; "
                    "on a node with gpuwarden's exporter set $%s or --jobs-directory to its folder",
                    path,
                    error.strerror if isinstance(error, OSError) else error,
                    job_files.DIRECTORY_VARIABLE,
                )
            self._complained = True
        else:
            self._retry = float("-inf")


def _is_absent(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a mapping, with names that the contract allows.

    Args:
        values: names to numbers, numpy scalars or one-element tensors.
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
        if math.isfinite(number) and len(numbers) < MAX_VALUES:
            numbers[name[:64]] = number
    return numbers
