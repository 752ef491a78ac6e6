"""Jobs that are taken off their cards again and again, and those that only come back. Pure.

Status 75 is no failure to a Job, so no limit of Kubernetes' own ends one that always leaves with
it: it is told of, and held where the policy says how often is too often (kueue #2821, #4406).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpuwarden import durations
from gpuwarden.job_files import EXIT_REQUEUE
from gpuwarden.scheduling.drivers import LOOP
from gpuwarden.scheduling.kueue.holds import Hold
from gpuwarden.scheduling.kueue.views import Fault, HoldBack, Unhold, Verdict, Wait

if TYPE_CHECKING:
    from gpuwarden.scheduling.kueue.views import View
    from gpuwarden.scheduling.kueue.workloads import QueuedJob

LOOP_TIMES: Final = 3
LOOP_SECONDS: Final = 86_400.0
VAIN_TIMES: Final = 3
VAIN_SECONDS: Final = 300.0
"""A training that leaves by itself before that has come back in vain; so often is a loop."""
VAIN_WITHIN: Final = 3600.0


def find_loops(view: View) -> Verdict:
    """Who is ended too often, who comes back in vain, and who is held for it."""
    return Verdict.of([_loop(job, view) for job in view.jobs if not job.finished])


def _loop(job: QueuedJob, view: View) -> Verdict:
    if job.hold is not None:
        return _held(job, job.hold)
    faults = [*_ended_too_often(job, view)]
    requeues = view.policy.kueue.requeues
    within = VAIN_WITHIN if requeues is None else requeues.per
    returns = vain_returns(job, view.now, within)
    too_many = requeues is not None and returns > requeues.times
    # One that leaves, or is out of the queue, is looked at once it is back.
    if job.leaving is not None or not job.active or not (too_many or returns >= VAIN_TIMES):
        return Verdict(faults=tuple(faults))
    about = f"{job.id} left with 75 {_times(returns)} within {durations.render(within)}"
    if not too_many:
        more = "; with kueue.requeues in the policy it would be held" if requeues is None else ""
        words = (
            f"{about} as soon as it began, and Kubernetes starts it again each time: look into its "
            f"log; `kubectl -n {job.namespace} delete job {job.job}` ends it{more}"
        )
        faults.append(Fault(LOOP, job.id, words))
        return Verdict(faults=tuple(faults))
    words = (
        f"{about} as soon as it began: it is held. Look into its log; `gpuwarden queue release "
        f"{job.id}` lets it go on."
    )
    hold = Hold(view.now, LOOP, words)
    faults.append(Fault(LOOP, job.id, words))
    return Verdict((HoldBack(job, hold),), {job.id: Wait(LOOP, words)}, tuple(faults))


def _held(job: QueuedJob, hold: Hold) -> Verdict:
    if job.active:
        # An operator has brought it back by other means: that is a release too.
        return Verdict((Unhold(job),))
    faults = (Fault(LOOP, job.id, hold.words),) if hold.code == LOOP else ()
    return Verdict(waits={job.id: Wait(hold.code or "held", hold.words)}, faults=faults)


def _ended_too_often(job: QueuedJob, view: View) -> list[Fault]:
    """Kueue #2821, #4406, #14543."""
    recent = [moment for moment in job.history if view.now - moment < LOOP_SECONDS]
    if len(recent) >= LOOP_TIMES:
        words = (
            f"{job.id} had to leave {len(recent)} times within a day: it is not asked again as "
            "often as preemption.at_most says; give it a higher priority, or a booking"
        )
        return [Fault("preemption_loop", job.id, words)]
    if job.preempted >= LOOP_TIMES:
        words = (
            f"Kueue itself has ended {job.id} {job.preempted} times for higher priorities, "
            "without a notice: see kueue.own_preemption"
        )
        return [Fault("kueue_preemption_loop", job.id, words)]
    return []


def vain_returns(job: QueuedJob, now: float, within: float) -> int:
    """How often it lately left, by itself, before it can have got anywhere.

    Those that it was asked for are none, nor what was before somebody released it.

    Args:
        job: which.
        now: Unix time.
        within: seconds back.
    """
    since = max(now - within, job.released or 0.0)
    vain = [
        pod.ended
        for pod in job.pods
        if pod.exit_code == EXIT_REQUEUE
        and pod.started is not None
        and pod.ended is not None
        and pod.ended - pod.started < VAIN_SECONDS
        and since < pod.ended
    ]
    asked = [moment for moment in job.history if since < moment]
    return max(0, len(vain) - len(asked))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
