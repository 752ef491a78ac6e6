"""The whitelist: who is protected from which rule, until when, and why. Pure.

It matches what the node sees (cgroup, user, executable, job) and the trainer's run, exactly; never
free argv. A criterion that cannot be checked protects by making the verdict UNKNOWN.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpuwarden.ruleengine.model import WhitelistEntry
    from gpuwarden.ruleengine.verdicts import JobFacts


def protection(
    rule_id: str, job: JobFacts, whitelist: Iterable[WhitelistEntry] | None, *, now: float
) -> tuple[Truth, str]:
    """Whether a job is protected from a rule.

    Args:
        rule_id: the rule.
        job: the job.
        whitelist: all entries, or None if they could not be read: then everything is protected.
        now: Unix time; an entry that has expired protects no more.

    Returns:
        YES and the reason for people; UNKNOWN and why it cannot be told; or NO and nothing.
    """
    if whitelist is None:
        return Truth.YES, "whitelist: it could not be read"
    undecided = ""
    for entry in whitelist:
        if rule_id not in entry.rules or entry.expires.timestamp() <= now:
            continue
        truth = matches(entry, job)
        if truth is Truth.YES:
            until = entry.expires.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%MZ")
            reason = f"{entry.reason} (approved by {entry.approved_by}, until {until})"
            return Truth.YES, f"whitelist: {reason}"
        if truth is Truth.UNKNOWN:
            undecided = f"whitelist: cannot tell whether it is meant by: {entry.reason}"
    return (Truth.UNKNOWN, undecided) if undecided else (Truth.NO, "")


def matches(entry: WhitelistEntry, job: JobFacts) -> Truth:
    """Whether an entry means a job: everything that it names must match."""
    return min(_criteria(entry, job), key=lambda truth: truth.value)


def _criteria(entry: WhitelistEntry, job: JobFacts) -> Iterator[Truth]:
    match = entry.match
    if match.job is not None:
        yield _truth(match.job == job.job_id)
    if match.user is not None:
        yield _truth(match.user == job.user) if job.user else Truth.UNKNOWN
    if match.run is not None:
        yield _run(match.run, job)
    if match.executable is not None:
        wanted = match.executable
        yield _every(_truth(executable == wanted) for executable, _ in job.executables)
    if match.cgroup is not None:
        path = match.cgroup.rstrip("/")
        yield _every(
            _truth(f"{cgroup}/".startswith(f"{path}/")) if cgroup else Truth.UNKNOWN
            for _, cgroup in job.executables
        )


def _run(wanted: str, job: JobFacts) -> Truth:
    run = job.run
    if run is None or wanted not in (run.run_id, *run.claims):
        return Truth.NO
    return Truth.UNKNOWN if run.conflict else Truth.YES


def _every(found: Iterable[Truth]) -> Truth:
    """True of every process that holds a GPU; a job whose processes are not known is undecided."""
    return min(found, key=lambda truth: truth.value, default=Truth.UNKNOWN)


def _truth(value: bool) -> Truth:
    return Truth.YES if value else Truth.NO
