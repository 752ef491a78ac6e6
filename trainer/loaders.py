"""The training loader as ultralytics' loop sees it: starts at any batch, and measures the wait."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from gpuwarden.trainer import captures, orders
from gpuwarden.trainer.leaving import Leave, stems_from_leave

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from gpuwarden.trainer.leaving import LeaveWatch
    from gpuwarden.trainer.ranks import Place
    from gpuwarden.trainer.status import StatusBoard

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that loader workers have to end."""
HURRY = 0.5
"""The same where the card is waited for: what a worker still makes is of no use to anybody."""


class TrainLoader:
    """Wraps the loader that the trainer built, whatever its class.

    Args:
        inner: the loader; everything that is not said here is its own.
        epoch: the trainer's current epoch.
        board: is told how long the loop waited and worked.
        watch: may interrupt the wait, where a batch lost in it is not missed.
        settle: called before loader workers are forked.
        place: of this rank. Of several, none may give up a wait that the others do not.
    """

    def __init__(
        self,
        inner: Any,
        *,
        epoch: Callable[[], int],
        board: StatusBoard,
        watch: LeaveWatch,
        settle: Callable[[], None],
        place: Place,
    ) -> None:
        self.inner, self._place = inner, place
        self._epoch, self._board, self._watch = epoch, board, watch
        self._settle = settle
        self._batches: orders.EpochBatches | None = None
        self._recorded: orders.RecordedSampler | None = None
        self._next_epoch = -1
        self._interruptible = place.world == 1
        self._resume: _Resume | None = None

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # absent while being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    # -- order

    def follow_stateless(self) -> None:
        """Take the order of the loader's `StatelessDataset`."""
        self._batches = orders.use_stateless(self.inner, self._place)

    def follow_recorded(self) -> None:
        """Keep ultralytics' order, and record it. Drawing a batch then changes state."""
        self._recorded = orders.record_passes(self.inner)
        self._interruptible = False

    def stream(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """State of ultralytics' own order before a batch; None for an order without state."""
        if self._recorded is None:
            return None
        buffer = self.inner.dataset.buffer
        return {
            "epoch": epoch,
            "batch": batch,
            "generator": self.inner.generator.get_state(),
            "pass": self._recorded.pass_state if batch else None,
            "buffer": list(buffer),
        }

    def resume_at(
        self,
        state: dict[str, Any],
        *,
        closing: bool,
        ready: Callable[[], None],
    ) -> None:
        """Start the first iteration where a state was taken.

        Args:
            state: see `captures.capture`.
            closing: mosaics end with the state's epoch.
            ready: called when the data is in place, right before the first real batch.
        """
        self._resume = _Resume(state, closing, ready)

    # -- iteration

    def __iter__(self) -> Iterator[Any]:
        """One epoch of batches; stand-ins for those that an earlier attempt trained on."""
        first = yield from self._replayed()
        source = iter(self.inner)
        pulse, now = self._board.pulse, time.monotonic
        watch = self._watch
        # As `interruptible`, in place: for each batch its calls would be dear.
        before, armed = watch.may_raise, self._interruptible or watch.may_raise
        uneven, last, images = not self._is_even(), len(self.inner) - 1, 0
        left = now()
        try:
            for at in range(first, last + 1):
                watch.may_raise = armed
                if armed and watch.urgent:
                    raise Leave  # noqa: TRY301 -- see above
                batch = next(source, None)
                watch.may_raise = before
                if batch is None:  # a user's loader may be shorter than it says
                    break
                arrived, saving = now(), pulse.saving
                pulse.data_wait += arrived - left
                if not images or uneven or at == last:  # a look costs more than all the rest
                    images = batch["img"].shape[0] * self._place.world
                pulse.drawn += images
                yield batch
                left = now()
                pulse.compute += left - arrived - (pulse.saving - saving)
        except (Leave, Exception) as error:
            watch.may_raise = before
            dataset = getattr(self.inner, "dataset", None)
            if isinstance(dataset, orders.StatelessDataset):
                dataset.put_back()
            if isinstance(error, Leave) or not stems_from_leave(error):
                raise
            raise Leave from error
        self._next_epoch = self._epoch() + 1

    def _replayed(self) -> Generator[Any, None, int]:
        """The stand-ins; returns the first batch to train on, at which the data stand then."""
        resume, self._resume = self._resume, None
        first: int = resume.state["batch"] if resume else 0
        for _ in range(first):
            yield captures.stand_in_batch()
        self._position(first, resume)
        if resume:
            resume.ready()
        if getattr(self.inner, "iterator", None) is None and self.inner.num_workers:
            self._settle()
        return first

    def _is_even(self) -> bool:
        """Whether all batches but the last are known to have equally many images."""
        return self._batches is not None or self._recorded is not None

    def _position(self, first: int, resume: _Resume | None) -> None:
        if self._batches is not None:
            # An epoch that is done again (after NaN) is not what the running iterator has next.
            if self.inner.iterator is not None and self._next_epoch != self._epoch():
                self.inner.reset()
            if self.inner.iterator is None:
                self._batches.start = (self._epoch(), first)
        elif self._recorded is not None and resume and self.inner.iterator is None:
            orders.position_recorded(self.inner, resume.state["stream"], closing=resume.closing)


class _Resume:
    def __init__(self, state: dict[str, Any], closing: bool, ready: Callable[[], None]) -> None:
        self.state, self.closing, self.ready = state, closing, ready


def close(trainer: Any, *, patience: float = PATIENCE) -> None:
    """End a trainer's loaders and their workers, also those that hang.

    Args:
        trainer: None if there is none yet.
        patience: seconds until the workers of a loader are killed.
    """
    for name in ("train_loader", "test_loader"):
        loader = getattr(trainer, name, None)
        if loader is None or not hasattr(loader, "close"):
            continue
        # One that hangs would ignore torch's SIGTERM, and the interpreter wait for it for good.
        workers = getattr(getattr(loader, "iterator", None), "_workers", ())
        timer = threading.Timer(patience, _kill, [list(workers)])
        timer.start()
        try:
            loader.close()
        except RuntimeError as error:  # torch's word for a worker that was killed
            log.warning("loader workers did not end by themselves: %s", error)
        finally:
            timer.cancel()


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        worker.kill()
