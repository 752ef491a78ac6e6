"""Why and when a training leaves: signals, the agent's leave request, deadlines.

A signal handler only sets a flag, which the loop reads at the next batch boundary. In two places
nothing can be torn and waiting may be long, and there alone the handler also raises `Leave`:
set-up (before anything was trained) and the wait for a batch (state is that of the last boundary).
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import FrameType

    from gpuwarden.job_files import LeaveRequest

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""All lead to the same save: Slurm, Kubernetes, launchers and people choose different ones."""
PATIENT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Those that may let the epoch end first: notices that schedulers send ahead of an end."""
ON_SIGNAL = ("step", "epoch")
"""What they may mean."""
_DIGITS = 12
REPEAT_SECONDS = 5.0
"""Signals closer together count once: an agent and a launcher may both pass the same one on."""
POLL_SECONDS = 1.0
INSISTENCE = 3
"""So many separate Ctrl-C end the process at once, as they would without gpuwarden."""


def job_ends_at(environ: Mapping[str, str]) -> float | None:
    """Unix time at which Slurm ends this process's job, or None.

    Args:
        environ: of the job; Slurm says it from 23.02 on (SLURM_JOB_END_TIME).
    """
    said = environ.get("SLURM_JOB_END_TIME", "")
    return float(said) if said.isascii() and said.isdecimal() and len(said) <= _DIGITS else None


class Leave(BaseException):
    """Unwinds ultralytics' loop; a BaseException, so that `except Exception` does not stop it.

    Private: users see `LeftTraining` or the exit status.
    """


@dataclass(frozen=True, slots=True)
class Notice:
    """Why to leave, and how.

    Attributes:
        reason: a signal's name, or the reason of the request.
        at: `step` or `epoch`.
        then: `requeue` or `hold`.
        received: monotonic seconds of the first sign.
        leave_by: Unix time of the deadline, or None.
        decision_id: of the request, or None.
    """

    reason: str
    at: str
    then: str
    received: float
    leave_by: float | None = None
    decision_id: str | None = None

    @property
    def status(self) -> int:
        """Exit status that a scheduler is to see."""
        return job_files.EXIT_HOLD if self.then == "hold" else job_files.EXIT_REQUEUE


class LeaveWatch:
    """Listens for signals and leave requests of one training.

    Args:
        clock: monotonic for repeats and polling, wall for deadlines.
        on_signal: `epoch`: one of `PATIENT_SIGNALS` lets the epoch end that the training is in;
            every other signal, and a training that has not begun, leave at the next step.
        ends_at: Unix time at which the scheduler ends the job; patience does not go beyond.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        on_signal: str = "step",
        ends_at: float | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self._patient = on_signal == "epoch"
        self._ends_at = ends_at
        self._begun = False
        self._previous: dict[int, Any] = {}
        self.signalled: int | None = None
        """The first signal that came, if any."""
        self.urgent = False
        """A signal came that is not to wait for the end of an epoch."""
        self._signal_time = 0.0
        self._counted = 0
        self._counted_time = 0.0
        self.may_raise = False
        """A signal raises `Leave` at once; see `interruptible`."""
        self.heard: Callable[[], None] = lambda: None
        """Called when a signal has come or a request is read; in a handler: it may set a flag."""
        self._path: Path | None = None
        self._answered: set[str] = set()
        self._since = 0.0
        self._polled = float("-inf")
        self.standing: LeaveRequest | None = None
        """The request that stood when the file was read last."""
        self._request_time = 0.0
        self._complained = ""

    # -- signals

    def install(self) -> None:
        """Take over the signals; only possible in the main thread, elsewhere requests remain."""
        global _current  # noqa: PLW0603 -- handlers are the process's, so is the watch on them
        _current = self
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "training runs outside the main thread: signals are not seen, leave requests are"
            )
            return
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        global _current  # noqa: PLW0603 -- see install
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
        if _current is self:
            _current = None

    def ignore(self) -> None:
        """From now on the signals do nothing: the process is ending with a status of its own.

        The interpreter would put Python's handlers back to their deadly defaults on its way out,
        but leaves what is ignored ignored.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = self.clock.monotonic()
        if self.signalled is None:
            self.signalled, self._signal_time = number, now
        # In set-up there is nothing to finish; whoever lost patience meant what he says.
        self.urgent |= not (self._patient and self._begun and number in PATIENT_SIGNALS)
        if not self._counted or now - self._counted_time >= REPEAT_SECONDS:
            self._counted, self._counted_time = self._counted + 1, now
        if number == signal.SIGINT and self._counted >= INSISTENCE:
            signal.signal(number, self._previous.get(number) or signal.SIG_DFL)
            signal.raise_signal(number)
        self.heard()
        if self.may_raise and self.urgent:
            raise Leave

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within, a signal leaves at once: for long waits in which no state changes.

        Raises:
            Leave: at entry if a notice to leave at the next step is already there, and in place
                of what other code has made of it: before Python 3.12 a class under construction,
                as in an import, turns it into a RuntimeError.
        """
        before = self.may_raise
        self.may_raise = True
        try:
            self._obey()
            yield
        except Exception as error:
            if stems_from_leave(error):
                raise Leave from error
            raise
        finally:
            self.may_raise = before

    def _obey(self) -> None:
        if self.must_leave():
            raise Leave

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Within, a signal only sets the flag: for work that must not be cut in two."""
        before = self.may_raise
        self.may_raise = False
        try:
            yield
        finally:
            self.may_raise = before

    def disarm(self) -> None:
        """End an `interruptible` block's effect before the block ends: set-up is over."""
        self.may_raise, self._begun = False, True

    # -- requests

    def observe(self, path: Path, *, answered: set[str], since: float) -> None:
        """Read leave requests from a file.

        Args:
            path: where the agent writes this run's request.
            answered: decisions that earlier attempts of the run have carried out.
            since: Unix time of the attempt's start; a deadline before it is not meant for us.
        """
        self._path, self._answered, self._since = path, set(answered), since

    def answer(self, decision_id: str) -> None:
        """Do not report this request again."""
        self._answered.add(decision_id)
        if self.standing is not None and self.standing.decision_id == decision_id:
            self.standing = None

    def reread(self) -> None:
        """Read the request file now: its last word counts for the exit status."""
        self._polled = float("-inf")
        self._poll()

    @property
    def due_at(self) -> float:
        """Monotonic time from which on a question reads the request file."""
        return float("inf") if self._path is None else self._polled + POLL_SECONDS

    def _poll(self) -> None:
        now = self.clock.monotonic()
        if self._path is None or now < self.due_at:
            return
        self._polled = now
        try:
            request = job_files.LeaveRequest.decode(job_files.read(self._path).content)
        except FileNotFoundError:
            self.standing = None  # none, or withdrawn
            return
        except job_files.JobFileError as error:
            if self._complained != error.reason:
                log.warning("leave request %s is not usable: %s", self._path, error)
            self._complained = error.reason
            return
        if request.decision_id in self._answered or request.leave_by < self._since:
            self.standing = None
            return
        if self.standing is None or self.standing.decision_id != request.decision_id:
            self._request_time = now
        self.standing = request
        self.heard()

    # -- what the loop asks

    def request(self) -> LeaveRequest | None:
        """The request that stands, if any."""
        self._poll()
        return self.standing

    def notice(self) -> Notice | None:
        """The notice to leave that stands, or None. Costs a comparison, once a second a read."""
        request = self.request()
        if request is not None and request.then == "continue":
            request = None
        if self.signalled is not None:
            waits = not self.urgent and (request is None or request.at == "epoch")
            return Notice(
                reason=signal.Signals(self.signalled).name,
                at="epoch" if waits else "step",
                then=request.then if request else "requeue",
                received=min(self._signal_time, self._request_time if request else float("inf")),
                leave_by=request.leave_by if request else self._ends_at,
                decision_id=request.decision_id if request else None,
            )
        if request is None:
            return None
        return Notice(
            reason=request.reason or "leave request",
            at=request.at,
            then=request.then,
            received=self._request_time,
            leave_by=request.leave_by,
            decision_id=request.decision_id,
        )

    def hear(self, number: int) -> None:
        """Another rank was signalled, and all leave now: it counts as if this one had been.

        Args:
            number: of the signal; 0 for none.
        """
        if number:
            self.urgent = True
            if self.signalled is None:
                self.signalled, self._signal_time = number, self.clock.monotonic()

    def leaving_status(self) -> int:
        """Exit status of an attempt that leaves now."""
        notice = self.notice()
        return notice.status if notice else job_files.EXIT_REQUEUE

    def must_leave(self, *, epoch_ended: bool = False, margin: float = 0.0) -> bool:
        """Whether to leave at this boundary.

        Args:
            epoch_ended: the boundary is the end of an epoch.
            margin: seconds that one more step and the save would take.
        """
        notice = self.notice()
        if notice is None:
            return False
        if notice.at == "step" or epoch_ended:
            return True
        return notice.leave_by is not None and self.clock.wall() + margin >= notice.leave_by


def stems_from_leave(error: BaseException | None) -> bool:
    """Whether an error is what other code has made of a `Leave`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, Leave):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


_current: LeaveWatch | None = None


def leave_pending() -> bool:
    """Whether this process's training has been asked to leave at the next step.

    For long waits in a user's own trainer or loader: poll it and return early. Without a
    gpuwarden training it is False.
    """
    return _current is not None and _current.must_leave()


def _ignore_in_worker(initialise: Callable[[int], None] | None, worker: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if initialise is not None:
        initialise(worker)


class QuietWorker:
    """A DataLoader's `worker_init_fn`: the worker ignores what is meant for the training.

    A signal to the whole process group would otherwise kill a worker, and with it the step that
    the training wants to finish. Picklable, for the spawn and forkserver start methods.
    """

    def __init__(self, initialise: Callable[[int], None] | None) -> None:
        self._initialise = initialise

    def __call__(self, worker: int) -> None:
        """Runs in the worker, first thing."""
        _ignore_in_worker(self._initialise, worker)
