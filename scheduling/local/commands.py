"""What people may ask of the queue: take a job, cancel, hold and release one.

Who may command which job was checked by the caller; what makes no sense here is refused with words.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction
from gpuwarden.schedule_api import CANCELLED
from gpuwarden.scheduling.local.launches import LaunchFailed, User, log_path
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gpuwarden.scheduling.local.queues import Attempt, Job, Queue
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot

MAX_JOBS = 1000
"""Jobs of one user that may wait or run at once."""


class Commands:
    """Changes to the queue that somebody asked for.

    Args:
        queue: to change.
        wake: asks for a tick.
    """

    def __init__(self, queue: Queue, wake: Callable[[], None]) -> None:
        self._queue, self._wake = queue, wake

    def submit(
        self,
        task: object,
        policy: Policy,
        *,
        uid: int,
        gid: int,
        token: str,
        now: float,
        slots: Sequence[Slot] = (),
    ) -> str:
        """Take a job on; it is on disk when this returns its id.

        Args:
            task: a `Task`.
            policy: in force.
            uid: of who asks.
            gid: likewise.
            token: of the submission: the same one again gives the same job; empty for none.
            now: Unix time.
            slots: that are booked: no quota binds in them.

        Raises:
            RefusedAction: with what to change.
        """
        if not isinstance(task, Task):
            raise RefusedAction("no_task", "this is no task")
        # A token is its user's: said by another it is another submission.
        token = f"{uid}:{token}" if token else ""
        if token and (known := self._queue.by_token(token)) is not None:
            return known
        try:
            user = User.of(uid)
        except LaunchFailed as error:
            raise RefusedAction("no_user", str(error)) from error
        if os.geteuid() not in (0, uid):
            raise RefusedAction(
                "other_user",
                f"this daemon runs as user {os.geteuid()} and can start jobs of that user alone: "
                "run it as root for everybody's",
            )
        task = dataclasses.replace(task, user=user.name)
        for reason, words in _refusals(task, policy, [each for each in slots if each.end > now]):
            raise RefusedAction(reason, words)
        known_jobs = self._queue.states_of(task.after)
        for entry in task.after:
            if entry not in known_jobs:
                raise RefusedAction("no_job", f"--after {entry}: there is no such job here")
        waiting = [
            job for job in self._queue.jobs(ended_since=now) if job.uid == uid and job.ended is None
        ]
        if len(waiting) >= MAX_JOBS:
            raise RefusedAction(
                "too_many", f"{len(waiting)} jobs of yours wait or run: {MAX_JOBS} at most"
            )
        entry = self._queue.add(task, user=user.name, uid=uid, gid=gid, token=token, now=now)
        self._wake()
        return entry

    def cancel(self, entry: str, *, by: str, now: float) -> Attempt | None:
        """Take a job out of the queue; returns the attempt that is to be ended, if it runs."""
        job = self._known(entry)
        if job.state in ("done", "failed"):
            raise RefusedAction("over", f"job {entry} is over already")
        words = f"{by} cancelled it."
        if job.state == "waiting":
            self._queue.change_job(
                job.id, state="failed", code=CANCELLED, words=words, held="", ended=now
            )
            self._wake()
            return None
        self._queue.change_job(job.id, then_what="cancel", words=words)
        self._wake()
        return self._running(job)

    def hold(self, entry: str, *, by: str, now: float) -> Attempt | None:
        """Have a job wait; returns the attempt that is to leave first, if it runs."""
        del now
        job = self._known(entry)
        if job.state in ("done", "failed") or job.then_what == "cancel":
            raise RefusedAction("over", f"job {entry} is over, or about to be")
        words = f"{by} holds it: gpuwarden queue release {entry} lets it go on."
        if job.state == "waiting":
            self._queue.change_job(job.id, held=words)
            return None
        self._queue.change_job(job.id, then_what="hold", words=words)
        self._wake()
        return self._running(job)

    def release(self, entry: str, *, by: str, now: float) -> Job:
        """Let a held job go on waiting; also one that waits for a job that has failed."""
        del by, now
        job = self._known(entry)
        failed = [
            each
            for each, state in self._queue.states_of(job.task.after).items()
            if state == "failed"
        ]
        if not (job.held or failed or job.then_what == "hold"):
            raise RefusedAction("not_held", f"job {entry} is not held")
        after = tuple(each for each in job.task.after if each not in failed)
        task = dataclasses.replace(job.task, after=after)
        self._queue.change_job(
            job.id,
            held="",
            code="",
            words="",
            barren=0,
            failures=0,
            then_what="",
            task=json.dumps(task.as_document()),
        )
        self._wake()
        return job

    def log_path(self, entry: str) -> Path:
        """Where a job's output goes."""
        return log_path(self._known(entry).task, entry)

    def _known(self, entry: str) -> Job:
        job = self._queue.job(entry)
        if job is None:
            raise RefusedAction(
                "no_job", f"there is no job {entry} here: gpuwarden queue lists them"
            )
        return job

    def _running(self, job: Job) -> Attempt | None:
        attempts = self._queue.attempts("running")
        return next((each for each in attempts if each.job == job.id), None)


def _refusals(task: Task, policy: Policy, slots: Sequence[Slot]) -> list[tuple[str, str]]:
    """Why a task is not taken on; whether its user is of the team was checked by the caller."""
    team, found = policy.team(task.team), []
    if team is None:
        found.append(("no_team", f"there is no team {task.team} in the policy"))
    elif not team.may_choose(task.priority):
        found.append(("priority", f"team {team.name} may not choose priority {task.priority}"))
    if policy.priority(task.priority) is None:
        names = ", ".join(each.name for each in policy.priorities)
        found.append(("no_priority", f"there is no priority {task.priority}: {names} are"))
    if task.gpu_type is not None and policy.card(task.gpu_type) is None:
        names = ", ".join(each.name for each in policy.cards)
        found.append(("no_card", f"there are no cards {task.gpu_type}: {names} are"))
    if task.window is not None and policy.window(task.window) is None:
        found.append(("no_window", f"there is no window {task.window} in the policy"))
    if task.image is not None:
        found.append(("image", "this engine starts no containers: leave --image out"))
    if not found and team is not None:
        found += _too_large(task, policy, slots)
    return found


def _too_large(task: Task, policy: Policy, slots: Sequence[Slot]) -> list[tuple[str, str]]:
    team = policy.team(task.team)
    kinds = [card for card in policy.cards if task.gpu_type in (None, card.name)]
    most = 0
    for card in kinds:
        booked = [each.gpus for each in slots if (each.team, each.card) == (task.team, card.name)]
        by_quota = 0 if team is None else team.most(card.name)
        most = max(most, min(card.count, max(by_quota, *booked, 0)))
    if task.gpus > most:
        return [("too_large", f"team {task.team} may use {most} cards of a kind at most")]
    fitting = [
        card for card in kinds if task.memory_bytes is None or card.memory >= task.memory_bytes
    ]
    if not fitting:
        largest = max(card.memory for card in kinds) / 1024**3
        return [("memory", f"it needs more memory than a card has: {largest:.0f} GiB at most")]
    return []
