"""What a user may choose about gpuwarden's part in a training."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from gpuwarden import durations, job_files
from gpuwarden.errors import InvalidInput

DATA_ORDERS = ("stateless", "ultralytics")
RESUME_CHOICES = ("auto", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Choices for one training.

    Attributes:
        run_id: name of the run, stable over resumes; None: from the found state, or generated.
        resume: `auto` continues the newest state of the same run, `never` starts afresh; None
            means `auto` where a run id was given, else `never`.
        jobs_directory: root of the job files that the node's exporter reads.
        checkpoint_seconds: time between periodic saves.
        checkpoint_epochs: also save after every so many epochs; None: by time alone.
        keep: how many states stay on disk.
        data_order: `stateless` (a function of seed, epoch and position: any number of workers
            resumes exactly) or `ultralytics` (its own stream; exact with workers=0 only).
        trainer: `MODULE:CLASS` of a trainer class to build upon, the class, or None for the task's.
        log: file whose growth shows that the job is alive; None: the file behind standard output.
        lock_seconds: how long to wait for an earlier attempt of the run to be gone.
    """

    run_id: str | None = None
    resume: str | None = None
    jobs_directory: Path = job_files.DEFAULT_DIRECTORY
    checkpoint_seconds: float = 300.0
    checkpoint_epochs: int | None = None
    keep: int = 3
    data_order: str = "stateless"
    trainer: str | type | None = None
    log: Path | None = None
    lock_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.run_id is not None and not job_files.RUN_ID.fullmatch(self.run_id):
            raise InvalidInput(f"run id {self.run_id!r}: use 1 to 64 of A-Z a-z 0-9 _ -")
        if self.resume not in (None, *RESUME_CHOICES):
            raise InvalidInput(f"resume {self.resume!r} is none of {', '.join(RESUME_CHOICES)}")
        if self.data_order not in DATA_ORDERS:
            raise InvalidInput(
                f"data order {self.data_order!r} is none of {', '.join(DATA_ORDERS)}"
            )
        if not 0 < self.checkpoint_seconds < math.inf:  # NaN is neither
            raise InvalidInput("the time between checkpoints must be more than 0s, and finite")
        if self.checkpoint_epochs is not None and self.checkpoint_epochs < 1:
            raise InvalidInput("the number of epochs between checkpoints must be at least 1")
        if self.keep < 1:
            raise InvalidInput("at least one state must be kept")

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Settings from Python keywords.

        Args:
            **options: the fields of this class; `checkpoint_every` takes a duration such as "5m"
                or seconds; paths may be strings; what is None keeps its default.

        Raises:
            InvalidInput: an unknown or impossible option.
        """
        chosen = {name: value for name, value in options.items() if value is not None}
        every = chosen.pop("checkpoint_every", None)
        if every is not None:
            chosen["checkpoint_seconds"] = _seconds(every)
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(chosen) - known)
        if unknown:
            raise InvalidInput(
                f"unknown option {unknown[0]!r}; known: "
                f"{', '.join(sorted(known | {'checkpoint_every'}))}"
            )
        chosen.setdefault("jobs_directory", job_files.directory(dict(os.environ)))
        for name in ("jobs_directory", "log"):
            if name in chosen:
                chosen[name] = Path(chosen[name])
        return cls(**chosen)

    @property
    def resumes(self) -> bool:
        """Whether an existing state of the run is to be continued."""
        return (self.resume or ("auto" if self.run_id else "never")) == "auto"


def _seconds(every: str | float) -> float:
    if isinstance(every, str):
        try:
            return durations.parse(every)
        except ValueError as error:
            raise InvalidInput(f"checkpoint_every: {error}") from error
    return float(every)
