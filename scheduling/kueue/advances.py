"""How a leave goes on: asked, followed, parked, brought back, closed. Pure.

Notified, left and free are three states (kueue #510): a job has left when its pods are gone, not
when its owner says so (kueue #2923), and its memory is free when the node says so.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from gpuwarden.job_files import EXIT_REQUEUE
from gpuwarden.schedule_api import Cause, Outcome
from gpuwarden.scheduling.kueue.leavings import CANNOT, TRYING, Phase
from gpuwarden.scheduling.kueue.views import (
    CLOSE_SECONDS,
    MOST_RETRY_SECONDS,
    PATIENCE_SECONDS,
    STUCK_SECONDS,
    VERIFY_SECONDS,
    Act,
    Ask,
    Close,
    Fault,
    Judge,
    Mend,
    Note,
    Park,
    Return,
    Verdict,
    is_due,
)
from gpuwarden.scheduling.leaves import LeaveState

if TYPE_CHECKING:
    from gpuwarden.scheduling.kueue.leavings import Leaving
    from gpuwarden.scheduling.kueue.views import View
    from gpuwarden.scheduling.kueue.workloads import QueuedJob

SILENT_SECONDS: Final = 900.0
"""Whoever may not be asked now is looked at again after that."""
SLOT_SECONDS: Final = 30.0
"""After a slot's start its quotas are in force."""


def advance(view: View) -> Verdict:
    """The next step of every leave."""
    by_id = {job.id: job for job in view.jobs}
    parts = []
    for job in view.jobs:
        if job.garbled:
            parts.append(_mended(job))
        elif job.leaving is not None:
            leaving = _with_receipt(job.leaving, view)
            step = {Phase.TOLD: _told, Phase.PARKED: _parked, Phase.RETURNED: _returned}
            successor = by_id.get(leaving.successor)
            parts.append(step[leaving.phase](job, leaving, successor, view))
    return Verdict.of(parts)


def _mended(job: QueuedJob) -> Verdict:
    words = f"{job.id} has a note {'and is not active ' if not job.active else ''}that cannot be "
    fault = Fault("garbled_note", job.id, f"{words}read: it is taken away, and the job may run")
    return Verdict((Mend(job),), faults=(fault,))


def _with_receipt(leaving: Leaving, view: View) -> Leaving:
    """With what the engine has seen of it."""
    receipt = view.receipts.get(leaving.id)
    if receipt is None:
        return leaving
    steps = {name: moment for name, moment in receipt.steps.items() if name != "started"}
    # Whether it has left is told by its pods: the engine sees one attempt, and another may follow.
    steps.pop("left", None)
    return leaving.seen(**steps)


# -- told


def _told(job: QueuedJob, leaving: Leaving, _successor: QueuedJob | None, view: View) -> Verdict:
    if job.finished:
        words = "It ended by itself before it had to leave."
        return _close(job, leaving, Outcome.ENDED, words, withdraw=True)
    if job.evicted or not job.active:
        return _left_otherwise(job, leaving, view)
    receipt = view.receipts.get(leaving.id)
    if receipt is not None and receipt.state in (LeaveState.REFUSED, LeaveState.WITHDRAWN):
        words = f"It was not asked to leave: {receipt.why or receipt.state}."
        return _close(job, leaving, Outcome.WITHDRAWN, words, silent_seconds=SILENT_SECONDS)
    unheard = not view.asks or leaving.leave == CANNOT
    if view.asks and not leaving.leave and view.now >= leaving.deadline:
        # Nobody has asked it yet, for we were away: it has its time from now on.
        later = view.now + max(0.0, leaving.deadline - leaving.begun)
        return Verdict((Ask(job, dataclasses.replace(leaving, begun=view.now, deadline=later)),))
    saved = "saved" in leaving.steps or _has_left(job, leaving)
    if saved or unheard or view.now >= leaving.deadline:
        return _due(job, leaving, view)
    acts: list[Act] = []
    if view.asks and leaving.leave in ("", TRYING):
        acts.append(Ask(job, leaving))
    elif leaving != job.leaving:
        acts.append(Note(job, leaving))
    return Verdict(tuple(acts))


