"""From Python: `model.train` with the behaviour of `gpuwarden train`."""

from __future__ import annotations

import functools
import signal
from typing import Any

from gpuwarden import job_files
from gpuwarden.trainer.leaving import LeaveWatch
from gpuwarden.trainer.sessions import Session
from gpuwarden.trainer.settings import TrainSettings


class LeftTraining(SystemExit):
    """`model.train` was asked to leave: state is saved. Uncaught, the process exits with `code`.

    Attributes:
        reason: the signal or request.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


def attach(model: Any, **options: Any) -> Any:
    """Give a model's `train` the behaviour of `gpuwarden train`.

    `model.train(...)` takes ultralytics' keywords as before (and `resume="auto"`) and returns its
    metrics; it returns None if the run is already complete, and raises `LeftTraining` (a
    SystemExit: a script that does not catch it exits with the documented status) after it was
    asked to leave and has saved.

    Args:
        model: an `ultralytics.YOLO`.
        **options: see `TrainSettings.from_options`.

    Returns:
        The model.

    Raises:
        InvalidInput: an unknown or impossible option.
    """
    settings = TrainSettings.from_options(**options)
    original = model.train

    @functools.wraps(original)
    def train(trainer: type | None = None, **words: Any) -> Any:
        watch = LeaveWatch()
        watch.install()
        try:
            session = Session(settings, watch=watch)
            code, reason = session.run(model, words, train=original, base=trainer)
        finally:
            watch.restore()
        if code != job_files.EXIT_DONE:
            raise LeftTraining(code, reason)
        if (number := watch.signalled) is not None:
            signal.raise_signal(number)  # too late for this training: it is the program's
        return session.metrics

    model.train = train
    return model
