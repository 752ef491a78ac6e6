"""What the scheduler of the small fleet would have exported: queue, receipts, budgets, bookings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.grafana.histories import HOUR, History

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.grafana.fleets import Value

LABELS = {"job": "gpuwarden-scheduler", "instance": "scheduler:9839"}
WAIT_BOUNDS = (60, 300, 900, 1800, 3600, 14_400, 43_200, 86_400, 604_800)
STEP_BOUNDS = (1, 5, 15, 60, 300, 900, 1800, 3600, 14_400)
JOBS = {
    ("vision", "low", "running"): 3,
    ("vision", "low", "leaving"): 1,
    ("vision", "low", "pending"): 4,
    ("robotics", "high", "pending"): 2,
    ("robotics", "low", "held"): 1,
}
STARTED = {("vision", "low"): 48, ("robotics", "high"): 12}
"""Team and priority -> jobs that first started in the window."""
STEPS = {"acknowledged": 3, "saved": 400, "left": 6, "freed": 2, "started": 4}
"""Step of a preemption -> seconds that it took."""
PREEMPTIONS = {
    ("priority", "done"): 10,
    ("booking", "done"): 4,
    ("priority", "withdrawn"): 1,
    ("priority", "overdue"): 1,
}
BUDGETS = {
    ("vision", "month", "hard"): (5000, 3120, 5400),
    ("robotics", "day", "soft"): (300, 310, 640),
}


@dataclass(frozen=True)
class Scheduler:
    """What there is to export.

    Attributes:
        idle: whether nobody waits and nothing was ever asked to leave.
        dies: whether it dies before the window's end.
    """

    idle: bool = False
    dies: bool = False

    def write(self, history: History) -> None:
        """Add every series of the scheduler."""
        window = history.window
        end = window.dies if self.dies else math.inf

        def add(name: str, value: Value, /, **labels: str) -> None:
            history.add(f"gpuwarden_scheduler_{name}", LABELS | labels, value, until=end)

        history.add("up", LABELS, lambda time: 0 if self.dies and time >= window.dies else 1)
        add("build_info", 1, version="0.1.0", engine="slurm")
        add("engine_seen_timestamp_seconds", lambda time: time - 3)
        add("tick_timestamp_seconds", lambda time: time - 3)
        add("tick_seconds", 0.2)
        add("reload_success", 1)
        add("policy_info", lambda time: 1 if time < window.middle else None, hash="aaaa")
        add("policy_info", lambda time: 1 if time >= window.middle else None, hash="bbbb")
        for outcome, every in (("completed", 5), ("unseen", 3600)):
            add("ticks_total", lambda time, n=every: (time - window.start) // n, outcome=outcome)
        add("preemptions_open", 0 if self.idle else 1)
        add("requeue_loops", 0 if self.idle else 1)
        add("quota_leak_gpus", 0, engine="slurm")
        if not self.idle:
            _queue(add, history)
            _preemptions(add, history)
            _limits(add)


def _grown(history: History, count: float) -> Callable[[int], float]:
    """Counted evenly over the window, the last of it an hour before the middle of its last hour."""
    begin, over = history.window.start, history.window.middle
    return lambda time: math.floor(count * min(1.0, (time - begin) / (over - begin)))


def _histogram(
    add: Callable[..., None],
    history: History,
    name: str,
    *,
    bounds: tuple[int, ...],
    seconds: float,
    count: int,
    **labels: str,
) -> None:
    for bound in bounds:
        within = count if seconds <= bound else 0
        add(f"{name}_bucket", _grown(history, within), **labels, le=f"{bound}.0")
    add(f"{name}_bucket", _grown(history, count), **labels, le="+Inf")
    add(f"{name}_sum", _grown(history, count * seconds), **labels)
    add(f"{name}_count", _grown(history, count), **labels)


def _queue(add: Callable[..., None], history: History) -> None:
    gpus: dict[tuple[str, str], int] = {}
    for (team, priority, state), count in JOBS.items():
        add("jobs", count, team=team, priority=priority, state=state)
        gpus[team, state] = gpus.get((team, state), 0) + 2 * count
    for (team, state), count in gpus.items():
        add("gpus", count, team=team, state=state)
    add("oldest_wait_seconds", 5 * HOUR, team="vision", priority="low")
    add("oldest_wait_seconds", 600, team="robotics", priority="high")
    for (team, priority), count in STARTED.items():
        seconds = 700.0 if priority == "high" else 5000.0
        _histogram(
            add,
            history,
            "wait_seconds",
            bounds=WAIT_BOUNDS,
            seconds=seconds,
            count=count,
            team=team,
            priority=priority,
        )
    add("requeues_total", _grown(history, 14), team="vision")


def _preemptions(add: Callable[..., None], history: History) -> None:
    for (cause, outcome), count in PREEMPTIONS.items():
        add("preemptions_total", _grown(history, count), cause=cause, outcome=outcome)
    add("lost_gpu_seconds_total", _grown(history, 1800), cause="priority")
    for step, seconds in STEPS.items():
        _histogram(
            add,
            history,
            "receipt_step_seconds",
            bounds=STEP_BOUNDS,
            seconds=seconds,
            count=14,
            step=step,
        )
    middle = history.window.middle
    add(
        "victim_overdue",
        lambda time: 1 if time >= middle else None,
        entry="4711",
        run_id="coco-m-14",
    )
    add("problem", lambda time: 1 if time >= middle else None, code="requeue_loop")


def _limits(add: Callable[..., None]) -> None:
    for (team, per, kind), (limit, used, forecast) in BUDGETS.items():
        add("budget_limit_gpu_hours", limit, team=team, per=per, kind=kind)
        add("budget_used_gpu_hours", used, team=team, per=per)
        add("budget_forecast_gpu_hours", forecast, team=team, per=per)
    add("booked_gpus", 8, team="robotics")
    add("booked_used_gpus", 5, team="robotics")
    for state, count in (("booked", 6), ("active", 1), ("released", 2), ("over", 9)):
        add("booking_slots", count, state=state)
