"""Jobs of a simulated month, drawn from a seed; no trace is copied.

The shapes are those that the studies of large clusters report, the numbers are ours, for a smaller
fleet that trains YOLO models:

- durations over several orders of magnitude with a heavy tail: many jobs of minutes, most GPU time
  in few long ones; most jobs on one card, most GPU time not; a good part fails or is cancelled, the
  failures mostly early (Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN
  Training Workloads", USENIX ATC 2019, Microsoft's Philly; Hu et al., "Characterization and
  Prediction of Deep Learning Workloads in Large-Scale GPU Datacenters", SC 2021, at SenseTime);
- arrivals by the clock: few at night, a dip at noon, fewer at weekends (SenseTime; Weng et al.,
  "MLaaS in the Wild", USENIX NSDI 2022, Alibaba's PAI);
- few users and teams make most of the demand (all three).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.scheduling.fleets import BEGIN, CARDS, DAY, HOUR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.scheduling.slots import Slot

SIZES: Final = ((1, 0.70), (2, 0.13), (4, 0.10), (8, 0.07))
TEAMS: Final = (("vision", 0.35), ("robotics", 0.18), ("speech", 0.17), ("students", 0.30))
"""Of the demand. Their shares of the cards are 3, 2, 2 and 1 of 8: students ask for more."""
PRIORITIES: Final = (("high", 0.10), ("normal", 0.60), ("low", 0.30))
KINDS: Final = ((0.35, 6 * 60.0, 1.0), (0.50, 1.5 * HOUR, 1.1), (0.15, 9 * HOUR, 0.8))
"""Share, median in seconds, sigma of the logarithm: trials, trainings, long trainings."""
LONGEST: Final = 4 * DAY
SHORTEST: Final = 60.0
FAILING: Final = 0.17
CANCELLED: Final = 0.13
HOURLY: Final = (
    *(0.35, 0.25, 0.20, 0.20, 0.20, 0.25, 0.35, 0.60),
    *(1.00, 1.50, 1.75, 1.60, 1.10, 1.35, 1.70, 1.75),
    *(1.65, 1.50, 1.20, 1.00, 0.90, 0.80, 0.65, 0.50),
)
"""How many jobs arrive in each hour of a working day, against the day's mean."""
WEEKEND: Final = 0.45
"""Of a working day's."""
EPOCH_MEDIAN: Final = 420.0
EPOCH_SIGMA: Final = 0.8
PREDICTION_SIGMA: Final = 0.3
UNPREDICTED: Final = 0.15
"""Share of jobs of which nobody can say how long they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training.

    Attributes:
        id: a number with a letter.
        team, priority: of the policy.
        gpus: cards of one host.
        submitted: Unix time.
        work: seconds that it trains in all, on its cards; less than planned if it fails.
        epoch: seconds of one epoch.
        predicted: seconds that it is expected to train in all; None: nobody can tell.
        window: of the policy, or None.
        slot: id of the booking that it is for, or empty.
        user: who submitted it; of a booking's jobs, who made the booking.
    """

    id: str
    team: str
    priority: str
    gpus: int
    submitted: float
    work: float
    epoch: float
    predicted: float | None
    window: str | None = None
    slot: str = ""
    user: str = "somebody"

    @property
    def gpu_seconds(self) -> float:
        """What it needs if nothing is lost."""
        return self.work * self.gpus


def jobs(seed: int, *, days: float, load: float, slots: Sequence[Slot] = ()) -> list[Job]:
    """All jobs, in the order of their submission.

    Args:
        seed: of everything that is drawn.
        days: that they arrive in.
        load: GPU time that they need, against all that there is in these days.
        slots: of bookings, which jobs of the team use.
    """
    # Nothing here is a secret: the same seed must give the same month.
    draw = random.Random(seed)  # noqa: S311
    booked = [
        _booked(draw, slot, f"b{number:03d}{card:02d}")
        for number, slot in enumerate(slots)
        for card in range(slot.gpus)
    ]
    wanted = load * CARDS * days * DAY - sum(job.gpu_seconds for job in booked)
    found: list[Job] = []
    while wanted > 0:
        job = _job(draw, len(found), _arrival(draw, days))
        found.append(job)
        wanted -= job.gpu_seconds
    return sorted([*found, *booked], key=lambda job: (job.submitted, job.id))


def _job(draw: random.Random, number: int, submitted: float) -> Job:
    _share, median, sigma = draw.choices(KINDS, [kind[0] for kind in KINDS])[0]
    planned = min(LONGEST, max(SHORTEST, median * math.exp(draw.gauss(0.0, sigma))))
    epoch = min(EPOCH_MEDIAN * math.exp(draw.gauss(0.0, EPOCH_SIGMA)), planned / 3)
    fate, work = draw.random(), planned
    if fate < FAILING:
        work = max(SHORTEST, planned * draw.random() ** 4)  # most of them in their first minutes
    elif fate < FAILING + CANCELLED:
        work = max(SHORTEST, planned * draw.random())
    predicted = planned * math.exp(draw.gauss(0.0, PREDICTION_SIGMA))
    known = draw.random() >= UNPREDICTED
    priority = _one_of(draw, PRIORITIES)
    nightly = priority == "low" and draw.random() < 0.5
    return Job(
        id=f"j{number:05d}",
        team=_one_of(draw, TEAMS),
        priority=priority,
        gpus=draw.choices([size for size, _share in SIZES], [share for _size, share in SIZES])[0],
        submitted=submitted,
        work=work,
        epoch=epoch,
        predicted=predicted if known else None,
        window="off-peak" if nightly else None,
    )


def _booked(draw: random.Random, slot: Slot, name: str) -> Job:
    """One of the people for whom a slot was booked: a card each, a little before it opens."""
    seconds = slot.end - slot.start
    work = seconds * draw.uniform(0.6, 0.9)
    return Job(
        id=name,
        team=slot.team,
        priority="normal",
        gpus=1,
        submitted=slot.start - draw.uniform(0.0, 600.0),
        work=work,
        epoch=300.0,
        predicted=work,
        slot=slot.id,
        user=slot.who,
    )


def _one_of(draw: random.Random, choices: Sequence[tuple[str, float]]) -> str:
    return draw.choices([name for name, _ in choices], [share for _, share in choices])[0]


def _arrival(draw: random.Random, days: float) -> float:
    """A moment, by the hours' intensities: drawn evenly, kept with their probability."""
    highest = max(HOURLY)
    while True:
        after = draw.uniform(0.0, days * DAY)
        weekend = int(after // DAY) % 7 >= 5
        rate = HOURLY[int(after % DAY // HOUR)] * (WEEKEND if weekend else 1.0)
        if draw.uniform(0.0, highest) < rate:
            return BEGIN + after