def _left_otherwise(job: QueuedJob, leaving: Leaving, view: View) -> Verdict:
    """Somebody else was faster: Kueue itself, or an operator."""
    reason = job.evicted or "Deactivated"
    words = f"It was taken off its cards otherwise ({reason}), before it had left for this."
    if not job.active:
        # Not ours: whoever has held it lets it go again.
        return _close(job, leaving, Outcome.ENDED, words, withdraw=True, counts=True)
    left = view.now if not job.here else None
    changed = dataclasses.replace(leaving.seen(left=left), phase=Phase.RETURNED, words=words)
    return Verdict((Note(job, changed),))


def _has_left(job: QueuedJob, leaving: Leaving) -> bool:
    """Whether its training has ended as one does that was asked to leave.

    Pods of earlier attempts are there as well, for the Job controller keeps them.
    """
    return any(
        pod.exit_code == EXIT_REQUEUE and (pod.ended is None or pod.ended >= leaving.begun)
        for pod in job.pods
    )


def _due(job: QueuedJob, leaving: Leaving, view: View) -> Verdict:
    """It has saved, has left, had its time, or cannot be asked: then its grace is its notice."""
    faults = []
    saved = "saved" in leaving.steps or _has_left(job, leaving)
    if not saved and view.now >= leaving.deadline:
        words = f"{job.id} did not leave by its deadline: it gets the signal that ends it now"
        faults.append(Fault("victim_overdue", job.id, words))
    if leaving.cause is Cause.BUDGET and job.check == "Ready" and leaving.until is not None:
        # The check's own way; whether it has worked is seen below.
        retry = min(MOST_RETRY_SECONDS, max(1, int(leaving.until - view.now)))
        acts: tuple[Act, ...] = (Judge(job, "Retry", leaving.words, retry),)
        return Verdict(acts, faults=tuple(faults))
    waits = job.check == "Retry" and view.now < (job.check_at or view.now) + VERIFY_SECONDS
    if leaving.cause is Cause.BUDGET and waits:
        return Verdict(faults=tuple(faults))
    parked = dataclasses.replace(leaving, phase=Phase.PARKED, parked=view.now)
    return Verdict((Park(job, parked),), faults=tuple(faults))


# -- parked


def _parked(job: QueuedJob, leaving: Leaving, successor: QueuedJob | None, view: View) -> Verdict:
    if job.finished:
        return _ended_while_parked(job, leaving)
    if job.active:
        # Our own change whose answer was lost, or an operator's: either way it may run again.
        changed = dataclasses.replace(leaving, phase=Phase.RETURNED)
        return Verdict((Note(job, changed),))
    if job.here:
        return _still_here(job, leaving, view)
    seen = leaving.seen(left=_moment_left(job, leaving, view))
    back = leaving.until is None or view.now >= leaving.until or not is_due(job, leaving, view)
    left = max(seen.steps.get("left", view.now), _others_left(job, leaving, view))
    # A slot begins, or is gone, whatever happens: before that it would only have to leave again.
    patient = leaving.cause is Cause.BOOKING or view.now < left + PATIENCE_SECONDS
    settled = _settled(seen, successor, view) or not patient
    if back and (settled or leaving.until is not None):
        return Verdict((Return(job, dataclasses.replace(seen, phase=Phase.RETURNED)),))
    return Verdict((Note(job, seen),) if seen != job.leaving else ())


def _ended_while_parked(job: QueuedJob, leaving: Leaving) -> Verdict:
    faults: tuple[Fault, ...] = ()
    if job.finished == "Succeeded" and "saved" not in leaving.steps:
        words = (
            f"{job.id} ended with status 0 after it was told to leave, so it counts as done: if it "
            "was not, its program has to leave with 75 (gpuwarden train does)"
        )
        faults = (Fault("exit_0_after_leave", job.id, words),)
    outcome = Outcome.ENDED if job.finished == "Succeeded" else Outcome.FAILED
    found = _close(job, leaving, outcome, f"It ended ({job.finished}).")
    return Verdict(found.acts, faults=faults)


