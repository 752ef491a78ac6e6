"""What the daemon asks of an engine: the port behind which local, Slurm and Kueue lie.

A driver is a plain object of blocking calls. The daemon makes every call from **one** thread, one
after the other: a driver needs no locks, and may keep what it knows between calls. Each call comes
back within the driver's own timeouts (a minute at most). A driver that cannot see its engine raises
`TemporaryError` and keeps what it knew: "cannot see" is never "gone".

`gpuwarden.scheduling.<engine>.driver` has `open_driver(policy, context) -> Driver`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gpuwarden.errors import RefusedAction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.schedule_api import Preemption, Problem, QueueEntry
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.predictions import Training
    from gpuwarden.scheduling.slots import Slot, SlotUse
    from gpuwarden.scheduling.tasks import Task

LOOP = "requeue_loop"
"""Code of a job (`QueueEntry.why`) that a loop guard holds; the metric counts them by it."""
LEAK = "quota_leak"
"""Code of a problem: cards that nobody holds. The metric reads their number from its words, which
begin with it."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a driver is given of the daemon.

    Attributes:
        state: a folder of the driver's own, which the daemon keeps others out of (0700).
        clock: time.
        wake: asks for a tick at once; may be called from any thread.
        leaves: address and token file of the engine's API for leave requests, or None: then a
            driver that can asks trainers itself, and the others do not ask at all.
        leaves_token: file with the token for it, or None.
        prometheus: address of the server with the trainings' series, or None.
    """

    state: Path
    clock: Clock
    wake: Callable[[], None]
    leaves: str | None = None
    leaves_token: Path | None = None
    prometheus: str | None = None


class SlotsRefused(RefusedAction):
    """An engine does not keep cards for some slots.

    Args:
        refusals: id of a slot -> one sentence.
    """

    def __init__(self, refusals: Mapping[str, str]) -> None:
        super().__init__("slots", "; ".join(f"{name}: {why}" for name, why in refusals.items()))
        self.refusals = dict(refusals)


class Driver(Protocol):
    """One engine.

    Attributes:
        engine: slurm, kueue or local.
        cluster: the engine's own name for itself.
    """

    engine: str
    cluster: str

    def start(self, now: float) -> None:
        """Connect, and take up what was left: before the first tick.

        Raises:
            TemporaryError: the engine cannot be seen now; it is called again with the next tick.
        """

    def stop(self) -> None:
        """Release everything; jobs go on. Called once, also where `start` never went well."""

    def adopt(self, policy: Policy) -> None:
        """Go by another policy from the next tick on.

        Raises:
            GpuwardenError: the policy cannot be followed; the old one stays in force.
        """

    def tick(self, now: float) -> None:
        """Read the engine, decide and act; called every few seconds and after `wake`.

        Raises:
            TemporaryError: the engine cannot be seen now.
        """

    def entries(self) -> Sequence[QueueEntry]:
        """Every job as of the last tick.

        Those that wait come in their order; those that ended are told for a day.
        """

    def preemptions(self) -> Sequence[Preemption]:
        """Open preemptions, and those that ended within the last day; the daemon keeps them."""

    def problems(self) -> Sequence[Problem]:
        """What an operator should know of as of the last tick."""

    def book(self, slots: Sequence[Slot], now: float) -> None:
        """Have the engine keep cards for these slots, and for no others of ours.

        The list is the whole truth: slots that are there already stay as they are, ones that are
        ours and are not named are given back. Called before each tick; a call that changes
        nothing must cost little.

        Raises:
            SlotsRefused: the engine refuses some of them; the others are kept.
            TemporaryError: the engine cannot be seen now.
        """

    def slot_uses(self) -> Sequence[SlotUse]:
        """What becomes of the slots that are active, as of the last tick."""

    def usage(self, begin: float, end: float) -> Sequence[Holding]:
        """Every attempt that held cards in a stretch of time, whole (not cut to the stretch).

        Raises:
            TemporaryError: the engine's account cannot be read now.
        """


@runtime_checkable
class Remarking(Protocol):
    """A driver that keeps more for some slots than was booked, say, and says so."""

    def remarks(self) -> Mapping[str, str]:
        """Id of a slot of the last `book` -> one sentence for its team."""


@runtime_checkable
class Described(Protocol):
    """A driver that knows what its jobs train, by which their ends are foretold."""

    def trainings(self) -> Mapping[str, Training]:
        """Id of an entry of the last tick -> what it trains; of those where it is known."""


@runtime_checkable
class Holdable(Protocol):
    """A driver whose jobs can be held and released.

    Who may command which job was checked by the caller; what the engine cannot do is refused.
    """

    def hold(self, entry: str, *, by: str, now: float) -> None:
        """Have a job wait until it is released.

        Raises:
            RefusedAction: with a reason.
        """

    def release(self, entry: str, *, by: str, now: float) -> None:
        """Let a held job go on waiting for its turn.

        Raises:
            RefusedAction: with a reason.
        """


@runtime_checkable
class Commanded(Holdable, Protocol):
    """A driver that owns its queue (local): it takes jobs, and commands for them."""

    def submit(self, task: Task, *, uid: int, gid: int, now: float, token: str = "") -> str:
        """Take a job on: on disk when this returns.

        Args:
            task: what is to be run; its user and team were set by who asked.
            uid: of who asked, as the kernel told.
            gid: likewise.
            now: Unix time.
            token: of the submission: the same one again is the same job, and not another.

        Returns:
            The entry's id.

        Raises:
            RefusedAction: with a reason.
        """

    def cancel(self, entry: str, *, by: str, now: float) -> None:
        """Take a job out of the queue, or have it leave for good.

        Raises:
            RefusedAction: with a reason.
        """


@runtime_checkable
class Logged(Protocol):
    """A driver whose jobs write to files of this host."""

    def log_path(self, entry: str) -> Path:
        """Where a job's output goes; its user's own file, which may not be there yet.

        Raises:
            RefusedAction: there is no such job.
        """


def open_driver(engine: str, policy: Policy, context: Context) -> Driver:
    """The driver of an engine; its module is loaded only here.

    Args:
        engine: slurm, kueue or local.
        policy: a `gpuwarden.scheduling.policies.Policy`.
        context: what it is given.

    Raises:
        InvalidInput: the policy lacks what this engine needs.
        MissingExtra: a library is not installed.
    """
    module = import_module(f"gpuwarden.scheduling.{engine}.driver")
    driver: Driver = module.open_driver(policy, context)
    return driver
