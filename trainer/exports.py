"""After the training: its best weights in other formats, by ultralytics' own exporter."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.trainer.leaving import LeaveWatch
    from gpuwarden.trainer.status import StatusBoard

log = logging.getLogger(__name__)


def check(formats: Sequence[str]) -> None:
    """Refuse formats that ultralytics does not know, before anything is trained.

    Raises:
        InvalidInput: naming it and what there is.
    """
    if not formats:
        return
    module: Any = importlib.import_module("ultralytics.engine.exporter")
    known = [name for name in module.export_formats()["Argument"] if name != "-"]
    for name in formats:
        if name not in known:
            raise InvalidInput(f"--export {name!r} is none of {', '.join(known)}")


def run(
    trainer: Any, formats: Sequence[str], *, board: StatusBoard, watch: LeaveWatch
) -> list[str]:
    """Export a trained model, as a phase that a signal may cut short: it is then done again.

    Args:
        trainer: whose training is complete.
        formats: ultralytics' names.
        board: is told the phase.
        watch: of the signals.

    Returns:
        Where the exported models are.

    Raises:
        Leave: a notice to leave stands.
    """
    if not formats:
        return []
    ultralytics: Any = importlib.import_module("ultralytics")
    weights = trainer.best if trainer.best.exists() else trainer.last
    done = []
    with board.during("export"):
        for name in formats:
            with watch.interruptible():
                model = ultralytics.YOLO(str(weights), task=trainer.args.task)
                path = model.export(
                    format=name, imgsz=trainer.args.imgsz, device=trainer.args.device
                )
            log.info("exported %s to %s", name, path)
            done.append(str(path))
            board.beat()
    return done
