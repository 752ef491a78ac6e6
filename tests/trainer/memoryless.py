"""A trainer on a card that is too small."""

from __future__ import annotations

from typing import Any

import torch
from ultralytics.models.yolo.detect import DetectionTrainer


class Memoryless(DetectionTrainer):
    """Fails as torch does, with its second epoch."""

    def preprocess_batch(self, batch: Any) -> Any:
        """Where ultralytics no longer halves the batch by itself."""
        if self.epoch == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().preprocess_batch(batch)
