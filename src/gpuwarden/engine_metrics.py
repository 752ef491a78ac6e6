"""The engine's part of the catalogue of metrics."""

from __future__ import annotations

from gpuwarden.metric_entries import Metric, MetricType, Source

_G, _C, _H = MetricType.GAUGE, MetricType.COUNTER, MetricType.HISTOGRAM


def _engine(name: str, kind: MetricType, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, kind, unit, labels, text, Source.ENGINE)


ENGINE_METRICS = (
    _engine(
        "gpuwarden_expected_throughput_images_per_second",
        _G,
        "",
        "Throughput expected of the job, by its profile or else by estimate; for graphs.",
        "job_id",
    ),
    _engine(
        "gpuwarden_expected_gpu_memory_bytes",
        _G,
        "bytes",
        "GPU memory per card expected of the job, by its profile or else by estimate; for graphs.",
        "job_id",
    ),
    _engine(
        "gpuwarden_expected_gpu_utilization_ratio",
        _G,
        "ratio",
        "GPU utilization that the profile expects of the job; for graphs.",
        "job_id",
    ),
    _engine("gpuwarden_user_info", _G, "", "User and team of the directory; 1.", "user", "team"),
    _engine(
        "gpuwarden_violation_active",
        _G,
        "",
        "An open case: a rule whose `for` is met; 1. level is the highest stage reached.",
        "rule",
        "level",
        "job_id",
    ),
    _engine(
        "gpuwarden_violation_cause",
        _G,
        "",
        "Probable cause of an open case; 1.",
        "rule",
        "job_id",
        "cause",
    ),
    _engine(
        "gpuwarden_violation_detected_timestamp_seconds",
        _G,
        "seconds",
        "When the `for` of an open case was met.",
        "rule",
        "job_id",
    ),
    _engine(
        "gpuwarden_violation_due_timestamp_seconds",
        _G,
        "seconds",
        "When the next thing may be done to the job of an open case at the earliest, if nothing "
        "changes; it moves on while a notice is not proven. Absent where the rule's mode forbids "
        "it, or nothing is left to do.",
        "rule",
        "job_id",
        "action",
    ),
    _engine(
        "gpuwarden_protected",
        _G,
        "",
        "A job that a rule would have judged, but the whitelist, a keep or a guard protects; 1.",
        "rule",
        "job_id",
        "reason",
    ),
    _engine(
        "gpuwarden_decisions_total",
        _C,
        "",
        "Decisions by rule, action, mode and outcome.",
        "rule",
        "action",
        "mode",
        "outcome",
    ),
    _engine(
        "gpuwarden_decision_wait_seconds",
        _H,
        "seconds",
        "From the detection of a case to the decision that was carried out on its job; of "
        "decisions that have their result, without those that lapsed, were refused or withdrawn.",
        "rule",
        "action",
    ),
    _engine(
        "gpuwarden_keeps_total",
        _C,
        "",
        "Keeps granted, by the role of who asked: owner or operator.",
        "rule",
        "role",
    ),
    _engine(
        "gpuwarden_objections_total",
        _C,
        "",
        "Owners' appeals against what a rule announced or did, and regretted ends, each once.",
        "rule",
        "kind",
    ),
    _engine(
        "gpuwarden_unknown_total",
        _C,
        "",
        "Verdicts that could not be reached, by rule and reason.",
        "rule",
        "reason",
    ),
    _engine(
        "gpuwarden_notices_total",
        _C,
        "",
        "Attempts of the last hop by channel and outcome.",
        "channel",
        "outcome",
    ),
    _engine(
        "gpuwarden_receipt_timestamp_seconds",
        _G,
        "seconds",
        "When a step was seen of what a job was asked, or ended, for; of the last day.",
        "job_id",
        "step",
    ),
    _engine(
        "gpuwarden_leaves_total",
        _C,
        "",
        "Jobs that a scheduler had asked to leave, by cause and what became of it.",
        "cause",
        "outcome",
    ),
    _engine(
        "gpuwarden_leave_refusals_total",
        _C,
        "",
        "Times that a scheduler was refused a leave, by the first reason; since the engine began.",
        "reason",
    ),
    _engine(
        "gpuwarden_leaves_open",
        _G,
        "",
        "Jobs that a scheduler has asked to leave, and of which it is not known what they do.",
    ),
    _engine(
        "gpuwarden_price_per_gpu_hour",
        _G,
        "",
        "Price of an hour of a card now, by the model that label `name` of gpu_info gives (of a "
        "MIG instance, with its profile); of models that engine.yaml names and of those seen.",
        "model",
        "currency",
    ),
    _engine(
        "gpuwarden_gpu_share_ratio",
        _G,
        "ratio",
        "What share of its card a MIG instance is, by its model; of those seen.",
        "model",
    ),
    _engine(
        "gpuwarden_budget_gpu_hours", _G, "", "Budget of a team in GPU hours.", "team", "period"
    ),
    _engine(
        "gpuwarden_budget_limit",
        _G,
        "",
        "Budget of a team for a period of the calendar (budgets of engine.yaml), in GPU-hours or "
        "in a currency.",
        "team",
        "period",
        "unit",
        "kind",
    ),
    _engine(
        "gpuwarden_budget_used",
        _G,
        "",
        "Used of it since the period began; absent while it is not known.",
        "team",
        "period",
        "unit",
    ),
    _engine(
        "gpuwarden_budget_forecast",
        _G,
        "",
        "What will be used by the period's end at the pace of late: expected, and between low and "
        "high four times in five.",
        "team",
        "period",
        "unit",
        "bound",
    ),
    _engine(
        "gpuwarden_budget_used_ratio",
        _G,
        "ratio",
        "Used share of the fullest budget of a team for a period, of one kind (hard or soft).",
        "team",
        "period",
        "kind",
    ),
    _engine(
        "gpuwarden_team_gpu_seconds_total",
        _C,
        "seconds",
        "GPU time that a team's jobs held, as the engine saw it; a shared card is shared out.",
        "team",
    ),
    _engine(
        "gpuwarden_reclaimed_gpu_seconds_total",
        _C,
        "seconds",
        "GPU time that other users held the cards of an ended job in the day after its end, by "
        "whom they were taken from; a shared card is shared out.",
        "job_id",
        "user",
        "team",
        "rule",
    ),
    _engine("gpuwarden_booking_gpus", _G, "", "GPUs booked by a team now.", "team"),
    _engine(
        "gpuwarden_engine_nodes",
        _G,
        "",
        "Nodes: expected, lit (a complete, current snapshot), registered (heard of late), silent "
        "(registered, not heard, and expected until forgotten).",
        "state",
    ),
    _engine(
        "gpuwarden_engine_tick_timestamp_seconds", _G, "seconds", "When the last tick completed."
    ),
    _engine("gpuwarden_engine_tick_seconds", _G, "seconds", "How long the last tick took."),
    _engine("gpuwarden_engine_ticks_total", _C, "", "Ticks by outcome.", "outcome"),
    _engine(
        "gpuwarden_engine_failed_ticks",
        _G,
        "",
        "How often in a row Prometheus was asked and gave no facts; from 3 on it is asked less "
        "often, at least once a minute.",
    ),
    _engine("gpuwarden_engine_enforcement_halted", _G, "", "1 while no job is ended.", "reason"),
    _engine(
        "gpuwarden_engine_enforcement_paused", _G, "", "1 while a person has paused every end."
    ),
    _engine(
        "gpuwarden_engine_prometheus",
        _G,
        "",
        "Servers of facts by what they are to the engine: used, spare (a replica that could be), "
        "failed when last asked; 1.",
        "server",
        "state",
    ),
    _engine(
        "gpuwarden_ledger_size_bytes",
        _G,
        "bytes",
        "Of the ledger's file, used and free, and of the log beside it (wal).",
        "part",
    ),
    _engine("gpuwarden_engine_start_timestamp_seconds", _G, "seconds", "When the engine started."),
    _engine(
        "gpuwarden_engine_alertmanager_up",
        _G,
        "",
        "1 if this Alertmanager took everything that it was last sent.",
        "alertmanager",
    ),
    _engine(
        "gpuwarden_engine_clock_skew_seconds",
        _G,
        "seconds",
        "Largest distance of a clock from the engine's, as last seen: fleet (Prometheus and the "
        "nodes) or alertmanager.",
        "peer",
    ),
    _engine(
        "gpuwarden_engine_notices_undeliverable",
        _G,
        "",
        "Cases that wait for ever, since their owner cannot be told.",
    ),
    _engine(
        "gpuwarden_engine_unproven_cards",
        _G,
        "",
        "Cards that a reclaim, running or not proven, may still hold: no other job there is ended.",
    ),
    _engine(
        "gpuwarden_engine_oldest_open_decision_timestamp_seconds",
        _G,
        "seconds",
        "When the oldest decision was made of those whose result is not known.",
    ),
    _engine(
        "gpuwarden_verdicts_total",
        _C,
        "",
        "Verdicts by rule and truth: yes, no or unknown.",
        "rule",
        "truth",
    ),
    _engine("gpuwarden_rules_reload_success", _G, "", "1 if the last reload was accepted."),
    _engine("gpuwarden_rules_info", _G, "", "Hash of the rule set in force; 1.", "hash"),
    _engine("gpuwarden_engine_build_info", _G, "", "Version of the engine; 1.", "version"),
    _engine(
        "gpuwarden_drill_last_success_timestamp_seconds",
        _G,
        "seconds",
        "When a drill on the node was last proven.",
        "node",
    ),
    _engine(
        "gpuwarden_drill_due_timestamp_seconds",
        _G,
        "seconds",
        "By when the next drill on the node must have been proven, by its schedule.",
        "node",
    ),
    _engine(
        "gpuwarden_drill_step_seconds",
        _G,
        "seconds",
        "How long each step of the node's last drill took, or has taken until now.",
        "node",
        "step",
    ),
    _engine(
        "gpuwarden_drill_step_budget_seconds",
        _G,
        "seconds",
        "How long the step of a drill may take.",
        "step",
    ),
    _engine(
        "gpuwarden_drill_result",
        _G,
        "",
        "How the node's last drill ended: passed, slow, failed, gone, silent or stuck; 1.",
        "node",
        "result",
    ),
    _engine(
        "gpuwarden_rule_held_back",
        _G,
        "",
        "A rule on trial that has fallen back to warn, until an admin resumes it; 1. reason is "
        "appeals or regrets.",
        "rule",
        "reason",
    ),
    _engine(
        "gpuwarden_canary_share_ratio",
        _G,
        "ratio",
        "Share of the owners whose jobs a rule on trial may end.",
        "rule",
    ),
    _engine(
        "gpuwarden_canary_objections",
        _G,
        "",
        "Owners' appeals and regretted ends that count against a rule on trial now.",
        "rule",
        "kind",
    ),
    _engine(
        "gpuwarden_jobs_came_back_total",
        _C,
        "",
        "Jobs found due again after their work was ended and had been started again by itself.",
        "rule",
    ),
    _engine("gpu_idle_detected_total", _C, "", "Jobs found holding GPUs idle."),
    _engine("gpu_released_success_total", _C, "", "Reclaims proven by NVML."),
    _engine("gpu_release_failed_total", _C, "", "Reclaims that could not be proven."),
    _engine(
        "gpu_memory_freed_bytes_total", _C, "bytes", "Memory of ended processes, as NVML had it."
    ),
)
"""Of the engine's own page, in the order of exposition."""
