"""From Python: `model.train` with the behaviour of `gpuwarden train`."""

from __future__ import annotations

import functools
import logging
import os
import signal
from typing import Any

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import isolation
from gpuwarden.trainer.leaving import LeaveWatch, job_ends_at
from gpuwarden.trainer.sessions import Session
from gpuwarden.trainer.settings import TrainSettings

log = logging.getLogger(__name__)


_ORIGINAL = "gpuwarden_original"


class LeftTraining(SystemExit):
    """`model.train` was asked to leave: state is saved. Uncaught, the process exits with `code`.

    Attributes:
        reason: the signal or request.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


def attach(model: Any, *, isolate: bool | None = None, **options: Any) -> Any:
    """Give a model's `train` the behaviour of `gpuwarden train`.

    `model.train(...)` takes ultralytics' keywords as before (and `resume="auto"`) and returns its
    metrics; it returns None if the run is already complete, and raises `LeftTraining` (a
    SystemExit: a script that does not catch it exits with the documented status) after it was
    asked to leave and has saved.

    In a Jupyter kernel it trains in a child process, so that the card is free again afterwards; the
    model then has the best weights, `model.train` returns their metrics as a dictionary, and an
    interrupt saves and leaves.

    Attached again, a model has the newer options only.

    Args:
        model: an `ultralytics.YOLO`.
        isolate: train in a child process; None: in a notebook, if nothing stands against it.
        **options: see `TrainSettings.from_options`.

    Returns:
        The model.

    Raises:
        InvalidInput: an unknown or impossible option, or `isolate=True` for what cannot be handed
            to another process.
    """
    settings = TrainSettings.from_options(**options)
    # A notebook's cell is run again: what it attaches then takes the place of the former.
    original = getattr(model.train, _ORIGINAL, model.train)

    @functools.wraps(original)
    def train(trainer: type | None = None, **words: Any) -> Any:
        if isolate or (isolate is None and isolation.in_notebook()):
            against = isolation.obstacle(model, trainer, words)
            if against is None:
                return _train_apart(model, trainer, settings, words)
            if isolate:
                raise InvalidInput(f"isolate=True: {against}, which no other process has")
            log.warning(
                "%s: trains in this process, whose memory on the card stays its own until the "
                "kernel is restarted",
                against,
            )
        watch = LeaveWatch(on_signal=settings.on_signal, ends_at=job_ends_at(os.environ))
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

    setattr(train, _ORIGINAL, original)
    model.train = train
    return model


def _train_apart(
    model: Any, trainer: type | None, settings: TrainSettings, words: dict[str, Any]
) -> Any:
    code, result = isolation.run(isolation.command(model, trainer, settings, words))
    isolation.check(code, result)
    if code != job_files.EXIT_DONE:
        raise LeftTraining(code, str(result.get("reason", "")))
    return isolation.take_over(model, result)
