"""What became of an attempt, as a file for whoever started it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.trainer.status import finite_numbers

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.trainer.sessions import Session

log = logging.getLogger(__name__)

VERSION = 1


def write(path: Path | None, session: Session, *, code: int, reason: str) -> None:
    """Write it; that it cannot be written is said and changes nothing.

    Args:
        path: of the file, which is replaced; None: nobody asks. Of several ranks the first writes.
        session: the attempt, which may not have begun.
        code: its exit status.
        reason: of it.
    """
    if path is None or not session.team.place.leads:
        return
    document = {"version": VERSION, "code": code, "reason": reason[:1000], **_left_by(session)}
    try:
        job_files.write(path, json.dumps(document, indent=1).encode())
    except (OSError, job_files.JobFileError) as error:
        log.warning("cannot write %s: %s", path, error)


def _left_by(session: Session) -> dict[str, Any]:
    plan, trainer = getattr(session, "plan", None), session.trainer
    if plan is None:
        return {}
    weights = plan.save_dir / "weights"
    best, last = weights / "best.pt", weights / "last.pt"
    metrics = getattr(trainer, "metrics", None)
    return {
        "run_id": session.record.run_id,
        "save_dir": str(plan.save_dir),
        "best": str(best) if best.is_file() else None,
        "last": str(last) if last.is_file() else None,
        "metrics": finite_numbers(metrics) if isinstance(metrics, dict) else None,
    }
