"""Which run an attempt trains, found and locked before anything is loaded for it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from gpuwarden import job_files
from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import backups, resume, status
from gpuwarden.trainer.runs import RunIsLocked, RunLock, RunRecord

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.trainer.leaving import LeaveWatch
    from gpuwarden.trainer.resume import Plan
    from gpuwarden.trainer.settings import TrainSettings

log = logging.getLogger(__name__)

_CLAIMS = 10
"""So many other attempts may take the folder that this one was about to take."""
_SETTLE_SECONDS = 2.0
"""How long the winner of a race for a folder has to say which run it is."""


@dataclass(frozen=True)
class Beginning:
    """What rank 0 has found out, for the others: the run, or why there is nothing to do."""

    plan: Any = None
    record: Any = None
    ended: tuple[int, str] | None = None

    @classmethod
    def of(cls, plan: Plan, record: RunRecord) -> Self:
        """That of a run: complete runs have nothing left to do."""
        if record.finished is None:
            return cls(plan=plan, record=record)
        reason = f"run {record.run_id} in {plan.save_dir} is already complete"
        log.info("%s; for another, use --resume never or another name", reason)
        return cls(ended=(job_files.EXIT_DONE, reason))


def claim(
    settings: TrainSettings, words: dict[str, Any], *, task: str, watch: LeaveWatch, clock: Clock
) -> tuple[Plan, RunRecord, RunLock]:
    """Choose the run and lock its folder, also against others that choose meanwhile.

    Args:
        settings: the user's choices.
        words: ultralytics' keywords, with the model.
        task: of the model.
        watch: is told where a leave request would be.
        clock: wall.

    Returns:
        The plan, the record of the run, and the lock that is held.

    Raises:
        InvalidInput: the run that is meant was started with other words.
        RunIsLocked: it is being trained by another process.
    """
    fixed = "save_dir" in words or bool(words.get("exist_ok"))
    find = functools.cache(lambda: backups.find(settings))
    for claim in range(_CLAIMS):
        plan = resume.plan(settings, words, task=task, now=clock.wall(), elsewhere=find)
        watch.observe(
            job_files.request_path(settings.jobs_directory, plan.record.run_id),
            answered=set(plan.record.answered),
            since=clock.wall(),
        )
        _refuse_namesake(settings.jobs_directory, plan)
        before = RunRecord.read(plan.folder)
        try:
            plan.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"cannot make {plan.folder} ({error.strerror}): say project=FOLDER for one "
                "that you may write"
            ) from error
        lock = RunLock(plan.folder)
        elsewhere = plan.fresh and not fixed and claim + 1 < _CLAIMS
        try:
            lock.acquire(wait_seconds=_SETTLE_SECONDS if elsewhere else settings.lock_seconds)
        except RunIsLocked:
            if elsewhere:
                continue  # another training, begun in the same moment, has this folder
            raise
        now = RunRecord.read(plan.folder)
        if not plan.fresh:  # the attempt that had the lock may have ended the run
            return plan, resume.continued(now or plan.record, plan.words, settings), lock
        if now == before:
            return plan, plan.record, lock
        lock.release()  # a fresh start must not supersede what was begun since it was planned
    raise RunIsLocked(f"{plan.save_dir}: other trainings kept taking this folder")


def _refuse_namesake(jobs: Path, plan: Plan) -> None:
    """Two trainings of one name would write one status, and a request would reach either.

    Raises:
        RunIsLocked: a process that lives trains a run of this id into another folder.
    """
    run_id = plan.record.run_id
    try:
        content = job_files.read(job_files.description_path(jobs, run_id)).content
        other = job_files.RunDescription.decode(content)
        if other.checkpoints == str(plan.folder) or other.pid == os.getpid():
            return  # one in this folder is waited for, and one in this process is over
        said = job_files.read(job_files.status_path(jobs, run_id)).content
        if job_files.RunStatus.decode(said).exit is not None:
            return  # over, though its process, a notebook's kernel say, lives on
        identity = status.process_identity(other.pid)
    except (OSError, job_files.JobFileError):
        return  # there is none, or no longer
    if all(getattr(other, name) == value for name, value in identity.items()):
        raise RunIsLocked(
            f"run {run_id} is being trained by process {other.pid} into {other.checkpoints}: "
            "wait for its end, or give this one a --run-id of its own"
        )


def resume_choice(settings: TrainSettings, words: dict[str, Any]) -> tuple[TrainSettings, Any]:
    """Whether gpuwarden resumes, and what is left of the word `resume` for ultralytics.

    Args:
        settings: the user's choices.
        words: ultralytics' keywords; `resume` is taken out.
    """
    word = words.pop("resume", None)
    if word == "auto" or (word is True and settings.resume is None):
        settings = dataclasses.replace(settings, resume="auto")
    return settings, (None if word in ("auto", None, False) else word)
