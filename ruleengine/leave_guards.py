"""May a scheduler have this job asked to leave now? Pure, like the guards of ends.

A request to leave ends nothing, and costs the job its place: whatever stops ends stops it as well,
pause and kill switch included, and so does what protects a job from any rule. Its limits are its
own (`leaves` in engine.yaml).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.ruleengine import guards, whitelists
from gpuwarden.ruleengine.guards import DAY_SECONDS, HOUR_SECONDS, Blocked
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.ruleengine.guards import Situation
    from gpuwarden.ruleengine.leave_records import Leave, LeaveOrder
    from gpuwarden.ruleengine.leave_settings import LeaveSettings
    from gpuwarden.ruleengine.model import WhitelistEntry
    from gpuwarden.ruleengine.records import Decision
    from gpuwarden.ruleengine.verdicts import FleetFacts, JobFacts

LIMITS = frozenset({"limit_per_hour", "limit_per_run_per_day", "share_of_running", "deadline"})
"""Reasons that the limits of `leaves` give."""

REFUSALS = LIMITS | frozenset(
    {
        *("closed", "no_agents", "another_engine", "key_reused"),
        *("unknown_job", "other_run", "two_jobs", "no_run"),
        *("facts_incomplete", "stale_facts", "no_facts", "dark_nodes", "dark_node", "clock_skew"),
        *("settling", "late_tick", "agent_unreachable", "agent_key", "platform_unknown"),
        *("kill_switch", "paused", "bad_files", "changing_files"),
        *("protected", "kept", "already_asked", "being_ended"),
    }
)
"""Every reason for which a leave is not taken on."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What already stands about a job and the fleet.

    Attributes:
        leaves: of the last 24 hours, and all without a result.
        earlier: every leave of the attempt.
        decisions: of rules about the attempt.
        kept_until: Unix time to which any keep of the job or its run holds, or None.
        running: jobs that run on nodes that are not dark.
    """

    leaves: Sequence[Leave]
    earlier: Sequence[Leave]
    decisions: Sequence[Decision]
    kept_until: float | None
    running: int


def meant(order: LeaveOrder, facts: FleetFacts) -> JobFacts | Blocked:
    """The job that an order means, by its id, by its run, or by both."""
    if order.job_id:
        job = facts.jobs.get(order.job_id)
        if job is None:
            return Blocked("unknown_job", f"no job {order.job_id} is seen; see GET /v1/jobs")
        claimed = () if job.run is None else (job.run.run_id, *job.run.claims)
        if order.run_id and order.run_id not in claimed:
            return Blocked(
                "other_run", f"{order.job_id} does the run {claimed[0] if claimed else 'of nobody'}"
            )
        return job
    found = [
        job
        for job in facts.jobs.values()
        if job.run is not None and order.run_id in (job.run.run_id, *job.run.claims)
    ]
    if not found:
        return Blocked("unknown_job", f"no job is seen that does the run {order.run_id}")
    if len(found) > 1:
        return Blocked("two_jobs", f"{len(found)} jobs claim the run {order.run_id}")
    return found[0]


def blocks(
    situation: Situation,
    order: LeaveOrder,
    job: JobFacts,
    *,
    settings: LeaveSettings,
    standing: Standing,
    whitelist: Iterable[WhitelistEntry] | None,
) -> list[Blocked]:
    """Every reason not to ask a job to leave now.

    Args:
        situation: of the fleet, on facts gathered for this.
        order: what is asked for.
        job: that is meant, on the same facts.
        settings: the limits.
        standing: what was asked and decided before.
        whitelist: all entries, or None if they could not be read.
    """
    return [
        *guards.doubts(situation),
        *guards.light(job),
        *_protected(job, whitelist, standing, now=situation.now),
        *_already(standing),
        *_limits(situation.now, order, job, settings, standing),
        *guards.changing(situation),
    ]


def _protected(
    job: JobFacts, whitelist: Iterable[WhitelistEntry] | None, standing: Standing, *, now: float
) -> list[Blocked]:
    """An entry protects whatever it names, from a scheduler as from a rule."""
    found = []
    if whitelist is None:
        found.append(Blocked("protected", "whitelist: it could not be read"))
    for entry in whitelist or ():
        if entry.expires.timestamp() <= now:
            continue
        truth = whitelists.matches(entry, job)
        if truth is Truth.NO:
            continue
        may = "" if truth is Truth.YES else "it cannot be told whether it is meant by: "
        found.append(
            Blocked(
                "protected", f"whitelist: {may}{entry.reason} (approved by {entry.approved_by})"
            )
        )
    kept = standing.kept_until
    if kept is not None and kept > now:
        left = durations.render(float(round(kept - now)))
        found.append(Blocked("kept", f"a keep protects the job for another {left}"))
    return found


def _already(standing: Standing) -> list[Blocked]:
    """An attempt is asked once, and never while a rule has decided about it."""
    found = [
        Blocked(
            "already_asked",
            f"{leave.id} of {leave.by} asked this attempt before and is {leave.state}; an attempt "
            "is asked once, and again only after that was taken back",
        )
        for leave in standing.earlier
        if leave.state.stands
    ]
    found += [
        Blocked("being_ended", f"decision {decision.id} of the rule {decision.rule_id} is open")
        for decision in standing.decisions
        if decision.finished_at is None
    ]
    return found


def _limits(
    now: float, order: LeaveOrder, job: JobFacts, settings: LeaveSettings, standing: Standing
) -> list[Blocked]:
    found = []
    if order.deadline > settings.longest:
        text = f"{order.deadline:g} s; leaves.longest is {durations.render(settings.longest)}"
        found.append(Blocked("deadline", text))
    # What was taken back counts too: asking and taking back is no way around a limit.
    hour = sum(1 for leave in standing.leaves if leave.created_at > now - HOUR_SECONDS)
    if hour >= settings.per_hour:
        found.append(
            Blocked(
                "limit_per_hour",
                f"{hour} jobs were asked in the last hour; leaves.per_hour is {settings.per_hour}",
            )
        )
    run = "" if job.run is None else job.run.run_id
    day = sum(
        1
        for leave in standing.leaves
        if leave.run_id == run and leave.created_at > now - DAY_SECONDS
    )
    if day >= settings.per_run_per_day:
        found.append(
            Blocked(
                "limit_per_run_per_day",
                f"the run {run} was asked {day} times in the last 24 hours; "
                f"leaves.per_run_per_day is {settings.per_run_per_day}",
            )
        )
    open_now = sum(1 for leave in standing.leaves if not leave.state.over)
    most = max(1, int(settings.share_of_running * standing.running))
    if open_now >= most:
        found.append(
            Blocked(
                "share_of_running",
                f"{open_now} of {standing.running} running jobs are asked to leave now; "
                f"leaves.share_of_running is {settings.share_of_running:.0%}",
            )
        )
    return found
