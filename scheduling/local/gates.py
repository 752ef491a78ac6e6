"""What a job waits for that no card would help: a person, another job, an hour, a budget. Pure."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from gpuwarden.scheduling import windows
from gpuwarden.scheduling.local.scenes import Wait
from gpuwarden.scheduling.preemptions import listed

if TYPE_CHECKING:
    from gpuwarden.scheduling.local.scenes import Scene, Waiting
    from gpuwarden.scheduling.policies import Policy


def gate(job: Waiting, scene: Scene, policy: Policy, now: float) -> Wait | None:
    """Why a job may not start whatever is free, or None.

    Args:
        job: that waits.
        scene: for budgets.
        policy: in force.
        now: Unix time.
    """
    return _persons(job) or _names(job, policy) or _times(job, scene, policy, now)


def _persons(job: Waiting) -> Wait | None:
    if job.held:
        return Wait("held", job.held, held=True)
    if job.broken:
        failed = listed(job.broken)
        return Wait(
            "after_failed",
            f"It was to run after {failed}, which failed or was cancelled: release it to run all "
            "the same, or cancel it.",
            held=True,
        )
    if job.unmet:
        return Wait("after", f"It runs after {listed(job.unmet)}.")
    return None


def _names(job: Waiting, policy: Policy) -> Wait | None:
    """A policy that was changed may not know any more what a job was submitted with."""
    team = policy.team(job.team)
    problem = ""
    if team is None:
        problem = f"there is no team {job.team}"
    elif policy.priority(job.priority) is None:
        problem = f"there is no priority {job.priority}"
    elif not team.may_choose(job.priority):
        problem = f"team {job.team} may not choose priority {job.priority}"
    elif job.window is not None and policy.window(job.window) is None:
        problem = f"there is no window {job.window}"
    elif job.kind is not None and policy.card(job.kind) is None:
        problem = f"there is no kind of cards {job.kind}"
    if not problem:
        return None
    return Wait(
        "policy", f"By the policy in force {problem}: cancel and submit it anew.", held=True
    )


def _times(job: Waiting, scene: Scene, policy: Policy, now: float) -> Wait | None:
    if job.not_before is not None and now < job.not_before:
        return Wait(
            "not_before",
            f"It does not start before {_clock(job.not_before, policy)}.",
            again=job.not_before,
        )
    if job.team in scene.spent:
        return Wait("budget", scene.spent[job.team], held=True)
    window = None if job.window is None else policy.window(job.window)
    if window is None or window.is_open(policy.timezone, now):
        return None
    opening = windows.next_opening(window.openings(policy.timezone, now), now)
    return Wait(
        "window",
        f"Window {job.window} is closed"
        + ("." if opening is None else f" until {_clock(opening.begin, policy)}."),
        held=True,
        again=None if opening is None else opening.begin,
    )


def _clock(moment: float, policy: Policy) -> str:
    return f"{dt.datetime.fromtimestamp(moment, policy.zone):%a %Y-%m-%d %H:%M %Z}"
