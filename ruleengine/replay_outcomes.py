"""What became of the jobs that a replay would have ended: the rest of their lives, from history.

Whether ending a job would have been regretted needs no labels: a job that was at work again later
should not have been ended.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

import numpy as np

from gpuwarden import durations
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.replay_arms import ACTIVE_ABOVE
from gpuwarden.ruleengine.replay_columns import Ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuwarden.ruleengine.replay_columns import HistoryClient
    from gpuwarden.ruleengine.replay_incidents import End, Incident

ACTIVE_SECONDS: Final = 300.0
"""A card that is busy for so long is at work again; shorter is no proof."""
JOBS_AT_ONCE: Final = 50
LOOK_EVERY_SECONDS: Final = 60.0
"""How finely the time after an end is looked at."""


async def follow_up(
    history: HistoryClient, incidents: Sequence[Incident], interval: float, horizon: float
) -> None:
    """Fill in what became of the jobs that would have been ended.

    Args:
        history: the server.
        incidents: those with an end are completed.
        interval: between two scrapes, in seconds.
        horizon: seconds after an end that are looked at.

    Raises:
        ServiceUnavailable: the server fails.
    """
    ended = sorted(
        ((item.subject, item.end) for item in incidents if item.end is not None),
        key=lambda pair: pair[1].at,
    )
    if not ended:
        return
    now = await history.now()
    for begin in range(0, len(ended), JOBS_AT_ONCE):
        # Those at once are near one another in time.
        part = ended[begin : begin + JOBS_AT_ONCE]
        first, last = part[0][1].at, min(part[-1][1].at + horizon, now)
        for _, item in part:
            item.seen_until = max(item.at, min(item.at + horizon, now))
        if last > first:
            step = max(LOOK_EVERY_SECONDS, interval)
            ticks = Ticks(first, step, int((last - first) // step) + 1)
            await _fill(history, part, ticks, interval)


async def _fill(
    history: HistoryClient, part: Sequence[tuple[str, End]], ticks: Ticks, interval: float
) -> None:
    chosen = _matcher([job for job, _ in part])
    fresh = f"{signals.FRESH_SCRAPES * interval:g}"
    window = max(60.0, 4 * interval)
    samples = max(1, int(signals.MIN_COVERAGE * ACTIVE_SECONDS / interval))
    use, cards = f"gpu_job_utilization_ratio{chosen}", f"gpu_job_holds_gpu{chosen}"
    count = f"yolo_steps_total{chosen}[{durations.render(window)}]"
    busy = f"min_over_time({use}[5m]) and count_over_time({use}[5m]) >= {samples}"
    busy, steps, held = (
        f"max by (job_id) ({expression})"
        for expression in (
            busy,
            f"increase({count})",
            f"{cards} and timestamp({cards}) >= time() - {fresh}",
        )
    )
    at_work = await _rows(history, busy, ticks)
    advanced = await _rows(history, steps, ticks)
    there = await _rows(history, held, ticks)
    times = ticks.times
    for job, end in part:
        until = end.seen_until or end.at
        ahead = (times > end.at) & (times <= until)
        seen = times[ahead & ~np.isnan(there.get(job, _nothing(times)))]
        last = float(seen[-1]) if len(seen) else end.at
        if last + 2 * ticks.step < until:
            end.over = last + ticks.step if len(seen) else end.at
        found = [
            (float(hits[0]), word)
            for word, rows, limit, back in (
                ("utilization", at_work, ACTIVE_ABOVE, ACTIVE_SECONDS),
                ("steps", advanced, 0.0, window),
            )
            if len(
                hits := times[
                    (times - back >= end.at) & ahead & (rows.get(job, _nothing(times)) > limit)
                ]
            )
        ]
        if found:
            end.active_again, end.active_by = min(found)


def _nothing(times: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.full(len(times), np.nan)


async def _rows(history: HistoryClient, query: str, ticks: Ticks) -> dict[str, NDArray[np.float64]]:
    """job_id -> values."""
    found = await history.columns(query, ticks)
    return {
        labels.get("job_id", ""): own
        for labels, own in zip(found.labels, found.values, strict=True)
    }


def _matcher(jobs: Sequence[str]) -> str:
    """A selector's matcher for these jobs; their ids are not trusted to be harmless."""
    return f"{{job_id=~{json.dumps('|'.join(re.escape(job) for job in jobs))}}}"
