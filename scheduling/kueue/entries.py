"""The queue as people see it: each job, its place, and why it waits, in words. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpuwarden.schedule_api import EntryState, Outcome, QueueEntry
from gpuwarden.scheduling.kueue.choices import waiting
from gpuwarden.scheduling.kueue.leavings import Phase
from gpuwarden.scheduling.kueue.views import Wait, is_leaving

if TYPE_CHECKING:
    from gpuwarden.schedule_api import Preemption
    from gpuwarden.scheduling.kueue.views import Verdict, View
    from gpuwarden.scheduling.kueue.workloads import QueuedJob

DAY_SECONDS: Final = 86_400.0
_WAITS: Final = {
    "WaitingForQuota": "Others use the cards that its team may have.",
    "ExceedsMaxQuota": "It wants more cards than its team may ever have.",
    "NoMatchingFlavor": "No kind of cards of its queue meets what it asks of nodes.",
    "WaitingForPreemptedWorkloads": "Others are leaving for it.",
    "PendingEvaluation": "Kueue has not looked at it yet.",
    "Pending": "Kueue has found no room for it yet.",
    "Misconfigured": "Its queue is not there or not in order: tell an operator.",
    "Inadmissible": "Its queue is not there or not active: tell an operator.",
    "Suspended": "An operator has stopped its queue.",
    "AdmissionGated": "It waits behind a gate.",
    "TopologyPlacementFailed": "No group of nodes has room for it.",
    "WaitingForPodsReady": "Kueue waits for others to start first.",
}
"""Kueue's reasons (v0.19, UnadmittedWorkloadsObservability and before) in words."""

_STOPPED: Final = frozenset({"ClusterQueueStopped", "LocalQueueStopped"})
_GIVEN_UP: Final = {
    "DeactivatedDueToRequeuingLimitExceeded": "Its pods did not become ready as often as Kueue "
    "tries (requeuingStrategy.backoffLimitCount): look into its events, and submit it anew.",
    "DeactivatedDueToAdmissionCheck": "An admission check has refused it for good: see its "
    "Workload's status.",
}
"""Why Kueue itself sets a Workload to inactive."""


def entries_of(view: View, verdict: Verdict) -> tuple[QueueEntry, ...]:
    """Every job, those that wait in their order first."""
    order = waiting(view)
    places: dict[str, int] = {}
    counts: dict[str, int] = {}
    for job in order:
        counts[job.team] = counts.get(job.team, 0) + 1
        places[job.id] = counts[job.team]
    rank = {job.id: index for index, job in enumerate(order)}
    shown = [
        job
        for job in view.jobs
        if not job.finished or view.now - (job.finished_at or 0.0) < DAY_SECONDS
    ]
    shown.sort(key=lambda job: (rank.get(job.id, len(rank)), job.created, job.id))
    return tuple(_entry(job, verdict, places.get(job.id)) for job in shown)


def _entry(job: QueuedJob, verdict: Verdict, position: int | None) -> QueueEntry:
    state = state_of(job)
    wait = _why(job, state, verdict)
    pods = [pod for pod in job.pods if pod.holds]
    return QueueEntry(
        engine="kueue",
        id=job.id,
        name=job.job or job.workload,
        user=job.user,
        state=state,
        gpus=job.gpus,
        submitted=job.created,
        run_id=job.run_id or None,
        team=job.team,
        priority=job.priority,
        gpu_type=job.card or (job.cards[0] if len(job.cards) == 1 else ""),
        started=job.running_since,
        position=position,
        why=wait.code,
        words=wait.words,
        must_end=wait.must_end,
        requeues=job.requeues,
        job_id=f"pod-{pods[0].uid}" if len(pods) == 1 else None,
    )


def state_of(job: QueuedJob) -> EntryState:
    """Where a job stands."""
    if job.finished:
        return EntryState.DONE if job.finished == "Succeeded" else EntryState.FAILED
    if job.here:
        going = is_leaving(job) or bool(job.evicted) or not job.active
        if not going and job.running_since is None:
            return EntryState.PENDING
        return EntryState.LEAVING if going else EntryState.RUNNING
    if not job.active or job.waits or (not job.pending and job.reserved is None):
        return EntryState.HELD
    return EntryState.PENDING


def _why(job: QueuedJob, state: EntryState, verdict: Verdict) -> Wait:
    leaving = job.leaving
    if state is EntryState.LEAVING and leaving is not None:
        return Wait("leaving", leaving.words)
    if state not in (EntryState.PENDING, EntryState.HELD):
        return Wait("", "")
    return verdict.waits.get(job.id) or _plain_wait(job) or _by_kueue(job)


def _plain_wait(job: QueuedJob) -> Wait | None:
    """Why it waits by what the API says of it, or None where Kueue has to say."""
    if not job.active:
        return _out_of_queue(job)
    if job.check in ("Pending", "Retry") and not job.here:
        return Wait("budget_check", "Whether its team's budget has room is being looked at.")
    if job.backs_off:
        return _put_off(job)
    if job.unplaced:
        return Wait("unplaced", f"It has its quota, and no node will have it: {job.unplaced}")
    if job.reserved is not None or job.here:
        return Wait("starting", "It has its cards, and its pods are being started.")
    return None


def _put_off(job: QueuedJob) -> Wait:
    if job.evicted in _STOPPED:
        return Wait("queue_stopped", "An operator has stopped its queue.")
    times = f" ({job.requeues} times until now)" if job.requeues else ""
    return Wait("backs_off", f"Kueue lets it wait before it tries again{times}.")


def _out_of_queue(job: QueuedJob) -> Wait:
    if job.parked and job.leaving is not None:
        return Wait("parked", job.leaving.words)
    if job.expired:
        return Wait("time_limit", "Its time limit is over: submit it anew with a longer --time.")
    if job.evicted in _GIVEN_UP:
        return Wait("given_up", _GIVEN_UP[job.evicted])
    return Wait("inactive", "Somebody has taken it out of the queue (spec.active is false).")


def _by_kueue(job: QueuedJob) -> Wait:
    words = _WAITS.get(job.waits_for, "")
    return Wait(job.waits_for or "pending", words or "Kueue has not said yet why it waits.")


def preemptions_of(view: View, ended: dict[str, Preemption]) -> tuple[Preemption, ...]:
    """Leaves that stand, and those that have ended."""
    found = dict(ended)
    for job in view.jobs:
        if job.leaving is not None and job.leaving.id not in found:
            overdue = job.leaving.phase is not Phase.RETURNED and view.now > job.leaving.deadline
            outcome = Outcome.OVERDUE if overdue and job.here else Outcome.OPEN
            found[job.leaving.id] = job.leaving.told(job.id, job.run_id or None, outcome)
    return tuple(sorted(found.values(), key=lambda each: each.id))
