"""Experiment trackers keep one run over all attempts of a training.

Ultralytics begins a new W&B or MLflow run whenever it does not itself resume, which under gpuwarden
it never does. TensorBoard's events lie in the run's folder and need nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.trainer.runs import RunRecord

log = logging.getLogger(__name__)

MLFLOW = "mlflow"
_MLFLOW_RUN = "MLFLOW_RUN_ID"
_WANDB_RUN = "WANDB_RUN_ID"


@contextmanager
def one_run(record: RunRecord) -> Iterator[dict[str, str]]:
    """Within, ultralytics' trackers continue the run that earlier attempts began.

    Args:
        record: of the training; its `loggers` are what an earlier attempt has noted.

    Yields:
        What to note for the next attempt; complete when the block has ended.
    """
    noted = dict(record.loggers)
    with ExitStack() as stack:
        _continue_wandb(stack, f"{record.run_id}-{record.lineage}")
        mlflow = sys.modules.get(MLFLOW)
        if mlflow is not None:
            _continue_mlflow(stack, mlflow, noted)
        yield noted
        if mlflow is not None:
            _note_mlflow(mlflow, noted)


def _continue_wandb(stack: ExitStack, run_id: str) -> None:
    wandb: Any = sys.modules.get("wandb")
    if wandb is None or not hasattr(wandb, "init"):
        return
    original = wandb.init

    def init(**chosen: Any) -> Any:
        own = os.environ.get(_WANDB_RUN) or run_id
        return original(**{**chosen, "id": own, "resume": "allow"})

    wandb.init = init
    stack.callback(setattr, wandb, "init", original)


def _continue_mlflow(stack: ExitStack, mlflow: Any, noted: Mapping[str, str]) -> None:
    run_id = noted.get(MLFLOW)
    if run_id is None or os.environ.get(_MLFLOW_RUN):
        return
    try:
        logged = mlflow.get_run(run_id).data.params
    except Exception as error:  # noqa: BLE001 -- whatever its store raises
        log.warning("MLflow run %s cannot be continued (%s): a new one begins", run_id, error)
        return
    os.environ[_MLFLOW_RUN] = run_id  # read, and removed, when the run is started
    stack.callback(os.environ.pop, _MLFLOW_RUN, None)
    original = mlflow.log_params

    def log_new_params(params: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """MLflow refuses another value for a parameter, such as the device of this attempt."""
        new = {name: value for name, value in params.items() if name not in logged}
        return original(new, *args, **kwargs) if new else None

    mlflow.log_params = log_new_params
    stack.callback(setattr, mlflow, "log_params", original)


def _note_mlflow(mlflow: Any, noted: dict[str, str]) -> None:
    try:
        run = mlflow.active_run()
    except Exception as error:  # noqa: BLE001 -- likewise
        log.debug("no MLflow run: %r", error)
        return
    if run is not None:
        noted[MLFLOW] = str(run.info.run_id)


def leaving() -> None:
    """The attempt leaves to come back: let the tracker call it preempted and not failed."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None and hasattr(run, "mark_preempting"):
        try:
            run.mark_preempting()
        except Exception as error:  # noqa: BLE001 -- whatever it raises
            log.debug("W&B was not told: %r", error)
