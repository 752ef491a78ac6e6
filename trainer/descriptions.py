"""What a training says of itself once: its process, model and sizes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import estimate_tables
from gpuwarden.estimates import Unknown
from gpuwarden.job_files import RunDescription
from gpuwarden.trainer import status

if TYPE_CHECKING:
    from gpuwarden.trainer.status import StatusBoard

log = logging.getLogger(__name__)


def publish(
    trainer: Any,
    board: StatusBoard,
    *,
    run_id: str,
    folder: Path,
    log_file: Path | None,
    world_size: int,
) -> None:
    """Tell the node what does not change during the attempt.

    Args:
        trainer: constructed.
        board: of the attempt.
        run_id: of the run.
        folder: of its states.
        log_file: whose growth shows life; None: the file behind standard output.
        world_size: number of ranks.
    """
    args = trainer.args
    batch = trainer.batch_size
    if not isinstance(batch, int) or batch < 1:
        return  # chosen during set-up; described then
    output = log_file or status.output_file()
    try:
        identity: dict[str, Any] = status.process_identity()
    except OSError as error:
        log.warning("this training cannot be described to the node: %s", error)
        return
    amp = getattr(trainer, "amp", args.amp)
    board.describe(
        RunDescription(
            run_id=run_id,
            **identity,
            model=_model_name(trainer)[:128],
            batch=batch,
            imgsz=int(max(args.imgsz) if isinstance(args.imgsz, list | tuple) else args.imgsz),
            amp=bool(amp) and amp != "fp32" and trainer.device.type != "cpu",
            epochs=int(trainer.epochs),
            world_size=world_size,
            project=str(args.project or "")[:128],
            log=str(output.absolute()) if output else None,
            checkpoints=str(folder),
            steps_per_epoch=_batches(trainer),
        )
    )


def _model_name(trainer: Any) -> str:
    """What the model is called: `best.pt` says nothing, and what it was made from does."""
    name = Path(str(trainer.args.model)).stem
    if not isinstance(estimate_tables.find_model(name, suggest=False), Unknown):
        return name
    model = getattr(trainer.model, "module", trainer.model)  # within DistributedDataParallel
    description = getattr(model, "yaml", None)
    made_from = description.get("yaml_file") if isinstance(description, dict) else None
    base = Path(str(made_from)).stem
    known = made_from and not isinstance(estimate_tables.find_model(base, suggest=False), Unknown)
    return base if known else name


def _batches(trainer: Any) -> int | None:
    try:
        return len(trainer.train_loader)
    except (AttributeError, TypeError):  # none yet, or one without an end
        return None
