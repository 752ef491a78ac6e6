"""What is seen of a leave, step by step: by the agents, and by what its trainer has told.

A step that was not seen is absent. What a trainer says of itself is shown, and proves nothing: that
a job has left, and that its memory is free, only its node can say.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpuwarden.job_files import RequestState
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.agent_api import ActionReport
    from gpuwarden.ruleengine.leave_records import Leave
    from gpuwarden.ruleengine.prometheus import Source

WINDOW = "15m"
"""A trainer that has left is still told of for this long."""
ANSWERED = "yolo_leave_request_timestamp_seconds"
SAVED = "yolo_checkpoint_durable_timestamp_seconds"
_OF_AGENTS = {"leave_requested": "notified", "exited": "left", "proven": "freed"}

Told = dict[tuple[str, str], float]
"""(job_id, state of a request or `durable`) -> Unix time, by the trainer's clock."""


def agents_steps(report: ActionReport) -> dict[str, float]:
    """Steps that agents have seen, from the report of all nodes together."""
    return {_OF_AGENTS[name]: at for name, at in report.steps.items() if name in _OF_AGENTS}


def trainers_steps(
    leave: Leave, steps: Mapping[str, float], told: Told, now: float
) -> dict[str, float]:
    """Steps that a trainer has told, as far as they fit what is known; what was told stays.

    Args:
        leave: whose trainer.
        steps: all that is known of the leave.
        told: by the jobs of all leaves.
        now: Unix time.
    """
    found = dict(leave.receipts)
    begun, latest = leave.created_at - MAX_SKEW_SECONDS, now + MAX_SKEW_SECONDS
    answers = {
        state: at
        for state in RequestState
        if (at := told.get((leave.job_id, state.value))) is not None and begun <= at <= latest
    }
    if answers:
        # A trainer that is saving has read it before; when, only its first word tells.
        found["acknowledged"] = min(answers.values())
    saved = told.get((leave.job_id, "durable"))
    # States that it saved by its own habit since the notice are none of the leave's.
    since = answers.get(RequestState.SAVING, answers.get(RequestState.LEAVING))
    over = steps.get("left", latest) + MAX_SKEW_SECONDS
    if saved is not None and since is not None and since <= saved <= over:
        found["saved"] = saved
    return found


async def told_by_trainers(sources: Sequence[Source], jobs: Sequence[str], now: float) -> Told:
    """What the trainers of jobs have told lately, by all servers.

    Args:
        sources: a server of each shard of Prometheus.
        jobs: their ids.
        now: Unix time.

    Raises:
        GpuwardenError: a server does not say.
    """
    chosen = "|".join(re.escape(job).replace("\\", "\\\\").replace('"', '\\"') for job in jobs)
    found: Told = {}
    for metric in (ANSWERED, SAVED):
        query = f'last_over_time({metric}{{job_id=~"{chosen}"}}[{WINDOW}])'
        for source in sources:
            for row in await source.instant(query, now):
                state = row.labels.get("state", "durable")
                key = (row.labels.get("job_id", ""), state)
                found[key] = max(found.get(key, row.value), row.value)
    return found
