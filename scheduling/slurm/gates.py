"""Windows, slots and spent budgets at a Slurm: who may not start now, and who has to leave. Pure.

`sbatch --begin` keeps a job until its window opens, once; one that comes back at noon would start
at noon. So whoever waits for a window that is closed is given its next opening as its beginning.
What a job says of its window stands in its comment, which is its user's: it concerns his job alone.
Who made way for a slot that has not begun may not start in front of it once more either.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling import windows
from gpuwarden.scheduling.slurm.notices import Why
from gpuwarden.scheduling.slurm.queues import is_waiting
from gpuwarden.scheduling.slurm.scripts import read_comment

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot

EARLY_SECONDS: Final = 1.0
"""Slurm's times are whole seconds."""


@dataclass(frozen=True, slots=True)
class Gates:
    """What is to be done.

    Attributes:
        begins: of a waiting job, what Slurm's commands call it, and the Unix time before which it
            may not start.
        leaves: running jobs that have to leave, and for what.
        words: number of a job that waits for a slot to begin -> why, as one sentence.
    """

    begins: tuple[tuple[str, float], ...] = ()
    leaves: tuple[tuple[ListedJob, Why], ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)


def gates(
    jobs: Sequence[ListedJob],
    policy: Policy,
    *,
    spent: Collection[str],
    now: float,
    slots: Mapping[str, Slot] = MappingProxyType({}),
) -> Gates:
    """Look at every job once.

    Args:
        jobs: all that the controller knows.
        policy: whose windows and budgets these are.
        spent: accounts of the teams whose running jobs have to leave because a budget is spent.
        now: Unix time.
        slots: number of a waiting job -> the slot for which it made way, and which lies ahead.
    """
    words: dict[str, str] = {}
    begins: list[tuple[str, float]] = []
    leaves: list[tuple[ListedJob, Why]] = []
    for job in jobs:
        comment = read_comment(job.job.comment)
        window = policy.window(comment.window) if comment and comment.window else None
        spans = () if window is None else window.openings(policy.timezone, now)
        closed = window is not None and windows.opening_at(spans, now) is None
        if is_waiting(job):
            following = windows.next_opening(spans, now) if closed else None
            slot = slots.get(job.number)
            starts = [span.begin for span in (following,) if span is not None]
            starts += [each.start for each in (slot,) if each is not None]
            # What waits for a job, a person or a later time is not moved forward by this.
            if starts and (job.eligible or 0) < max(starts) - EARLY_SECONDS:
                begins.append((job.target, max(starts)))
            if slot is not None:
                moment = f"{dt.datetime.fromtimestamp(slot.start, policy.zone):%a %Y-%m-%d %H:%M}"
                words[job.number] = (
                    f"It made way for slot {slot.id} of {slot.team}, and may start again from its "
                    f"beginning on: {moment}."
                )
        elif job.job.holds and "COMPLETING" not in job.job.states and job.gpus:
            if window is not None and closed and window.running == "leave":
                leaves.append((job, Why(Cause.WINDOW, window.name)))
            elif job.job.account in spent:
                leaves.append((job, Why(Cause.BUDGET, job.job.account)))
    return Gates(tuple(begins), tuple(leaves), words)
