"""The scheduler's part of the catalogue of metrics: one daemon, one engine."""

from __future__ import annotations

from gpuwarden.metric_entries import Metric, MetricType, Source

_G, _C, _H = MetricType.GAUGE, MetricType.COUNTER, MetricType.HISTOGRAM


def _scheduler(name: str, kind: MetricType, unit: str, text: str, *labels: str) -> Metric:
    return Metric(f"gpuwarden_scheduler_{name}", kind, unit, labels, text, Source.SCHEDULER)


SCHEDULER_METRICS = (
    _scheduler(
        "build_info", _G, "", "Version of the scheduler, and its engine; 1.", "version", "engine"
    ),
    _scheduler("jobs", _G, "", "Jobs of the queue.", "team", "priority", "state"),
    _scheduler("gpus", _G, "", "Cards that jobs ask for, or hold.", "team", "state"),
    _scheduler(
        "oldest_wait_seconds",
        _G,
        "seconds",
        "How long the pending job that waits longest has waited; absent where none waits.",
        "team",
        "priority",
    ),
    _scheduler(
        "wait_seconds",
        _H,
        "seconds",
        "From the submission of a job to its first start.",
        "team",
        "priority",
    ),
    _scheduler("requeues_total", _C, "", "Times that jobs came back to the queue.", "team"),
    _scheduler(
        "requeue_loops", _G, "", "Jobs that are held since they came back without a new epoch."
    ),
    _scheduler(
        "preemptions_total",
        _C,
        "",
        "Jobs that were asked to leave, by what became of it; outcome open is left out.",
        "cause",
        "outcome",
    ),
    _scheduler("preemptions_open", _G, "", "Jobs that were asked to leave, and are on their way."),
    _scheduler(
        "receipt_step_seconds",
        _H,
        "seconds",
        "From the step of a preemption that was seen before to this one.",
        "step",
    ),
    _scheduler(
        "lost_gpu_seconds_total",
        _C,
        "seconds",
        "GPU time of work that preemptions have lost, where that is known.",
        "cause",
    ),
    _scheduler(
        "victim_overdue",
        _G,
        "",
        "A job that was asked to leave, is past its deadline, and still there; 1.",
        "entry",
        "run_id",
    ),
    _scheduler(
        "budget_used_gpu_hours",
        _G,
        "",
        "GPU-hours that a team used in the period that runs.",
        "team",
        "per",
    ),
    _scheduler("budget_limit_gpu_hours", _G, "", "GPU-hours of a budget.", "team", "per", "kind"),
    _scheduler(
        "budget_forecast_gpu_hours",
        _G,
        "",
        "GPU-hours that a team will have used at the period's end, if it goes on as in the last "
        "weeks; absent below a week of history.",
        "team",
        "per",
    ),
    _scheduler("booked_gpus", _G, "", "Cards of slots whose time has come.", "team"),
    _scheduler("booked_used_gpus", _G, "", "Of these, cards that jobs of the team hold.", "team"),
    _scheduler(
        "booking_slots", _G, "", "Slots of the last week and of those ahead, by state.", "state"
    ),
    _scheduler(
        "quota_leak_gpus",
        _G,
        "",
        "Cards that the engine counts as taken and no job holds, for longer than a job takes to "
        "leave.",
        "engine",
    ),
    _scheduler("problem", _G, "", "Something that an operator should know; 1.", "code"),
    _scheduler(
        "engine_seen_timestamp_seconds", _G, "seconds", "When the engine was last read in whole."
    ),
    _scheduler("tick_timestamp_seconds", _G, "seconds", "When the last tick began."),
    _scheduler("tick_seconds", _G, "seconds", "How long the last tick took."),
    _scheduler(
        "ticks_total",
        _C,
        "",
        "Ticks: completed, unseen (the engine did not answer) or failed.",
        "outcome",
    ),
    _scheduler("policy_info", _G, "", "Hash of the policy that is in force; 1.", "hash"),
    _scheduler(
        "reload_success", _G, "", "Whether the policy file, as last read, is the one in force."
    ),
)
