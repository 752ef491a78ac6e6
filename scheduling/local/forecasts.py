"""When jobs that wait will start at the latest, by playing the plan on. Pure.

Jobs end when they are expected to, those that are asked to leave after an epoch or by their
deadline, and every start is the plan's own. Where nobody knows when somebody ends, nothing is said
of those who wait for them. The earliest moment is now: any job may end at any time.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gpuwarden.schedule_api import Cause, Interval
from gpuwarden.scheduling.local.plans import plan
from gpuwarden.scheduling.local.scenes import Working
from gpuwarden.scheduling.preemption_terms import Told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.scheduling.local.scenes import Notice, Plan, Scene, Waiting
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.preemption_terms import Pool

MAX_JOBS = 50
"""More that wait are not looked at: who is so far behind is told nothing."""
MAX_STEPS = 60


def expected_starts(scene: Scene, policy: Policy, now: float) -> dict[str, Interval]:
    """Job id -> from now to the latest moment at which it should have started.

    Args:
        scene: as it is now.
        policy: in force.
        now: Unix time.
    """
    if not scene.waiting or any(job.ends is None for job in scene.working if not job.final):
        return {}
    decided = plan(scene, policy, now)
    turn = [*(start.id for start in decided.starts), *decided.order]
    place = {name: number for number, name in enumerate(turn)}
    first = sorted(
        scene.waiting, key=lambda job: (place.get(job.id, len(place)), job.submitted, job.id)
    )[:MAX_JOBS]
    working = [dataclasses.replace(job, ends=job.expected_end(now)) for job in scene.working]
    played, moment = dataclasses.replace(scene, waiting=first, working=working), now
    found: dict[str, Interval] = {}
    for _step in range(MAX_STEPS):
        decided = plan(played, policy, moment)
        for start in decided.starts:
            found[start.id] = Interval(now, moment, 0)
        played = _applied(played, decided, moment)
        ends = [job.ends for job in played.working if job.ends is not None]
        times = [time for time in (*ends, decided.again) if time is not None and time > moment]
        if not played.waiting or not times:
            break
        moment = min(times)
        played = _ended(played, moment)
    return found


def _applied(scene: Scene, decided: Plan, moment: float) -> Scene:
    """A scene after a plan was carried out."""
    started = {start.id: start for start in decided.starts}
    notices = {notice.victim: notice for notice in decided.notices}
    free = dict(scene.free)
    working = [
        _asked(job, notices[job.id], moment) if job.id in notices else job for job in scene.working
    ]
    for job in scene.waiting:
        if job.id in started:
            for pool, count in started[job.id].holds.items():
                free[pool] -= count
            working.append(_begun(job, dict(started[job.id].holds), moment))
    waiting = [job for job in scene.waiting if job.id not in started]
    return dataclasses.replace(scene, waiting=waiting, working=working, free=free)


def _begun(job: Waiting, holds: Mapping[Pool, int], moment: float) -> Working:
    return Working(
        id=job.id,
        priority=job.priority,
        team=job.team,
        holds=holds,
        since=moment,
        window=job.window,
        ends=None if job.seconds is None else moment + job.seconds,
        user=job.user,
    )


def _asked(job: Working, notice: Notice, moment: float) -> Working:
    """A job that is asked leaves after an epoch, or by its deadline."""
    leaves = moment + (job.epoch_seconds or notice.deadline - moment)
    ends = min(leaves, notice.deadline, leaves if job.ends is None else job.ends)
    successor = notice.successor if notice.cause in (Cause.PRIORITY, Cause.BOOKING) else None
    return dataclasses.replace(
        job, ends=ends, told=Told(successor, notice.deadline), cause=notice.cause, final=True
    )


def _ended(scene: Scene, moment: float) -> Scene:
    """A scene at a later moment, without those who have ended by then."""
    free = dict(scene.free)
    for job in scene.working:
        if job.ends is not None and job.ends <= moment:
            for pool, count in job.holds.items():
                free[pool] = free.get(pool, 0) + count
    working = [job for job in scene.working if job.ends is None or job.ends > moment]
    left = {job.told.successor for job in scene.working if job.told and job not in working}
    promised = scene.promised | {name for name in left if name is not None}
    return dataclasses.replace(scene, working=working, free=free, promised=promised)
