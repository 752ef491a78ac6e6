"""Hours, budgets and jobs that must come first: what opens, what waits, what has to leave. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from gpuwarden import durations
from gpuwarden.budget_terms import GPU_HOURS, quantity
from gpuwarden.periods import period_of
from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.booking_terms import prices_of
from gpuwarden.scheduling.drivers import LEAK
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.leavings import Phase
from gpuwarden.scheduling.kueue.loops import find_loops
from gpuwarden.scheduling.kueue.renderings import falls_back
from gpuwarden.scheduling.kueue.silences import not_asked, unasked
from gpuwarden.scheduling.kueue.views import (
    LEAK_SECONDS,
    MOST_RETRY_SECONDS,
    VERIFY_SECONDS,
    Act,
    Fault,
    Judge,
    Open,
    Park,
    Spent,
    Tell,
    Verdict,
    Wait,
    leaving_of,
)
from gpuwarden.scheduling.usages import account
from gpuwarden.scheduling.windows import next_opening

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.budget_terms import ScheduledBudget
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.kueue.leavings import Leaving
    from gpuwarden.scheduling.kueue.views import View
    from gpuwarden.scheduling.kueue.workloads import QueuedJob
    from gpuwarden.scheduling.policies import Policy, Window

_UNKNOWN_DEADLINE: Final = 600.0


def limit_all(view: View) -> Verdict:
    """Everything that time, money and other jobs decide."""
    return Verdict.of([_hours(view), _order(view), _budgets(view), find_loops(view), _leaks(view)])


# -- hours


def _hours(view: View) -> Verdict:
    parts = []
    for job in view.jobs:
        window = view.policy.window(job.window) if job.window else None
        if not job.finished and (window is not None or job.window or job.not_before):
            parts.append(_hour(job, window, view))
    return Verdict.of(parts)


def _hour(job: QueuedJob, window: Window | None, view: View) -> Verdict:
    zone, now = view.policy.timezone, view.now
    if job.window and window is None:
        words = f"It waits for the window {job.window}, which the policy no longer has."
        return Verdict(waits={job.id: Wait("no_window", words)})
    is_open = window is None or window.is_open(zone, now)
    early = job.not_before is not None and now < job.not_before
    gated = names.WINDOW_GATE in (*job.gates, *job.waits)
    if is_open and not early:
        return Verdict((Open(job, (names.WINDOW_GATE,)),) if gated else ())
    opens = _opens(job, window, view)
    waits = {job.id: Wait("window", f"It may start in {durations.render(max(1.0, opens - now))}.")}
    if gated or window is None or is_open:
        return Verdict(waits=waits if gated else {})
    return _outside(job, window, view, opens=opens, waits=waits)


def _outside(
    job: QueuedJob, window: Window, view: View, *, opens: float, waits: dict[str, Wait]
) -> Verdict:
    """A job whose window has closed behind it."""
    if job.leaving is not None and job.leaving.phase is not Phase.RETURNED:
        return Verdict(waits=waits if job.leaving.phase is Phase.PARKED else {})
    words = f"The window {window.name} has closed; it goes on when it opens again."
    leave = _leave(job, view, Cause.WINDOW, window.name, words=words, until=opens)
    if job.counts or job.here:
        return _told(job, leave, view) if window.running == "leave" else Verdict()
    if job.active:
        # It came back by an eviction, and its gate is gone for good: it is kept out otherwise.
        return Verdict(
            (Park(job, dataclasses.replace(leave, phase=Phase.PARKED, parked=view.now)),), waits
        )
    return Verdict(waits=waits)


def _opens(job: QueuedJob, window: Window | None, view: View) -> float:
    moment = max(view.now, job.not_before or 0.0)
    if window is None:
        return moment
    spans = window.openings(view.policy.timezone, moment)
    span = next((each for each in spans if each.begin <= moment < each.end), None)
    coming = span if span is not None else next_opening(spans, moment)
    return moment if coming is None else max(moment, coming.begin)


# -- jobs that must come first


def _order(view: View) -> Verdict:
    by_id = {job.id: job for job in view.jobs}
    acts: list[Act] = []
    waits: dict[str, Wait] = {}
    for job in view.jobs:
        if names.AFTER_GATE not in (*job.gates, *job.waits):
            continue
        before = {name: by_id.get(name) for name in job.after}
        failed = [
            name for name, each in before.items() if each and each.finished not in ("", "Succeeded")
        ]
        missing = [name for name, each in before.items() if each is None]
        if failed:
            words = f"{', '.join(failed)} has failed, and this was to run after it: submit it anew."
            waits[job.id] = Wait("broken_dependency", words)
        elif missing:
            words = f"{', '.join(missing)} is not there (any more), and this was to run after it."
            waits[job.id] = Wait("unknown_dependency", words)
        elif all(each is not None and each.finished for each in before.values()):
            acts.append(Open(job, (names.AFTER_GATE,)))
        else:
            left = [name for name, each in before.items() if each is not None and not each.finished]
            waits[job.id] = Wait("dependency", f"It runs after {', '.join(left)}.", tuple(left))
    return Verdict(tuple(acts), waits)


# -- budgets


def spent_of(policy: Policy, holdings: Sequence[Holding], now: float) -> dict[str, Spent]:
    """Teams whose hard budgets have nothing left.

    Args:
        policy: its budgets.
        holdings: every attempt of the periods that contain `now`.
        now: Unix time.
    """
    found: dict[str, Spent] = {}
    for budget in policy.budgets:
        if budget.kind != "hard":
            continue
        used = used_of(policy, budget, holdings, now)
        if used is None or used < budget.limit.amount:
            continue
        until = period_of(budget.per, policy.timezone, now).end
        words = (
            f"Team {budget.team} has used {quantity(used, budget.unit)} of its "
            f"{quantity(budget.limit.amount, budget.unit)} per {budget.per}."
        )
        spent = Spent(words, until, budget.running == "leave")
        before = found.get(budget.team)
        # The longest wait counts, and one budget that lets nobody go on is enough.
        if before is not None:
            later = max(before, spent, key=lambda each: each.until)
            spent = Spent(later.words, later.until, before.leave or spent.leave)
        found[budget.team] = spent
    return found


def used_of(
    policy: Policy, budget: ScheduledBudget, holdings: Sequence[Holding], now: float
) -> float | None:
    """What of a budget is used in its current period; None where prices lack."""
    span = period_of(budget.per, policy.timezone, now)
    prices = prices_of(policy)
    found = account(holdings, span, "team", now=now, prices=prices)
    line = next((each for each in found.lines if each.name == budget.team), None)
    if budget.unit == GPU_HOURS:
        return 0.0 if line is None else line.gpu_seconds / 3600.0
    if not any(currency == budget.unit for _price, currency in prices.values()):
        return None
    return 0.0 if line is None else line.cost.get(budget.unit, 0.0)


def _budgets(view: View) -> Verdict:
    acts: list[Act] = []
    waits: dict[str, Wait] = {}
    faults: list[Fault] = []
    for job in view.jobs:
        spent = view.spent.get(job.team)
        if job.finished:
            continue
        if spent is not None and job.reserved is None and not job.here:
            later = durations.render(max(1.0, spent.until - view.now))
            waits[job.id] = Wait("budget", f"{spent.words} It may start in {later}.")
        if job.check == "Pending" and job.reserved is not None and not job.evicted:
            acts.append(_judged(job, spent, view))
        elif job.check == "Retry" and _is_kept(job, view):
            words = (
                f"Kueue kept the quota of {job.id} after the budget's check had said Retry (kueue "
                "#6035): it is taken out of the queue until the budget has room"
            )
            faults.append(Fault("retry_kept_quota", job.id, words))
            until = spent.until if spent is not None else view.now
            said = spent.words if spent is not None else "The budget has room again."
            leave = _leave(job, view, Cause.BUDGET, _budget(job), words=said, until=until)
            acts.append(Park(job, dataclasses.replace(leave, phase=Phase.PARKED, parked=view.now)))
        elif (
            spent is not None
            and spent.leave
            and job.counts
            and job.leaving is None
            and job.check != "Retry"
        ):
            told = _leave(
                job, view, Cause.BUDGET, _budget(job), words=spent.words, until=spent.until
            )
            found = _told(job, told, view)
            acts += found.acts
            faults += found.faults
    return Verdict(tuple(acts), waits, tuple(faults))


def _budget(job: QueuedJob) -> str:
    return f"budget of {job.team}"


def _told(job: QueuedJob, leave: Leaving, view: View) -> Verdict:
    """Have a job asked; one that the engine did not ask just now stays for a while.

    Nobody else could leave in its place. Only where Kueue may end jobs without a notice, and only
    one that cannot be asked rather than may not, gets the signal then.
    """
    silence = view.silence(job)
    if silence is None:
        return Verdict((Tell(job, leave),))
    if falls_back(view.policy) and not silence.protected:
        return Verdict((Tell(job, unasked(leave, silence)),))
    return Verdict(faults=(not_asked(job, leave.successor, silence),))


def _judged(job: QueuedJob, spent: Spent | None, view: View) -> Judge:
    if spent is None:
        return Judge(job, "Ready", "The team's budgets have room.")
    seconds = min(MOST_RETRY_SECONDS, max(1, int(spent.until - view.now)))
    return Judge(job, "Retry", spent.words, seconds)


def _is_kept(job: QueuedJob, view: View) -> bool:
    """Whether a reservation has outlived a Retry, of a job that is not being parked already."""
    since = job.check_at if job.check_at is not None else view.now
    return (
        job.reserved is not None
        and job.active
        and job.leaving is None
        and view.now >= since + VERIFY_SECONDS
    )


def _leave(
    job: QueuedJob,
    view: View,
    cause: Cause,
    successor: str,
    *,
    words: str,
    until: float,
) -> Leaving:
    terms = view.policy.preemption
    return leaving_of(
        job,
        view,
        cause=cause,
        successor=successor,
        at=terms.notice if terms is not None else "epoch",
        deadline=view.now + (terms.deadline if terms is not None else _UNKNOWN_DEADLINE),
        words=words,
        until=until,
    )


# -- what goes wrong


def _leaks(view: View) -> Verdict:
    """Quota that is held and nothing runs on (kueue #14811, #7480)."""
    faults = []
    for job in view.jobs:
        age = leak_seconds(job, view.now)
        if age is not None and age >= LEAK_SECONDS:
            words = (
                f"{job.gpus} cards are counted for {job.id}, and nothing of it has run for "
                f"{durations.render(float(int(age)))}: look with kubectl -n {job.namespace} "
                f"describe workload {job.workload}"
            )
            faults.append(Fault(LEAK, job.id, words))
    return Verdict(faults=tuple(faults))


def leak_seconds(job: QueuedJob, now: float) -> float | None:
    """For how long quota is reserved for a job that has no pod; None where it is not."""
    if job.reserved is None or job.here or job.check in ("Pending", "Retry"):
        return None
    since = max(job.reserved, job.finished_at or 0.0, job.evicted_at or 0.0, job.admitted or 0.0)
    return max(0.0, now - since)
