"""A trainer with loader workers on the CPU too, where ultralytics would use none."""

from __future__ import annotations

import importlib
import os
from typing import Any

from demo.paced import PacedTrainer


class _Mark:
    """Says on standard error that the interpreter takes its modules apart."""

    def __del__(self, write: Any = os.write) -> None:
        write(2, b"modules are taken apart")


MARK = _Mark()


class _Workers:
    """Mixed in before a trainer: loaders with workers, by default two."""

    args: Any

    def get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The loader, made while the settings ask for workers."""
        self.args.workers = int(os.environ.get("TEST_WORKERS", "2"))
        loader = super().get_dataloader(*args, **kwargs)  # type: ignore[misc]
        self.args.workers = 0
        return loader


class ManyWorkers(_Workers, PacedTrainer):
    """For detection; paced, if the environment says so."""


def many_workers(task: str) -> type:
    """A trainer of ultralytics for the task, with loader workers."""
    module: Any = importlib.import_module(f"ultralytics.models.yolo.{task}")
    names = {"segment": "Segmentation", "pose": "Pose", "obb": "OBB", "classify": "Classification"}
    return type(f"Many{task}", (_Workers, getattr(module, f"{names[task]}Trainer")), {})
