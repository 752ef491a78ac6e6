"""Real trainings in the test's own process, and what they have learnt, to be compared."""

from __future__ import annotations

import hashlib
import signal
from typing import TYPE_CHECKING, Any

import torch

from gpuwarden import job_files
from gpuwarden.job_files import RunStatus
from gpuwarden.trainer import attach

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.trainer.conftest import Material

BATCHES = 6
"""An epoch's, of `Material.words`."""


def digest_of(trainer: Any) -> dict[str, str]:
    """Sums of model, EMA and optimizer, and of results.csv without its time column."""
    sums = {}
    for name, part in (
        ("model", trainer.model.state_dict()),
        ("ema", trainer.ema.ema.state_dict()),
        ("optimizer", trainer.optimizer.state_dict()),
    ):
        digest = hashlib.sha256()
        _feed(digest, part)
        sums[name] = digest.hexdigest()
    rows = [line.split(",") for line in trainer.csv.read_text("utf-8").splitlines()]
    assert len(rows) == trainer.epoch + 2  # a header, and a row for each epoch
    text = "\n".join(",".join(row[:1] + row[2:]) for row in rows)
    sums["results"] = hashlib.sha256(text.encode()).hexdigest()
    return sums


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for name, item in value.items():
            digest.update(str(name).encode())
            _feed(digest, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())


class Trainings:
    """Starts attempts at trainings in one project folder."""

    def __init__(self, material: Material, folder: Path, jobs: Path) -> None:
        self.material, self.folder, self.jobs = material, folder, jobs

    def model(self, file: Path | None = None) -> Any:
        """A model of a file, by default a new, untrained one."""
        from ultralytics import YOLO  # noqa: PLC0415 -- after its environment is set

        return YOLO(str(file or self.material.model))

    def words(self, **words: Any) -> dict[str, Any]:
        """Words of a short training into the project."""
        return self.material.words(project=str(self.folder / "runs"), **words)

    def attempt(
        self,
        run_id: str,
        words: dict[str, Any],
        *,
        hooks: dict[str, Callable[[Any], None]] | None = None,
        base: type | None = None,
        file: Path | None = None,
        **options: Any,
    ) -> Any:
        """The trainer after an attempt that ran to its end."""
        model = self.model(file)
        attach(model, run_id=run_id, jobs_directory=self.jobs, **options)
        for event, hook in (hooks or {}).items():
            model.add_callback(event, hook)
        model.train(trainer=base, **self.words(name=run_id, **words))
        return model.trainer

    def status(self, run_id: str) -> RunStatus:
        """What the run has published last."""
        path = job_files.status_path(self.jobs, run_id)
        return RunStatus.decode(job_files.read(path).content)


def at_epoch_end(epoch: int) -> dict[str, Callable[[Any], None]]:
    """Signals once an epoch is validated and saved."""

    def hook(trainer: Any) -> None:
        if trainer.epoch == epoch:
            signal.raise_signal(signal.SIGTERM)

    return {"on_fit_epoch_end": hook}


def in_validation(number: int) -> dict[str, Callable[[Any], None]]:
    """Signals within the validation of that number; the fourth is the final evaluation."""
    seen = []

    def hook(_validator: Any) -> None:
        seen.append(1)
        if len(seen) == number:
            signal.raise_signal(signal.SIGTERM)

    return {"on_val_batch_end": hook}


def at_batch(epoch: int, batch: int) -> dict[str, Callable[[Any], None]]:
    """Signals when so many batches of the epoch are done."""

    def hook(trainer: Any) -> None:
        if (trainer.epoch, trainer.gpuwarden.batch + 1) == (epoch, batch):
            signal.raise_signal(signal.SIGTERM)

    return {"on_train_batch_end": hook}
