"""A trainer with loader workers on the CPU too, where ultralytics would use none."""

from __future__ import annotations

import os
from typing import Any

from demo.paced import PacedTrainer


class ManyWorkers(PacedTrainer):
    """Two workers for training; paced, if the environment says so."""

    def get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The loader, made while the settings ask for workers."""
        self.args.workers = int(os.environ.get("TEST_WORKERS", "2"))
        loader = super().get_dataloader(*args, **kwargs)
        self.args.workers = 0
        return loader
