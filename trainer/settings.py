"""What a user may choose about gpuwarden's part in a training."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gpuwarden import durations, job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import comparisons
from gpuwarden.trainer.leaving import ON_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA_ORDERS = ("stateless", "ultralytics")
RESUME_CHOICES = ("auto", "never")
_DURATIONS = {
    "checkpoint_every": "checkpoint_seconds",
    "grace": "grace_seconds",
    "lock_wait": "lock_seconds",
    "stall_report": "stall_seconds",
    "mtbf": "mtbf_seconds",
    "upload_wait": "upload_wait_seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Choices for one training.

    Attributes:
        run_id: name of the run, stable over resumes; None: from the found state, or generated.
        resume: `auto` continues the newest state of the same run, `never` starts afresh; None
            means `auto` where a run id was given, else `never`.
        jobs_directory: root of the job files that the node's exporter reads.
        on_mismatch: what to do where the newest state is of a training that differs from this one:
            `refuse`, go on from the beginning of the state's `epoch`, or begin anew from its
            `weights`.
        extend_epochs: give the run more epochs: so many in all; None: those of its words.
        checkpoint_seconds: time between periodic saves; 0: chosen from what a save costs and
            `mtbf_seconds`.
        mtbf_seconds: mean time between interruptions, see `checkpoint_seconds`.
        checkpoint_epochs: also save after every so many epochs; None: by time alone.
        keep: how many of the newest states stay on disk; the best one stays as well.
        data_order: `stateless` (a function of seed, epoch and position: any number of workers
            resumes exactly) or `ultralytics` (its own stream; exact with workers=0 only).
        trainer: `MODULE:CLASS` of a trainer class to build upon, the class, or None for the task's.
        gradient_norm: publish the norm of the gradients at each optimizer step; costs one pass over
            them where ultralytics does not tell it.
        upload: URL under which each state is put besides, in a folder named after the run; any that
            fsspec knows. A run whose folder is empty continues from there.
        upload_wait_seconds: how long an attempt that leaves waits for the upload, within the
            request's deadline.
        export: formats into which the trained model is exported, as a phase of the training.
        online: let ultralytics use the network: downloads, look-ups, its statistics.
        stall_seconds: a loop that has not moved for so long shows its stacks; 0: never.
        log: file whose growth shows that the job is alive; None: the file behind standard output.
        on_signal: up to where SIGUSR1 and SIGUSR2 let the training go on: the next `step`, or the
            end of its `epoch`; all other signals mean the step.
        lock_seconds: how long to wait for an earlier attempt of the run to be gone.
        grace_seconds: of several processes, how long those told to leave have before the rest of
            them is killed.
    """

    run_id: str | None = None
    resume: str | None = None
    jobs_directory: Path = job_files.DEFAULT_DIRECTORY
    on_mismatch: str = comparisons.REFUSE
    extend_epochs: int | None = None
    checkpoint_seconds: float = 300.0
    mtbf_seconds: float = 86400.0
    checkpoint_epochs: int | None = None
    keep: int = 3
    data_order: str = "stateless"
    trainer: str | type | None = None
    gradient_norm: bool = False
    upload: str | None = None
    upload_wait_seconds: float = 20.0
    export: tuple[str, ...] = ()
    online: bool = False
    stall_seconds: float = 0.0
    log: Path | None = None
    on_signal: str = ON_SIGNAL[0]
    lock_seconds: float = 30.0
    grace_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        # Infinite and NaN are refused by each comparison that must hold.
        refused = {
            f"run id {self.run_id!r}: use 1 to 64 of A-Z a-z 0-9 _ -": self.run_id is not None
            and not job_files.RUN_ID.fullmatch(self.run_id),
            _none_of("resume", self.resume, RESUME_CHOICES): self.resume
            not in (None, *RESUME_CHOICES),
            _none_of("data order", self.data_order, DATA_ORDERS): self.data_order
            not in DATA_ORDERS,
            _none_of("on signal", self.on_signal, ON_SIGNAL): self.on_signal not in ON_SIGNAL,
            _none_of("on mismatch", self.on_mismatch, comparisons.CHOICES): self.on_mismatch
            not in comparisons.CHOICES,
            "the total of epochs must be at least 1": self.extend_epochs is not None
            and self.extend_epochs < 1,
            "the time between checkpoints must be more than 0s, and finite; or auto": not (
                0 <= self.checkpoint_seconds < math.inf
            ),
            "the time between interruptions must be more than 0s, and finite": not (
                0 < self.mtbf_seconds < math.inf
            ),
            "the time until a stall is reported must be finite": not (
                0 <= self.stall_seconds < math.inf
            ),
            "the time to wait for an upload must be finite": not (
                0 <= self.upload_wait_seconds < math.inf
            ),
            "the number of epochs between checkpoints must be at least 1": (
                self.checkpoint_epochs is not None and self.checkpoint_epochs < 1
            ),
            "at least one state must be kept": self.keep < 1,
            f"upload {self.upload!r} is no URL: write s3://bucket/folder, file://... or such": (
                self.upload is not None and "://" not in self.upload
            ),
        }
        for complaint, wrong in refused.items():
            if wrong:
                raise InvalidInput(complaint)

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Settings from Python keywords.

        Args:
            **options: the fields of this class; `checkpoint_every` takes a duration such as "5m",
                seconds, or "auto"; `mtbf` and `upload_wait` a duration or seconds; `export` one
                format or several; paths may be strings; what is None keeps its default.

        Raises:
            InvalidInput: an unknown or impossible option.
        """
        chosen = {name: value for name, value in options.items() if value is not None}
        for option, name in _DURATIONS.items():
            if (given := chosen.pop(option, None)) is not None:
                chosen[name] = _seconds(option, given)
        if "export" in chosen:
            export = chosen["export"]
            chosen["export"] = (export,) if isinstance(export, str) else tuple(export)
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(chosen) - known)
        if unknown:
            raise InvalidInput(
                f"unknown option {unknown[0]!r}; known: "
                f"{', '.join(sorted(known | set(_DURATIONS)))}"
            )
        chosen.setdefault("jobs_directory", job_files.directory(dict(os.environ)))
        for name in ("jobs_directory", "log"):
            if name in chosen:
                chosen[name] = Path(chosen[name])
        return cls(**chosen)

    def as_options(self) -> Iterator[str]:
        """The options of `gpuwarden train` that make these settings."""
        for item in fields(self):
            value = getattr(self, item.name)
            if value == item.default:
                continue
            name = item.name.replace("_", "-")
            if isinstance(value, bool):
                yield f"--{name}"
            elif item.name.endswith("_seconds"):
                option = next(key for key, names in _DURATIONS.items() if names == item.name)
                automatic = item.name == "checkpoint_seconds" and not value
                said = "auto" if automatic else durations.render(value)
                yield f"--{option.replace('_', '-')}={said}"
            elif isinstance(value, type):
                yield f"--{name}={value.__module__}:{value.__qualname__}"
            else:
                for part in value if isinstance(value, tuple) else (value,):
                    yield f"--{name}={part}"

    @property
    def resumes(self) -> bool:
        """Whether an existing state of the run is to be continued."""
        named = self.run_id is not None or self.extend_epochs is not None
        return (self.resume or ("auto" if named else "never")) == "auto"


def _none_of(what: str, given: str | None, choices: tuple[str, ...]) -> str:
    return f"{what} {given!r} is none of {', '.join(choices)}"


def _seconds(option: str, given: str | float) -> float:
    if option == "checkpoint_every" and given == "auto":
        return 0.0
    if isinstance(given, str):
        try:
            seconds = durations.parse(given)
        except ValueError as error:
            raise InvalidInput(f"{option}: {error}") from error
    else:
        seconds = float(given)
    if option == "checkpoint_every" and not 0 < seconds < math.inf:
        raise InvalidInput("the time between checkpoints must be more than 0s, and finite")
    return seconds
