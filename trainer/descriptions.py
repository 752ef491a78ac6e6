"""What a training says of itself once: its process, model and sizes."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import estimate_tables
from gpuwarden.estimates import Unknown
from gpuwarden.job_files import RunDescription
from gpuwarden.trainer import slopes, status

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
    imgsz = int(max(args.imgsz) if isinstance(args.imgsz, list | tuple) else args.imgsz)
    board.describe(
        RunDescription(
            run_id=run_id,
            **identity,
            model=_model_name(trainer)[:128],
            batch=batch,
            imgsz=imgsz,
            sizes=_sizes(trainer, imgsz),
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
    """What the model is called: `best.pt` says nothing, and what it was made from does.

    A name of the tables is that model's alone: `yolov8n.yaml` with layers of one's own is told
    apart, or it would be measured by what the known one needs.
    """
    name = Path(str(trainer.args.model)).stem
    model = getattr(trainer.model, "module", trainer.model)  # within DistributedDataParallel
    costs = estimate_tables.find_model(name, suggest=False)
    if isinstance(costs, Unknown):
        description = getattr(model, "yaml", None)
        made_from = description.get("yaml_file") if isinstance(description, dict) else None
        base = Path(str(made_from)).stem
        costs = estimate_tables.find_model(base, suggest=False) if made_from else costs
        if isinstance(costs, Unknown):
            return name
        name = base
    body = slopes.body_parameters(model)
    if None in (body, costs.body_parameters) or body == costs.body_parameters:
        return name
    return f"{name}-custom-{_digest(model)}"


def _digest(model: Any) -> str:
    """A few letters that are the same for models of the same layers."""
    layers = [
        (type(layer).__name__, sum(parameter.numel() for parameter in layer.parameters()))
        for layer in list(model.model)[1:-1]
    ]
    return hashlib.sha256(repr(layers).encode()).hexdigest()[:8]


def _sizes(trainer: Any, imgsz: int) -> str:
    """The shortest and the longest side of its images, or nothing where all are squares of `imgsz`.

    What a step takes grows with the square of them: half as large again is more than twice the
    memory, and a strip of 1408 x 192 is a seventh of its square.
    """
    args = trainer.args
    given = getattr(args, "multi_scale", 0.0) or 0.0
    share = 0.5 if given is True else float(given)  # a truth value in older versions
    least, most = imgsz, imgsz
    if share > 0 and getattr(args, "task", "") != "classify":
        least, most = int(imgsz * (1 - share)), int(imgsz * (1 + share))
    if getattr(args, "rect", False):
        dataset = getattr(getattr(trainer, "train_loader", None), "dataset", None)
        shapes = getattr(dataset, "batch_shapes", None)
        if shapes is not None and len(shapes):
            least, most = min(least, int(shapes.min())), max(most, int(shapes.max()))
    return "" if least == most == imgsz else f"{max(least, 1)}-{most}"


def _batches(trainer: Any) -> int | None:
    try:
        return len(trainer.train_loader)
    except (AttributeError, TypeError):  # none yet, or one without an end
        return None
