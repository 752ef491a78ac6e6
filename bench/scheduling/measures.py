"""What a simulated month was like: for people who wait, for the cards, and between teams."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from bench.scheduling.fleets import CARDS, HOUR

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.scheduling.worlds import Life, World
    from gpuwarden.scheduling.policies import Policy

SHORT: Final = 600.0
"""Shorter jobs count as so long in the slowdown: else a minute's wait outweighs a day's."""
ON_TIME: Final = 300.0
"""A booking's job that runs so soon after its slot opened, or was submitted, is on time."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Of some jobs, in seconds until their first start; what never started waited to the end."""

    jobs: int
    mean: float
    half: float
    most: float

    @classmethod
    def of(cls, lives: Iterable[Life], end: float) -> Waits:
        """Mean, median and 95th percentile."""
        found = sorted(
            (life.first_start if life.first_start is not None else end) - life.job.submitted
            for life in lives
        )
        if not found:
            return cls(0, math.nan, math.nan, math.nan)
        return cls(len(found), sum(found) / len(found), quantile(found, 0.5), quantile(found, 0.95))


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one month under one policy.

    Attributes:
        waits: group of jobs -> their waits; `high`, `normal`, `low` without those of a window,
            `off-peak`, `booked`, `1 card`, `2-4 cards`, `8 cards`, `all`.
        useful, lost, overhead, idle: shares of all card-hours.
        lost_hours: card-hours of training that was done and had to be done again.
        left: how often jobs had to leave, for each job.
        most_left: how often the unluckiest had to.
        slowdown: mean, bounded: from submission to the end against the work alone.
        turnaround: median, of finished jobs, in seconds.
        finished: jobs.
        fairness: Jain's index of what teams got while they waited, against their shares; 1 is fair.
        on_time: share of bookings' jobs that ran within `ON_TIME`.
        seconds: that the simulation took.
    """

    waits: Mapping[str, Waits]
    useful: float
    lost: float
    overhead: float
    idle: float
    lost_hours: float
    left: float
    most_left: int
    slowdown: float
    turnaround: float
    finished: int
    fairness: float
    on_time: float
    seconds: float

    @classmethod
    def read(cls, text: str) -> Self:
        """From JSON of its fields."""
        document = json.loads(text)
        waits = {name: Waits(**fields) for name, fields in document.pop("waits").items()}
        return cls(waits=waits, **document)


def measure(world: World, policy: Policy, seconds: float) -> Measures:
    """Look back at a world that has run.

    Args:
        world: after its `run`.
        policy: whose shares count for fairness.
        seconds: that it took.
    """
    lives = list(world.lives.values())
    books, done = world.accounts, [life for life in lives if life.finished is not None]
    took = sorted((life.finished or 0.0) - life.job.submitted for life in done)
    return Measures(
        waits={name: Waits.of(group, world.end) for name, group in _groups(lives).items()},
        useful=books.useful / books.total,
        lost=books.lost / books.total,
        overhead=books.overhead / books.total,
        idle=books.idle / books.total,
        lost_hours=books.lost / HOUR,
        left=sum(len(life.left) for life in lives) / len(lives),
        most_left=max(len(life.left) for life in lives),
        slowdown=sum(
            max(1.0, ((life.finished or 0.0) - life.job.submitted) / max(life.job.work, SHORT))
            for life in done
        )
        / max(1, len(done)),
        turnaround=quantile(took, 0.5) if took else math.nan,
        finished=len(done),
        fairness=_fairness(world, policy),
        on_time=_on_time(world),
        seconds=seconds,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of them lies, of values in order."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 where all are equal, 1/n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else math.nan


def _groups(lives: Sequence[Life]) -> dict[str, list[Life]]:
    plain = [life for life in lives if not life.job.slot]
    anytime = [life for life in plain if life.job.window is None]
    by_priority = {
        name: [life for life in anytime if life.job.priority == name]
        for name in ("high", "normal", "low")
    }
    return {
        **by_priority,
        "off-peak": [life for life in plain if life.job.window is not None],
        "booked": [life for life in lives if life.job.slot],
        "1 card": [life for life in anytime if life.job.gpus == 1],
        "2-4 cards": [life for life in anytime if 1 < life.job.gpus < 8],
        "8 cards": [life for life in anytime if life.job.gpus >= 8],
        "all": anytime,
    }


def _fairness(world: World, policy: Policy) -> float:
    """Of hours in which at least two teams waited: what each got, against its part by shares.

    Only teams that wait have a claim to more; a team is entitled to its share of the whole fleet.
    """
    got: dict[str, float] = {}
    due: dict[str, float] = {}
    whole = sum(team.share for team in policy.teams)
    for sample in world.samples:
        if len(sample.backlogged) < 2:
            continue
        for team in policy.teams:
            if team.name in sample.backlogged:
                got[team.name] = got.get(team.name, 0.0) + sample.held.get(team.name, 0)
                due[team.name] = due.get(team.name, 0.0) + CARDS * team.share / whole
    return jain([got[name] / due[name] for name in sorted(due)]) if due else math.nan


def _on_time(world: World) -> float:
    slots = {slot.id: slot for slot in world.slots}
    booked = [life for life in world.lives.values() if life.job.slot]
    timely = [
        life
        for life in booked
        if life.first_start is not None
        and life.first_start <= max(slots[life.job.slot].start, life.job.submitted) + ON_TIME
    ]
    return len(timely) / len(booked) if booked else math.nan
