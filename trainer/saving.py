"""When states are written, and what the rest of the training is told about it."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from gpuwarden.job_files import Checkpoint
from gpuwarden.trainer.states import (
    BackgroundWrite,
    Manifest,
    NonFiniteState,
    NotStorable,
    Position,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.clock import Clock
    from gpuwarden.trainer.states import StateStore
    from gpuwarden.trainer.status import StatusBoard

log = logging.getLogger(__name__)

SHORTEST_INTERVAL, LONGEST_INTERVAL = 60.0, 300.0
"""Bounds of `best_interval` in seconds."""


class Saver:
    """Takes states of one training.

    Args:
        store: where they go.
        board: is told.
        every: seconds between periodic states; 0: by what a save costs, see `best_interval`.
        mtbf: mean seconds between interruptions.
        clock: wall for dates, monotonic for the period.
        committed: told, on the training thread, of each state that has become durable.
    """

    def __init__(
        self,
        store: StateStore,
        board: StatusBoard,
        *,
        every: float,
        clock: Clock,
        mtbf: float = 86400.0,
        committed: Callable[[Manifest], None] | None = None,
    ) -> None:
        self._store, self._board, self._every, self._clock = store, board, every, clock
        self._mtbf = mtbf
        self._committed = committed
        self._overdue = False
        self._last = clock.monotonic()
        self.ended: Callable[[], None] = lambda: None
        """Called, on a thread of its own, once there is something to `collect`."""
        self._writing: BackgroundWrite | None = None
        self._copied = 0.0
        self.save_seconds = 0.0
        """How long the longest save took until it was durable: what leaving must allow for."""
        self.newest: Position | None = None
        """The newest position that is on disk."""
        self.possible = True
        """False once the training has shown that its state cannot be stored."""

    @property
    def due(self) -> bool:
        """Whether a periodic state should be taken at the next boundary."""
        return self._clock.monotonic() >= self.due_at

    @property
    def due_at(self) -> float:
        """Monotonic time from which on it should; infinite while another is being written."""
        if not self.possible or (self._writing and self._writing.running):
            return float("inf")
        return float("-inf") if self._overdue else self._last + self.interval

    @property
    def collectable(self) -> bool:
        """Whether a background write has ended of which no note was taken."""
        return self._writing is not None and not self._writing.running

    @property
    def interval(self) -> float:
        """Seconds between periodic states."""
        return self._every or best_interval(self._copied, self._mtbf)

    def save(
        self,
        position: Position,
        *,
        capture: Callable[[], dict[str, Any]],
        draft: Manifest,
        background: bool,
        later: bool = False,
    ) -> bool:
        """Take a state.

        Args:
            position: of the training.
            capture: copies its state.
            draft: the manifest, without what writing adds.
            background: return after copying; else when it is durable.
            later: a state from one of the next boundaries is as good, while one is being written.

        Returns:
            Whether it is durable, or on its way.
        """
        if not self.wants(position, later=later):
            return self.possible
        began = time.monotonic()
        self._last = self._clock.monotonic()
        self._overdue = False
        with self._board.during("checkpoint"):
            try:
                state = capture()
            except NotStorable as error:
                self.possible = False
                log.warning("this training cannot be resumed: %s", error)
                self._board.set(resume_mode="none")
                return False
            except (MemoryError, RuntimeError, OSError, ValueError) as error:
                log.warning("a state could not be copied (%s); the states before it stay", error)
                return False
            self._copied = time.monotonic() - began
            self._writing = BackgroundWrite(
                lambda: self._store.write(state, draft), ended=self.ended
            )
            if not background:
                self.collect(wait=True)
                return self.newest == position
        return True

    def follow(self, store: StateStore) -> None:
        """Put the next states into another store."""
        self.collect(wait=True)
        self._store, self.newest = store, None

    def wants(self, position: Position, *, later: bool = False) -> bool:
        """Whether a state of this position is to be taken: it can be, and is not on disk yet.

        Args:
            position: of the training.
            later: see `save`.
        """
        if later and self._writing is not None and self._writing.running:
            self._overdue = True
            return False
        self.collect(wait=True)
        return self.possible and position != self.newest

    def rewound(self) -> None:
        """The training has gone back: what was saved at a position is not what will be there."""
        self.collect(wait=True)
        self.newest = None

    def collect(self, *, wait: bool = False) -> None:
        """Take note of a background write that has ended.

        Args:
            wait: wait for its end.
        """
        writing = self._writing
        if writing is None or (writing.running and not wait):
            return
        self._writing = None
        try:
            manifest, durable = writing.result()
        except NonFiniteState as error:
            log.warning("%s; the states before it stay", error)
        except Exception as error:  # noqa: BLE001 -- a full disk must not end the training
            log.warning("a state could not be written (%s); the states before it stay", error)
        else:
            self.newest = manifest.position
            self.save_seconds = max(self.save_seconds, self._copied + writing.seconds)
            self._board.saved(Checkpoint(manifest.time, manifest.step, durable, manifest.size))
            if self._committed is not None:
                self._committed(manifest)


def best_interval(cost: float, mtbf: float) -> float:
    """Seconds between saves that lose the least time, by the formula of Young and Daly.

    Args:
        cost: seconds that the loop stands still for one save; 0: not known yet.
        mtbf: mean seconds between interruptions.
    """
    if cost <= 0:
        return LONGEST_INTERVAL
    return min(max(math.sqrt(2 * cost * mtbf), SHORTEST_INTERVAL), LONGEST_INTERVAL)
