"""Policies that are compared: the product's own planner, and two that people run without it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.local import plans
from gpuwarden.scheduling.local.scenes import Notice, Plan, Start

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.scheduling.local.scenes import Scene, Waiting, Working
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.preemption_terms import Pool


@dataclass(frozen=True, slots=True)
class Gpuwarden:
    """The product's planner under a policy.

    Attributes:
        policy: in force.
        predicts: whether it is told how long jobs are expected to take.
    """

    policy: Policy
    predicts: bool = True

    def decide(self, scene: Scene, now: float) -> Plan:
        """As the local engine does at every tick."""
        if not self.predicts:
            scene = dataclasses.replace(
                scene,
                waiting=[dataclasses.replace(job, seconds=None) for job in scene.waiting],
                working=[dataclasses.replace(job, ends=None) for job in scene.working],
            )
        return plans.plan(scene, self.policy, now, explain=False)


@dataclass(frozen=True, slots=True)
class FirstCome:
    """First come, first served: what cannot start holds up everybody behind it."""

    def decide(self, scene: Scene, _now: float) -> Plan:
        """Start from the head of the queue while there is room."""
        free, starts = dict(scene.free), []
        for job in sorted(scene.waiting, key=lambda each: (each.submitted, each.id)):
            pool = _place(free, job.gpus)
            if pool is None:
                break
            free[pool] -= job.gpus
            starts.append(Start(job.id, {pool: job.gpus}))
        return Plan(starts=tuple(starts))


@dataclass(frozen=True, slots=True)
class Killing:
    """Priorities without notice: the lowest and youngest are killed, whatever that costs.

    What cannot start is passed by whoever fits. This is what an engine does by itself whose
    preemption is set to requeue, without grace and without a look at the work.

    Attributes:
        policy: whose priorities count.
    """

    policy: Policy

    def decide(self, scene: Scene, now: float) -> Plan:
        """Start by priority; kill for who has no room."""
        free, starts, notices = dict(scene.free), [], []
        victims = sorted(
            (job for job in scene.working), key=lambda job: (self._value(job), -job.since, job.id)
        )
        promised: set[str] = set()
        for job in sorted(
            scene.waiting, key=lambda each: (-self._value(each), each.submitted, each.id)
        ):
            pool = _place(free, job.gpus)
            if pool is not None:
                free[pool] -= job.gpus
                starts.append(Start(job.id, {pool: job.gpus}))
                continue
            for victim in self._killed(job, victims, free, promised):
                promised.add(victim.id)
                notices.append(Notice(victim.id, Cause.PRIORITY, job.id, "step", now, "killed"))
            if notices:
                break  # the cards are given away in the next round, from the head again
        return Plan(starts=tuple(starts), notices=tuple(notices))

    def _value(self, job: Waiting | Working) -> int:
        known = self.policy.priority(job.priority)
        return 0 if known is None else known.value

    def _killed(
        self,
        job: Waiting,
        victims: list[Working],
        free: Mapping[Pool, int],
        promised: set[str],
    ) -> list[Working]:
        """Who is killed in one host so that a job fits; nobody if it would not."""
        best: list[Working] = []
        for pool in sorted(free):
            room = free[pool]
            found: list[Working] = []
            for victim in victims:
                if room >= job.gpus:
                    break
                lower = self.policy.preempts(job.priority, victim.priority)
                if lower and pool in victim.holds and victim.id not in promised:
                    room += victim.holds[pool]
                    found.append(victim)
            if room >= job.gpus and (not best or self._rank(found) < self._rank(best)):
                best = found
        return best

    def _rank(self, jobs: list[Working]) -> tuple[float, ...]:
        """Lowest and fewest first, then the youngest."""
        youngest = min(job.since for job in jobs)
        return (max(self._value(job) for job in jobs), float(len(jobs)), -youngest)


def _place(free: Mapping[Pool, int], gpus: int) -> Pool | None:
    """The fullest host that has so many cards, or None."""
    fitting = [(count, pool) for pool, count in free.items() if count >= gpus]
    return min(fitting)[1] if fitting else None
