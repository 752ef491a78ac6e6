"""What the queue shows: entries, receipts, holdings, problems. Pure, but for look-ups of jobs."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from gpuwarden.schedule_api import Cause, EntryState, Outcome, Preemption, QueueEntry, plain_code
from gpuwarden.scheduling.drivers import LOOP
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.local.endings import NOT_STARTED
from gpuwarden.scheduling.predictions import training_of
from gpuwarden.scheduling.slots import SlotUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.job_files import RunStatus
    from gpuwarden.schedule_api import Interval
    from gpuwarden.scheduling.local.card_uses import CardUses
    from gpuwarden.scheduling.local.queues import Attempt, Job, Note, Queue
    from gpuwarden.scheduling.local.scenes import Plan, Wait
    from gpuwarden.scheduling.predictions import Training
    from gpuwarden.scheduling.slots import Slot

LEFT = "/left"
"""Behind the id of a job that has left, and whose cards are still waited for."""


def entries(
    jobs: Sequence[Job],
    attempts: Mapping[int, Attempt],
    notes: Sequence[Note],
    plan: Plan,
    starts: Mapping[str, Interval],
) -> list[QueueEntry]:
    """Every job: those that wait first, in their order.

    Args:
        jobs: to show.
        attempts: job -> the attempt that runs.
        notes: that are open.
        plan: the last one.
        starts: job id -> when it is expected to start.
    """
    place = {entry: number for number, entry in enumerate(plan.order, 1)}
    told = {note.job: note for note in notes}
    shown = sorted(jobs, key=lambda job: (place.get(job.entry, len(place) + 1), job.id))
    return [
        _entry(
            job,
            attempts.get(job.id),
            told.get(job.id),
            wait=plan.waits.get(job.entry),
            position=place.get(job.entry),
            start=starts.get(job.entry),
        )
        for job in shown
    ]


def _entry(
    job: Job,
    attempt: Attempt | None,
    note: Note | None,
    *,
    wait: Wait | None,
    position: int | None,
    start: Interval | None,
) -> QueueEntry:
    task = job.task
    state, why, words = EntryState.PENDING, job.code, job.words
    if job.state == "done":
        state = EntryState.DONE
    elif job.state == "failed":
        state = EntryState.FAILED
    elif attempt is not None:
        leaving = note is not None or attempt.term_at is not None or job.then_what
        state = EntryState.LEAVING if leaving else EntryState.RUNNING
        words = note.words if note is not None else words
        why = note.cause if note is not None else why
    elif wait is not None:
        state = EntryState.HELD if wait.held else EntryState.PENDING
        why = job.code if job.held and job.code else wait.code
        words = wait.words.replace(LEFT, "")
    elif job.held:
        # Held since the last plan was made.
        state, words = EntryState.HELD, job.held
    waiting = state in (EntryState.PENDING, EntryState.HELD)
    return QueueEntry(
        engine="local",
        id=job.entry,
        name=task.name,
        user=job.user,
        state=state,
        gpus=task.gpus,
        submitted=job.submitted,
        run_id=job.run_id,
        team=task.team,
        priority=task.priority,
        gpu_type=task.gpu_type or (attempt.kind if attempt is not None else ""),
        started=None if attempt is None else attempt.created,
        position=position if state is EntryState.PENDING else None,
        why=why,
        words=words,
        must_end=tuple(each.removesuffix(LEFT) for each in wait.must_end)
        if wait and waiting
        else (),
        requeues=job.requeues,
        job_id=job_id(job, attempt),
        start=start if state is EntryState.PENDING else None,
    )


def _entries_of(wait: Wait) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.removesuffix(LEFT) for each in wait.must_end))


def job_id(job: Job, attempt: Attempt | None) -> str | None:
    """The exporter's name of it, where that is sure: its parent is another user's then."""
    if attempt is None or attempt.process is None or attempt.boot is None:
        return None
    if job.uid == os.geteuid():
        return None
    boot = attempt.boot.replace("-", "")[:8]
    return f"proc-{boot}-{attempt.process.pid}-{attempt.process.ticks}"


def preemption(note: Note, run_id: str | None, now: float) -> Preemption:
    """A notice with its receipts, as everybody is shown it."""
    steps = {name: getattr(note, name) for name in note.STEPS}
    outcome = Outcome(note.outcome)
    if note.closed is None:
        late = note.left is None and note.notified is not None and now >= note.deadline
        outcome = Outcome.OVERDUE if late else Outcome.OPEN
    return Preemption(
        id=note.id,
        victim=str(note.job),
        successor=note.successor,
        cause=Cause(note.cause),
        at=note.at,
        deadline=note.deadline,
        run_id=run_id,
        steps={name: time for name, time in steps.items() if time is not None},
        outcome=outcome,
        lost_seconds=note.lost,
        words=note.last or note.words,
    )


def progress(attempt: Attempt, status: RunStatus, now: float) -> dict[str, Any]:
    """Columns of an attempt that its status changes."""
    changes: dict[str, Any] = {}
    if status.step != attempt.step:
        changes["step"] = status.step
    if attempt.began is None and status.phase == "train":
        changes["began"] = min(max(status.phase_since, attempt.created), now)
    if status.epoch != attempt.epoch:
        # Its own clock, within its life: so no epoch is longer than it has run.
        seen = min(max(status.heartbeat, attempt.created), now)
        changes |= {"epoch": status.epoch, "epoch_at": seen}
        if (
            attempt.epoch is not None
            and attempt.epoch_at is not None
            and status.epoch == attempt.epoch + 1
            and seen > attempt.epoch_at
        ):
            changes["epoch_seconds"] = seen - attempt.epoch_at
    point = status.checkpoint
    # A state that an earlier attempt took is where this one began.
    if point is not None and point.durable is not None and point.time != attempt.saved:
        changes |= {"saved": point.time, "saved_step": point.step}
    return changes


def holdings(attempts: Sequence[Attempt], queue: Queue) -> list[Holding]:
    """Attempts as what they held."""
    found = []
    jobs: dict[int, Job | None] = {}
    for attempt in attempts:
        if attempt.job not in jobs:
            jobs[attempt.job] = queue.job(str(attempt.job))
        job = jobs[attempt.job]
        if job is None:
            continue
        found.append(
            Holding(
                engine="local",
                entry=job.entry,
                user=job.user,
                team=job.task.team,
                gpus=attempt.gpus,
                start=attempt.created,
                end=attempt.freed if attempt.state == "freed" else None,
                card=attempt.kind,
                run_id=job.run_id,
                project=job.task.word("project") or "",
            )
        )
    return found


def trainings(queue: Queue, since: float) -> dict[str, Training]:
    """What every job trains, on the kind of cards that it holds, held last or asks for."""
    kinds = {each.job: each.kind for each in queue.attempts_between(since, math.inf)}
    return {
        job.entry: training_of(job.task, card=kinds.get(job.id, job.task.gpu_type or ""))
        for job in queue.jobs(ended_since=since)
    }


def slot_use(slot: Slot, holdings: Sequence[Holding], plan: Plan, now: float) -> SlotUse:
    """What becomes of a slot whose time has come."""
    mine = [
        each
        for each in holdings
        if each.card == slot.card
        and (
            slot.admits(each.team, each.user, each.start)
            or (each.end is None and each.entry in plan.used.get(slot.id, ()))
        )
    ]
    used = sum(
        each.gpus * max(0.0, (now if each.end is None else each.end) - max(each.start, slot.start))
        for each in mine
    )
    first = min((max(each.start, slot.start) for each in mine), default=None)
    return SlotUse(
        slot=slot.id,
        held=plan.kept.get(slot.id, 0) >= slot.gpus,
        gpus=min(slot.gpus, sum(each.gpus for each in mine if each.end is None)),
        first_used=first,
        used_gpu_seconds=min(used, slot.gpus * (now - slot.start)),
    )


def card_problems(uses: CardUses) -> list[tuple[str, str]]:
    """What is wrong with cards."""
    found = [
        ("card_off_limits", f"Card {uuid} is off limits: {why}.")
        for uuid, why in sorted(uses.refused.items())
    ]
    found += [
        ("cards_missing", f"The policy counts {count} more cards of {kind} than this host has.")
        for kind, count in sorted(uses.missing.items())
    ]
    return found


def run_of_others(job: Job) -> tuple[str, str]:
    """What is wrong with a job whose run has the name of somebody else's.

    It has never described itself, or the name were its own: it is ended like any other that does
    not listen, at its deadline.
    """
    words = (
        f"Job {job.entry} of {job.user} goes by the run {job.run_id}, which is another user's: it "
        "cannot be asked to leave, only ended."
    )
    return "run_of_others", words


def queue_problems(
    notes: Sequence[Note], jobs: Sequence[Job], now: float, *, patience: float
) -> list[tuple[str, str]]:
    """What is wrong with jobs."""
    found = []
    for note in notes:
        if note.left is None and note.notified is not None and now >= note.deadline:
            found.append(
                (
                    "victim_overdue",
                    f"Job {note.job} is past its deadline and still there: {note.words}.",
                )
            )
        if note.left is not None and note.freed is None and now >= note.left + patience:
            found.append(
                ("memory_not_back", f"Job {note.job} has left, and its cards' memory is not back.")
            )
    found += [
        ("requeue_loop", f"Job {job.entry} of {job.user} is held: {job.held}")
        for job in jobs
        if job.code == LOOP
    ]
    found += [
        (NOT_STARTED, f"Job {job.entry} of {job.user} is held: {job.held}")
        for job in jobs
        if job.held and plain_code(job.code) == NOT_STARTED
    ]
    return found
