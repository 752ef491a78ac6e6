"""A trainer whose loader and steps take fixed times, so that the demo runs alike on any machine.

GPUWARDEN_DEMO_LOADER_SECONDS: the loader hands out a batch at most so often (data wait).
GPUWARDEN_DEMO_STEP_SECONDS: a step takes at least so long (compute). Batch k of an epoch is due k
periods after its first one: as long as the real work is shorter than the period, the machine's
speed does not show. Validation is not paced, and a request to leave ends every wait.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ultralytics.data.build import InfiniteDataLoader
from ultralytics.models.yolo.detect import DetectionTrainer

from gpuwarden.trainer import leave_pending

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADER_VARIABLE = "GPUWARDEN_DEMO_LOADER_SECONDS"
STEP_VARIABLE = "GPUWARDEN_DEMO_STEP_SECONDS"
_CHUNK_SECONDS = 0.1


def _period(variable: str) -> float:
    return float(os.environ.get(variable) or 0.0)


def _wait_until(deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0 and not leave_pending():
        time.sleep(min(left, _CHUNK_SECONDS))


class PacedLoader(InfiniteDataLoader):
    """Hands out batches on a fixed schedule, anew in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        """One epoch of batches."""
        period, due = _period(LOADER_VARIABLE), None
        for batch in super().__iter__():
            due = time.monotonic() + period if due is None else due + period
            _wait_until(due)
            yield batch


class PacedTrainer(DetectionTrainer):
    """Ultralytics' detection trainer, slowed down."""

    _paced_epoch = -1
    _step_due = 0.0

    def get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The loader, paced for training."""
        loader = super().get_dataloader(*args, **kwargs)
        if kwargs.get("mode", args[3] if len(args) > 3 else "train") == "train":
            loader.__class__ = PacedLoader
        return loader

    def preprocess_batch(self, batch: Any) -> Any:
        """The batch, no earlier than its step may end."""
        period = _period(STEP_VARIABLE)
        if self.epoch != self._paced_epoch:
            self._paced_epoch, self._step_due = self.epoch, time.monotonic()
        self._step_due += period
        _wait_until(self._step_due)
        return super().preprocess_batch(batch)
