"""The policies that are compared, each on the same jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.scheduling import deciders, fleets, workloads
from bench.scheduling.measures import Measures, measure
from bench.scheduling.worlds import Manners, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.scheduling.worlds import Decider


@dataclass(frozen=True, slots=True)
class Arm:
    """One policy.

    Attributes:
        name: in tables and on the command line.
        words: what it is, in a sentence.
        decider: who starts and who leaves.
        manners: how they leave.
    """

    name: str
    words: str
    decider: Callable[[], Decider]
    manners: Manners


def _gpuwarden(**parts: object) -> Callable[[], Decider]:
    return lambda: deciders.Gpuwarden(fleets.policy(**parts))


_AT_ONCE = {
    "minimum_run": "0s",
    "notice": "step",
    "deadline": "20m",
    "back_off": "0s",
    "at_most": {"times": 100, "per": "24h"},
}
_PLAIN = Manners(polite=False, state_seconds=None, knows_bookings=False)
ARMS: Final = (
    Arm(
        "fcfs",
        "first come, first served: nobody is passed, nobody leaves, no bookings",
        deciders.FirstCome,
        _PLAIN,
    ),
    Arm(
        "kill",
        "priority without notice: the lowest and youngest are killed and queued again; a state at "
        "the end of each epoch, as ultralytics saves it; no quotas, windows or bookings",
        lambda: deciders.Killing(fleets.policy()),
        _PLAIN,
    ),
    Arm(
        "gpuwarden",
        "the shipped planner: notice at the epoch, quotas, windows, bookings, backfill by "
        "predictions",
        _gpuwarden(),
        Manners(),
    ),
    Arm(
        "no promises",
        "the same without windows and bookings, which the two policies above do not keep either",
        _gpuwarden(),
        Manners(knows_bookings=False, knows_windows=False),
    ),
    Arm(
        "no preemption",
        "the same, and nobody is asked to leave",
        _gpuwarden(preemption=None),
        Manners(),
    ),
    Arm(
        "no notice",
        "the same choice of victims, who are killed at once; states every 5 minutes",
        _gpuwarden(),
        Manners(polite=False),
    ),
    Arm(
        "at once",
        "notice at the next step; no minimum run, no back-off, no limit",
        _gpuwarden(preemption=_AT_ONCE),
        Manners(),
    ),
    Arm(
        "no predictions",
        "nobody knows how long jobs take: no backfill in front of a large job or a booking",
        lambda: deciders.Gpuwarden(fleets.policy(), predicts=False),
        Manners(),
    ),
)


def run(name: str, seed: int, *, days: float, load: float) -> tuple[World, Measures]:
    """One month under one policy.

    Args:
        name: of the arm.
        seed: of its jobs.
        days: that it lasts.
        load: GPU time that jobs need, against what there is.
    """
    arm = next(each for each in ARMS if each.name == name)
    slots = fleets.bookings(days)
    world = World(
        arm.decider(),
        arm.manners,
        fleets.pools(),
        slots,
        fleets.BEGIN,
        fleets.BEGIN + days * fleets.DAY,
    )
    begun = time.process_time()
    jobs = workloads.jobs(seed, days=days, load=load, slots=slots)
    world.run(jobs)
    return world, measure(world, fleets.policy(), time.process_time() - begun)