def _still_here(job: QueuedJob, leaving: Leaving, view: View) -> Verdict:
    faults = []
    lost = sorted({pod.node for pod in job.pods if pod.holds and pod.node_ready is False})
    if lost:
        words = (
            f"node {', '.join(lost)} does not report: whether {job.id} has left it is not known, "
            "and its cards are not counted as free"
        )
        faults.append(Fault("node_unknown", job.id, words))
    elif view.now > leaving.patience(job.grace) + STUCK_SECONDS:
        words = (
            f"a pod of {job.id} is still there {job.grace:.0f} s after its signal and more: look "
            f"with kubectl -n {job.namespace} describe pod; somebody else is asked meanwhile"
        )
        faults.append(Fault("victim_stuck", job.id, words))
    acts = (Note(job, leaving),) if leaving != job.leaving else ()
    return Verdict(acts, faults=tuple(faults))


def _moment_left(job: QueuedJob, leaving: Leaving, view: View) -> float:
    """When its last pod was over, whatever a node's clock says.

    At the latest now, and when its memory was seen free.
    """
    ends = [pod.ended for pod in job.pods if pod.ended is not None]
    latest = min(view.now, leaving.steps.get("freed", view.now))
    return min(latest, max(ends, default=latest))


def _others_left(job: QueuedJob, leaving: Leaving, view: View) -> float:
    """When the last of the others left, or is to have left, that make way for the same one.

    Whoever left first must not go back meanwhile: it would take the card again that it gave up,
    and be asked once more (kueue #13662).
    """
    moments = [0.0]
    for other in view.jobs:
        theirs = other.leaving
        if theirs is None or other.id == job.id or theirs.phase is Phase.RETURNED:
            continue
        if (theirs.cause, theirs.successor) == (leaving.cause, leaving.successor):
            still = min(view.now, theirs.patience(other.grace))
            moments.append(theirs.steps.get("left", still))
    return max(moments)


def _settled(leaving: Leaving, successor: QueuedJob | None, view: View) -> bool:
    """Whether the cards went where they should, or nobody wants them any more."""
    if leaving.cause is Cause.BOOKING:
        slot = next((slot for slot in view.slots if slot.id == leaving.successor), None)
        return slot is None or view.now >= slot.start + SLOT_SECONDS
    if leaving.cause is not Cause.PRIORITY:
        return True
    if successor is None:
        return True
    # Quota is not yet a card: its pod may wait for one that is not free (kueue #510).
    return bool(successor.finished) or not successor.active or successor.running_since is not None


# -- returned to the queue


def _returned(job: QueuedJob, leaving: Leaving, successor: QueuedJob | None, view: View) -> Verdict:
    seen = leaving
    if "left" not in seen.steps and not job.here:
        seen = seen.seen(left=_moment_left(job, seen, view))
    if leaving.cause is Cause.PRIORITY and successor is not None:
        began = successor.running_since
        seen = seen.seen(started=began if began is not None and began >= leaving.begun else None)
    nothing_more = view.now >= max([leaving.begun, *seen.steps.values()]) + CLOSE_SECONDS
    alone = leaving.cause is not Cause.PRIORITY or successor is None or bool(successor.finished)
    done = "left" in seen.steps and ("started" in seen.steps or alone)
    told = "freed" in seen.steps or not leaving.request or nothing_more
    if job.finished or nothing_more or (done and told):
        # Hours and budgets come back every day: only for others a job leaves too often.
        counts = seen.cause in (Cause.PRIORITY, Cause.BOOKING)
        return _close(job, seen, Outcome.DONE, seen.words, counts=counts)
    return Verdict((Note(job, seen),) if seen != job.leaving else ())


def _close(
    job: QueuedJob,
    leaving: Leaving,
    outcome: Outcome,
    words: str,
    *,
    counts: bool = False,
    withdraw: bool = False,
    silent_seconds: float = 0.0,
) -> Verdict:
    ended = dataclasses.replace(leaving, words=words)
    act = Close(
        job,
        ended,
        outcome,
        counts=counts,
        withdraw=withdraw and bool(leaving.request),
        silent_seconds=silent_seconds,
    )
    return Verdict((act,))
